"""The CPU kernels of deep dive 1A: every product is the dequantized one, whatever the size, dtype and layout."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_utils.chapters.kv_cache import KVCache, StaticKVCache
from course_utils.chapters.quantization import (
    QuantizedLinear,
    Scheme,
    quantize_,
    replace_linears_,
)
from course_utils.chapters.quantization_kernels import (
    KernelLinear,
    cpu_product,
    few_rows_kernels,
    fuse_,
    int4_row_kernel,
    one_row_kernel,
    product_for,
)
from course_utils.generation import generate

pytest.importorskip("numba")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_ROWS = 64
ROWS = (1, 2, 3, 8, 33, 64, 65)
SIZES = ((7, 13), (1, 1), (577, 63), (1000, 24), (5, 192), (130, 64))  # (out, in)


def kinds(into):
    """One Scheme of each kind that has a kernel, groups fitting the width."""
    group = next(size for size in (64, 24, 21, 13, 1) if into % size == 0)
    return {
        "int8 per row": Scheme(8),
        "int8 per tensor": Scheme(8, None, False, True),
        "int8 per group": Scheme(8, group),
        "int4 per group": Scheme(4, group, True),
    }


def random_weight(out, into, seed=0):
    return torch.randn(out, into, generator=torch.Generator().manual_seed(seed))


def linear_of(weight, bias=False, dtype=torch.float32):
    out, into = weight.shape
    linear = nn.Linear(into, out, bias=bias).requires_grad_(False)
    linear.weight.copy_(weight)
    if bias:
        linear.bias.copy_(100 * random_weight(1, out, seed=3)[0])
    return linear.to(dtype)


def random_input(*shape, seed=7, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def refuse(*_, **__):
    raise AssertionError(
        "torch's product, or a dequantized weight, where the kernel should have read the codes"
    )


def check(layer, x, y, rounded_weight=False):
    """y against the product in float64, within what its sum and its dtype's rounding may lose.

    rounded_weight: the weight was dequantized to x's dtype first, as for many rows.
    """
    weight = layer.weight(torch.float32).double()
    exact = F.linear(x.double(), weight, None if layer.bias is None else layer.bias.double())
    assert y.dtype == x.dtype and y.shape == exact.shape
    eps = torch.finfo(x.dtype).eps
    # codes · x are summed before the zero point is taken away, so that what cancels may be as large as the row's widest
    widest = weight.abs().amax(1)
    allowed = 2 * (x.shape[-1] + 8) * 2.0**-24 * F.linear(x.double().abs(), widest[:, None].expand_as(weight))
    allowed = allowed + eps * exact.abs() + 1e-30
    if layer.bias is not None:
        allowed = allowed + eps * layer.bias.double().abs() + eps * (exact - layer.bias.double()).abs()
    if rounded_weight:
        allowed = allowed + 4 * eps * F.linear(x.double().square(), weight.square()).sqrt()
    over = ((y.double() - exact).abs() / allowed).max().item()
    assert over <= 1, f"{over:.2g} times the rounding that is allowed"


# --- equal to the dequantized product --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_size_and_number_of_rows(kind, size, monkeypatch):
    """Up to 64 rows the kernel reads the codes; with 65 the weight is dequantized; both are the same product."""
    layer = QuantizedLinear(linear_of(random_weight(*size)), kinds(size[1])[kind], cpu_product(MOST_ROWS))
    for rows in ROWS:
        x = random_input(rows, size[1], seed=rows)
        with monkeypatch.context() as patch:
            if rows <= MOST_ROWS:
                patch.setattr(layer, "weight", refuse)
                patch.setattr(F, "linear", refuse)
            y = layer(x)
        check(layer, x, y)


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_dtype(kind, dtype, bias, monkeypatch):
    """x keeps its dtype, and is rounded once, at the end; the bias is added once."""
    linear = linear_of(random_weight(37, 192), bias, dtype)
    layer = QuantizedLinear(linear, kinds(192)[kind], cpu_product(MOST_ROWS))
    for rows in ROWS:
        x = random_input(rows, 192, seed=rows, dtype=dtype)
        with monkeypatch.context() as patch:
            if rows <= MOST_ROWS:
                patch.setattr(layer, "weight", refuse)
                patch.setattr(F, "linear", refuse)
            y = layer(x)
        check(layer, x, y, rounded_weight=rows > MOST_ROWS)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(4, 64),  # symmetric nibbles
        Scheme(4, None, True),
        Scheme(4, 3, True),  # a group ends within a byte
        Scheme(4, 1, True),
        Scheme(3, 64, True),
        Scheme(8, 64, True),
        Scheme(8, None, True),  # one scale a row, and a zero point
        Scheme(3, None, True),
        Scheme(2),
        Scheme(6, 96),
        Scheme(4, None, False, True),
    ],
    ids=str,
)
def test_other_schemes_are_right_too(scheme):
    """With a kernel of their own or without: a product never answers for codes that it does not know."""
    layer = QuantizedLinear(linear_of(random_weight(21, 192)), scheme, cpu_product())
    for rows in (1, 2, 9, 64):
        x = random_input(rows, 192, seed=rows)
        check(layer, x, layer(x))


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (2, 3), (2, 1, 4), (5, 13), (3, 64)])
def test_leading_dimensions(kind, leading):
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), kinds(64)[kind], cpu_product())
    x = random_input(*leading, 64)
    check(layer, x, layer(x))


LAYOUTS = {
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "a slice of wider rows": lambda x: F.pad(x, (3, 5), value=9.0)[:, 3:-5],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "behind an offset": lambda x: F.pad(x.flatten(), (1, 0), value=9.0)[1:].view_as(x),
}


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_x_as_it_lies_in_memory(kind, layout, dtype):
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), kinds(64)[kind], cpu_product())
    for rows in (1, 5):
        x = LAYOUTS[layout](random_input(rows, 64, dtype=dtype))
        kept = x.clone()
        check(layer, x, layer(x))
        assert torch.equal(x, kept)


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("rows", [1, 5])
def test_codes_that_are_slices(kind, rows):
    """Weights of a decoder may be parts of one large buffer: behind an offset, or with a stride between their rows."""
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), kinds(64)[kind], cpu_product())
    x, q, scale = random_input(rows, 64), layer.q.clone(), layer.scale.clone()
    layer.scale = F.pad(scale, (0, 0, 1, 2), value=9.0)[1:-2]
    layer.q = F.pad(q, (0, 0, 3, 1), value=7)[3:-1]
    check(layer, x, layer(x))
    layer.q = F.pad(q, (5, 2), value=7)[:, 5:-2]
    layer.scale = F.pad(scale, (1, 1), value=9.0)[:, 1:-1]
    check(layer, x, layer(x))


# --- extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_codes(kind, rows, dtype):
    """Weights at both ends of the range, 1536 of one sign in a row: sums of codes leave int8 and int16 at once."""
    weight = torch.ones(6, 1536)
    weight[1], weight[2, ::2], weight[3, 768:] = -1, -1, -1
    weight[4, 1:], weight[5] = 0, 1 / 127
    layer = QuantizedLinear(linear_of(weight), kinds(1536)[kind], cpu_product())
    for x in (torch.ones(rows, 1536), torch.full((rows, 1536), -40.0), random_input(rows, 1536)):
        x = x.to(dtype)
        check(layer, x, layer(x))


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows_and_rows_of_zeros(kind, dtype):
    """HAZARDS 1 and 2: scales of 8e-9 are read in float32; a row of zeros gives exactly 0."""
    weight = random_weight(4, 64) * torch.tensor([[1.0], [1e-6], [0.0], [1e-20]])
    layer = QuantizedLinear(linear_of(weight), kinds(64)[kind], cpu_product())
    for rows in (1, 4):
        x = 1000 * random_input(rows, 64)
        x = x.to(dtype)
        y = layer(x)
        assert not bool(y[:, 2].any())
        if not kind.endswith("tensor"):
            assert bool((y[:, 1] != 0).all())
        if dtype != torch.float16:  # where 1e-17 is no number of its own
            check(layer, x, y)


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("rows", [1, 5])
def test_a_nan_is_not_lost(kind, rows):
    """A product that swallowed it would hide the fault that ``generation.check_finite`` reports."""
    layer = QuantizedLinear(linear_of(random_weight(8, 64)), kinds(64)[kind], cpu_product())
    x = random_input(rows, 64)
    x[-1, 3] = float("nan")
    y = layer(x)
    assert bool(y[-1].isnan().all()) and bool(y[:-1].isfinite().all())


@pytest.mark.parametrize("kind", kinds(64))
def test_a_row_does_not_depend_on_its_batch_mates(kind):
    """HAZARDS 19: beyond the order of a sum, nothing of the other rows reaches this one."""
    layer = QuantizedLinear(linear_of(random_weight(19, 192)), kinds(192)[kind], cpu_product())
    a = random_input(1, 192)
    alone = layer(a)
    for mates in (1, 2, 7, 32, 63):
        rows = torch.cat((1000 * random_input(mates, 192, seed=mates), a))
        torch.testing.assert_close(layer(rows)[-1:], alone, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(layer(rows.flip(0))[:1], alone, atol=1e-4, rtol=1e-5)


# --- how it is called ------------------------------------------------------------------------------------------------


def test_most_rows():
    assert cpu_product().most_rows == 64
    product = cpu_product(most_rows=3)
    assert product.most_rows == 3
    layer = QuantizedLinear(linear_of(random_weight(8, 64)), "int8", product)
    for rows in (1, 3, 4, 70):
        x = random_input(rows, 64)
        check(layer, x, layer(x))


@pytest.mark.parametrize("kind", kinds(64))
def test_the_product_leaves_the_bias_to_the_layer(kind):
    layer = QuantizedLinear(linear_of(random_weight(19, 64), bias=True), kinds(64)[kind])
    x = random_input(2, 64)
    y = cpu_product()(x, layer)
    torch.testing.assert_close(y, F.linear(x, layer.weight(torch.float32)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_in_every_gradient_mode(kind, mode):
    """Tensors born under inference_mode, and layers made of weights that ask for gradients, as torch's do."""
    linear = linear_of(random_weight(19, 64), bias=True).requires_grad_(True)
    with mode():
        layer = QuantizedLinear(linear, kinds(64)[kind], cpu_product())
        for rows in (1, 5):
            x = random_input(rows, 64)
            check(layer, x, layer(x).detach())
    with torch.inference_mode():
        x = random_input(2, 64)
        check(layer, x, layer(x))


