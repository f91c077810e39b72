"""Chapter 2's explorer: what one more token costs, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from course_utils import plotting
from course_utils.claims import number
from course_utils.decoder import DecoderConfig
from course_utils.plotting import COLORS
from course_utils.widgets.core import Control, Explorer, Preset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


@dataclass(frozen=True)
class StepCost:
    """What one decoding step does: rows fed, multiply-adds (a multiplication and an addition: 2 FLOP), bytes held after it."""

    rows: int
    multiply_adds: int
    bytes_held: int


def step_cost(config: DecoderConfig, token: int, cache: bool, bytes_per_value: int = 2) -> StepCost:
    """The exact count for the step that feeds token number ``token`` (from 1) and returns one row of logits.

    Multiply-adds: (weights of all layers' matrices) · rows + (weights of the head) for the one row that is kept
    + attention, 2 · layers · heads · head_dim for each pair of a query and a key it may look at: token · (token + 1) / 2
    pairs without a cache, token pairs with one. Norms, rotations and softmax are not counted.
    Bytes: 2 · layers · kv_heads · head_dim · bytes_per_value · token with a cache, else 0.
    """
    rows = 1 if cache else token
    pairs = token if cache else token * (token + 1) // 2
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim  # q, k and v
    per_layer = config.hidden_size * (
        width + config.num_heads * config.head_dim + 3 * config.intermediate_size
    )
    linear = config.num_layers * per_layer * rows + config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    held = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value * token
    return StepCost(rows, linear + attention, held if cache else 0)


# What a square of the triangle may be: (fill, words, hatched)
_NOW = (COLORS["orange"], "computed now", False)
_READ = (COLORS["blue"], "read from the cache", False)
_AGAIN = ("#F6D9C8", "computed again", True)
_BEFORE = ("#C4C4C4", "done before", False)
_LATER = ("#EEEEEE", "not yet", False)


def attention_triangle(ax: Axes, token: int, cache: bool, size: int = 32, legend_size: float = 9.5) -> None:
    """Draw which rows of the causal triangle a step computes, and below it where its keys and values come from.

    Args:
        token: the one fed now, from 1. cache: whether there is one. size: tokens in the whole triangle.
        legend_size: in points; 0 draws no legend.
    """
    rows, columns = np.tril_indices(size)
    earlier = _BEFORE if cache else _AGAIN
    _squares(ax, columns, rows, _fills(rows, token, earlier))
    below = size + 1.2  # the strip of keys and values
    places = np.arange(size)
    _squares(ax, places, np.full(size, below), _fills(places, token, _READ if cache else _AGAIN))
    if not cache and token > 1:
        _hatch(ax, token - 1, below)
    ax.text(0, below + 1.4, "keys and values", va="top", fontsize=legend_size or 9.5, color="#444444")
    ax.set(xlim=(-0.2, size + 0.2), ylim=(below + 4.2, -0.2), aspect="equal", anchor="NW")
    ax.axis("off")
    if legend_size:
        kinds = (_NOW, _READ, _BEFORE) if cache else (_NOW, _AGAIN)
        kinds += (_LATER,) if token < size else ()
        _triangle_legend(ax, kinds, legend_size)


def _fills(places: np.ndarray, token: int, earlier: tuple) -> np.ndarray:
    """Fill of each place, RGBA (places, 4): now, earlier or later than ``token``."""
    from matplotlib.colors import to_rgba_array

    kinds = to_rgba_array([earlier[0], _NOW[0], _LATER[0]])
    return kinds[np.sign(places - (token - 1)) + 1]


def _squares(ax: Axes, columns: np.ndarray, rows: np.ndarray, fills: np.ndarray) -> None:
    from matplotlib.collections import PolyCollection

    corners = np.array([(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)])
    places = np.stack((columns, rows), axis=1)[:, None] + corners
    ax.add_collection(PolyCollection(places, facecolors=fills, edgecolors="none"), autolim=False)


def _hatch(ax: Axes, earlier: int, below: float) -> None:
    """Hatch the triangle of the earlier rows and their keys and values."""
    steps = [(0, 0)]
    for row in range(earlier):
        steps += [(row + 1, row), (row + 1, row + 1)]
    steps.append((0, earlier))
    style = {"fc": "none", "ec": COLORS["vermillion"], "hatch": "////", "lw": 0.8}
    ax.fill(*zip(*steps, strict=True), **style)
    ax.fill([0, earlier, earlier, 0], [below, below, below + 1, below + 1], **style)


def _triangle_legend(ax: Axes, kinds: Sequence[tuple], size: float) -> None:
    from matplotlib.patches import Patch

    hatched = {"ec": COLORS["vermillion"], "hatch": "////", "lw": 0.8}
    patches = [Patch(fc=fill, label=words, **(hatched if lines else {})) for fill, words, lines in kinds]
    place = {"loc": "upper right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0}  # the blank half
    ax.legend(handles=patches, fontsize=size, handlelength=1.2, handletextpad=0.5, labelspacing=0.35, **place)


class _OneMoreToken:
    """The drawing of chapter 2's explorer: triangle on the left, work so far and bytes held on the right."""

    last = 32  # tokens
    last_compact = 24  # in a panel of the twin, for larger squares; its last panel shows this token

    def __init__(self, config: DecoderConfig, step_work=None, kv_bytes=None) -> None:
        self.config, self.step_work, self.kv_bytes = config, step_work, kv_bytes
        self.tokens = np.arange(1, self.last + 1)

    def cost(self, token: int, cache: bool, group: int, bytes_per_value: int) -> StepCost:
        """``step_cost`` of the model with ``group`` query heads to each KV head, by the chapter's functions if given."""
        config = replace(self.config, num_kv_heads=self.config.num_heads // group)
        cost = step_cost(config, token, cache, bytes_per_value)
        if self.step_work is not None:
            flops = sum(self.step_work(config, cost.rows, token).values())
            cost = replace(cost, multiply_adds=flops // 2)
        if self.kv_bytes is not None and cache:
            sizes = config.num_layers, config.num_kv_heads, config.head_dim
            cost = replace(cost, bytes_held=self.kv_bytes(*sizes, token, bytes_per_value))
        return cost

    def work(self, cache: bool, group: int) -> np.ndarray:
        """Multiply-adds of all steps up to each token, int64 (tokens,)."""
        return np.cumsum([self.cost(int(token), cache, group, 1).multiply_adds for token in self.tokens])

    def held(self, group: int, bytes_per_value: int) -> np.ndarray:
        """Bytes a cache holds after each token, int64 (tokens,)."""
        return np.array([self.cost(int(t), True, group, bytes_per_value).bytes_held for t in self.tokens])

    def readout(self, token: int, cache: bool, group: int, bytes_per_value: int) -> str:
        cost = self.cost(token, cache, group, bytes_per_value)
        work, held = cost.multiply_adds, cost.bytes_held
        rows = f"{cost.rows} row{'s' if cost.rows > 1 else ''} fed"
        return f"{rows} · {_large(work)} multiply-adds this step · {_memory(held)} held"

    def draw(
        self, fig: Figure | SubFigure, token, cache, group, bytes_per_value, compact: bool = False
    ) -> None:
        letters, last = (7.5, max(self.last_compact, token)) if compact else (10.5, self.last)
        mode = "with the cache" if cache else "without a cache"
        fed = "1 row is fed" if cache or token == 1 else f"{token} rows are fed"
        title = f"Token {token}, {mode}:{chr(10) if compact else ' '}{fed}"
        fig.text(0.02, 0.98, title, va="top", weight="bold", size=9.5 if compact else 13)
        head = 0.83 if compact else 0.88
        triangle = fig.add_axes((0.02, 0.01, 0.6, head - 0.01))
        attention_triangle(triangle, token, cache, last, legend_size=7 if compact else 10)
        sides = {"left": 0.71 if compact else 0.53, "right": 0.97}
        top, bottom = fig.add_gridspec(
            2, 1, top=head - 0.1, bottom=0.13, hspace=0.9 if compact else 0.6, **sides
        )
        top, bottom = fig.add_subplot(top), fig.add_subplot(bottom)
        self._draw_work(top, token, cache, group, letters, last)
        self._draw_bytes(bottom, token, cache, group, bytes_per_value, letters, last)
        heads = self.config.num_heads // group
        lines = (
            ("multiply-adds", "so far, billions"),
            ("bytes held, MB", f"({_cache_size(heads, bytes_per_value)})"),
        )
        bottom.set_xlabel("token", size=letters, labelpad=1)
        for ax, line in zip((top, bottom), lines, strict=True):
            ax.set(xlim=(0, last + 1.5), xticks=[n for n in (1, 8, 16, 24, 32) if n <= last])
            ax.tick_params(labelsize=letters - 0.5, pad=2)
            ax.set_title(
                (chr(10) if compact else " ").join(line),
                size=letters,
                weight="normal",
                pad=5,
                y=1.0,  # a fixed y is quicker
                x=-0.3 if compact else 0,
            )

    def _draw_work(self, ax: Axes, token: int, cache: bool, group: int, letters: float, last: int) -> None:
        for mode, color in ((False, "vermillion"), (True, "blue")):
            self._draw_growth(ax, self.work(mode, group)[:last] / 1e9, token, color, active=mode == cache)
        _limit_height(ax, self.work(False, group)[last - 1] / 1e9)
        said = {"size": letters - 0.5, "transform": ax.transAxes, "ha": "right", "va": "bottom"}
        ax.text(0.6, 0.5, "no cache", color=COLORS["vermillion"], **said)
        ax.text(0.99, 0.2, "cache", color=COLORS["blue"], **said)

    def _draw_bytes(
        self, ax: Axes, token: int, cache: bool, group: int, bytes_per_value: int, letters: float, last: int
    ) -> None:
        """Bytes held, on the scale of the setting shown; another setting is compared with the model's own at 2 bytes."""
        held = self.held(group, bytes_per_value)[:last] / 1e6
        heads = self.config.num_kv_heads
        own = self.held(self.config.num_heads // heads, 2)[:last] / 1e6
        if (own != held).any():
            style = {"color": COLORS["grey"], "lw": 1.2, "marker": "", "label": _cache_size(heads, 2)}
            ax.plot(self.tokens[:last], own, "-.", **style)
            ax.legend(loc="upper left", fontsize=letters - 1, borderaxespad=0)
        self._draw_growth(
            ax, held if cache else 0 * held, token, "blue" if cache else "vermillion", active=True
        )
        _limit_height(ax, max(held[-1], own[-1]))

    def _draw_growth(self, ax: Axes, values: np.ndarray, token: int, color: str, active: bool) -> None:
        """One line up to ``token`` and its mark there; what is still to come is dotted. The mode not chosen is thin."""
        shade, strength = COLORS[color], 1.0 if active else 0.55
        line = {"color": shade, "alpha": strength, "marker": ""}
        tokens = self.tokens[: len(values)]
        ax.plot(tokens[:token], values[:token], "-", lw=2.2 if active else 1.1, **line)
        ax.plot(tokens[token - 1 :], values[token - 1 :], ":", lw=1.2, **line)
        marker = plotting.MARKERS[color]
        ax.plot(token, values[token - 1], marker, color=shade, ms=7 if active else 4, alpha=strength)


def _limit_height(ax: Axes, highest: float) -> None:
    """From a little below 0 to a little above the highest value, with few ticks."""
    from matplotlib.ticker import MaxNLocator

    top = 1.15 * highest or 1.0
    ax.set_ylim(-0.05 * top, top)
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))


def _cache_size(heads: int, bytes_per_value: int) -> str:
    return f"{heads} KV head{'s' * (heads > 1)} × {bytes_per_value} byte{'s' * (bytes_per_value > 1)}"


def _large(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{number(count / 1e6)} million"


def _memory(count: int) -> str:
    """Bytes as MB = 10⁶ or kB = 10³."""
    if count >= 1e6:
        return f"{count / 1e6:.2f} MB"
    return f"{number(count / 1e3)} kB" if count else "0 bytes"


def kv_cache_explorer(
    config: DecoderConfig, *, step_work: Callable | None = None, kv_bytes: Callable | None = None
) -> Explorer:
    """Chapter 2's explorer "One more token" for a model of this configuration; counts only, no model.

    Settings: token (1 to 32), cache (bool), group (query heads per KV head), bytes_per_value (4, 2, 1). With another
    group the whole count is of a model built that way: its k and v projections shrink and grow too.

    Args:
        step_work, kv_bytes: the chapter's own functions, so that a reader sees them move: FLOPs as
            step_work(config, fed, context) -> dict, and kv_bytes(layers, kv_heads, head_dim, tokens, bytes_per_value).
            Without them :func:`step_cost` counts, to the same numbers.
    """
    token = _OneMoreToken(config, step_work, kv_bytes)
    own = config.num_heads // config.num_kv_heads
    base = {"token": 4, "cache": False, "group": own, "bytes_per_value": 2}

    def preset(name: str, **changes) -> Preset:
        settings = base | changes
        mode = "with the cache" if settings["cache"] else "without a cache"
        heads = "" if settings["group"] == own else f", {config.num_heads // settings['group']} KV heads"
        return Preset(
            name, settings, f"Token {settings['token']} {mode}{heads}: {token.readout(**settings)}."
        )

    presets = (
        preset("A token 4"),
        preset("B token 24, no cache", token=24),
        preset("C token 24, cache", token=24, cache=True),
        preset("D one KV head per query head", token=24, cache=True, group=1),
    )
    divisors = [g for g in range(1, config.num_heads + 1) if config.num_heads % g == 0]
    groups = divisors if len(divisors) <= 5 else sorted({1, own, config.num_heads})
    controls = (
        Control("token", "token", "int", low=1, high=token.last),
        Control("cache", "cache", "choice", (("off", False), ("on", True))),
        Control("group", "query heads per KV head", "choice", [(str(g), g) for g in groups]),
        Control("bytes_per_value", "bytes per value", "choice", (("4", 4), ("2", 2), ("1", 1))),
    )
    tokens = (4, 12, token.last_compact)
    panels = [preset("", token=t, cache=cache) for cache in (False, True) for t in tokens]
    return Explorer(
        "One more token",
        draw=token.draw,
        readout=token.readout,
        presets=presets,
        controls=controls,
        panels=panels,
        columns=3,
        size=(8.0, 4.2),
    )
