"""Perplexity, KL, intervals and same_tokens against values worked out by hand, on stand-ins with known distributions."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from course_utils import evaluation
from course_utils.evaluation import (
    Interval,
    Perplexity,
    compare,
    greedy_choices,
    log_probabilities,
    paired_bootstrap,
    perplexity,
    same_tokens,
    top2_margins,
)
from course_utils.generation import generate
from tests.conftest import PlainCache


class Fixed:
    """A decoder that gives every place the same distribution, and notes the windows it was fed."""

    device = torch.device("cpu")

    def __init__(self, *probs: float) -> None:
        self.logits, self.fed, self.head_rows = torch.tensor(probs).log() + 5, [], []

    def hidden(self, tokens, cache=None):
        self.fed.append(tokens[0].tolist())
        return torch.zeros(1, tokens.shape[1], 1)

    def head(self, hidden):
        self.head_rows.append(hidden.shape[-2])
        return self.logits.expand(*hidden.shape[:-1], -1)


TEXT = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(3)).tolist()


# ---------------------------------------------------------------- perplexity


def test_perplexity_weighs_tokens_not_windows():
    """HAZARDS 30: 3 predictions of 6 nats together and 1 of 6: exp(12/4), not the mean of means (54.598)."""
    assert Perplexity(nll=(6.0, 6.0), counts=(3, 1), context=4, stride=4).value == pytest.approx(
        20.0855, abs=1e-4
    )


def test_a_window_of_n_tokens_holds_n_minus_1_predictions():
    """HAZARDS 30: a model that says 1/4, 1/2, 1/4 whatever came before."""
    result = perplexity(Fixed(0.25, 0.5, 0.25), [0, 1, 1, 2, 1, 0, 1], context=4)
    assert result.counts == (3, 2) and (result.context, result.stride) == (4, 4)
    assert result.nll == pytest.approx((4 * math.log(2), 3 * math.log(2)), rel=1e-6)  # 1 1 2 | 0 1
    assert result.value == pytest.approx(2 ** (7 / 5), rel=1e-6)
    assert perplexity(Fixed(*[0.1] * 10), list(range(10))).value == pytest.approx(10, rel=1e-6)


def test_equal_to_cross_entropy_of_a_full_forward(tiny_decoder):
    decoder = tiny_decoder()
    nll = torch.nn.functional.cross_entropy(decoder(torch.tensor([TEXT]))[0, :-1], torch.tensor(TEXT[1:]))
    result = perplexity(decoder, TEXT, context=len(TEXT))
    assert result.mean_nll == pytest.approx(float(nll), rel=1e-5)
    assert result.value == pytest.approx(math.exp(float(nll)), rel=1e-5)
    assert perplexity(decoder, torch.tensor([TEXT]), context=len(TEXT)) == result


@pytest.mark.parametrize(
    "length, context, stride", [(50, 16, 4), (50, 16, 15), (50, 16, 16), (49, 16, 16), (7, 50, 50)]
)
def test_windows_predict_every_token_once_with_the_context_they_have(tiny_decoder, length, context, stride):
    decoder, text = tiny_decoder(), TEXT[:length]
    result = perplexity(decoder, text, context=context, stride=stride)
    expected = 0.0
    done = 0
    for begin in range(0, length, stride):  # the plain way: one forward a window, one token at a time
        window = text[begin : begin + context]
        scores = decoder(torch.tensor([window])).log_softmax(-1)[0]
        for place in range(1, len(window)):
            if begin + place > done:
                expected -= float(scores[place - 1, window[place]])
                done = begin + place
    assert math.fsum(result.nll) == pytest.approx(expected, rel=1e-5)
    lost = math.ceil(length / context) if stride == context else 1
    assert sum(result.counts) == length - lost
    assert all(count > 0 for count in result.counts)


def test_more_context_is_fed_where_windows_overlap():
    decoder = Fixed(*[0.1] * 10)
    assert perplexity(decoder, list(range(8)), context=4, stride=2).counts == (3, 2, 2)
    assert decoder.fed == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]  # the last token of a window predicts nothing


def test_log_probabilities_come_in_pieces_with_the_same_result(tiny_decoder, monkeypatch):
    decoder = tiny_decoder()
    whole = log_probabilities(decoder, TEXT)
    assert whole.shape == (49,) and whole.dtype == torch.float32
    direct = (
        decoder(torch.tensor([TEXT])).log_softmax(-1)[0, :-1].gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    )
    torch.testing.assert_close(whole, direct)
    monkeypatch.setattr(evaluation, "HEAD_ROWS", 7)
    torch.testing.assert_close(log_probabilities(decoder, TEXT), whole)
    counting = Fixed(*[0.1] * 10)
    log_probabilities(counting, [1] * 20)
    assert counting.head_rows == [7, 7, 5]  # memory: never more than HEAD_ROWS rows of logits


@pytest.mark.parametrize(
    "tokens, context, stride, message",
    [([1], 4, None, "1 token predicts nothing"), ([1, 2], 1, None, "context=1"), ([1, 2], 4, 5, "stride=5"), ([1, 2], 4, 0, "stride=0")],
)  # fmt: skip
def test_windows_that_make_no_sense_are_refused(tokens, context, stride, message):
    with pytest.raises(ValueError, match=message):
        perplexity(Fixed(0.5, 0.5), tokens, context, stride)


def test_logits_that_are_not_finite_are_no_perplexity():
    """HAZARDS 26."""
    with pytest.raises(ValueError, match="float32"):
        perplexity(Fixed(0.5, math.nan), [0, 1, 0])


def test_a_hopeless_model_has_infinite_perplexity():
    assert Perplexity((2000.0,), (2,), 256, 256).value == math.inf


def test_perplexity_says_context_and_stride():
    assert str(Perplexity((6.0, 6.0), (3, 1), 4, 2)) == (
        "perplexity 20.09 (4 tokens predicted in 2 chunks, context 4, stride 2)"
    )


def test_progress(capsys):
    heard = []
    perplexity(
        Fixed(0.5, 0.5), [0, 1] * 6, context=4, progress=lambda done, total: heard.append((done, total))
    )
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert capsys.readouterr().out == ""
    perplexity(Fixed(0.5, 0.5), [0, 1] * 6, context=4, progress=True)
    assert capsys.readouterr().out == "..........\n"


# ------------------------------------------------------------------- compare


def test_kl_and_agreement_in_closed_form():
    a, b = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
    result = compare(Fixed(*a), Fixed(*b), [0, 1, 2, 0, 1], context=4)
    kl = sum(p * math.log(p / q) for p, q in zip(a, b, strict=True))
    assert result.kl == pytest.approx(kl, rel=1e-5)  # KL(a ‖ b), not the other way round
    assert result.kl != pytest.approx(sum(q * math.log(q / p) for p, q in zip(a, b, strict=True)), rel=1e-3)
    assert result.top1 == 0.0 and result.counts == (3,)
    assert result.differences == pytest.approx(
        (-math.log(0.5 * 0.3 * 0.2 / (0.3 * 0.2 * 0.5)) / 3,), abs=1e-6
    )


def test_differences_are_b_minus_a_per_token_and_above_zero_where_b_is_worse():
    good, poor = Fixed(0.8, 0.1, 0.1), Fixed(0.4, 0.3, 0.3)
    result = compare(good, poor, [0] * 9, context=4)
    assert result.counts == (3, 3)
    assert result.differences == pytest.approx((math.log(2), math.log(2)), rel=1e-5)
    assert result.interval().mean == pytest.approx(math.log(2), rel=1e-5) and result.interval().separates
    assert result.top1 == 1.0


def test_a_model_compared_with_itself(tiny_decoder):
    decoder = tiny_decoder()
    result = compare(decoder, decoder, TEXT, context=16)
    assert result.kl == 0 and result.top1 == 1 and set(result.differences) == {0.0}
    assert not result.interval().separates


def test_compare_gives_the_perplexities_too(tiny_decoder, monkeypatch):
    a, b = tiny_decoder(0), tiny_decoder(1)
    result = compare(a, b, TEXT, context=16)
    assert result.a.value == pytest.approx(perplexity(a, TEXT, 16).value, rel=1e-5)
    assert result.b.value == pytest.approx(perplexity(b, TEXT, 16).value, rel=1e-5)
    assert result.kl > 0 and 0 <= result.top1 < 1
    monkeypatch.setattr(evaluation, "HEAD_ROWS", 5)
    pieces = compare(a, b, TEXT, context=16)
    assert pieces.kl == pytest.approx(result.kl, rel=1e-5) and pieces.agreements == result.agreements
    for part in (f"{result.kl:.5f}", f"{result.top1:.1%}", f"{result.a.value:.2f}", "context 16"):
        assert part in str(result)


def test_different_vocabularies_cannot_be_compared():
    with pytest.raises(ValueError, match="2 and 3"):
        compare(Fixed(0.5, 0.5), Fixed(0.5, 0.3, 0.2), [0, 1, 0])


# ---------------------------------------------------------- paired bootstrap


def noisy_chunks(effect: float, chunks: int = 40) -> tuple[list[float], list[float], list[int]]:
    """Chunks of 255 tokens whose difficulty varies by 0.5 nats per token, and an effect hidden in a noise of 0.01."""
    generator = torch.Generator().manual_seed(0)
    base = 3 + 0.5 * torch.randn(chunks, generator=generator)
    noise = 0.01 * torch.randn(chunks, generator=generator)
    return ((base + effect + noise) * 255).tolist(), (base * 255).tolist(), [255] * chunks


def test_pairing_finds_an_effect_far_smaller_than_the_chunks_differ():
    """HAZARDS 31: same chunks for both models, the paired difference is resampled."""
    a, b, counts = noisy_chunks(0.02)
    interval = paired_bootstrap(a, b, counts)
    assert interval.separates and 0.01 < interval.low < interval.mean < interval.high < 0.03
    shuffled = paired_bootstrap(a, b[::-1], counts)  # the pairing lost, the same numbers say nothing
    assert not shuffled.separates and shuffled.mean == pytest.approx(interval.mean)


def test_no_effect_no_claim():
    """HAZARDS 31: an interval that covers 0 says so."""
    interval = paired_bootstrap(*noisy_chunks(0.0))
    assert not interval.separates and "no difference seen here" in str(interval)


def test_the_interval_has_the_width_of_the_normal_one():
    a, b, counts = noisy_chunks(0.02, chunks=400)
    interval = paired_bootstrap(a, b, counts, draws=4000)
    spread = float((torch.tensor(a) - torch.tensor(b)).std()) / 255
    assert interval.high - interval.low == pytest.approx(
        2 * 1.96 * spread / 20, rel=0.06
    )  # 90 % would be 16 % less


def test_the_mean_weighs_tokens_and_the_sign_is_a_minus_b():
    interval = paired_bootstrap([9.0, 6.0], [3.0, 5.0], [3, 1])
    assert interval.mean == pytest.approx(7 / 4)  # 6 + 1 nats over 4 tokens, not the mean of 2 and 1
    assert (interval.low, interval.high) == (1.0, 2.0) and interval.separates
    assert paired_bootstrap([3.0, 5.0], [9.0, 6.0], [3, 1]).mean == pytest.approx(-7 / 4)


def test_the_same_seed_gives_the_same_interval():
    chunks = noisy_chunks(0.0)
    assert (
        paired_bootstrap(*chunks, seed=4)
        == paired_bootstrap(*chunks, seed=4)
        != paired_bootstrap(*chunks, seed=5)
    )


@pytest.mark.parametrize(
    "low, high, separates", [(-1, 1, False), (0, 1, False), (-1, 0, False), (0.1, 1, True), (-1, -0.1, True)]
)
def test_separates_where_zero_is_left_out(low, high, separates):
    assert Interval(0.0, low, high).separates is separates


@pytest.mark.parametrize(
    "a, b, counts, message",
    [
        ([1.0, 2.0], [1.0], [1, 1], "2, 1 and 2"),
        ([1.0], [1.0], [1], "1 chunk"),
        ([1.0, 2.0], [1.0, 2.0], [1, 0], "0 tokens"),
    ],
)
def test_chunks_that_cannot_be_paired(a, b, counts, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(a, b, counts)


# --------------------------------------------------------------- same tokens


def test_identical_tokens():
    same = same_tokens([1, 2, 3], torch.tensor([1, 2, 3]))
    assert same and same.first_difference is None and str(same) == "identical: all 3 tokens"
    assert same_tokens([], [])


def test_a_near_tie_passes_with_its_margin_printed():
    same = same_tokens([1, 2, 3, 4], [1, 2, 9, 9], margins=[5.0, 2.0, 4e-4, 0.0])
    assert same and same.ok is True and same.first_difference == 2 and same.margin == pytest.approx(4e-4)
    assert "near-tie" in str(same) and "4.0e-04" in str(same) and "3 against 9" in str(same)


@pytest.mark.parametrize("margin", [1e-3, 0.5, math.nan])
def test_a_clear_choice_that_differs_is_a_fault(margin):
    same = same_tokens([1, 2], [1, 3], margins=torch.tensor([1e-9, margin], dtype=torch.float64))
    assert not same and same.first_difference == 1 and "no tie" in str(same)


def test_only_the_first_difference_counts():
    assert not same_tokens([1, 2, 3], [0, 2, 9], margins=[1.0, 1.0, 1e-9])
    assert same_tokens([1, 2, 3], [0, 5, 9], margins=[1e-9, 1.0, 1.0])


def test_tolerance_can_be_widened_for_16_bit():
    """HAZARDS 56: a divergence in 16 bit is allowed under a margin of 0.05 only."""
    assert not same_tokens([1], [2], margins=[0.03])
    assert same_tokens([1], [2], margins=[0.03], tolerance=0.05)
    assert not same_tokens([1], [2], margins=[0.06], tolerance=0.05)


def test_without_margins_and_with_unequal_lengths_nothing_is_excused():
    assert not same_tokens([1, 2], [1, 3])
    shorter = same_tokens([1, 2], [1, 2, 3], margins=[1e-9, 1e-9])
    assert not shorter and shorter.first_difference == 2 and "ends after 2" in str(shorter)
    assert same_tokens([1, 2], [1, 3, 4], margins=[1.0, 1e-9])
    with pytest.raises(ValueError, match="1 entries.*index 1"):
        same_tokens([1, 2], [1, 3], margins=[0.5])


def test_every_sentence_is_one_line():
    pairs = [([1], [1], None), ([1], [2], None), ([1], [2], [0.0]), ([1], [2], [1.0]), ([1], [1, 2], None)]
    assert all("\n" not in str(same_tokens(*pair)) for pair in pairs)


def test_top2_margins():
    logits = torch.tensor([[[1.0, 4.0, 3.5]], [[2.0, 2.0, -1.0]]]).bfloat16()
    margins = top2_margins(logits)
    assert margins.tolist() == [[0.5], [0.0]] and margins.dtype == torch.float32


def test_greedy_choices_check_a_continuation_in_one_forward(tiny_decoder):
    decoder, prompt = tiny_decoder(), TEXT[:9]
    new = generate(decoder, prompt, 10, cache=PlainCache())
    choices, margins = greedy_choices(decoder, prompt, new)
    assert choices == new and same_tokens(new, choices, margins)
    logits = decoder(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.tensor(margins), top2_margins(logits))
    wrong = new[:6] + [(new[6] + 1) % 97] + new[7:]
    assert same_tokens(wrong, *greedy_choices(decoder, prompt, wrong)).first_difference == 6


def test_greedy_choices_of_one_token_and_of_a_text_longer_than_a_piece(tiny_decoder, monkeypatch):
    decoder = tiny_decoder()
    assert greedy_choices(decoder, TEXT[:1], TEXT[1:2])[0] == [
        int(decoder(torch.tensor([TEXT[:1]]))[0, -1].argmax())
    ]
    whole = greedy_choices(decoder, TEXT[:20], TEXT[20:])[0]
    monkeypatch.setattr(evaluation, "HEAD_ROWS", 4)
    assert greedy_choices(decoder, TEXT[:20], TEXT[20:])[0] == whole and len(whole) == 30


@pytest.mark.gpu
def test_cuda_measures_the_same(tiny_decoder):
    plain, moved = tiny_decoder(), tiny_decoder().cuda()
    assert perplexity(moved, TEXT, 16).value == pytest.approx(perplexity(plain, TEXT, 16).value, rel=1e-4)
    assert compare(plain, moved, TEXT, 16).kl == pytest.approx(0, abs=1e-5)


def test_several_models_against_one_equal_the_pairs(tiny_decoder):
    decoder = tiny_decoder()
    others = {}
    for name, size in (("near", 0.01), ("far", 0.1)):
        others[name] = copy.deepcopy(decoder)
        with torch.no_grad():
            others[name].norm.weight.add_(size)
    tokens = list(range(1, 40))
    together = compare(decoder, others, tokens, context=16)
    assert list(together) == ["near", "far"]
    for name, other in others.items():
        assert together[name] == compare(decoder, other, tokens, context=16)
    assert 0 < together["near"].kl < together["far"].kl
    with pytest.raises(ValueError, match="no decoder"):
        compare(decoder, {}, tokens)
