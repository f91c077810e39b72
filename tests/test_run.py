"""Running chapters: what is refused beforehand, what is printed, and that no kernel survives whatever happens.

Kernels take seconds to start, so few tests start one, and each looks at several things.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from course_utils.tools import run
from course_utils.tools.execute import NotebookFailed, Progress, kernel_environment
from course_utils.tools.notebooks import ROOT, Chapter, CourseError, UsageError, find, read, select, table
from tests.notebooks_for_tests import VERDICT, code, notebook, parameters, save, text


def kernels() -> list[str]:
    """Command lines of the kernels that this process has started and that are still alive."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "ipykernel" in command and process.status() != psutil.STATUS_ZOMBIE:
            alive.append(command)
    return alive


# --- what is refused before anything runs ------------------------------------------------------------------------


@pytest.fixture
def nothing_runs(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a notebook was executed")

    monkeypatch.setattr(run, "execute", fail)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "argv, says",
    [
        (["99"], r"unknown chapter '99'; known: 02 \(02_toy\), 02a \(02a_deep\), 03 \(03_other\)"),
        (["02", "--set", "sed=1"], r"unknown parameter 'sed' for notebooks/02_toy.ipynb; known: quick, seed"),
        (["--set", "seed=1"], r"unknown parameter 'seed' for notebooks/03_other.ipynb; known: quick$"),
        (["--set", "seed"], r"'seed' is not NAME=VALUE"),
        (["--set", "1=2"], r"'1=2' is not NAME=VALUE"),
    ],
)
def test_unknown_names_are_errors_beforehand(tmp_path, argv, says):
    """HAZARDS 89: papermill only warns and runs at full size. Here all chosen notebooks are asked first."""
    save(tmp_path, notebook(parameters()))
    save(tmp_path, notebook(parameters(), kind="deep_dive"), "02a_deep")
    save(tmp_path, notebook(parameters("quick = False"), chapter=3), "03_other")
    with pytest.raises(UsageError, match=says):
        run.main(argv, tmp_path)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("cells", [[], [parameters(), parameters()], [parameters("quick = f()")]])
def test_exactly_one_parameters_cell(tmp_path, cells):
    """HAZARDS 89: without the tag the injected value is overwritten by the notebook's own."""
    save(tmp_path, notebook(*cells))
    with pytest.raises(CourseError, match="parameters"):
        run.main(["--quick"], tmp_path)


@pytest.mark.usefixtures("nothing_runs")
def test_no_notebooks(tmp_path):
    (tmp_path / "notebooks").mkdir()
    with pytest.raises(CourseError, match="no notebooks in .*clone") as error:
        run.main([], tmp_path)
    assert error.value.exit_status == 1


@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_the_limit_is_a_positive_number(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.arguments().parse_args([f"--cell-timeout={seconds}"])
    assert "--cell-timeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, value",
    [
        ("1", 1),
        ("1.5e3", 1500.0),
        ("-2", -2),
        ("True", True),
        ("true", True),
        ("null", None),
        ("(1, 2)", (1, 2)),
        ("[64, 256]", [64, 256]),
        ("tiny", "tiny"),
        ("'1'", "1"),
        ("a=b", "a=b"),
        ("", ""),
        ("x + 1", "x + 1"),
    ],
)
def test_values(text, value):
    """Python literals, JSON's words, else text."""
    assert run.given_values([f"name={text}"]) == {"name": value}
    assert type(run.literal(text)) is type(value)


def test_selection(tmp_path):
    for name in ("01_first", "02_toy", "02a_deep", "02b_deeper", "03_other"):
        save(tmp_path, notebook(), name)

    def keys(*names, **options):
        return [chapter.key for chapter in select(list(names), tmp_path, **options)]

    assert [chapter.key for chapter in find(tmp_path)] == ["01", "02", "02a", "02b", "03"]
    assert keys() == ["01", "02", "03"]
    assert keys(deep_dives=True) == ["01", "02", "02a", "02b", "03"]
    assert keys("3", "02") == ["02", "03"]
    assert keys("2", deep_dives=True) == ["02", "02a", "02b"]
    assert keys("2a") == keys("02a_deep") == keys("notebooks/deep_dives/02a_deep.ipynb") == ["02a"]


# --- one run that goes well --------------------------------------------------------------------------------------

LOOK_AROUND = """import json, os, sys
import course_utils
print(json.dumps(dict(
    executable=sys.executable, folder=os.listdir(), backend=os.environ.get("MPLBACKEND"),
    tokenizers=os.environ["TOKENIZERS_PARALLELISM"], bars=os.environ["HF_HUB_DISABLE_PROGRESS_BARS"],
    package=course_utils.__file__, quick=quick, seed=seed, sizes=sizes)))
"""
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"


