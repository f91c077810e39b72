"""README's table of verdicts, written from the committed notebooks' outputs: no number there is typed by hand."""

from __future__ import annotations

from pathlib import Path

from course_utils.tools.notebooks import ROOT, STAMP, find, read, write_text
from course_utils.tools.run import verdicts

BEGIN, END = "<!-- verdicts -->", "<!-- /verdicts -->"


def update(root: Path = ROOT) -> None:
    """Put :func:`verdict_block` between README's two marks; a README without them is left alone."""
    path = Path(root) / "README.md"
    if not is_current(root):
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        write_text(path, f"{before}{BEGIN}\n{verdict_block(root)}\n{END}{after}")


def is_current(root: Path = ROOT) -> bool:
    """True where README's table says what the committed notebooks say, or there is no place for one."""
    path = Path(root) / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text:
        return True
    return text.partition(BEGIN)[2].partition(END)[0].strip() == verdict_block(root).strip()


def verdict_block(root: Path = ROOT) -> str:
    """The table in Markdown, a row for each verdict card, and below it where the numbers were made."""
    rows, places = [], {}
    for chapter in find(root):
        nb = read(chapter.path)
        for card in verdicts(nb):
            cells = (
                card["claim_id"],
                card["measured"],
                card["predicted"],
                f"**{card['word']}**",
                card["condition"],
            )
            rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
            stamp = nb.metadata.get(STAMP, {})
            places[f"{stamp.get('machine', '')} · {stamp.get('date', '')}"] = None
    if not rows:
        return "No chapter has been rendered yet."
    head = ["| claim | measured | predicted | verdict | on what condition |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"Made on: {place}." for place in places)])


def _cell(value: str | list[str]) -> str:
    lines = value if isinstance(value, list) else [value]
    return "<br>".join(line.replace("|", "\\|") for line in lines)
