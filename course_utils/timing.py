"""Measuring that is hard to get wrong: times with their spread, races, peak memory, tokens per second.

What goes wrong with timings in public code, and is taken care of here: a GPU that was not waited for, warm-up with
other shapes, compilation inside the average, one run quoted as a result, A always measured before B, memory without a
baseline, and padding counted as tokens. Seconds and bytes throughout.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

Function = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Samples of one function, in seconds and in the order they were taken; ``str`` gives "12.3 ms (IQR 0.4, n=7)".

    ``first_call`` is the very first call, kept apart because it may compile, load or allocate.
    """

    samples: tuple[float, ...]
    first_call: float

    @property
    def n(self) -> int:
        return len(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def iqr(self) -> float:
        """Interquartile range: the width of the middle half of the samples (0 for a single one)."""
        low, high = _quartiles(self.samples)
        return high - low

    def __str__(self) -> str:
        scale, unit = _unit(self.median)
        digits = max(0, 2 - len(str(int(self.median * scale))) + (self.median * scale >= 1))
        runs = "1 run" if self.n == 1 else f"{self.n} runs"
        return f"{self.median * scale:.{digits}f} {unit} (IQR {self.iqr * scale:.{digits}f}, {runs})"


class Ratio(NamedTuple):
    """Median of the ratios of a race, round by round, and the range of their middle half."""

    median: float
    low: float
    high: float


@dataclass
class Peak:
    """Bytes before, at the highest point of, and ``above`` the start of a ``peak_memory`` block.

    ``label`` says what was counted: "CUDA allocated", or "RSS", the memory of the whole process.
    """

    label: str
    baseline: int
    peak: int

    @property
    def above(self) -> int:
        return self.peak - self.baseline


def measure(
    fn: Function,
    *,
    repeats: int = 7,
    warmup: int = 1,
    device: torch.device | str | None = None,
    setup: Function | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Function | None = None,
) -> Timing:
    """Time ``fn()`` ``repeats`` times after ``warmup`` calls of the same function; ``setup()`` runs untimed before each.

    Warm-up is the measured function itself, so it has the measured shapes; a function that decodes must decode at least
    two tokens. On CUDA (``device``, or None and a GPU is there) the device is waited for before each start and each
    stop. On a GPU ``first_call`` includes whatever was still queued. ``clock`` and ``synchronize`` are for tests.
    Raises ValueError where repeats < 1 or warmup < 0.
    """
    return race(
        {"fn": fn},
        repeats=repeats,
        warmup=warmup,
        device=device,
        setup=setup,
        clock=clock,
        synchronize=synchronize,
    )["fn"]


def race(
    functions: Mapping[str, Function],
    *,
    repeats: int = 7,
    warmup: int = 1,
    device: torch.device | str | None = None,
    setup: Function | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Function | None = None,
    progress: bool = False,
) -> dict[str, Timing]:
    """Time several functions in turn, one sample each a round, the order shifted by one every round -> {name: Timing}.

    A machine that warms up, or is busy for a while, then hits all of them alike. Keywords as in :func:`measure`, and
    ``progress`` writes a line of dots, never inside a sample. Raises ValueError for no function, or as ``measure``.
    """
    if not functions:
        raise ValueError("nothing to race: functions is empty; pass {name: function}")
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}; expected repeats ≥ 1 and warmup ≥ 0")
    wait = synchronize or _synchronizer(device)
    names = list(functions)
    first: dict[str, float] = {}
    pending = 0.0
    samples: dict[str, list[float]] = {name: [] for name in names}

    with _no_garbage_collection():
        for name in names:
            for call in range(warmup):
                if setup:
                    setup()
                start = clock()
                functions[name]()
                if call == 0:
                    # The wait before the first sample, where it comes right now, also ends the first call.
                    if len(names) > 1 or warmup > 1 or setup:
                        wait()
                        first[name] = clock() - start
                    else:
                        pending = start
        for turn in range(repeats):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                if setup:
                    setup()
                wait()
                start = clock()
                if warmup and name not in first:
                    first[name] = start - pending
                functions[name]()
                wait()
                samples[name].append(clock() - start)
            if progress:
                print("." if turn + 1 < repeats else ".\n", end="", flush=True)
    return {name: Timing(tuple(samples[name]), first.get(name, samples[name][0])) for name in names}


