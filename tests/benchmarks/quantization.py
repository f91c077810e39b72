"""Decoding with quantized weights against the libraries: ``python -m tests.benchmarks.quantization [--json]``.

One interleaved race on the CPU: cached greedy decoding of one sequence, 32 tokens after a prompt of 128; null where a
library is missing.

ms_V                          median ms per token of variant V; mb_V: MB of its weights
int8_over_quantize_dynamic    speed of our int8 (per row, the head's matrix shared, all kernels of deep dive 1A: each block
                              in two compiled calls) over torch's
int8_over_float32             … over the same decoder with torch's float32 products
int8_over_float32_same_kernel … over float32 weights in the same kernel: what the bytes alone give
int8_over_llamacpp_q8         … over llama.cpp with Q8_0 weights
int4_over_int8                speed of our int4 (groups of 64, zero points) over our int8
…_unfused_…                   the same with one compiled call for each product and torch for the rest
ppl_ratio_int8, …_int4_rtn    perplexity over float32's, 20,000 tokens, context 512, stride 512
kernel_gb_per_s, read_gb_per_s, kernel_bandwidth_fraction   the one-row int8 product on the head's matrix, and the
                              fastest plain read, both out of more memory than the caches hold

A ratio is the median of the rounds' ratios. Every variant's text is checked against float32's before it is timed.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_utils import checkpoints
from course_utils.catalog import CATALOG
from course_utils.chapters.kv_cache import StaticKVCache
from course_utils.chapters.quantization import QuantizedLinear, quantize_, replace_linears_
from course_utils.chapters.quantization_kernels import KernelLinear, fuse_, product_for
from course_utils.datasets import evaluation_text
from course_utils.decoder import Decoder, DecoderConfig
from course_utils.evaluation import perplexity
from course_utils.generation import greedy
from course_utils.machine import POOL_BYTES, _reads
from course_utils.rivals import (
    Unavailable,
    bitsandbytes_,
    gguf_in,
    llama_cpp,
    quantize_dynamic_,
    stored_bytes,
    transformers_generate,
    transformers_model,
)
from course_utils.timing import Timing, race, ratio
from tests.benchmarks.common import Bench, start

RATIOS = {  # key: (fast, slow)
    "int8_over_quantize_dynamic": ("int8_fused", "quantize_dynamic"),
    "int8_over_float32": ("int8_fused", "float32"),
    "int8_over_float32_same_kernel": ("int8_fused", "float32_same_kernel_fused"),
    "int8_over_llamacpp_q8": ("int8_fused", "llamacpp_q8"),
    "int4_over_int8": ("int4_fused", "int8_fused"),
    "int8_unfused_over_quantize_dynamic": ("int8", "quantize_dynamic"),
    "int8_unfused_over_float32": ("int8", "float32"),
    "int8_unfused_over_float32_same_kernel": ("int8", "float32_same_kernel"),
    "int8_unfused_over_llamacpp_q8": ("int8", "llamacpp_q8"),
    "int4_unfused_over_int8_unfused": ("int4", "int8"),
}


@dataclass
class Variant:
    """``decode(count)`` writes the first token after the prompt and ``count`` more; it may be called again and again.

    prefills: it feeds the prompt at every call, so that its time for no further token must be taken off.
    """

    decode: Callable[[int], list[int]]
    nbytes: int
    prefills: bool = False


def fused(decoder: Decoder) -> Decoder:
    """Our variants with each block in two compiled calls, as deep dive 1A ends. Raises Unavailable where it can't be."""
    try:
        return fuse_(decoder)
    except ValueError as reason:
        raise Unavailable(str(reason)) from None


def clone(decoder: Decoder) -> Decoder:
    """Modules of its own, the tensors shared: layers can be replaced without a second copy of the weights."""
    tensors = (*decoder.parameters(), *decoder.buffers())
    return copy.deepcopy(decoder, {id(tensor): tensor for tensor in tensors})


# --- variants --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def cached(decoder: Decoder, prompt: list[int], room: int) -> Variant:
    """Greedy decoding with a static cache that holds the prompt."""
    cache = StaticKVCache(decoder.config, len(prompt) + room, dtype=decoder.dtype)
    first = int(greedy(decoder(torch.tensor([prompt]), cache, logits_to_keep=1)[0, -1]))

    @torch.inference_mode()
    def decode(count: int) -> list[int]:
        cache.truncate(len(prompt))
        found = [first]
        for _ in range(count):
            logits = decoder(torch.tensor([found[-1:]]), cache, logits_to_keep=1)
            found.append(int(greedy(logits[0, -1])))
        return found

    return Variant(decode, stored_bytes(decoder))


