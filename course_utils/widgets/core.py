"""Explorers: pictures with a few controls, and the same pictures side by side where nobody can turn them.

An :class:`Explorer` has three layers: ``figure(**settings)`` draws one state and knows nothing of widgets, ``twin()``
draws chosen states side by side with the same function, ``show()`` puts controls above the twin where a front end is
there to turn them. Nothing here calls a model; ipywidgets is imported in ``show()`` only.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_utils import plotting
from course_utils.claims import _shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Control:
    """One control.

    kind: "choice" (buttons), "menu", "steps" (slider over options), "int" (slider with play button) or "log" (slider
        over powers of two, float).
    options: (text, value) pairs for the first three kinds. low and high: for "int" and "log", both included; for
        "log" they are values too, such as 1 and 64.
    """

    name: str
    label: str
    kind: str
    options: Sequence[tuple[str, object]] = ()
    low: int = 0
    high: int = 0


@dataclass(frozen=True)
class Preset:
    """One state worth showing: its button, its settings, and a caption that is true on any machine (the alt text)."""

    name: str
    settings: dict
    caption: str


class Explorer:
    """A picture with controls.

    Args:
        title: the question it answers.
        draw: draw(fig, compact=False, **settings) draws one state into an empty figure or part of one.
        readout: readout(**settings) -> one line with at most three numbers.
        presets: the demo, in the order of the story; the first is where a Reset leads.
        controls: one for each setting.
        panels, columns: what the twin shows where that is not the presets side by side.
        size: width and height of one state in inches. panel_size: of one panel of the twin.
    """

    def __init__(
        self,
        title: str,
        *,
        draw: Callable,
        readout: Callable[..., str],
        presets: Sequence[Preset],
        controls: Sequence[Control],
        panels: Sequence[Preset] | None = None,
        columns: int | None = None,
        size: tuple[float, float] = (8.0, 3.6),
        panel_size: tuple[float, float] = (3.2, 2.9),
    ) -> None:
        self.title, self.draw, self.readout = title, draw, readout
        self.presets, self.controls = tuple(presets), tuple(controls)
        self.panels = tuple(panels or presets)
        self.columns = columns or len(self.panels)
        self.size, self.panel_size = size, panel_size

    def settings(self, **changes) -> dict:
        """All settings: the first preset's, with changes. ValueError for a name that is none of them."""
        start = self.presets[0].settings
        unknown = set(changes) - set(start)
        if unknown:
            raise ValueError(f"unknown setting {sorted(unknown)[0]!r}; known: {', '.join(start)}")
        return start | changes

    def figure(self, **settings) -> Figure:
        """One state as a figure; what is left out is as in the first preset. Pure: no widget, nothing displayed."""
        fig = _empty(*self.size)
        self.draw(fig, **self.settings(**settings))
        return fig

    def twin(self) -> Figure:
        """The panels side by side, drawn by the function that draws ``figure``."""
        rows = -(-len(self.panels) // self.columns)
        fig = _empty(self.panel_size[0] * self.columns, self.panel_size[1] * rows)
        grid = fig.subfigures(rows, self.columns, squeeze=False).flat
        for part, panel in zip(grid, self.panels, strict=False):
            self.draw(part, compact=True, **self.settings(**panel.settings))
        return fig

    def alt(self) -> str:
        """What the twin shows, in words."""
        return " ".join([f"{self.title}:", *(panel.caption for panel in self.panels)])

    def show(self, interactive: bool | str = "auto") -> None:
        """Show the controls where a front end is attached, and below them always the twin.

        interactive: "auto", True (controls in any notebook kernel) or False (never). Raises ValueError for another value.
        """
        if interactive not in (True, False, "auto"):
            raise ValueError(f'interactive={interactive!r} is not one of "auto", True, False')
        if _has_kernel() and (_front_end() if interactive == "auto" else interactive):
            from IPython.display import display

            display(self.controls_box())
        plotting.show(self.twin(), self.alt())

    def controls_box(self):
        """The controls with their picture and its readout, as one ipywidgets box."""
        return _Panel(self).box


def _empty(width: float, height: float) -> Figure:
    """A figure without axes or layout engine: its drawing function places everything, which is quick."""
    from matplotlib.figure import Figure

    plotting._apply_style()
    return Figure(figsize=(width, height), layout="none")


def _png(fig: Figure) -> bytes:
    """PNG as fast as it can be had; ``plotting.png`` takes twice the time for half the size."""
    written = io.BytesIO()
    fig.savefig(written, format="png")
    return written.getvalue()


# --- controls --------------------------------------------------------------------------------------------------------


def _has_kernel() -> bool:
    return hasattr(_shell(), "kernel")


def _front_end() -> bool:
    """Whether somebody can turn a control: Jupyter, Colab or VS Code. A run without people has none of their marks.

    The environment variable COURSE_INTERACTIVE (0 or 1) decides where it is set.
    """
    decided = os.environ.get("COURSE_INTERACTIVE")
    if decided:
        return decided != "0"
    marks = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "VSCODE_PID")
    return any(mark in os.environ for mark in marks) or "__vsc_ipynb_file__" in getattr(
        _shell(), "user_ns", {}
    )