def test_a_quick_run(tmp_path, monkeypatch, capsys):
    """HAZARDS 88: the kernel is this interpreter, whatever the notebook and the user's Jupyter call python3; 97: figures
    are inline though MPLBACKEND is set here; 105, 110: quiet tokenizer, no bars; 108: an empty folder as cwd."""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    nb = notebook(
        text("# Toy\n\n<details><summary>Aside</summary>\n\nIt is **folded**.\n\n</details>"),
        parameters("quick = False\nseed = 0\nsizes = (1,)"),
        code(LOOK_AROUND),
        code(FIGURE),
        code(VERDICT),
        code("answer = None", "exercise"),
        kernelspec={"name": "py39_env", "display_name": "gone"},
    )
    path = save(tmp_path, nb)
    before = path.read_bytes()
    assert run.main(["2", "--quick", "--set", "seed=1", "sizes=(3, 4)", "--build", "out"], tmp_path) == 0
    executed = read(tmp_path / "out" / "02_toy.ipynb")
    here = json.loads(executed.cells[3].outputs[0].text)
    assert here.pop("package").startswith(str(ROOT))
    assert here == {
        "executable": sys.executable,
        "folder": [],
        "backend": "module://matplotlib_inline.backend_inline",
        "tokenizers": "false",
        "bars": "1",
        "quick": True,
        "seed": 1,
        "sizes": [3, 4],
    }
    assert "image/png" in executed.cells[4].outputs[0].data
    assert "papermill" not in executed.metadata and "widgets" not in executed.metadata
    page = (tmp_path / "out" / "02_toy.html").read_text()
    assert (
        "<details>" in page and "<strong>folded</strong>" in page
    )  # Markdown inside folded text is still Markdown
    assert path.read_bytes() == before  # run never touches the committed notebook
    said = capsys.readouterr().out
    assert "02_toy  cell 1 of 5  0:0" in said and "02_toy  cell 5 of 5  0:" in said
    row = next(line for line in said.splitlines() if "C3: latency falls 4-8x" in line)
    assert "3x" in row and "2.5x" in row and "dated" in row
    assert "quick run: not a verdict" in said
    assert "out/02_toy.ipynb" in said and "out/02_toy.html" in said
    assert kernels() == []


# --- runs that fail ----------------------------------------------------------------------------------------------


def failing_run(root, source, *argv, capsys=None) -> tuple[str, float]:
    """Run a chapter whose third code cell is ``source``; the message and the seconds it took."""
    save(root, notebook(parameters(), code("print('so far')"), code(source), code("print('never')")))
    started = time.monotonic()
    with pytest.raises(NotebookFailed) as error:
        run.main(["02", *argv], root)
    return str(error.value), time.monotonic() - started


FAILURES = {
    "error": ("x = 1\nraise ValueError('boom')", "code cell 3 `x = 1`: ValueError: boom"),
    "killed": (
        "import os, subprocess\nsubprocess.Popen(['sleep', '77'])\nos.kill(os.getpid(), 9)",
        "code cell 3 `import os, subprocess`: the kernel died",
    ),
    "too long": (
        "import subprocess, time\nsubprocess.Popen(['sleep', '77'])\nwhile True:\n"
        "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass",
        "still running after the limit of 2 s",
    ),
}


