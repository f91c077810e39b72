"""Quantized layers and products of the libraries keep their contract on the installed versions, or say why not."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from course_utils import rivals
from course_utils.generation import generate
from course_utils.rivals import (
    Unavailable,
    bitsandbytes_,
    packed_int4,
    packed_int8,
    quantize_dynamic_,
    stored_bytes,
)
from course_utils.rivals.quantization import _hidden
from tests.conftest import PlainCache
from tests.test_decoder import tokens

# Relative error in norm that x's dtype, used for the scales too, may cause against the dequantized product.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def error(found, expected) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def weights_of(layer: nn.Module) -> torch.Tensor:
    return layer.weight().dequantize()


def needs_dynamic() -> None:
    try:
        quantize_dynamic_(tiny_for_probe())
    except Unavailable as reason:
        pytest.skip(str(reason))


def needs_bitsandbytes() -> None:
    try:
        bitsandbytes_(tiny_for_probe(), "int8")
    except Unavailable as reason:
        pytest.skip(str(reason))


def tiny_for_probe():
    from tests.conftest import tiny_decoder

    return tiny_decoder()


def size(*shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


# --- quantize_dynamic ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_dynamic_replaces_every_linear_layer_and_leaves_the_tied_embedding(tiny_decoder):
    """HAZARDS 12, 13: the embedding is the same tensor, bit for bit; the head's int8 matrix comes on top of it."""
    needs_dynamic()
    plain, decoder, x = tiny_decoder(qkv_bias=True), tiny_decoder(qkv_bias=True), tokens()
    address = decoder.embedding.weight.data_ptr()
    done = quantize_dynamic_(decoder)
    assert done.decoder is decoder and not decoder.training
    assert decoder.embedding.weight.data_ptr() == address
    assert torch.equal(decoder.embedding.weight, plain.embedding.weight)
    left = [name for name, part in decoder.named_modules() if type(part) is nn.Linear]
    assert left == []
    for ours, theirs in (
        (plain.lm_head, decoder.lm_head),
        (plain.blocks[1].mlp.down, decoder.blocks[1].mlp.down),
    ):
        step = ours.weight.abs().max() / 127.5
        assert (weights_of(theirs) - ours.weight).abs().max() <= step * 1.01  # one scale for the whole matrix
        assert len(weights_of(theirs).unique()) <= 256
    assert 0 < error(decoder(x), plain(x)) < 0.2
    assert generate(decoder, [1, 2, 3], 5, cache=PlainCache()) == generate(decoder, [1, 2, 3], 5)


def test_dynamic_counts_its_bytes(tiny_decoder):
    """HAZARDS 13: float32 embedding + one byte a weight + 8 bytes a matrix; a tied model may well not shrink by 4."""
    needs_dynamic()
    done = quantize_dynamic_(tiny_decoder(num_layers=1))
    matrices = [(64, 32), (32, 32), (96, 32), (32, 48)]
    norms = 4 * 3 * 32
    embedding = 4 * 97 * 32
    assert done.before == embedding + 4 * size(*matrices) + norms
    assert done.after == embedding + size(*matrices, (97, 32)) + 8 * 5 + norms


def test_tied_head_of_the_known_sizes(tiny_decoder):
    """HAZARDS 13: vocabulary 1000, width 64: 256,000 bytes; with an int8 head beside the embedding 320,000 and scale."""
    needs_dynamic()
    decoder = tiny_decoder(vocab_size=1000, hidden_size=64)
    decoder.blocks = nn.ModuleList()
    rest = 4 * 64  # the last norm
    done = quantize_dynamic_(decoder)
    assert (done.before - rest, done.after - rest) == (256_000, 320_000 + 8)


