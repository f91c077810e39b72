"""``python -m course_utils``: help, exit statuses, errors without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_utils import __main__ as front
from course_utils.tools import export
from course_utils.tools.notebooks import CourseError, UsageError


@pytest.mark.parametrize("argv", [[], ["frobnicate"]])
def test_no_or_unknown_command_shows_the_commands(argv, capsys):
    """Status 2 and one line for each command, on stderr."""
    assert front.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(f"\n  {name}" in said.err for name in ("run", "render", "export", "check", "fetch"))
    assert not argv or "unknown command 'frobnicate'" in said.err


def test_help_is_no_error(capsys):
    assert front.main(["--help"]) == 0
    assert "usage: python -m course_utils" in capsys.readouterr().out


@pytest.mark.parametrize("error, status", [(CourseError("it broke"), 1), (UsageError("no such thing"), 2)])
def test_a_foreseen_error_is_one_plain_line(monkeypatch, capsys, error, status):
    def fail(argv):
        raise error

    monkeypatch.setattr(export, "main", fail)
    assert front.main(["export"]) == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_interrupt_has_its_own_status(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "main", interrupt)
    assert front.main(["export"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_command_gets_its_own_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(export, "main", lambda argv: seen.append(argv))
    assert front.main(["export", "--check"]) == 0
    assert seen == [["--check"]]


def test_as_a_program_from_another_folder(tmp_path):
    """Works from any folder, and an unknown chapter ends without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "course_utils", "run", "99"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode in (1, 2)  # 1 as long as there is no notebook at all
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_the_tools_import_no_heavy_library():
    """The commands that do not execute anything start quickly: no torch, papermill, nbconvert, transformers."""
    code = (
        "import sys, course_utils.__main__, course_utils.tools.check, course_utils.tools.run\n"
        "heavy = {'torch', 'papermill', 'nbconvert', 'transformers', 'matplotlib', 'jupyter_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
