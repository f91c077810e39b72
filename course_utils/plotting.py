"""The course's figures: one style, colours that survive colour blindness, alt text and provenance in every picture.

Colour never carries a meaning alone: each has its own marker, and predictions are dashed. Figures are made without
pyplot, so no window or backend is asked for and no figure stays open. Matplotlib is imported at first use.
"""

from __future__ import annotations

import functools
import io
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from course_utils.claims import emit, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("course.mplstyle")

# Okabe and Ito 2008.
COLORS = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#777777",
}
MARKERS = dict(zip(COLORS, ("o", "s", "^", "D", "v", "P", "d", "X", "."), strict=True))  # the second cue

_PRESENT = 1.35  # how much larger letters and lines are on a projector
_scale = 1.0


# --- making and showing ----------------------------------------------------------------------------------------------


@contextmanager
def use_style():
    """The course's style for the ``with`` block; what was set before comes back after it."""
    import matplotlib

    with matplotlib.rc_context():
        _apply_style()
        yield


def present(on: bool = True) -> None:
    """Larger letters and lines in all figures made from now on, for a projector; ``present(False)`` takes it back."""
    global _scale
    _scale = _PRESENT if on else 1.0


def figure(
    width: float = 8.0, height: float = 4.2, ncols: int = 1, nrows: int = 1, **kwargs
) -> tuple[Figure, Axes]:
    """A figure of width × height inches in the course's style, and its axes (an array where there are several).

    The style stays set, so that titles and lines added afterwards look alike. Further arguments go to
    ``Figure.subplots`` (``sharey``, ``width_ratios`` …).
    """
    from matplotlib.figure import Figure

    _apply_style()
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(nrows, ncols, **kwargs)


def png(fig: Figure) -> bytes:
    """The figure as PNG, with a palette of at most 256 colours: half the size, no difference to be seen."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, format="png", dpi=fig.get_dpi(), metadata={"Software": None})
    raw.seek(0)
    # Without a palette "fast octree" dithers nothing and keeps flat colours flat.
    Image.open(raw).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return min(raw.getvalue(), small.getvalue(), key=len)


def show(fig: Figure, alt: str, provenance: str | None = None) -> None:
    """Show a figure as PNG with its alt text, and close it.

    Args:
        alt: what the picture says, for those who can't see it; also the output's plain text.
        provenance: a line (see :func:`provenance`) drawn in grey below the axes.

    Raises ValueError for an empty alt text. Outside IPython nothing is shown.
    """
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError("alt is empty; say in one or two sentences what the picture shows")
    alt = " ".join(alt.split())
    if provenance:
        _footnote(fig, provenance)
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from IPython.display import display

        data = {"image/png": png(fig), "text/plain": alt}
        display(data, raw=True, metadata={"image/png": {"alt": alt}})
    _close(fig)


def provenance(*, model: str, dtype, repeats: int, device=None, when: str | date | None = None) -> str:
    """One line that says where the numbers of a figure come from: model, machine, dtype, torch, repeats and day."""
    from course_utils import machine

    day, runs = when or date.today(), "1 run" if repeats == 1 else f"{repeats} runs"
    return f"{model} · {machine.describe(device, dtype)} · {runs} · {day} · yours will differ in number"


@functools.cache
def _settings() -> dict:
    """The style file's settings, read once."""
    import matplotlib

    return dict(matplotlib.rc_params_from_file(STYLE, use_default_template=False))


def _apply_style() -> None:
    import matplotlib

    matplotlib.rcParams.update(_settings())
    if _scale == 1.0:
        return
    sizes = (
        "font.size",
        "axes.labelsize",
        "axes.titlesize",
        "xtick.labelsize",
        "ytick.labelsize",
        "legend.fontsize",
    )
    for name in (*sizes, "lines.linewidth", "lines.markersize"):
        matplotlib.rcParams[name] *= _scale


def _footnote(fig: Figure, line: str) -> None:
    """Write ``line`` at the figure's foot and keep the axes above it."""
    width, height = fig.get_size_inches()
    wrapped = textwrap.wrap(line, int(width * 17))  # letters of 7.5 points
    inches = 0.14 * len(wrapped) + 0.06
    fig.set_size_inches(width, height + inches)
    if fig.get_layout_engine() is None:
        fig.set_layout_engine("constrained")
    share = inches / (height + inches)
    fig.get_layout_engine().set(rect=(0, share, 1, 1 - share))
    fig.text(
        0.06 / width,
        0.05 / (height + inches),
        "\n".join(wrapped),
        fontsize=7.5,
        color=COLORS["grey"],
        va="bottom",
    )


