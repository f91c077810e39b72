"""The timing helper on stub clocks and stub devices: right numbers, no speed asserted."""

from __future__ import annotations

import gc
import sys
import time
import weakref

import pytest
import torch

from course_utils import timing
from course_utils.timing import (
    Timing,
    measure,
    peak_memory,
    race,
    ratio,
    retry_smaller,
    tokens_per_second,
    utilization,
)

MB = 1_000_000


class Clock:
    """A clock that moves only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float):
        """A function that takes the next of these seconds at each call, the last one for ever; counts its calls."""
        left = list(seconds)

        def fn() -> None:
            fn.calls += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        fn.calls = 0
        return fn


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("warmup", [0, 1])
def test_device_is_waited_for_at_start_and_stop_of_each_sample(monkeypatch, clock, warmup):
    """HAZARDS 79: 10 waits for 5 samples on CUDA."""
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    measure(clock.taking(0.01), repeats=5, warmup=warmup, device="cuda", clock=clock)
    assert len(waits) == 10


def test_wait_belongs_to_the_sample(clock):
    """HAZARDS 79: a launch that returns at once is timed to the end of its work."""
    queued = []

    def wait() -> None:
        clock.now += sum(queued)
        queued.clear()

    timing_ = measure(lambda: queued.append(2.0), repeats=5, clock=clock, synchronize=wait)
    assert timing_.samples == (2.0,) * 5 and timing_.first_call == 2.0


def test_no_wait_on_a_cpu(monkeypatch, clock):
    """HAZARDS 79: not at all on a CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("waited for a GPU"))
    measure(clock.taking(0.01), device="cpu", clock=clock)


def test_default_clock_is_perf_counter():
    """HAZARDS 79: perf_counter, not time()."""
    import inspect

    for fn in (measure, race):
        assert inspect.signature(fn).parameters["clock"].default is time.perf_counter


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_slow_first_call_is_no_sample(clock, warmup):
    """HAZARDS 80: the warm-up calls the measured function itself, so no slow sample is reported."""
    fn = clock.taking(0.2, 0.01)
    found = measure(fn, repeats=5, warmup=warmup, clock=clock)
    assert fn.calls == 5 + warmup and found.n == 5
    assert max(found.samples) == pytest.approx(0.01)


def test_compilation_is_reported_apart(clock):
    """HAZARDS 81: median about 0.01, first call about 0.2."""
    found = measure(clock.taking(0.2, 0.01), clock=clock)
    assert found.median == pytest.approx(0.01) and found.first_call == pytest.approx(0.2)
    cold = measure(clock.taking(0.2, 0.01), warmup=0, clock=clock)
    assert cold.first_call == cold.samples[0] == pytest.approx(0.2)


def test_median_survives_an_outlier(clock):
    """HAZARDS 84: [10, 10, 10, 10, 100] ms give 10, not the mean 28, and the spread and n are told."""
    ms = [0.01, 0.01, 0.01, 0.01, 0.1]
    found = measure(clock.taking(*ms, 0.5), repeats=5, warmup=0, clock=clock)
    assert found.samples == pytest.approx(ms)
    assert found.median == pytest.approx(0.01) and found.minimum == pytest.approx(0.01)
    assert found.iqr == pytest.approx(0) and found.n == 5
    assert Timing((1.0, 2.0, 3.0, 4.0, 5.0), 1.0).iqr == 2.0


@pytest.mark.parametrize(
    "samples, text",
    [
        ((0.0121, 0.0123, 0.0125), "12.3 ms (IQR 0.2, 3 runs)"),
        ((1.234,), "1.23 s (IQR 0.00, 1 run)"),
        ((0.000456, 0.000456), "456 µs (IQR 0, 2 runs)"),
        ((3e-9,), "3.00 ns (IQR 0.00, 1 run)"),
    ],
)
def test_timing_reads_as_one_phrase(samples, text):
    assert str(Timing(samples, samples[0])) == text


def test_setup_runs_before_each_call_untimed(clock):
    setup = clock.taking(5.0)
    found = measure(clock.taking(0.01), repeats=4, warmup=1, setup=setup, clock=clock)
    assert setup.calls == 5
    assert found.samples == pytest.approx([0.01] * 4) and found.first_call == pytest.approx(0.01)


