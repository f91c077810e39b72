"""The machine under the course: which device, dtype and threads are used, and what they can do, measured.

Three limits rule a step of a decoder: the bytes a second that memory delivers, the floating-point operations a second
of a large matrix product, and the fixed time of launching the operations at all. :func:`limits` measures them in a few
seconds; :meth:`Limits.matmul_seconds` measures single products, of which predictions are composed. Nothing here times
a model that is later "predicted".
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEPTH = 30  # layers of SmolLM2-135M, whose fixed time per step `step_overhead` is
POOL_BYTES = 224 << 20  # least size of what is read and multiplied
SECONDS = 2.5  # of measuring in `limits`, preparation included

_CGROUP, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MB = 1 << 20


# --- device and dtype ------------------------------------------------------------------------------------------------


def pick_device(prefer: str | torch.device = "auto") -> torch.device:
    """The device of this session: CUDA where there is a GPU, else the CPU; "cpu" and "cuda" ask for one.

    Raises ValueError for any other device, and for "cuda" on a machine without one.
    """
    if str(prefer) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(prefer)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(prefer)!r} is not known to the course; choose 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(prefer)!r}, but torch finds no CUDA GPU; choose 'auto' or 'cpu'")
    return device


def pick_dtype(device: str | torch.device) -> torch.dtype:
    """bfloat16 on CUDA of compute capability 8 or more, float16 on older CUDA, float32 on a CPU.

    The capability is asked, not ``torch.cuda.is_bf16_supported()``, which counts slow emulation (a T4 answers True).
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def resolve_dtype(value: str | torch.dtype | None, device: str | torch.device | None = None) -> torch.dtype:
    """torch.dtype for "float16", "torch.float16" or torch.float16; None and "auto" give ``pick_dtype(device)``.

    Raises ValueError that lists the allowed names.
    """
    if value is None or value == "auto":
        return pick_dtype(pick_device() if device is None else device)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={str(value)!r} is not one of: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


# --- threads ---------------------------------------------------------------------------------------------------------


