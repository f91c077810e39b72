"""Rendering: outputs go into the committed file, noise does not, and the stamp says what they belong to."""

from __future__ import annotations

import json

import pytest

from course_utils.tools import render
from course_utils.tools.notebooks import COURSE_MIME, WIDGET_MIME, CourseError, read
from tests.notebooks_for_tests import code, notebook, parameters, printed, save, shown, text


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch):
    monkeypatch.setattr(render, "machine_line", lambda: "a machine, 2 threads")


@pytest.fixture
def root(tmp_path):
    """A clone with one package file and one data file."""
    for name, content in {
        "course_utils/decoder.py": "x = 1",
        "course_utils/course.mplstyle": "a: 1",
        "course_utils/chapters/toy.py": "",
        "data/prompts.txt": "hello",
        "data/deep/more.bin": "\x00",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def sources(nb):
    return [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in nb.cells]


def test_render_keeps_sources_and_ids_and_writes_clean_outputs(root):
    """HAZARDS 91-93: no widget state or view, nothing of papermill; own sources, tags and ids (109); fresh afterwards."""
    widget = (
        "import ipywidgets\nfrom IPython.display import display\n"
        "display(ipywidgets.IntSlider())\nprint(6 * 7, quick)"
    )
    nb = notebook(text("# Title"), parameters(), code(widget, "explorer"), code("seed"))
    nb.cells[3].outputs = [printed("old")]
    nb.metadata["widgets"] = {"state": {}}
    nb.cells[1].metadata["papermill"] = {"status": "completed"}
    path = save(root, nb)
    before = read(path)
    assert not render.fresh(before, root)
    assert render.main(["02"], root) == 0
    after = read(path)
    assert sources(after) == sources(before)
    assert after.cells[2].outputs[-1].text == "42 False\n"
    assert after.cells[3].outputs[0].data["text/plain"] == "0"
    raw = path.read_text()
    assert "widget" not in json.dumps(
        [list(o.get("data", {})) for c in after.cells for o in c.get("outputs", [])]
    )
    assert "papermill" not in raw and "execution" not in raw.replace("execution_count", "")
    assert set(after.metadata) == {"course", "course_render", "kernelspec", "language_info"}
    stamp = after.metadata.course_render
    assert set(stamp) == {"hash", "outputs", "machine", "versions", "date"}
    assert stamp.machine == "a machine, 2 threads" and {"python", "torch"} <= set(stamp.versions)
    assert render.fresh(after, root)
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_a_failing_run_leaves_the_file_untouched(root, capsys):
    """And keeps what ran under build/, marked."""
    path = save(root, notebook(parameters(), code("print('so far')"), code("1 / 0")))
    before = path.read_bytes()
    with pytest.raises(CourseError, match="code cell 3 `1 / 0`: ZeroDivisionError: division by zero"):
        render.main([], root)
    assert path.read_bytes() == before
    kept = read(root / "build" / "02_toy.failed.ipynb")
    assert kept.metadata.course_run.status == "failed" and "failed" in kept.cells[0].source


def test_a_change_during_the_run_is_not_stamped_as_fresh(root, monkeypatch):
    """Somebody saves the notebook, or data changes, while it runs: nothing is overwritten."""
    path = save(root, notebook(parameters(), code("1")))

    def execute(nb, name, **_):
        save(root, notebook(parameters(), code("2")))

    monkeypatch.setattr(render, "execute", execute)
    with pytest.raises(CourseError, match="changed during the run; render again"):
        render.main([], root)
    assert read(path).cells[1].source == "2" and render.STAMP not in read(path).metadata


def test_render_wants_the_export_first(root):
    """The export changes course_utils, and would make the new outputs stale at once."""
    save(root, notebook(parameters(), code("X = 1", "export")))
    with pytest.raises(CourseError, match="export before you render"):
        render.main([], root)


def test_render_refuses_a_notebook_without_parameters(root):
    """HAZARDS 89."""
    save(root, notebook(code("1")))
    with pytest.raises(CourseError, match="0 cells are tagged 'parameters'"):
        render.main([], root)


def changed(root, name, content="changed"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(content)


COVERED = [
    "course_utils/decoder.py",
    "course_utils/course.mplstyle",
    "course_utils/chapters/new.py",
    "data/prompts.txt",
]
LEFT_OUT = [
    "course_utils/tools/run.py",
    "course_utils/__main__.py",
    "course_utils/__pycache__/decoder.pyc",
    "course_utils/notes.txt",
    "data/results/decode.json",
    "data/.DS_Store",
    "README.md",
]


@pytest.mark.parametrize("name", [*COVERED, *LEFT_OUT])
def test_what_the_hash_covers(root, name):
    nb = notebook(text("# Title"), parameters(), code("1"))
    before = render.content_hash(nb, root)
    changed(root, name)
    assert (render.content_hash(nb, root) != before) == (name in COVERED)


def test_the_hash_of_cells(root):
    """Code counts, text and tags do not; cells that merge or change places do."""
    nb = notebook(text("# Title"), parameters(), code("a = 1"), code("b = 2"))
    before = render.content_hash(nb, root)
    nb.cells[0].source = "# Other title"
    nb.cells[2].metadata["tags"] = ["bug"]
    assert render.content_hash(nb, root) == before
    merged = notebook(text("# Title"), parameters(), code("a = 1codeb = 2"))
    swapped = notebook(text("# Title"), parameters(), code("b = 2"), code("a = 1"))
    assert len({before, render.content_hash(merged, root), render.content_hash(swapped, root)}) == 3


def test_the_hash_knows_a_renamed_file(root):
    nb = notebook(parameters())
    before = render.content_hash(nb, root)
    (root / "data" / "prompts.txt").rename(root / "data" / "other.txt")
    assert render.content_hash(nb, root) != before


def test_the_hash_is_the_same_on_windows(root):
    """A checkout with other line ends is the same content."""
    nb = notebook(parameters())
    (root / "data" / "prompts.txt").write_bytes(b"a\nb\n")
    before = render.content_hash(nb, root)
    (root / "data" / "prompts.txt").write_bytes(b"a\r\nb\r\n")
    assert render.content_hash(nb, root) == before


def test_outputs_made_by_hand_are_not_fresh(root):
    """The code is the same, the outputs are not those of the render."""
    nb = notebook(parameters(), code("1", outputs=[printed("1")]))
    nb.metadata[render.STAMP] = render.stamp(nb, root)
    assert render.fresh(nb, root)
    nb.cells[1].outputs[0].text = "2"
    assert not render.fresh(nb, root)


def test_saving_again_does_not_make_outputs_stale(root):
    """A front end may renumber and split lines; JSON outputs keep their shape."""
    card = shown({COURSE_MIME: {"kind": "verdict", "measured": ["a", "b"]}, "text/plain": "one\ntwo"})
    nb = notebook(parameters(), code("1", outputs=[printed("1\n2\n"), card]))
    nb.metadata[render.STAMP] = render.stamp(nb, root)
    path = save(root, nb)
    again = read(path)
    again.cells[1].execution_count = 7
    assert render.fresh(again, root)


def test_a_widget_view_goes_and_what_stands_beside_it_stays():
    from course_utils.tools.notebooks import clean

    view = {WIDGET_MIME: {"model_id": "x"}, "text/plain": "IntSlider()"}
    nb = notebook(code("1", outputs=[shown(view), shown(view | {"image/png": "QQ=="}), printed("text")]))
    clean(nb)
    assert [sorted(o.get("data", {})) for o in nb.cells[0].outputs] == [["image/png", "text/plain"], []]
