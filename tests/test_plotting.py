"""Figures: the style, alt text in the output, provenance below the axes, nothing left open, small files."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from PIL import Image

from course_utils import plotting

ROWS = 2 ** np.arange(10)


def roofline(rows):
    return 2e-3 + max(rows * 1e-3, 0.02)


SECONDS = np.array([roofline(rows) for rows in ROWS])


@pytest.fixture(autouse=True)
def _same_settings():
    with matplotlib.rc_context():
        yield
    plotting.present(False)


@pytest.fixture
def outputs(outputs):
    """What a line of code displays, ``plotting`` imported before it."""
    return lambda code: outputs("from course_utils import plotting\n" + code)


def raw(shown) -> bytes:
    data = shown.data["image/png"]
    return data if isinstance(data, bytes) else base64.b64decode(data)


def size(data: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(data)).size


def test_alt_text_lands_in_the_output(outputs):
    (shown,) = outputs("fig, ax = plotting.figure()\nplotting.show(fig, 'One line\\n that climbs.')")
    assert shown.metadata == {"image/png": {"alt": "One line that climbs."}}
    assert shown.data["text/plain"] == "One line that climbs."


def test_show_sends_a_png_and_returns_none(outputs):
    (shown,) = outputs("fig, ax = plotting.figure()\nresult = plotting.show(fig, 'x')\nassert result is None")
    assert Image.open(io.BytesIO(raw(shown))).format == "PNG"


@pytest.mark.parametrize("alt", ["", "  \n", None])
def test_empty_alt_is_refused(alt):
    fig, _ = plotting.figure()
    with pytest.raises(ValueError, match="alt is empty; say"):
        plotting.show(fig, alt)


def test_nothing_stays_open_even_of_pyplot():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    fig, _ = plotting.figure()
    plotting.show(fig, "x", "made here")
    other = plt.figure()
    plotting.show(other, "x", "made here")
    assert plt.get_fignums() == before


def test_provenance_is_drawn_below_everything_else():
    fig, ax = plotting.figure()
    ax.set(xlabel="rows", title="x")
    plotting.show(fig, "x", "a model · a machine, 2 threads · float32 · " * 5)
    fig.draw_without_rendering()
    (note,) = fig.texts
    box = note.get_window_extent()
    assert box.y1 <= ax.get_tightbbox().y0
    assert box.x1 <= fig.bbox.x1
    assert "\n" in note.get_text() and box.y0 >= 0


def test_provenance_line_names_model_machine_repeats_and_day(monkeypatch):
    machine = pytest.importorskip("course_utils.machine")
    monkeypatch.setattr(machine, "describe", lambda device=None, dtype=None: f"a CPU · {dtype}")
    line = plotting.provenance(model="SmolLM2-135M", dtype="float32", repeats=7, when="2026-01-02")
    assert line == "SmolLM2-135M · a CPU · float32 · 7 runs · 2026-01-02 · yours will differ in number"


def test_figure_has_the_size_and_colours_of_the_course():
    fig, axes = plotting.figure(8, 3, ncols=2)
    assert tuple(fig.get_size_inches()) == (8, 3) and len(axes) == 2
    (line,) = axes[0].plot([1, 2], [1, 2])
    assert line.get_color() == plotting.COLORS["blue"] and line.get_marker() == plotting.MARKERS["blue"]
    assert size(plotting.png(fig))[0] == 8 * fig.dpi <= 8 * 110


def test_style_comes_and_goes():
    before = matplotlib.rcParams["axes.grid"], matplotlib.rcParams["axes.titlelocation"]
    with plotting.use_style():
        assert matplotlib.rcParams["axes.grid"] and matplotlib.rcParams["axes.titlelocation"] == "left"
    assert (matplotlib.rcParams["axes.grid"], matplotlib.rcParams["axes.titlelocation"]) == before


def test_present_raises_letters_and_lines():
    plotting.figure()
    names = ("font.size", "axes.titlesize", "lines.linewidth")
    small = [matplotlib.rcParams[name] for name in names]
    plotting.present()
    plotting.figure()
    plotting.figure()  # must not grow a second time
    assert [matplotlib.rcParams[name] / s for name, s in zip(names, small, strict=True)] == pytest.approx(
        [1.35] * 3
    )
    plotting.present(False)
    plotting.figure()
    assert [matplotlib.rcParams[name] for name in names] == small


def test_every_colour_has_its_own_marker():
    assert list(plotting.COLORS) == list(plotting.MARKERS)
    assert len(set(plotting.MARKERS.values())) == len(plotting.COLORS) == len(set(plotting.COLORS.values()))


def test_predictions_are_dashed_and_measurements_carry_markers():
    fig, ax = plotting.figure()
    measured = plotting.lines(ax, [1, 2], [3, 4], color="vermillion", label="measured")
    predicted = plotting.lines(ax, [1, 2], [3, 4], color="vermillion", predicted=True)
    assert (measured.get_linestyle(), measured.get_marker()) == ("-", plotting.MARKERS["vermillion"])
    assert (predicted.get_linestyle(), predicted.get_marker()) == ("--", "")
    assert measured.get_color() == predicted.get_color() == plotting.COLORS["vermillion"]


@pytest.mark.parametrize("spread", [[2.0, 4.0], [[9.0, 18.0], [11.0, 22.0]]])
def test_spread_is_an_iqr_or_low_and_high(spread):
    fig, ax = plotting.figure()
    plotting.lines(ax, [1, 2], [10, 20], spread=spread)
    (whiskers,) = ax.collections
    ends = [sorted(segment[:, 1]) for segment in whiskers.get_segments()]
    assert ends == [[9, 11], [18, 22]]


def test_guess_star_only_where_a_guess_was_made():
    fig, ax = plotting.figure()
    plotting.guess_star(ax, 1, None)
    assert not ax.lines
    plotting.guess_star(ax, 1, 5)
    assert [line.get_marker() for line in ax.lines] == ["*"] and ax.lines[0].get_label() == "your guess"


def test_course_curve_shows_measured_predicted_knee_and_moves():
    marks = [(256, "without a cache", "②"), (1, "with one", "②"), (5, "k + 1 rows", "③")]
    fig = plotting.course_curve(
        ROWS, SECONDS, spread=SECONDS / 10, predicted=roofline, knee=20.0, marks=marks
    )
    (ax,) = fig.axes
    drawn = {line.get_label(): line for line in ax.lines}
    assert list(drawn["measured"].get_ydata()) == pytest.approx(list(SECONDS * 1e3))  # milliseconds
    assert drawn["idealised: two straight limits"].get_linestyle() == "--"
    said = [text.get_text() for text in ax.texts]
    assert "knee ≈ 20 rows" in said and "② without a cache → with one\n③ k + 1 rows" in said
    assert said.count("②") == 2 and said.count("③") == 1
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 1  # one move, from the first mark to the second
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "ms per forward" in ax.get_ylabel() and len(plotting.png(fig)) < 60_000


def test_course_curve_needs_only_rows_and_seconds():
    fig = plotting.course_curve([1, 2, 4], [0.01, 0.011, 0.02], predicted=[0.01, 0.01, 0.02])
    assert len(fig.axes[0].lines) == 2 and not fig.axes[0].texts


def test_circled_numbers_are_in_the_font(recwarn):
    fig = plotting.course_curve(
        ROWS, SECONDS, marks=[(n + 1, "x", symbol) for n, symbol in enumerate("①②③④")]
    )
    plotting.png(fig)
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


@pytest.mark.parametrize(("chapter", "seam"), [(1, "Linear"), (2, "Cache"), (3, "loop"), (4, "scheduler")])
def test_seam_strip_fills_the_chapters_own_seam(outputs, chapter, seam):
    (shown,) = outputs(f"plotting.seam_strip({chapter})")
    assert f"Seam {chapter}, {seam}, is filled" in shown.metadata["image/png"]["alt"]
    assert size(raw(shown))[1] < 150 and len(raw(shown)) < 20_000
    fig = plotting._seam_figure(chapter)
    bold = [t.get_text() for t in fig.axes[0].texts if t.get_weight() == "bold"]
    assert bold == [f"{chapter}  {seam}"]


@pytest.mark.parametrize(
    ("chapter", "knobs", "plain"),
    [
        (1, ["b<sub>w</sub>"], "[b_w]"),
        (2, ["rows", "KV(n)"], "2·P·[rows] / F , P·b_w / BW ) + sequences · [KV(n)] / BW"),
        (3, ["rows"], "[rows]"),
        (4, ["rows", "sequences"], "[sequences] · KV(n)"),
    ],
)
def test_formula_box_marks_the_chapters_knob_without_colour(outputs, chapter, knobs, plain):
    (shown,) = outputs(f"plotting.formula_box({chapter})")
    stripped = re.sub(r' style="[^"]*"', "", shown.data["text/html"])  # what a sanitizer leaves
    assert re.findall(r"<b><u><span>(.*?)</span></u></b>", stripped) == knobs
    assert plain in shown.data["text/plain"]


@pytest.mark.parametrize("make", [plotting.seam_strip, plotting.formula_box])
def test_unknown_chapter_is_refused(make):
    with pytest.raises(ValueError, match="chapter=5 is not one of 1, 2, 3, 4"):
        make(5)


def test_import_needs_no_matplotlib_and_no_backend():
    """HAZARDS 97: the backend a notebook set may be missing here; importing must neither load nor change it."""
    code = (
        "import os, sys; os.environ['MPLBACKEND'] = 'module://not_installed.backend'\n"
        "import course_utils.plotting as p; assert 'matplotlib' not in sys.modules\n"
        "fig, ax = p.figure(); assert p.png(fig)[:4] == b'\\x89PNG'; assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_attention_map_hides_the_future_and_outlines_the_new_rows():
    fig, ax = plotting.figure(6, 4.6)
    weights = np.tril(np.full((4, 4), 0.25))
    plotting.attention_map(ax, weights, ["The", "light", "house", "keeper"], new=2)
    assert ax.images[0].get_array().mask.sum() == 6  # the causal mask of four tokens
    assert [text.get_text() for text in ax.texts] == ["0.25"] * 10
    (outline,) = ax.patches
    assert (outline.get_y(), outline.get_height(), outline.get_width()) == (1.5, 2, 4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["The", "light", "house", "keeper"]
