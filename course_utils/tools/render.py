"""``python -m course_utils render``: execute notebooks in full and keep the outputs in the committed files.

Outputs are committed so that the course can be read without running it. What says that they still belong to the code
is one hash in the notebook's metadata, ``course_render``; see :func:`content_hash` for what it covers.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from course_utils.tools import export, readme
from course_utils.tools.execute import CELL_TIMEOUT, NotebookFailed, Progress, execute, terminate_as_interrupt
from course_utils.tools.notebooks import (
    KERNELSPEC,
    ROOT,
    STAMP,
    Chapter,
    CourseError,
    clean,
    code_cells,
    is_code,
    parameters,
    pretty,
    read,
    select,
    tags,
    write,
)
from course_utils.tools.run import keep_failed

PACKAGES = ("torch", "numpy", "transformers", "matplotlib")


def main(argv: list[str], root: Path = ROOT) -> int:
    """Render the chapters that ``argv`` names (none: all, deep dives included). Returns 0.

    Raises :class:`CourseError` where a module does not equal its notebook (the export would make the new outputs
    stale at once) or a cell fails; the committed file of a failing notebook is left as it was.
    """
    parser = argparse.ArgumentParser(
        "python -m course_utils render", description="Execute in full, keep the outputs."
    )
    parser.add_argument(
        "chapters", nargs="*", metavar="CHAPTER", help="02, 02a, …; none: all, deep dives included"
    )
    parser.add_argument(
        "--cell-timeout", type=int, default=CELL_TIMEOUT, metavar="S", help="seconds a cell may take"
    )
    options = parser.parse_args(argv)
    chapters = select(options.chapters, root, deep_dives=not options.chapters)
    stale = export.differences(root)
    if stale:
        raise CourseError("export before you render (`make export`):\n" + "\n".join(stale))
    with terminate_as_interrupt():
        for chapter in chapters:
            render(chapter, root, options.cell_timeout)
            print(f"{pretty(chapter.path, root)}  rendered; next: python -m course_utils check")
    readme.update(root)
    return 0


def render(chapter: Chapter, root: Path = ROOT, cell_timeout: int = CELL_TIMEOUT) -> None:
    """Execute one notebook with its own parameters and write its outputs, and the stamp, into the file itself."""
    nb = read(chapter.path)
    parameters(nb, pretty(chapter.path, root))
    expected = content_hash(nb, root)
    executed = copy.deepcopy(nb)
    stem = chapter.path.stem
    try:
        execute(executed, stem, progress=Progress(stem, len(code_cells(nb))), cell_timeout=cell_timeout)
    except NotebookFailed as failure:
        kept = keep_failed(executed, Path(root) / "build" / f"{stem}.failed.ipynb", str(failure))
        raise NotebookFailed(
            f"{failure}\n  {stem} is unchanged; what ran is in {pretty(kept, root)}"
        ) from None
    if content_hash(read(chapter.path), root) != expected:
        raise CourseError(
            f"{pretty(chapter.path, root)}: notebook, course_utils or data changed during the run; render again"
        )
    take_outputs(nb, executed)
    nb.metadata[STAMP] = stamp(nb, root)
    write(nb, chapter.path)


def take_outputs(nb, executed) -> None:
    """Move the outputs of ``executed`` into ``nb``, in place; sources, tags and cell ids stay as they are in ``nb``."""
    clean(executed)
    clean(nb)
    nb.cells = [cell for cell in nb.cells if "injected-parameters" not in tags(cell)]
    for cell, ran in zip(nb.cells, executed.cells, strict=True):
        if is_code(cell):
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
    nb.metadata["kernelspec"] = KERNELSPEC
    nb.metadata["language_info"] = {"name": "python", "file_extension": ".py"}
    nb.nbformat, nb.nbformat_minor = 4, max(5, nb.nbformat_minor)
    for number, cell in enumerate(nb.cells):
        cell.setdefault("id", f"cell-{number}")


# --- is it fresh? ------------------------------------------------------------------------------------------------


def content_hash(nb, root: Path = ROOT) -> str:
    """SHA-256 (hex) of everything that committed outputs depend on.

    It covers, each with its length in front, in this order:

    - the sources of the notebook's code cells (text cells and tags do not change outputs);
    - every ``*.py`` and ``*.mplstyle`` under ``course_utils/``: path and content. Left out are ``__main__.py`` and
      ``tools/``, the maintainers' commands, which no notebook imports;
    - every file under ``data/``: path and content. Left out is ``data/results/``, which benchmarks write, and what
      begins with a dot.

    Line ends count as Unix ones, so that a checkout on Windows has the same hash.
    """
    digest = hashlib.sha256()
    for name, content in _hashed(nb, Path(root)):
        for part in (name.encode(), content.replace(b"\r\n", b"\n")):
            digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()


def _hashed(nb, root: Path) -> Iterator[tuple[str, bytes]]:
    for cell in nb.cells:
        if is_code(cell) and "injected-parameters" not in tags(cell):
            yield "code", cell.source.encode()
    for name, left_out in (("course_utils", {"tools", "__main__.py"}), ("data", {"results"})):
        base = root / name
        for path in sorted(base.rglob("*"), key=lambda path: path.relative_to(base).as_posix()):
            inner = path.relative_to(base).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inner)
            foreign = name == "course_utils" and path.suffix not in (".py", ".mplstyle")
            if path.is_file() and not (hidden or foreign or inner[0] in left_out):
                yield path.relative_to(root).as_posix(), path.read_bytes()


def outputs_hash(nb) -> str:
    """SHA-256 (hex) of the outputs themselves: tells a render's outputs from those of a run by hand."""
    outputs = [[_plain(output) for output in cell.outputs] for cell in nb.cells if is_code(cell)]
    return hashlib.sha256(json.dumps(outputs, sort_keys=True).encode()).hexdigest()


def _plain(output) -> dict:
    """The output without what a front end may change by saving: the count, and how text is split into lines."""
    plain = {key: value for key, value in output.items() if key != "execution_count"}
    data = output.get("data", {})
    plain["data"] = {
        mime: "".join(v) if isinstance(v, list) and "json" not in mime else v for mime, v in data.items()
    }
    return plain


def stamp(nb, root: Path = ROOT) -> dict:
    """What the render says about itself: ``{"hash", "outputs", "machine", "versions", "date"}``."""
    return {
        "hash": content_hash(nb, root),
        "outputs": outputs_hash(nb),
        "machine": machine_line(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def fresh(nb, root: Path = ROOT) -> bool:
    """True when the outputs were rendered from this code, this ``course_utils`` and this ``data/``, and not touched since."""
    found = nb.metadata.get(STAMP, {})
    return found.get("hash") == content_hash(nb, root) and found.get("outputs") == outputs_hash(nb)


def machine_line() -> str:
    """One line about this machine."""
    from course_utils import machine

    return machine.describe()


def versions() -> dict[str, str]:
    """Versions that outputs may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