class _Panel:
    """Controls, picture and readout of one explorer, tied together. Pictures are PNG bytes set as ``Image.value``."""

    def __init__(self, explorer: Explorer) -> None:
        import ipywidgets

        self.explorer, self.ipywidgets = explorer, ipywidgets
        self.image = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.readout, self.caption = ipywidgets.HTML(), ipywidgets.HTML()
        self.buttons = ipywidgets.ToggleButtons(
            options=[(preset.name, n) for n, preset in enumerate(explorer.presets)],
            style={"button_width": "auto"},
            tooltips=[preset.caption for preset in explorer.presets],
        )
        self.inputs, shown = {}, []
        for control in explorer.controls:
            self.inputs[control.name], view = self._make(control)
            shown.append(view)
        self._quiet = False
        self._take(explorer.presets[0])
        self.buttons.observe(self._pressed, "value")
        for widget in self.inputs.values():
            widget.observe(self._turned, "value")
        row = ipywidgets.HBox(shown, layout={"flex_flow": "row wrap"})
        self.box = ipywidgets.VBox([self.buttons, row, self.image, self.readout, self.caption])

    def _make(self, control: Control):
        """(the widget that holds the value, what is shown for it)."""
        kit, common = (
            self.ipywidgets,
            {"description": control.label, "style": {"description_width": "initial"}},
        )
        if control.kind == "int":
            slider = kit.IntSlider(min=control.low, max=control.high, continuous_update=False, **common)
            play = kit.Play(min=control.low, max=control.high, interval=700)
            kit.link((play, "value"), (slider, "value"))
            return slider, kit.HBox([play, slider])
        if control.kind == "log":
            ends = {"min": math.log2(control.low), "max": math.log2(control.high), "step": 0.5}
            start = {"value": control.low, "readout_format": ".3g"}
            widget = kit.FloatLogSlider(base=2, continuous_update=False, **ends, **start, **common)
        elif control.kind == "steps":
            widget = kit.SelectionSlider(options=list(control.options), continuous_update=False, **common)
        elif control.kind == "menu":
            widget = kit.Dropdown(options=list(control.options), **common)
        else:
            buttons = common | {"style": {"description_width": "initial", "button_width": "auto"}}
            widget = kit.ToggleButtons(options=list(control.options), **buttons)
        return widget, widget

    def _pressed(self, change) -> None:
        if change["new"] is not None and not self._quiet:
            self._take(self.explorer.presets[change["new"]])

    def _turned(self, _) -> None:
        if self._quiet:
            return
        self._quiet = True
        self.buttons.value = None  # no preset any more; pressing one again leads back to it
        self._quiet = False
        self._redraw("")

    def _take(self, preset: Preset) -> None:
        self._quiet = True  # one picture for all controls, not one each
        for name, value in self.explorer.settings(**preset.settings).items():
            self.inputs[name].value = value
        self._quiet = False
        self._redraw(preset.caption)

    def _redraw(self, caption: str) -> None:
        settings = {name: widget.value for name, widget in self.inputs.items()}
        self.image.value = _png(self.explorer.figure(**settings))
        said = self.explorer.readout(**settings)
        self.readout.value = f'<div style="font-size:18px;line-height:1.5">{said}</div>'
        self.caption.value = f"<div>{caption}</div>"
