"""How good is a model, and are two models the same? Perplexity, KL divergence, agreement, and what may be
concluded.

A perplexity means nothing without its text, context and stride, so :class:`Perplexity` carries them, and keeps
its parts: chunks, because a difference between two models is judged on the same chunks
(:func:`paired_bootstrap`).

Memory: logits are made :data:`HEAD_ROWS` tokens at a time and reduced at once (49,152 logits of 64 tokens are
13 MB; of a whole text of 25,000 they would be 5 GB). Every decoder with ``hidden``, ``head`` and ``device``
will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from course_utils.decoder import Decoder
from course_utils.generation import check_finite, greedy, one_sequence

HEAD_ROWS = 64


@dataclass(frozen=True)
class Perplexity:
    """nll: negative log-likelihood of each chunk, summed, in nats. counts: predicted tokens of each chunk."""

    nll: tuple[float, ...]
    counts: tuple[int, ...]
    context: int
    stride: int

    @property
    def mean_nll(self) -> float:
        """Nats per predicted token: every token weighs the same, however long its chunk."""
        return math.fsum(self.nll) / sum(self.counts)

    @property
    def value(self) -> float:
        """exp(mean_nll): among how many equally likely tokens the model is as unsure as it was here."""
        try:
            return math.exp(self.mean_nll)
        except OverflowError:  # a broken model, more than 709 nats per token
            return math.inf

    def __str__(self) -> str:
        return (
            f"perplexity {self.value:.2f} ({sum(self.counts):,} tokens predicted in {len(self.counts)} chunks, "
            f"context {self.context}, stride {self.stride})"
        )


def perplexity(
    decoder: Decoder,
    tokens: Sequence[int] | Tensor,
    context: int = 256,
    stride: int | None = None,
    progress: bool | Callable[[int, int], object] = False,
) -> Perplexity:
    """Perplexity of ``tokens`` in windows of ``context`` tokens that start every ``stride`` (None: context, no
    overlap).

    No token is predicted twice. Without overlap the first token of each window is not predicted (nothing stands
    before it); with overlap a window predicts only what earlier ones didn't, and only the very first token is
    left out. More overlap gives every token more context, a lower perplexity, and more work. progress: True
    prints a dot for each tenth; a function gets (done, all). Raises ValueError for fewer than 2 tokens, a
    context < 2, or a stride outside 1 … context.
    """
    sequence = one_sequence(tokens)
    windows = list(_windows(len(sequence), context, stride))
    nll, counts = [], []
    for done, (begin, first, end) in enumerate(windows, 1):
        scores = log_probabilities(decoder, sequence[begin:end])[first - begin - 1 :]
        nll.append(-float(scores.double().sum()))
        counts.append(end - first)
        _report(progress, done, len(windows))
    return Perplexity(tuple(nll), tuple(counts), context, context if stride is None else stride)


@torch.inference_mode()
def log_probabilities(decoder: Decoder, tokens: Sequence[int] | Tensor) -> Tensor:
    """(n - 1,) float32 on the CPU: log of the probability, in nats, of each token after the first, given all
    before it.
    """
    sequence = one_sequence(tokens)
    targets = torch.tensor(sequence[1:], device=decoder.device)
    scores = [
        -F.cross_entropy(logits, targets[place], reduction="none")
        for place, logits in _chunked_logits(decoder, sequence[:-1])
    ]
    return torch.cat(scores).cpu()


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tokens. Sums of each chunk: kl_sums (nats), agreements (tokens), nll_a, nll_b (nats)."""

    kl_sums: tuple[float, ...]
    agreements: tuple[int, ...]
    nll_a: tuple[float, ...]
    nll_b: tuple[float, ...]
    counts: tuple[int, ...]
    context: int

    @property
    def kl(self) -> float:
        """Mean KL(a ‖ b), nats per token: what is lost by using b where a is right; 0 only for equal
        distributions.
        """
        return math.fsum(self.kl_sums) / sum(self.counts)

    @property
    def top1(self) -> float:
        """Share of tokens at which both name the same likeliest token."""
        return sum(self.agreements) / sum(self.counts)

    @property
    def a(self) -> Perplexity:
        return Perplexity(self.nll_a, self.counts, self.context, self.context)

    @property
    def b(self) -> Perplexity:
        return Perplexity(self.nll_b, self.counts, self.context, self.context)

    @property
    def differences(self) -> tuple[float, ...]:
        """nll_b - nll_a of each chunk, nats per token; above 0 where b is worse."""
        return tuple((b - a) / count for a, b, count in zip(self.nll_a, self.nll_b, self.counts, strict=True))

    def interval(self, draws: int = 2000, seed: int = 0) -> Interval:
        """Of b - a in nats per token, by :func:`paired_bootstrap`."""
        return paired_bootstrap(self.nll_b, self.nll_a, self.counts, draws=draws, seed=seed)

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.5f} nats per token, same likeliest token at {self.top1:.1%}, "
            f"perplexity {self.a.value:.2f} and {self.b.value:.2f} ({sum(self.counts):,} tokens, context {self.context})"
        )


