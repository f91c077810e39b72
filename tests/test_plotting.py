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
    assert drawn["idealised: the longer of two limits, with overhead"].get_linestyle() == "--"
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


def arrow_path(arrow, n: int = 200) -> np.ndarray:
    """Points along an arrow of one bend, in pixels, without what its head takes."""
    (start, middle, end), t = arrow.arrow_patch.get_path().vertices[:3], np.linspace(0, 1, n)[:, None]
    curve = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
    return arrow.arrow_patch.get_transform().transform(curve)


@pytest.mark.parametrize("count", [5, 6, 10])
@pytest.mark.parametrize("present", [False, True])
def test_the_arrow_of_a_move_leaves_the_measured_points_free(count, present):
    """Where the second row costs much, the curve rises towards the arrow."""
    plotting.present(present)
    ms = np.array([85, 135, 140, 153, 190, 290, 480, 900, 1800, 3700])[:count]
    rows = ROWS[:count]
    marks = [(rows[-1], "without a cache", "②"), (1, "with a cache", "②")]
    fig = plotting.course_curve(rows, ms / 1e3, predicted=roofline, marks=marks)
    plotting.png(fig)  # lays everything out
    (ax,) = fig.axes
    (arrow,) = arrows(ax)
    path = arrow_path(arrow)
    for point in ax.transData.transform(np.stack((rows, ms), 1))[1:-1]:
        assert np.hypot(*(path - point).T).min() > 9  # half a marker is 5
        assert path[np.abs(path[:, 0] - point[0]).argmin(), 1] > point[1]
    assert path[:, 1].max() < ax.bbox.y1


def test_the_curves_legend_stands_below_the_axes_whatever_the_curves_do():
    fig = plotting.course_curve(
        ROWS[:5], SECONDS[:5], predicted=roofline, other=(ROWS[:5], EIGHT_BIT[:5], "int8")
    )
    fig.draw_without_rendering()
    (ax,) = fig.axes
    box = ax.get_legend().get_window_extent()
    assert box.y1 <= ax.xaxis.label.get_window_extent().y0 and 0 <= box.x0 and box.x1 <= fig.bbox.x1
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == ["measured", "int8", "idealised: the longer of two limits, with overhead"]


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


def test_only_linear_and_cache_are_inside_of_the_decoder(outputs):
    (shown,) = outputs("plotting.seam_strip(2)")
    alt = shown.metadata["image/png"]["alt"]
    assert "two seams inside, 1 Linear and 2 Cache; two stand around it, 3 loop and 4 scheduler" in alt
    (ax,) = plotting._seam_figure(2).axes
    ax.figure.draw_without_rendering()
    place = {
        text.get_text().split()[0].strip(":"): text.get_window_extent()
        for text in ax.texts
        if text.get_text()
    }
    frames = [patch.get_window_extent() for patch in ax.patches]

    def around(word: str) -> list:
        """The frames that hold a word whole."""
        box = place[word]
        return [f for f in frames if f.x0 < box.x0 and box.x1 < f.x1 and f.y0 < box.y0 and box.y1 < f.y1]

    depths = {word: len(around(word)) for word in ("4", "3", "tokens", "logits", "Decoder", "1", "2")}
    assert depths == {"4": 2, "3": 3, "tokens": 2, "logits": 2, "Decoder": 3, "1": 4, "2": 4}
    texts_of = sorted(place.values(), key=lambda box: box.x0)
    assert texts_of[0].x0 > 0 and max(box.x1 for box in texts_of) < ax.bbox.x1


@pytest.mark.parametrize("chapter", [1, 2, 3, 4])
def test_what_the_chapter_does_is_said_below_its_seam(chapter):
    (ax,) = plotting._seam_figure(chapter).axes
    ax.figure.draw_without_rendering()
    (deed,) = (text for text in ax.texts if "▲" in text.get_text())
    (seam,) = (text for text in ax.texts if text.get_weight() == "bold")
    box, below = seam.get_window_extent(), deed.get_window_extent()
    tip = below.x0 + 8 if deed.get_text().startswith("▲") else below.x1 - 8
    assert below.y1 < box.y0 and abs(tip - (box.x0 + box.x1) / 2) < 12
    assert 0 <= below.x0 and below.x1 <= ax.bbox.x1 and below.y0 >= 0


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


