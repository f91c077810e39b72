"""How exercises are judged: never raising, "not answered yet", words beside symbols, strict, the summary."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils import exercises
from course_utils.exercises import PASSED, UNANSWERED, WRONG, Unanswered, Wrong, check, core, exercise, judge


@pytest.fixture(autouse=True)
def _two_exercises(monkeypatch):
    monkeypatch.setattr(core, "EXERCISES", {})
    exercises.reset()

    @exercise("7.2", "Double it")
    def _double(answer, factor=2):
        (double,) = exercises.functions(answer, "double")
        got = exercises.whole(exercises.call(double, 4), "double(4)")
        if got == 6:
            raise Wrong("6 is 4 + 2: doubling multiplies.")
        if got != 4 * factor:
            raise Wrong(f"double(4) gave {got}; wanted {4 * factor}.")
        return "Twice as much."

    @exercise("7.10", "Break it")
    def _break(answer):
        raise ZeroDivisionError("a fault\nof the check")

    yield
    exercises.reset()


def right(n):
    return 2 * n


def stub(n):
    """Returns twice n."""


def raising_stub(n):
    raise NotImplementedError


def returns_nothing(n):
    n = 2 * n  # noqa: F841


def ellipsis_stub(n): ...


@pytest.mark.parametrize(
    "answer",
    [None, ..., stub, ellipsis_stub, lambda n: None, raising_stub, returns_nothing, (None,), {"a": None}],
)
def test_stub_is_not_answered_yet(answer):
    result = judge("7.2", answer)
    assert result.state == UNANSWERED and str(result).startswith("○ Exercise 7.2: not answered yet.")


def test_passed_says_symbol_word_and_meaning(capsys):
    check("7.2", right)
    assert capsys.readouterr().out.strip() == "✓ Exercise 7.2: passed. Twice as much."


def test_wrong_says_its_own_sentence(capsys):
    check("7.2", lambda n: n + 2)
    assert (
        capsys.readouterr().out.strip() == "✗ Exercise 7.2: not right yet. 6 is 4 + 2: doubling multiplies."
    )


def test_given_reaches_the_check():
    assert judge("7.2", lambda n: 3 * n, factor=3).state == PASSED


@pytest.mark.parametrize(
    ("id", "answer", "part"),
    [
        ("7.2", lambda n: 1 / 0, "raised ZeroDivisionError: division by zero"),
        ("7.2", 8, "double should be a function; it is 8."),
        ("7.2", (right, right), "should be double; 2 thing(s) came"),
        ("7.2", lambda n: "8", "should be a whole number; it is '8'"),
        ("7.2", lambda n: 8.5, "gave 8.50; a whole number is wanted"),
        ("7.10", 1, "The check stopped with ZeroDivisionError: a fault."),
        ("9.9", 1, "There is no exercise '9.9'; the course has 7.2, 7.10."),
    ],
)
def test_nothing_an_answer_does_raises_in_a_notebook(capsys, id, answer, part):
    check(id, answer)
    out = capsys.readouterr().out
    assert part in out and out.startswith(f"✗ Exercise {id}: {WRONG}")


@pytest.mark.parametrize("answer", [None, lambda n: n + 2])
def test_strict_raises_unless_passed(answer, capsys):
    with pytest.raises(AssertionError, match="Exercise 7.2"):
        check("7.2", answer, strict=True)
    check("7.2", right, strict=True)


def test_unanswered_may_say_what_is_missing():
    @exercise("7.3", "Half")
    def _half(answer):
        raise Unanswered("The second half is missing.")

    assert str(judge("7.3", 1)).endswith("not answered yet. The second half is missing.")


def test_summary_counts_in_order_with_words(capsys):
    check("7.10", 1)
    check("7.2", right)
    capsys.readouterr()
    exercises.summary()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 of 2 solved"
    assert lines[2].split() == ["7.2", "Double", "it", "✓", "passed"]
    assert lines[3].startswith("7.10") and "✗ not right yet" in lines[3]


def test_a_deep_dive_has_exercises_and_a_count_of_its_own(capsys):
    """Ids such as "7A.1" stand between those of chapters 7 and 8 and are no part of chapter 7."""
    for id in ("10.1", "7B.1", "8.1", "7A.2", "7A.10"):
        exercise(id, "Another")(lambda answer: "So it is.")
    shown = []
    for chapter in (7, "7A", "7"):
        exercises.summary(chapter)
        lines = capsys.readouterr().out.splitlines()
        shown.append([line.split()[0] for line in lines[2:-1]] + lines[-1:])
    assert shown == [["7.2", "7.10", "0 of 2 solved"], ["7A.2", "7A.10", "0 of 2 solved"], shown[0]]
    check("7A.2", 1, strict=True)
    capsys.readouterr()
    exercises.summary()
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 solved"
    known = "7.2, 7.10, 7A.2, 7A.10, 7B.1, 8.1, 10.1."
    assert judge("7C.1").sentence == f"There is no exercise '7C.1'; the course has {known}"


def test_summary_of_a_chapter_not_begun(capsys):
    exercises.summary(7)
    out = capsys.readouterr().out
    assert out.count("○ not answered yet") == 2 and "0 of 2 solved" in out


def quadruple(n):
    return 4 * n


def test_one_of_two_functions_done_is_said_with_what_is_right():
    @exercise("7.4", "Twice, then four times")
    def _two(answer):
        double, four = exercises.functions(answer, "double", "quadruple")
        return exercises.in_order(
            ("double", lambda: exercises.call(double, 1)),
            ("quadruple", lambda: str(exercises.call(four, 1))),
        )

    for missing in (None, ..., stub, returns_nothing):
        result = judge("7.4", (right, missing))
        assert result.state == UNANSWERED
        assert result.sentence == "double is right so far; quadruple returns nothing yet."
        assert judge("7.4", (missing, quadruple)).sentence == "double returns nothing yet."
    assert judge("7.4", (stub, None)).sentence == "Write your answer above and run the cell again."
    assert "Pass both in brackets: (double, quadruple)." in judge("7.4", right).sentence
    check("7.4", (right, quadruple), strict=True)


def test_a_pair_without_brackets_is_a_pair_and_raises_nothing(capsys):
    check("7.2", right, quadruple)
    assert "2 thing(s) came" in capsys.readouterr().out


def test_full_stop_of_an_error_is_not_doubled():
    def stops(n):
        raise RuntimeError("It stopped.")

    assert str(judge("7.2", stops)).endswith("stops(4) raised RuntimeError: It stopped.")


def test_call_is_said_as_one_would_write_it():
    assert exercises.said(right, 1000, sequences=2) == "right(1_000, sequences=2)"


def test_importing_the_package_brings_all_checks_and_nothing_heavy():
    code = (
        "import sys\n"
        "from course_utils.exercises import core\n"
        "print(*sorted(core.EXERCISES))\n"
        "print(*{'transformers', 'numba', 'triton', 'bitsandbytes', 'matplotlib'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known, heavy = found.stdout.split("\n")[:2]
    assert {f"{chapter}.{n}" for chapter in (1, 2) for n in range(1, 7)} | {"1A.1", "1A.2"} <= set(
        known.split()
    )
    assert heavy == ""


@pytest.mark.parametrize(
    "path", sorted(Path(exercises.__file__).parent.glob("*.py")), ids=lambda path: path.stem
)
def test_no_input_is_asked_for(path):
    """HAZARDS 96: an unattended run has nobody who could type."""
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"input", "getpass", "breakpoint"}
