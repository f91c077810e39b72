"""The six exercises of chapter 2: the right answer passes, and each known wrong one hears its own sentence."""

from __future__ import annotations

import copy

import pytest
import torch

from course_utils.chapters import kv_cache
from course_utils.decoder import Cache
from course_utils.exercises import check, judge
from course_utils.exercises.kv_cache import _alone, _Counting, _Growing, _tiny_config, _with_weights
from course_utils.generation import generate
from tests.exercises_for_tests import hears, one_thread  # noqa: F401

# --- 2.1 -------------------------------------------------------------------------------------------------------------

CHANGES = {"q": 1, "k": 1, "v": 1, "earlier outputs change": False}


def test_what_changes_reports_the_change_measured(tiny_decoder):
    for given in ({}, {"decoder": tiny_decoder()}, {"decoder": tiny_decoder(), "tokens": [1, 2, 3, 4]}):
        result = judge("2.1", CHANGES, **given)
        assert result.state == "passed" and "rounding in float32" in result.sentence
    assert "In a text of 4 tokens, run with and without the last, the logits of the 3 earlier ones" in str(
        result
    )
    assert "In a text of 12 tokens, " in judge("2.1", CHANGES).sentence


def test_what_changes_does_not_call_a_leak_rounding(tiny_decoder):
    decoder = tiny_decoder()
    forward = decoder.hidden
    decoder.hidden = lambda tokens, cache=None: forward(tokens.flip(1), cache).flip(
        1
    )  # looks only at the future
    result = judge("2.1", CHANGES, decoder=decoder)
    assert "differ by at most" in result.sentence and "rounding" not in result.sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"earlier outputs change": True}, "The causal mask hides the new token from all earlier ones"),
        ({"q": 0}, "q has one new row: the new token asks once."),
        ({"q": 7}, "q has one new row, not 7: nobody asks an old question again."),
        ({"q": 9}, "q has one new row, not 9: count tokens, not heads."),
        ({"v": 3}, "v has one new row, not 3: count tokens, not heads."),
        (
            {"q": 5},
            "q has one new row: the sixth token's. 5 rows: that is how many were there before.",
        ),
        (
            {"k": 5},
            "k has one new row: the sixth token's. 5 rows: that is how many were there before.",
        ),
        ({"k": -1}, "k has one new row: the sixth token's. A number of rows is never negative."),
        ({"k": 0}, "later tokens will look at the new one too"),
        (
            {"v": 7},
            "v has one new row, not 7: the rows of earlier tokens depend on nothing that comes after them",
        ),
        ({"q": "one"}, "'q' should be a whole number; it is 'one'."),
        ({"earlier outputs change": "no"}, "should be True or False; it is 'no'"),
        ({"o": 1}, "a dict with the keys 'q', 'k', 'v', 'earlier outputs change'"),
    ],
)
def test_what_changes_names_wrong_answers(change, sentence):
    hears("2.1", CHANGES | change, sentence)


def test_what_changes_knows_the_heads_of_the_model_given(tiny_decoder):
    decoder = tiny_decoder(num_heads=8, num_kv_heads=2)
    hears("2.1", CHANGES | {"q": 8}, "count tokens, not heads", decoder=decoder)


def test_what_changes_half_filled_in_is_not_answered():
    assert judge("2.1", CHANGES | {"v": None}).state == "not answered yet"


# --- 2.2 -------------------------------------------------------------------------------------------------------------


def positions(length, new):
    return list(range(length, length + new))


def may_attend(length, new):
    return torch.ones(new, length + new, dtype=torch.bool).tril(length)