@torch.inference_mode()
def compare(
    decoder_a: Decoder,
    decoder_b: Decoder | Mapping[str, Decoder],
    tokens: Sequence[int] | Tensor,
    context: int = 256,
    progress: bool | Callable[[int, int], object] = False,
) -> Comparison | dict[str, Comparison]:
    """KL(a ‖ b), top-1 agreement and both likelihoods on windows of ``context`` tokens without overlap.

    decoder_b: one decoder, or several by name; then ``decoder_a`` reads each window once for all of them, and a dict of
    Comparisons with the same names is returned. Raises ValueError as :func:`perplexity` does, for no decoder, and where
    the vocabularies differ in size.
    """
    others = dict(decoder_b) if isinstance(decoder_b, Mapping) else {"b": decoder_b}
    if not others:
        raise ValueError("no decoder to compare with: decoder_b is empty")
    sequence = one_sequence(tokens)
    windows = list(_windows(len(sequence), context, None))
    rows = {name: [] for name in others}
    for done, (begin, _, end) in enumerate(windows, 1):
        found = _compare_window(decoder_a, list(others.values()), sequence[begin:end])
        for name, row in zip(others, found, strict=True):
            rows[name].append(row)
        _report(progress, done, len(windows))
    counts = tuple(end - first for _, first, end in windows)
    compared = {
        name: Comparison(*map(tuple, zip(*rows[name], strict=True)), counts, context) for name in others
    }
    return compared if isinstance(decoder_b, Mapping) else compared["b"]


def _compare_window(
    decoder_a: Decoder, others: list[Decoder], sequence: list[int]
) -> list[tuple[float, int, float, float]]:
    """(KL, agreements, nll of a, nll of b) of each other decoder, summed over the window."""
    sums = [[0.0, 0, 0.0, 0.0] for _ in others]
    readers = [_chunked_logits(decoder, sequence[:-1]) for decoder in (decoder_a, *others)]
    for (place, a), *found in zip(*readers, strict=True):
        targets = torch.tensor(sequence[1:][place], device=a.device)
        choice, a = greedy(a), a.log_softmax(dim=-1)
        for total, (_, b) in zip(sums, found, strict=True):
            if a.shape != b.shape:
                raise ValueError(f"vocabularies of {a.shape[-1]} and {b.shape[-1]} tokens can't be compared")
            b = b.to(a.device)
            total[1] += int((choice == greedy(b)).sum())
            b = b.log_softmax(dim=-1)
            # torch takes the approximation first
            total[0] += float(F.kl_div(b, a, reduction="sum", log_target=True))
            total[2] += float(F.nll_loss(a, targets, reduction="sum"))
            total[3] += float(F.nll_loss(b, targets, reduction="sum"))
    return [tuple(total) for total in sums]


