"""generate, its stop rules, and the samplers against values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from course_utils.generation import (
    check_finite,
    generate,
    greedy,
    next_logits,
    one_sequence,
    probabilities,
    sample,
    stop_ids,
)
from tests.conftest import PlainCache

PROMPT = [5, 17, 3, 60, 2]


class Script:
    """Stands in for a decoder: says the tokens of ``lines`` in turn, and notes what it was fed."""

    device = torch.device("cpu")

    def __init__(self, *tokens: int, vocab: int = 10) -> None:
        self.tokens, self.vocab, self.fed = list(tokens), vocab, []

    def __call__(self, tokens: Tensor, cache=None, logits_to_keep: int = 0) -> Tensor:
        assert logits_to_keep == 1, "only the last token's logits are needed"
        assert torch.is_inference_mode_enabled()
        self.fed.append(tokens[0].tolist())
        if cache is not None:
            cache.length += tokens.shape[1]
        return torch.eye(self.vocab)[self.tokens[len(self.fed) - 1]][None, None] * 9


def logits_of(*probs: float) -> Tensor:
    return torch.tensor(probs).log()


# ------------------------------------------------------------------ generate


def test_greedy_is_the_argmax_of_a_full_forward_at_every_place(tiny_decoder):
    decoder = tiny_decoder()
    new = generate(decoder, PROMPT, 12)
    places = decoder(torch.tensor([PROMPT + new]))[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert new == places.tolist() and len(new) == 12


def test_a_cache_changes_what_is_fed_and_nothing_else(tiny_decoder):
    decoder = tiny_decoder()
    assert generate(decoder, PROMPT, 12, cache=PlainCache()) == generate(decoder, PROMPT, 12)


def test_without_a_cache_every_step_feeds_the_whole_sequence():
    script = Script(7, 8, 9)
    assert generate(script, [1, 2], 3) == [7, 8, 9]
    assert script.fed == [[1, 2], [1, 2, 7], [1, 2, 7, 8]]


@pytest.mark.parametrize("held, first", [(0, [1, 2, 3]), (1, [2, 3]), (2, [3])])
def test_a_cache_is_fed_what_it_does_not_hold_then_one_token_a_step(held, first):
    script, cache = Script(7, 8, 9), SimpleNamespace(length=held)
    assert generate(script, [1, 2, 3], 3, cache=cache) == [7, 8, 9]
    assert script.fed == [first, [7], [8]]
    assert cache.length == 5  # all but the last new token


def test_generation_goes_on_with_the_cache_it_left(tiny_decoder):
    decoder, cache = tiny_decoder(), PlainCache()
    first = generate(decoder, PROMPT, 5, cache=cache)
    second = generate(decoder, PROMPT + first, 5, cache=cache)
    assert first + second == generate(decoder, PROMPT, 10)


def test_a_used_cache_is_refused_and_rewound_gives_the_same_again(tiny_decoder):
    """HAZARDS 39: the second run of a cell finds the first run's tokens in the cache."""
    decoder, cache = tiny_decoder(), PlainCache()
    once = generate(decoder, PROMPT, 4, cache=cache)
    with pytest.raises(ValueError, match=r"holds 8 tokens and the sequence has 5.*truncate\(4\)"):
        generate(decoder, PROMPT, 4, cache=cache)
    cache.truncate(len(PROMPT) - 1)
    assert generate(decoder, PROMPT, 4, cache=cache) == once


def test_a_cache_that_holds_the_whole_prompt_leaves_nothing_to_feed():
    with pytest.raises(ValueError, match=r"truncate\(2\)"):
        next_logits(Script(7), [1, 2, 3], SimpleNamespace(length=3))


@pytest.mark.parametrize("eos", [8, [8], {8, 4}, (4, 8), torch.tensor(8), torch.tensor([4, 8])])
def test_the_end_token_is_kept_and_is_the_last(eos):
    """HAZARDS 57 and 67: one id or a collection of them; nothing follows an end token."""
    assert generate(Script(7, 8, 9, 9), [1], 4, eos=eos) == [7, 8]


