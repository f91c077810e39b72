"""What one sitting can hold, counted: cells, words, minutes, and the parts that every chapter has.

The counters are pure functions of a notebook; :func:`sitting` lines them up as a table of aims. Cells tagged
``exercise``, ``solution`` or ``explorer`` are counted nowhere but in the row that is about them.
"""

from __future__ import annotations

import ast
import re
import statistics
from dataclasses import dataclass

from course_utils.tools.notebooks import is_code, parse, tags, where

UNCOUNTED = {"exercise", "solution", "explorer"}
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
MINUTES = re.compile(r"\((\d+)\s*min\)\s*$")
DETAILS = re.compile(r"<details\b.*?</details>", re.S | re.I)
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.S | re.M)


@dataclass(frozen=True)
class Heading:
    """A Markdown heading: its depth, its text, its minutes (None where it names none)."""

    level: int
    text: str
    minutes: int | None

    @property
    def is_pause(self) -> bool:
        return bool(re.search(r"\bpause\b", self.text, re.I))


@dataclass(frozen=True)
class Exercise:
    """One exercise cell and the text around it. ``need``: it says what the reader needs; hint, solution: folded parts."""

    index: int
    need: bool
    hint: str
    solution: str

    @property
    def complete(self) -> bool:
        return bool(self.need and self.hint and self.solution)


@dataclass(frozen=True)
class Aim:
    """One row of the table. ``missing`` marks what must not be absent altogether; ``note`` names what is off."""

    what: str
    aim: str
    here: str
    met: bool
    missing: bool = False
    note: str = ""


# --- counters ----------------------------------------------------------------------------------------------------


def counted(nb) -> list:
    """The cells that count for a sitting."""
    return [cell for cell in nb.cells if not UNCOUNTED & set(tags(cell))]


def counted_code(nb) -> list:
    return [cell for cell in counted(nb) if is_code(cell) and cell.source.strip()]


def text_cells(nb) -> list:
    return [cell for cell in counted(nb) if cell.cell_type == "markdown"]


def words(nb) -> tuple[int, int]:
    """Words of text outside and inside ``<details>``: without code, links' addresses, pictures and HTML tags."""
    outside = inside = 0
    for cell in text_cells(nb):
        plain = FENCE.sub("", cell.source)
        folded = DETAILS.findall(plain)
        inside += sum(map(_count_words, folded))
        outside += _count_words(DETAILS.sub("", plain))
    return outside, inside


def _count_words(markdown: str) -> int:
    markdown = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", markdown)
    markdown = re.sub(r"\]\([^)]*\)", "]", markdown)
    markdown = re.sub(r"<[^>]*>", " ", markdown)
    return sum(1 for word in markdown.split() if re.search(r"\w", word))


def headings(nb) -> list[Heading]:
    """All headings of the counted text cells, in order; lines inside code fences are none."""
    found = []
    for cell in text_cells(nb):
        for line in FENCE.sub("", cell.source).splitlines():
            match = HEADING.match(line)
            if match:
                minutes = MINUTES.search(match[2])
                found.append(Heading(len(match[1]), match[2], int(minutes[1]) if minutes else None))
    return found


def minutes(found: list[Heading]) -> int:
    """Sum of the minutes of the ``##`` headings."""
    return sum(heading.minutes or 0 for heading in found if heading.level == 2)


def pause_share(found: list[Heading]) -> float | None:
    """The share of the minutes that lies before the one pause; None unless exactly one heading is marked."""
    places = [i for i, heading in enumerate(found) if heading.is_pause]
    if len(places) != 1 or not minutes(found):
        return None
    return minutes(found[: places[0]]) / minutes(found)


def line_counts(nb) -> list[tuple[int, int]]:
    """(lines, allowed) for each counted code cell; empty lines at the ends do not count."""
    return [(_lines_of(cell), _allowed(cell)) for cell in counted_code(nb)]


def _lines_of(cell) -> int:
    return len(cell.source.strip("\n").splitlines())


def _allowed(cell) -> int:
    return 40 if _is_export(cell) else 25


def columns(cell) -> int:
    """Columns of the cell's longest line."""
    return max(map(len, cell.source.splitlines()), default=0)


def _is_export(cell) -> bool:
    return any(tag == "export" or tag.startswith("export:") for tag in tags(cell))


def calls(source: str, name: str) -> list[ast.Call]:
    """The calls of a function or method ``name`` in the code; none where it is not Python."""
    try:
        tree = parse(source)
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == name]


