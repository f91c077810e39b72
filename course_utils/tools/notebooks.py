"""Finding, reading and writing the course's notebooks: what the maintainers' commands share.

Everything hangs from one *root*, the folder of the clone: ``root/notebooks``, ``root/course_utils``, ``root/data``.
A *chapter* is one notebook, named by the start of its file name: ``02`` (or ``2``) is ``02_kv_cache.ipynb``, ``02a``
its first deep dive.
"""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
STAMP = "course_render"  # in a rendered notebook's metadata
COURSE_MIME = "application/vnd.llm-course+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
FILE_NAME = re.compile(r"(?P<chapter>\d\d)(?P<letter>[a-z]?)_\w+")


class CourseError(Exception):
    """An error that a command foresees: its text is for the reader, its exit status for the shell."""

    exit_status = 1


class UsageError(CourseError):
    """The command was asked for something that does not exist."""

    exit_status = 2


@dataclass(frozen=True)
class Chapter:
    """One notebook file. ``key`` is what the command line calls it: ``02`` or, for a deep dive, ``02a``."""

    path: Path
    key: str

    @property
    def is_deep_dive(self) -> bool:
        return not self.key.isdigit()


# --- finding -----------------------------------------------------------------------------------------------------


def find(root: Path = ROOT) -> list[Chapter]:
    """All notebooks of the course, each main line followed by its deep dives.

    Raises :class:`CourseError` where there are none: a clone without notebooks is no clone.
    """
    folder = Path(root) / "notebooks"
    paths = [*folder.glob("*.ipynb"), *folder.glob("deep_dives/*.ipynb")]
    chapters = [Chapter(path, key_of(path)) for path in paths]
    if not chapters:
        raise CourseError(
            f"no notebooks in {folder}: the course runs from a clone; clone the repository again or pull the branch"
        )
    return sorted(chapters, key=lambda chapter: chapter.key)


def key_of(path: Path) -> str:
    """``02`` for ``02_kv_cache.ipynb``, ``02a`` for ``02a_graphs.ipynb``; else the whole stem."""
    match = FILE_NAME.fullmatch(path.stem)
    return match["chapter"] + match["letter"] if match else path.stem


def select(names: list[str], root: Path = ROOT, deep_dives: bool = False) -> list[Chapter]:
    """The chapters that ``names`` mean, in the course's order; no names mean all.

    A name is a key (``02``, ``2``, ``02a``), a file's stem or its path. ``deep_dives`` adds those that belong to a
    chosen main line. Raises :class:`UsageError` that lists the known chapters for any other name.
    """
    known = find(root)
    wanted = {_lookup(name, known).key for name in names} or {c.key for c in known if not c.is_deep_dive}
    if not names and not wanted:  # only deep dives in the folder
        wanted = {c.key for c in known}
    if deep_dives:
        wanted |= {c.key for c in known if c.is_deep_dive and c.key[:-1] in wanted}
    return [chapter for chapter in known if chapter.key in wanted]


def _lookup(name: str, known: list[Chapter]) -> Chapter:
    stem = Path(name).stem if name.endswith(".ipynb") else name
    short = stem.lower().zfill(len(stem) + 1) if re.fullmatch(r"\d[a-z]?", stem.lower()) else stem.lower()
    for chapter in known:
        if short in (chapter.key, chapter.path.stem.lower()):
            return chapter
    listed = ", ".join(f"{chapter.key} ({chapter.path.stem})" for chapter in known)
    raise UsageError(f"unknown chapter {name!r}; known: {listed}")


def pretty(path: Path, root: Path = ROOT) -> str:
    """The path as a reader types it: relative to the clone, or to the current folder, where it lies inside."""
    path = Path(path).resolve()
    for base in (Path(root).resolve(), Path.cwd()):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return str(path)


# --- reading and writing -----------------------------------------------------------------------------------------


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook as it is on disk, unrepaired, with joined lines. Raises :class:`CourseError` when it is no notebook."""
    try:
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
        node = nbformat.from_dict(nb)
        for cell in node.cells:
            _join_lines(cell)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CourseError(
            f"{path} is not a Jupyter notebook ({error}); open and save it in JupyterLab"
        ) from None
    return node


def _join_lines(cell) -> None:
    """Undo the split into lines that the file format allows for any text."""
    cell.source = "".join(cell.source)
    cell.setdefault("metadata", nbformat.NotebookNode())
    for output in cell.get("outputs", []):
        if "text" in output:
            output.text = "".join(output.text)
        for mime, value in output.get("data", {}).items():
            if isinstance(value, list) and not mime.endswith("json"):
                output.data[mime] = "".join(value)


def write(nb: nbformat.NotebookNode, path: Path) -> None:
    """Write the notebook as Jupyter does, whole or not at all."""
    write_text(path, nbformat.writes(nb).rstrip("\n") + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with Unix line ends through a temporary file and a rename, so that no half file is ever seen."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes private files; a committed notebook is as readable as its neighbours.
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# --- looking into a notebook -------------------------------------------------------------------------------------


def tags(cell) -> list[str]:
    """The cell's tags."""
    return list(cell.metadata.get("tags", []))


