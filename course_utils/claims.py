"""Guesses before a measurement, records after it, verdicts at the end of a chapter.

Whatever is shown goes out as one output with three faces: HTML for the page, plain text for terminals and screen
readers, and ``application/vnd.llm-course+json`` for the command that collects the results of a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape

MIME = "application/vnd.llm-course+json"
WORDS = ("holds", "holds on a condition", "does not hold here", "dated", "not tested here")
QUICK_STAMP = "quick run: not a verdict"

# A symbol and a colour (Okabe and Ito) beside each word; the word alone carries the meaning.
_SYMBOLS = dict(zip(WORDS, ("✓", "◐", "✗", "◷", "○"), strict=True))
_EDGES = dict(zip(WORDS, ("#009E73", "#E69F00", "#D55E00", "#CC79A7", "#888888"), strict=True))


# --- showing ---------------------------------------------------------------------------------------------------------


def emit(html: str, text: str, fields: dict | None = None) -> None:
    """Show one output: HTML, plain text and, where given, the fields as JSON. Outside IPython the text is printed."""
    shell = _shell()
    if shell is None:
        print(text)
        return
    from IPython.display import display

    bundle = {"text/plain": text, "text/html": html}
    if fields is not None:
        bundle[MIME] = fields
    display(bundle, raw=True)


def _shell():
    """The running IPython shell, or None; never imports IPython where nobody else did."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of ready-made cells that reads well with its style attributes stripped."""
    left = ' align="left" style="text-align:left"'
    top = f"<tr>{''.join(f'<th{left}>{cell}</th>' for cell in head)}</tr>"
    body = "".join(f"<tr>{''.join(f'<td{left}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead>{top}</thead><tbody>{body}</tbody></table>"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table in columns of plain text."""
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def number(value: float, unit: str = "") -> str:
    """Three significant digits and thousands separators: ``12.3 ms``, ``25,705 tokens``, ``8.1x``."""
    size = abs(value)
    if float(value).is_integer() and size < 1e15 or size >= 100:
        shown = f"{value:,.0f}"
    elif size >= 10:
        shown = f"{value:.1f}"
    elif size >= 1:
        shown = f"{value:.2f}"
    else:
        shown = f"{value:.3g}"
    return f"{shown}{unit}" if unit in ("", "x", "×") else f"{shown} {unit}"


# --- guesses and records ---------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """What is known of one quantity; both are None until ``guess`` and ``record`` said so."""

    guess: float | None = None
    unit: str = ""
    measured: float | None = None
    predicted: float | None = None
    spread: float | tuple[float, float] | None = None
    quick: bool = False


_entries: dict[str, _Entry] = {}


def reset() -> None:
    """Forget all guesses and records of this process."""
    _entries.clear()


def guess(name: str, value: float | None = None, unit: str = "") -> None:
    """Write down a guess before the measurement; None (no guess made) shows nothing.

    Raises ValueError for a value that is not a finite number.
    """
    checked = None if value is None else _finite(f"guess({name!r})", value)
    _entries[name] = _Entry(guess=checked, unit=unit)
    if checked is None:
        return
    said = f"{name}: your guess is {number(checked, unit)}"
    fields = {"kind": "guess", "name": name, "value": checked, "unit": unit}
    emit(f"<div>★ {escape(said)}</div>", f"★ {said}", fields)


def guessed(name: str) -> float | None:
    """The guess written down under this name, for the star in a figure; None where there is none."""
    return _entries[name].guess if name in _entries else None


def record(
    name: str,
    *,
    measured: float,
    predicted: float | None = None,
    unit: str = "",
    spread: float | tuple[float, float] | None = None,
    quick: bool = False,
) -> None:
    """Show one line after a measurement: what was measured, predicted and guessed, and which of them was nearer.

    Positive quantities are compared by ratio (half and double are equally far), others by difference.

    Args:
        measured, predicted: in ``unit``; predicted may be None.
        spread: interquartile range in ``unit``, or a pair (low, high).
        quick: adds "quick run: not a verdict".

    Raises ValueError for numbers that are not finite, and for a unit that differs from the guess's.
    """
    entry = _entries.setdefault(name, _Entry())
    if unit and entry.unit and unit != entry.unit:
        raise ValueError(
            f"{name!r} was guessed in {entry.unit!r} and measured in {unit!r}; give both in the same unit"
        )
    entry.unit = unit or entry.unit
    entry.measured = _finite(f"record({name!r}, measured=…)", measured)
    entry.predicted = None if predicted is None else _finite(f"record({name!r}, predicted=…)", predicted)
    entry.spread, entry.quick = _spread(spread), quick
    line = _line(name, entry)
    fields = {"kind": "record", "name": name, **asdict(entry), "nearer": _nearer(entry), "line": line}
    emit(f"<div>{escape(line)}</div>", line, fields)


def guesses() -> None:
    """Show all quantities of this session in one table; ★ marks the guesses that were nearer than the prediction."""
    head = ("quantity", "your guess", "predicted", "measured", "nearer")
    rows = [_table_row(name, entry) for name, entry in _entries.items()]
    made = [e for e in _entries.values() if e.guess is not None and e.measured is not None]
    compared = [e for e in made if e.predicted is not None]
    won = sum(_nearer(e) == "guess" for e in compared)
    if compared:
        last = f"Your guess was nearer than the prediction in {won} of {len(compared)}."
    elif made:
        last = f"{len(made)} of your guesses can be set against a measurement."
    else:
        last = "No guess was written down and measured yet: put a number into a guess cell and run it again."
    if any(entry.quick for entry in _entries.values()):
        last += f" ({QUICK_STAMP})"
    fields = {"kind": "guesses", "entries": [{"name": n, **asdict(e)} for n, e in _entries.items()]}
    html = html_table(head, [[escape(cell) for cell in row] for row in rows]) + f"<p>{escape(last)}</p>"
    emit(html, f"{text_table(head, rows)}\n{last}", fields)


def _table_row(name: str, entry: _Entry) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "–" if value is None else number(value, entry.unit)

    nearer = _nearer(entry)
    word = {"guess": "★ your guess", None: "–"}.get(nearer, nearer)
    measured = shown(entry.measured) if entry.measured is not None else "not yet"
    return (name, shown(entry.guess), shown(entry.predicted), measured, word)


def _line(name: str, entry: _Entry) -> str:
    parts = [f"measured {number(entry.measured, entry.unit)}{_spread_text(entry.spread)}"]
    if entry.predicted is not None:
        parts.append(f"predicted {number(entry.predicted, entry.unit)} ({_miss(entry, entry.predicted)})")
    if entry.guess is not None:
        parts.append(f"your guess {number(entry.guess, entry.unit)} ({_miss(entry, entry.guess)})")
    line = f"{name}: " + " · ".join(parts)
    ending = {
        "guess": "your guess was nearer",
        "prediction": "the prediction was nearer",
        "both alike": "guess and prediction were equally near",
        "both in the spread": "guess and prediction both lie within the spread",
    }.get(_nearer(entry))
    if ending:
        line += f" → {ending}"
    return f"{line} [{QUICK_STAMP}]" if entry.quick else line


def _nearer(entry: _Entry) -> str | None:
    """Which was nearer; None where there is nothing to compare."""
    if None in (entry.guess, entry.predicted, entry.measured):
        return None
    low, high = _bounds(entry)
    if low < high and all(low <= value <= high for value in (entry.guess, entry.predicted)):
        return "both in the spread"
    mine, formula = (_distance(entry.measured, value) for value in (entry.guess, entry.predicted))
    if math.isclose(mine, formula, rel_tol=1e-6, abs_tol=1e-9):
        return "both alike"
    # A guess of zero or less is infinitely far by ratio; where both are, the difference decides.
    return "guess" if mine < formula else "prediction"


def _distance(measured: float, value: float) -> float:
    """How far ``value`` is from a measurement: |log ratio| for positive quantities, else the difference."""
    if measured <= 0:
        return abs(value - measured)
    return abs(math.log(value / measured)) if value > 0 else math.inf


def _miss(entry: _Entry, value: float) -> str:
    """How a value missed the measurement, in words: "12 % too low", "3.4 times too high"."""
    measured = entry.measured
    low, high = _bounds(entry)
    if value == measured or low < high and low <= value <= high:
        return "within the spread" if low < high else "exact"
    side = "high" if value > measured else "low"
    if measured <= 0 or value <= 0:
        return f"{number(abs(value - measured), entry.unit)} too {side}"
    factor = max(value / measured, measured / value)
    if factor >= 2:
        return f"{number(factor)} times too {side}"
    percent = 100 * abs(value / measured - 1)
    return f"{percent:.0f} % too {side}" if percent >= 1 else "within 1 %"


def _bounds(entry: _Entry) -> tuple[float, float]:
    """The interval the spread stands for; an IQR is laid half to each side."""
    if isinstance(entry.spread, tuple):
        return entry.spread
    half = (entry.spread or 0.0) / 2
    return entry.measured - half, entry.measured + half


def _spread(spread) -> float | tuple[float, float] | None:
    if spread is None:
        return None
    if isinstance(spread, Sequence):
        low, high = (_finite("spread", side) for side in spread)
        return (low, high)
    return _finite("spread", spread)


def _spread_text(spread: float | tuple[float, float] | None) -> str:
    if spread is None:
        return ""
    if isinstance(spread, tuple):
        return f" ({number(spread[0])} to {number(spread[1])})"
    return f" (IQR {number(spread)})"


def _finite(where: str, value) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise ValueError(f"{where}: {value!r} is not a number; write one, such as 12.5, or None for no guess")
    return result


# --- verdicts --------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """One claim, judged on this machine. Shown as a card once in the cell that made it, and again wherever asked for."""

    claim_id: str
    claim: str
    measured: str | list[str]
    predicted: str | list[str]
    word: str
    condition: str
    miss: str
    details: str = ""
    quick: bool = False
    _cell: int | None = field(default=None, repr=False, compare=False)

    @property
    def fields(self) -> dict:
        """What goes to the collecting command: all fields, strings and lists of strings, and the stamp or ''."""
        values = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {"kind": "verdict", **values, "stamp": QUICK_STAMP if self.quick else ""}

    def rows(self) -> list[tuple[str, list[str]]]:
        """The card's lines: (what, lines of text), in order, the empty ones left out."""
        pairs = (
            ("Claim as quoted", f"“{self.claim}”"),
            ("Measured here", self.measured),
            ("Predicted", self.predicted),
            ("On what condition", self.condition),
            ("Where the prediction missed", self.miss),
            ("Made on", self.details),
        )
        listed = [(what, [said] if isinstance(said, str) else list(said)) for what, said in pairs]
        return [(what, said) for what, said in listed if any(said)]

    def title(self) -> str:
        stamp = f" [{QUICK_STAMP}]" if self.quick else ""
        return f"Verdict {self.claim_id}: {_SYMBOLS[self.word]} {self.word}{stamp}"

    def text(self) -> str:
        """The card as plain text, continuation lines indented."""
        indent = "\n" + " " * 4
        body = [f"  {what}: {indent.join(said)}" for what, said in self.rows()]
        return "\n".join([self.title(), *body])

    def html(self) -> str:
        """The card as a table; no colour carries a meaning, so it reads the same with styles stripped."""
        left = 'align="left" valign="top" style="text-align:left;vertical-align:top;padding:.35em .8em'
        rows = "".join(
            f'<tr style="background:transparent"><th {left};white-space:nowrap;font-weight:600">{what}</th>'
            f'<td {left}">{"<br>".join(escape(line) for line in said)}</td></tr>'
            for what, said in self.rows()
        )
        stamp = f" &nbsp; <b><u>{QUICK_STAMP}</u></b>" if self.quick else ""
        title = f"Verdict {escape(self.claim_id)}: {_SYMBOLS[self.word]} <b>{self.word}</b>{stamp}"
        edge = f"border:1px solid rgba(128,128,128,.5);border-left:6px solid {_EDGES[self.word]}"
        return (
            f'<table style="{edge};border-collapse:collapse;max-width:52em;margin:.6em 0">'
            f'<thead><tr style="background:transparent"><th colspan="2" {left};font-size:125%;font-weight:400">{title}'
            f"</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    def show(self) -> None:
        emit(self.html(), self.text(), self.fields)

    def _ipython_display_(self) -> None:
        # The last expression of a cell is displayed by IPython: not twice in the cell that has just shown the card.
        if self._cell is None or self._cell != _execution_count():
            self.show()


def verdict(
    claim_id: str,
    claim: str,
    *,
    measured: str | Sequence[str],
    predicted: str | Sequence[str],
    word: str,
    condition: str,
    miss: str,
    details: str = "",
    quick: bool = False,
) -> Verdict:
    """Judge a claim: shows the card and returns it.

    Args:
        claim_id: "C1" … "C6". claim: the sentence as quoted.
        measured, predicted: one text, or one text per line.
        word: one of ``WORDS``. condition: in one sentence. miss: where the prediction missed, and the best reason.
        details: machine, model, dtype, repeats (``plotting.provenance``); empty: this machine's description.
        quick: stamps the card "quick run: not a verdict".

    Raises ValueError for another word.
    """
    if word not in WORDS:
        known = ", ".join(repr(w) for w in WORDS)
        raise ValueError(f"word={word!r} is not a verdict of this course; choose one of {known}")
    card = Verdict(
        claim_id,
        claim,
        _lines(measured),
        _lines(predicted),
        word,
        condition,
        miss,
        details or _machine(),
        bool(quick),
        _execution_count(),
    )
    card.show()
    return card


def _lines(said: str | Sequence[str]) -> str | list[str]:
    return list(said) if isinstance(said, (list, tuple)) else str(said)


def _machine() -> str:
    from course_utils import machine

    return machine.describe()


def _execution_count() -> int | None:
    return getattr(_shell(), "execution_count", None)