@pytest.mark.parametrize(
    "answer",
    [
        (positions, may_attend),
        (lambda n, m: torch.arange(n, n + m)[None], lambda n, m: may_attend(n, m)[None, None]),
        (positions, lambda n, m: [[column <= n + row for column in range(n + m)] for row in range(m)]),
        (positions, lambda n, m: may_attend(n, m).int()),
    ],
)
def test_where_am_i_takes_lists_and_tensors(answer):
    check("2.2", answer, strict=True)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda n, m: list(range(m)), "gave [0, 1]: positions from 0, as if the cache were empty"),
        (lambda n, m: list(range(n + m)), "only the new tokens are fed"),
        (lambda n, m: [n + i + 1 for i in range(m)], "gave [4, 5], one too far: places count from 0"),
        (lambda n, m: [n] * m, "each new token has a place of its own"),
        (lambda n, m: [n, n + 9], "gave [3, 12]; wanted [3, 4]"),
        (lambda n, m: n, "should be a list of places; it is 3"),
        (
            lambda n, m: [n + i - 1 for i in range(m)],
            "gave [2, 3], one too small: the cached tokens stand at 0",
        ),
        (lambda n, m: [n], "gave [3]: one place per new token, so 2 in all; wanted [3, 4]."),
        (lambda n, m: list(range(n, n + m + 1)), "gave [3, 4, 5]: one place per new token, so 2 in all"),
        (lambda n, m: list(range(n, m)), "gave []: range(3, 2) is empty: the stop is length + new."),
        (lambda n, m: positions(n, m) if n else None, "(0, 4) is None; wanted [0, 1, 2, 3]."),
    ],
)
def test_where_am_i_names_wrong_positions(wrong, sentence):
    hears("2.2", (wrong, may_attend), sentence)


@pytest.mark.parametrize(
    "table", [may_attend, lambda n, m: may_attend(n, m).tolist(), lambda n, m: may_attend(n, m)[None, None]]
)
def test_where_am_i_sees_a_pair_in_the_wrong_order(table):
    hears(
        "2.2",
        (table, positions),
        "should be a list of places; is it may_attend? Order: (positions, may_attend).",
    )


def test_where_am_i_with_one_function_only():
    hears("2.2", positions, "1 thing(s) came. Pass both in brackets: (positions, may_attend).")


@pytest.mark.parametrize("missing", [None, lambda n, m: None, lambda n, m: print(end="")])
def test_where_am_i_half_done(missing):
    result = judge("2.2", (positions, missing))
    assert str(result).endswith(
        "not answered yet. positions is right so far; may_attend returns nothing yet."
    )
    assert str(judge("2.2", (missing, may_attend))).endswith(
        "not answered yet. positions returns nothing yet."
    )
    hears("2.2", (lambda n, m: list(range(m)), missing), "positions from 0")


def swapped_at_six(n, m):
    table = may_attend(n, m)
    return table.flip(0) if n == 6 else table


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        # HAZARDS 35: 0.0 and [0.0, 0.5] are the fault, 2.0 and [1.5, 2.0] the right values
        (
            lambda n, m: torch.ones(m, n + m, dtype=torch.bool).tril(),
            "gives 0.0 for one new token and [0.0, 0.5]",
        ),
        (
            lambda n, m: torch.ones(m, n + m, dtype=torch.bool).tril(),
            "wanted 2.0 and [1.5, 2.0]. The triangle starts top-left",
        ),
        (
            lambda n, m: torch.ones(m, n + m, dtype=torch.bool),
            "the first new token sees the second, its own future",
        ),
        (lambda n, m: torch.ones(m, n + m, dtype=torch.bool).tril(n - 1), "do not see themselves"),
        (lambda n, m: ~may_attend(n, m), "is the other way round"),
        (
            lambda n, m: None if m == 1 else may_attend(n, m),
            "(4, 1) is None: a cache may skip the mask for one token; here write the table, one row of True.",
        ),
        (
            lambda n, m: may_attend(n, m) if n else None,
            "(0, 4) is None: a cache may skip the mask for a whole text; here write the table",
        ),
        (
            lambda n, m: may_attend(n, m) if n != 6 else None,
            "(6, 3) is None: write the table for every length",
        ),
        (
            lambda n, m: torch.ones(m, n + m, dtype=torch.bool).tril(),
            "(3, 2): row 0 is T F F F F, wanted T T T T F. With q = 0 and v = [0, 1, 2, 3, 4] attention gives 0.0",
        ),
        (
            lambda n, m: torch.arange(n + m).expand(m, -1) < n if n else may_attend(n, m),
            "(3, 2): row 0 is T T T F F, wanted T T T T F: only the cached tokens are seen",
        ),
        (
            lambda n, m: (torch.arange(n + m) < n) | torch.eye(n + m, dtype=torch.bool)[n:],
            "(3, 2): row 1 is T T T F T, wanted T T T T T: a new token also sees the new ones before it",
        ),
        (
            lambda n, m: may_attend(n, m) & (torch.arange(n + m) >= n),
            "(3, 2): row 0 is F F F T F, wanted T T T T F: the cached tokens are hidden",
        ),
        (
            lambda n, m: torch.eye(n + m, dtype=torch.bool)[n:],
            "(3, 2): row 0 is F F F T F, wanted T T T T F: each new token sees only itself",
        ),
        (
            lambda n, m: may_attend(n, m).flip(1),
            "(3, 2): row 0 is F T T T T, wanted T T T T F: the table is mirrored",
        ),
        (
            lambda n, m: may_attend(n, m).flip(0),
            "(3, 2): row 0 is T T T T T, wanted T T T T F: the rows are upside down",
        ),
        (lambda n, m: may_attend(n, m).flip(0, 1), "the table is turned round"),
        (lambda n, m: may_attend(n, m).T, "the table lies on its side, a row is a new token; wanted (2, 5)"),
        (lambda n, m: may_attend(n, m)[:, n:], "the 3 cached tokens are missing"),
        (lambda n, m: may_attend(0, n + m), "has a row for every token; only the new ones ask, 2 of them"),
        (lambda n, m: torch.where(may_attend(n, m), 0.0, -torch.inf), "should hold True and False"),
        (
            lambda n, m: may_attend(n, m) if n else ~may_attend(n, m).tril(-1),
            "in a prefill of 4 a token sees its own future",
        ),
        (
            lambda n, m: may_attend(n, m) & (torch.arange(n + m) > 0),
            "(3, 2): row 0 is F T T T F, wanted T T T T F.",
        ),
        (lambda n, m: "x", "should be a table of True and False"),
        (swapped_at_six, "may_attend(6, 3)"),
    ],
)
def test_where_am_i_names_wrong_tables(wrong, sentence):
    if wrong is swapped_at_six:
        sentence = "swapped_at_six(6, 3): row 0 is T T T T T T T T T, wanted T T T T T T T F F"
    hears("2.2", (positions, wrong), sentence)