def test_dynamic_shows_no_warning_and_returns_them(tiny_decoder):
    """HAZARDS 27: the deprecation is text for the chapter, and no error where warnings are errors."""
    needs_dynamic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = quantize_dynamic_(tiny_decoder())
    assert len(set(done.notes)) == len(done.notes)
    assert all("\n" not in note and note.split(":")[0].endswith("Warning") for note in done.notes)
    if torch.__version__.startswith("2.13."):
        assert any("torch.ao.quantization is deprecated" in note for note in done.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dynamic_refuses_half_precision_before_it_converts(tiny_decoder, dtype):
    """FACTS 1.2: such a model converts without complaint and fails when it is fed."""
    decoder = tiny_decoder().to(dtype)
    with pytest.raises(Unavailable, match=f"{str(dtype)[6:]}.*dtype='float32'"):
        quantize_dynamic_(decoder)
    assert type(decoder.lm_head) is nn.Linear


def test_dynamic_refuses_another_device(tiny_decoder):
    with pytest.raises(Unavailable, match="is on meta"):
        quantize_dynamic_(tiny_decoder().to("meta"))


@pytest.mark.parametrize(
    ("supported", "chosen"), [(["none", "qnnpack", "onednn"], "qnnpack"), (["none"], None)]
)
def test_dynamic_takes_the_first_real_engine(tiny_decoder, monkeypatch, supported, chosen):
    """HAZARDS 28: an engine "none" is replaced by the first real entry; without one, one sentence."""
    stand_in = types.SimpleNamespace(engine="none", supported_engines=supported)
    monkeypatch.setattr(torch.backends, "quantized", stand_in)
    decoder = tiny_decoder()
    if chosen is None:
        with pytest.raises(Unavailable, match="without an engine"):
            quantize_dynamic_(decoder)
        assert type(decoder.lm_head) is nn.Linear
    else:
        quantize_dynamic_(decoder)
        assert stand_in.engine == chosen


def test_engine_that_is_set_stays(tiny_decoder, monkeypatch):
    """HAZARDS 28: only "none" is replaced."""
    stand_in = types.SimpleNamespace(engine="onednn", supported_engines=["qnnpack", "onednn"])
    monkeypatch.setattr(torch.backends, "quantized", stand_in)
    quantize_dynamic_(tiny_decoder())
    assert stand_in.engine == "onednn"


def test_dynamic_that_was_removed_is_one_sentence(tiny_decoder, monkeypatch):
    """HAZARDS 27: the removal will come."""
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", types.ModuleType("torch.ao.quantization"))
    with pytest.raises(Unavailable, match="any more"):
        quantize_dynamic_(tiny_decoder())
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    with pytest.raises(Unavailable, match="any more"):
        quantize_dynamic_(tiny_decoder())


def test_dynamic_failure_inside_torch_is_one_sentence(tiny_decoder, monkeypatch):
    """HAZARDS 28: "Didn't find engine for operation quantized::linear_prepack" is no traceback."""

    def convert(*args, **kwargs):
        raise RuntimeError(
            "Didn't find engine for operation quantized::linear_prepack NoQEngine\nException raised"
        )

    monkeypatch.setattr(rivals.quantization, "_quantize_dynamic", lambda: convert)
    with pytest.raises(Unavailable, match="linear_prepack NoQEngine$") as caught:
        quantize_dynamic_(tiny_decoder())
    assert caught.value.__suppress_context__


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.1), ("nf4", 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_bitsandbytes_replaces_the_layers_of_the_blocks(tiny_decoder, kind, worst, dtype):
    """HAZARDS 12: embedding and head are untouched, as in transformers' integration."""
    needs_bitsandbytes()
    plain, decoder = (tiny_decoder(qkv_bias=True).to(dtype) for _ in range(2))
    x = tokens()
    done = bitsandbytes_(decoder, kind)
    assert done.decoder is decoder
    assert decoder.lm_head.weight is decoder.embedding.weight and type(decoder.lm_head) is nn.Linear
    assert torch.equal(decoder.embedding.weight, plain.embedding.weight)
    kinds = {
        type(part).__name__ for block in decoder.blocks for part in block.modules() if hasattr(part, "weight")
    }
    assert kinds == {"Linear8bitLt" if kind == "int8" else "Linear4bit", "RMSNorm"}
    assert torch.equal(decoder.blocks[0].attention.qkv.bias, plain.blocks[0].attention.qkv.bias)
    assert 0 < error(decoder(x), plain(x)) < worst
    assert generate(decoder, [1, 2, 3], 5, cache=PlainCache()) and decoder.dtype == dtype


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.inference_mode()
def test_bitsandbytes_head_on_demand_is_a_copy(tiny_decoder, kind, dtype):
    """HAZARDS 12, 13: even then the tied embedding is bit-identical, and the bytes come on top of it."""
    needs_bitsandbytes()
    plain, decoder, alone = (tiny_decoder().to(dtype) for _ in range(3))
    done = bitsandbytes_(decoder, kind, head=True)
    assert type(decoder.lm_head) is not nn.Linear
    assert torch.equal(decoder.embedding.weight, plain.embedding.weight)
    hidden = decoder.hidden(tokens())
    assert 0 < error(decoder.head(hidden), plain.head(hidden)) < 0.2
    assert done.after > bitsandbytes_(alone, kind).after + 97 * 32 / 2


def test_bitsandbytes_counts_scales_and_tables(tiny_decoder):
    """HAZARDS 22: 8 bits a weight and a float32 scale a row; 4 bits, an 8-bit scale a block of 64, and the tables."""
    needs_bitsandbytes()
    matrices = [(64, 32), (32, 32), (96, 32), (32, 48)]
    rest = 4 * 97 * 32 + 4 * 3 * 32  # embedding, norms
    done = bitsandbytes_(tiny_decoder(num_layers=1), "int8")
    assert done.before == rest + 4 * size(*matrices)
    assert done.after == rest + size(*matrices) + 4 * sum(rows for rows, _ in matrices)
    done = bitsandbytes_(tiny_decoder(num_layers=1), "nf4")
    blocks = size(*matrices) // 64
    tables = len(matrices) * 4 * (16 + 256 + 1 + 1)  # code, code of the scales, their own scale, their mean
    assert done.after == rest + size(*matrices) // 2 + blocks + tables


@torch.inference_mode()
def test_outlier_columns_make_rows_depend_on_each_other(tiny_decoder):
    """HAZARDS 19: with LLM.int8's threshold another row's outlier moves columns of this row; with none it can't."""
    needs_bitsandbytes()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 32, generator=generator)
    x[0, 1, 3] = 20.0
    changed = {}
    for threshold in (0.0, 6.0):
        layer = bitsandbytes_(tiny_decoder(), "int8", threshold).decoder.blocks[0].attention.out
        changed[threshold] = float((layer(x)[:, :1] - layer(x[:, :1])).abs().max())
    assert changed[0.0] == 0.0 and changed[6.0] > 1e-4