@pytest.mark.parametrize("source, says", FAILURES.values(), ids=FAILURES)
def test_a_failing_run(tmp_path, source, says, capsys):
    """Ends soon and plainly, with no kernel nor what it started left, the partial notebook kept and marked as failed."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "02_toy.html").write_text("of an earlier run")
    message, seconds = failing_run(
        tmp_path, source, "--cell-timeout", "2" if "while True" in source else "30"
    )
    assert message.startswith("02_toy, ") and says in message
    assert "build/02_toy.failed.ipynb" in message
    assert seconds < 60
    assert kernels() == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "77"]]
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["02_toy.failed.ipynb"]
    kept = read(tmp_path / "build" / "02_toy.failed.ipynb")
    assert kept.metadata.course_run.status == "failed" and says in kept.metadata.course_run.reason
    assert "This run failed" in kept.cells[0].source
    assert kept.cells[2].outputs[0].text == "so far\n"
    assert kept.cells[4].outputs == []


def test_what_ran_before_a_failure_is_still_reported(tmp_path, monkeypatch, capsys):
    """The first chapter's verdicts are not lost to the second's error."""
    save(tmp_path, notebook(parameters()))
    save(tmp_path, notebook(parameters()), "03_other")

    def execute(nb, name, **_):
        if name == "03_other":
            raise NotebookFailed("03_other, code cell 1: broken")

    monkeypatch.setattr(run, "execute", execute)
    with pytest.raises(NotebookFailed, match="03_other"):
        run.main([], tmp_path)
    assert "build/02_toy.ipynb" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_leaves_no_kernel(tmp_path, how):
    """Ctrl-C, or a cancelled job, while a cell runs."""
    mark = tmp_path / "kernel.pid"
    cell = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(120)"
    save(tmp_path, notebook(parameters(), code(cell)))
    program = (
        "import sys, pathlib\nfrom course_utils import __main__ as front\nfrom course_utils.tools import run\n"
        f"run.main.__defaults__ = (pathlib.Path({str(tmp_path)!r}),)\nsys.exit(front.main(['run', '02']))"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        kernel = int(mark.read_text())
        runner.send_signal(getattr(signal, how))
        _, said = runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert runner.returncode == 130
    assert "Traceback" not in said and said.endswith("interrupted\n")
    assert not psutil.pid_exists(kernel)
    assert (tmp_path / "build" / "02_toy.failed.ipynb").exists()


# --- the pieces --------------------------------------------------------------------------------------------------


def test_the_environment_keeps_what_the_user_set(monkeypatch):
    """HAZARDS 97, 105: MPLBACKEND does not leak in, other choices of the user stay."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = kernel_environment("folder")
    assert "MPLBACKEND" not in found
    assert found["TOKENIZERS_PARALLELISM"] == "true"
    assert found["PYTHONPATH"] == os.pathsep.join([str(ROOT), "elsewhere"])
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    assert kernel_environment("folder")["TOKENIZERS_PARALLELISM"] == "false"


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_rewrites_one_line_in_a_terminal():
    """And its clock goes on while a cell is long."""
    terminal = Terminal()
    with Progress("02_toy", 2, stream=terminal, every=0.01) as progress:
        progress.next_cell()
        time.sleep(0.1)
        progress.next_cell()
    assert terminal.text.count("\n") == 1 and terminal.text.endswith("\r02_toy  cell 2 of 2  0:00\n")
    assert terminal.text.count("cell 1 of 2") > 1


def card(**changes):
    fields = dict(
        kind="verdict", claim_id="C1", claim="a", measured="1", predicted="2", word="holds", quick=False
    )
    return fields | changes


def test_verdicts_are_collected_once():
    """Other kinds are left out; a card shown again counts as it was shown last; JSON may come as text."""
    from course_utils.tools.notebooks import COURSE_MIME
    from tests.notebooks_for_tests import shown

    nb = notebook(
        text("no outputs"),
        code(
            "1",
            outputs=[shown({COURSE_MIME: card()}), shown({COURSE_MIME: card(kind="guess", claim_id="C9")})],
        ),
        code(
            "2", outputs=[shown({COURSE_MIME: json.dumps(card(claim_id="C2"))}), shown({"text/plain": "x"})]
        ),
        code("3", outputs=[shown({COURSE_MIME: card(word="dated")})]),
    )
    assert [(c["claim_id"], c["word"]) for c in run.verdicts(nb)] == [("C1", "dated"), ("C2", "holds")]


def test_the_verdict_table():
    """Lists become lines, nothing measured is a dash, quick rows carry the stamp."""
    rows = run.verdict_table(
        [card(measured=["64: 3x", "256: 5x"], predicted=None), card(claim_id="C2", quick=True)]
    )
    lines = rows.splitlines()
    assert lines[0].split() == ["claim", "measured", "here", "predicted", "verdict"]
    assert lines[2].split() == ["C1:", "a", "64:", "3x", "–", "holds"]
    assert lines[3].split() == ["256:", "5x"]
    assert "not a" in rows.split("C2: a")[1] and "not a" not in rows.split("C2: a")[0]
    assert "quick run" in run.verdict_table([card()], quick=True)


def test_claims_and_the_runner_agree():
    """The fields that ``claims.verdict`` sends are those that the table reads."""
    from course_utils import claims

    sent = claims.Verdict("C3", "falls", "2x", "3x", "dated", "long ones", "", quick=True).fields
    assert {"kind", "claim_id", "claim", "measured", "predicted", "word", "quick"} <= set(sent)
    assert sent["kind"] == "verdict"


def test_a_table_wraps_long_text():
    assert table(["a", "b"], [["one two three", "x"]], [7, 3]).splitlines() == [
        "a        b",
        "-------  -",
        "one two  x",
        "three",
    ]


# --- the deep dives, as they are committed (test_notebooks.py runs the main lines) -----------------------------------

DEEP_DIVES = sorted((ROOT / "notebooks" / "deep_dives").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", DEEP_DIVES, ids=lambda path: path.stem)
def test_each_deep_dive_runs_alone_with_no_exercise_answered(path, tmp_path):
    """In quick mode, in a process and an empty folder of its own."""
    nb = run.run_chapter(Chapter(path, path.stem), {"quick": True}, tmp_path / "build")
    outputs = [output for cell in nb.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert all(verdict["quick"] for verdict in run.verdicts(nb))