@dataclass(frozen=True)
class Interval:
    """95 % of the resampled means of a - b, nats per token, lie between low and high."""

    mean: float
    low: float
    high: float

    @property
    def separates(self) -> bool:
        """Whether the interval leaves 0 out, so that one of the two may be called better on this text."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        verdict = (
            "the interval leaves out 0"
            if self.separates
            else "no difference seen here: the interval covers 0"
        )
        return f"{self.mean:+.4f} nats per token, 95 % in [{self.low:+.4f}, {self.high:+.4f}]; {verdict}"


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], counts: Sequence[int], draws: int = 2000, seed: int = 0
) -> Interval:
    """Interval of the token-weighted mean of a - b, from ``draws`` resamplings of whole chunks.

    a, b: negative log-likelihoods of the *same* chunks, summed over each, nats; counts: tokens of each. Chunks differ
    far more from each other than two models differ on one chunk, so only the paired difference can tell them apart.
    Few chunks make the interval too narrow: give 30 or more. Raises ValueError for lengths that differ, fewer than 2
    chunks, or a count < 1. Source: Efron and Tibshirani 1993, chapter 8.
    """
    if not len(a) == len(b) == len(counts):
        raise ValueError(
            f"a, b and counts must be of the same chunks; got {len(a)}, {len(b)} and {len(counts)}"
        )
    if len(counts) < 2:
        raise ValueError(f"{len(counts)} chunk says nothing about chance; give at least 2, better 30")
    if min(counts) < 1:
        raise ValueError(f"a chunk of {min(counts)} tokens; every chunk needs at least 1")
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    counts = np.asarray(counts, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(counts), (draws, len(counts)))
    means = differences[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(differences.sum() / counts.sum()), float(low), float(high))


@dataclass(frozen=True)
class SameTokens:
    """Truthy where two texts are the same, or part at a near-tie. first_difference: index of the first unequal
    token.
    """

    ok: bool
    first_difference: int | None
    margin: float | None
    note: str

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.note


def same_tokens(
    a: Sequence[int] | Tensor,
    b: Sequence[int] | Tensor,
    margins: Sequence[float] | Tensor | None = None,
    tolerance: float = 1e-3,
) -> SameTokens:
    """Are two continuations of one prompt the same tokens? A first difference is excused only at a near-tie.

    margins: how far the likeliest token's logit stood above the second's when each token of ``a`` was chosen
    (:func:`top2_margins`). Two correct programs may add in another order and so turn a tie; after it the texts
    go their own ways. tolerance, in logits, is for float32; 16 bit needs about 0.05. Raises ValueError where
    margins end too soon.
    """
    a, b = [int(token) for token in a], [int(token) for token in b]
    if a == b:
        return SameTokens(True, None, None, f"identical: all {len(a)} tokens")
    shared = min(len(a), len(b))
    at = next((i for i in range(shared) if a[i] != b[i]), shared)
    if at == shared:
        return SameTokens(
            False,
            at,
            None,
            f"not the same: one ends after {shared} tokens, the other has {max(len(a), len(b))}",
        )
    parting = f"the first {at} tokens are equal, then {a[at]} against {b[at]}"
    if margins is None:
        return SameTokens(False, at, None, f"not the same: {parting}")
    if len(margins) <= at:
        raise ValueError(
            f"margins has {len(margins)} entries, the texts part at index {at}; give one for each token of a"
        )
    margin = float(margins[at])
    if margin < tolerance:
        note = f"near-tie: {parting}, where the two likeliest are {margin:.1e} apart (under {tolerance:g}): rounding"
        return SameTokens(True, at, margin, note)
    return SameTokens(
        False, at, margin, f"not the same: {parting}, and {margin:.3g} between the two likeliest is no tie"
    )


def top2_margins(logits: Tensor) -> Tensor:
    """(…, vocab) -> (…) float32: by how much the largest logit exceeds the second; 0 is a tie."""
    best = logits.float().topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


@torch.inference_mode()
def greedy_choices(
    decoder: Decoder, prompt: Sequence[int] | Tensor, new: Sequence[int]
) -> tuple[list[int], list[float]]:
    """What the plain model would choose at each place of a continuation: (tokens, top-2 margins), one forward,
    no cache.

    ``same_tokens(new, *greedy_choices(decoder, prompt, new))`` tells whether ``new`` is the greedy
    continuation, in one pass and not by generating twice: if every token is the likeliest after those before
    it, so is the text.
    """
    prompt, new = one_sequence(prompt), one_sequence(new)
    choices, margins = [], []
    for _, logits in _chunked_logits(decoder, prompt + new[:-1], skip=len(prompt) - 1):
        choices += greedy(logits).tolist()
        margins += top2_margins(logits).tolist()
    return choices, margins


def _chunked_logits(decoder: Decoder, sequence: list[int], skip: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """(places, logits (≤ HEAD_ROWS, vocab) float32) of a sequence fed at once, piece by piece; the first
    ``skip`` left out.
    """
    hidden = decoder.hidden(torch.tensor([sequence], device=decoder.device))[0]  # (n, hidden_size)
    for start in range(skip, len(sequence), HEAD_ROWS):
        place = slice(start, start + HEAD_ROWS)
        yield place, check_finite(decoder.head(hidden[place]))


def _windows(length: int, context: int, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end): the window holds tokens begin … end - 1 and predicts first … end - 1."""
    stride = context if stride is None else stride
    if length < 2:
        raise ValueError(f"{length} token predicts nothing; give at least 2")
    if context < 2 or not 1 <= stride <= context:
        raise ValueError(f"context={context}, stride={stride}: needs context ≥ 2 and 1 ≤ stride ≤ context")
    done = 1  # the first token is given, not predicted
    for begin in range(0, length - 1, stride):
        end = min(begin + context, length)
        first = max(done, begin + 1)
        if first < end:
            yield begin, first, end
        done = end


def _report(progress: bool | Callable[[int, int], object], done: int, total: int) -> None:
    if callable(progress):
        progress(done, total)
    elif progress:
        dots = done * 10 // total - (done - 1) * 10 // total
        print("." * dots, end="\n" if done == total else "", flush=True)