def test_unknown_kind(tiny_decoder):
    with pytest.raises(ValueError, match="'int2'.*int8, nf4"):
        bitsandbytes_(tiny_decoder(), "int2")


def test_bitsandbytes_that_is_missing_or_broken_is_one_sentence(tiny_decoder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(Unavailable, match="not installed: pip install bitsandbytes"):
        bitsandbytes_(tiny_decoder())
    (tmp_path / "bitsandbytes.py").write_text("raise OSError('libbroken.so: no such file\\nmore')")
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="can't start: libbroken.so: no such file$"):
        bitsandbytes_(tiny_decoder())


def test_bitsandbytes_that_lacks_a_kernel_leaves_the_decoder_whole(tiny_decoder, monkeypatch):
    """A decoder is never left half converted: a layer is tried, its product included, before any is replaced."""

    class Broken(nn.Module):
        def forward(self, x):
            raise NotImplementedError("no kernel for this device\nand a long list")

    needs_bitsandbytes()
    monkeypatch.setattr(rivals.quantization, "_int8_layer", lambda *args: Broken())
    decoder = tiny_decoder()
    with pytest.raises(Unavailable, match="no working int8 on cpu here: no kernel for this device$"):
        bitsandbytes_(decoder)
    assert not any(isinstance(part, Broken) for part in decoder.modules())


