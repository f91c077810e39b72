"""Chapter 1, Quantization. Generated from the notebooks; never edit this file.

Edit the cells tagged ``export`` and run ``make export``:

    notebooks/01_quantization.ipynb
    notebooks/deep_dives/01a_kernels.ipynb
"""

import functools

import numpy as np
import torch


@functools.cache
def one_row_kernel():
    """Compiled y = scale · (w x): w (out, in) int8 or float32, x (in,).

    scale and y (out,) float32. Compiled once for each dtype of w. Needs
    numba. Source: chapter 1, §1.6.
    """
    from course_utils.machine import configure_numba

    configure_numba()
    from numba import njit, prange

    @njit(parallel=True, fastmath=True)
    def product(w, scale, x, y):
        for o in prange(w.shape[0]):  # threads share the rows
            row, total = w[o], np.float32(0)
            for i in range(row.shape[0]):
                total += np.float32(row[i]) * x[i]  # kept in a register
            y[o] = total * scale[o]

    return product


import types

from course_utils.chapters.quantization import QuantizedLinear, Scheme


@functools.cache
def int4_row_kernel():
    """Compiled y = W x for two 4-bit codes a byte in groups of 64.

    words (out, groups, 8) int32: the packed bytes; scale and zero (out,
    groups); x (groups · 64,). Source: deep dive 1A, §1A.3.
    """
    from course_utils.machine import configure_numba

    configure_numba()
    from numba import njit, prange
    f32, i32 = np.float32, np.int32

    @njit(fastmath=True)
    def divided(x):  # v (groups, k, word) and Σ x of each group
        v, sums = np.empty((len(x) // 64, 8, 8), f32), np.zeros(len(x) // 64)
        for g in range(len(v)):
            for i in range(64):
                sums[g] += x[64 * g + i]
                k = i % 8  # the topmost nibble is shifted, not divided
                v[g, k, i // 8] = x[64 * g + i] / f32(1 << 4 * k % 28)
        return v, sums.astype(f32)

    @njit(parallel=True, fastmath=True)
    def product(words, scale, zero, x, y):
        v, sums = divided(x)
        for o in prange(words.shape[0]):
            s, z, total = scale[o], zero[o], f32(0)
            for g in range(s.shape[0]):
                total -= s[g] * f32(z[g]) * sums[g]
            for g in range(s.shape[0]):
                part = f32(0)
                for i in range(8):  # known when compiled: no loop is left
                    w = words[o, g, i]
                    part += (
                        f32(w & i32(0xF)) * v[g, 0, i]
                        + f32(w & i32(0xF0)) * v[g, 1, i]
                        + f32(w & i32(0xF00)) * v[g, 2, i]
                        + f32(w & i32(0xF000)) * v[g, 3, i]
                        + f32(w & i32(0xF0000)) * v[g, 4, i]
                        + f32(w & i32(0xF00000)) * v[g, 5, i]
                        + f32(w & i32(0xF000000)) * v[g, 6, i]
                        + f32((w >> i32(28)) & i32(15)) * v[g, 7, i]
                    )
                total += s[g] * part
            y[o] = total

    return product


@functools.cache
def few_rows_kernels():
    """Compiled y = x W.T for several rows: (codes, nibbles, floats).

    Codes: q (out, in) int8 or uint8, scale and zero (out, groups). Nibbles:
    the same, two codes a byte. Floats: w (out, in). x (rows, in) and
    y (rows, out) are float32. Source: deep dive 1A, §1A.4.
    """
    from course_utils.machine import configure_numba

    configure_numba()
    from numba import njit, prange
    f32, block = np.float32, 16  # rows of W that share a buffer

    @njit(fastmath=True)
    def dots(w, x, y, o):
        for r in range(0, len(x) - 3, 4):
            a, b, c, d = x[r], x[r + 1], x[r + 2], x[r + 3]
            s, t, u, v = f32(0), f32(0), f32(0), f32(0)
            for i in range(w.shape[0]):
                s += w[i] * a[i]
                t += w[i] * b[i]
                u += w[i] * c[i]
                v += w[i] * d[i]
            y[r, o], y[r + 1, o], y[r + 2, o], y[r + 3, o] = s, t, u, v
        for r in range(len(x) // 4 * 4, len(x)):
            a, s = x[r], f32(0)
            for i in range(w.shape[0]):
                s += w[i] * a[i]
            y[r, o] = s

    @njit(parallel=True, fastmath=True)
    def codes(q, scale, zero, x, y):
        size = q.shape[1] // scale.shape[1]
        for b in prange((len(q) + block - 1) // block):
            w = np.empty(q.shape[1], f32)
            for o in range(b * block, min(len(q), b * block + block)):
                for g in range(scale.shape[1]):
                    row, out = q[o, g * size :][:size], w[g * size :][:size]
                    for i in range(size):
                        out[i] = (f32(row[i]) - zero[o, g]) * scale[o, g]
                dots(w, x, y, o)

    @njit(parallel=True, fastmath=True)
    def nibbles(q, scale, zero, x, y):
        size = x.shape[1] // scale.shape[1]
        for b in prange((len(q) + block - 1) // block):
            w = np.empty(2 * q.shape[1], f32)  # one too many for odd rows
            for o in range(b * block, min(len(q), b * block + block)):
                for i in range(q.shape[1]):
                    w[2 * i] = f32(q[o, i] & 15)
                    w[2 * i + 1] = f32(q[o, i] >> 4)
                for g in range(scale.shape[1]):
                    out = w[g * size :][:size]
                    for i in range(size):
                        out[i] = (out[i] - f32(zero[o, g])) * scale[o, g]
                dots(w[: x.shape[1]], x, y, o)

    @njit(parallel=True, fastmath=True)
    def floats(w, x, y):
        for o in prange(len(w)):
            dots(w[o], x, y, o)

    return codes, nibbles, floats


def stored(layer) -> tuple:
    """(kind, arrays) of a layer as the CPU kernels take them, no copies.

    Kinds: "one scale" (a row has one), "words" (4 bits in groups of 64),
    "codes" and "nibbles" (any other), "float32" (KernelLinear).
    """
    if not hasattr(layer, "q"):  # a learner's own class will do
        return "float32", (layer.weight.detach().numpy(),)
    q, scale = layer.q.numpy(), layer.scale
    scale = scale.expand(len(q), scale.shape[1]).numpy()
    zero = layer.zero_point
    if zero is None and layer.bits != 4 and scale.shape[1] == 1:
        return "one scale", (q, np.ascontiguousarray(scale[:, 0]))
    if zero is None:
        zero = np.full(scale.shape, 8 if layer.bits == 4 else 0, np.uint8)
    else:
        zero = zero.expand(scale.shape).numpy()
    groups = scale.shape[1]
    if layer.bits == 4 and layer.in_features == 64 * groups:
        return "words", (q.view(np.int32).reshape(-1, groups, 8), scale, zero)
    return "nibbles" if layer.bits == 4 else "codes", (q, scale, zero)


class CPUProduct:
    """product(x, layer) on a CPU: see cpu_product."""

    def __init__(self, most_rows: int):
        self.most_rows = most_rows

    def __call__(self, x, layer):
        kind, arrays = stored(layer)
        y = torch.empty(len(x), layer.out_features)
        x32, out = x.detach().float().contiguous().numpy(), y.numpy()
        if kind == "words" and len(x) > 1:
            kind, arrays = "nibbles", (layer.q.numpy(), *arrays[1:])
        if len(x) == 1 and kind == "words":
            int4_row_kernel()(*arrays, x32[0], out[0])
        elif len(x) == 1 and kind == "one scale":
            one_row_kernel()(*arrays, x32[0], out[0])
        elif len(x) == 1 and kind == "float32":
            one_row_kernel()(arrays[0], no_scale(len(out[0])), x32[0], out[0])
        elif kind == "float32":
            few_rows_kernels()[2](*arrays, x32, out)
        elif kind == "one scale":
            q, scale = arrays[0], arrays[1][:, None]
            zero = np.zeros(scale.shape, np.uint8)
            few_rows_kernels()[0](q, scale, zero, x32, out)
        else:
            few_rows_kernels()[kind == "nibbles"](*arrays, x32, out)
        return y.to(x.dtype)


@functools.cache
def no_scale(rows: int):
    """(rows,) float32 ones, for weights that are float32 already."""
    return np.ones(rows, np.float32)


def cpu_product(most_rows: int = 64) -> CPUProduct:
    """product(x, layer) of x (rows, in) on a CPU, in x's dtype.

    layer: QuantizedLinear or KernelLinear, of any size and number of groups.
    most_rows: beyond that many rows a QuantizedLinear dequantizes first.
    Needs numba. Source: deep dive 1A.
    """
    return CPUProduct(most_rows)


class KernelLinear(torch.nn.Module):
    """nn.Linear with float32 weights whose few rows take our kernel.

    linear: the layer, whose weight is shared. product: cpu_product(…).
    """

    def __init__(self, linear, product=None):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = linear.weight.shape
        self.product = cpu_product() if product is None else product

    def forward(self, x):
        """(…, in) → (…, out)."""
        rows = x.shape[:-1].numel()
        few = 0 < rows <= self.product.most_rows
        if not few or self.weight.dtype != torch.float32:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        y = self.product(x.reshape(rows, self.in_features), self)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


@functools.cache
def block_kernels(kind: str):
    """Compiled (before, after): a block's work on either side of attention.

    kind: what the block's layers store, "one scale", "words" or "float32".
    Source: deep dive 1A, §1A.5.
    """
    from numba import njit
    f32 = np.float32
    kernel = int4_row_kernel() if kind == "words" else one_row_kernel()

    if kind == "words":
        @njit
        def multiply(layer, x, y):
            kernel(layer[0], layer[1], layer[2], x, y)
    else:
        @njit
        def multiply(layer, x, y):
            kernel(layer[0], layer[1], x, y)

    @njit(fastmath=True)
    def norm(x, weight, eps):
        total = f32(0)
        for i in range(len(x)):
            total += x[i] * x[i]
        return x * weight * f32(1 / np.sqrt(total / len(x) + eps))

    @njit(fastmath=True)
    def before(x, weight, eps, qkv, cos, sin, heads, y):
        multiply(qkv, norm(x, weight, eps), y)
        half = len(cos) // 2
        for h in range(heads):  # rotate queries and keys
            a, b = y[2 * h * half :][:half], y[(2 * h + 1) * half :][:half]
            for i in range(half):
                u, v = a[i], b[i]
                a[i] = u * cos[i] + v * sin[i]
                b[i] = v * cos[half + i] + u * sin[half + i]

    @njit(fastmath=True)
    def after(attended, x, out, weight, eps, gate_up, down, width, y):
        multiply(out, attended, y)
        y += x
        both, z = np.empty(2 * width, f32), np.empty(len(y), f32)
        multiply(gate_up, norm(y, weight, eps), both)
        gate, up = both[:width], both[width:]
        for i in range(width):  # SiLU(gate) · up
            gate[i] *= up[i] / (f32(1) + np.exp(-gate[i]))
        multiply(down, gate, z)
        y += z

    return before, after


class FusedBlock(torch.nn.Module):
    """A decoder's block in two compiled calls, where one token is decoded.

    Anything else (more rows, no cache) goes to the block itself.
    """

    def __init__(self, block, eps: float):
        super().__init__()
        self.block, self.eps = block, eps
        attention, mlp = block.attention, block.mlp
        four = attention.qkv, attention.out, mlp.gate_up, mlp.down
        kinds, arrays = zip(*map(stored, four), strict=True)
        known = ("one scale", "words", "float32")
        plain = all(layer.bias is None for layer in four)
        if len({*kinds}) > 1 or kinds[0] not in known or not plain or (
            attention.q_norm is not None
        ):
            raise ValueError(
                f"layers of kinds {kinds}, with biases or with QK norm are not"
                " fused; use one scheme: float32, int8, or int4 in groups of 64"
            )
        if kinds[0] == "float32":
            arrays = [(w, no_scale(len(w))) for (w,) in arrays]
        self.arrays, self.kernels = arrays, block_kernels(kinds[0])
        norms = block.attention_norm, block.mlp_norm
        self.norms = [norm.weight.detach().numpy() for norm in norms]
        heads = attention.heads, attention.kv_heads, attention.kv_heads
        self.shape = attention.layer, attention.head_dim, heads

    def forward(self, x, cos, sin, cache):
        if cache is None or x.numel() != x.shape[-1]:
            return self.block(x, cos, sin, cache)
        (before, after), (first, second) = self.kernels, self.norms
        qkv, out, gate_up, down = self.arrays
        layer, head_dim, heads = self.shape
        flat = x.view(-1).numpy()
        made, y = torch.empty(1, sum(heads), 1, head_dim), torch.empty_like(x)
        before(flat, first, self.eps, qkv, cos.view(-1).numpy(),
               sin.view(-1).numpy(), heads[0] + heads[1], made.view(-1).numpy())
        q, k, v = made.split(heads, dim=1)
        attended = cache.attend(layer, q, k, v).reshape(-1).numpy()
        after(attended, flat, out, second, self.eps, gate_up, down,
              len(gate_up[0]) // 2, y.view(-1).numpy())
        return y


def fuse_(decoder):
    """Fuse every block in place and return the decoder (deep dive 1A).

    Do it last: the blocks keep the arrays of their layers. Needs numba, a
    CPU, float32, and layers of one kind (KernelLinear or QuantizedLinear).
    ValueError elsewhere, and nothing is changed.
    """
    if decoder.device.type != "cpu" or decoder.dtype != torch.float32:
        raise ValueError(
            f"{decoder.dtype} on {decoder.device}: fused blocks take float32 on"
            " a CPU; load the decoder so"
        )
    eps = decoder.config.rms_norm_eps
    fused = [FusedBlock(block, eps) for block in decoder.blocks]
    decoder.blocks = torch.nn.ModuleList(fused)
    return decoder


@functools.cache
def triton_int8():
    """Triton kernel: y = x @ ((q - zero) * scale).T, x (rows, n_in), q (n_out,
    n_in), scale and zero (or None) (n_out, groups). Source: deep dive 1A."""
    from triton import jit
    from triton import language as tl

    @jit
    def int8(x, q, scale, zero, y, rows, n_out, n_in, groups, size, cuts, step,
             ROWS: tl.constexpr, RUNS: tl.constexpr, LONG: tl.constexpr):
        row = tl.program_id(0) * ROWS
        outs = tl.program_id(1) * 8 + tl.arange(0, 8)
        line = outs.to(tl.int64)[:, None]  # a matrix may pass 2**31 values
        totals = (tl.zeros((8, RUNS), tl.float32),) * ROWS
        for first in range(0, groups * cuts, RUNS):
            run = first + tl.arange(0, RUNS)
            group = run // cuts
            inside = (run % cuts * LONG)[:, None] + tl.arange(0, LONG)[None, :]
            at = group[:, None] * size + inside  # (RUNS, LONG)
            real = (inside < size) & (group < groups)[:, None]
            place = line * step + group[None, :]  # (8, RUNS)
            ok = (outs < n_out)[:, None] & (group < groups)[None, :]
            byte = q + line[:, :, None] * n_in + at[None]
            byte = tl.load(byte, ok[:, :, None] & real[None], 0)
            w = byte.to(tl.float32)  # before the subtraction: bytes wrap
            if zero is not None:
                w -= tl.load(zero + place, ok, 0)[:, :, None]
            w *= tl.load(scale + place, ok, 0)[:, :, None]
            for r in tl.static_range(ROWS):
                here = (row + r) * n_in + at
                mask = real & (here < rows * n_in)
                v = tl.load(x + here, mask, 0)[None]
                total = totals[r] + tl.sum(w * v, 2)  # float32
                totals = totals[:r] + (total,) + totals[r + 1 :]
        for r in tl.static_range(ROWS):
            here = (row + r) * n_out + outs
            mask = (outs < n_out) & (here < rows * n_out)
            tl.store(y + here, tl.sum(totals[r], 1), mask)
    return int8


@functools.cache
def triton_int4():
    """The same for nibbles: byte k of q holds inputs 2k (low) and 2k + 1."""
    from triton import jit
    from triton import language as tl

    @jit
    def int4(x, q, scale, zero, y, rows, n_out, n_in, groups, size, cuts, step,
             ROWS: tl.constexpr, RUNS: tl.constexpr, LONG: tl.constexpr):
        row = tl.program_id(0) * ROWS
        outs = tl.program_id(1) * 8 + tl.arange(0, 8)
        line = outs.to(tl.int64)[:, None]
        totals = (tl.zeros((8, RUNS), tl.float32),) * ROWS
        for first in range(0, groups * cuts, RUNS):
            run = first + tl.arange(0, RUNS)
            group = run // cuts
            inside = (run % cuts * LONG)[:, None] + tl.arange(0, LONG)[None, :]
            byte = group[:, None] * size + inside  # (RUNS, LONG)
            at = 2 * byte  # the input of its low nibble
            real = (inside < size) & (group < groups)[:, None]
            place = line * step + group[None, :]  # (8, RUNS)
            ok = (outs < n_out)[:, None] & (group < groups)[None, :]
            byte = q + line[:, :, None] * groups * size + byte[None]
            byte = tl.load(byte, ok[:, :, None] & real[None], 0)
            s = tl.load(scale + place, ok, 0)[:, :, None]
            z = 8 if zero is None else tl.load(zero + place, ok, 0)[:, :, None]
            low = ((byte & 15).to(tl.float32) - z) * s
            high = ((byte >> 4).to(tl.float32) - z) * s
            for r in tl.static_range(ROWS):
                here = (row + r) * n_in + at
                mask = real & (here < rows * n_in)
                even = tl.load(x + here, mask, 0)[None]
                odd = tl.load(x + here + 1, mask & (at + 1 < n_in), 0)[None]
                total = totals[r] + tl.sum(low * even + high * odd, 2)
                totals = totals[:r] + (total,) + totals[r + 1 :]
        for r in tl.static_range(ROWS):
            here = (row + r) * n_out + outs
            mask = (outs < n_out) & (here < rows * n_out)
            tl.store(y + here, tl.sum(totals[r], 1), mask)
    return int4


@functools.cache
def triton_kernels():
    """The compiled kernels: .int8 and .int4. Needs triton."""
    return types.SimpleNamespace(int8=triton_int8(), int4=triton_int4())


def triton_launch(x, layer):
    """y (rows, out) in x's dtype from the Triton kernel for this layer.

    x (rows, in) float32, float16 or bfloat16 on CUDA; layer: QuantizedLinear.
    ValueError for another width, and for packed groups of odd size.
    """
    if x.shape[1] != layer.in_features:
        raise ValueError(f"x has width {x.shape[1]}, not {layer.in_features}")
    y = x.new_empty(len(x), layer.out_features)
    packed, groups = layer.bits == 4, layer.scale.shape[1]
    size = layer.in_features // groups  # inputs that share a scale
    if packed and size % 2 and groups > 1:
        raise ValueError(f"group_size={size} is odd: a byte has two scales")
    size = (size + 1) // 2 if packed else size  # now bytes
    long = min(64, 1 << (size - 1).bit_length())
    tile = min(16, 1 << (len(x) - 1).bit_length())  # rows of x a program
    shared = layer.out_features, groups  # a scale for all: stride 0
    scale, zero = layer.scale.expand(shared), layer.zero_point
    zero = None if zero is None else zero.expand(shared)
    kernel = triton_kernels().int4 if packed else triton_kernels().int8
    kernel[-(-len(x) // tile), -(-layer.out_features // 8)](
        x.contiguous(), layer.q, scale, zero, y, *y.shape, x.shape[1], groups,
        size, -(-size // long), scale.stride(0), ROWS=tile,
        RUNS=256 // long, LONG=long, enable_fp_fusion=True,
    )
    return y


def packed_product(x, layer):
    """Torch's own product for int8 with a scale a row; else ValueError."""
    shared = layer.scale.shape[1] == 1 and layer.zero_point is None
    if layer.bits != 8 or not shared:
        raise ValueError("takes 8 bits and a scale a row")
    scale = layer.scale.expand(layer.out_features, 1).flatten().contiguous()
    x32 = x.float().contiguous()  # a sum in float16 may overflow
    return torch.ops.aten._weight_int8pack_mm(x32, layer.q, scale).to(x.dtype)


def dequantized_product(x, layer):
    """The weights in x's dtype first, then the product."""
    return torch.nn.functional.linear(x, layer.weight(x.dtype))


def trial(product, x, layer) -> str:
    """Try product(x, layer) on a 4 × 4 case like this one: "" or what failed.

    Like: bits, zero points, one group or more, odd or even, dtype, device.
    """
    groups = layer.scale.shape[1]
    size = None if groups == 1 else 2 - layer.in_features // groups % 2
    affine = layer.zero_point is not None
    w = torch.arange(16.0, device=x.device).view(4, 4) - 7
    linear = types.SimpleNamespace(weight=w, bias=None)
    small = QuantizedLinear(linear, Scheme(layer.bits, size, affine))
    ones = torch.ones(4, 4, dtype=x.dtype, device=x.device).tril()
    right = ones.float() @ small.weight().T
    try:
        off = (product(ones, small).float() - right).abs().max()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return "" if off <= 0.02 * right.abs().max() else "its result is wrong"


class TritonProduct:
    """product(x, layer) for QuantizedLinear on CUDA; see triton_product."""

    def __init__(self, most_rows: int):
        self.most_rows, self.trials = most_rows, {}
        self.sentence = "No product has run yet."

    def __call__(self, x, layer):
        failed = []
        for name, product in (
            ("the Triton kernel", triton_launch),
            ("torch's packed product", packed_product),
        ):
            why = f" ({'; '.join(failed)})" if failed else ""
            reason = self.tried(product, x, layer)
            if not reason:
                self.sentence = f"Products run in {name}{why}."
                return product(x, layer)
            failed.append(f"not in {name}: {reason}")
        self.sentence = f"Weights are dequantized first ({'; '.join(failed)})."
        return dequantized_product(x, layer)

    def tried(self, product, x, layer) -> str:
        """The result of `trial`, kept for later layers of the same kind."""
        groups, affine = layer.scale.shape[1], layer.zero_point is not None
        kind = layer.bits, affine, groups == 1, layer.in_features // groups % 2
        key = product.__name__, x.dtype, x.device, *kind
        if key not in self.trials:
            self.trials[key] = trial(product, x, layer)
        return self.trials[key]

    def which(self) -> str:
        """The path of the last product, and why not another: one sentence."""
        return self.sentence


def triton_product(most_rows: int = 16) -> TritonProduct:
    """Product of few rows with a QuantizedLinear on CUDA: the Triton kernel,
    else torch's packed product, else dequantized. Source: deep dive 1A."""
    return TritonProduct(most_rows)


def product_for(device):
    """The product of few rows for a device: cpu_product, triton_product.

    None for any other device: layers then dequantize first.
    """
    makers = {"cpu": cpu_product, "cuda": triton_product}
    make = makers.get(torch.device(device).type)
    return None if make is None else make()
