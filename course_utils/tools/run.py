"""``python -m course_utils run``: execute chapters and print what the claims were worth on this machine."""

from __future__ import annotations

import argparse
import ast
import json
import shutil
from pathlib import Path

import nbformat

from course_utils.tools.execute import (
    CELL_TIMEOUT,
    NotebookFailed,
    Progress,
    execute,
    inject,
    terminate_as_interrupt,
)
from course_utils.tools.notebooks import (
    COURSE_MIME,
    ROOT,
    Chapter,
    UsageError,
    clean,
    code_cells,
    parameters,
    pretty,
    read,
    select,
    table,
    write,
    write_text,
)

QUICK_STAMP = "quick run: not a verdict"


def main(argv: list[str], root: Path = ROOT) -> int:
    """Run the chapters that ``argv`` names, print the verdict table; see ``run --help``. Returns 0.

    Raises :class:`UsageError` before anything is executed for an unknown chapter or parameter, :class:`CourseError`
    for a notebook that cannot take parameters, :class:`NotebookFailed` (after what succeeded was printed) for a cell.
    """
    options = arguments().parse_args(argv)
    chapters = select(options.chapters, root, deep_dives=options.all)
    values = given_values(options.set) | ({"quick": True} if options.quick else {})
    check_parameters(chapters, values, root)
    build = Path(options.build).resolve() if options.build else Path(root).resolve() / "build"
    finished: list[tuple[Chapter, nbformat.NotebookNode]] = []
    try:
        with terminate_as_interrupt():
            for chapter in chapters:
                finished.append((chapter, run_chapter(chapter, values, build, options.cell_timeout, root)))
    finally:
        report(finished, build, quick=bool(values.get("quick")), root=root)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m course_utils run", description="Execute chapters, print the verdicts."
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="02, 02a, …; none: all main lines")
    parser.add_argument("--all", action="store_true", help="the deep dives too")
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, under a minute a chapter; no verdicts"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="parameters of the notebooks",
    )
    parser.add_argument(
        "--cell-timeout", type=_seconds, default=CELL_TIMEOUT, metavar="S", help="seconds a cell may take"
    )
    parser.add_argument("--build", metavar="DIR", help="where results go (default: build/ in the clone)")
    return parser


def _seconds(text: str) -> int:
    seconds = int(text)
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def given_values(pairs: list[str]) -> dict[str, object]:
    """``["seed=1", "model=tiny"]`` -> ``{"seed": 1, "model": "tiny"}``; see :func:`literal`."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name.strip().isidentifier()):
            raise UsageError(f"--set {pair!r} is not NAME=VALUE; for example --set seed=1")
        values[name.strip()] = literal(value.strip())
    return values


def literal(text: str) -> object:
    """A Python literal, or JSON's true, false and null; anything else is the text itself."""
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_parameters(chapters: list[Chapter], values: dict[str, object], root: Path = ROOT) -> None:
    """Refuse names that a chosen notebook does not know: papermill would only warn and run at full size."""
    for chapter in chapters:
        name = pretty(chapter.path, root)
        known = parameters(read(chapter.path), name)
        for unknown in [value for value in values if value not in known]:
            raise UsageError(f"unknown parameter {unknown!r} for {name}; known: {', '.join(known)}")


def run_chapter(
    chapter: Chapter, values: dict, build: Path, cell_timeout: int = CELL_TIMEOUT, root: Path = ROOT
):
    """Execute one chapter into ``build`` (notebook and HTML) and return the executed notebook.

    A failure keeps what was executed as ``NAME.failed.ipynb``, a banner on top; files of an earlier run are removed
    first, so that nobody takes them for this one's.
    """
    stem = chapter.path.stem
    for old in (f"{stem}.ipynb", f"{stem}.html", f"{stem}.failed.ipynb"):
        (build / old).unlink(missing_ok=True)
    nb = read(chapter.path)
    inject(nb, values)
    try:
        execute(nb, stem, progress=Progress(stem, len(code_cells(nb))), cell_timeout=cell_timeout)
    except (NotebookFailed, KeyboardInterrupt) as failure:
        reason = str(failure) or f"{stem}: interrupted"
        kept = keep_failed(nb, build / f"{stem}.failed.ipynb", reason)
        if isinstance(failure, NotebookFailed):
            raise NotebookFailed(f"{reason}\n  what ran until then is in {pretty(kept, root)}") from None
        raise
    clean(nb)
    write(nb, build / f"{stem}.ipynb")
    write_text(build / f"{stem}.html", as_html(nb, stem))
    return nb


def keep_failed(nb, path: Path, reason: str) -> Path:
    """Write a partial notebook that nobody can take for a whole one: in its name, its metadata and its first cell."""
    clean(nb)
    nb.metadata["course_run"] = {"status": "failed", "reason": reason}
    banner = f"> **This run failed.** What follows is what was executed until then.\n>\n> `{reason}`"
    nb.cells.insert(0, nbformat.v4.new_markdown_cell(banner))
    write(nb, path)
    return path


def as_html(nb, title: str) -> str:
    """The notebook as one HTML page."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_notebook_node(nb, resources={"metadata": {"name": title}})
    return html


# --- what the run says at its end --------------------------------------------------------------------------------


def verdicts(nb) -> list[dict]:
    """The verdict cards among a notebook's outputs, in order (the JSON part of what ``claims.verdict`` displays).

    A card shown twice counts once, as it was shown last.
    """
    cards = {}
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            card = output.get("data", {}).get(COURSE_MIME)
            card = json.loads(card) if isinstance(card, str) else card
            if card and card.get("kind") == "verdict":
                cards[card.get("claim_id") or card.get("claim")] = dict(card)
    return list(cards.values())


def verdict_table(cards: list[dict], quick: bool = False, width: int = 100) -> str:
    """The table: claim, measured here, predicted, verdict. A quick run's rows all carry the stamp."""
    rows = [
        [
            _claim(card),
            _text(card.get("measured")),
            _text(card.get("predicted")),
            _word(card, quick),
        ]
        for card in cards
    ]
    share = max(width - 6, 60) // 10
    return table(
        ["claim", "measured here", "predicted", "verdict"], rows, [3 * share, 3 * share, 2 * share, 2 * share]
    )


def _text(value) -> str:
    lines = value if isinstance(value, list) else [value]
    return "\n".join(str(line) for line in lines if line not in (None, "")) or "–"


def _claim(card: dict) -> str:
    number = card.get("claim_id")
    return f"{number}: {_text(card.get('claim'))}" if number else _text(card.get("claim"))


def _word(card: dict, quick: bool) -> str:
    word = _text(card.get("word"))
    return f"{word} ({QUICK_STAMP})" if quick or card.get("quick") else word


def report(finished: list, build: Path, quick: bool, root: Path = ROOT) -> None:
    """Print the verdicts of the finished chapters and where their files are."""
    if not finished:
        return
    cards = [card for _, nb in finished for card in verdicts(nb)]
    print()
    if cards:
        print(verdict_table(cards, quick, shutil.get_terminal_size((100, 24)).columns))
    else:
        print("no verdicts: the chapters that ran put no claim on trial")
    if quick:
        print(f"\n{QUICK_STAMP}")
    print("\nexecuted notebooks and pages:")
    for chapter, _ in finished:
        print(
            f"  {pretty(build / chapter.path.stem, root)}.ipynb  {pretty(build / chapter.path.stem, root)}.html"
        )