def test_no_end_token_and_token_zero_as_end_token():
    assert generate(Script(0, 0, 3), [1], 3) == [0, 0, 3]
    assert generate(Script(5, 0, 3), [1], 3, eos=0) == [5, 0]
    assert stop_ids(None) == frozenset() and stop_ids(0) == {0} and stop_ids(range(2)) == {0, 1}


def test_an_end_token_in_the_prompt_does_not_stop():
    assert generate(Script(7, 3), [8], 2, eos=8) == [7, 3]


def test_on_token_hears_each_token_when_it_is_made():
    heard = []
    script = Script(7, 8, 9)
    new = generate(script, [1], 3, eos=8, on_token=lambda token: heard.append((token, len(script.fed))))
    assert new == [7, 8] and heard == [(7, 1), (8, 2)]


def test_the_prompt_may_be_a_tensor_and_is_not_changed():
    prompt = [1, 2]
    generate(Script(7, 8), prompt, 2)
    assert prompt == [1, 2]
    assert (
        generate(Script(7), torch.tensor([[1, 2]]), 1) == generate(Script(7), torch.tensor([1, 2]), 1) == [7]
    )
    assert generate(Script(), prompt, 0) == []


def test_two_sequences_are_refused_before_anything_runs():
    """HAZARDS 63."""
    script = Script(7)
    for two in (torch.ones(2, 3, dtype=torch.long), [[1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="2 sequences"):
            generate(script, two, 1)
    assert script.fed == []


@pytest.mark.parametrize("nothing", [[], [[]], torch.empty(1, 0, dtype=torch.long), torch.empty(0, 4)])
def test_an_empty_sequence_is_refused(nothing):
    with pytest.raises(ValueError, match="empty"):
        one_sequence(nothing)


@pytest.mark.parametrize(
    "settings, name",
    [
        (dict(temperature=-0.5), "temperature=-0.5"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_k=2.5), "top_k=2.5"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(top_p=math.nan), "top_p=nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        probabilities(torch.zeros(4), **settings)
    script = Script(7)
    with pytest.raises(ValueError, match=name):
        generate(script, [1], 1, **settings)
    assert script.fed == []


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_max_new_tokens_must_be_a_whole_number(count):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(Script(7), [1], count)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(70000.0).half().item()])
def test_logits_that_are_not_finite_stop_before_sampling(bad):
    """HAZARDS 26: float16(70000) is infinite; the message names float32, and nothing is drawn."""
    assert math.isinf(torch.tensor(70000.0).half().item())

    def broken(tokens, cache=None, logits_to_keep=0):
        return torch.tensor([[[0.0, bad, 1.0]]])

    broken.device = torch.device("cpu")
    heard = []
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="float32"):
            generate(broken, [1], 1, temperature=temperature, on_token=heard.append)
    assert heard == []
    fine = torch.zeros(3)
    assert check_finite(fine) is fine


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny_decoder):
    decoder = tiny_decoder()

    def run(seed, cache=None):
        generator = torch.Generator().manual_seed(seed)
        return generate(decoder, PROMPT, 20, cache=cache, temperature=1.5, top_k=30, generator=generator)

    assert run(1) == run(1) == run(1, PlainCache())
    assert run(1) != run(2)


def test_sampling_from_one_candidate_is_greedy(tiny_decoder):
    decoder = tiny_decoder()
    plain = generate(decoder, PROMPT, 8)
    assert generate(decoder, PROMPT, 8, temperature=3.0, top_k=1) == plain
    assert generate(decoder, PROMPT, 8, temperature=3.0, top_p=1e-9) == plain


# ------------------------------------------------------------- probabilities


