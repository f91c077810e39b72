"""Generating text: one forward, one choice, one more token, until it is time to stop.

Two kinds of choice: :func:`greedy` takes the likeliest token, :func:`sample` draws from :func:`probabilities`.
All of it is float32 whatever the model's dtype; the tensor that is drawn from is the tensor you can look at,
which chapter 3 needs (an exact acceptance test compares the very probabilities the draft was drawn from).

Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p, "nucleus").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from course_utils.decoder import Cache, Decoder


@torch.inference_mode()
def generate(
    decoder: Decoder,
    tokens: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    cache: Cache | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[int], object] | None = None,
) -> list[int]:
    """The new tokens that follow ``tokens``; at most ``max_new_tokens``, an end-of-sequence token included as
    the last.

    tokens: one sequence, a list or a (1, n) tensor. cache: None feeds the whole sequence at every step; a cache
    is fed what it does not hold, then one token a step. What it holds must be the beginning of ``tokens``:
    nobody can check that, so rewind it (``truncate``) or take a new one before other text. After the call it
    holds all but the last new token. temperature 0 is greedy; see :func:`probabilities` for it, top_k and
    top_p. eos: a token id or several. on_token is called with each new token. Raises ValueError for more than
    one sequence, an empty one, a cache that leaves nothing to feed, logits that are not finite, and settings
    out of range.
    """
    sequence, stops = one_sequence(tokens), stop_ids(eos)
    start, end = len(sequence), len(sequence) + _whole("max_new_tokens", max_new_tokens, least=0)
    _check_settings(temperature, top_k, top_p)
    while len(sequence) < end:
        logits = next_logits(decoder, sequence, cache)
        if temperature == 0:
            token = int(greedy(logits))
        else:
            token = int(sample(probabilities(logits, temperature, top_k, top_p), generator))
        sequence.append(token)
        if on_token is not None:
            on_token(token)
        if token in stops:
            break
    return sequence[start:]


def next_logits(decoder: Decoder, sequence: list[int], cache: Cache | None = None) -> Tensor:
    """(vocab,) float32 logits of the token after ``sequence``; feeds what the cache does not hold yet.

    Raises ValueError where the cache holds the whole sequence or more, and where a logit is not finite.
    """
    held = 0 if cache is None else int(cache.length)
    if held >= len(sequence):
        raise ValueError(
            f"the cache holds {held} tokens and the sequence has {len(sequence)}: nothing is left to feed, and logits "
            f"come only from a token that is fed; cache.truncate({len(sequence) - 1}) first, or take a new cache"
        )
    new = torch.tensor([sequence[held:]], device=decoder.device)  # (1, new)
    return check_finite(decoder(new, cache, logits_to_keep=1)[0, -1])


def greedy(logits: Tensor) -> Tensor:
    """(…, vocab) -> (…) int64: the likeliest token; of equals, the lowest id."""
    return logits.argmax(dim=-1)


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution to draw from, (…, vocab) -> (…, vocab) float32, each row summing to 1.

    In this order, as transformers does: logits / temperature; the ``top_k`` likeliest tokens; of those, the
    fewest whose probabilities reach ``top_p``. Of equally likely tokens the lower id stays, as in
    :func:`greedy`, so that top_k=1 and a tiny top_p are greedy. temperature 0 puts all on the greedy token.
    None, top_p=1 and a top_k as large as the vocabulary keep everything. Raises ValueError for temperature < 0
    or not finite, top_k < 1, top_p outside (0, 1].
    """
    _check_settings(temperature, top_k, top_p)
    if temperature == 0:
        return F.one_hot(greedy(logits), logits.shape[-1]).float()
    logits, size = logits.float(), logits.shape[-1]
    # The largest becomes 0, so that no temperature is too small: what could overflow falls to -inf instead.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    top_k = size if top_k is None else min(top_k, size)
    if top_k < size:
        logits = logits.masked_fill(~_largest(logits, logits.topk(top_k).values, top_k), -math.inf)
    probs = logits.softmax(dim=-1)
    if top_p is None or top_p == 1:  # not by the sum below: rounding reaches 1 before the last token
        return probs
    ranked = probs.topk(top_k).values  # (…, top_k), descending
    before = ranked.cumsum(dim=-1) - ranked  # held by all likelier tokens; 0 for the first: it always stays
    kept = _largest(probs, ranked, (before < top_p).sum(dim=-1, keepdim=True))
    return logits.masked_fill(~kept, -math.inf).softmax(dim=-1)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token of each distribution, (…, vocab) -> (…) int64; a token of probability 0 is never drawn.

    The inverse of the cumulative distribution: the first token whose running total exceeds a uniform number.
    ``torch.multinomial`` follows the same law, but makes a random number for every entry of the vocabulary,
    which costs far more. A CPU generator serves every device. Raises ValueError where a row has no total to
    draw from (zeros, NaN, infinity).
    """
    totals = probs.cumsum(dim=-1, dtype=torch.float64)  # steps of float32 near 1, 6e-8, outweigh many a token
    if not bool((totals[..., -1].isfinite() & (totals[..., -1] > 0)).all()):
        raise ValueError("probabilities sum to 0, NaN or infinity; were the logits finite? float32 is safe")
    totals = totals / totals[..., -1:]  # ends at exactly 1, and uniform numbers stay below it
    device = probs.device if generator is None else generator.device
    uniform = torch.rand(*probs.shape[:-1], 1, dtype=torch.float64, generator=generator, device=device)
    return torch.searchsorted(totals, uniform.to(probs.device), right=True).squeeze(-1)


def stop_ids(eos: int | Iterable[int] | None) -> frozenset[int]:
    """The token ids that end a sequence; models have none, one or several. Takes an id, a collection, a tensor
    or None.
    """
    if eos is None:
        return frozenset()
    if isinstance(eos, Tensor):
        eos = eos.reshape(-1).tolist()
    return frozenset((int(eos),)) if not isinstance(eos, Iterable) else frozenset(int(token) for token in eos)


def one_sequence(tokens: Sequence[int] | Tensor) -> list[int]:
    """A new list of the ids in a list, an (n,) or a (1, n) tensor; ValueError for several sequences or none."""
    rows = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if rows and isinstance(rows[0], (list, tuple, Tensor)):
        if len(rows) > 1:
            raise ValueError(
                f"got {len(rows)} sequences; give one, as a list or a (1, n) tensor (chapter 4 batches)"
            )
        rows = list(rows[0])
    if not rows:
        raise ValueError("the sequence is empty; give at least one token")
    return [int(token) for token in rows]


def check_finite(logits: Tensor) -> Tensor:
    """``logits`` as they came. Raises ValueError where one is NaN or infinite: on CUDA, drawing from such ends
    the process.
    """
    if bool(logits.isfinite().all()):
        return logits
    raise ValueError(
        f"the model gave logits that are NaN or infinite (among {logits.numel():,}). In float16 values overflow above "
        "65,504: load the model with dtype='float32', or take another. In float32, look for NaN among its weights"
    )


def _largest(values: Tensor, ranked: Tensor, count: int | Tensor) -> Tensor:
    """(…, vocab) bool: the ``count`` (int or (…, 1)) largest ``values``, given them ranked in descending order.

    Of those that tie with the last one kept, the lower ids stay: the choice must not depend on how a device sorts.
    """
    count = torch.as_tensor(count, device=values.device).expand(*values.shape[:-1], 1)
    last = ranked.gather(-1, count - 1)
    above, ties = values > last, values == last
    room = count - above.sum(dim=-1, keepdim=True)
    return above | ties & (ties.cumsum(dim=-1) <= room)


def _check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number")
    if top_k is not None:
        _whole("top_k", top_k, least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]; None or 1 keeps everything")


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ValueError(f"{name}={value} must be a whole number ≥ {least}")
    return int(value)