def test_no_garbage_collection_inside_samples(clock):
    assert gc.isenabled()
    seen = []
    measure(lambda: seen.append(gc.isenabled()), repeats=2, clock=clock)
    assert seen == [False] * 3 and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)
    assert gc.isenabled()


def test_race_takes_turns_and_rotates_the_order(clock):
    """HAZARDS 84: A and B are interleaved, and neither is always first."""
    order = []
    functions = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = race(functions, repeats=3, clock=clock)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert list(found) == ["a", "b", "c"] and all(t.n == 3 for t in found.values())


def test_race_keeps_first_calls_and_waits_per_function(clock):
    waits = []
    found = race(
        {"a": clock.taking(0.2, 0.01), "b": clock.taking(0.4, 0.02)},
        repeats=5,
        clock=clock,
        synchronize=lambda: waits.append(1),
    )
    assert found["a"].first_call == pytest.approx(0.2) and found["b"].first_call == pytest.approx(0.4)
    assert found["b"].samples == pytest.approx([0.02] * 5)
    assert len(waits) == 2 + 2 * 10


def test_progress_is_a_line_of_dots(clock, capsys):
    race({"a": clock.taking(1.0)}, repeats=3, clock=clock)
    assert capsys.readouterr().out == ""
    race({"a": clock.taking(1.0)}, repeats=3, clock=clock, progress=True)
    assert capsys.readouterr().out == "...\n"


@pytest.mark.parametrize("arguments", [dict(repeats=0), dict(warmup=-1)])
def test_impossible_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="expected repeats ≥ 1 and warmup ≥ 0"):
        measure(lambda: None, **arguments)
    with pytest.raises(ValueError, match="nothing to race"):
        race({})


def test_ratio_pairs_the_rounds():
    """A slow moment that hits both contestants of a round does not move the ratio (HAZARDS 84)."""
    raced = {
        "plain": Timing((4.0, 40.0, 4.0, 8.0, 4.0), 0.0),
        "cached": Timing((2.0, 20.0, 2.0, 2.0, 1.0), 0.0),
    }
    found = ratio(raced, "plain", "cached")
    assert tuple(found) == (2.0, 2.0, 4.0) and found.median == 2.0
    with pytest.raises(KeyError, match="'static' was not raced; known: plain, cached"):
        ratio(raced, "static", "plain")
    with pytest.raises(ValueError, match="only timings of one race pair up"):
        ratio({**raced, "other": Timing((1.0,), 0.0)}, "plain", "other")


def test_peak_memory_counts_from_its_own_start():
    """HAZARDS 82: 100 MB resident, 300 MB freed before, 50 MB inside -> about 50 MB above the baseline, called RSS."""
    resident = torch.ones(25 * MB)
    torch.ones(75 * MB).sum()
    with peak_memory("cpu") as memory:
        inside = torch.ones(12_500_000)
        time.sleep(0.05)  # the watcher looks now and then, and may have to wait for a CPU
        del inside
    assert memory.label == "RSS"
    assert 40 * MB < memory.above < 80 * MB
    assert memory.peak == memory.baseline + memory.above and memory.baseline > resident.nbytes


def test_peak_memory_resets_the_counter_of_a_gpu(monkeypatch):
    """HAZARDS 82: 150 MB absolute, 50 MB above the baseline, nothing left over from before."""
    state = dict(now=100 * MB, peak=400 * MB)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: state["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: state.update(peak=state["now"])
    )
    with peak_memory("cuda") as memory:
        state["peak"] = max(state["peak"], state["now"] + 50 * MB)
    assert (memory.label, memory.baseline, memory.peak, memory.above) == (
        "CUDA allocated",
        100 * MB,
        150 * MB,
        50 * MB,
    )


@pytest.mark.gpu
def test_peak_memory_on_cuda():
    """HAZARDS 82 on a real GPU."""
    resident = torch.ones(25 * MB, device="cuda")
    torch.ones(75 * MB, device="cuda").sum()
    with peak_memory("cuda") as memory:
        inside = torch.ones(12_500_000, device="cuda")
        del inside
    assert memory.baseline >= resident.nbytes
    assert 50 * MB <= memory.above < 60 * MB