def _close(fig: Figure) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)


# --- kinds of lines --------------------------------------------------------------------------------------------------


def lines(
    ax: Axes,
    x,
    y,
    spread=None,
    label: str | None = None,
    color: str = "blue",
    marker: str | None = None,
    predicted: bool = False,
):
    """Draw one series: measured as joined markers with spread, predicted as a dashed line without markers.

    Args:
        spread: interquartile ranges, shape (n,), half drawn to each side; or (low, high), shape (2, n).
        color: a name in ``COLORS`` or any colour. marker: the colour's own unless given.

    Returns the drawn line.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    shade = COLORS.get(color, color)
    if predicted:
        return ax.plot(x, y, "--", color=shade, label=label, marker=marker or "", lw=0.8 * _line_width())[0]
    marker = marker or MARKERS.get(color, "o")
    if spread is not None:
        ax.errorbar(
            x, y, yerr=_whiskers(y, spread), fmt="none", ecolor=shade, elinewidth=1.2, alpha=0.8, zorder=2
        )
    return ax.plot(x, y, "-", color=shade, marker=marker, label=label, zorder=3)[0]


def guess_star(ax: Axes, x: float, y: float | None, label: str = "your guess") -> None:
    """A star where the reader's guess lies; None draws nothing."""
    if y is None:
        return
    ax.plot([x], [y], "*", ms=17, color=COLORS["orange"], mec=COLORS["black"], mew=0.9, label=label, zorder=5)


def _line_width() -> float:
    import matplotlib

    return matplotlib.rcParams["lines.linewidth"]


def _whiskers(y: np.ndarray, spread) -> np.ndarray:
    spread = np.asarray(spread, dtype=float)
    if spread.ndim == 2:
        low, high = spread
        return np.stack((y - low, high - y)).clip(min=0)
    return np.broadcast_to(spread / 2, y.shape)


# --- the course's curve ----------------------------------------------------------------------------------------------