def ratio(race: Mapping[str, Timing], a: str, b: str) -> Ratio:
    """How many times as long ``a`` takes as ``b``: (median, lower quartile, upper quartile) of the ratios per round.

    The two samples of a round were taken next to each other, so what slowed both cancels. Raises KeyError for an
    unknown name and ValueError where the two have different numbers of samples.
    """
    for name in (a, b):
        if name not in race:
            raise KeyError(f"{name!r} was not raced; known: {', '.join(race)}")
    first, second = race[a].samples, race[b].samples
    if len(first) != len(second):
        raise ValueError(
            f"{a!r} has {len(first)} samples and {b!r} {len(second)}; only timings of one race pair up"
        )
    ratios = [x / y for x, y in zip(first, second, strict=True)]
    return Ratio(statistics.median(ratios), *_quartiles(ratios))


@contextmanager
def peak_memory(device: torch.device | str | None = None, *, interval: float = 0.001):
    """``with peak_memory() as memory: ...`` then ``memory.baseline``, ``.peak``, ``.above`` in bytes, and ``.label``.

    On CUDA: bytes torch allocated, its counter reset on entry, so that nothing is carried over from an earlier cell. On
    a CPU: resident memory of the process (RSS), looked at every ``interval`` seconds, so that a shorter peak is missed.
    """
    gc.collect()
    if _is_cuda(device):
        target = torch.device(device or "cuda")
        torch.cuda.synchronize(target)
        torch.cuda.reset_peak_memory_stats(target)
        allocated = torch.cuda.memory_allocated(target)
        memory = Peak("CUDA allocated", allocated, allocated)
        try:
            yield memory
        finally:
            torch.cuda.synchronize(target)
            memory.peak = torch.cuda.max_memory_allocated(target)
        return

    free_memory()
    process = psutil.Process()
    resident = process.memory_info().rss
    memory = Peak("RSS", resident, resident)
    done = threading.Event()

    def look() -> None:
        memory.peak = max(memory.peak, process.memory_info().rss)

    def watch() -> None:
        while not done.wait(interval):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield memory
    finally:
        done.set()
        watcher.join()
        look()


def free_memory() -> None:
    """Give memory that no object holds any more back: to the system on Linux, to the driver on a GPU.

    Objects that only refer to each other are collected first. Without it a notebook that drops one model after another
    keeps their pages, and new tensors don't show as growth.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass


def tokens_per_second(token_lists: Iterable[Sequence[int]], seconds: float) -> float:
    """Real new tokens a second: the lengths of the lists added up (one list of int counts as one sequence).

    Hand in what was generated, without padding: neither ``max_new_tokens`` nor steps × rows says how many tokens came
    out. Raises ValueError where seconds is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} is not positive")
    return sum(_lengths(token_lists)) / seconds


def utilization(token_lists: Iterable[Sequence[int]]) -> float:
    """Share, 0 to 1, of the row steps that gave a token when all rows run until the longest ends (2 and 4: 0.75)."""
    lengths = _lengths(token_lists)
    if not lengths or not max(lengths):
        raise ValueError("no tokens: utilization needs at least one row with at least one token")
    return sum(lengths) / (len(lengths) * max(lengths))


def retry_smaller(fn: Callable[[int], object], size: int, *, minimum: int = 1) -> tuple[object, int]:
    """``fn(size)``, and on running out of memory with half the size, and so on -> (result, size that worked).

    The next try starts after the error is gone: an exception keeps the tensors of the failed call alive, and so does
    the last traceback an interactive session keeps. Raises MemoryError where ``minimum`` does not fit either.
    """
    if not size >= minimum >= 1:
        raise ValueError(f"size={size}, minimum={minimum}; expected size ≥ minimum ≥ 1")
    tried = size
    while True:
        try:
            return fn(tried), tried
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = str(error)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
                raise
            reason = str(error)
        forget_last_error()
        if tried <= minimum:
            raise MemoryError(
                f"size {tried} does not fit into memory either; free some, or choose a smaller model: {reason}"
            )
        tried = max(minimum, tried // 2)


def forget_last_error() -> None:
    """Drop the traceback an interactive session keeps, and what it held; give unused GPU memory back."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _lengths(token_lists: Iterable[Sequence[int]]) -> list[int]:
    token_lists = token_lists.tolist() if isinstance(token_lists, torch.Tensor) else list(token_lists)
    if token_lists and not any(hasattr(tokens, "__len__") for tokens in token_lists):
        return [len(token_lists)]
    return [len(tokens) for tokens in token_lists]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e9, "ns"


def _is_cuda(device: torch.device | str | None) -> bool:
    return torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"


def _synchronizer(device: torch.device | str | None) -> Function:
    if not _is_cuda(device):
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


@contextmanager
def _no_garbage_collection():
    """A collection in the middle of a sample would be counted as the function's own time."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