def called(call: ast.Call) -> str:
    """``guess`` of ``guess(…)`` and of ``claims.guess(…)``; empty for anything else."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def first_cell_by_name(nb, function: str) -> dict[str, int]:
    """``{first argument: index of the first cell}`` for each call of ``function`` with a text as first argument."""
    found: dict[str, int] = {}
    for index, cell in enumerate(nb.cells):
        for call in calls(cell.source, function) if is_code(cell) else ():
            name = (
                call.args[0].value
                if call.args and isinstance(call.args[0], ast.Constant)
                else f"cell {index}"
            )
            found.setdefault(str(name), index)
    return found


def tagged(nb, tag: str) -> list:
    return [cell for cell in nb.cells if tag in tags(cell)]


def exercises(nb) -> list[Exercise]:
    """Every code cell tagged ``exercise`` with the text before it and the folded hint and solution after it."""
    places = [i for i, cell in enumerate(nb.cells) if is_code(cell) and "exercise" in tags(cell)]
    found = []
    for index in places:
        before = _texts(nb, range(index - 1, -1, -1))
        after = _texts(nb, range(index + 1, len(nb.cells)))
        folded = DETAILS.findall("\n\n".join(after))
        found.append(
            Exercise(
                index,
                need=bool(re.search(r"you need", before[0] if before else "", re.I)),
                hint=next((part for part in folded if "hint" in _summary(part)), ""),
                solution=next((part for part in folded if "solution" in _summary(part)), ""),
            )
        )
    return found


def _texts(nb, indices) -> list[str]:
    """The text cells from there on, up to the next code cell that is no solution."""
    found = []
    for i in indices:
        if is_code(nb.cells[i]) and "solution" not in tags(nb.cells[i]):
            break
        found.append(nb.cells[i].source)
    return found


def _summary(details: str) -> str:
    match = re.search(r"<summary\b[^>]*>(.*?)</summary>", details, re.S | re.I)
    return match[1].lower() if match else ""


def has_picture(cell) -> bool:
    """A figure among the cell's outputs: the static twin of an explorer."""
    return any(images(output) for output in cell.get("outputs", []))


def images(output) -> list[str]:
    """The picture formats of an output: image/png and the like."""
    return [mime for mime in output.get("data", {}) if mime.startswith("image/")]


# --- the table ---------------------------------------------------------------------------------------------------


def sitting(nb, kind: str) -> list[Aim]:
    """The aims of a main line or a deep dive, each with what is here."""
    main = kind == "main"
    rows = [_cells(nb, main), *_words(nb, main), *_lines(nb)]
    if main:
        rows += [*_minutes(nb), *_guesses(nb), *_parts(nb)]
    rows.append(_exercises(nb, 6 if main else 2, missing_fails=main))
    return rows


def _between(what: str, low: int, high: int, here: int) -> Aim:
    return Aim(what, f"{low}–{high}", str(here), low <= here <= high)


def _at_most(what: str, high: int, here: int) -> Aim:
    return Aim(what, f"≤ {high}", str(here), here <= high)


def _exactly(what: str, aim: int, here: int, missing_fails: bool = False) -> Aim:
    return Aim(what, str(aim), str(here), here == aim, missing=missing_fails and here == 0)


def _cells(nb, main: bool) -> Aim:
    return _between("code cells", *((30, 40) if main else (8, 20)), len(counted_code(nb)))


def _words(nb, main: bool) -> list[Aim]:
    outside, inside = words(nb)
    return [
        _at_most("words outside <details>", 2600 if main else 1500, outside),
        _at_most("words inside <details>", 700 if main else 300, inside),
    ]


def _lines(nb) -> list[Aim]:
    lengths = sorted(lines for lines, _ in line_counts(nb)) or [0]
    median = statistics.median(lengths)
    share = sum(lines <= 18 for lines in lengths) / len(lengths)
    over = [cell for cell in counted_code(nb) if _lines_of(cell) > _allowed(cell)]
    wide = [cell for cell in nb.cells if is_code(cell) and columns(cell) > 80]
    widest = max([columns(cell) for cell in nb.cells if is_code(cell)], default=0)
    return [
        Aim("lines a cell, median", "4–6", f"{median:g}", 4 <= median <= 6),
        Aim("cells of at most 18 lines", "≥ 90 %", _percent(share), share >= 0.9),
        Aim("cells over 25 lines (export: 40)", "0", str(len(over)), not over, note=_places(nb, over)),
        Aim("columns of the longest line", "≤ 80", str(widest), not wide, note=_places(nb, wide)),
    ]


def _places(nb, cells: list) -> str:
    return "\n".join(
        where(nb, index) for index, cell in enumerate(nb.cells) if any(cell is other for other in cells)
    )


def _minutes(nb) -> list[Aim]:
    found = headings(nb)
    bare = [h.text for h in found if h.level == 2 and h.minutes is None and not h.is_pause]
    pauses = sum(heading.is_pause for heading in found)
    share = pause_share(found)
    return [
        Aim("## headings without (N min)", "0", str(len(bare)), not bare, note="\n".join(bare)),
        _between("minutes of all headings", 65, 82, minutes(found)),
        _exactly("pause", 1, pauses, missing_fails=True),
        Aim(
            "minutes before the pause", "50–65 %", _percent(share), share is not None and 0.5 <= share <= 0.65
        ),
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _guesses(nb) -> list[Aim]:
    guesses, records = first_cell_by_name(nb, "guess"), first_cell_by_name(nb, "record")
    before = sum(name in records and place < records[name] for name, place in guesses.items())
    return [
        _exactly("guesses", 3, len(guesses), missing_fails=True),
        Aim("guesses before their record", f"{len(guesses)}", str(before), before == len(guesses)),
    ]


def _parts(nb) -> list[Aim]:
    explorers = [cell for cell in tagged(nb, "explorer") if is_code(cell)]
    return [
        _exactly("cells tagged bug", 3, len(tagged(nb, "bug")), missing_fails=True),
        _exactly("cells tagged one-picture", 1, len(tagged(nb, "one-picture"))),
        _exactly("explorers with a twin in the output", 1, sum(map(has_picture, explorers))),
    ]


def _exercises(nb, aim: int, missing_fails: bool) -> Aim:
    found = exercises(nb)
    complete = sum(exercise.complete for exercise in found)
    here = str(complete) if complete == len(found) else f"{complete} of {len(found)}"
    return Aim(
        "exercises with “you need”, hint, solution",
        str(aim),
        here,
        complete == len(found) == aim,
        missing=missing_fails and not found,
    )