# --- chapter 1 -------------------------------------------------------------------------------------------------------

EIGHT_BIT = np.array([roofline(rows) / 3 for rows in ROWS])


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def arrows(ax) -> list:
    return [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]


def test_a_second_curve_is_drawn_and_arrow_1_leads_to_it_at_the_fewest_rows():
    fig = plotting.course_curve(ROWS, SECONDS, label="float32", other=(ROWS[:5], EIGHT_BIT[:5], "int8"))
    (ax,) = fig.axes
    drawn = {line.get_label(): line for line in ax.lines}
    assert list(drawn["float32"].get_ydata()) == pytest.approx(list(SECONDS * 1e3))
    assert list(drawn["int8"].get_ydata()) == pytest.approx(list(EIGHT_BIT[:5] * 1e3))
    assert drawn["float32"].get_marker() != drawn["int8"].get_marker()
    assert "① float32 → int8" in texts(ax)
    (arrow,) = arrows(ax)
    assert arrow.xyann == pytest.approx((1, SECONDS[0] * 1e3)) and arrow.xy == pytest.approx(
        (1, EIGHT_BIT[0] * 1e3)
    )
    assert ax.get_ylim()[0] < EIGHT_BIT[0] * 1e3 < SECONDS[0] * 1e3 < ax.get_ylim()[1]


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_arrow_1_follows_what_was_measured_up_as_well_as_down(factor):
    (ax,) = plotting.course_curve(ROWS, SECONDS, other=(ROWS, SECONDS * factor, "int8")).axes
    (arrow,) = arrows(ax)
    assert arrow.xy[1] / arrow.xyann[1] == pytest.approx(factor)
    heights = {text.xy[1]: text.xyann[1] for text in ax.texts if text.get_text() == "①"}
    assert heights[min(heights)] < 0 < heights[max(heights)]  # the numbers stand outside of the two circles


def test_two_curves_that_touch_need_no_arrow():
    (ax,) = plotting.course_curve(ROWS, SECONDS, other=(ROWS, SECONDS * 0.99, "int8")).axes
    assert not arrows(ax) and texts(ax).count("①") == 2


def test_marks_and_the_second_curve_go_together():
    marks = [(256, "without a cache", "②"), (1, "with one", "②")]
    (ax,) = plotting.course_curve(ROWS, SECONDS, marks=marks, other=(ROWS, EIGHT_BIT, "int8")).axes
    assert "① measured → int8\n② without a cache → with one" in texts(ax) and len(arrows(ax)) == 2


def test_curves_need_a_number_of_rows_in_common():
    with pytest.raises(ValueError, match=r"other has rows \[3, 5\]; measure both curves at one number"):
        plotting.course_curve([1, 2], [1, 2], other=([3, 5], [1, 2], "int8"))


def points_of(ax, marker: str) -> list[tuple]:
    return [tuple(p) for line in ax.lines if line.get_marker() == marker for p in line.get_xydata()]


def level_lines(ax) -> list:
    """(left, right, height) of all lines that stand for levels."""
    segments = [s for c in ax.collections if c.get_zorder() == 1 for s in c.get_segments()]
    return [(s[0][0], s[1][0], round(float(s[0][1]), 6)) for s in segments]


