"""The Triton kernels of deep dive 1A: interpreted on the CPU, compiled for three GPUs without one, run where there is one.

What needs no Triton (which path a product takes) is tested everywhere.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from course_utils.chapters import quantization_kernels as kernels
from course_utils.chapters.quantization import QuantizedLinear, Scheme

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of the largest output
SCHEMES = {  # scheme, out_features, in_features: odd sizes, longer than one tile of 256 bytes
    "int8 a scale a row": (Scheme(8), 11, 341),
    "int8 one scale": (Scheme(8, None, False, True), 11, 341),
    "int8 groups of 5": (Scheme(8, 5), 9, 345),
    "int8 groups of 1": (Scheme(8, 1), 3, 7),
    "int3 affine": (Scheme(3, 5, True), 3, 35),
    "int4 groups of 10": (Scheme(4, 10, True), 11, 350),
    "int4 groups of 192": (Scheme(4, 192, True), 7, 576),
    "int4 a scale a row": (Scheme(4, None, True), 9, 541),
    "int4 symmetric": (Scheme(4, 10), 5, 30),
    "int4 one scale": (Scheme(4, None, False, True), 5, 21),
}
MAIN = ["int8 a scale a row", "int8 groups of 5", "int4 groups of 10", "int4 a scale a row"]
CASES = [(name, 3, "float32") for name in SCHEMES]
CASES += [(name, rows, "float32") for name in MAIN for rows in (1, 17)]
CASES += [(name, 3, dtype) for name in MAIN for dtype in ("float16", "bfloat16")]


def layer_of(name: str, device="cpu") -> QuantizedLinear:
    """A layer of seeded weights that lean to one side, the second row zero."""
    scheme, out_features, in_features = SCHEMES[name]
    torch.manual_seed(out_features * in_features)
    linear = nn.Linear(in_features, out_features, bias=False)
    linear.weight.data.normal_(0.3, 1.0)[1] = 0
    return QuantizedLinear(linear, scheme).to(device)


def off(product, layer: QuantizedLinear, rows: int, dtype: str) -> float:
    """Largest difference to the dequantized product in float64, relative to the largest output."""
    torch.manual_seed(rows)
    x = torch.randn(rows, layer.in_features).to(layer.q.device, getattr(torch, dtype))
    y = product(x, layer)
    right = x.double() @ layer.weight(torch.float64).T
    assert y.dtype == x.dtype and y.shape == right.shape
    return ((y.double() - right).abs().max() / right.abs().max()).item()


# --- interpreted -----------------------------------------------------------------------------------------------------


def interpreted() -> dict:
    """What a process that interprets the kernels (TRITON_INTERPRET=1 from its start) finds, case by case."""
    found = {}
    for name, rows, dtype in CASES:
        found[f"{name}, {rows}, {dtype}"] = off(kernels.triton_launch, layer_of(name), rows, dtype)

    layer = layer_of("int8 a scale a row")
    x = torch.ones(3, layer.in_features)
    x[1], x[2, 0] = torch.inf, torch.nan
    found["neighbours"] = kernels.triton_launch(x, layer)[0].isfinite().all().item()
    found["zero row"] = kernels.triton_launch(x[:1], layer)[0, 1].item()

    wide = torch.randn(3, 2, layer.in_features)[:, 1]  # rows that are not next to each other
    found["strided"] = (kernels.triton_launch(wide, layer) - wide @ layer.weight().T).abs().max().item()

    for name, scheme in (("int8", Scheme(8)), ("int4", Scheme(4, 200, True))):
        even = nn.Linear(400, 1, bias=False)
        even.weight.data.fill_(0.0025)
        x = torch.full((1, 400), 100.0, dtype=torch.float16)
        found[f"{name} in float16"] = kernels.triton_launch(x, QuantizedLinear(even, scheme)).item()

    product = kernels.triton_product()
    product(wide, layer)
    found["which"] = product.which()

    for name in MAIN:  # one read too far would end the process
        layer = layer_of(name)
        for buffer in ("q", "scale", "zero_point"):
            value = getattr(layer, buffer)
            setattr(layer, buffer, None if value is None else at_the_end(value))
        kernels.triton_launch(at_the_end(torch.ones(3, layer.in_features)), layer)
    return found


def at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last that may be read: the page behind it is closed."""
    page, size = mmap.PAGESIZE, tensor.nbytes
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    closed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 0)
    assert closed == 0
    count = tensor.numel()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=room - size).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of ``interpreted()`` in a process of its own: the switch is read when a kernel is made.

    The process ends with a fault where a kernel reads outside of its matrices, masks or not.
    """
    env = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    code = "import json; from tests.test_triton_kernels import interpreted; print(json.dumps(interpreted()))"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@needs_triton
@pytest.mark.parametrize("name, rows, dtype", CASES)
def test_interpreted_kernel_equals_the_dequantized_product(found, name, rows, dtype):
    """1 row; 3, which share a program with a masked fourth; 17, which need a second program (HAZARDS 17)."""
    assert found[f"{name}, {rows}, {dtype}"] <= TOLERANCE[dtype]


@needs_triton
def test_no_row_is_touched_by_its_neighbours(found):
    """What is masked is not read: a row stays finite beside rows of inf and NaN."""
    assert found["neighbours"] is True


@needs_triton
def test_row_of_zeros_gives_exactly_zero(found):
    """HAZARDS 1."""
    assert found["zero row"] == 0


@needs_triton
def test_rows_that_are_not_adjacent(found):
    assert found["strided"] < 1e-4


@needs_triton
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_float16_does_not_overflow_before_the_scale(found, name):
    """HAZARDS 18: the sum of 127 · 100 over 400 inputs is 5 million, the result is 100."""
    assert found[f"{name} in float16"] == 100.0


@needs_triton
def test_trial_passes_where_the_kernel_runs(found):
    assert found["which"] == "Products run in the Triton kernel."


# --- compiled without a GPU ------------------------------------------------------------------------------------------


def compiled(name: str, dtype: str, capability: int, rows: int = 1):
    """The kernel compiled for a CUDA device of this capability, with the types of a layer in groups of 64."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, packed = getattr(kernels.triton_kernels(), name), name == "int4"
    long = 32 if packed else 64
    constants = {"ROWS": rows, "RUNS": 256 // long, "LONG": long} | ({} if packed else {"zero": None})
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"x": f"*{dtype}", "y": f"*{dtype}", "scale": "*fp32", "q": "*u8" if packed else "*i8"}
    types |= {"zero": "*u8"} if packed else {}
    aligned = [t[0] == "*" or n in ("n_in", "n_out", "size") for n, t in types.items()]
    attrs = {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(aligned) if yes}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attrs)
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True})


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """`compiled`, with Triton's files in a folder of the test and the interpreter off."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return compiled


@needs_triton
@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_compiles_to_machine_code(compiler, name, capability):
    """For a T4 (7.5) too, in every dtype, summed in float32, without the matrix units (tl.dot)."""
    for dtype in ("fp32", "fp16", "bf16"):
        code = compiler(name, dtype, capability).asm
        assert code["cubin"][:4] == b"\x7fELF"
        assert f".target sm_{capability}" in code["ptx"]
        assert "fma.rn.f32" in code["ptx"] and "mma" not in code["ptx"]
        assert not re.search(r"(fma|mul|add)\.(rn\.)?b?f16", code["ptx"])


@needs_triton
def test_weights_are_read_once_for_four_rows(compiler):
    """In loads of 16 bytes, as many for four rows as for one; single bytes are the zero points."""
    wide = {rows: _wide_loads(compiler("int4", "fp16", 75, rows)) for rows in (1, 4)}
    assert wide[1] == wide[4] > 0


def _wide_loads(code) -> int:
    return len(re.findall(r"ld\.global[.\w]*\.v4\.b32", code.asm["ptx"]))


# --- which path ------------------------------------------------------------------------------------------------------


def broken(x, layer):
    raise RuntimeError("no such GPU\nand a long story")


def swapped(x, layer):
    """Wrong on purpose: the columns in pairs the wrong way round."""
    return x @ layer.weight(x.dtype).unflatten(1, (-1, 2)).flip(-1).flatten(1).T


def not_a_number(x, layer):
    return kernels.dequantized_product(x, layer) * torch.nan


class Right:
    """A kernel that works and counts its calls."""

    __name__ = "right"

    def __init__(self):
        self.shapes = []

    def __call__(self, x, layer):
        self.shapes.append((x.dtype, layer.bits, layer.out_features))
        return kernels.dequantized_product(x, layer)


INT8, INT4 = MAIN[0], MAIN[2]


def test_kernel_is_tried_once_for_each_kind_and_dtype(monkeypatch):
    right = Right()
    monkeypatch.setattr(kernels, "triton_launch", right)
    product = kernels.triton_product(most_rows=5)
    assert product.most_rows == 5 and product.which() == "No product has run yet."
    for name, dtype in ((INT8, "float32"), (INT8, "float32"), (INT8, "float16"), (INT4, "float32")):
        assert off(product, layer_of(name), 3, dtype) <= TOLERANCE[dtype]
    assert product.which() == "Products run in the Triton kernel."
    trials = [(dtype, bits) for dtype, bits, out_features in right.shapes if out_features == 4]
    assert trials == [(torch.float32, 8), (torch.float16, 8), (torch.float32, 4)]
    assert len(right.shapes) == 3 + 4


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (broken, "RuntimeError: no such GPU"),
        (swapped, "its result is wrong"),
        (not_a_number, "its result is wrong"),
    ],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_packed_product_takes_the_place_of_a_kernel_that_fails(monkeypatch, kernel, reason, dtype):
    """int8 with a scale a row; HAZARDS 18 holds on this path too."""
    monkeypatch.setattr(kernels, "triton_launch", kernel)
    product = kernels.triton_product()
    assert off(product, layer_of(INT8), 3, dtype) <= TOLERANCE[dtype]
    sentence = f"Products run in torch's packed product (not in the Triton kernel: {reason})."
    assert product.which() == sentence
    assert off(product, layer_of("int8 one scale"), 1, dtype) <= TOLERANCE[dtype]
    assert product.which() == sentence


@pytest.mark.parametrize("name", [INT4, "int8 groups of 5", "int3 affine", "int4 symmetric"])
def test_what_no_packed_product_takes_is_dequantized(monkeypatch, name):
    monkeypatch.setattr(kernels, "triton_launch", broken)
    product = kernels.triton_product()
    assert off(product, layer_of(name), 3, "float32") <= TOLERANCE["float32"]
    assert product.which() == (
        "Weights are dequantized first (not in the Triton kernel: RuntimeError: no such GPU; "
        "not in torch's packed product: ValueError: takes 8 bits and a scale a row)."
    )


def test_dequantized_where_neither_works(monkeypatch):
    """An old torch has no packed product on CUDA."""
    monkeypatch.setattr(kernels, "triton_launch", broken)
    monkeypatch.setattr(kernels, "packed_product", swapped)
    product = kernels.triton_product()
    assert off(product, layer_of(INT8), 3, "float32") <= TOLERANCE["float32"]
    assert product.which() == (
        "Weights are dequantized first (not in the Triton kernel: RuntimeError: no such GPU; "
        "not in torch's packed product: its result is wrong)."
    )


def test_without_triton(monkeypatch):
    """The module works without the package; the sentence names it."""
    for cached in (kernels.triton_kernels, kernels.triton_int8, kernels.triton_int4):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    product = kernels.triton_product()
    assert off(product, layer_of(INT8), 1, "float32") <= TOLERANCE["float32"]
    assert "torch's packed product" in product.which() and "triton" in product.which()


def test_packed_product_sums_in_float32():
    """HAZARDS 18: 5 million times the scale is 100 in float16; HAZARDS 2: so is a scale that float16 can't hold."""
    even = nn.Linear(400, 1, bias=False)
    even.weight.data.fill_(0.0025)
    x = torch.full((1, 400), 100.0, dtype=torch.float16)
    assert kernels.packed_product(x, QuantizedLinear(even)).item() == 100.0
    even.weight.data.fill_(1e-6)  # scale 8e-9
    assert kernels.packed_product(x, QuantizedLinear(even)).item() == pytest.approx(0.04, rel=1e-3)


