"""Explorers: pure pictures, the twin from the same function, exact counts, controls only where somebody can turn them."""

from __future__ import annotations

import ast
import base64
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from course_utils import widgets
from course_utils.decoder import Decoder, DecoderConfig
from course_utils.widgets import Control, Explorer, Preset, core, kv_cache, kv_cache_explorer, step_cost

MARKS = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "VSCODE_PID", "COURSE_INTERACTIVE")
SMOL = DecoderConfig(49_152, 576, 1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)


@pytest.fixture(scope="module")
def explorer():
    return kv_cache_explorer(SMOL)


def shown(code: str, monkeypatch, kernel: bool = False) -> list:
    """What a shell displays for this code; ``kernel`` makes it look like a notebook's kernel."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    monkeypatch.setattr(core, "_has_kernel", lambda: kernel)
    shell.user_ns["config"] = SMOL
    try:
        with capture_output() as captured:
            shell.run_cell("from course_utils.widgets import kv_cache_explorer\n" + code).raise_error()
    finally:
        InteractiveShell.clear_instance()
    return captured.outputs


def is_widget(output) -> bool:
    return any("widget" in mime for mime in output.data)


# --- counts ----------------------------------------------------------------------------------------------------------


def multiply_adds_by_hooks(decoder: Decoder, token: int) -> int:
    """Counted while the model runs: weights times rows of every linear layer."""
    seen = []
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, _: seen.append(module.weight.numel() * inputs[0].shape[:-1].numel())
        )
        for module in decoder.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    decoder(torch.zeros(1, token, dtype=torch.int64), logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return sum(seen)


@pytest.mark.parametrize("token", [1, 5])
def test_counts_equal_what_the_decoder_multiplies(tiny_decoder, token):
    decoder = tiny_decoder()
    config = decoder.config
    # Attention by hand: each query multiplies with each key it sees, and each weight with a value, in every head.
    pairs = sum(row + 1 for row in range(token))
    attention = config.num_layers * config.num_heads * pairs * (config.head_dim + config.head_dim)
    cost = step_cost(config, token, cache=False)
    assert cost.multiply_adds == multiply_adds_by_hooks(decoder, token) + attention
    assert (cost.rows, cost.bytes_held) == (token, 0)


def test_with_a_cache_only_the_new_row_is_counted():
    cost = step_cost(SMOL, 1000, cache=True)
    assert cost.rows == 1
    weights = 134_515_008 - 61 * 576  # all but the norms; embedding and head are one matrix
    assert cost.multiply_adds == weights + 2 * 30 * 9 * 64 * 1000
    assert cost.bytes_held == 23_040_000  # HAZARDS 37
    assert step_cost(SMOL, 1, True).multiply_adds == step_cost(SMOL, 1, False).multiply_adds


def test_bytes_follow_the_kv_heads_nine_three_one(explorer):
    drawing = kv_cache._OneMoreToken(SMOL)
    held = [drawing.cost(24, True, group, 2).bytes_held for group in (1, 3, 9)]
    assert held[0] == 3 * held[1] == 9 * held[2]
    assert [drawing.cost(24, True, 3, size).bytes_held for size in (4, 2, 1)] == [
        4 * held[1] // 2,
        held[1],
        held[1] // 2,
    ]


def test_the_chapters_own_functions_move_the_picture():
    own = kv_cache_explorer(
        SMOL,
        step_work=lambda config, fed, context: {"linear": 2_000_000 * fed, "attention": 2_000_000 * context},
        kv_bytes=lambda layers, kv_heads, head_dim, tokens, bytes_per_value: 1000 * tokens * kv_heads,
    )
    said = own.readout(token=24, cache=True, group=3, bytes_per_value=2)
    assert said == "1 row fed · 25 million multiply-adds this step · 72 kB held"
    said = own.readout(token=24, cache=False, group=3, bytes_per_value=2)
    assert said == "24 rows fed · 48 million multiply-adds this step · 0 bytes held"


def test_counts_agree_with_the_chapters():
    chapter = pytest.importorskip("course_utils.chapters.kv_cache")
    for cache, fed in ((True, 1), (False, 24)):
        cost = step_cost(SMOL, 24, cache)
        assert sum(chapter.step_work(SMOL, fed, 24).values()) == 2 * cost.multiply_adds  # FLOPs
    assert chapter.kv_bytes(30, 3, 64, 24, 2) == step_cost(SMOL, 24, True).bytes_held


def test_work_is_a_parabola_without_and_a_line_with_the_cache():
    drawing = kv_cache._OneMoreToken(SMOL)
    without, with_cache = drawing.work(False, 3), drawing.work(True, 3)
    assert len(without) == 32 and without[0] == with_cache[0]
    assert without[31] / without[15] == pytest.approx(4, rel=0.1)
    assert with_cache[31] / with_cache[15] == pytest.approx(2, rel=0.01)


def test_readout_is_one_line_of_three_numbers(explorer):
    said = explorer.readout(token=24, cache=True, group=3, bytes_per_value=2)
    assert said == "1 row fed · 135 million multiply-adds this step · 553 kB held"
    assert explorer.readout(token=24, cache=False, group=3, bytes_per_value=2).startswith(
        "24 rows fed · 2.59 billion"
    )


# --- pictures --------------------------------------------------------------------------------------------------------


def triangle_colors(fig) -> list[tuple]:
    """Fill of each square of the triangle, rows from the top."""
    return [tuple(color) for color in fig.axes[0].collections[0].get_facecolors()]


def test_one_row_lights_up_with_the_cache_and_the_triangle_without(explorer):
    from matplotlib.colors import to_rgba

    def count(cache: bool, kind: tuple) -> int:
        return triangle_colors(explorer.figure(token=24, cache=cache)).count(to_rgba(kind[0]))

    assert count(False, kv_cache._NOW) == count(True, kv_cache._NOW) == 24
    assert count(False, kv_cache._AGAIN) == count(True, kv_cache._BEFORE) == 23 * 24 // 2
    assert count(True, kv_cache._AGAIN) == count(False, kv_cache._BEFORE) == 0


def test_computed_again_is_hatched_not_only_coloured(explorer):
    def hatches(cache: bool) -> int:
        axes = explorer.figure(token=24, cache=cache).axes[0]
        return sum(patch.get_hatch() is not None for patch in axes.patches)

    assert hatches(False) == 2 and hatches(True) == 0


def test_figure_says_what_to_see_and_takes_presets_for_the_rest(explorer):
    fig = explorer.figure(token=24, cache=True)
    assert fig.texts[0].get_text() == "Token 24, with the cache: 1 row is fed"
    assert explorer.figure().texts[0].get_text() == "Token 4, without a cache: 4 rows are fed"
    with pytest.raises(ValueError, match="unknown setting 'tokens'; known: token, cache"):
        explorer.figure(tokens=24)


def test_twin_is_two_by_three_drawn_by_the_same_function(explorer, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        explorer,
        "draw",
        lambda fig, compact, **settings: drawn.append((settings["token"], settings["cache"])),
    )
    explorer.twin()
    assert drawn == [(token, cache) for cache in (False, True) for token in (4, 12, 24)]


def test_twin_is_small_and_its_alt_says_what_is_in_it(explorer):
    from course_utils.plotting import png

    assert len(png(explorer.twin())) < 60_000
    alt = explorer.alt()
    assert alt.startswith("One more token: Token 4 without a cache: 4 rows fed")
    assert "Token 24 with the cache: 1 row fed" in alt


def test_twin_ends_at_its_last_token_and_a_single_picture_goes_on(explorer):
    assert [len(triangle_colors(part)) for part in explorer.twin().subfigs] == [24 * 25 // 2] * 6
    assert len(triangle_colors(explorer.figure(token=24))) == 32 * 33 // 2
    last = explorer.twin().subfigs[5].axes
    assert all(24 < ax.get_xlim()[1] < 26 for ax in last[1:])
    legend = [text.get_text() for text in last[0].get_legend().get_texts()]
    assert legend == ["computed now", "read from the cache", "done before"]  # nothing is still to come


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_axes_end_a_little_above_the_last_token(explorer, cache, group, size):
    drawing = kv_cache._OneMoreToken(SMOL)
    _, work, held = explorer.figure(cache=cache, group=group, bytes_per_value=size).axes
    assert work.get_ylim()[1] == pytest.approx(1.15 * drawing.work(False, group)[-1] / 1e9)
    most = max(drawing.held(group, size)[-1], drawing.held(3, 2)[-1])  # the model's own cache stays in view
    assert held.get_ylim()[1] == pytest.approx(1.15 * most / 1e6)
    own = [line for line in held.lines if line.get_linestyle() == "-."]
    assert len(own) == ((group, size) != (3, 2)) and (not own or own[0].get_label() == "3 KV heads × 2 bytes")


def test_axes_name_their_units_in_every_size(explorer):
    for part in (explorer.figure(), *explorer.twin().subfigs):
        said = [" ".join(ax.get_title(loc="left").split()) for ax in part.axes[1:]]
        assert said == ["multiply-adds so far, billions", "bytes held, MB (3 KV heads × 2 bytes)"]
    one = explorer.figure(group=9, bytes_per_value=1).axes[2].get_title(loc="left")
    assert one == "bytes held, MB (1 KV head × 1 byte)"


def test_words_in_the_twin_do_not_run_into_each_other(explorer):
    fig = explorer.twin()
    fig.draw_without_rendering()
    for part in fig.subfigs:
        triangle, *charts = part.axes
        legend = triangle.get_legend().get_window_extent()
        # The title on the left is the second of an axes' three.
        words = [t.get_window_extent() for ax in charts for t in (ax._left_title, *ax.get_yticklabels())]
        assert legend.x0 >= part.bbox.x0 and not any(legend.overlaps(box) for box in words)
        assert max(box.x1 for box in words) <= part.bbox.x1


def test_a_reader_whose_cache_holds_nothing_gets_a_picture():
    own = kv_cache_explorer(SMOL, kv_bytes=lambda *_: 0)
    assert own.figure(token=24, cache=True).axes[2].get_ylim()[1] == 1


def test_every_preset_has_a_caption_with_its_own_numbers(explorer):
    assert [preset.name[0] for preset in explorer.presets] == ["A", "B", "C", "D"]
    for preset in explorer.presets:
        assert set(preset.settings) == {"token", "cache", "group", "bytes_per_value"}
        assert explorer.readout(**preset.settings) in preset.caption
    assert "9 KV heads" in explorer.presets[3].caption


def test_other_models_get_their_own_groups():
    menu = {control.name: control for control in kv_cache_explorer(SMOL).controls}["group"]
    assert [value for _, value in menu.options] == [1, 3, 9]
    large = DecoderConfig(128_256, 4096, 14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    menu = {control.name: control for control in kv_cache_explorer(large).controls}["group"]
    assert [value for _, value in menu.options] == [1, 4, 32]


def test_nothing_calls_a_model_and_a_redraw_is_quick(explorer, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an explorer called a model")

    monkeypatch.setattr(Decoder, "forward", refuse)
    monkeypatch.setattr(Decoder, "hidden", refuse)
    core._png(explorer.figure())
    start = time.process_time()
    core._png(explorer.figure(token=20, cache=True))
    assert time.process_time() - start < 3  # generous: not a benchmark


# --- showing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["", "interactive=False", "interactive=True"])
def test_without_a_front_end_only_the_twin_is_shown(monkeypatch, how):
    """HAZARDS 93: the picture stands for itself where no kernel or front end is."""
    outputs = shown(f"kv_cache_explorer(config).show({how})", monkeypatch)
    assert [is_widget(output) for output in outputs] == [False]
    assert outputs[0].metadata["image/png"]["alt"].startswith("One more token")


@pytest.mark.parametrize(
    ("how", "environment", "controls"),
    [
        ("", {}, False),  # a run without people: papermill, nbconvert
        ("", {"JPY_SESSION_NAME": "notebook.ipynb"}, True),
        ("", {"COLAB_RELEASE_TAG": "x"}, True),
        ("", {"JPY_SESSION_NAME": "notebook.ipynb", "COURSE_INTERACTIVE": "0"}, False),
        ("", {"COURSE_INTERACTIVE": "1"}, True),
        ("interactive=False", {"JPY_SESSION_NAME": "notebook.ipynb"}, False),
        ("interactive=True", {}, True),
    ],
)
def test_controls_where_a_front_end_is_attached(monkeypatch, how, environment, controls):
    for name in MARKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    outputs = shown(f"kv_cache_explorer(config).show({how})", monkeypatch, kernel=True)
    assert [is_widget(output) for output in outputs] == ([True, False] if controls else [False])
    assert "image/png" in outputs[-1].data  # the twin always, below the controls


def test_show_refuses_another_word(explorer):
    with pytest.raises(ValueError, match="interactive='no' is not one of \"auto\", True, False"):
        explorer.show("no")


def test_a_run_without_people_leaves_no_widget_view(monkeypatch):
    """HAZARDS 91-93: an executed notebook holds the twin and no widget, in outputs or metadata."""
    import nbformat
    from nbclient import NotebookClient

    for name in MARKS:
        monkeypatch.delenv(name, raising=False)
    cell = (
        "from course_utils.decoder import DecoderConfig\nfrom course_utils.widgets import kv_cache_explorer\n"
        "kv_cache_explorer(DecoderConfig(97, 32, 48, 2, 4, 2, 8)).show()"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert set(output["data"]) == {"image/png", "text/plain"} and "widgets" not in notebook.metadata
    assert output["metadata"]["image/png"]["alt"].startswith("One more token")
    assert base64.b64decode(output["data"]["image/png"])[:4] == b"\x89PNG"


# --- controls --------------------------------------------------------------------------------------------------------


@pytest.fixture
def panel(explorer):
    return core._Panel(explorer)


def test_presets_set_all_controls_with_one_picture(panel, explorer, monkeypatch):
    drawn = []
    monkeypatch.setattr(core, "_png", lambda fig: drawn.append(fig) or b"png")
    panel.buttons.value = 2
    assert {name: widget.value for name, widget in panel.inputs.items()} == explorer.presets[2].settings
    assert len(drawn) == 1 and panel.image.value == b"png"
    assert "1 row fed" in panel.readout.value and "18px" in panel.readout.value
    assert explorer.presets[2].caption in panel.caption.value


def test_turning_a_control_redraws_and_a_preset_leads_back(panel, explorer):
    before = panel.image.value
    panel.inputs["token"].value = 30
    assert panel.image.value != before and panel.image.value[:4] == b"\x89PNG"
    assert "30 rows fed" in panel.readout.value and panel.caption.value == "<div></div>"
    assert panel.buttons.value is None
    panel.buttons.value = 0  # Reset
    assert panel.inputs["token"].value == 4 and panel.buttons.value == 0
    assert "4 rows fed" in panel.readout.value


def test_sliders_wait_for_the_hand_to_stop(panel):
    sliders = [widget for widget in panel.inputs.values() if hasattr(widget, "continuous_update")]
    assert sliders and not any(slider.continuous_update for slider in sliders)


def test_all_kinds_of_controls_work():
    import ipywidgets

    drawn = []
    explorer = Explorer(
        "Any",
        draw=lambda fig, compact=False, **settings: drawn.append(settings),
        readout=lambda **settings: "x",
        presets=[Preset("A", {"a": 1, "b": 2, "c": 3, "d": 4, "e": 32.0}, "first")],
        controls=[
            Control("a", "a", "int", low=0, high=9),
            Control("b", "b", "steps", [("two", 2), ("eight", 8)]),
            Control("c", "c", "menu", [("three", 3)]),
            Control("d", "d", "choice", [("four", 4)]),
            Control("e", "e", "log", low=1, high=64),
        ],
    )
    panel = core._Panel(explorer)
    kinds = [type(panel.inputs[name]) for name in "abcde"]
    assert kinds == [
        ipywidgets.IntSlider,
        ipywidgets.SelectionSlider,
        ipywidgets.Dropdown,
        ipywidgets.ToggleButtons,
        ipywidgets.FloatLogSlider,
    ]
    slider = panel.inputs["e"]
    assert (slider.base**slider.min, slider.base**slider.max, slider.value) == (1, 64, 32)
    panel.inputs["b"].value = 8
    assert drawn[-1] == {"a": 1, "b": 8, "c": 3, "d": 4, "e": 32.0}
    assert explorer.controls_box().children[2].format == "png"


def test_only_core_widgets_are_used():
    """HAZARDS 94: Colab shows the core classes and nothing else."""
    files = list(Path(widgets.__file__).parent.glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used = {name for name in names if name[:1].isupper() and hasattr(__import__("ipywidgets"), name)}
    core = "ToggleButtons Dropdown IntSlider FloatSlider FloatLogSlider SelectionSlider Play HTML Image HBox VBox"
    assert used and used <= set(core.split())
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert len(files) >= 4 and not modules & {"ipympl", "plotly", "anywidget"}


def test_import_needs_neither_ipywidgets_nor_matplotlib():
    """HAZARDS 97 and 110: both are imported where they are used."""
    code = (
        "import sys; import course_utils.widgets as w; from course_utils.decoder import DecoderConfig\n"
        "assert not {'ipywidgets', 'matplotlib'} & set(sys.modules)\n"
        "w.kv_cache_explorer(DecoderConfig(97, 32, 48, 2, 4, 2, 8)).twin(); assert 'ipywidgets' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
