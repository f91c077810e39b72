"""The notebook gate: one small notebook that passes, and for each rule the same notebook broken in one place."""

from __future__ import annotations

import json

import pytest
from nbformat.v4 import new_output

from course_utils.tools import check, counts, export, render
from course_utils.tools.notebooks import ROOT, WIDGET_MIME, CourseError, find, read, write
from tests.notebooks_for_tests import (
    code,
    good,
    notebook,
    parameters,
    picture,
    printed,
    save,
    shown,
    text,
)


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch):
    monkeypatch.setattr(render, "machine_line", lambda: "a machine")


def gate(root, nb, *, stamped: bool = True, name: str = "02_toy") -> list[check.Problem]:
    """The problems of a notebook that is otherwise fresh."""
    if stamped:
        nb.metadata[render.STAMP] = render.stamp(nb, root)
    path = save(root, nb, name)
    return check.notebook_problems(read(path), path, root)


def cell(nb, tag: str):
    return next(cell for cell in nb.cells if tag in cell.metadata.get("tags", []))


def test_a_good_notebook_passes_everything(tmp_path, capsys):
    nb = good()
    save(tmp_path, nb)
    export.main([], tmp_path)
    assert gate(tmp_path, nb) == []
    assert check.main([], tmp_path) == 0
    said = capsys.readouterr().out
    assert "notebooks/02_toy.ipynb: passes" in said and "exports: passes" in said
    assert "code cells" in said and "30–40" in said  # the aims are shown, and missing them does not fail


def test_a_report_names_file_cell_and_way_out(tmp_path, capsys):
    """And ends with status 1."""
    nb = good()
    nb.cells[4].source = "name = input()"
    nb.metadata[render.STAMP] = render.stamp(nb, tmp_path)
    path = save(tmp_path, nb)
    assert check.main([str(path)], tmp_path) == 1
    said = capsys.readouterr().out
    assert "notebooks/02_toy.ipynb: " in said
    assert "code cell 4 `name = input()`: asks for input (input) → take it from the parameters cell" in said


def set_source(nb, index, source):
    nb.cells[index].source = source


def add_output(nb, output):
    nb.cells[4].outputs.append(output)


def change(nb, **metadata):
    nb.metadata.update(metadata)


WIDGET = {WIDGET_MIME: {"model_id": "a", "version_major": 2, "version_minor": 0}, "text/plain": "IntSlider()"}