def builders(bench: Bench, prompt: list[int], room: int) -> dict[str, Callable[[], Variant]]:
    """Functions that build one variant each; float32 comes first, the others are held against it."""
    decoder = bench.decoder

    def cast(dtype: torch.dtype) -> Variant:
        return cached(copy.deepcopy(decoder).to(dtype), prompt, room)

    def converted(convert: Callable) -> Variant:
        return cached(convert(clone(decoder)).decoder, prompt, room)

    def ours(scheme: str, finish: Callable[[Decoder], Decoder] = lambda d: d) -> Variant:
        changed = clone(decoder)
        report = quantize_(changed, scheme, head_of(bench), product_for("cpu"))
        left = [line.name for line in report.layers if not line.quantized and "blocks" in line.name]
        if left:
            raise SystemExit(f"{scheme}: layers left as they were: {left[:3]}")
        return cached(finish(changed), prompt, room)

    def same_kernel(finish: Callable[[Decoder], Decoder] = lambda d: d) -> Variant:
        changed = clone(decoder)
        replace_linears_(changed, KernelLinear, "copied")
        return cached(finish(changed), prompt, room)

    def transformers() -> Variant:
        model = transformers_model(decoder)
        return Variant(
            lambda count: transformers_generate(model, prompt, 1 + count), stored_bytes(model), prefills=True
        )

    return {
        "float32": lambda: cached(decoder, prompt, room),
        "transformers_float32": transformers,
        "bfloat16": lambda: cast(torch.bfloat16),
        "float16": lambda: cast(torch.float16),
        "quantize_dynamic": lambda: converted(quantize_dynamic_),
        "bitsandbytes_int8": lambda: converted(lambda d: bitsandbytes_(d, "int8")),
        "bitsandbytes_nf4": lambda: converted(lambda d: bitsandbytes_(d, "nf4")),
        "float32_same_kernel": same_kernel,
        "int8": lambda: ours("int8"),
        "int4": lambda: ours("int4"),
        "float32_same_kernel_fused": lambda: same_kernel(fused),
        "int8_fused": lambda: ours("int8", fused),
        "int4_fused": lambda: ours("int4", fused),
        "llamacpp_q8": lambda: in_llama_cpp(bench, "Q8_0", prompt, room),
        "llamacpp_f16": lambda: in_llama_cpp(bench, "F16", prompt, room),
        "llamacpp_f32": lambda: in_llama_cpp(bench, "F32", prompt, room),
    }


def in_llama_cpp(bench: Bench, kind: str, prompt: list[int], room: int) -> Variant:
    """The very weights, from the GGUF file they were converted from, written anew as ``kind`` into the cache folder."""
    entry = CATALOG.get(bench.decoder.name)
    if entry is None or entry.file is None:
        raise Unavailable("no GGUF file of this model for llama.cpp")
    source = checkpoints.fetch(entry.name) / entry.file
    path = gguf_in(kind, source, checkpoints.cache_folder() / "gguf")
    model = llama_cpp(path, torch.get_num_threads(), len(prompt) + room)
    first = model.prefill(prompt)
    return Variant(
        lambda count: [first] + model.decode(first, count, len(prompt)),
        path.stat().st_size,
    )


# How many of float32's first tokens a variant must write too. The others round so much that texts part at once; their
# first token must be one of the ten that float32 finds likeliest.
ALIKE = dict.fromkeys(
    ("transformers_float32", "float32_same_kernel", "float32_same_kernel_fused", "llamacpp_f32"), 8
)
ALIKE |= dict.fromkeys(("float16", "bfloat16", "int8", "int8_fused", "llamacpp_f16", "llamacpp_q8"), 2)


@torch.inference_mode()
def check(bench: Bench, name: str, written: list[int], text: list[int], prompt: list[int]) -> None:
    """Stop where a variant does not write what such a model writes; a random toy model's text proves nothing."""
    logits = bench.decoder(torch.tensor([prompt]), logits_to_keep=1)[0, -1]
    alike = ALIKE.get(name, 0)
    right = written[:alike] == text[:alike] and written[0] in logits.topk(10).indices.tolist()
    if len(written) != len(text) or not (right or bench.toy):
        raise SystemExit(f"{name} wrote {written[:8]}, float32 {text[:8]}: nothing to compare")


def build(bench: Bench, prompt: list[int], count: int) -> dict[str, Variant]:
    """Every variant that can run here, each tried once; a sentence for each that can't."""
    found: dict[str, Variant] = {}
    text: list[int] = []
    for name, make in builders(bench, prompt, count + 1).items():
        try:
            variant = make()
        except (Unavailable, ImportError) as reason:
            print(f"{name}: {reason}")
            continue
        written = variant.decode(count)
        text = text or written
        check(bench, name, written, text, prompt)
        found[name] = variant
    return found


# --- measurements ----------------------------------------------------------------------------------------------------


