"""``python -m course_utils check``: the notebook gate.

One rule, one function: it takes the notebook and yields a :class:`Problem` for each breach, with the cell and the way
out. A rule that the public record of broken notebooks has taught is named by what it prevents.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from course_utils.tools import counts, export, readme, render
from course_utils.tools.notebooks import (
    COURSE_MIME,
    FILE_NAME,
    ROOT,
    WIDGET_MIME,
    Chapter,
    CourseError,
    code_cells,
    course,
    find,
    is_code,
    key_of,
    parameters,
    parse,
    pretty,
    read,
    select,
    table,
    tags,
    where,
)

KNOWN_TAGS = {"parameters", "export", "exercise", "solution", "bug", "one-picture", "explorer"}
KINDS = ("main", "deep_dive")
MAX_FILE, MAX_METADATA = 1_000_000, 100_000  # bytes
WIDGET_PACKAGES = {"ipympl", "plotly", "anywidget", "bqplot", "ipyvolume", "pythreejs", "ipyleaflet"}
ASKING = {"input", "breakpoint", "getpass", "notebook_login", "interpreter_login", "set_trace"}
ASKING_METHODS = ASKING - {"input", "breakpoint"}  # an object of ours may well have a method `input`
GATED = re.compile(r"meta-llama/|google/gemma", re.I)
FIRST_TEXT_WITHIN = 5  # code cells


@dataclass(frozen=True)
class Problem:
    """One breach: which rule, where, what, and the way out."""

    rule: str
    place: str
    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what} → {self.way_out} [{self.rule}]"


def main(argv: list[str], root: Path = ROOT) -> int:
    """Check the notebooks that ``argv`` names (none: all). Prints a report, returns 0, or 1 with any problem."""
    parser = argparse.ArgumentParser("python -m course_utils check", description="The notebook gate.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="paths or chapters (02, 02a, …); none: all")
    chapters = [_chapter(name, root) for name in parser.parse_args(argv).files] or find(root)
    found: list[Problem] = []
    for chapter in chapters:
        nb = read(chapter.path)
        problems = notebook_problems(nb, chapter.path, root)
        found += problems
        print(f"{pretty(chapter.path, root)}: {_summary(problems)}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
        print(_indented(aims_table(nb)), end="\n\n")
    exported = list(export_problems(root))
    print(f"exports: {_summary(exported)}")
    print("".join(f"  {problem}\n" for problem in exported), end="")
    current = readme.is_current(root)
    print(
        f"README's verdicts: {'pass' if current else 'differ from the committed outputs → python -m course_utils render'}"
    )
    return 1 if found or exported or not current else 0


def _chapter(name: str, root: Path) -> Chapter:
    path = Path(name)
    return Chapter(path.resolve(), key_of(path)) if path.is_file() else select([name], root)[0]


def _summary(problems: list[Problem]) -> str:
    return f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "passes"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def notebook_problems(nb, path: Path, root: Path = ROOT) -> list[Problem]:
    """All breaches of one notebook, in the order of the rules."""
    found = [problem for rule in RULES for problem in rule(nb)]
    return found + [*file_rule(path), *name_rule(nb, path), *fresh_rule(nb, root)]


def aims_table(nb) -> str:
    """The aims for one sitting beside what is here; ``!`` marks what is off, and below the table stands where.

    What is off fails only where a problem above says so.
    """
    aims = counts.sitting(nb, _kind(nb))
    rows = [[aim.what, aim.aim, aim.here, "" if aim.met else "!"] for aim in aims]
    notes = ["\n    ".join([f"! {aim.what}:", *aim.note.splitlines()]) for aim in aims if aim.note]
    return "\n".join([table(["one sitting", "aim", "here", ""], rows, [50, 10, 10, 1]), *notes])


def _kind(nb) -> str:
    return course(nb).get("kind", "main")


# --- the file ----------------------------------------------------------------------------------------------------


def format_rule(nb) -> Iterator[Problem]:
    """nbformat 4.5 with unique ids: viewers refuse other files, and generators forget the id of one cell."""
    if (nb.get("nbformat"), nb.get("nbformat_minor")) != (4, 5):
        version = f"{nb.get('nbformat')}.{nb.get('nbformat_minor')}"
        yield Problem(
            "format", "the file", f"nbformat {version}, expected 4.5", "save it in a current JupyterLab"
        )
    ids = Counter(cell.get("id") for cell in nb.cells)
    for index, cell in enumerate(nb.cells):
        if not cell.get("id"):
            yield Problem(
                "format", where(nb, index), "has no id", "save the notebook in a current JupyterLab"
            )
        elif ids[cell.id] > 1:
            yield Problem(
                "format", where(nb, index), f"id {cell.id!r} is used twice", "give one of them a new id"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nbformat.validate(copy.deepcopy(nb))  # validation mends ids in place
    except (nbformat.ValidationError, Warning) as error:
        if all(ids) and max(ids.values(), default=1) == 1:
            reason = str(error).splitlines()[0]
            yield Problem(
                "format", "the file", f"is not a valid notebook ({reason})", "save it in JupyterLab"
            )


def kernel_rule(nb) -> Iterator[Problem]:
    """The kernel of nobody's own machine: another name is unknown elsewhere."""
    name = nb.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield Problem(
            "kernel", "metadata.kernelspec", f"names the kernel {name!r}", "choose python3, or render"
        )