BREACHES = [
    ("kernel", lambda nb: change(nb, kernelspec={"name": "py39_env", "display_name": "x"}), "'py39_env'"),
    ("course", lambda nb: nb.metadata.pop("course"), "lacks chapter, kind, module, title"),
    ("course", lambda nb: nb.metadata.course.update(kind="side line"), "kind is 'side line'"),
    ("course", lambda nb: nb.metadata.course.update(chapter=3), "the file name says chapter 2, main"),
    ("parameters", lambda nb: nb.cells[1].metadata.pop("tags"), "0 cells are tagged"),
    ("parameters", lambda nb: nb.cells.insert(2, parameters("x = 1")), "2 cells are tagged"),
    ("parameters", lambda nb: set_source(nb, 1, "quick = bool(0)"), "may only assign literals"),
    ("parameters", lambda nb: set_source(nb, 1, "quick = False\nprint(quick)"), "may only assign literals"),
    ("parameters", lambda nb: set_source(nb, 1, "seed = 1"), "quick = False"),
    ("parameters", lambda nb: set_source(nb, 1, "quick = True"), "quick = False"),
    ("tags", lambda nb: cell(nb, "bug").metadata.tags.append("exort"), "unknown tag 'exort'"),
    ("tags", lambda nb: cell(nb, "bug").metadata.tags.append("export"), "text is tagged 'export'"),
    ("metadata", lambda nb: change(nb, widgets={}), "metadata.widgets"),
    ("metadata", lambda nb: change(nb, notes="x" * 100_001), "bytes of metadata"),
    ("size", lambda nb: add_output(nb, printed("x" * 1_000_001)), "bytes, at most 1,000,000"),
    (
        "outputs",
        lambda nb: add_output(nb, printed("Warning: fork", "stderr")),
        "writes to stderr (Warning: fork)",
    ),
    (
        "outputs",
        lambda nb: add_output(nb, new_output("error", ename="ValueError", evalue="", traceback=[])),
        "holds an error (ValueError)",
    ),
    ("outputs", lambda nb: add_output(nb, picture(alt=None)), "without alt text"),
    ("outputs", lambda nb: add_output(nb, shown({"image/svg+xml": "<svg/>"})), "without alt text"),
    ("outputs", lambda nb: add_output(nb, shown(WIDGET)), "a widget without a static twin"),
    (
        "outputs",
        lambda nb: add_output(
            nb, shown({"application/vnd.llm-course+json": {"kind": "verdict", "quick": True}})
        ),
        "was made in a quick run",
    ),
    ("syntax", lambda nb: set_source(nb, 4, "tokenizer.decode(["), "line 1"),
    ("asks", lambda nb: set_source(nb, 13, "import getpass\ngetpass.getpass()"), "(getpass)"),
    ("asks", lambda nb: set_source(nb, 13, "from huggingface_hub import notebook_login"), "(notebook_login)"),
    ("asks", lambda nb: set_source(nb, 13, "%debug"), "(%debug)"),
    ("asks", lambda nb: set_source(nb, 13, "breakpoint()"), "(breakpoint)"),
    ("widgets", lambda nb: set_source(nb, 13, "import plotly.express as px"), "uses plotly"),
    ("widgets", lambda nb: set_source(nb, 13, "from ipympl import backend_nbagg"), "uses ipympl"),
    ("widgets", lambda nb: set_source(nb, 13, "import anywidget"), "uses anywidget"),
    ("widgets", lambda nb: set_source(nb, 13, "%matplotlib widget"), "uses %matplotlib widget"),
    ("gated", lambda nb: set_source(nb, 13, 'name = "meta-llama/Llama-3"'), "meta-llama/"),
    ("gated", lambda nb: set_source(nb, 13, 'name = "google/gemma-2b"'), "google/gemma"),
    ("first text", lambda nb: set_source(nb, 4, "print(tokens)"), "within the first 5 code cells"),
    ("sitting", lambda nb: set_source(nb, 5, "## Rest (2 min)"), "pause: 0"),
    ("sitting", lambda nb: set_source(nb, 6, "1"), "guesses: 0"),
    ("sitting", lambda nb: cell(nb, "bug").metadata.pop("tags"), "bug: 0"),
    ("sitting", lambda nb: cell(nb, "exercise").metadata.pop("tags"), "exercises"),
]


@pytest.mark.parametrize("rule, spoil, says", BREACHES, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREACHES)])
def test_a_breach_is_found_by_its_rule_alone(tmp_path, rule, spoil, says):
    """HAZARDS 88 (kernel), 89 (parameters), 91, 92 (metadata, size), 93, 94 (widgets), 96 (input), 104 (gated), 105 (stderr)."""
    nb = good()
    spoil(nb)
    found = gate(tmp_path, nb)
    assert rule in {problem.rule for problem in found}, found
    assert any(says in str(problem) for problem in found), found
    # An unreadable cell shows no generated text either; nothing else may follow from one breach.
    assert {problem.rule for problem in found} <= ({rule, "first text"} if rule == "syntax" else {rule}), (
        found
    )
    assert all(problem.way_out for problem in found)


def test_ids_and_format(tmp_path):
    """HAZARDS 109: nbformat 4.5, every id there, none twice."""
    nb = good()
    nb.cells[3].id = nb.cells[2].id
    assert [p.what for p in check.format_rule(nb)] == ["id 'cell-2' is used twice"] * 2
    path = save(tmp_path, good())
    raw = json.loads(path.read_text())
    del raw["cells"][3]["id"]
    path.write_text(json.dumps(raw))
    found = [p for p in check.notebook_problems(read(path), path, tmp_path) if p.rule == "format"]
    assert [p.what for p in found] == ["has no id"]
    old = raw | {
        "nbformat_minor": 4,
        "cells": [{k: v for k, v in c.items() if k != "id"} for c in raw["cells"]],
    }
    path.write_text(json.dumps(old))
    found = [p for p in check.notebook_problems(read(path), path, tmp_path) if p.rule == "format"]
    assert "nbformat 4.4, expected 4.5" in found[0].what
    broken = raw | {"cells": [c | {"id": f"c{i}", "outputs": 3} for i, c in enumerate(raw["cells"])]}
    nb = good()
    nb.cells[1]["execution_count"] = "three"
    assert [p.rule for p in check.format_rule(nb)] == ["format"]
    path.write_text(json.dumps(broken))
    with pytest.raises(CourseError, match="not a Jupyter notebook"):
        read(path)


