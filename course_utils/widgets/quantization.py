"""Chapter 1's explorer: who shares a scale, and whom one large weight hurts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from course_utils import plotting
from course_utils.plotting import COLORS
from course_utils.widgets.core import Control, Explorer, Preset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

ROWS, COLUMNS = 64, 576  # cut from each matrix, so that a redraw stays quick
OWNER, SHOWN = 10, 11  # the row with the outlier, and the neighbour whose weights are drawn


@dataclass(frozen=True)
class _State:
    """One setting, quantized: weights and what came back (rows, columns), scales (rows or 1, groups)."""

    weights: np.ndarray
    taken: np.ndarray
    scale: np.ndarray
    became_zero: float  # share of the weights
    bits_per_weight: float  # float32 scales counted

    @property
    def row_errors(self) -> np.ndarray:
        """RMS error over RMS weight of each row, (rows,); 0 for a row of zeros."""
        error, size = (np.sqrt((values**2).mean(1)) for values in (self.taken - self.weights, self.weights))
        return np.divide(error, size, out=np.zeros_like(error), where=size > 0)

    @property
    def error(self) -> float:
        """RMS error over RMS weight of the whole matrix."""
        size = np.linalg.norm(self.weights)
        return float(np.linalg.norm(self.taken - self.weights) / size) if size else 0.0


class _WhoSharesTheScale:
    """The drawing of chapter 1's explorer: one row's weights on their levels, and the error of every row."""

    def __init__(self, weights: Mapping[str, torch.Tensor], quantize: Callable, dequantize: Callable) -> None:
        self.quantize, self.dequantize = quantize, dequantize
        self.matrices = _cut(weights)
        self.rows, self.columns = next(iter(self.matrices.values())).shape
        self.groups = _group_sizes(self.columns)

    def state(self, matrix: str, bits: int, share: str | int, outlier: float) -> _State:
        """The matrix with row 10's largest weight multiplied by ``outlier``, through the chapter's own functions."""
        w = self.matrices[matrix].clone()
        w[OWNER, self.outlier_column(matrix)] *= outlier
        if share == "tensor":
            q, scale = self.quantize(w.reshape(1, -1), bits, None)
            q = q.view_as(w)
        else:
            q, scale = self.quantize(w, bits, None if share == "row" else share)
        taken = self.dequantize(q, scale)
        return _State(
            w.numpy(),
            taken.float().numpy(),
            scale.float().numpy(),
            ((q == 0) & (w != 0)).float().mean().item(),
            bits + 32 * scale.numel() / w.numel(),
        )

    def outlier_column(self, matrix: str) -> int:
        return int(self.matrices[matrix][OWNER].abs().argmax())

    def readout(self, matrix: str, bits: int, share: str | int, outlier: float) -> str:
        state = self.state(matrix, bits, share, outlier)
        return (
            f"{state.bits_per_weight:.2f} bits per weight with scales · {_percent(state.error)} relative RMS error"
            f" · {_percent(state.became_zero)} of the weights became 0"
        )

    def draw(self, fig: Figure | SubFigure, matrix, bits, share, outlier, compact: bool = False) -> None:
        """The panels side by side; where ``compact``, one above the other, so that columns compare line by line."""
        state = self.state(matrix, bits, share, outlier)
        letters = 8 if compact else 10.5
        self._head(fig, state, bits, share, outlier, compact)
        if compact:
            left, right = fig.add_axes((0.17, 0.475, 0.81, 0.31)), fig.add_axes((0.17, 0.085, 0.81, 0.27))
        else:
            left, right = (
                fig.add_axes((0.085, 0.125, 0.42, 0.7)),
                fig.add_axes((0.585, 0.125, 0.405, 0.7)),
            )
        self._draw_weights(left, state, matrix, bits, letters, size=3 if compact else 4.5)
        self._draw_errors(right, state, outlier, letters)
        what = "" if compact else " on the levels they may take"
        left.set_title(f"row {SHOWN}: {self.shown} weights{what}")
        right.set_title("relative RMS error" if compact else "relative RMS error of each row (log scale)")
        for ax in (left, right):
            ax.set_title(ax.get_title(loc="left"), size=letters, weight="normal", pad=4, y=1.0)
            ax.tick_params(labelsize=letters - 1, pad=2)

    @property
    def shown(self) -> int:
        """Weights of row 11 drawn."""
        return min(64, self.columns)

    def _head(self, fig, state: _State, bits: int, share, outlier: float, compact: bool) -> None:
        shared = {"tensor": f"one scale for {self.rows} rows", "row": "a scale per row"}
        who = shared.get(share, f"a scale per {share} weights")
        odd = f"outlier ×{outlier:.3g} in row {OWNER}" if outlier != 1 else "no outlier"
        if not compact:
            fig.text(0.02, 0.975, f"{bits} bits, {who}, {odd}", va="top", weight="bold", size=13)
            return
        fig.text(0.03, 0.985, f"{who[0].upper()}{who[1:]},\n{odd}", va="top", weight="bold", size=9.5)
        numbers = f"{state.bits_per_weight:.2f} bits · error {_percent(state.error)}"
        numbers += f" · zeros {_percent(state.became_zero)}"
        fig.text(0.03, 0.885, numbers, va="top", size=7.5, color="#444444")

    def _draw_weights(
        self, ax: Axes, state: _State, matrix: str, bits: int, letters: float, size: float
    ) -> None:
        start = self.outlier_column(matrix) // self.shown * self.shown  # the outlier's own columns
        part = slice(start, start + self.shown)
        scales = np.broadcast_to(state.scale, (self.rows, state.scale.shape[1]))[SHOWN]
        each = np.repeat(scales, self.columns // len(scales))[part]
        groups = max(1, self.shown * len(scales) // self.columns)
        steps = each.reshape(groups, -1)[:, 0]
        plotting.quantization_grid(
            ax, state.weights[SHOWN, part], steps, bits, state.taken[SHOWN, part], size
        )
        ax.set_xticks([])
        below = {"size": letters - 0.5, "transform": ax.transAxes, "va": "top"}
        ax.text(0.0, -0.04, "○ weight", color=COLORS["vermillion"], **below)
        ax.text(0.51, -0.04, "● rounded", color=COLORS["blue"], ha="center", **below)
        ax.text(1.0, -0.04, "grey: levels", color="#666666", ha="right", **below)

    def _draw_errors(self, ax: Axes, state: _State, outlier: float, letters: float) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.ticker import NullLocator

        low, high = 0.2, 600.0  # percent; above 100 is room for words
        tops = np.clip(100 * state.row_errors, low, high)[:, None]
        x = np.arange(self.rows)[:, None] + np.array([-0.4, 0.4, 0.4, -0.4])
        y = np.where([False, False, True, True], tops, low)
        fills = ["#A9BFCC"] * self.rows
        fills[OWNER], fills[SHOWN] = COLORS["vermillion"], COLORS["blue"]
        ax.set_yscale("log")
        ax.yaxis.set_minor_locator(NullLocator())  # a third of the time to draw
        ax.add_collection(
            PolyCollection(np.stack((x, y), 2), facecolors=fills, edgecolors="none"), autolim=False
        )
        ax.plot(OWNER, 1.35 * tops[OWNER, 0], "v", color=COLORS["vermillion"], ms=letters - 3)
        words = {"size": letters - 0.5, "transform": ax.transAxes, "va": "top"}
        owner = f"▼ row {OWNER}{', the outlier' if outlier != 1 else ''}"
        ax.text(0.01, 0.985, owner, color=COLORS["vermillion"], **words)
        ax.text(1.0, 0.985, f"■ row {SHOWN}", color=COLORS["blue"], ha="right", **words)
        ax.set(xlim=(-1, self.rows), ylim=(low, high), xticks=range(0, self.rows, 10))
        ax.set_yticks((1, 10, 100), ("1 %", "10 %", "100 %"))
        ax.set_xlabel("row", size=letters, labelpad=1)
        ax.grid(axis="x", visible=False)


def _cut(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 copies of the first rows and columns, all of one shape."""
    if not weights:
        raise ValueError("weights is empty; give at least one matrix, such as {'q_proj': linear.weight}")
    for name, w in weights.items():
        if w.ndim != 2 or w.shape[0] <= SHOWN:
            raise ValueError(
                f"weights[{name!r}] has shape {tuple(w.shape)}; expected (out, in) with at least {SHOWN + 1} rows"
            )
    rows = min(ROWS, *(w.shape[0] for w in weights.values()))
    columns = min(COLUMNS, *(w.shape[1] for w in weights.values()))
    for size in (192, 64):
        if columns >= size:
            columns -= columns % size
            break
    return {
        name: w.detach()[:rows, :columns].to("cpu", torch.float32, copy=True) for name, w in weights.items()
    }