def test_group_of_odd_size_in_bytes_is_refused_and_dequantized():
    """A byte would hold weights of two groups (HAZARDS 8, 10)."""
    layer = QuantizedLinear(nn.Linear(15, 3, bias=False), Scheme(4, 5, True))
    with pytest.raises(ValueError, match="group_size=5 is odd"):
        kernels.triton_launch(torch.ones(1, 15), layer)
    product = kernels.triton_product()
    assert off(product, layer, 2, "float32") <= TOLERANCE["float32"]
    assert product.which().startswith("Weights are dequantized first") and "is odd" in product.which()


def test_another_width_is_refused():
    """The kernel would read what lies beside x."""
    with pytest.raises(ValueError, match="x has width 340, not 341"):
        kernels.triton_launch(torch.ones(1, 340), layer_of(INT8))


def test_trial_leaves_the_random_numbers_alone(monkeypatch):
    """The first product of a seeded run draws nothing."""
    monkeypatch.setattr(kernels, "triton_launch", broken)
    layer, x = layer_of(INT8), torch.ones(1, 341)
    before = torch.get_rng_state()
    kernels.triton_product()(x, layer)
    assert torch.equal(torch.get_rng_state(), before)


@torch.inference_mode()
def test_inside_a_quantized_layer(monkeypatch):
    """Few rows go through the product, more do not; a model decodes in inference mode."""
    right = Right()
    monkeypatch.setattr(kernels, "triton_launch", right)
    layer = layer_of(INT4)
    layer.product = kernels.triton_product(most_rows=2)
    for rows, calls in ((2, 2), (3, 2)):  # the trial and the product
        x = torch.randn(rows, layer.in_features)
        assert torch.allclose(layer(x), x @ layer.weight().T, atol=1e-4)
        assert len(right.shapes) == calls


# --- on a GPU --------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_equality_on_cuda(name):
    """Every dtype, 1 to 64 rows; the kernel itself runs, no fallback (HAZARDS 17)."""
    layer, product = layer_of(name, "cuda"), kernels.triton_product()
    for dtype in TOLERANCE:
        for rows in (1, 3, 16, 17, 64):
            assert off(product, layer, rows, dtype) <= TOLERANCE[dtype]
    assert product.which() == "Products run in the Triton kernel."


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17])
def test_fallbacks_on_cuda(monkeypatch, rows):
    """HAZARDS 17: one row and a width of 20 are no exception."""
    monkeypatch.setattr(kernels, "triton_launch", broken)
    layer = QuantizedLinear(nn.Linear(20, 7, bias=False)).to("cuda")
    for dtype in TOLERANCE:
        assert off(kernels.triton_product(), layer, rows, dtype) <= TOLERANCE[dtype]