def test_import_of_bitsandbytes_is_quiet_and_asks_no_hub(tmp_path):
    """HAZARDS 29: the package that fetches kernels from a hub can't be seen, and nothing reaches stderr."""
    (tmp_path / "kernels.py").write_text("open('asked', 'w')\ndef get_kernel(*a, **k): raise OSError")
    (tmp_path / "bitsandbytes.py").write_text(
        "import logging, warnings\n"
        "__version__ = '0'\n"
        "try:\n    from kernels import get_kernel\n"
        "except Exception:\n    logging.getLogger('bitsandbytes.backends').warning('no kernels')\n"
        "warnings.warn('loud')\n"
    )
    code = (
        "from tests.conftest import tiny_decoder; from course_utils.rivals import bitsandbytes_, Unavailable\n"
        "try: bitsandbytes_(tiny_decoder())\nexcept Unavailable as reason: print(reason)\n"
        "import kernels"  # afterwards it is there as before
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join((str(tmp_path), root))
    first = code.removesuffix("import kernels")
    for script, asked in ((first, False), (code, True)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("bitsandbytes 0 has no working int8 on cpu here: ")
        assert (tmp_path / "asked").exists() == asked


def test_hidden_module_comes_back():
    kept = types.ModuleType("kernels")
    sys.modules["kernels"] = kept
    try:
        with _hidden("kernels"), pytest.raises(ImportError):
            import kernels  # noqa: F401
        assert sys.modules["kernels"] is kept
    finally:
        del sys.modules["kernels"]


def test_real_libraries_say_nothing_on_stderr():
    """HAZARDS 27, 29: conversion and first forward of all three, in a fresh process with all warnings on."""
    code = (
        "import torch; from tests.conftest import tiny_decoder; from course_utils.rivals import *\n"
        "for convert in (quantize_dynamic_, lambda d: bitsandbytes_(d, 'int8'), lambda d: bitsandbytes_(d, 'nf4')):\n"
        "    try:\n"
        "        decoder = convert(tiny_decoder()).decoder\n"
        "        with torch.inference_mode(): decoder(torch.tensor([[1, 2, 3]]))\n"
        "    except Unavailable as reason: print(reason)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, cwd=root
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_converting_asks_no_hub(tiny_decoder, hub_requests):
    """HAZARDS 29, 101."""
    needs_bitsandbytes()
    for kind in ("int8", "nf4"):
        decoder = bitsandbytes_(tiny_decoder(), kind).decoder
        with torch.inference_mode():
            decoder(tokens())
    assert hub_requests == []


# --- packed products -------------------------------------------------------------------------------------------------


def int8_case(out_features, in_features, scales=None):
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    q = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
    scale = torch.rand(scales or out_features, 1, generator=generator) / 100 + 1e-3
    return q, scale


def int4_case(out_features, in_features, group_size):
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    groups = (out_features, in_features // group_size)
    q = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, generator=generator)
    scale = torch.rand(groups, generator=generator) / 100 + 1e-3
    zero_point = torch.randint(0, 16, groups, dtype=torch.uint8, generator=generator)
    w = (q.float().view(*groups, group_size) - zero_point[..., None]) * scale[..., None]
    return (q, scale, zero_point, group_size), w.view(out_features, in_features)


def packed_or_skip(make, *arguments):
    try:
        return make(*arguments)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize(
    "sizes", [(1, 1), (3, 10), (7, 33), (33, 64), (65, 96), (97, 70), (192, 576)], ids=str
)
def test_packed_int8_is_the_dequantized_product(dtype, rows, sizes):
    """Odd sizes included where they are safe; where not, the sentence names the size (torch 2.13 crashed there)."""
    q, scale = int8_case(*sizes)
    multiply = packed_or_skip(packed_int8, q, scale)
    x = torch.randn(2, rows, sizes[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    if sizes[1] % rivals.quantization._int8_step(dtype):
        with pytest.raises(
            Unavailable, match=f"in_features={sizes[1]} in {str(dtype)[6:]}: a multiple of 32"
        ):
            multiply(x)
        return
    y = multiply(x)
    assert y.dtype == dtype and y.shape == (2, rows, sizes[0])
    assert error(y, x.double() @ (q.double() * scale.double()).T) < TOLERANCE[dtype]


def test_bfloat16_at_odd_widths_is_refused():
    """The kernel reads past the end of rows: wrong sums at width 20 in torch 2.13, and a crash of the process at 33."""
    q, scale = int8_case(8, 20)
    multiply = packed_or_skip(packed_int8, q, scale)
    with pytest.raises(Unavailable, match="in_features=20 in bfloat16"):
        multiply(torch.ones(1, 20, dtype=torch.bfloat16))


def test_packed_int8_takes_one_scale_for_all_and_a_view_of_x():
    q, scale = int8_case(16, 64, scales=1)
    multiply = packed_or_skip(packed_int8, q, scale)
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)).T  # not contiguous
    assert error(multiply(x), x.double() @ (q.double() * scale.double()).T) < 3e-6
    assert multiply(x[0]).shape == (16,)


def test_packed_int8_names_what_does_not_fit():
    q, scale = int8_case(8, 16)
    with pytest.raises(ValueError, match=r"\(out, in\) int8; got \(8, 16\) uint8"):
        packed_int8(q.to(torch.uint8), scale)
    with pytest.raises(ValueError, match=r"scale has shape \(8, 2\)"):
        packed_int8(q, torch.ones(8, 2))
    multiply = packed_or_skip(packed_int8, q, scale)
    with pytest.raises(ValueError, match=r"\(\.\.\., 16\).*got \(1, 15\)"):
        multiply(torch.ones(1, 15))
    with pytest.raises(ValueError, match="got .* float64"):
        multiply(torch.ones(1, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize(
    "sizes", [(16, 32, 32), (48, 64, 32), (80, 192, 64), (576, 576, 64), (64, 256, 128)], ids=str
)
def test_packed_int4_is_the_dequantized_product(dtype, rows, sizes):
    """The asymmetric convention (q - zero_point) · scale, translated to the product's own (q - 8) · scale + zero."""
    case, w = int4_case(*sizes)
    multiply = packed_or_skip(packed_int4, *case)
    x = torch.randn(2, rows, sizes[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    y = multiply(x)
    assert y.dtype == dtype and y.shape == (2, rows, sizes[0])
    assert error(y, x.double() @ w.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize("sizes", [(17, 64, 32), (8, 64, 32), (16, 48, 16), (16, 96, 96)], ids=str)
def test_packed_int4_names_the_sizes_it_refuses(sizes):
    case, _ = int4_case(*sizes)
    packed_or_skip(packed_int4, *int4_case(16, 32, 32)[0])
    with pytest.raises(Unavailable, match=f"got out_features={sizes[0]}, group_size={sizes[2]}$"):
        packed_int4(*case)


@pytest.mark.parametrize("sizes", [(17, 64, 32), (16, 48, 16)], ids=str)
def test_torch_still_refuses_them(sizes):
    """What packed_int4 says of sizes is torch's own rule, not ours: where torch learns them, the wrapper shall too."""
    (q, scale, _, group_size), _ = int4_case(*sizes)
    packed_or_skip(packed_int4, *int4_case(16, 32, 32)[0])
    both = torch.stack((scale, scale), dim=-1).transpose(0, 1).contiguous()
    with pytest.raises(RuntimeError, match="16|qGroupSize"):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        torch.ops.aten._weight_int4pack_mm_for_cpu(torch.ones(1, sizes[1]), packed, group_size, both)


def test_packed_int4_names_what_does_not_fit():
    (q, scale, zero_point, group_size), _ = int4_case(16, 64, 32)
    with pytest.raises(ValueError, match="in_features=64 is not a multiple of group_size=48"):
        packed_int4(q, scale, zero_point, 48)
    with pytest.raises(ValueError, match=r"zero_point has shape \(16, 1\).*\(16, 2\)"):
        packed_int4(q, scale, zero_point[:, :1], group_size)
    with pytest.raises(ValueError, match="holds 0 to 16"):
        packed_int4(torch.full_like(q, 16).fill_diagonal_(0), scale, zero_point, group_size)
    with pytest.raises(ValueError, match="integers"):
        packed_int4(q.float(), scale, zero_point, group_size)


def test_private_products_that_are_gone_or_changed_are_one_sentence(monkeypatch):
    q, scale = int8_case(8, 16)
    case, _ = int4_case(16, 32, 32)
    packed_or_skip(packed_int8, q, scale)

    def other(*arguments):
        raise RuntimeError("aten::_weight_int8pack_mm() expected at most 2 arguments\nDeclaration: ...")

    ops = types.SimpleNamespace(_weight_int8pack_mm=other)
    monkeypatch.setattr(torch.ops, "aten", ops)
    with pytest.raises(Unavailable, match="expected at most 2 arguments$"):
        packed_int8(q, scale)(torch.ones(1, 16))
    with pytest.raises(Unavailable, match="has no aten._convert_weight_to_int4pack_for_cpu"):
        packed_int4(*case)
    del ops._weight_int8pack_mm
    with pytest.raises(Unavailable, match="has no aten._weight_int8pack_mm"):
        packed_int8(q, scale)


def test_stored_bytes_counts_every_storage_once():
    """HAZARDS 13: a shared tensor, and two views of one storage, count once; what is computed anew does not."""
    shared = nn.Linear(4, 6, bias=True)
    other = nn.Linear(4, 6, bias=False)
    other.weight = shared.weight
    model = nn.ModuleList([shared, other])
    model.register_buffer("kept", torch.zeros(10, dtype=torch.float16))
    model.register_buffer("view", model.kept[2:4])
    model.register_buffer("computed", torch.zeros(99), persistent=False)
    assert stored_bytes(model) == 4 * 24 + 4 * 6 + 20