def course_rule(nb) -> Iterator[Problem]:
    """The notebook says which chapter it is, of which kind, and which module it makes."""
    about = course(nb)
    missing = [key for key in ("chapter", "kind", "module", "title") if not about.get(key)]
    if missing:
        yield Problem(
            "course",
            "metadata.course",
            f"lacks {', '.join(missing)}",
            'write {"chapter": 2, "kind": "main", "module": "kv_cache", "title": "KV cache"}',
        )
    if about.get("kind") and about["kind"] not in KINDS:
        yield Problem(
            "course", "metadata.course", f"kind is {about['kind']!r}", f"write {' or '.join(KINDS)}"
        )


def name_rule(nb, path: Path) -> Iterator[Problem]:
    """File name and metadata say the same."""
    about, match = course(nb), FILE_NAME.fullmatch(Path(path).stem)
    if not match:
        yield Problem(
            "course", Path(path).name, "does not begin with 02_ or 02a_", "name it NN_topic or NNx_topic"
        )
        return
    named = (int(match["chapter"]), "deep_dive" if match["letter"] else "main")
    said = (about.get("chapter"), about.get("kind"))
    if None not in said and named != said:
        what = f"says chapter {said[0]}, {said[1]}; the file name says chapter {named[0]}, {named[1]}"
        yield Problem("course", "metadata.course", what, "mend the one that is wrong")


def parameters_rule(nb) -> Iterator[Problem]:
    """One parameters cell, of literals, with ``quick``: without it a test runs at full size and nobody notices."""
    try:
        found = parameters(nb)
    except CourseError as error:
        what, _, way_out = str(error).removeprefix("the notebook: ").partition("; ")
        yield Problem("parameters", "the notebook", what, way_out or "move the rest to another cell")
        return
    if found.get("quick") is not False:
        yield Problem(
            "parameters", "the parameters cell", "does not set quick = False", "add `quick = False`"
        )


def tags_rule(nb) -> Iterator[Problem]:
    """Only tags that some tool reads: a misspelt one does nothing, silently."""
    known = ", ".join(sorted(KNOWN_TAGS))
    for index, cell in enumerate(nb.cells):
        for tag in tags(cell):
            if tag not in KNOWN_TAGS and not re.fullmatch(r"export:[a-z_]\w*", tag):
                yield Problem(
                    "tags", where(nb, index), f"unknown tag {tag!r}", f"known: {known}, export:MODULE"
                )
            elif not is_code(cell) and tag.partition(":")[0] in ("export", "parameters"):
                yield Problem("tags", where(nb, index), f"text is tagged {tag!r}", "tag the code cell")


def size_rule(nb) -> Iterator[Problem]:
    """Widget state and notes of runs stay out: they make files huge, and viewers refuse them."""
    if "widgets" in nb.metadata:
        yield Problem("metadata", "metadata.widgets", "is there", "render, which takes it out")
    size = len(json.dumps(nb.metadata))
    if size > MAX_METADATA:
        yield Problem(
            "metadata", "the file", f"{size:,} bytes of metadata, at most {MAX_METADATA:,}", "render"
        )


def file_rule(path: Path) -> Iterator[Problem]:
    """At most 1 MB, so that a page can be read and a change be reviewed."""
    size = Path(path).stat().st_size
    if size > MAX_FILE:
        way_out = "draw smaller figures, print less"
        yield Problem("size", "the file", f"{size:,} bytes, at most {MAX_FILE:,}", way_out)


# --- outputs -----------------------------------------------------------------------------------------------------


def outputs_rule(nb) -> Iterator[Problem]:
    """Committed outputs hold no error, no warning noise, no picture without words, no widget without its twin."""
    for index, cell in enumerate(nb.cells):
        pictured = counts.has_picture(cell)
        for output in cell.get("outputs", []):
            yield from (
                Problem("outputs", where(nb, index), *found) for found in _output_problems(output, pictured)
            )


def _output_problems(output, pictured: bool) -> Iterator[tuple[str, str]]:
    if output.output_type == "error":
        yield f"holds an error ({output.ename})", "mend the cell and render"
    if output.output_type == "stream" and output.name == "stderr":
        first = output.text.strip().splitlines()[:1]
        yield f"writes to stderr ({' '.join(first)[:60]})", "mend the cause of the warning, then render"
    data = output.get("data", {})
    for mime in counts.images(output):
        if not output.metadata.get(mime, {}).get("alt", "").strip():
            yield f"shows a figure ({mime}) without alt text", "show it with plotting.show(fig, alt=…)"
    if data.get(COURSE_MIME, {}).get("quick"):
        yield "was made in a quick run", "python -m course_utils render, which runs in full"
    if WIDGET_MIME in data and not pictured:
        yield "shows a widget without a static twin", "show explorer.twin() beside it, then render"