def test_a_widget_view_with_its_twin_passes(tmp_path):
    """HAZARDS 93: the figure may stand in the same cell, as an output of its own."""
    nb = good()
    cell(nb, "explorer").outputs.append(shown(WIDGET))
    assert gate(tmp_path, nb) == []


def test_input_of_our_own_objects_is_no_prompt(tmp_path):
    """HAZARDS 96: only what stops an unattended run counts, not a word in a text or a method of that name."""
    nb = good()
    nb.cells[6].source = 'guess("input() of the model", layer.input(3))'
    assert gate(tmp_path, nb) == []


@pytest.mark.parametrize("what", ["code", "package", "data", "outputs", "never"])
def test_stale_outputs(tmp_path, what):
    """A change to code, course_utils, data or the outputs themselves shows."""
    for folder in ("course_utils", "data"):
        (tmp_path / folder).mkdir()
    nb = good()
    if what != "never":
        nb.metadata[render.STAMP] = render.stamp(nb, tmp_path)
    if what == "code":
        nb.cells[4].source += "  # changed"
    if what == "package":
        (tmp_path / "course_utils" / "new.py").write_text("x = 1")
    if what == "data":
        (tmp_path / "data" / "new.txt").write_text("x")
    if what == "outputs":
        nb.cells[4].outputs[0].text = "by hand"
    found = gate(tmp_path, nb, stamped=False)
    assert [p.rule for p in found] == ["fresh"]
    assert ("never rendered" in found[0].what) == (what == "never")


def test_exports_are_part_of_the_gate(tmp_path, capsys):
    """A missing module, a name in two notebooks of one module, a kernel outside a module of kernels."""
    nb = good()
    gate(tmp_path, nb)
    assert [p.rule for p in check.export_problems(tmp_path)] == ["export"]
    assert check.main([], tmp_path) == 1 and "make export" in capsys.readouterr().out
    export.main([], tmp_path)
    assert list(check.export_problems(tmp_path)) == []
    deep = notebook(parameters(), code("def Toy():\n    import numba", "export"), kind="deep_dive")
    save(tmp_path, deep, "02a_deep")
    said = " ".join(map(str, check.export_problems(tmp_path)))
    assert "`Toy` is defined a second time" in said and "builds a kernel" in said


def test_a_deep_dive_lacks_nothing_for_having_no_pause(tmp_path):
    nb = notebook(
        parameters(), code("print(generate(decoder, [1], 3))", outputs=[printed("x")]), kind="deep_dive"
    )
    assert gate(tmp_path, nb, name="02a_deep") == []
    assert "8–20" in check.aims_table(nb)


def test_an_unknown_file_is_an_error(tmp_path):
    save(tmp_path, good())
    with pytest.raises(CourseError, match="unknown chapter '05'; known: 02"):
        check.main(["05"], tmp_path)


# --- counting ----------------------------------------------------------------------------------------------------


def test_words_outside_and_inside_details():
    """Without code, addresses, pictures and tags; exercises and explorers do not count."""
    nb = notebook(
        text(
            "One two [three four](https://a.b/c d)\n\n![picture](x.png)\n\n```python\nnot = counted\n```\n\n"
            "<details>\n<summary>five <b>six</b></summary>\n\nseven\n\n```\nno\n```\n</details>\n\nlast – word"
        ),
        text("never counted", "exercise"),
    )
    assert counts.words(nb) == (6, 3)


