"""Choices of device, dtype and threads on stub machines; limits that are plausible, composed right and remembered."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from course_utils import machine
from course_utils.decoder import DecoderConfig
from course_utils.machine import Limits

GB = 1 << 30


def tree(root, **files):
    """Write {"a/b": text} below root; returns root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def no_omp(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def eight_cpus(monkeypatch, no_omp):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


# --- device and dtype


def test_pick_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.pick_device() == machine.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA GPU; choose 'auto' or 'cpu'"):
        machine.pick_device("cuda")
    for other in ("mps", "quantum"):
        with pytest.raises(ValueError, match=f"'{other}' is not known"):
            machine.pick_device(other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.pick_device() == torch.device("cuda")
    assert machine.pick_device("cpu") == torch.device("cpu")
    assert machine.pick_device(torch.device("cuda:1")) == torch.device("cuda:1")


@pytest.mark.parametrize(
    "device, capability, dtype",
    [
        ("cuda", (7, 5), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
        ("cuda", (9, 0), torch.bfloat16),
        ("cpu", None, torch.float32),
    ],
)
def test_dtype_follows_compute_capability(monkeypatch, device, capability, dtype):
    """HAZARDS 24: (7, 5) -> float16, (8, 0) -> bfloat16, no CUDA -> float32, whatever is_bf16_supported says."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    assert machine.pick_dtype(torch.device(device)) == machine.pick_dtype(device) == dtype


def test_dtype_by_name():
    """HAZARDS 25: "float16", "torch.float16", torch.float16 are one; "fp99" lists what is allowed."""
    for value in ("float16", "torch.float16", torch.float16):
        assert machine.resolve_dtype(value) is torch.float16
    with pytest.raises(ValueError, match="'fp99' is not one of: auto, float32, float16, bfloat16"):
        machine.resolve_dtype("fp99")
    with pytest.raises(ValueError, match="torch.int8"):
        machine.resolve_dtype(torch.int8)


def test_dtype_left_open_is_picked(monkeypatch):
    assert machine.resolve_dtype(None, "cpu") is machine.resolve_dtype("auto", "cpu") is torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert machine.resolve_dtype("auto", "cuda") is torch.float16
    assert machine.resolve_dtype("float32", "cuda") is torch.float32


# --- threads


def test_omp_num_threads_wins(monkeypatch, eight_cpus, tmp_path):
    for value, threads in (("3", 3), ("4,2", 4), ("", 8), ("many", 8), ("0", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert machine.cpu_count(cgroup=tmp_path, membership=tmp_path / "none") == threads


@pytest.mark.parametrize(
    "membership, files, threads",
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        (
            "0::/a/b\n",
            {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"},
            3,
        ),
        (
            "4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            "4:cpu,cpuacct:/host\n",
            {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("", {"cpu.max": "500000 100000\n"}, 5),
    ],
)
def test_threads_respect_a_cgroup_quota(eight_cpus, tmp_path, membership, files, threads):
    tree(tmp_path / "fs", **files)
    tree(tmp_path, membership=membership)
    assert machine.cpu_count(cgroup=tmp_path / "fs", membership=tmp_path / "membership") == threads


def test_affinity_counts_not_the_number_of_cpus(monkeypatch, no_omp, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert machine.cpu_count(cgroup=tmp_path, membership=tmp_path / "none") == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.cpu_count(cgroup=tmp_path, membership=tmp_path / "none") == 64


def test_configure_threads_acts_once(monkeypatch):
    set_to = []
    monkeypatch.setattr(machine, "_configured", False)
    monkeypatch.setattr(machine, "cpu_count", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert machine.configure_threads() == machine.configure_threads() == 7
    assert set_to == [3]


class FakeNumba(types.ModuleType):
    """numba as far as the choice of its threading layer goes."""

    def __init__(self, layers=("omp", "workqueue"), running=None):
        super().__init__("numba")
        self.layers, self.running = layers, running
        self.config = types.SimpleNamespace(THREADING_LAYER="default", NUMBA_NUM_THREADS=4)
        self.threads = None

    def threading_layer(self):
        if self.running is None:
            raise ValueError("Threading layer is not initialized.")
        return self.running

    def set_num_threads(self, threads):
        wanted = self.config.THREADING_LAYER
        layer = self.layers[-1] if wanted == "default" else wanted
        if layer not in self.layers:
            raise ValueError(f"No threading layer could be loaded: {layer}")
        self.running, self.threads = layer, threads


@pytest.mark.parametrize(
    "fake, environment, layer",
    [
        (FakeNumba(), None, "omp"),
        (FakeNumba(layers=("workqueue",)), None, "workqueue"),
        (FakeNumba(running="workqueue"), None, "workqueue"),
        (FakeNumba(), "default", "workqueue"),
    ],
)
def test_numba_layer_is_omp_where_it_exists_and_told_as_it_is(monkeypatch, fake, environment, layer):
    monkeypatch.setitem(sys.modules, "numba", fake)
    monkeypatch.setattr(machine, "cpu_count", lambda: 16)
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    if environment:
        monkeypatch.setenv("NUMBA_THREADING_LAYER", environment)
    already = fake.running
    assert machine.configure_numba() == layer == machine.configure_numba()
    assert already or fake.threads == 4  # numba refuses more threads than it was built with


def test_real_numba_starts_on_the_layer_it_names():
    pytest.importorskip("numba")
    code = "from course_utils import machine; import numba; print(machine.configure_numba(), numba.threading_layer())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    named, running = ran.stdout.split()
    assert named == running and named in ("omp", "tbb", "workqueue")


def test_import_is_cheap_and_quiet():
    """DESIGN 10: neither numba nor transformers nor matplotlib comes along, and nothing is printed."""
    code = (
        "import sys; from course_utils import machine, timing; "
        "bad = {'numba', 'transformers', 'matplotlib', 'triton', 'bitsandbytes'} & set(sys.modules); "
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# --- memory

UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    "membership, files, available",
    [
        ("0::/\n", {}, 8 * GB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": str(GB)}, 8 * GB),
        ("0::/\n", {"memory.max": str(2 * GB), "memory.current": str(GB)}, GB),
        (
            "0::/\n",
            {
                "memory.max": str(2 * GB),
                "memory.current": str(GB),
                "memory.stat": f"anon 5\ninactive_file {GB // 2}\n",
            },
            GB + GB // 2,
        ),
        ("0::/\n", {"memory.max": str(20 * GB), "memory.current": str(GB)}, 8 * GB),
        ("0::/\n", {"memory.max": str(GB), "memory.current": str(2 * GB)}, 0),
        (
            "0::/pod/box\n",
            {
                "pod/memory.max": str(3 * GB),
                "pod/memory.current": str(GB),
                "pod/box/memory.max": "max",
                "pod/box/memory.current": "5",
            },
            2 * GB,
        ),
        (
            "5:memory:/docker/77\n",  # a container sees its own group as the root, under the host's name
            {"memory/memory.limit_in_bytes": str(2 * GB), "memory/memory.usage_in_bytes": str(GB)},
            GB,
        ),
        (
            "5:memory:/job\n0::/\n",
            {
                "memory/memory.limit_in_bytes": UNLIMITED,
                "memory/memory.usage_in_bytes": "7",
                "memory/job/memory.limit_in_bytes": str(4 * GB),
                "memory/job/memory.usage_in_bytes": str(3 * GB),
                "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}\n",
            },
            2 * GB,
        ),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED}, 8 * GB),
    ],
)
def test_available_memory_respects_cgroups(tmp_path, membership, files, available):
    """HAZARDS 106: a container of 2 GB on a large host is seen as one, under cgroup v1 and v2."""
    tree(tmp_path / "fs", **files)
    tree(tmp_path, membership=membership)
    found = machine.available_memory(cgroup=tmp_path / "fs", membership=tmp_path / "membership", free=8 * GB)
    assert found == available


def test_total_memory_is_that_of_the_container(tmp_path):
    tree(tmp_path, **{"memory.max": str(2 * GB), "memory.current": "0"})
    found = machine.total_memory(cgroup=tmp_path, membership=tmp_path / "none", total=64 * GB)
    assert found == 2 * GB


def test_memory_of_this_machine():
    assert 0 < machine.available_memory() <= machine.total_memory()


# --- describing


@pytest.mark.parametrize(
    "raw, clean",
    [
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon"),
        ("AMD EPYC", "AMD EPYC"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "Intel Core i7-8550U"),
        ("Apple M2", "Apple M2"),
    ],
)
def test_processor_names_are_cleaned(raw, clean):
    assert machine.clean_name(raw) == clean


def test_describe_is_one_line(monkeypatch):
    monkeypatch.setattr(machine, "_cpu_name", lambda: "AMD EPYC")
    monkeypatch.setattr(machine, "total_memory", lambda: int(23.6 * GB))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert machine.describe("cpu") == "AMD EPYC, 2 threads, 24 GB · float32 · torch 2.13.0"
    assert "· float16 ·" in machine.describe("cpu", "float16")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "1 thread," in machine.describe("cpu", torch.bfloat16)


def test_describe_names_the_gpu(monkeypatch):
    properties = types.SimpleNamespace(total_memory=15 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert machine.describe("cuda").startswith("Tesla T4, 15 GB · float16 · torch ")


def test_details_say_more(measured):
    lines = machine.details("cpu").splitlines()
    assert lines[0] == machine.describe("cpu")
    assert any("last-level cache" in line for line in lines) and any("Python 3" in line for line in lines)
    assert str(measured) in lines


def test_last_level_cache_is_plausible():
    assert 1 << 18 <= machine.last_level_cache() <= 4 * GB


# --- limits


@pytest.fixture(scope="module")
def measured() -> Limits:
    """The limits of this machine's CPU, measured once for the module with a small pool."""
    patch = pytest.MonkeyPatch()
    patch.setattr(machine, "POOL_BYTES", 32 << 20)
    patch.setattr(machine, "last_level_cache", lambda device="cpu": 8 << 20)
    patch.setattr(machine, "SECONDS", 0.3)
    yield machine.limits("cpu", "float32")
    patch.undo()
    machine._measured.clear()


def test_limits_are_plausible_and_remembered(measured):
    """Orders of magnitude only: speeds are not asserted."""
    assert 1e8 < measured.read_bandwidth < 1e13 and 1e8 < measured.flops < 1e15
    assert 1e-5 < measured.step_overhead < 60
    assert measured.ridge == measured.flops / measured.read_bandwidth
    assert measured.threads == torch.get_num_threads() and measured.dtype is torch.float32
    assert measured.read_method and measured.read_method in str(measured)
    assert machine.limits("cpu") is measured is machine.limits("cpu", torch.float32)
    assert measured._pool is None, "the buffer must be freed"


def test_limits_are_measured_anew_for_other_threads(monkeypatch, measured):
    fresh = Limits(1.0, 1.0, 1.0)
    monkeypatch.setattr(machine, "_measure_limits", lambda *args: fresh)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert machine.limits("cpu") is fresh is not measured


def test_limits_leave_random_numbers_and_gradients_alone(monkeypatch):
    monkeypatch.setattr(machine, "POOL_BYTES", 4 << 20)
    monkeypatch.setattr(machine, "last_level_cache", lambda device="cpu": 1 << 20)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    machine._measure_limits(torch.device("cpu"), torch.float32, 1, seconds=0.01)
    Limits(1.0, 1.0, 1.0).matmul_seconds(1, [(8, 8)])
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_reads_read_every_byte():
    """Each kind of read gives the answer that needs all numbers: none may skip, or count a part twice."""
    values = torch.arange(8192, dtype=torch.float32) % 7
    reads = machine._reads(values)
    total = values.sum().item()
    assert reads["sum"]().item() == reads["row sums"]().sum().item() == total
    matrix = values.view(4096, -1)
    assert torch.equal(reads["matrix-vector product"](), matrix @ matrix[0])


def test_products_have_the_flop_they_claim():
    pool = machine._Pool(torch.device("cpu"), torch.float32)
    for flop, product in machine._products(pool, torch.device("cpu")):
        size = product().shape[0]
        assert flop == 2 * size**3


def stub_limits(monkeypatch, seconds=lambda call: 1.0, **changes) -> Limits:
    """Limits whose clock is ``seconds(call)``; the calls are still made."""

    def times(calls, device):
        for call in calls:
            call()
        return [seconds(call) for call in calls]

    monkeypatch.setattr(machine, "_times", times)
    monkeypatch.setattr(machine, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "last_level_cache", lambda device="cpu": 1 << 16)
    return Limits(**dict(read_bandwidth=10e9, flops=100e9, step_overhead=0.003) | changes)


def test_scalars_compose():
    limits = Limits(read_bandwidth=10e9, flops=100e9, step_overhead=0.003)
    assert limits.ridge == 10.0
    assert limits.read_seconds(5e9) == 0.5
    assert limits.overhead(30) == 0.003 and limits.overhead(10) == pytest.approx(0.001)
    assert limits.compose(0.01, layers=10) == pytest.approx(0.011)
    gpu = Limits(10e9, 100e9, 0.003, device=torch.device("cuda"))
    assert gpu.compose(0.01) == 0.01 and gpu.compose(0.001) == 0.003


def test_matmul_seconds_sums_counts(monkeypatch):
    limits = stub_limits(monkeypatch)
    assert limits.matmul_seconds(1, [(8, 4)]) == 1.0
    assert limits.matmul_seconds(1, [(8, 4), (16, 4)]) == 2.0
    assert limits.matmul_seconds(1, [((8, 4), 30), ((16, 4), 1)]) == 31.0
    assert limits.matmul_seconds(2, (8, 4)) == 1.0
    assert limits.matmul_seconds(3, iter([])) == 0


def test_again_measures_anew_and_takes_the_median_of_all_rounds(monkeypatch):
    """A busy moment (5 s) that hits one of three rounds does not count."""
    moments = iter((2.0, 5.0, 3.0))
    limits = Limits(1.0, 1.0, 1.0)
    now = []
    monkeypatch.setattr(machine, "_times", lambda calls, device: [now[-1]] * len(calls))
    found = []
    for moment in moments:
        now.append(moment)
        limits.again()
        found.append(limits.matmul_seconds(1, [(8, 4)]))
    assert found == [2.0, 3.5, 3.0]
    assert limits.matmul_seconds(1, [(8, 4)]) == 3.0


def test_matmul_seconds_are_measured_once(monkeypatch):
    calls = []
    limits = stub_limits(monkeypatch, seconds=lambda call: calls.append(call) or 0.001)
    limits.matmul_seconds(4, [(8, 4)])
    first = len(calls)
    limits.matmul_seconds(4, [((8, 4), 3)])
    assert len(calls) == first >= 4
    limits.matmul_seconds(5, [(8, 4)])
    assert len(calls) > first


def test_median_of_the_visits_counts(monkeypatch):
    """HAZARDS 84: a busy round of three, and slow visits in the others, do not move the answer."""
    ticks = iter([0.003] * 2 + [0.5] * 9 + [0.001] * 9 + [0.001] * 8 + [0.9])
    limits = stub_limits(monkeypatch, seconds=lambda call: next(ticks))
    assert limits.matmul_seconds(1, [(8, 4)]) == 0.001


def test_expensive_products_get_few_visits(monkeypatch):
    calls = []
    limits = stub_limits(monkeypatch, seconds=lambda call: calls.append(call) or 5.0)
    limits.matmul_seconds(1, [(8, 4)])
    assert len(calls) == 1 + 3


def test_products_are_the_ones_asked_for_and_come_from_different_memory(monkeypatch):
    """Each visit multiplies (rows, in) with another (out, in) matrix, until the pool has gone round."""
    seen = []
    limits = stub_limits(monkeypatch)
    linear = torch.nn.functional.linear

    def spy(x, w):
        seen.append((tuple(x.shape), tuple(w.shape), w.data_ptr()))
        return linear(x, w)

    monkeypatch.setattr(machine.F, "linear", spy)
    limits.matmul_seconds(3, [(64, 32)])
    assert {(x, w) for x, w, _ in seen} == {((3, 32), (64, 32))}
    places = [place for *_, place in seen]
    assert len(set(places)) == len(places) > 3
    assert all(place % 64 == places[0] % 64 for place in places)


def test_pool_goes_round_grows_and_is_released(monkeypatch):
    limits = stub_limits(monkeypatch)
    size = (1 << 20) // 4
    first = limits._weights((size // 2, 1)).data_ptr()
    assert limits._weights((size // 2, 1)).data_ptr() != first
    assert limits._weights((4, 4)).data_ptr() == first
    assert limits._weights((size, 3)).numel() == 3 * size  # a head larger than the pool
    limits._seconds["kept"] = 1.0
    limits.release()
    assert limits._pool is None and limits._seconds == {"kept": 1.0}


def test_pool_is_written_and_several_times_the_cache(monkeypatch):
    """Pages never written share one page of zeros, and would be read from the cache."""
    monkeypatch.setattr(machine, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "last_level_cache", lambda device="cpu": 3 << 20)
    pool = machine._Pool(torch.device("cpu"), torch.float32)
    assert pool.values.nbytes == 12 << 20
    assert (pool.values.view(-1, 1024) != 0).any(dim=1).all() and torch.isfinite(pool.values).all()


def test_pool_says_when_memory_is_short(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 8 << 20)
    pool = machine._Pool(torch.device("cpu"), torch.float32)
    assert pool.values.nbytes == 2 << 20
    with pytest.raises(MemoryError, match="measuring needs 16 MB, 8 MB are free"):
        machine._Pool(torch.device("cpu"), torch.float32, at_least=4_000_000)


@pytest.mark.parametrize(
    "shapes, wrong",
    [([(8,)], r"\(8,\)"), ([8, 4, 2], "8 is not"), ([((8, 4, 2), 1)], "is not"), (["ab"], "'ab'")],
)
def test_malformed_shapes_are_named(shapes, wrong):
    with pytest.raises(ValueError, match=wrong):
        Limits(1.0, 1.0, 1.0).matmul_seconds(1, shapes)


def test_impossible_sizes_are_named():
    limits = Limits(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="rows=0"):
        limits.matmul_seconds(0, [(8, 4)])
    with pytest.raises(ValueError, match="new=5, total=4"):
        limits.attention_seconds(5, 4, 4, 2, 8)
    with pytest.raises(ValueError, match="heads=4, kv_heads=3"):
        limits.attention_seconds(1, 4, 4, 3, 8)


@pytest.mark.parametrize("new, total", [(6, 6), (1, 6), (1, 1), (2, 6)])
def test_attention_is_the_decoders_own(monkeypatch, new, total):
    """Shapes, mask and grouped heads are those of a whole sequence, of a cached step, and of a chunk."""
    from course_utils import decoder

    seen = []
    attention = decoder.attention

    def spy(q, k, v, mask=None):
        seen.append((tuple(q.shape), tuple(k.shape), None if mask is None else mask.tolist()))
        return attention(q, k, v, mask)

    monkeypatch.setattr(decoder, "attention", spy)
    limits = stub_limits(monkeypatch)
    assert limits.attention_seconds(new, total, heads=4, kv_heads=2, head_dim=8, rows=3) == 1.0
    q, k, mask = seen[0]
    assert q == (3, 4, new, 8) and k == (3, 2, total, 8)
    chunk = [[[[True] * 5 + [False], [True] * 6]]]
    assert mask == (chunk if (new, total) == (2, 6) else None)


def test_elementwise_takes_off_what_the_overhead_counts(monkeypatch):
    config = DecoderConfig(97, 32, 48, 2, 4, 2, 8)
    limits = stub_limits(monkeypatch)
    monkeypatch.setattr(Limits, "_elementwise", lambda self, rows, config: 0.5 + rows)
    assert limits.elementwise_seconds(1, config) == 0
    assert limits.elementwise_seconds(5, config) == 4.0
    monkeypatch.undo()
    assert Limits(1.0, 1.0, 1.0)._elementwise(3, config) > 0


def test_linear_shapes_are_those_of_the_decoder():
    from course_utils.decoder import Decoder

    config = DecoderConfig(97, 32, 48, 2, 4, 2, 16)
    decoder = Decoder(config)
    real = [tuple(m.weight.shape) for m in decoder.modules() if isinstance(m, torch.nn.Linear)]
    listed = [shape for shape, count in machine.linear_shapes(config, head=True) for _ in range(count)]
    assert sorted(real) == sorted(listed)
    assert len(machine.linear_shapes(config)) == 4


def test_empty_step_is_a_decode_step_of_thirty_layers(monkeypatch):
    """One token through 30 layers and a cache, weights small enough to stay in the processor's cache."""
    from course_utils import decoder

    made = []
    build = decoder.Decoder
    monkeypatch.setattr(decoder, "Decoder", lambda config: made.append(build(config)) or made[-1])
    with torch.inference_mode():
        step = machine._empty_step(torch.device("cpu"), torch.float32)
        first, second = step(), step()
    assert first.shape == (1, 1, 64) and torch.isfinite(first).all() and torch.equal(first, second)
    assert len(made[0].blocks) == machine.DEPTH
    assert made[0].num_parameters() * 4 < 4 << 20


@pytest.mark.gpu
def test_limits_on_cuda():
    """The same numbers exist on CUDA, the pool is freed, products are timed on the device."""
    limits = machine.limits("cuda", "float32")
    assert 1e10 < limits.read_bandwidth < 1e13 and limits.flops > 1e10
    small, large = (limits.matmul_seconds(rows, [(4096, 4096)]) for rows in (1, 8192))
    assert 0 < small < large
    assert limits.attention_seconds(1, 64, 4, 2, 32) > 0
    limits.release()
    assert limits._pool is None


@pytest.mark.gpu
def test_reads_on_cuda_equal_the_cpu():
    values = torch.arange(8192, dtype=torch.float32) % 7
    for name, read in machine._reads(values).items():
        torch.testing.assert_close(machine._reads(values.cuda())[name]().cpu(), read(), msg=name)