def fresh_rule(nb, root: Path) -> Iterator[Problem]:
    """Outputs belong to this code, this ``course_utils`` and this ``data/``."""
    if not render.fresh(nb, root):
        state = "are stale" if render.STAMP in nb.metadata else "were never rendered"
        what = f"outputs {state} (notebook, course_utils or data changed, or cells were run by hand)"
        yield Problem("fresh", "the notebook", what, "python -m course_utils render")


# --- code --------------------------------------------------------------------------------------------------------


def asking_rule(nb) -> Iterator[Problem]:
    """No cell waits for a person: an unattended run has none."""
    for index, cell in _code(nb):
        functions = [node.func for node in _nodes(cell, ast.Call)]
        names = {f.id for f in functions if isinstance(f, ast.Name)} & ASKING
        names |= {f.attr for f in functions if isinstance(f, ast.Attribute)} & ASKING_METHODS
        names |= {name for name in _imports(cell) if name in ASKING}
        names |= set(re.findall(r"^\s*(%debug|%pdb)\b", cell.source, re.M))
        for name in sorted(names):
            way_out = "take it from the parameters cell or a variable with a default"
            yield Problem("asks", where(nb, index), f"asks for input ({name})", way_out)


def widgets_rule(nb) -> Iterator[Problem]:
    """Core ipywidgets only: nothing else shows everywhere without a further installation."""
    for index, cell in _code(nb):
        found = [name for name in _imports(cell) if name in WIDGET_PACKAGES]
        found += re.findall(r"^\s*(%matplotlib\s+(?:widget|notebook|ipympl|nbagg))", cell.source, re.M)
        for name in found:
            yield Problem(
                "widgets",
                where(nb, index),
                f"uses {name}",
                "use core ipywidgets through course_utils.widgets",
            )


def gated_rule(nb) -> Iterator[Problem]:
    """No model that asks for a licence click or a token."""
    for index, cell in _code(nb):
        for match in GATED.findall(cell.source):
            yield Problem(
                "gated", where(nb, index), f"names a gated model ({match}…)", "use an open one of the catalog"
            )


def _code(nb) -> Iterator[tuple[int, object]]:
    return ((index, cell) for index, cell in enumerate(nb.cells) if is_code(cell))


def _nodes(cell, kind) -> list:
    try:
        return [node for node in ast.walk(parse(cell.source)) if isinstance(node, kind)]
    except SyntaxError:
        return []


def _imports(cell) -> list[str]:
    """Top packages and imported names of a cell."""
    found = [alias.name.partition(".")[0] for node in _nodes(cell, ast.Import) for alias in node.names]
    for node in _nodes(cell, ast.ImportFrom):
        found += [(node.module or "").partition(".")[0], *(alias.name for alias in node.names)]
    return found


def syntax_rule(nb) -> Iterator[Problem]:
    """Every code cell is Python, magics apart; the other rules could not see into one that is not."""
    for index, cell in _code(nb):
        try:
            parse(cell.source)
        except SyntaxError as error:
            yield Problem("syntax", where(nb, index), f"line {error.lineno}: {error.msg}", "mend the line")


# --- one sitting -------------------------------------------------------------------------------------------------


def missing_rule(nb) -> Iterator[Problem]:
    """What no main line may lack altogether: a pause, a guess, a bug, an exercise."""
    for aim in counts.sitting(nb, _kind(nb)):
        if aim.missing:
            yield Problem("sitting", "the notebook", f"{aim.what}: {aim.here}, aim {aim.aim}", "write it")


def first_text_rule(nb) -> Iterator[Problem]:
    """Generated text within the first five code cells: a call of generate, or decoded tokens among the outputs."""
    if not any(_shows_generated_text(cell) for cell in code_cells(nb)[:FIRST_TEXT_WITHIN]):
        what = f"no text is generated within the first {FIRST_TEXT_WITHIN} code cells"
        yield Problem("first text", "the notebook", what, "let the model say something earlier")


def _shows_generated_text(cell) -> bool:
    names = {counts.called(node) for node in _nodes(cell, ast.Call)}
    prints = any(o.output_type == "stream" or "text/plain" in o.get("data", {}) for o in cell.outputs)
    return any("generate" in name for name in names) or prints and bool({"decode", "pieces"} & names)


def export_problems(root: Path = ROOT) -> Iterator[Problem]:
    """Modules equal their notebooks; what may not be exported, a name defined by two notebooks of a module included."""
    modules = export.collect(root)
    for module in modules:
        for problem in export.problems(module, modules):
            place, _, what = problem.partition(": ")
            yield Problem("export", place, what, "the module is made from it")
    for difference in export.differences(root, modules):
        first, _, rest = difference.partition("\n")
        yield Problem("export", "course_utils/chapters", first, f"make export\n{rest}".rstrip())


RULES = [
    format_rule,
    kernel_rule,
    course_rule,
    parameters_rule,
    tags_rule,
    size_rule,
    outputs_rule,
    syntax_rule,
    asking_rule,
    widgets_rule,
    gated_rule,
    missing_rule,
    first_text_rule,
]