def test_softmax_and_temperature_in_closed_form():
    logits = logits_of(0.5, 0.3, 0.2)
    torch.testing.assert_close(probabilities(logits), torch.tensor([0.5, 0.3, 0.2]))
    hot, cold = torch.tensor([0.5, 0.3, 0.2]).sqrt(), torch.tensor([0.25, 0.09, 0.04])
    torch.testing.assert_close(probabilities(logits, 2.0), hot / hot.sum())
    torch.testing.assert_close(probabilities(logits, 0.5), cold / 0.38)


def test_temperature_zero_is_one_hot_and_a_tie_goes_to_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    assert probabilities(logits, 0.0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert probabilities(logits, 0.0).dtype == torch.float32
    assert greedy(logits).tolist() == [1, 0]


def test_a_tiny_temperature_neither_overflows_nor_loses_a_tie():
    logits = torch.tensor([30_000.0, -40_000.0, 29_999.0])
    assert probabilities(logits, 1e-36).tolist() == [1, 0, 0]
    assert probabilities(torch.tensor([2.0, 2.0, 1.0]), 1e-36).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize(
    "top_k, expected",
    [
        (1, [1, 0, 0, 0]),
        (2, [4 / 7, 3 / 7, 0, 0]),
        (3, [4 / 9, 3 / 9, 2 / 9, 0]),
        (4, [0.4, 0.3, 0.2, 0.1]),
        (5, [0.4, 0.3, 0.2, 0.1]),
        (1_000_000, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_top_k(top_k, expected):
    """HAZARDS 50: [.4, .3, .2, .1] with top_k=2 is drawn from [.571, .429, 0, 0]; the vocabulary's size is no limit."""
    probs = probabilities(logits_of(0.4, 0.3, 0.2, 0.1), top_k=top_k)
    torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float32))
    assert (probs > 0).sum() == min(top_k, 4)


@pytest.mark.parametrize(
    "top_p, expected",
    [
        (1e-9, [1, 0, 0, 0]),
        (0.39, [1, 0, 0, 0]),
        (0.41, [4 / 7, 3 / 7, 0, 0]),  # the token that crosses the line is kept
        (0.69, [4 / 7, 3 / 7, 0, 0]),
        (0.71, [4 / 9, 3 / 9, 2 / 9, 0]),
        (0.95, [0.4, 0.3, 0.2, 0.1]),
        (1.0, [0.4, 0.3, 0.2, 0.1]),
        (None, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_top_p(top_p, expected):
    order = torch.tensor([2, 0, 3, 1])  # ids are not in the order of their probabilities
    probs = probabilities(logits_of(0.4, 0.3, 0.2, 0.1)[order], top_p=top_p)
    torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float32)[order])


def test_ties_keep_the_lower_ids_and_exactly_as_many_as_asked():
    ties = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert probabilities(ties, top_k=2).tolist() == [0, 0.5, 0.5, 0]
    assert probabilities(torch.zeros(4), top_k=1).tolist() == [1, 0, 0, 0]
    assert probabilities(torch.zeros(4), top_p=0.5).tolist() == [
        0.5,
        0.5,
        0,
        0,
    ]  # exactly half is reached by two
    assert probabilities(torch.zeros(4), top_p=0.51).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_top_p_of_one_keeps_a_tail_that_float32_sums_lose():
    logits = torch.zeros(50_000)
    logits[0] = 25.0
    assert (probabilities(logits, top_p=1.0) > 0).all()


def test_top_p_works_on_what_top_k_and_temperature_left():
    probs = probabilities(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5)
    assert probs.tolist() == [1, 0, 0, 0]  # 4/7 of the two that are left; of all four, 0.4 would not do
    assert probabilities(logits_of(0.4, 0.3, 0.2, 0.1), top_k=9, top_p=0.3).tolist() == [1, 0, 0, 0]
    hot = probabilities(logits_of(0.64, 0.16, 0.16, 0.04), 2.0, top_p=0.6)  # .8, .4, .4, .2 over 1.8
    torch.testing.assert_close(hot, torch.tensor([2 / 3, 1 / 3, 0, 0]))


def test_rows_are_treated_one_by_one_and_16_bit_logits_in_float32():
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = probabilities(logits, 0.7, top_k=9, top_p=0.8)
    assert together.dtype == torch.float32 and together.shape == logits.shape
    torch.testing.assert_close(together.sum(-1), torch.ones(3, 5))
    for i in range(3):
        torch.testing.assert_close(together[i, 2], probabilities(logits[i, 2], 0.7, top_k=9, top_p=0.8))


def test_the_same_as_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    for temperature, top_k, top_p in [(1.0, 5, None), (0.7, None, 0.9), (1.3, 40, 0.8), (2.0, 300, 0.3)]:
        theirs = process.TemperatureLogitsWarper(temperature)(None, logits)
        if top_k is not None:
            theirs = process.TopKLogitsWarper(top_k)(None, theirs)
        if top_p is not None:
            theirs = process.TopPLogitsWarper(top_p)(None, theirs)
        torch.testing.assert_close(probabilities(logits, temperature, top_k, top_p), theirs.softmax(-1))


# -------------------------------------------------------------------- sample


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0])
    drawn = sample(probs.expand(20_000, 5), torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000,) and drawn.dtype == torch.int64
    shares = drawn.bincount(minlength=5) / 20_000
    assert shares[0] == shares[4] == 0
    torch.testing.assert_close(shares, probs, atol=0.015, rtol=0)  # four standard deviations


def test_the_uniform_number_picks_the_first_total_above_it(monkeypatch):
    """The ends too: 0 must not take a first token of probability 0, nor the largest number below 1 a last one."""
    probs = torch.tensor([0.0, 0.25, 0.5, 0.25, 0.0])
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 2), (0.7499, 2), (0.75, 3), (1 - 2**-53, 3)]:
        monkeypatch.setattr(
            torch, "rand", lambda *shape, u=uniform, **kw: torch.full(shape, u, dtype=torch.float64)
        )
        assert int(sample(probs)) == token
        assert int(sample(probs * 3)) == token  # totals count, not the scale