def course_curve(
    rows: Sequence[int],
    seconds: Sequence[float],
    *,
    spread=None,
    predicted: Callable | Sequence[float] | None = None,
    marks: Sequence[tuple[float, str, str]] = (),
    knee: float | None = None,
    title: str = "Feeding more rows: where does the time start to climb?",
    label: str = "measured",
    other: tuple[Sequence[int], Sequence[float], str] | None = None,
) -> Figure:
    """The course's one curve: milliseconds per forward against the rows fed in it, both axes logarithmic.

    Args:
        rows, seconds: measured, in order of rows. spread: as in :func:`lines`, in seconds.
        predicted: seconds at ``rows``, or a function of an array of rows: the idealised roofline, dashed.
        marks: (rows, label, symbol) such as (1, "with a cache", "②"), drawn on the measured curve. Two marks with
            one symbol are a move: an arrow leads from the first to the second.
        knee: rows at which the two terms of the roofline meet.
        title: what to see.
        label: of the measured curve.
        other: a second measured curve as (rows, seconds, label), and the move ① from the first to it, drawn where both
            feed fewest rows: what chapter 1 changes.

    Raises ValueError where the two curves have no number of rows in common.
    """
    rows, seconds = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    fig, ax = figure(8.0, 4.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    scaled = None if spread is None else np.asarray(spread, dtype=float) * 1e3
    lines(ax, rows, seconds * 1e3, scaled, label=label, color="blue")
    ms, moves = seconds * 1e3, _moves(rows, seconds * 1e3, marks)
    if other is not None:
        other = (other[0], np.asarray(other[1], dtype=float) * 1e3, other[2])
        lines(ax, *other[:2], label=other[2], color="green")
        moves = _lowering(rows, ms, label, other) | moves
        ms = np.concatenate((ms, other[1]))
    low = ms.min()
    if predicted is not None:
        dense, ideal = _roofline(rows, predicted)
        words = "idealised: the longer of two limits, with overhead"
        lines(ax, dense, ideal * 1e3, color="grey", label=words, predicted=True)
        low = min(low, ideal.min() * 1e3 * 1.5)
    if knee is not None and math.isfinite(knee):
        _draw_knee(ax, knee, rows)
    _plain_ticks(ax, rows)
    _limit_height(ax, low, ms.max(), moves, straight=other is not None)
    _draw_marks(ax, moves, np.stack((rows, seconds * 1e3), 1))
    ax.set(title=title, xlabel="rows fed in one forward (log scale)", ylabel="ms per forward (log scale)")
    _legend_below(ax)
    return fig


def _legend_below(ax: Axes) -> None:
    """The legend below the label of the x axis: between the curves no place is always free."""
    from matplotlib.transforms import offset_copy

    below = offset_copy(ax.transAxes, ax.figure, y=-40 * _scale, units="points")
    place = {"loc": "upper left", "bbox_to_anchor": (-0.07, 0), "bbox_transform": below, "borderaxespad": 0}
    ax.legend(ncols=3 if _scale == 1.0 else 2, fontsize="small", columnspacing=1.4, **place)


def _roofline(rows: np.ndarray, predicted) -> tuple[np.ndarray, np.ndarray]:
    if not callable(predicted):
        return rows, np.asarray(predicted, dtype=float)
    dense = np.geomspace(rows.min(), rows.max(), 200)
    return dense, np.asarray([float(predicted(r)) for r in dense])


def _draw_knee(ax: Axes, knee: float, rows: np.ndarray) -> None:
    right = math.log(knee / rows.min()) < 0.3 * math.log(rows.max() / rows.min())
    ax.axvline(knee, color=COLORS["grey"], lw=1.2, ls=":")
    ax.annotate(
        f"knee ≈ {number(round(knee) if knee >= 10 else knee)} rows",
        (knee, 0.03),
        xycoords=ax.get_xaxis_transform(),
        xytext=(5 if right else -5, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        color="#444444",
        fontsize="small",
    )


def _on_curve(at: float, rows, ms) -> float:
    return float(np.exp(np.interp(math.log(at), np.log(rows), np.log(ms))))


def _moves(rows, ms, marks) -> dict[str, list[tuple[float, float, str]]]:
    """The marks as (rows, ms, label) of the measured curve, by symbol."""
    moves: dict[str, list[tuple[float, float, str]]] = {}
    for at, label, symbol in marks:
        moves.setdefault(symbol, []).append((at, _on_curve(at, rows, ms), label))
    return moves


def _lowering(rows, ms, label: str, other) -> dict[str, list[tuple[float, float, str]]]:
    """Move ① from the measured curve to the other one, at the fewest rows both were fed."""
    common = set(rows) & set(other[0])
    if not common:
        raise ValueError(
            f"other has rows {list(other[0])}; measure both curves at one number of rows at least"
        )
    at = min(common)
    return {"①": [(at, _on_curve(at, rows, ms), label), (at, _on_curve(at, other[0], other[1]), other[2])]}


def _limit_height(ax: Axes, low: float, high: float, moves: dict, straight: bool) -> None:
    """Room above the moves' starts for the words, and below the lowest point for the number of a straight arrow."""
    starts = [y for points in moves.values() for _, y, _ in points[:1]]
    top = max([high * 1.3, *(y * 2 ** (1 + len(moves)) for y in starts)])
    ax.set_ylim(low / max(1.9, (top / low) ** 0.2 if straight else 0), top)


def _draw_marks(ax: Axes, moves: dict[str, list[tuple[float, float, str]]], measured: np.ndarray) -> None:
    """Circled numbers at their points, and what they stand for in the empty corner above the flat part.

    measured: points (n, 2) as (rows, ms) that no arrow may cover. The limits of the axes are set already.
    """
    if not moves:
        return
    crowd: dict[tuple[float, float], int] = {}  # symbols already standing at a point
    for symbol, points in moves.items():
        spots = [(at, y) for at, y, _ in points]
        for start, end in zip(spots, spots[1:], strict=False):
            _draw_move(ax, start, end, measured)
        for spot in spots:
            # A way straight up or down has its numbers outside of the two circles.
            below = any(spot[0] == x and spot[1] < y for x, y in spots)
            _draw_symbol(ax, *spot, symbol, crowd.setdefault(spot, 0), below)
            crowd[spot] += 1
    key = [f"{symbol} {' → '.join(label for *_, label in points)}" for symbol, points in moves.items()]
    style = {"va": "top", "color": _OWN, "fontweight": "bold", "linespacing": 1.5, "zorder": 6}
    style["bbox"] = {"fc": "white", "ec": "none", "pad": 1.5}
    ax.text(0.015, 0.98, "\n".join(key), transform=ax.transAxes, **style)


def _draw_symbol(ax: Axes, at: float, y: float, symbol: str, neighbours: int, below: bool) -> None:
    ax.plot([at], [y], "o", ms=15, mfc="none", mec=_OWN, mew=2, zorder=4)
    ax.annotate(
        symbol,
        (at, y),
        xytext=(0, (-17 if below else 17) * (1 + neighbours)),  # beside it an arrow may come in
        textcoords="offset points",
        ha="center",
        va="center",
        color=_OWN,
        fontsize="x-large",
        fontweight="bold",
    )


def _draw_move(ax: Axes, start: tuple[float, float], end: tuple[float, float], measured: np.ndarray) -> None:
    """An arrow from where a step stood to where the chapter puts it, past the measured points."""
    style = {
        "arrowstyle": "-|>",
        "color": _OWN,
        "lw": 1.8,
        "mutation_scale": 16,
        "shrinkA": 11,
        "shrinkB": 11,
    }
    ends = ax.transData.transform([start, end])
    bend = 0.0
    if end[0] != start[0]:
        low, high = sorted((start[0], end[0]))
        between = measured[(low < measured[:, 0]) & (measured[:, 0] < high)]
        bend = _bend(ends, ax.transData.transform(between), 14 / 72 * ax.figure.dpi)
    elif abs(ends[1, 1] - ends[0, 1]) < 30:
        return  # the two circles touch
    ax.annotate("", end, start, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"}, zorder=4)


def _bend(ends: np.ndarray, points: np.ndarray, distance: float) -> float:
    """The least bend upwards with which an arrow between two ends keeps its distance from all points, in pixels.

    A fixed one lay on the first points where the second row costs much.
    """
    (start, end), t = ends, np.linspace(0, 1, 101)[:, None]
    away = end - start
    sign = 1 if away[0] < 0 else -1
    for bend in (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5):
        middle = (start + end) / 2 + sign * bend * np.array([away[1], -away[0]])
        path = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
        if all(np.hypot(*(path - point).T).min() >= distance for point in points):
            break
    return sign * bend


def _plain_ticks(ax: Axes, rows: np.ndarray) -> None:
    """Powers of two and ordinary numbers instead of 2³ and 10¹."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    ax.xaxis.set_major_formatter(plain)
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(plain)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlim(rows.min() / 1.35, rows.max() * 1.35)


# --- the seam strip and the formula ----------------------------------------------------------------------------------

# (seam, what the chapter does there, the knobs in the formula, the knob in words), by chapter
_CHAPTERS = {
    1: (
        "Linear",
        "quantized weights in place of nn.Linear",
        ("b_w",),
        "bytes per weight b_w: 4 → 1 and less",
    ),
    2: ("Cache", "a cache object handed to forward()", ("rows", "KV"), "rows: n → 1, and KV(n) appears"),
    3: ("loop", "draft, verify, accept, roll back", ("rows",), "rows: 1 → k + 1"),
    4: ("scheduler", "which rows are in this step", ("rows", "sequences"), "rows and sequences: 1 → B"),
}
_OWN = COLORS["vermillion"]  # the chapter's own seam and knob, everywhere


def _chapter(chapter: int) -> tuple:
    if chapter not in _CHAPTERS:
        raise ValueError(f"chapter={chapter!r} is not one of 1, 2, 3, 4")
    return _CHAPTERS[chapter]


def seam_strip(chapter: int) -> None:
    """Show the four seams, this chapter's filled: two inside of the decoder, the loop around it, around that the scheduler.

    Raises ValueError for a chapter other than 1 to 4.
    """
    seam, does, _, _ = _chapter(chapter)
    first, second, third, fourth = (f"{n} {name}" for n, (name, *_) in _CHAPTERS.items())
    alt = (
        f"Tokens go into the decoder, logits come out. The decoder has two seams inside, {first} and {second}; two stand "
        f"around it, {third} and {fourth}. "
        f"Seam {chapter}, {seam}, is filled: this chapter's. {does[0].upper()}{does[1:]}."
    )
    show(_seam_figure(chapter), alt)


# Left, bottom, width, height in inches. The frames lie inside each other: the decoder's own code knows neither the loop
# that feeds it nor the scheduler that chooses what is fed.
_FRAMES = {4: (0.05, 0.30, 7.9, 0.92), 3: (1.5, 0.36, 6.37, 0.80)}
_SEAMS = {
    1: (3.67, 0.47, 1.3, 0.36),
    2: (5.07, 0.47, 1.3, 0.36),
    3: (1.6, 0.56, 1.0, 0.4),
    4: (0.15, 0.56, 1.25, 0.4),
}


def _seam_figure(chapter: int) -> Figure:
    from matplotlib.patches import FancyBboxPatch

    width, height = 8.0, 1.25
    fig, ax = figure(width, height)
    fig.set_layout_engine("none")
    ax.set_position((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")

    def box(x, y, w, h, own=False, **kwargs):
        edge = {"ec": _OWN, "lw": 2} if own else {"ec": "#888888", "lw": 1}
        shape = "round,pad=0,rounding_size=0.06"
        ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=shape, **edge, **kwargs))

    for n, frame in _FRAMES.items():
        box(*frame, own=n == chapter, fc="white")
    box(3.57, 0.41, 2.9, 0.7, fc="#F0F0F0")
    words = {"ha": "center", "va": "center"}
    ax.text(5.02, 0.965, "Decoder: its code stays the same", fontsize=10, color="#444444", **words)
    for n, (name, *_) in _CHAPTERS.items():
        x, y, w, h = _SEAMS[n]
        own = n == chapter
        box(x, y, w, h, own, fc=_OWN if own else "white")
        style = {"color": "white", "weight": "bold"} if own else {"color": "#444444"}
        ax.text(x + w / 2, y + h / 2 - 0.01, f"{n}  {name}", fontsize=11.5, **words, **style)
    arrow = {"arrowstyle": "-|>", "color": "#444444", "lw": 1.4, "mutation_scale": 14}
    for text, x, tail, head in (("tokens", 2.95, 3.25, 3.57), ("logits", 7.12, 6.47, 6.84)):
        ax.text(x, 0.76, text, fontsize=11.5, color="#222222", **words)
        ax.annotate("", (head, 0.76), (tail, 0.76), arrowprops=arrow | {"shrinkA": 1, "shrinkB": 1})
    _draw_deed(ax, chapter)
    return fig


def _draw_deed(ax: Axes, chapter: int) -> None:
    """What the chapter does, below its seam, towards the side that has room."""
    x, _, w, _ = _SEAMS[chapter]
    does = _CHAPTERS[chapter][1]
    right = x < 4
    ax.text(
        x + w / 2 + (-0.08 if right else 0.08),
        0.13,
        f"▲ {does}" if right else f"{does} ▲",
        ha="left" if right else "right",
        va="center",
        fontsize=11,
    )


def formula_box(chapter: int) -> None:
    """Show the course's formula for the time of one step, this chapter's knob bold, underlined and in colour.

    Raises ValueError for a chapter other than 1 to 4.
    """
    _, _, knobs, words = _chapter(chapter)
    # Bold and underlined where style attributes are stripped; the colour comes on top where they are kept.
    html = {
        name: f'<b><u><span style="color:{_OWN}">{sign}</span></u></b>' if name in knobs else sign
        for name, sign in (
            ("rows", "rows"),
            ("b_w", "b<sub>w</sub>"),
            ("sequences", "sequences"),
            ("KV", "KV(n)"),
        )
    }
    formula = (
        f"t(step) &nbsp;≈&nbsp; overhead &nbsp;+&nbsp; max( 2·P·{html['rows']} / F , P·{html['b_w']} / BW )"
        f" &nbsp;+&nbsp; {html['sequences']} · {html['KV']} / BW"
    )
    legend = (
        "P parameters · F arithmetic per second (FLOP/s) · BW bytes read per second · b<sub>w</sub> bytes per weight"
        " · KV(n) bytes of keys and values of n tokens"
    )
    turn = f"This chapter turns {words}."
    left = 'align="left" style="text-align:left;padding:.5em .9em"'
    table = (
        f'<table style="border:1px solid rgba(128,128,128,.5);border-left:6px solid {_OWN}">'
        f'<tbody><tr style="background:transparent"><td {left}><span style="font-size:125%">{formula}</span><br>'
        f"{turn.replace('b_w', 'b<sub>w</sub>')}<br><small>{legend}</small></td></tr></tbody></table>"
    )
    plain = {name: f"[{sign}]" if name in knobs else sign for name, sign in _PLAIN.items()}
    text = (
        f"t(step) ≈ overhead + max( 2·P·{plain['rows']} / F , P·{plain['b_w']} / BW )"
        f" + {plain['sequences']} · {plain['KV']} / BW\n{turn}"
    )
    emit(table, text)


_PLAIN = {"rows": "rows", "b_w": "b_w", "sequences": "sequences", "KV": "KV(n)"}


# --- attention ---------------------------------------------------------------------------------------------------------


def attention_map(ax: Axes, weights, words: Sequence[str], new: int = 1) -> None:
    """Attention weights (n, n) of one head as shades with numbers; the last ``new`` rows, computed now, are outlined.

    words: the n tokens as text. A row is a query, a column the key it looks at; what the causal mask hides stays white.
    """
    from matplotlib.patches import Rectangle

    weights = np.asarray(weights, dtype=float)
    n = len(words)
    hidden = np.triu(np.ones((n, n), dtype=bool), 1)
    ax.imshow(np.ma.masked_array(weights, hidden), cmap="Blues", vmin=0, vmax=1.2)
    for row, column in zip(*np.nonzero(~hidden), strict=True):
        weight = weights[row, column]
        color = "white" if weight > 0.7 else "black"
        ax.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize="small", color=color)
    outline = {"fill": False, "ec": _OWN, "lw": 3, "clip_on": False}
    ax.add_patch(Rectangle((-0.5, n - new - 0.5), n, new, **outline))
    ax.set_xticks(range(n), words)
    ax.set_yticks(range(n), words)
    ax.set(xlabel="key: looked at", ylabel="query: looks")
    ax.grid(False)


# --- quantization ------------------------------------------------------------------------------------------------------


def quantization_grid(ax: Axes, w, scale, bits: int = 8, taken=None, size: float = 5.0) -> None:
    """Draw weights in their order on the levels they may take: -(2^(bits-1)-1)·scale to (2^(bits-1)-1)·scale.

    A hollow circle is a weight, a dot the level it takes, the line between them its error; ``ax.legend()`` names them.
    More than 61 levels in view are drawn as a grey area.

    Args:
        w: (n,). scale: one number, or (groups,), each for an equal part of w.
        taken: (n,), what w became; None rounds to the nearest level. size: of the dots, in points.

    Raises ValueError where the groups do not divide the weights.
    """
    from matplotlib.collections import LineCollection

    w, scale = np.asarray(w, dtype=float), np.atleast_1d(np.asarray(scale, dtype=float))
    if w.ndim != 1 or len(w) % len(scale):
        raise ValueError(
            f"w has shape {w.shape}, not (n,) with n a multiple of the {len(scale)} scales; give one row"
        )
    width, top = len(w) // len(scale), 2 ** (bits - 1) - 1
    if taken is None:
        each = np.repeat(scale, width)
        taken = np.clip(np.rint(w / each), -top, top) * each
    taken, places = np.asarray(taken, dtype=float), np.arange(len(w))
    reach = max(1.15 * abs(w).max(), 1.04 * abs(taken).max()) or 1.0  # mostly the same for the same weights
    for part, step in enumerate(scale):
        ends = part * width - 0.5, (part + 1) * width - 0.5
        _draw_levels(ax, step, top, reach, ends, label="" if part else "levels")
    errors = np.stack((np.stack((places, w), 1), np.stack((places, taken), 1)), 1)
    red, blue = COLORS["vermillion"], COLORS["blue"]
    ax.add_collection(LineCollection(errors, colors=red, linewidths=1.2, zorder=2), autolim=False)
    dots = {"marker": "o", "ls": ""}
    ax.plot(places, w, mfc="white", mec=red, mew=0.9, ms=0.8 * size, zorder=3, label="weight", **dots)
    ax.plot(places, taken, color=blue, mew=0, ms=size, zorder=4, label="rounded", **dots)
    ax.set(xlim=(-1, len(w)), ylim=(-reach, reach))
    ax.grid(False)


def _draw_levels(
    ax: Axes, step: float, top: int, reach: float, ends: tuple[float, float], label: str
) -> None:
    """The levels up to ±reach as lines; where they stand too close to be told apart, as one area."""
    from matplotlib.collections import LineCollection

    most = min(top, int(reach / step))
    if most > 30:
        style = {"color": "#E6E6E6", "lw": 0, "zorder": 1, "label": label}
        ax.fill_between(ends, -most * step, most * step, **style)
        return
    levels = np.arange(-most, most + 1) * step
    style = {"colors": "#9A9A9A", "linewidths": 0.8, "zorder": 1, "label": label}
    ax.add_collection(LineCollection([[(x, y) for x in ends] for y in levels], **style), autolim=False)


def intervals(ax: Axes, names: Sequence[str], intervals: Sequence) -> None:
    """Draw differences with their intervals, one a row from the top, around a line at 0.

    A filled square is a difference whose interval leaves out 0, a hollow circle one whose interval covers it.

    Args:
        names: what is compared, such as "int8 − float32". intervals: each with mean, low, high and separates
            (``evaluation.Interval``).

    Raises ValueError where there is not one interval to each name.
    """
    from matplotlib.ticker import MaxNLocator

    if len(names) != len(intervals):
        raise ValueError(f"{len(names)} names for {len(intervals)} intervals; give one name each")
    for place, interval in enumerate(intervals):
        color, marker = ("vermillion", "s") if interval.separates else ("grey", "o")
        sides = [[max(0.0, interval.mean - interval.low)], [max(0.0, interval.high - interval.mean)]]
        fill = COLORS[color] if interval.separates else "white"
        style = {
            "fmt": marker,
            "color": COLORS[color],
            "mfc": fill,
            "mec": COLORS[color],
            "ms": 9,
            "mew": 1.6,
        }
        ax.errorbar(
            interval.mean, place, xerr=sides, elinewidth=2.4, capsize=5, capthick=2.4, zorder=3, **style
        )
        verdict = "leaves out 0" if interval.separates else "covers 0"
        ax.annotate(
            f"{interval.mean:+.4f}, {verdict}".replace("-", "−"),
            (interval.high, place),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=COLORS[color] if interval.separates else "#555555",
            fontsize="small",
        )
    ax.axvline(0, color="#444444", lw=1.4, zorder=1)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlabel="difference, nats per token, with 95 % interval")
    ax.grid(axis="y", visible=False)
    low, high = min(0, *(i.low for i in intervals)), max(0, *(i.high for i in intervals))
    ax.set_xlim(low - 0.06 * (high - low), high + 0.45 * (high - low))  # room for the words


# (bytes read per weight, seconds of one matrix-vector product, words beside the point)
Point = tuple[float, float, str]


def bytes_and_time(
    torch_points: Sequence[Point],
    own_points: Sequence[Point],
    naive_points: Sequence[Point] = (),
    *,
    weights: int,
    bandwidth: float,
    model_scale: float | None = None,
    overhead: float | None = None,
    title: str = "Does the time follow the bytes?",
) -> Figure:
    """Chapter 1's picture: milliseconds of one matrix-vector product against the bytes read per weight.

    Both axes are logarithmic, so that a factor is the same distance everywhere: the effect of the kernel (from square
    to circle at the same bytes) and of the bytes (along the circles) add up, and one bandwidth is one straight line.

    Args:
        torch_points, own_points: (bytes per weight, seconds, label) of each kernel, joined in the order of bytes.
        naive_points: the same for forms that write a converted matrix and read it again; crosses, not joined.
        weights: in the matrix. bandwidth: bytes/s read, measured; its line is weights · bytes / bandwidth.
        model_scale: seconds of all products of one step over those of this one; draws the right axis.
        overhead: seconds of a step spent in no product; a line on the right axis, which it needs.

    Raises ValueError for points without a positive place, no points, and an overhead without model_scale.
    """
    torch_points, own_points, naive_points = (sorted(p) for p in (torch_points, own_points, naive_points))
    points = [*torch_points, *own_points, *naive_points]
    wrong = [point for point in points if not (point[0] > 0 and point[1] > 0)]
    if wrong or not points:
        raise ValueError(
            f"points {wrong or points} have no place on a log scale; give bytes and seconds above 0"
        )
    if overhead is not None and model_scale is None:
        raise ValueError("overhead is a line on the right axis; give model_scale as well")
    fig, ax = figure(8.0, 5.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _draw_kernel(ax, torch_points, "torch's kernels", color="grey", marker="s", ls="--", above=True)
    _draw_kernel(ax, own_points, "our one kernel", color="blue", marker="o", ls="-", above=False)
    _draw_kernel(
        ax, naive_points, "dequantize, then multiply", color="vermillion", marker="X", ls="", above=True
    )
    floor = overhead * 1e3 / model_scale if overhead else math.inf
    _limit_bytes(ax, points, floor)
    _draw_effects(ax, torch_points, own_points)
    _draw_bandwidth(ax, weights, bandwidth)
    if model_scale is not None:
        _draw_whole_model(ax, model_scale, overhead)
    ax.set(
        title=title, xlabel="bytes read per weight (log scale)", ylabel="ms, one matrix × vector (log scale)"
    )
    # Below the axes: among the points no place is always free.
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.15 * _scale), "borderaxespad": 0}
    ax.legend(ncols=3 if _scale == 1.0 else 2, fontsize="small", columnspacing=1.4, **below)
    return fig


def _draw_kernel(ax: Axes, points: Sequence[Point], label: str, color: str, above: bool, **style) -> None:
    if not points:
        return
    ax.plot(
        [at for at, *_ in points],
        [1e3 * seconds for _, seconds, _ in points],
        **{"color": COLORS[color], "label": label, "ms": 9, "zorder": 3} | style,
    )
    shade = "#555555" if color == "grey" else COLORS[color]
    for (at, seconds, words), (after, *_) in zip(points, [*points[1:], (math.inf,)], strict=True):
        below = "below left" if after < 2 * at else "below right"
        _beside(ax, words, at, 1e3 * seconds, "above left" if above else below, shade)


def _beside(ax: Axes, words: str, x: float, y: float, side: str, color: str, **style) -> None:
    """Small words beside a point, readable across lines."""
    from matplotlib.patheffects import withStroke

    across, up = 1 if "right" in side else -1, {"above": 1, "below": -1}.get(side.split()[0], 0)
    ax.annotate(
        words,
        (x, y),
        xytext=(6 * across if up else 9 * across, 7 * up),
        textcoords="offset points",
        ha="left" if across > 0 else "right",
        va={1: "bottom", 0: "center", -1: "top"}[up],
        color=color,
        fontsize="small",
        zorder=5,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **style,
    )


def _draw_effects(ax: Axes, torch_points: Sequence[Point], own_points: Sequence[Point]) -> None:
    """How many times faster: from square to circle at the same bytes, and from circle to circle."""
    torch_seconds = {at: seconds for at, seconds, _ in torch_points}
    own_seconds = {at: seconds for at, seconds, _ in own_points}
    common = set(torch_seconds) & set(own_seconds)
    if common:
        at = max(common)
        start, end = torch_seconds[at], own_seconds[at]
        arrow = {"arrowstyle": "-|>", "color": COLORS["black"], "lw": 1.4, "shrinkA": 7, "shrinkB": 7}
        far = abs(math.log(start / end)) > 0.2  # else square and circle touch
        if far:
            ax.annotate("", (at, 1e3 * end), (at, 1e3 * start), arrowprops=arrow, zorder=4)
        middle = 1e3 * math.sqrt(start * end)
        _beside(ax, f"kernel: {number(start / end)}x", at, middle, "right", "black", weight="bold")
    for (less, shorter, _), (more, longer, _) in zip(own_points, own_points[1:], strict=False):
        if more >= 2 * less:  # closer points leave no room
            middle = math.sqrt(more * less), 1e3 * math.sqrt(longer * shorter)
            words = f"bytes: {number(longer / shorter)}x"
            _beside(ax, words, *middle, "below right", COLORS["blue"], weight="bold")


def _limit_bytes(ax: Axes, points: Sequence[Point], floor: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    x, y = [at for at, *_ in points], [1e3 * seconds for _, seconds, _ in points]
    ax.set(xlim=(min(x) / 2.3, max(x) * 1.6), ylim=(min(*y, floor) / 2, max(y) * 1.8))
    plain = FuncFormatter(lambda value, _: f"{round(value, 2):g}")
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(x))))
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_locator(NullLocator())


def _draw_bandwidth(ax: Axes, weights: int, bandwidth: float) -> None:
    """What reading alone takes: weights · bytes / bandwidth."""
    ends = np.array(ax.get_xlim())
    style = {"color": COLORS["orange"], "marker": "", "lw": 1.6, "zorder": 1}
    words = f"reading alone, at {number(bandwidth / 1e9)} GB/s"
    ax.plot(ends, 1e3 * weights * ends / bandwidth, "-", label=words, **style)


def _draw_whole_model(ax: Axes, scale: float, overhead: float | None) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    right = ax.secondary_yaxis("right", functions=(lambda ms: ms * scale, lambda ms: ms / scale))
    right.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value, 2):g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    right.spines["right"].set_visible(True)
    right.set_ylabel("ms per token, all products")
    if overhead:
        ms = overhead * 1e3
        style = {"color": COLORS["purple"], "lw": 1.8, "ls": "-.", "zorder": 1}
        ax.axhline(ms / scale, label=f"overhead, {number(ms)} ms (right axis)", **style)