def test_where_am_i_does_not_divide_by_nothing():
    def hides_first(n, m):
        table = may_attend(n, m)
        table[0] = False
        return table

    hears("2.2", (positions, hides_first), "hides everything")


# --- 2.3 -------------------------------------------------------------------------------------------------------------


def kv_bytes(layers, kv_heads, head_dim, tokens, bytes_per_value, sequences=1):
    return 2 * layers * kv_heads * head_dim * tokens * bytes_per_value * sequences


@pytest.mark.parametrize("right", [kv_bytes, lambda *a, **k: float(kv_bytes(*a, **k))])
def test_bill_passes(right):
    check("2.3", right, strict=True)
    assert judge("2.3", right).sentence == "No query head and no MLP parameter appears in the bill."


def test_bill_and_outweighs_want_functions_by_the_names_of_the_notebook():
    hears("2.3", 23_040_000, "bill should be a function; it is 23040000.")
    hears("2.4", 25_705, "equal_at should be a function; it is 25705.")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        # HAZARDS 37: 23,040,000 is right, 69,120,000 the fault
        (lambda l, h, d, n, b, sequences=1: 2 * l * 9 * d * n * b, "69,120,000 is what 9 query heads give"),
        (
            lambda l, h, d, n, b, sequences=1: l * h * d * n * b,
            "half of 23,040,000: K and V are two tensors a layer",
        ),
        (lambda *a, **k: 8 * kv_bytes(*a, **k), "eight times 23,040,000: those are bits"),
        (lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, n, b), "the bill of one sequence"),
        (
            lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, n, 1, sequences),
            "(30, 3, 64, 1_000, 4) gave 11,520,000, a quarter of 46,080,000: each value takes bytes_per_value bytes.",
        ),
        (
            lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, n, 2, sequences),
            "(30, 3, 64, 1_000, 4) gave 23,040,000, half of 46,080,000: each value takes bytes_per_value bytes.",
        ),
        (
            lambda l, h, d, n, b, sequences=1: l * h * d * n * sequences,
            "(30, 3, 64, 1_000, 4) gave 5,760,000; wanted 46,080,000: each value takes bytes_per_value bytes.",
        ),
        (
            lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, 1, b),
            "gave 23,040; wanted 23,040,000. That is the",
        ),
        (
            lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, 1, b),
            "the bill of one token; every token held",
        ),
        (lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, 1, n, b), "as if a key were one number; each key"),
        (lambda l, h, d, n, b, sequences=1: kv_bytes(l, 1, d, n, b), "one KV head's share; every KV head"),
        (
            lambda l, h, d, n, b, sequences=1: kv_bytes(l, h, d, n, b) // sequences,
            "divided by sequences; each sequence has a cache of its own: multiply by them.",
        ),
        (lambda l, *a, **k: kv_bytes(1, *a, **k), "one layer's share"),
        (lambda *a, **k: kv_bytes(*a, **k) / 2**20, "that is in MiB; bytes are wanted, 23,040,000"),
        (lambda *a, **k: kv_bytes(*a, **k) + 1, "gave 23,040,001; wanted 23,040,000"),
    ],
)
def test_bill_names_wrong_answers(wrong, sentence):
    hears("2.3", wrong, sentence)