def test_quantization_grid_puts_weights_on_the_nearest_level_they_may_take():
    """HAZARDS 3: narrow range, so that the ends are -7 and 7 at 4 bits."""
    fig, ax = plotting.figure()
    plotting.quantization_grid(ax, [0.34, -0.9, 0.06, 0.9], 0.1, bits=4)
    weights, taken = (line.get_ydata() for line in ax.lines)
    assert list(weights) == [0.34, -0.9, 0.06, 0.9]
    assert list(taken) == pytest.approx([0.3, -0.7, 0.1, 0.7])  # 0.9 is beyond the last level
    assert [height for *_, height in level_lines(ax)] == pytest.approx([k / 10 for k in range(-7, 8)])
    errors = [s for c in ax.collections if c.get_zorder() == 2 for s in c.get_segments()]
    assert errors[0] == pytest.approx(np.array([[0, 0.34], [0, 0.3]]))
    hollow, full = (line.get_markerfacecolor() for line in ax.lines)
    assert hollow == "white" and full == plotting.COLORS["blue"]
    assert {"weight", "rounded", "levels"} == set(ax.get_legend_handles_labels()[1])


def test_quantization_grid_gives_each_group_its_own_levels_and_takes_other_values():
    fig, ax = plotting.figure()
    plotting.quantization_grid(ax, [0.2, 1.0, 0.2, 0.3], [1.0, 0.1], bits=3, taken=[0.0, 1.0, 0.2, 0.3])
    assert list(ax.lines[1].get_ydata()) == [0.0, 1.0, 0.2, 0.3]
    first = [height for left, right, height in level_lines(ax) if (left, right) == (-0.5, 1.5)]
    second = [height for left, right, height in level_lines(ax) if (left, right) == (1.5, 3.5)]
    assert first == [-1, 0, 1]  # ±2 and ±3 are out of view
    assert second == pytest.approx([-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3])


def test_levels_too_close_to_be_told_apart_are_an_area_that_ends_where_they_end():
    fig, ax = plotting.figure()
    plotting.quantization_grid(ax, [0.2, -1.0], 1 / 127, bits=8)
    (area,) = [c for c in ax.collections if c.get_zorder() == 1]
    heights = area.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((-1, 1))


def test_quantization_grid_draws_zeros_and_refuses_groups_that_do_not_divide():
    """HAZARDS 1: a row of zeros has a finite picture."""
    fig, ax = plotting.figure()
    plotting.quantization_grid(ax, [0.0, 0.0], 1.0)
    assert np.isfinite(ax.get_ylim()).all()
    with pytest.raises(ValueError, match=r"w has shape \(3,\), not \(n,\) with n a multiple of the 2 scales"):
        plotting.quantization_grid(ax, [1.0, 2.0, 3.0], [1.0, 1.0])


def test_intervals_tell_by_shape_which_leave_out_0():
    from course_utils.evaluation import Interval

    fig, ax = plotting.figure()
    plotting.intervals(ax, ["a − b", "c − b"], [Interval(-0.001, -0.003, 0.002), Interval(0.02, 0.01, 0.04)])
    means = [line for line in ax.lines if line.get_marker() in ("o", "s")]
    assert [line.get_marker() for line in means] == ["o", "s"]
    assert means[0].get_markerfacecolor() == "white" != means[1].get_markerfacecolor()
    assert [(float(x), float(y)) for line in means for x, y in line.get_xydata()] == [(-0.001, 0), (0.02, 1)]
    ends = [segment[:, 0].tolist() for c in ax.collections for segment in c.get_segments()]
    assert ends == [pytest.approx([-0.003, 0.002]), pytest.approx([0.01, 0.04])]
    assert texts(ax) == ["−0.0010, covers 0", "+0.0200, leaves out 0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a − b", "c − b"]
    low, high = ax.get_ylim()
    assert low > high  # the first on top
    assert ax.get_xlim()[0] < -0.003 and 0.04 < ax.get_xlim()[1]
    assert any(list(line.get_xdata()) == [0, 0] for line in ax.lines)


def test_intervals_need_a_name_each():
    with pytest.raises(ValueError, match="2 names for 1 intervals"):
        plotting.intervals(None, ["a", "b"], [None])


TORCH = [(4, 9.3e-3, "float32"), (1, 1.9e-3, "int8")]
OWN = [(1, 1.25e-3, "int8 ours"), (0.5625, 1e-3, "int4"), (4, 4.0e-3, "float32 ours")]  # in any order
NAIVE = [(17, 46e-3, "scale first"), (9, 24e-3, "scale last")]


