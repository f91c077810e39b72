"""Chapter 1's explorer: the chapter's own functions, exact figures, who is hurt by one large weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from course_utils.chapters.quantization import bits_per_weight, dequantize, quantize_absmax
from course_utils.plotting import COLORS, png
from course_utils.widgets import core, quantization_explorer
from course_utils.widgets.quantization import _group_sizes, _WhoSharesTheScale

OWNER, SHOWN = 10, 11


def matrices(out=80, width=1536, names=("q_proj", "down_proj")) -> dict[str, torch.Tensor]:
    """Rows of different size, as in a real model."""
    draw = torch.Generator().manual_seed(3)
    scales = 0.05 + 0.1 * torch.rand(out, 1, generator=draw)
    return {name: scales * torch.randn(out, width, generator=draw) for name in names}


@pytest.fixture(scope="module")
def weights():
    return matrices()


@pytest.fixture(scope="module")
def explorer(weights):
    return quantization_explorer(weights, quantize_absmax, dequantize)


@pytest.fixture(scope="module")
def shared(weights):
    return _WhoSharesTheScale(weights, quantize_absmax, dequantize)


def settings(explorer, letter: str) -> dict:
    (preset,) = [preset for preset in explorer.presets if preset.name.startswith(letter)]
    return preset.settings


def state(explorer, shared, letter: str):
    return shared.state(**settings(explorer, letter))


# --- figures ---------------------------------------------------------------------------------------------------------


def test_64_rows_and_576_columns_are_cut_and_the_weights_stay_as_they_are(weights, shared):
    before = weights["q_proj"].clone()
    got = shared.state("q_proj", 8, "tensor", 64.0)
    assert got.weights.shape == got.taken.shape == (64, 576)
    assert torch.equal(weights["q_proj"], before)
    again = shared.state("q_proj", 8, "tensor", 1.0)  # the factor before leaves no trace
    assert np.array_equal(again.weights, before[:64, :576].numpy())


def test_the_outlier_is_the_largest_weight_of_row_10_times_the_factor(weights, shared):
    plain, odd = (shared.state("down_proj", 8, "row", factor).weights for factor in (1.0, 32.0))
    changed = np.argwhere(plain != odd)
    assert changed.tolist() == [[OWNER, int(np.abs(plain[OWNER]).argmax())]]
    assert odd[tuple(changed[0])] == pytest.approx(32 * plain[tuple(changed[0])])


def test_the_largest_weight_may_be_negative_and_later_changes_of_the_model_do_not_matter():
    w = torch.full((12, 64), 0.5)
    w[OWNER, 7] = -2.0
    shared = _WhoSharesTheScale({"w": w}, quantize_absmax, dequantize)
    w.zero_()
    got = shared.state("w", 8, "row", 3.0).weights[OWNER]
    assert got[7] == -6 and got[0] == 0.5


@pytest.mark.parametrize(
    ("share", "size"), [("tensor", 64 * 576), ("row", 576), (192, 192), (64, 64), (32, 32)]
)
@pytest.mark.parametrize("bits", [2, 8])
def test_bits_per_weight_count_the_float32_scales(shared, bits, share, size):
    assert shared.state("q_proj", bits, share, 1.0).bits_per_weight == pytest.approx(
        bits_per_weight(bits, size)
    )


def test_errors_and_zeros_are_those_of_the_dequantized_weights(weights, shared):
    got = shared.state("q_proj", 3, 64, 1.0)
    w = weights["q_proj"][:64, :576]
    q, scale = quantize_absmax(w, 3, 64)
    error = dequantize(q, scale) - w
    assert got.error == pytest.approx((error.norm() / w.norm()).item(), rel=1e-5)
    assert got.row_errors == pytest.approx((error.norm(dim=1) / w.norm(dim=1)).numpy(), rel=1e-5)
    assert got.became_zero == pytest.approx((q == 0).float().mean().item())


def test_weights_that_were_zero_did_not_become_so_and_a_row_of_zeros_has_no_error():
    """HAZARDS 1: finite with a row of zeros, in every share and in the picture."""
    w = matrices(16, 64, ("w",))
    w["w"][[0, SHOWN]] = 0
    shared = _WhoSharesTheScale(w, quantize_absmax, dequantize)
    for share in ("tensor", "row", 32):
        got = shared.state("w", 8, share, 1.0)
        assert got.row_errors[0] == 0 and np.isfinite(got.row_errors).all()
        assert got.became_zero < 0.1
    assert (
        core._png(quantization_explorer(w, quantize_absmax, dequantize).figure(share="row"))[:4] == b"\x89PNG"
    )


def test_all_zeros_have_no_error():
    shared = _WhoSharesTheScale({"w": torch.zeros(12, 64)}, quantize_absmax, dequantize)
    assert shared.state("w", 8, "tensor", 2.0).error == 0


def test_one_outlier_hurts_all_who_share_its_scale(explorer, shared):
    """The aha: in B the neighbours, in C its own row, in D its own group."""
    plain, tensor, row, group = (state(explorer, shared, letter).row_errors for letter in "ABCD")
    neighbours = [i for i in range(64) if i != OWNER]
    assert (tensor[neighbours] > 5 * plain[neighbours]).all()
    assert (
        tensor[OWNER] < tensor[neighbours].min()
    )  # the owner of the outlier is better off than any neighbour
    unharmed = shared.state("q_proj", 8, "row", 1.0).row_errors
    assert row[neighbours] == pytest.approx(unharmed[neighbours]) and row[OWNER] > 3 * unharmed[OWNER]
    assert group[OWNER] < 0.6 * row[OWNER]
    taken, before = (shared.state("q_proj", 8, 64, factor) for factor in (32.0, 1.0))
    changed = np.argwhere(taken.taken != before.taken)
    assert set(changed[:, 0]) == {OWNER} and len(set(changed[:, 1] // 64)) == 1


def test_readout_is_one_line_of_three_numbers(explorer, shared):
    chosen = settings(explorer, "D")
    got = shared.state(**chosen)
    said = explorer.readout(**chosen)
    assert said.startswith("8.50 bits per weight with scales · ") and said.count("·") == 2
    assert f"{100 * got.error:.2g} % relative RMS error" in said
    assert f"{100 * got.became_zero:.2f} % of the weights became 0" in said


def test_the_functions_passed_in_are_the_ones_called(weights):
    seen = []

    def quantize(w, bits, group_size):
        seen.append((tuple(w.shape), bits, group_size))
        return torch.ones_like(w, dtype=torch.int8), torch.full((len(w), 1), 0.5)

    own = quantization_explorer(weights, quantize, lambda q, scale: q * scale)
    seen.clear()
    for share in ("tensor", "row", 192):
        said = own.readout(matrix="q_proj", bits=5, share=share, outlier=1.0)
    assert seen == [((1, 64 * 576), 5, None), ((64, 576), 5, None), ((64, 576), 5, 192)]
    assert said.endswith("0.00 % of the weights became 0") and said.startswith(f"{5 + 32 / 576:.2f} bits")


# --- pictures --------------------------------------------------------------------------------------------------------


def bars(fig) -> tuple[list[float], list[str]]:
    """Heights in percent and fills of the bars."""
    (collection,) = fig.axes[1].collections
    heights = [path.vertices[:, 1].max() for path in collection.get_paths()]
    return heights, [to_hex(color).upper() for color in collection.get_facecolors()]


@pytest.mark.parametrize("letter", "ABCD")
def test_bars_are_the_errors_and_row_10_is_marked(explorer, shared, letter):
    fig = explorer.figure(**settings(explorer, letter))
    heights, fills = bars(fig)
    assert heights == pytest.approx(100 * state(explorer, shared, letter).row_errors, rel=1e-5)
    own = {i: fill for i, fill in enumerate(fills) if fills.count(fill) == 1}
    assert own == {OWNER: COLORS["vermillion"], SHOWN: COLORS["blue"]}
    marker = fig.axes[1].lines[0]
    assert marker.get_marker() == "v" and marker.get_xdata()[0] == OWNER
    said = [text.get_text() for text in fig.axes[1].texts]
    assert said[0] == ("▼ row 10" if letter == "A" else "▼ row 10, the outlier")


@pytest.mark.parametrize("share", ["tensor", "row", 192, 64, 32])
@pytest.mark.parametrize("matrix", ["q_proj", "down_proj"])
def test_dots_are_row_11_in_the_outliers_columns_on_their_own_levels(explorer, shared, matrix, share):
    got = shared.state(matrix, 4, share, 8.0)
    column = int(np.abs(got.weights[OWNER]).argmax())
    part = slice(column // 64 * 64, column // 64 * 64 + 64)
    axes = explorer.figure(matrix=matrix, bits=4, share=share, outlier=8.0).axes[0]
    weights, taken = (line.get_ydata() for line in axes.lines)
    assert weights == pytest.approx(got.weights[SHOWN, part])
    assert taken == pytest.approx(got.taken[SHOWN, part])
    levels = [c for c in axes.collections if c.get_zorder() == 1]
    assert len(levels) == (2 if share == 32 else 1)
    for place, value in enumerate(taken):  # each dot stands on a line that passes below it
        heights = [s[0][1] for c in levels for s in c.get_segments() if s[0][0] <= place <= s[1][0]]
        assert min(abs(np.array(heights) - value)) < 1e-6


def test_title_names_the_state(explorer):
    assert explorer.figure().texts[0].get_text() == "8 bits, one scale for 64 rows, no outlier"
    said = explorer.figure(bits=3, share=32, outlier=2**4.5).texts[0].get_text()
    assert said == "3 bits, a scale per 32 weights, outlier ×22.6 in row 10"
    assert "a scale per row" in explorer.figure(share="row").texts[0].get_text()


def test_the_same_weights_have_the_same_height_in_all_presets(explorer):
    assert (
        len({explorer.figure(**preset.settings).axes[0].get_ylim() for preset in explorer.presets[:3]}) == 1
    )
    assert {explorer.figure(**preset.settings).axes[1].get_ylim() for preset in explorer.presets} == {
        (0.2, 600.0)
    }


def test_twin_is_the_four_presets_side_by_side(explorer, monkeypatch):
    fig = explorer.twin()
    heads = [part.texts[0].get_text() for part in fig.subfigs]
    assert heads == [
        "One scale for 64 rows,\nno outlier",
        "One scale for 64 rows,\noutlier ×32 in row 10",
        "A scale per row,\noutlier ×32 in row 10",
        "A scale per 64 weights,\noutlier ×32 in row 10",
    ]
    assert all("bits · error" in part.texts[1].get_text() for part in fig.subfigs)
    assert len(png(fig)) < 60_000
    drawn = []
    monkeypatch.setattr(explorer, "draw", lambda fig, compact, **settings: drawn.append(settings))
    explorer.twin()
    assert drawn == [preset.settings for preset in explorer.presets]


@pytest.mark.parametrize("compact", [False, True])
def test_no_words_leave_the_picture_or_run_into_each_other(explorer, compact):
    fig = explorer.twin() if compact else explorer.figure(**settings(explorer, "B"))
    fig.draw_without_rendering()
    for part in fig.subfigs if compact else [fig]:
        for ax in part.axes:
            below = [text.get_window_extent() for text in ax.texts]
            assert all(box.x0 >= part.bbox.x0 and box.x1 <= part.bbox.x1 + 1 for box in below)
            assert not any(a.overlaps(b) for i, a in enumerate(below) for b in below[:i])
        assert all(text.get_window_extent().x1 <= part.bbox.x1 for text in part.texts)


# --- presets, controls, other matrices -------------------------------------------------------------------------------


def test_presets_tell_the_story_and_every_caption_carries_its_numbers(explorer):
    assert [preset.name for preset in explorer.presets] == [
        "A one scale",
        "B … and one outlier",
        "C a scale per row",
        "D a scale per 64",
    ]
    shares = [(preset.settings["share"], preset.settings["outlier"]) for preset in explorer.presets]
    assert shares == [("tensor", 1), ("tensor", 32), ("row", 32), (64, 32)]
    for preset in explorer.presets:
        assert explorer.readout(**preset.settings) in preset.caption
    assert explorer.alt().startswith("Who shares the scale?: 8 bits and one scale for all 64 rows")


def test_controls_are_those_of_the_course(explorer):
    controls = {control.name: control for control in explorer.controls}
    assert [value for _, value in controls["matrix"].options] == ["q_proj", "down_proj"]
    assert [value for _, value in controls["bits"].options] == [2, 3, 4, 5, 6, 8]
    assert [value for _, value in controls["share"].options] == ["tensor", "row", 192, 64, 32]
    assert (controls["outlier"].kind, controls["outlier"].low, controls["outlier"].high) == ("log", 1, 64)


def test_every_control_redraws_in_the_panel(explorer):
    panel = core._Panel(explorer)
    changes = {"matrix": "down_proj", "bits": 3, "share": 192, "outlier": 64.0}
    for name, value in changes.items():
        before = panel.image.value
        panel.inputs[name].value = value
        assert panel.image.value != before and panel.inputs[name].value == value
    assert explorer.readout(**changes) in panel.readout.value
    panel.buttons.value = 0  # Reset
    assert {name: widget.value for name, widget in panel.inputs.items()} == explorer.presets[0].settings


@pytest.mark.parametrize(
    ("columns", "sizes"), [(576, [192, 64, 32]), (192, [64, 32]), (64, [32]), (48, [24, 12]), (7, [7])]
)
def test_group_sizes_divide_the_columns(columns, sizes):
    assert _group_sizes(columns) == sizes


@pytest.mark.parametrize(("width", "columns"), [(1000, 576), (500, 384), (130, 128), (48, 48), (7, 7)])
def test_small_and_odd_matrices_are_cut_to_what_groups_divide(width, columns):
    explorer = quantization_explorer(
        {"a": torch.randn(20, width), "b": torch.randn(15, width + 100)}, quantize_absmax, dequantize
    )
    shown = _WhoSharesTheScale({"a": torch.randn(20, width)}, quantize_absmax, dequantize)
    assert (shown.rows, shown.columns) == (20, columns)
    assert "15 rows" in explorer.presets[0].caption
    for preset in explorer.presets:
        assert len(explorer.figure(**preset.settings).axes[0].lines[0].get_xdata()) == min(64, columns)


def test_half_precision_and_parameters_are_taken(shared, weights):
    half = {name: torch.nn.Parameter(w.to(torch.bfloat16)) for name, w in weights.items()}
    got = _WhoSharesTheScale(half, quantize_absmax, dequantize).state("q_proj", 8, "row", 2.0)
    assert got.weights.dtype == np.float32
    assert got.error == pytest.approx(shared.state("q_proj", 8, "row", 2.0).error, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "weights is empty; give at least one matrix"),
        (
            {"b": torch.zeros(64)},
            r"weights\['b'\] has shape \(64,\); expected \(out, in\) with at least 12 rows",
        ),
        ({"w": torch.zeros(11, 64)}, r"weights\['w'\] has shape \(11, 64\)"),
    ],
)
def test_what_is_no_matrix_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        quantization_explorer(wrong, quantize_absmax, dequantize)


def test_a_redraw_is_quick(explorer):
    import time

    core._png(explorer.figure())
    start = time.process_time()
    core._png(explorer.figure(share=32, bits=6))
    assert time.process_time() - start < 3  # generous: not a benchmark