def test_results_are_not_overwritten_by_the_next_call():
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), "int8", cpu_product())
    first, second = random_input(2, 64), random_input(2, 64, seed=8)
    y = layer(first)
    kept = y.clone()
    layer(second)
    assert torch.equal(y, kept)


def test_layers_can_be_copied():
    """A decoder is copied to compare it with its like; compiled code must not stand in the way."""
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), "int8", cpu_product())
    x = random_input(1, 64)
    layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


FACTORIES = (one_row_kernel, int4_row_kernel, few_rows_kernels)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_kernels_are_compiled_once(factory):
    assert factory() is factory()


def test_numba_shares_the_cpus_with_torch(tmp_path):
    """DESIGN 8: whichever kernel comes first, it has numba's threads configured, so that two pools do not compete."""
    program = (
        "import importlib\n"
        "from course_utils import machine\n"
        "import course_utils.chapters.quantization_kernels as kernels\n"
        "calls = []\n"
        "machine.configure_numba = lambda: calls.append(1)\n"
        f"for name in {[factory.__name__ for factory in FACTORIES]}:\n"
        "    calls.clear()\n"
        "    getattr(importlib.reload(kernels), name)()\n"  # as in a new process: nothing is made yet
        "    print(name, bool(calls))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    wanted = [f"{factory.__name__} True" for factory in FACTORIES]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, wanted, "")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("out", [1, 2, 17])
def test_the_one_row_kernel_by_hand(rows, out):
    """[127, -127, 1] times [1, 2, 3] is -124, times the row's scale; the same with float32 weights."""
    w = torch.tensor([[127, -127, 1]], dtype=torch.int8).repeat(out, 1)
    scale = 1 + torch.arange(out, dtype=torch.float32)
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.empty(out)
    for weight in (w, w.float()):
        for _ in range(rows):
            one_row_kernel()(weight.numpy(), scale.numpy(), x.numpy(), y.numpy())
        assert torch.equal(y, -124 * scale)


def test_product_for_a_device():
    """The CPU's kernel for the CPU; None where there is none, so that torch's own product serves."""
    product = product_for("cpu")
    assert product.most_rows >= 1 and product_for(torch.device("cpu")).most_rows == product.most_rows
    layer = QuantizedLinear(linear_of(random_weight(19, 64)), "int8", product)
    x = random_input(1, 64)
    check(layer, x, layer(x))
    assert product_for("meta") is None


# --- float32 weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_kernel_in_float32(size, bias, monkeypatch):
    """Few rows never reach torch's own product: it is the other kernel of the comparison."""
    linear = linear_of(random_weight(*size), bias)
    layer = KernelLinear(linear)
    for leading in [(rows,) for rows in ROWS] + [(), (2, 3)]:
        x = random_input(*leading, size[1])
        with monkeypatch.context() as patch:
            if x[..., 0].numel() <= 8:
                patch.setattr(F, "linear", refuse)
            y = layer(x)
        want = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert y.dtype == torch.float32 and y.shape == want.shape
        torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_as_it_lies_in_memory(layout):
    linear = linear_of(random_weight(19, 64))
    x = LAYOUTS[layout](random_input(5, 64))
    want = F.linear(x, linear.weight)
    torch.testing.assert_close(KernelLinear(linear)(x), want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(KernelLinear(linear)(x[:1]), want[:1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "part",
    [lambda w: F.pad(w, (0, 0, 3, 1), value=9.0)[3:-1], lambda w: F.pad(w, (5, 2), value=9.0)[:, 5:-2]],
    ids=["offset", "stride"],
)
def test_float32_weights_that_are_slices(part):
    weight = random_weight(19, 64)
    linear = linear_of(weight)
    linear.weight = nn.Parameter(part(weight), requires_grad=False)
    for rows in (1, 5):
        x = random_input(rows, 64)
        torch.testing.assert_close(KernelLinear(linear)(x), F.linear(x, weight), atol=1e-4, rtol=1e-5)


def test_the_float32_product_serves_few_rows_only():
    class Spy:
        most_rows, calls = 3, 0

        def __call__(self, x, layer):
            self.calls += 1
            return cpu_product()(x, layer)

    linear, spy = linear_of(random_weight(19, 64), bias=True), Spy()
    layer = KernelLinear(linear, spy)
    for rows, calls in ((1, 1), (3, 2), (4, 2), (70, 2)):
        x = random_input(rows, 64)
        torch.testing.assert_close(layer(x), linear(x), atol=1e-4, rtol=1e-5)
        assert spy.calls == calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_weights_of_half_the_width_take_torchs_product(dtype, rows):
    linear = linear_of(random_weight(19, 64), bias=True, dtype=dtype)
    x = random_input(rows, 64, dtype=dtype)
    assert torch.equal(KernelLinear(linear)(x), linear(x))


def test_float32_weights_are_shared_with_the_layer():
    """The tied embedding's too: the same kernel in float32 costs no memory."""
    linear = linear_of(random_weight(19, 64))
    assert KernelLinear(linear).weight.data_ptr() == linear.weight.data_ptr()


def test_float32_weights_that_ask_for_gradients():
    linear = nn.Linear(64, 19)
    x = random_input(1, 64)
    with torch.inference_mode():
        torch.testing.assert_close(KernelLinear(linear)(x), linear(x), atol=1e-4, rtol=1e-5)


# --- x of a wrong width: torch refuses it, and so must the kernels, which would read past its end -----------------------


@pytest.mark.parametrize("shape", [(65,), (63,), (1, 65), (2, 65), (3, 63), (2, 32), (1, 128), (128,)])
@pytest.mark.parametrize("kind", [*kinds(64), "float32"])
def test_x_of_a_wrong_width(kind, shape):
    linear = linear_of(random_weight(20, 64))
    layer = (
        KernelLinear(linear) if kind == "float32" else QuantizedLinear(linear, kinds(64)[kind], cpu_product())
    )
    with pytest.raises((ValueError, RuntimeError)):
        layer(random_input(*shape))


# --- in a decoder ----------------------------------------------------------------------------------------------------


def tokens_of(decoder, length):
    return torch.randint(
        0, decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(1)
    ).tolist()


def in_one_buffer(decoder):
    """The same weights, each a slice of one large buffer, as a file that is read at once leaves them."""
    tensors = {p.data_ptr(): p for p in decoder.parameters()}.values()
    buffer, place = torch.full((1 + sum(p.numel() for p in tensors),), 9.0), 1
    for parameter in tensors:
        part = buffer[place : place + parameter.numel()].view_as(parameter)
        part.copy_(parameter)
        parameter.data = part
        place += parameter.numel()
    return decoder


@pytest.mark.parametrize("scheme", ["int8", "int8 tensor", "int4"])
@pytest.mark.parametrize("head", ["alone", "copied", "shared"])
def test_the_decoder_writes_the_same_text(tiny_decoder, scheme, head):
    """Prompts of 5 and of 70 tokens: the second's prefill has too many rows for the kernel, its decode has one."""
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    plain, fast = in_one_buffer(tiny_decoder(**sizes)), in_one_buffer(tiny_decoder(**sizes))
    quantize_(plain, scheme, head)
    quantize_(fast, scheme, head, product=cpu_product())
    for length in (5, 70):
        prompt = tokens_of(plain, length)
        want = generate(plain, prompt, 16, cache=KVCache(plain.config))
        assert generate(fast, prompt, 16, cache=KVCache(fast.config)) == want
        with torch.inference_mode():
            tokens = torch.tensor([prompt])
            torch.testing.assert_close(fast(tokens), plain(tokens), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("head", ["alone", "copied"])
def test_the_float32_decoder_writes_the_same_text(tiny_decoder, head):
    plain, fast = tiny_decoder(qkv_bias=True), in_one_buffer(tiny_decoder(qkv_bias=True))
    replace_linears_(fast, KernelLinear, head)
    assert isinstance(fast.blocks[0].attention.qkv, KernelLinear)
    assert isinstance(fast.lm_head, KernelLinear) == (head == "copied")
    for length in (5, 70):
        prompt = tokens_of(plain, length)
        want = generate(plain, prompt, 16, cache=KVCache(plain.config))
        assert generate(fast, prompt, 16, cache=KVCache(fast.config)) == want


# --- fused blocks ----------------------------------------------------------------------------------------------------


def prepared(decoder, kind):
    """The decoder with layers of one kind that can be fused, the same but for the product used."""
    if kind == "float32":
        replace_linears_(decoder, KernelLinear)
    else:
        quantize_(decoder, kind, product=cpu_product())
    return decoder


@pytest.mark.parametrize("kind", ["float32", "int8", "int8 tensor", "int4"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    "cache", [KVCache, lambda config: StaticKVCache(config, 64)], ids=["growing", "static"]
)
def test_fused_blocks_write_the_same_text(tiny_decoder, kind, heads, cache):
    """Grouped heads, both caches; a prompt (many rows) and no cache at all go to the block itself."""
    sizes = dict(
        hidden_size=64, intermediate_size=128, head_dim=16, num_heads=heads[0], num_kv_heads=heads[1]
    )
    plain, fused = prepared(tiny_decoder(**sizes), kind), prepared(tiny_decoder(**sizes), kind)
    assert fuse_(fused) is fused
    prompt = tokens_of(plain, 6)
    want = generate(plain, prompt, 20, cache=cache(plain.config))
    assert generate(fused, prompt, 20, cache=cache(fused.config)) == want
    assert generate(fused, prompt, 8) == want[:8]
    one, other = cache(plain.config), cache(fused.config)
    with torch.inference_mode():
        for token in prompt:  # token by token from the first: positions 0, 1, 2, … are rotated in the kernel
            fed = torch.tensor([[token]])
            torch.testing.assert_close(fused(fed, other), plain(fed, one), atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(other.keys + other.values, one.keys + one.values, strict=True):
        torch.testing.assert_close(ours[:, :, :6], theirs[:, :, :6], atol=1e-4, rtol=1e-4)


def test_fused_blocks_serve_several_rows(tiny_decoder):
    """A batch of two decodes through the block itself, and gives what the plain decoder gives."""
    plain, fused = prepared(tiny_decoder(), "int8"), fuse_(prepared(tiny_decoder(), "int8"))
    tokens = torch.tensor([tokens_of(plain, 5), tokens_of(plain, 6)[1:]])
    one, other = KVCache(plain.config, 2), KVCache(fused.config, 2)
    with torch.inference_mode():
        for piece in tokens.split((3, 1, 1), dim=1):
            torch.testing.assert_close(fused(piece, other), plain(piece, one), atol=1e-4, rtol=1e-4)


def test_fused_blocks_use_the_models_epsilon(tiny_decoder):
    changes = dict(rms_norm_eps=0.5)
    plain, fused = prepared(tiny_decoder(**changes), "int8"), fuse_(prepared(tiny_decoder(**changes), "int8"))
    token = torch.tensor([[5]])
    with torch.inference_mode():
        want, got = plain(token, KVCache(plain.config)), fused(token, KVCache(fused.config))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes, prepare, named",
    [
        (dict(qkv_bias=True), lambda decoder: prepared(decoder, "int8"), "bias"),
        (dict(qk_norm=True), lambda decoder: prepared(decoder, "int8"), "QK norm"),
        ({}, lambda decoder: prepared(decoder, "int8").to(torch.bfloat16), "bfloat16.*float32"),
        ({}, lambda decoder: quantize_(decoder, Scheme(8, 16)) and decoder, "codes"),
        ({}, lambda decoder: quantize_(decoder, Scheme(4, 16, True)) and decoder, "nibbles"),
    ],
    ids=["bias", "QK norm", "bfloat16", "int8 in groups", "int4 in groups of 16"],
)
def test_what_cannot_be_fused_stays_as_it_was(tiny_decoder, changes, prepare, named):
    decoder = prepare(tiny_decoder(**changes))
    blocks = list(decoder.blocks)
    with pytest.raises(ValueError, match=named):
        fuse_(decoder)
    assert list(decoder.blocks) == blocks


# --- the module ------------------------------------------------------------------------------------------------------


def test_import_compiles_nothing(tmp_path):
    """HAZARDS 29: neither numba nor triton nor bitsandbytes; they come with the first factory that is called."""
    heavy = "{'numba', 'triton', 'bitsandbytes', 'transformers', 'matplotlib'}"
    program = (
        f"import sys, course_utils.chapters.quantization_kernels\nprint(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