# --- 2.4 -------------------------------------------------------------------------------------------------------------


def tokens_until_equal(weight_bytes, bytes_per_token, sequences=1):
    return weight_bytes // (bytes_per_token * sequences)


def test_outweighs_passes_rounded_down():
    check("2.4", tokens_until_equal, strict=True)
    llama, smol = (2 * 6_738_415_616, 524_288), (4 * 134_515_008, 46_080)
    assert [tokens_until_equal(*llama), tokens_until_equal(*llama, 8), tokens_until_equal(*smol)] == [
        25_705,
        3_213,
        11_676,
    ]
    assert tokens_until_equal(2 * 8_030_261_248, 131_072) == 122_532


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda w, b, sequences=1: w / b / sequences,
            "gave 25,705.02: whole tokens are wanted, rounded down to 25,705",
        ),
        (
            lambda w, b, sequences=1: round(w / b / sequences),
            "gave 11,677: with that many the cache is already the heavier",
        ),
        (
            lambda w, b, sequences=1: w // b,
            "gave 25,705, the tokens of all sequences together; 8 share them, 3,213 each",
        ),
        (lambda w, b, sequences=1: w // b * sequences, "more sequences fill the memory sooner"),
        (
            lambda w, b, sequences=1: (w - 1) // (b * sequences),
            "(1_000, 10, sequences=2) gave 49; with 50 both weigh the same, and equal is still not more: wanted 50.",
        ),
        (lambda w, b, sequences=1: b // w, "not the other way round"),
        (lambda w, b, sequences=1: 2 * w // b // sequences, "gave 51,410; wanted 25,705"),
    ],
)
def test_outweighs_names_wrong_answers(wrong, sentence):
    hears("2.4", wrong, sentence)


# --- 2.5 -------------------------------------------------------------------------------------------------------------


def truncate(cache, length):
    if not 0 <= length <= cache.length:
        raise ValueError(
            f"truncate({length}): the cache holds {cache.length} tokens; choose 0 to {cache.length}"
        )
    cache.length = length


def kept(cache):
    return (*cache.keys, *cache.values)


def removes_with_minus_zero(cache, length):  # HAZARDS 41
    removed = cache.length - length
    for tensor in kept(cache):
        tensor[:, :, : cache.length][:, :, -removed:] = 0
    truncate(cache, length)


def slices_with_minus_zero(cache, length):  # HAZARDS 41
    removed = cache.length - length
    cache.length = len(range(cache.length)[:-removed])


def zeroes_what_is_cut(cache, length):
    truncate(cache, length)
    for tensor in kept(cache):
        tensor[:, :, length:] = 0


def zeroes_what_stays(cache, length):
    for tensor in kept(cache):
        tensor[:, :, : cache.length - length] = 0
    truncate(cache, length)


def slices(cache, length):
    truncate(cache, length)
    cache.keys = [k[:, :, :length] for k in cache.keys]


def clones(cache, length):
    truncate(cache, length)
    cache.values = [v.clone() for v in cache.values]


def hands_back_a_copy(cache, length):
    twin = copy.deepcopy(cache)
    truncate(twin, length)
    return twin


def takes_a_number_to_remove(cache, length):
    if length < cache.length:
        cache.length -= length


def cuts_then_looks(cache, length):
    held, cache.length = cache.length, length
    if not 0 <= length <= held:
        raise ValueError(f"{length} of {held}")


def raises_without_numbers(cache, length):
    if not 0 <= length <= cache.length:
        raise ValueError("too long")
    cache.length = length


def raises_index_error(cache, length):
    if length > cache.length:
        raise IndexError("11 of 10")
    cache.length = length


def clamps(cache, length):
    cache.length = min(length, cache.length)


def allows_negative(cache, length):
    if length > cache.length:
        raise ValueError(f"{length} > {cache.length}")
    cache.length = length


def removes_instead(cache, length):
    cache.length -= length


def counts_back_from_nothing(cache, length):
    cache.length = -(cache.length - length)


def always_empty(cache, length):
    cache.length = 0


def zeroes_everything(cache, length):
    for tensor in kept(cache):
        tensor.zero_()
    truncate(cache, length)


def cuts_the_list_of_layers(cache, length):
    truncate(cache, length)
    cache.keys = cache.keys[:length]


def refuses_zero(cache, length):
    if not 0 < length <= cache.length:
        raise ValueError(f"{length} of {cache.length}")
    cache.length = length


def skips_zero(cache, length):
    if length:
        truncate(cache, length)


def asks_the_cache(cache, length):
    cache.truncate(length)


def wants_its_len(cache, length):
    if length > len(cache):
        raise ValueError


def only_a_local_name(cache, length):
    length = min(length, cache.length)


def names(text):
    def truncate(cache, length):
        if not 0 <= length <= cache.length:
            raise ValueError(text.format(length=length, held=cache.length))
        cache.length = length

    return truncate


@pytest.mark.parametrize(
    "text", ["{length}: 0-{held}", "truncate({length}) of {held}.", "[0,{held}],{length}"]
)
def test_take_it_back_finds_the_numbers_in_any_text(text):
    check("2.5", names(text), strict=True)


def test_take_it_back_passes():
    check("2.5", truncate, strict=True)
    check("2.5", kv_cache.StaticKVCache.truncate, strict=True)
    result = judge("2.5", zeroes_what_is_cut)
    assert result.state == "passed" and "Zeros behind the new length are not needed" in result.sentence


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (removes_with_minus_zero, "should keep all 10: −0 emptied it"),
        (slices_with_minus_zero, "should keep all 10: −0 emptied it"),
        (zeroes_what_stays, "changed keys or values of the 7 tokens to keep"),
        (slices, "The buffers were replaced by new tensors or slices"),
        (clones, "The buffers were replaced by new tensors or slices"),
        (hands_back_a_copy, "the length is still 10: set cache.length; a copy handed back is not seen"),
        (takes_a_number_to_remove, "the length is 3: 7 is the length to keep, not the number to remove"),
        (cuts_then_looks, "the length is 11 afterwards: look before you cut"),
        (raises_without_numbers, "the text should name 11 and 10: 'too long'"),
        (raises_index_error, "raised IndexError: 11 of 10; a ValueError is wanted"),
        (
            clamps,
            "truncate(cache, 11) on a cache of 10 tokens was accepted; it would read a place nobody wrote",
        ),
        (
            allows_negative,
            "truncate(cache, -1) on a cache of 10 tokens was accepted; a length is never negative",
        ),
        (
            removes_instead,
            "left 0; wanted 10. `length` is how many tokens stay, not how many go.",
        ),
        (counts_back_from_nothing, "should keep all 10: −0 emptied it"),
        (always_empty, "truncate(cache, 10) on a cache of 10 tokens left 0; wanted 10."),
        (zeroes_everything, "changed keys or values; it should leave all as it is"),
        (cuts_the_list_of_layers, "left 1 of 2 layers: cache.keys and cache.values are lists of layers"),
        (
            refuses_zero,
            "truncate(cache, 0) on a cache of 10 tokens raised ValueError: 0 of 10. It can keep 0 to 10",
        ),
        (skips_zero, "After truncate(cache, 0) the length is still 10: set cache.length."),
        (only_a_local_name, "After truncate(cache, 7) the length is still 10: set cache.length."),
        (names("not 111 of {held}"), "the text should name 11 and 10: 'not 111 of 10'"),
        (names("{length} of 100"), "the text should name 11 and 10: '11 of 100'"),
        (
            asks_the_cache,
            "asks for cache.truncate. This cache has only keys, values and length; write what truncate does.",
        ),
        (wants_its_len, "object of type 'PreallocatedCache' has no len()."),
        (lambda cache, length: cache.nothing, "asks for cache.nothing. This cache has only keys, values and"),
        (lambda cache, length: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_take_it_back_names_wrong_answers(wrong, sentence):
    hears("2.5", wrong, sentence)


def test_take_it_back_decodes_again():
    def forgets_to_move_the_positions(cache, length):
        truncate(cache, length)
        held = 10 - length
        cache.positions = lambda new: torch.arange(cache.length + held, cache.length + held + new)[None]

    hears("2.5", forgets_to_move_the_positions, "token 8 gets other logits than from scratch")


def test_take_it_back_stub_is_not_answered():
    def truncate(cache, length):
        """Your code."""

    assert judge("2.5", truncate).state == "not answered yet"


# --- 2.6 -------------------------------------------------------------------------------------------------------------


def fork(cache, n):
    twin = copy.copy(cache)
    twin.rows = n
    twin.keys = [k.repeat(n, 1, 1, 1) for k in cache.keys]
    twin.values = [v.repeat(n, 1, 1, 1) for v in cache.values]
    return twin


def roads(pick=lambda logits: logits.argmax(-1, keepdim=True), rows=1, order=1):
    """A right continue_all, and with other arguments some wrong ones."""

    def continue_all(decoder, prompt, first_tokens, new):
        cache = _Growing(decoder.config)
        if rows > 1:  # the prompt of every row is fed
            cache.keys = [k.repeat(rows, 1, 1, 1) for k in cache.keys]
            cache.values = [v.repeat(rows, 1, 1, 1) for v in cache.values]
        decoder(torch.tensor([prompt] * rows), cache)
        branches = fork(cache, len(first_tokens) // rows)
        tokens = torch.tensor(first_tokens)[:, None]
        found = [tokens]
        for _ in range(new - 1):
            tokens = pick(decoder(tokens, branches)[:, -1])
            found.append(tokens)
        return torch.cat(found, dim=1).tolist()[::order]

    return continue_all


def prompt_for_each(decoder, prompt, first_tokens, new):
    return [_alone(decoder, [*prompt, first], new - 1) for first in first_tokens]


def feeds_the_last_one_too(decoder, prompt, first_tokens, new):
    return [row[:new] for row in roads()(decoder, prompt, first_tokens, new + 1)]


def then(change):
    """continue_all, its result changed."""

    def continue_all(decoder, prompt, first_tokens, new):
        return change(roads()(decoder, prompt, first_tokens, new), prompt)

    return continue_all


def opened(decoder, prompt):
    cache = kv_cache.KVCache(decoder.config)
    decoder(torch.tensor([prompt]), cache)
    return cache


def by_batch(first=lambda t: t[:, None], step=lambda found, logits: logits.argmax(-1, keepdim=True)):
    """The batched loop; ``first`` shapes the first tokens, ``step`` what is fed next."""

    def continue_all(decoder, prompt, first_tokens, new):
        branches = fork(opened(decoder, prompt), len(first_tokens))
        fed = first(torch.tensor(first_tokens))
        found = [torch.tensor(first_tokens)[:, None]]
        for _ in range(new - 1):
            logits = decoder(fed, branches)[:, -1]
            fed = step(found, logits)
            found.append(logits.argmax(-1, keepdim=True))
        return torch.cat(found, dim=1).tolist()

    return continue_all


def feeds_all_so_far(found, logits):
    return torch.cat([*found, logits.argmax(-1, keepdim=True)], dim=1)


def prompt_without_dimension(decoder, prompt, first_tokens, new):
    decoder(torch.tensor(prompt), kv_cache.KVCache(decoder.config))


def row_without_fork(decoder, prompt, first_tokens, new):
    cache, fed = opened(decoder, prompt), torch.tensor([first_tokens])
    found = [fed]
    for _ in range(new - 1):
        fed = decoder(fed, cache)[:, -1].argmax(-1, keepdim=True)
        found.append(fed)
    return torch.cat(found, dim=1).tolist()


def generates_from(whole_text, forked=True):
    def continue_all(decoder, prompt, first_tokens, new):
        cache, rows = opened(decoder, prompt), []
        for first in first_tokens:
            text = [*prompt, first] if whole_text else [first]
            own = cache.fork(1) if forked else cache
            rows.append([first, *generate(decoder, text, new - 1, cache=own)])
        return rows

    return continue_all


def one_cache_for_all(decoder, prompt, first_tokens, new):
    cache, rows = opened(decoder, prompt), []
    for token in first_tokens:
        row = [token]
        while len(row) < new:
            row.append(decoder(torch.tensor([row[-1:]]), cache)[0, -1].argmax().item())
        rows.append(row)
    return rows


def plain(decoder, prompt, first_tokens, new):
    text = torch.tensor([[*prompt, first] for first in first_tokens])
    for _ in range(new - 1):
        text = torch.cat((text, decoder(text)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return text[:, len(prompt) :].tolist()


def without_first(decoder, prompt, first_tokens, new):
    return [row[1:] for row in roads()(decoder, prompt, first_tokens, new + 1)]


def shares_lists(cache, n):
    twin = copy.copy(cache)
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        twin.keys[layer], twin.values[layer] = k.repeat(n, 1, 1, 1), v.repeat(n, 1, 1, 1)
    return twin


def shares_lists_of_views(cache, n):
    twin = fork(cache, n)
    update = twin.update

    def both(layer, k, v):
        cache.keys[layer] = torch.cat((cache.keys[layer], k[:1]), dim=2)
        return update(layer, k, v)

    twin.update = both
    return twin


def with_length_zero(cache, n):
    twin = fork(cache, n)
    twin.length = 0
    return twin


def empty_rows(cache, n):
    twin = fork(cache, n)
    twin.keys = [torch.cat((k[:1], torch.zeros_like(k[1:]))) for k in twin.keys]
    return twin


def expands(cache, n):
    twin = copy.copy(cache)
    twin.rows = n
    twin.keys = [k.expand(n, -1, -1, -1) for k in cache.keys]
    twin.values = [v.expand(n, -1, -1, -1) for v in cache.values]
    return twin


def forgets_rows(cache, n):
    twin = fork(cache, n)
    twin.rows = cache.rows
    return twin


def shares_values(cache, n):
    twin = fork(cache, n)
    twin.values = expands(cache, n).values
    return twin


def one_layer_only(cache, n):
    twin = fork(cache, n)
    twin.keys = twin.keys[:1]
    return twin


def repeats_tokens(cache, n):
    twin = copy.copy(cache)
    twin.keys = [k.repeat(1, 1, n, 1) for k in cache.keys]
    twin.values = [v.repeat(1, 1, n, 1) for v in cache.values]
    return twin


KV = {"cache_class": kv_cache.KVCache}


@pytest.mark.parametrize(("forking", "given"), [(fork, {}), (fork, KV), (kv_cache.KVCache.fork, KV)])
def test_many_roads_passes(forking, given):
    check("2.6", (forking, roads()), strict=True, **given)
    result = judge("2.6", (forking, roads()), **given)
    assert "24 tokens fed, where three separate runs feed 48" in result.sentence
    check("2.6", (forking, feeds_the_last_one_too), strict=True, **given)
    check("2.6", forking, roads(), strict=True, **given)  # brackets forgotten


def test_many_roads_passes_one_road_after_the_other():
    def continue_all(decoder, prompt, first_tokens, new):
        cache = kv_cache.KVCache(decoder.config)
        decoder(torch.tensor([prompt]), cache)
        return [
            [first, *generate(decoder, [*prompt, first], new - 1, cache=cache.fork(1))]
            for first in first_tokens
        ]

    check("2.6", (fork, continue_all), strict=True, **KV)


def test_many_roads_half_done():
    result = judge("2.6", (fork, None))
    assert str(result).endswith("not answered yet. fork is right so far; continue_all returns nothing yet.")
    hears("2.6", fork, "Pass both in brackets: (fork, continue_all).")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (forgets_rows, "fork(cache, 3).rows is 1; wanted 3"),
        (
            expands,
            "reaches the parent and the other rows: they share memory. repeat copies the numbers, expand does",
        ),
        (
            shares_values,
            "A number written into row 0 of fork(cache, 3) reaches the parent and the other rows",
        ),
        (repeats_tokens, "repeats the tokens: its keys have the shape (1, 2, 15, 8); rows are dimension 0."),
        (one_layer_only, "has 1 tensors in its keys and 2 in its values; wanted 2, one a layer"),
    ],
)
def test_many_roads_names_wrong_forks_of_the_chapters_cache(wrong, sentence):
    hears("2.6", (wrong, roads()), sentence, **KV)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda cache, n: cache, "fork gave the parent itself back"),
        (lambda cache, n: cache.keys, "fork should give a cache; it gave a list"),
        (lambda cache, n: copy.deepcopy(cache), "has 1 row(s) in its keys and 1 in its values; wanted 3"),
        (with_length_zero, "has length 0; wanted 5, or the next position is wrong"),
        (empty_rows, "Row 1 of fork(cache, 3) does not hold the parent's keys and values"),
        (shares_lists_of_views, "The parent changed while its fork was used: they share lists or tensors"),
    ],
)
def test_many_roads_names_wrong_forks(wrong, sentence):
    hears("2.6", (wrong, roads()), sentence)


