"""Executing one notebook with papermill's engine, in a kernel that is surely ours and surely gone afterwards.

Used by ``run`` and ``render``. Three things papermill leaves to chance are settled here: which interpreter "python3"
is (this one), in which folder and environment it starts (an empty folder), and that no kernel process survives a
failure, a time limit or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from course_utils.tools.notebooks import ROOT, CourseError, code_cells, is_code, tags, where

CELL_TIMEOUT = 900  # seconds; a whole main line is meant to take 240
START_TIMEOUT = 60


class NotebookFailed(CourseError):
    """A cell raised, ran over its limit, or its kernel died; the text names chapter, cell and error."""


def inject(nb, values: dict[str, object]) -> None:
    """Put a cell that assigns ``values`` right after the cell tagged ``parameters``, in place; none for no values.

    (papermill's own would turn tuples into text.)
    """
    import nbformat

    if not values:
        return
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    place = next(i for i, c in enumerate(nb.cells) if is_code(c) and "parameters" in tags(c))
    nb.cells.insert(place + 1, cell)


def execute(nb, name: str, *, progress: Progress | None = None, cell_timeout: int = CELL_TIMEOUT) -> None:
    """Execute ``nb`` in place; ``name`` is what messages call it.

    Raises :class:`NotebookFailed` for a cell that raised, that ran longer than ``cell_timeout`` seconds, or during
    which the kernel died; ``nb`` then holds the outputs up to there. Whatever happens, KeyboardInterrupt included, no
    kernel process is left.
    """
    progress = progress or Progress(name, len(code_cells(nb)), quiet=True)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as folder:
        life = _KernelLife(nb, name, folder, progress)
        with progress:
            life.run(cell_timeout)


class _KernelLife:
    """One kernel's life: started, fed cell by cell, ended."""

    def __init__(self, nb, name: str, folder: str, progress: Progress):
        self.nb, self.name, self.folder, self.progress = nb, name, folder, progress
        self.index = 0  # of the cell that runs now, among all cells
        self.processes: list = []
        self.manager = _kernel_manager(folder)

    def run(self, cell_timeout: int) -> None:
        from nbclient.exceptions import CellTimeoutError, DeadKernelError

        try:
            _engine().execute_notebook(
                self.nb,
                "python3",
                progress_bar=False,
                km=self.manager,
                timeout=cell_timeout,
                on_cell_start=self.cell_starts,
                folder=self.folder,
            )
        except CellTimeoutError:
            raise self.failure(
                f"still running after the limit of {cell_timeout} s a cell; "
                "raise it with --cell-timeout, or try --quick"
            ) from None
        except DeadKernelError:
            raise self.failure(
                "the kernel died, most often because memory ran out; close other programs or try --quick"
            ) from None
        except RuntimeError as error:
            if "Kernel" not in str(error):
                raise
            raise CourseError(
                f"{self.name}: no kernel started within {START_TIMEOUT} s ({error}); "
                f"does `{sys.executable} -m ipykernel_launcher --version` work?"
            ) from None
        finally:
            self.end_processes()
        self.raise_error_of_cell()

    def cell_starts(self, cell, cell_index: int, **_) -> None:
        self.index = cell_index
        self.remember_processes()
        if is_code(cell) and cell.source.strip() and "injected-parameters" not in tags(cell):
            self.progress.next_cell()

    def failure(self, what: str) -> NotebookFailed:
        return NotebookFailed(f"{self.name}, {where(self.nb, self.index)}: {what}")

    def raise_error_of_cell(self) -> None:
        """papermill stops after a cell that raised, and leaves it to its caller to say so."""
        for index, cell in enumerate(self.nb.cells):
            if cell.metadata.get("papermill", {}).get("exception"):
                self.index = index
                errors = [output for output in cell.outputs if output.output_type == "error"]
                raise self.failure(_last_line(errors[-1]) if errors else "stopped without an error message")

    def remember_processes(self) -> None:
        """Note the kernel: once it is dead, its process can no longer be asked for from the manager."""
        import psutil

        pid = getattr(self.manager.provisioner, "pid", None)
        if pid and not self.processes:
            with contextlib.suppress(psutil.Error):
                self.processes = [psutil.Process(pid)]

    def end_processes(self) -> None:
        """Kill the kernel and what it started, if the orderly way has left any of it."""
        import psutil

        self.remember_processes()
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    child.kill()
                process.kill()
            if hasattr(
                os, "killpg"
            ):  # a dead kernel's children can only be reached through its process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(self.processes, timeout=10)


def _last_line(error) -> str:
    """``ValueError: boom`` of an error output: the last line of its traceback, without colours."""
    lines = [line for line in str(error.evalue).splitlines() if line.strip()]
    return f"{error.ename}: {lines[0]}" if lines else error.ename


def _engine():
    """papermill's engine, with our kernel manager and a kernel that starts in our folder and environment."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import Engine

    class CourseEngine(Engine):
        @classmethod
        def execute_notebook(cls, nb, *args, **kwargs):
            nb.metadata.setdefault(
                "papermill", {}
            )  # papermill writes its notes there; `clean` takes them out
            return super().execute_notebook(nb, *args, **kwargs)

        @classmethod
        def execute_managed_notebook(
            cls, nb_man, kernel_name, *, km, timeout, on_cell_start, folder, log_output=False
        ):
            client = PapermillNotebookClient(
                nb_man,
                km=km,
                kernel_name=kernel_name,
                timeout=timeout,
                startup_timeout=START_TIMEOUT,
                iopub_timeout=30,  # two busy cores may be late with the last output
                shutdown_kernel="immediate",
                store_widget_state=False,
                on_cell_start=on_cell_start,
                log=_quiet_log(),
            )
            work = Path(folder) / "work"
            work.mkdir()
            client.execute(cleanup_kc=True, cwd=str(work), env=kernel_environment(folder))

    return CourseEngine


def _kernel_manager(folder: str):
    """A manager to whom "python3" is this interpreter, whatever other kernels the user has installed by that name."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name):
            return KernelSpec(**get_kernel_dict())

    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=ThisInterpreter(),
        connection_file=str(Path(folder) / "kernel.json"),  # home may be read-only
        transport="tcp"
        if os.name == "nt"
        else "ipc",  # sockets in our folder: no ports, no warning about them
        log=_quiet_log(),
    )