def bytes_figure(**changes):
    known = {"weights": 28_000_000, "bandwidth": 28e9, "model_scale": 4.75, "overhead": 3.1e-3}
    return plotting.bytes_and_time(TORCH, OWN, NAIVE, **(known | changes))


def test_bytes_and_time_draws_each_kind_in_its_own_way():
    (ax,) = bytes_figure().axes
    drawn = {line.get_label(): line for line in ax.lines}
    own, torchs, naive = (
        drawn[k] for k in ("our one kernel", "torch's kernels", "dequantize, then multiply")
    )
    assert own.get_xydata() == pytest.approx(np.array([[0.5625, 1], [1, 1.25], [4, 4]]))
    assert (own.get_marker(), own.get_linestyle()) == ("o", "-")
    assert (torchs.get_marker(), torchs.get_linestyle()) == ("s", "--")
    assert (naive.get_marker(), naive.get_linestyle()) == ("X", "None")
    assert {label for *_, label in TORCH + OWN + NAIVE} <= set(texts(ax))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_bytes_and_time_draws_what_reading_alone_takes():
    (ax,) = bytes_figure().axes
    (line,) = [line for line in ax.lines if "28 GB/s" in line.get_label()]
    x, y = line.get_xydata().T
    assert list(y / x) == pytest.approx([1.0, 1.0])  # 28 million bytes at 28 GB/s are 1 ms
    assert list(x) == pytest.approx(list(ax.get_xlim()))


def test_bytes_and_time_names_the_two_effects_apart():
    (ax,) = bytes_figure().axes
    said = [text for text in texts(ax) if text.endswith("x")]
    assert said == [
        "kernel: 2.32x",
        "bytes: 3.20x",
    ]  # 9.3/4 at 4 bytes, 4/1.25 from 4 to 1; 1 to 0.56 too close
    (arrow,) = arrows(ax)
    assert (arrow.xyann, arrow.xy) == (pytest.approx((4, 9.3)), pytest.approx((4, 4.0)))


def test_right_axis_is_the_whole_model_with_its_overhead():
    fig = bytes_figure()
    (ax,), (right,) = fig.axes, fig.axes[0].child_axes
    fig.draw_without_rendering()
    assert np.array(right.get_ylim()) / ax.get_ylim() == pytest.approx([4.75, 4.75])
    (line,) = [line for line in ax.lines if "overhead" in line.get_label()]
    assert line.get_ydata()[0] * 4.75 == pytest.approx(3.1) and "3.10 ms" in line.get_label()
    (ax,) = bytes_figure(overhead=30e-3 / 1e3).axes  # far below all points: still in view
    assert ax.get_ylim()[0] < 0.03 / 4.75


def test_bytes_and_time_does_without_right_axis_and_naive_forms():
    fig = plotting.bytes_and_time(TORCH, OWN, weights=28_000_000, bandwidth=28e9)
    assert not fig.axes[0].child_axes and len(fig.axes[0].lines) == 3


def test_bytes_and_time_fits_notebook_and_projector(recwarn):
    for on in (False, True):
        plotting.present(on)
        fig = bytes_figure()
        assert len(plotting.png(fig)) < 80_000
        (ax,) = fig.axes
        assert ax.get_legend().get_window_extent().x1 <= fig.bbox.x1
        assert ax.get_legend().get_window_extent().y0 >= 0
    assert not [w for w in recwarn if "Glyph" in str(w.message) or "layout" in str(w.message)]


@pytest.mark.parametrize("points", [[], [(0, 1e-3, "x")], [(1, 0.0, "x")], [(1, float("nan"), "x")]])
def test_points_without_a_place_are_refused(points):
    with pytest.raises(ValueError, match="no place on a log scale"):
        plotting.bytes_and_time(points, [], weights=1, bandwidth=1)


def test_overhead_needs_the_right_axis():
    with pytest.raises(ValueError, match="give model_scale as well"):
        bytes_figure(model_scale=None)