def test_headings_minutes_and_the_pause():
    nb = notebook(
        text("# Title\n\n## 2.0 What? (10 min)\n\n```bash\n## no heading (5 min)\n```"),
        text("## 2.1 Why? (20 min)\n\n### an aside (7 min)"),
        text("## Pause, and a drink (0 min)"),
        text("## 2.2 How?"),
        text("## 2.3 So what? (20 min)"),
    )
    found = counts.headings(nb)
    assert [h.level for h in found] == [1, 2, 2, 3, 2, 2, 2]
    assert counts.minutes(found) == 50
    assert counts.pause_share(found) == pytest.approx(0.6)
    assert sum(h.minutes is None for h in found if h.level == 2) == 1
    rows = {aim.what: aim for aim in counts.sitting(nb, "main")}
    assert rows["## headings without (N min)"].note == "2.2 How?"
    assert (rows["minutes before the pause"].here, rows["minutes before the pause"].met) == ("60 %", True)
    twice = counts.headings(notebook(text("## Pause (1 min)\n## No pause (1 min)")))
    assert counts.pause_share(twice) is None


def test_cells_and_lines():
    """Tagged cells are left out, export cells may have 40 lines."""
    nb = notebook(
        code("\n".join("x" * i for i in range(1, 27))),
        code("\n".join(["y"] * 40), "export"),
        code("z", "exercise"),
        code(""),
    )
    assert counts.line_counts(nb) == [(26, 25), (40, 40)]
    assert max(map(counts.columns, nb.cells)) == 26
    rows = {aim.what: aim for aim in counts.sitting(nb, "main")}
    assert rows["code cells"].here == "2"
    assert rows["lines a cell, median"].here == "33"
    assert rows["cells of at most 18 lines"].here == "0 %"
    assert rows["cells over 25 lines (export: 40)"].here == "1"
    assert not rows["cells over 25 lines (export: 40)"].met
    assert rows["cells over 25 lines (export: 40)"].note == "code cell 1 `x`"
    assert rows["columns of the longest line"].met
    nb.cells[2].source = "z" * 81  # exercises are projected too
    rows = {aim.what: aim for aim in counts.sitting(nb, "main")}
    assert (
        rows["columns of the longest line"].here == "81"
        and "code cell 3" in rows["columns of the longest line"].note
    )
    assert "! columns of the longest line:\n    code cell 3" in check.aims_table(nb)


def test_guesses_come_before_their_records():
    nb = notebook(
        code('guess("a", 1)'),
        code('claims.record("a", measured=2)'),
        code('record("b", measured=1)\nguess("b")'),
    )
    rows = {aim.what: aim.here for aim in counts.sitting(nb, "main")}
    assert (rows["guesses"], rows["guesses before their record"]) == ("2", "1")


def test_exercises_have_need_hint_and_solution():
    nb = good()
    [exercise] = counts.exercises(nb)
    assert exercise.complete and "answer = 1" in exercise.solution
    for index, old in ((10, "You need"), (12, "Hint"), (12, "Solution")):
        broken = good()
        broken.cells[index].source = broken.cells[index].source.replace(old, "Once")
        assert not counts.exercises(broken)[0].complete


def test_the_twin_is_looked_for_in_the_output(tmp_path):
    nb = good()
    rows = {aim.what: aim.here for aim in counts.sitting(nb, "main")}
    assert rows["explorers with a twin in the output"] == "1"
    cell(nb, "explorer").outputs = []
    rows = {aim.what: aim.here for aim in counts.sitting(nb, "main")}
    assert rows["explorers with a twin in the output"] == "0"
    write(nb, tmp_path / "x.ipynb")  # the builder's notebooks are valid files


# --- the course's own notebooks ----------------------------------------------------------------------------------

NOTEBOOKS = find() if list((ROOT / "notebooks").rglob("*.ipynb")) else []


@pytest.mark.parametrize("chapter", NOTEBOOKS, ids=lambda chapter: chapter.key)
def test_committed_notebooks_pass_the_gate(chapter):
    """Stale outputs included: after a change to a notebook, course_utils or data, render."""
    found = check.notebook_problems(read(chapter.path), chapter.path)
    assert not found, "\n" + "\n".join(map(str, found))