def test_a_token_far_down_the_tail_has_its_own_place(monkeypatch):
    """Behind a first token of weight 1 stand 50,000 of 2e-8, three to one step of float32: float64 tells them apart."""
    probs = torch.full((50_001,), 2e-8)
    probs[0] = 1.0
    small = float(probs[1])
    for token in (1, 2, 25_000, 25_001, 50_000):
        uniform = (1 + (token - 0.5) * small) / (1 + 50_000 * small)
        monkeypatch.setattr(
            torch, "rand", lambda *shape, u=uniform, **kw: torch.full(shape, u, dtype=torch.float64)
        )
        assert int(sample(probs)) == token


def test_shapes_of_draws():
    probs = torch.full((2, 3, 4), 0.25)
    assert sample(probs).shape == (2, 3) and sample(probs[0, 0]).shape == ()


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_row_with_nothing_to_draw_from_is_refused(row):
    with pytest.raises(ValueError, match="sum to 0, NaN or infinity"):
        sample(torch.tensor([[0.5, 0.5], row]))


@pytest.mark.gpu
def test_cuda_chooses_as_the_cpu_does(tiny_decoder):
    decoder = tiny_decoder()
    plain = generate(decoder, PROMPT, 8, cache=PlainCache())
    assert generate(decoder.cuda(), PROMPT, 8, cache=PlainCache()) == plain
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 3
    ours, theirs = probabilities(logits, 0.8, 50, 0.9), probabilities(logits.cuda(), 0.8, 50, 0.9)
    torch.testing.assert_close(theirs.cpu(), ours)
    draw = [sample(p, torch.Generator().manual_seed(3)).tolist() for p in (ours, theirs)]
    assert draw[0] == draw[1]  # a CPU generator serves the GPU