def decoding(bench: Bench) -> dict:
    """ms per token and MB of every variant, and the ratios."""
    count, length = (2, 8) if bench.toy else (32, 128)
    prompt = text_tokens(bench, length)
    variants = build(bench, prompt, count)
    runs = {name: lambda v=v: v.decode(count) for name, v in variants.items()}
    runs |= {f"{name} prefill": lambda v=v: v.decode(0) for name, v in variants.items() if v.prefills}
    raced = race(runs, repeats=2 if bench.toy else 11, progress=not bench.toy)
    per_token = {name: seconds_per_token(raced, name, count) for name in variants}
    results = {}
    for name in builders(bench, prompt, count):
        known = name in variants
        results[f"ms_{name}"] = per_token[name].median * 1e3 if known else None
        results[f"mb_{name}"] = variants[name].nbytes / 1e6 if known else None
    for key, (fast, slow) in RATIOS.items():
        both = fast in variants and slow in variants
        results[key] = ratio(per_token, slow, fast).median if both else None
    return results


def seconds_per_token(raced: dict[str, Timing], name: str, count: int) -> Timing:
    timing = raced[name]
    prefill = raced[f"{name} prefill"].samples if f"{name} prefill" in raced else (0.0,) * timing.n
    samples = zip(timing.samples, prefill, strict=True)
    return Timing(tuple((whole - first) / count for whole, first in samples), timing.first_call)


def perplexities(bench: Bench) -> dict:
    """Perplexity of our two schemes over float32's, head shared where it is tied."""
    tokens = text_tokens(bench, 64 if bench.toy else 20_000)
    context = 16 if bench.toy else 512
    plain = perplexity(bench.decoder, tokens, context, context, progress=not bench.toy)
    results = {"ppl_float32": plain.value}
    for name, scheme in {"int8": "int8", "int4_rtn": "int4"}.items():
        changed = clone(bench.decoder)
        quantize_(changed, scheme, head_of(bench))
        value = perplexity(changed, tokens, context, context, progress=not bench.toy).value
        results[f"ppl_ratio_{name}"] = value / plain.value
    return results


def text_tokens(bench: Bench, count: int) -> list[int]:
    """The first tokens of the evaluation text; of the toy model, which knows none, random ones."""
    if bench.toy:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, bench.config.vocab_size, (count,), generator=generator).tolist()
    tokens = tokenizer_of(bench).encode(evaluation_text())
    if len(tokens) < count:
        raise SystemExit(f"the evaluation text has {len(tokens)} tokens, {count} are needed")
    return tokens[:count]


def tokenizer_of(bench: Bench):
    return checkpoints.Tokenizer(checkpoints.fetch(bench.decoder.name))


def head_of(bench: Bench) -> str:
    return "shared" if bench.config.tie_embeddings else "copied"


@torch.inference_mode()
def bandwidth(bench: Bench) -> dict:
    """Bytes a second of the one-row int8 product, over copies of the head's matrix that no cache holds together."""
    keys = ("kernel_gb_per_s", "read_gb_per_s", "kernel_bandwidth_fraction")
    product = product_for("cpu")
    layer = QuantizedLinear(bench.decoder.lm_head, "int8", product)
    layers = [layer] + [copy.deepcopy(layer) for _ in range(copies_of(layer, bench.toy) - 1)]
    x = torch.randn(1, layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = x @ layer.weight(torch.float32).T
    try:
        torch.testing.assert_close(product(x, layer), expected, rtol=1e-3, atol=1e-3)
    except ImportError:  # numba is not installed
        return dict.fromkeys(keys)
    kernel_bytes = len(layers) * (layer.q.nbytes + layer.scale.nbytes)
    values = torch.ones(
        max(kernel_bytes // 4, 1 << 16)
    )  # floats, written, so that no page is the one of zeros
    runs = {"kernel": lambda: [product(x, each) for each in layers], **_reads(values)}
    raced = race(runs, repeats=2 if bench.toy else 31)
    best = min((name for name in raced if name != "kernel"), key=lambda name: raced[name].median)
    return dict(
        zip(
            keys,
            (
                kernel_bytes / raced["kernel"].median / 1e9,
                values.nbytes / raced[best].median / 1e9,
                ratio(raced, best, "kernel").median * kernel_bytes / values.nbytes,
            ),
            strict=True,
        )
    )


def copies_of(layer: QuantizedLinear, toy: bool) -> int:
    return 2 if toy else math.ceil(POOL_BYTES / layer.q.nbytes)


def main(argv: list[str] | None = None) -> None:
    bench = start(__doc__.splitlines()[0], argv)
    if bench.toy:  # every width a multiple of 64, for int4's groups
        bench.decoder = Decoder(DecoderConfig(256, 64, 128, 2, 4, 2, 16)).eval().requires_grad_(False)
    bench.finish(decoding(bench) | bandwidth(bench) | perplexities(bench))


if __name__ == "__main__":
    main(sys.argv[1:])