@pytest.mark.gpu
def test_measure_waits_for_the_gpu():
    """HAZARDS 79: the time of a matrix product grows with its size, since its end is waited for."""

    def median(size: int) -> float:
        x = torch.ones(size, size, device="cuda")
        return measure(lambda: x @ x, device="cuda").median

    assert median(8192) > 5 * median(1024)


def test_real_tokens_are_counted():
    """HAZARDS 68: rows of 2 and 4 new tokens in a second are 6 tok/s and 75 %, not 8."""
    rows = [[1, 2], [1, 2, 3, 4]]
    assert tokens_per_second(rows, 1.0) == 6.0
    assert utilization(rows) == 0.75


def test_early_stop_counts_what_came_out():
    """HAZARDS 86: 3 of 10 allowed tokens in one second are 3 tok/s."""
    assert tokens_per_second([[7, 8, 9]], 1.0) == 3.0
    assert tokens_per_second([7, 8, 9], 1.0) == 3.0
    assert tokens_per_second(torch.tensor([7, 8, 9]), 1.0) == 3.0
    assert tokens_per_second([torch.tensor([7, 8, 9]), torch.tensor([7])], 2.0) == 2.0
    assert tokens_per_second([], 1.0) == 0.0


def test_meaningless_rates_are_refused():
    with pytest.raises(ValueError, match="seconds=0 is not positive"):
        tokens_per_second([[1]], 0)
    with pytest.raises(ValueError, match="at least one token"):
        utilization([[], []])


def test_retry_starts_after_the_error_is_gone():
    """HAZARDS 77: the failed call's tensors are dead when the smaller one starts; the last traceback is dropped."""
    held: list[weakref.ref] = []
    sys.last_value = sys.last_traceback = None

    def forward(rows: int) -> str:
        assert all(reference() is None for reference in held), "a failed try still holds its tensor"
        big = torch.ones(rows, 1000)
        held.append(weakref.ref(big))
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert retry_smaller(forward, 16) == ("done", 2)
    assert len(held) == 4 and not hasattr(sys, "last_value")


def test_retry_gives_up_with_a_reason_and_lets_other_errors_through():
    def too_big(rows: int) -> None:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {rows}")

    with pytest.raises(MemoryError, match="size 1 does not fit"):
        retry_smaller(too_big, 4)
    with pytest.raises(MemoryError, match="size 3 does not fit"):
        retry_smaller(too_big, 4, minimum=3)
    with pytest.raises(RuntimeError, match="a real fault"):
        retry_smaller(lambda rows: (_ for _ in ()).throw(RuntimeError("a real fault")), 4)
    with pytest.raises(ValueError, match="size=0"):
        retry_smaller(too_big, 0)


def test_forget_last_error_frees_what_it_held():
    """HAZARDS 77: IPython keeps sys.last_value; a tensor in its frame lives as long."""
    big = torch.ones(10)
    reference = weakref.ref(big)
    sys.last_value = big
    del big
    assert reference() is not None
    timing.forget_last_error()
    assert reference() is None


def test_memory_freed_before_is_not_taken_for_room():
    """Sixty tensors of 1.5 MB made where others were freed must show: the allocator keeps freed pages below live ones."""
    del_me = torch.ones(4_000_000)
    del del_me  # after this, glibc serves tensors of up to 16 MB from its heap
    before, pin = [torch.ones(384_000) for _ in range(60)], torch.ones(384_000)
    del before
    with peak_memory("cpu") as memory:
        after = [torch.ones(384_000) for _ in range(60)]
    assert memory.above > 0.8 * sum(t.nbytes for t in after) and pin.numel()


def test_free_memory_collects_what_refers_to_itself():
    class Loop:
        pass

    gc.disable()
    try:
        loop = Loop()
        loop.itself, gone = loop, weakref.ref(loop)
        del loop
        assert gone() is not None
        timing.free_memory()
        assert gone() is None
    finally:
        gc.enable()
