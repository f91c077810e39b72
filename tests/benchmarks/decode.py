"""Cached decoding against transformers and against no cache: ``python -m tests.benchmarks.decode [--json]``.

decode_over_transformers    tokens/s of our cached decode over ``generate``'s, same weights, 64 new tokens after 128;
                            a run's time is that of 64 new tokens less that of 1, so that prefill is told apart
generate_over_transformers  the same with the prefill of 128 tokens in both
prefill_over_transformers   tokens/s of a 512-token prefill over transformers'
cached_over_uncached_N      time of one step without a cache over one with, at context N; predicted_N: composed from
                            the machine's measured products, attention and overhead
growth_1500_over_100        time per token at context 1,500 over that at 100, static cache

Rivals take turns in one run; each figure is the median of the ratios of neighbouring samples.
"""

from __future__ import annotations

import sys
from statistics import median

import torch

from course_utils.chapters.kv_cache import KVCache, StaticKVCache, predicted_seconds
from course_utils.generation import generate
from course_utils.machine import limits
from course_utils.timing import race, ratio
from tests.benchmarks.common import Bench, start


def random_tokens(bench: Bench, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, bench.config.vocab_size, (1, count), generator=generator)


def step(bench: Bench, cache: KVCache, tokens: torch.Tensor, context: int) -> None:
    """Decode the last of ``context`` tokens; whatever the cache holds beyond the others is forgotten first."""
    cache.truncate(context - 1)
    with torch.inference_mode():
        bench.decoder(tokens[:, context - 1 : context], cache)


def prefilled(bench: Bench, tokens: torch.Tensor, kind=KVCache) -> KVCache:
    cache = kind(bench.config, tokens.shape[1]) if kind is StaticKVCache else kind(bench.config)
    with torch.inference_mode():
        bench.decoder(tokens, cache, logits_to_keep=1)
    return cache


def against_transformers(bench: Bench) -> dict:
    """Both figures, or None for each where transformers is not installed."""
    try:
        from course_utils.rivals import transformers_generate, transformers_model

        model = transformers_model(bench.decoder)
    except ImportError:
        return dict.fromkeys(
            ("decode_over_transformers", "generate_over_transformers", "prefill_over_transformers")
        )
    prompt_length, new, prefill_length = (8, 4, 16) if bench.toy else (128, 64, 512)
    prompt = random_tokens(bench, prompt_length)[0].tolist()
    ours = generate(bench.decoder, prompt, new, cache=KVCache(bench.config))
    if ours != transformers_generate(model, prompt, new):
        raise SystemExit("the two models wrote different tokens: nothing to compare")
    runs = {
        f"{who} {count}": lambda run=run, count=count: run(count)
        for count in (new, 1)
        for who, run in {
            "theirs": lambda count: transformers_generate(model, prompt, count),
            "ours": lambda count: generate(bench.decoder, prompt, count, cache=KVCache(bench.config)),
        }.items()
    }
    decode = race(runs, repeats=2 if bench.toy else 9)

    def decoding(who: str) -> list[float]:
        """Seconds of the tokens after the first, round by round."""
        both = zip(decode[f"{who} {new}"].samples, decode[f"{who} 1"].samples, strict=True)
        return [whole - first for whole, first in both]

    decode_ratios = [a / b for a, b in zip(decoding("theirs"), decoding("ours"), strict=True)]
    tokens = random_tokens(bench, prefill_length)

    @torch.inference_mode()
    def their_prefill() -> None:
        model(tokens, use_cache=True, logits_to_keep=1)

    prefill = race(
        {"theirs": their_prefill, "ours": lambda: prefilled(bench, tokens)}, repeats=2 if bench.toy else 9
    )
    return {
        "decode_over_transformers": median(decode_ratios),
        "generate_over_transformers": ratio(decode, f"theirs {new}", f"ours {new}").median,
        "prefill_over_transformers": ratio(prefill, "theirs", "ours").median,
    }


def against_no_cache(bench: Bench) -> dict:
    """The gain of one step at each context, and the composed prediction of it."""
    results = {}
    contexts = (64, 256, 1024)
    tokens = random_tokens(bench, contexts[-1])
    machine = limits(bench.decoder.device, bench.decoder.dtype)
    cache = prefilled(bench, tokens)

    @torch.inference_mode()
    def plain(n: int) -> None:
        bench.decoder(tokens[:, :n], logits_to_keep=1)

    for n in reversed(contexts):  # the longest first: truncate only forgets
        runs = race(
            {"plain": lambda n=n: plain(n), "cached": lambda n=n: step(bench, cache, tokens, n)},
            repeats=2 if bench.toy else 7,
        )
        results[f"cached_over_uncached_{n}"] = ratio(runs, "plain", "cached").median
    for _ in range(3):  # at three moments: a busy one is outvoted
        machine.again()
        for n in contexts:
            plain_seconds, cached_seconds = (
                predicted_seconds(machine, bench.config, fed, n) for fed in (n, 1)
            )
            results[f"predicted_{n}"] = plain_seconds / cached_seconds
    machine.release()
    return results


def growth(bench: Bench) -> dict:
    """How much dearer a token is at context 1,500 than at 100."""
    short, long = 100, 1500
    tokens = random_tokens(bench, long)
    caches = {n: prefilled(bench, tokens[:, :n], StaticKVCache) for n in (short, long)}
    runs = race(
        {n: lambda n=n, cache=cache: step(bench, cache, tokens, n) for n, cache in caches.items()},
        repeats=2 if bench.toy else 25,
    )
    return {"growth_1500_over_100": ratio(runs, long, short).median}


def main(argv: list[str] | None = None) -> None:
    bench = start(__doc__.splitlines()[0], argv)
    bench.finish(against_transformers(bench) | against_no_cache(bench) | growth(bench))


if __name__ == "__main__":
    main(sys.argv[1:])