def is_code(cell) -> bool:
    return cell.cell_type == "code"


def code_cells(nb) -> list:
    """The code cells that hold anything, in order; the one that papermill injects is not the author's."""
    return [c for c in nb.cells if is_code(c) and c.source.strip() and "injected-parameters" not in tags(c)]


def where(nb, index: int) -> str:
    """Where cell ``index`` (of all cells, from 0) is, in words: ``code cell 7 `cache = KVCache(config)` ``."""
    cell = nb.cells[index]
    kind = "code" if is_code(cell) else "text"
    number = sum(is_code(other) == is_code(cell) for other in nb.cells[: index + 1] if _is_authors(other))
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "")
    return f"{kind} cell {number} `{textwrap.shorten(first, 50, placeholder=' …')}`"


def _is_authors(cell) -> bool:
    return "injected-parameters" not in tags(cell)


def course(nb) -> dict:
    """The notebook's own account: ``{"chapter", "kind", "module", "title"}``; empty where it gives none."""
    return dict(nb.metadata.get("course", {}))


def parse(source: str) -> ast.Module:
    """The cell's syntax tree, its magics (``%…``, ``!…``) blanked. Raises SyntaxError for anything else that is not Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        lines = source.splitlines()
        if lines and lines[0].startswith("%%"):
            lines[0] = ""
        kept = [
            "" if line.startswith(("%", "!")) else re.sub(r"^(\s+)[%!].*", r"\1pass", line) for line in lines
        ]
        return ast.parse("\n".join(kept))


def parameters(nb, name: str = "the notebook") -> dict[str, object]:
    """Name and default of every parameter: the assignments of the one cell tagged ``parameters``.

    Raises :class:`CourseError` when the tag is missing or given twice (papermill would inject values where the
    notebook's own assignment overwrites them, or warn only), or when the cell does more than assign literals.
    """
    cells = [cell for cell in nb.cells if is_code(cell) and "parameters" in tags(cell)]
    if len(cells) != 1:
        raise CourseError(
            f"{name}: {len(cells)} cells are tagged 'parameters', expected exactly one; "
            "tag the cell that holds `quick = False`"
        )
    found = {}
    try:
        for statement in ast.parse(cells[0].source).body:
            found.update(assigned_literals(statement))
    except (SyntaxError, ValueError) as error:
        raise CourseError(
            f"{name}: the parameters cell may only assign literals, such as `quick = False` ({error})"
        ) from None
    return found


def assigned_literals(statement: ast.stmt) -> dict[str, object]:
    """``{name: value}`` of an assignment of a literal to names. Raises ValueError for any other statement."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        raise ValueError(f"line {statement.lineno} is not an assignment")
    if not all(isinstance(target, ast.Name) for target in targets):
        raise ValueError(f"line {statement.lineno} assigns to something that is not a plain name")
    try:
        value = ast.literal_eval(statement.value)
    except ValueError:
        raise ValueError(f"line {statement.lineno} assigns something that is not a literal") from None
    return {target.id: value for target in targets}


# --- cleaning ----------------------------------------------------------------------------------------------------


def clean(nb) -> None:
    """Take out, in place, what an execution leaves behind and a reader does not need.

    That is: widget state (it makes files huge and breaks viewers), widget views (they show an error without a running
    kernel; the static twin stands beside them), papermill's and the front end's notes of when a cell ran. Pieces of one
    stream that follow each other become one output.
    """
    for key in ("widgets", "papermill"):
        nb.metadata.pop(key, None)
    for cell in nb.cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            cell.metadata.pop("tags")
        if is_code(cell):
            cell.outputs = _joined([output for output in map(_without_widget, cell.outputs) if output])


def _without_widget(output):
    """The output without its widget view; None when nothing but the view's own text form would be left."""
    data = output.get("data", {})
    if WIDGET_MIME not in data:
        return output
    data.pop(WIDGET_MIME)
    return output if set(data) - {"text/plain"} else None


def _joined(outputs: list) -> list:
    """The outputs, neighbouring pieces of the same stream put together."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


# --- printing ----------------------------------------------------------------------------------------------------


def table(headers: list[str], rows: list[list[str]], widths: list[int]) -> str:
    """A plain-text table; a cell longer than its column's greatest width is wrapped."""
    columns = [
        min(
            width,
            max(len(str(line)) for row in [headers, *rows] for line in str(row[i]).splitlines() or [""]),
        )
        for i, width in enumerate(widths)
    ]
    lines = [_row(headers, columns), "  ".join("-" * width for width in columns)]
    wrapped = any(len(str(text)) > width for row in rows for text, width in zip(row, columns, strict=True))
    lines += [_row(row, columns) + ("\n" if wrapped else "") for row in rows]
    return "\n".join(lines).rstrip("\n")


def _row(texts: list[str], columns: list[int]) -> str:
    blocks = [
        [part for line in str(text).splitlines() or [""] for part in textwrap.wrap(line, width) or [""]]
        for text, width in zip(texts, columns, strict=True)
    ]
    height = max(map(len, blocks))
    padded = [block + [""] * (height - len(block)) for block in blocks]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, columns, strict=True)).rstrip()
        for line in zip(*padded, strict=True)
    )