def test_many_roads_names_a_parent_that_was_changed_by_forking():
    hears(
        "2.6",
        (shares_lists, roads()),
        "The parent changed while its fork was used: they share lists or tensors",
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (prompt_for_each, "the prompt went through the model more than once"),
        (
            roads(rows=3),
            "48 tokens were fed where 24 are enough: the prompt went through the model more than once",
        ),
        (roads(order=-1), "The rows are mixed"),
        (roads(pick=lambda logits: logits[:1].argmax(-1).expand(3)[:, None]), "The rows are mixed"),
        (roads(pick=lambda logits: logits.argmin(-1, keepdim=True)), "After first token 17 came"),
        (
            then(lambda rows, prompt: [row[1:] for row in rows]),
            "the first token itself is missing in front; with it, a list holds 5 tokens.",
        ),
        (without_first, "the first token itself is missing in front"),
        (
            then(lambda rows, prompt: [[9, *row[1:]] for row in rows]),
            "should start with the first token given, 17",
        ),
        (
            then(lambda rows, prompt: list(zip(*rows, strict=True))),
            "lies on its side: one list per first token.",
        ),
        (plain, "the prompt went through the model more than once"),
        (
            by_batch(step=feeds_all_so_far),
            "42 tokens were fed where 24 are enough: the prompt (12) once, then one token per road and step. "
            "Feed only each road's newest token.",
        ),
        (
            by_batch(step=lambda found, logits: found[0]),
            "It is right up to token 2: was the newest token fed?",
        ),
        (
            by_batch(step=lambda found, logits: logits.argmax(-1)),
            "got shape (3,). The first tokens go in as a column, one per row: shape (3, 1). "
            "So do the later ones: argmax(-1, keepdim=True).",
        ),
        (
            by_batch(first=lambda t: t),
            "got shape (3,). The first tokens go in as a column, one per row: shape (3, 1).",
        ),
        (
            by_batch(first=lambda t: t[None]),
            ". The first tokens go in as a column, one per row: shape (3, 1).",
        ),
        (row_without_fork, "gave 1 continuations for 3 first tokens. The first tokens go in as a column"),
        (prompt_without_dimension, "got shape (12,). The prompt goes in as one row: shape (1, 12)."),
        (
            generates_from(whole_text=False),
            "generate wants the whole text, prompt + first token, and feeds what the cache lacks.",
        ),
        (generates_from(whole_text=True, forked=False), "a road sees another road's tokens: use a fork."),
        (one_cache_for_all, "a road sees another road's tokens: use a fork."),
        (then(lambda rows, prompt: [prompt + row for row in rows]), "the prompt is not part of them"),
        (
            then(lambda rows, prompt: [row[:-1] for row in rows]),
            "should hold 5 tokens, its first token included",
        ),
        (then(lambda rows, prompt: rows[:2]), "gave 2 continuations for 3 first tokens"),
        (then(lambda rows, prompt: 3), "should give a list of lists of tokens; it gave a int"),
    ],
)
def test_many_roads_names_wrong_continuations(wrong, sentence):
    hears("2.6", (fork, wrong), sentence)
    assert ".." not in str(judge("2.6", (fork, wrong)))


def test_roads_of_the_check_differ_from_each_other():
    """Mixed rows can only be seen where the right rows differ."""
    decoder = _with_weights(_Counting(_tiny_config()))
    prompt = [(11 * i + 4) % 61 for i in range(12)]
    tails = {tuple(_alone(decoder, [*prompt, first], 4)[1:]) for first in (17, 2, 44)}
    assert len(tails) == 3
    assert isinstance(_Growing(_tiny_config()), Cache)