def kernel_environment(folder: str) -> dict[str, str]:
    """The kernel's environment: the user's, without what would change outputs or spoil them with noise.

    MPLBACKEND is dropped so that figures appear inline, as in a notebook opened by hand; the user's own start-up
    files (IPYTHONDIR) stay out; this copy of ``course_utils`` is found from any folder; no download bars.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment["IPYTHONDIR"] = str(Path(folder) / "ipython")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])],
    )
    environment["COURSE_INTERACTIVE"] = "0"  # nobody turns an explorer's controls in such a run
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    environment.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return environment


def _quiet_log() -> logging.Logger:
    """A log that nobody prints: every failure reaches the reader once, in our words."""
    log = logging.getLogger("course_utils.tools.quiet")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


@contextlib.contextmanager
def terminate_as_interrupt():
    """Let SIGTERM (a cancelled job, ``timeout``) end like Ctrl-C, so that the kernel is cleared away too."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """``02_kv_cache  cell 7 of 38  0:41``: one line rewritten in a terminal; elsewhere a line every few seconds.

    A thread keeps the clock going, so that a long cell is seen to be alive. Use as a context manager around the
    execution and call :meth:`next_cell` whenever a code cell starts.
    """

    def __init__(
        self, name: str, total: int, *, stream=None, quiet: bool = False, every: float | None = None
    ):
        self.name, self.total, self.quiet = name, total, quiet
        self.stream = stream or sys.stdout
        self.rewrites = self.stream.isatty()
        self.every = every or (1.0 if self.rewrites else 10.0)
        self.cell, self.started, self.printed = 0, time.monotonic(), float("-inf")
        self._done = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure) -> None:
        self._done.set()
        self._thread.join()
        self._print("" if failure[0] is None else "  stopped", last=True)

    def next_cell(self) -> None:
        self.cell += 1
        if self.rewrites or time.monotonic() - self.printed >= self.every:
            self._print()

    def text(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        return f"{self.name}  cell {self.cell} of {self.total}  {minutes}:{seconds:02d}"

    def _tick(self) -> None:
        while not self._done.wait(self.every):
            self._print()

    def _print(self, note: str = "", last: bool = False) -> None:
        if self.quiet:
            return
        with self._lock:
            self.printed = time.monotonic()
            start, end = ("\r", "\n" if last else "") if self.rewrites else ("", "\n")
            self.stream.write(f"{start}{self.text()}{note}{end}")
            self.stream.flush()