def _group_sizes(columns: int) -> list[int]:
    """Sizes of groups to choose from: the course's, or for a small matrix parts of a row."""
    sizes = [size for size in (192, 64, 32) if columns % size == 0 and size < columns]
    return sizes or [columns // parts for parts in (2, 4) if columns % parts == 0] or [columns]


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %" if percent >= 1 else f"{percent:.2f} %"


def quantization_explorer(
    weights: Mapping[str, torch.Tensor], quantize: Callable, dequantize: Callable
) -> Explorer:
    """Chapter 1's explorer "Who shares the scale?": 64 rows × up to 576 columns of each matrix; no model is called.

    Settings: matrix (a name of weights), bits (2, 3, 4, 5, 6, 8), share ("tensor", "row" or a group size), outlier
    (1 to 64, the factor on the largest weight of row 10). The picture shows row 11, a neighbour, and all rows' errors.

    Args:
        weights: name -> (out, in) of any float dtype; at least 12 rows.
        quantize: the chapter's, quantize(w, bits, group_size) -> (q, scale); group_size None is a scale per row.
        dequantize: the chapter's, dequantize(q, scale) -> (out, in).

    Raises ValueError for no weights, or one that is no matrix of at least 12 rows.
    """
    shared = _WhoSharesTheScale(weights, quantize, dequantize)
    group = 64 if 64 in shared.groups else shared.groups[0]
    base = {"matrix": next(iter(shared.matrices)), "bits": 8, "share": "tensor", "outlier": 1.0}

    def preset(name: str, caption: str, **changes) -> Preset:
        settings = base | changes
        return Preset(name, settings, f"{caption} ({shared.readout(**settings)}).")

    odd = {"outlier": 32.0}
    presets = (
        preset("A one scale", f"8 bits and one scale for all {shared.rows} rows: all have the same levels"),
        preset(
            "B … and one outlier",
            f"The largest weight of row {OWNER} is multiplied by 32: where it is now the largest of all, it sets the"
            " levels of every row",
            **odd,
        ),
        preset(
            "C a scale per row",
            f"The same outlier and a scale for each row: it sets the levels of row {OWNER} alone",
            share="row",
            **odd,
        ),
        preset(
            f"D a scale per {group}",
            f"The same outlier and a scale for each {group} weights of a row: it sets the levels of its own group"
            " alone",
            share=group,
            **odd,
        ),
    )
    controls = (
        Control("matrix", "matrix", "menu", [(name, name) for name in shared.matrices]),
        Control("bits", "bits", "steps", [(str(bits), bits) for bits in (2, 3, 4, 5, 6, 8)]),
        Control(
            "share",
            "one scale for each",
            "choice",
            [("tensor", "tensor"), ("row", "row"), *((str(size), size) for size in shared.groups)],
        ),
        Control("outlier", f"outlier in row {OWNER}, ×", "log", low=1, high=64),
    )
    return Explorer(
        "Who shares the scale?",
        draw=shared.draw,
        readout=shared.readout,
        presets=presets,
        controls=controls,
        size=(8.0, 3.6),
        panel_size=(2.45, 4.3),
    )
