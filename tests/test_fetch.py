"""``python -m course_utils fetch``: prints where a model lies, fetches it once, fails plainly."""

from __future__ import annotations

import pytest

from course_utils import checkpoints
from course_utils.checkpoints import CATALOG, CourseDownloadError
from course_utils.tools import fetch as command


@pytest.fixture
def fetched(monkeypatch, tmp_path) -> list[str]:
    """Stands in for the real fetch; the list holds the names asked for."""
    names = []
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2_000_000)

    def fake(name):
        names.append(name)
        if name == "away":
            raise CourseDownloadError("Could not get away.\nWays out: none")
        if name == "what":
            raise ValueError("no model 'what'")
        return tmp_path

    monkeypatch.setattr(checkpoints, "fetch", fake)
    return names


def test_default_prints_where_the_model_lies(fetched, capsys, tmp_path):
    assert command.main([]) == 0
    assert fetched == ["auto"]
    out = capsys.readouterr().out
    assert str(tmp_path) in out and "2 MB of weights" in out


def test_a_name_and_all_of_them(fetched):
    assert command.main(["SmolLM2-360M-Instruct"]) == 0
    assert command.main(["--all"]) == 0
    assert fetched == ["SmolLM2-360M-Instruct", *CATALOG]


@pytest.mark.parametrize("name", ["away", "what"])
def test_failures_are_plain_and_exit_with_one(fetched, capsys, name):
    assert command.main([name]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_help_lists_the_models(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOG) and "98 MB" in out