def cpu_count(*, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Threads to compute with: OMP_NUM_THREADS where it is set, else the CPUs this process may use.

    Those are the CPUs of its affinity, or fewer where a cgroup (a container, Binder) grants less time: 1.5 CPUs give 1
    thread, for a second one would be stopped half of the time and the first wait for it. ``os.cpu_count()`` sees
    neither. The paths are for tests.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        allowed = os.cpu_count() or 1
    quota = min(_quotas(cgroup, membership), default=float(allowed))
    return max(1, min(allowed, int(quota)))


_configured = False


def configure_threads() -> int:
    """Let torch use ``cpu_count()`` threads and return how many it uses; only the first call changes anything."""
    global _configured
    if not _configured:
        torch.set_num_threads(cpu_count())
        _configured = True
    return torch.get_num_threads()


def configure_numba() -> str:
    """Start numba's threads, on the OpenMP layer where it exists, and return the layer in use ("omp", "workqueue", …).

    Must come before the first parallel numba call: the layer can't change afterwards, and then the one in use is
    returned. NUMBA_THREADING_LAYER, where set, is obeyed. It matters: torch's OpenMP threads and a second pool compete
    for the same CPUs.
    """
    import numba

    try:
        return numba.threading_layer()  # threads run already
    except ValueError:
        pass
    threads = min(cpu_count(), numba.config.NUMBA_NUM_THREADS)
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = "omp"
        try:
            numba.set_num_threads(threads)  # starts the threads, without compiling anything
            return numba.threading_layer()
        except ValueError:  # no OpenMP here
            numba.config.THREADING_LAYER = "default"
    numba.set_num_threads(threads)
    return numba.threading_layer()


# --- memory, and what control groups allow ---------------------------------------------------------------------------


def available_memory(
    *, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP, free: int | None = None
) -> int:
    """Bytes this process can still get: what the system has, or less where a cgroup (v1 or v2) limits memory.

    File pages a cgroup could drop do not count as used. ``free`` and the paths stand in for the system's in tests.
    """
    free = psutil.virtual_memory().available if free is None else free
    left = [limit - used for limit, used in _memory_limits(cgroup, membership)]
    return max(0, min([free, *left]))


def total_memory(*, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP, total: int | None = None) -> int:
    """Bytes of memory of this machine, or of the container this process lives in. Keywords as in available_memory."""
    total = psutil.virtual_memory().total if total is None else total
    return min([total, *(limit for limit, _ in _memory_limits(cgroup, membership))])


def _memory_limits(cgroup: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup above this process that limits memory."""
    found = []
    for folder, v2 in _folders(cgroup, membership, "memory"):
        names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is None or limit >= 1 << 60:  # "max", or v1's way of saying no limit
            continue
        droppable = _stat(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        found.append((limit, max(0, (used or 0) - droppable)))
    return found


def _quotas(cgroup: Path, membership: Path) -> list[float]:
    """CPUs granted by every cgroup above this process that limits them."""
    found = []
    for folder, v2 in _folders(cgroup, membership, "cpu"):
        if v2:
            quota, period = (_words(folder / "cpu.max") + ["", ""])[:2]
        else:
            quota, period = (
                "".join(_words(folder / f"cpu.cfs_{name}_us")[:1]) for name in ("quota", "period")
            )
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return found


def _folders(cgroup: Path, membership: Path, controller: str) -> list[tuple[Path, bool]]:
    """(folder, is v2) of the cgroups this process is in, innermost first, up to the root.

    A container often sees its own group as the root of the tree but the host's path as its membership: folders that do
    not exist are left out, the root is always in.
    """
    found: list[tuple[Path, bool]] = []
    for line in _text(membership).splitlines() or ["0::/"]:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        roots = [cgroup, cgroup / "unified"] if v2 else [cgroup / controllers, cgroup / controller]
        for root in roots:
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_dir() and (folder, v2) not in found:
                    found.append((folder, v2))
                if folder == root:
                    break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _number(path: Path) -> int | None:
    word = "".join(_words(path)[:1])
    return int(word) if word.isdigit() else None


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


# --- describing ------------------------------------------------------------------------------------------------------


def describe(device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> str:
    """One line for a figure or a table: "AMD EPYC, 2 threads, 24 GB · float32 · torch 2.13.0"."""
    device = pick_device() if device is None else torch.device(device)
    name = str(resolve_dtype(dtype, device)).removeprefix("torch.")
    return f"{_hardware(device)} · {name} · torch {torch.__version__.split('+')[0]}"


def details(device: str | torch.device | None = None) -> str:
    """Several lines: hardware, memory free, threads, versions, and the limits where they have been measured."""
    device = pick_device() if device is None else torch.device(device)
    lines = [
        describe(device),
        f"CPU: {_hardware(torch.device('cpu'))}, {available_memory() / 2**30:.1f} GB of it free",
        f"last-level cache: {last_level_cache() / _MB:.0f} MB",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    ]
    lines += [str(found) for found in _measured.values() if found.device == device]
    return "\n".join(lines)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{clean_name(torch.cuda.get_device_name(device))}, {memory / 2**30:.0f} GB"
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"{_cpu_name()}, {threads} thread{plural}, {total_memory() / 2**30:.0f} GB"


@lru_cache
def _cpu_name() -> str:
    for pattern, text in (
        (r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo"))),
        (r"(.+)", _sysctl("machdep.cpu.brand_string") if platform.system() == "Darwin" else ""),
        (r"(.+)", platform.processor()),
    ):
        match = re.search(pattern, text, re.MULTILINE)
        if match and clean_name(match[1]):
            return clean_name(match[1])
    return platform.machine() or "CPU"


def clean_name(name: str) -> str:
    """A processor's name without trademarks, clock and "Processor": "Intel Xeon", "AMD EPYC 7B12", "NVIDIA L4"."""
    name = re.sub(r"\((R|TM|C)\)|®|™", " ", name, flags=re.IGNORECASE)
    name = re.sub(r"@.*$|\b\d+-Core\b|\b(CPU|Processor)\b", " ", name, flags=re.IGNORECASE)
    return " ".join(name.split())


def _sysctl(key: str) -> str:
    import subprocess

    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@lru_cache
def last_level_cache(device: str | torch.device = "cpu") -> int:
    """Bytes of the largest cache between the processor and its memory (32 MB are assumed where nothing says)."""
    device = torch.device(device)
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * _MB
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", _text(path).strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    if not sizes and platform.system() == "Darwin":
        words = [_sysctl(f"hw.{level}cachesize").strip() for level in ("l3", "l2")]
        sizes = [int(word) for word in words if word.isdigit()]
    return max(sizes, default=32 * _MB)


# --- limits ----------------------------------------------------------------------------------------------------------

Shape = tuple[int, int]


@dataclass
class Limits:
    """What one device does in one dtype: scalars measured once, single products measured when asked for.

    read_bandwidth: bytes/s, the best of several plain reads (``read_method`` says of which kind) of a buffer much larger
    than the last-level cache. flops: FLOP/s, the best of several large matrix products. step_overhead: seconds of one
    decode step of a decoder as deep as SmolLM2-135M with hardly any weights, that is of launches and Python, the median.
    """

    read_bandwidth: float
    flops: float
    step_overhead: float
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    threads: int = 1
    read_method: str = ""
    _seconds: dict[tuple, float] = field(default_factory=dict, repr=False)
    _measured: dict[tuple, list[float]] = field(default_factory=dict, repr=False)  # all rounds; see `again`
    _pool: _Pool | None = field(default=None, repr=False)

    @property
    def ridge(self) -> float:
        """FLOP per byte at which computing takes as long as reading: below it memory is the limit."""
        return self.flops / self.read_bandwidth

    def read_seconds(self, nbytes: float) -> float:
        """Seconds to read ``nbytes`` once at the full read bandwidth."""
        return nbytes / self.read_bandwidth

    def overhead(self, layers: int = DEPTH) -> float:
        """Seconds of launches and Python in a step of a decoder of ``layers`` layers: step_overhead, scaled."""
        return self.step_overhead * layers / DEPTH

    def matmul_seconds(self, rows: int, shapes: Iterable) -> float:
        """Seconds of ``F.linear(x, W)``, x (rows, in_features), summed over weights W of the given shapes.

        shapes: of (out_features, in_features), or of ((out_features, in_features), count). Each distinct product is the
        median of several visits to *different* matrices cut from a pool much larger than the last-level cache, because
        a decoder too finds each weight in memory, not in the cache. Shapes take turns in three rounds. Measured when
        first asked for, then remembered; :meth:`release` frees the pool. Raises ValueError for sizes below 1.
        """
        shapes = counted_shapes(shapes)
        for shape, _ in shapes:
            if rows < 1 or min(shape) < 1:
                raise ValueError(f"rows={rows}, shape={shape}; expected numbers of at least 1")
        self._measure(
            {("matmul", rows, *shape): partial(self._linear_call, rows, shape) for shape, _ in shapes}
        )
        return sum(count * self._seconds["matmul", rows, *shape] for shape, count in shapes)

    def attention_seconds(
        self, new: int, total: int, heads: int, kv_heads: int, head_dim: int, rows: int = 1
    ) -> float:
        """Seconds of one layer's attention: ``new`` queries over ``total`` keys and values of each of ``rows`` sequences.

        new == total is a whole sequence, causal, its keys fresh from the projection. Else the queries are the last of
        the sequence and the keys come from a cache, read from memory like the weights of :meth:`matmul_seconds`.
        Raises ValueError where new > total.
        """
        if not 1 <= new <= total or heads % kv_heads:
            raise ValueError(
                f"new={new}, total={total}, heads={heads}, kv_heads={kv_heads}; expected 1 ≤ new ≤ total and heads a "
                "multiple of kv_heads"
            )
        key = ("attention", rows, new, total, heads, kv_heads, head_dim)
        self._measure({key: partial(self._attention_call, *key[1:])})
        return self._seconds[key]

    def elementwise_seconds(self, rows: int, config) -> float:
        """Seconds the operations between the products take in one layer beyond their launches, for ``rows`` tokens.

        Norms, rotation, SiLU gate and residual sums of ``config`` (a DecoderConfig), measured on random activations.
        The time at one row is taken off, since :meth:`overhead` counts the launches.
        """
        return max(0.0, self._elementwise(rows, config) - self._elementwise(1, config))

    def compose(self, work: float, layers: int = DEPTH) -> float:
        """Seconds of a step that has ``work`` seconds of products, attention and reads in ``layers`` layers.

        On a CPU launching and computing take turns: overhead + work. A GPU computes while the next operations are
        launched: the longer of the two.
        """
        overhead = self.overhead(layers)
        return max(overhead, work) if self.device.type == "cuda" else overhead + work

    def again(self) -> None:
        """Let every product be measured anew when next asked for; its time is then the median of all its measurements.

        Three rounds some seconds apart outlast a busy moment of the machine, which a single one does not.
        """
        self._seconds.clear()

    def release(self) -> None:
        """Free the pool of weights (a few hundred MB); measured times stay."""
        self._pool = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{name} on {self.device.type}: reads {self.read_bandwidth / 1e9:.1f} GB/s ({self.read_method}), "
            f"{self.flops / 1e9:.0f} GFLOP/s, ridge {self.ridge:.1f} FLOP/byte, "
            f"overhead of {DEPTH} layers {self.step_overhead * 1e3:.1f} ms"
        )

    def _linear_call(self, rows: int, shape: Shape) -> Callable[[], Tensor]:
        x = _activations((rows, shape[1]), self.device, self.dtype)
        return lambda: F.linear(x, self._weights(shape))

    def _attention_call(
        self, rows: int, new: int, total: int, heads: int, kv_heads: int, head_dim: int
    ) -> Callable[[], Tensor]:
        from course_utils.decoder import attention

        # Heads come out of one projection and are transposed: queries are strided as they are in the decoder.
        width = heads + 2 * kv_heads
        made = _activations((rows, new, width, head_dim), self.device, self.dtype).transpose(1, 2)
        q, k, v = made.split((heads, kv_heads, kv_heads), dim=1)
        if new == total:
            return lambda: attention(q, k, v)
        mask = None
        if new > 1:
            mask = torch.ones(new, total, dtype=torch.bool, device=self.device).tril(total - new)[None, None]
        shape = (rows, kv_heads, total, head_dim)
        return lambda: attention(q, self._weights(shape), self._weights(shape), mask)

    def _elementwise(self, rows: int, config) -> float:
        key = ("elementwise", rows, config.hidden_size, config.intermediate_size, config.num_heads)
        key += (config.num_kv_heads, config.head_dim)
        self._measure({key: partial(_between_products, rows, config, self.device, self.dtype)})
        return self._seconds[key]

    def _weights(self, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape that was not touched for a while: the next piece of the pool."""
        count = 1
        for size in shape:
            count *= size
        if self._pool is None or self._pool.values.numel() < count:
            self._pool = None  # the old one goes before a larger one comes
            self._pool = _Pool(self.device, self.dtype, count)
        return self._pool.take(count).view(shape)

    @torch.inference_mode()
    def _measure(
        self, makers: dict[tuple, Callable[[], Callable]], rounds: int = 3, budget: float = 0.03
    ) -> None:
        """Fill in the seconds of what is not known yet: the median of 3 to 27 calls, a few at a time, taking turns.

        Each call gets about ``budget`` seconds a round and at least one visit; warm-up does not count. Calls alternate as
        the products of a decoder do, and the median counts, not the best: a model's products have bad moments too.
        """
        calls = {key: make() for key, make in makers.items() if key not in self._seconds}
        visits, samples = {}, {key: [] for key in calls}
        for key, call in calls.items():
            seconds = _times([call], self.device)[0]  # also makes the pool
            if seconds < 0.2:  # what is slow the first time may be quick the second
                seconds = _times([call], self.device)[0]
            visits[key] = rounds * int(min(9, max(1, budget / max(seconds, 1e-9))))
        for turn in range(max(visits.values(), default=0)):
            waiting = [key for key in calls if turn < visits[key]]
            for key, seconds in zip(
                waiting, _times([calls[key] for key in waiting], self.device), strict=True
            ):
                samples[key].append(seconds)
        for key, taken in samples.items():
            measured = self._measured.setdefault(key, [])
            measured.append(statistics.median(taken))
            self._seconds[key] = statistics.median(measured)


def limits(device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> Limits:
    """Measure, in at most about 5 s, what this device does in this dtype; remembered for the process.

    Reads, products and steps take turns, so that a busy moment hits all of them. Needs up to about 300 MB, freed at the
    end. Threads are those of the model (:func:`configure_threads`); other threads are measured anew.
    """
    device = pick_device() if device is None else pick_device(device)
    dtype = resolve_dtype(dtype, device)
    threads = configure_threads()
    key = (str(device), dtype, threads)
    if key not in _measured:
        _measured[key] = _measure_limits(device, dtype, threads, SECONDS)
    return _measured[key]


_measured: dict[tuple, Limits] = {}


@torch.inference_mode()
def _measure_limits(device: torch.device, dtype: torch.dtype, threads: int, seconds: float) -> Limits:
    start = time.perf_counter()
    pool = _Pool(device, dtype)
    reads = _reads(pool.values)
    products = _products(pool, device)
    step = _empty_step(device, dtype)
    best_read: dict[str, float] = {}
    best_flops, steps = 0.0, []

    for _ in range(12):
        for name, read in reads.items():
            best_read[name] = min(best_read.get(name, math.inf), *_times([read], device))
        for flop, product in products:
            best_flops = max(best_flops, *(flop / t for t in _times([product] * 2, device)))
        steps += _host_times(step, 8, device)
        if time.perf_counter() - start > seconds:
            break
    method = min(best_read, key=best_read.get)
    nbytes = pool.values.numel() * pool.values.element_size()
    return Limits(
        read_bandwidth=nbytes / best_read[method],
        flops=best_flops,
        step_overhead=statistics.median(steps),
        device=device,
        dtype=dtype,
        threads=threads,
        read_method=method,
    )


def counted_shapes(shapes: Iterable) -> list[tuple[Shape, int]]:
    """[((out_features, in_features), count)] from such pairs, from bare (out, in) pairs, or from one (out, in)."""
    shapes = list(shapes)
    if len(shapes) == 2 and all(isinstance(size, int) for size in shapes):
        shapes = [tuple(shapes)]
    found = []
    for item in shapes:
        try:
            first, second = item
            if isinstance(first, int):
                found.append(((first, int(second)), 1))
            else:
                out_features, in_features = first
                found.append(((int(out_features), int(in_features)), int(second)))
        except (TypeError, ValueError):
            raise ValueError(
                f"{item!r} is not (out_features, in_features), nor such a pair and a count"
            ) from None
    return found


def linear_shapes(config, head: bool = False) -> list[tuple[Shape, int]]:
    """((out_features, in_features), count) of the products in the layers of a DecoderConfig; with ``head`` also its head.

    The fused qkv and gate_up count as one product each, as the decoder stores them.
    """
    heads = config.num_heads + 2 * config.num_kv_heads
    shapes = [
        (heads * config.head_dim, config.hidden_size),
        (config.hidden_size, config.num_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    found = [(shape, config.num_layers) for shape in shapes]
    return found + [((config.vocab_size, config.hidden_size), 1)] if head else found


class _Pool:
    """Numbers in memory, several times the last-level cache, handed out piece after piece, round and round."""

    def __init__(self, device: torch.device, dtype: torch.dtype, at_least: int = 0) -> None:
        size = torch.empty((), dtype=dtype).element_size()
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        wanted = min(max(POOL_BYTES, 4 * last_level_cache(device)), 1024 * _MB, free // 4)
        count = max(wanted // size, at_least)
        if count * size > free:
            raise MemoryError(
                f"measuring needs {count * size / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; free some first"
            )
        # Written, not only reserved (untouched pages all share one page of zeros), and with a generator of its own.
        block = _activations((min(count, _MB),), device, dtype) * 0.02
        self.values = torch.empty(count, device=device, dtype=dtype)
        for part in self.values.split(block.numel()):
            part.copy_(block[: part.numel()])
        self.next = 0

    def take(self, count: int) -> Tensor:
        if self.next + count > self.values.numel():
            self.next = 0
        piece = self.values[self.next : self.next + count]
        self.next += -(-count // 64) * 64  # rows of a matrix start on a cache line, as in a tensor of its own
        return piece


def _activations(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)  # the learner's own random numbers stay as they were
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _reads(values: Tensor) -> dict[str, Callable[[], object]]:
    """Plain reads of all the values: whichever is fastest here tells most about the memory."""
    whole = values[: values.numel() // 4096 * 4096]
    matrix = whole.view(4096, -1)
    vector = matrix[0].clone()
    return {
        "sum": lambda: values.sum(),
        "row sums": lambda: matrix.sum(1),
        "matrix-vector product": lambda: torch.mv(matrix, vector),
    }


def _products(pool: _Pool, device: torch.device) -> list[tuple[int, Callable[[], object]]]:
    """(FLOP, product) of the two largest square sizes of which one product takes at most about 0.1 s."""
    found = []
    for size in (512, 1024, 2048, 4096, 8192):
        if 2 * size * size > pool.values.numel() or (device.type != "cuda" and size > 2048):
            break
        x, w = (pool.take(size * size).view(size, size) for _ in range(2))
        product = partial(F.linear, x, w)
        product()
        found.append((2 * size**3, product))
        if _times([product], device)[0] * 8 > 0.4:
            break
    return found[-2:]


def _empty_step(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One decode step of a decoder of DEPTH layers, 2.3 MB of weights in all, with a cache that keeps one token a layer."""
    from course_utils.decoder import Cache, Decoder, DecoderConfig

    config = DecoderConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_layers=DEPTH,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
    )

    class OneToken(Cache):
        def __init__(self) -> None:
            self.store = torch.zeros(2, DEPTH, 1, 2, 1, 8, device=device, dtype=dtype)
            self.start = torch.zeros(1, 1, dtype=torch.int64, device=device)

        def positions(self, new: int) -> Tensor:
            return self.start

        def mask(self, new: int) -> None:
            return None

        def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.store[0, layer], self.store[1, layer]
            keys[:, :, 0:1], values[:, :, 0:1] = k, v
            return keys[:, :, :1], values[:, :, :1]

    with torch.random.fork_rng(devices=[]):  # making the weights draws random numbers
        decoder = Decoder(config).eval().requires_grad_(False).to(device, dtype)
    cache, token = OneToken(), torch.zeros(1, 1, dtype=torch.int64, device=device)
    return lambda: decoder(token, cache)


def _between_products(rows: int, config, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """What one layer does to ``rows`` tokens apart from products and attention."""
    from course_utils.decoder import rotate

    heads = config.num_heads + 2 * config.num_kv_heads
    x = _activations((1, rows, config.hidden_size), device, dtype)
    qkv = _activations((1, rows, heads, config.head_dim), device, dtype).transpose(1, 2)
    gate_up = _activations((1, rows, 2 * config.intermediate_size), device, dtype)
    cos, sin = (_activations((1, 1, rows, config.head_dim), device, dtype) for _ in range(2))
    attended = _activations((1, config.num_heads, rows, config.head_dim), device, dtype)
    norm = torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device, dtype=dtype)
    q, k, _ = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)

    def run() -> None:
        norm(x), norm(x)
        rotate(q, cos, sin), rotate(k, cos, sin)
        attended.transpose(1, 2).reshape(1, rows, -1)
        gate, up = gate_up.chunk(2, dim=-1)
        F.silu(gate) * up
        x + x, x + x

    return run


def _host_times(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds between the calls' starts as the program sees them; the first call is left out."""
    call()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return found


def _times(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each call on its device.

    On CUDA: between events, with work queued before them, so that the device does not wait for launches.
    """
    if device.type == "cuda":
        return _cuda_times(calls, device)
    found = []
    for call in calls:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _cuda_times(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda.synchronize(device)
    filler = torch.ones(4096, 4096, device=device)
    for _ in range(2 + len(calls) // 8):
        filler = filler @ filler * 0  # a few ms in float32: time enough to launch what is measured
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(second) / 1e3 for first, second in zip(events, events[1:], strict=False)]
