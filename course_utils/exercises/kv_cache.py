"""The checks of chapter 2's exercises: what a cache must promise, its bill, taking tokens back, forking it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from course_utils.decoder import Cache, Decoder, DecoderConfig, attention
from course_utils.exercises.core import (
    Unanswered,
    Wrong,
    call,
    exercise,
    functions,
    in_order,
    named,
    one_thread,
    said,
    whole,
)


@functools.cache
def _tiny_config() -> DecoderConfig:
    return DecoderConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def _with_weights(decoder: Decoder) -> Decoder:
    """Random weights, the same each time, wide enough for the logits of different tokens to differ clearly."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in decoder.requires_grad_(False).named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return decoder.eval()


@exercise("2.1", "What changes?")
def _what_changes(answer, decoder: Decoder | None = None, tokens: Sequence[int] | None = None) -> str:
    keys = ("q", "k", "v", "earlier outputs change")
    if not isinstance(answer, dict) or set(answer) != set(keys):
        raise Wrong(f"The answer should be a dict with the keys {', '.join(repr(key) for key in keys)}.")
    change = answer["earlier outputs change"]
    if not isinstance(change, bool):
        raise Wrong(f"'earlier outputs change' should be True or False; it is {change!r}.")
    rows = {name: whole(answer[name], f"{name!r}") for name in "qkv"}
    if change:
        raise Wrong(
            "The causal mask hides the new token from all earlier ones, so their outputs cannot change."
        )
    heads = {9, 3}  # SmolLM2-135M's
    if decoder is not None:
        heads |= {decoder.config.num_heads, decoder.config.num_kv_heads}
    for name, count in rows.items():
        if count != 1:
            raise Wrong(_other_than_one_row(name, count, heads))
    return "One new row each, and the past stays as it was. " + _change_in_the_past(decoder, tokens)


def _other_than_one_row(name: str, count: int, heads: set[int]) -> str:
    if count == 0 and name == "q":
        return (
            "q has one new row: the new token asks once. It is not kept afterwards, but it must be computed."
        )
    if count == 0:
        return "k and v have one new row each: later tokens will look at the new one too, so it must be computed."
    if count < 0:
        return f"{name} has one new row: the sixth token's. A number of rows is never negative."
    if count == 5:
        return f"{name} has one new row: the sixth token's. 5 rows: that is how many were there before."
    if count in heads:
        return f"{name} has one new row, not {count}: count tokens, not heads."
    if name == "q":
        return f"q has one new row, not {count}: nobody asks an old question again."
    return (
        f"{name} has one new row, not {count}: the rows of earlier tokens depend on nothing that "
        "comes after them, so they are the same as before."
    )


def _change_in_the_past(decoder: Decoder | None, tokens: Sequence[int] | None) -> str:
    decoder = decoder or _with_weights(Decoder(_tiny_config()))
    if tokens is None:
        tokens = [(7 * i + 3) % decoder.config.vocab_size for i in range(12)]
    row = torch.as_tensor(tokens, dtype=torch.int64, device=decoder.device).reshape(1, -1)
    with torch.inference_mode():
        before, after = decoder(row[:, :-1]), decoder(row)[:, :-1]
    change, size = (after - before).abs().max().item(), before.abs().max().item()
    dtype = str(decoder.dtype).removeprefix("torch.")
    reason = f": rounding in {dtype}" if change <= 100 * torch.finfo(decoder.dtype).eps * size else ""
    length = row.shape[1]
    return (
        f"In a text of {length} tokens, run with and without the last, the logits of the {length - 1} earlier ones "
        f"differ by at most {change:.1e}{reason}."
    )


@exercise("2.2", "Where am I?")
def _where_am_i(answer, **given) -> str:
    positions, may_attend = functions(answer, "positions", "may_attend")
    in_order(
        ("positions", lambda: _judge_positions(positions)),
        ("may_attend", lambda: _judge_table(may_attend)),
    )
    return "The new tokens stand behind the cached ones and see all of them, themselves, and nothing later."


def _judge_positions(positions: Callable) -> None:
    for length, new in ((3, 2), (0, 4), (7, 1), (5, 3)):
        where, want = said(positions, length, new), list(range(length, length + new))
        try:
            found = call(positions, length, new)
        except Unanswered:
            if (length, new) == (3, 2):
                raise
            raise Wrong(f"{where} is None; wanted {want}.") from None
        got = [whole(place, where) for place in _flat(found, where)]
        if got != want:
            raise Wrong(f"{where} gave {got}{_why_places(got, length, new)}")


def _why_places(got: list[int], length: int, new: int) -> str:
    want = list(range(length, length + new))
    if not got and new <= length:
        return f": range({length}, {new}) is empty: the stop is length + new."
    if got == list(range(new)):
        return ": positions from 0, as if the cache were empty. Add what it holds."
    if got == list(range(length + new)):
        return ": only the new tokens are fed, so only their places are wanted."
    if len(got) != new:
        return f": one place per new token, so {new} in all; wanted {want}."
    if got == [place + 1 for place in want]:
        return f", one too far: places count from 0, so the first free one is {length}."
    if got == [place - 1 for place in want]:
        return f", one too small: the cached tokens stand at 0 to {length - 1}, so the first free place is {length}."
    if new > 1 and len(set(got)) == 1:
        return ": each new token has a place of its own."
    return f"; wanted {want}."


def _judge_table(may_attend: Callable) -> None:
    two, one = _table(may_attend, 3, 2), _table(may_attend, 4, 1)
    if torch.equal(two, ~_causal(3, 2)):
        raise Wrong(f"{said(may_attend, 3, 2)} is the other way round: True stands where a token may look.")
    for length, new in ((3, 2), (4, 1), (0, 4), (6, 3)):
        where, want, got = (
            said(may_attend, length, new),
            _causal(length, new),
            _table(may_attend, length, new),
        )
        if torch.equal(got, want):
            continue
        if not got.any(dim=1).all():
            raise Wrong(f"A row of {where} hides everything: every token may look at least at itself.")
        row = next(i for i in range(new) if not torch.equal(got[i], want[i]))
        why = _why_table(got, length, new)
        if "top-left" in why and one.any():
            came = f"attention gives {_seen(one)[0]} for one new token and {_seen(two)} for two"
            why = f". With q = 0 and v = [0, 1, 2, 3, 4] {came}; wanted 2.0 and [1.5, 2.0]. {why}"
        elif why:
            why = f": {why}"
        raise Wrong(f"{where}: row {row} is {_letters(got[row])}, wanted {_letters(want[row])}{why or '.'}")


def _causal(length: int, new: int) -> Tensor:
    """(new, length + new) bool: what a new token may look at."""
    return torch.ones(new, length + new, dtype=torch.bool).tril(length)


def _letters(row: Tensor) -> str:
    return " ".join("FT"[int(value)] for value in row)


def _why_table(got: Tensor, length: int, new: int) -> str:
    """The cause of a wrong table where it is a known one, else an empty text."""
    want = _causal(length, new)
    future = bool((got & ~want).any())
    if length == 0 and future:
        return f"in a prefill of {new} a token sees its own future."
    cached = (torch.arange(length + new) < length).expand(new, -1)
    itself = torch.ones_like(want).tril(length).triu(length)
    causes = (
        (
            want.tril(0),
            "The triangle starts top-left, as if the cache were empty: shift it by length.",
        ),
        (want.tril(length - 1), "the new tokens do not see themselves; a token may look at its own place."),
        (cached, "only the cached tokens are seen; a new one also sees itself and the new ones before it."),
        (cached | itself, "a new token also sees the new ones before it, not only itself."),
        (want & ~cached, "the cached tokens are hidden; a new token sees all of them."),
        (itself, "each new token sees only itself; it also sees all that stand before it."),
        (want.flip(1), "the table is mirrored: column 0 is the first token of the text."),
        (want.flip(0), "the rows are upside down: row 0 is the first new token."),
        (
            want.flip(0, 1),
            "the table is turned round: row 0 is the first new token, column 0 the first of all.",
        ),
    )
    for table, cause in causes:
        if torch.equal(got, table):
            return cause
    if got[0].all():
        return "the first new token sees the second, its own future."
    return "a token sees its own future." if future else ""


def _table(may_attend: Callable, length: int, new: int) -> Tensor:
    where = said(may_attend, length, new)
    try:
        found = call(may_attend, length, new)
    except Unanswered:
        if (length, new) == (3, 2):
            raise
        raise Wrong(f"{where} is None: {_why_no_mask(length, new)}") from None
    try:
        table = torch.as_tensor(found)
    except Exception:
        raise Wrong(f"{where} should be a table of True and False; it is {found!r}.") from None
    if table.ndim == 4 and table.shape[:2] == (1, 1):
        table = table[0, 0]
    shape, wanted = tuple(table.shape), (new, length + new)
    if shape != wanted:
        raise Wrong(f"{where} has {_why_shape(shape, length, new)}")
    if table.dtype != torch.bool and not torch.isin(table, torch.tensor([0, 1], dtype=table.dtype)).all():
        raise Wrong(f"{where} should hold True and False; it holds numbers of type {table.dtype}.")
    return table.bool().cpu()


def _why_no_mask(length: int, new: int) -> str:
    if new == 1:
        return "a cache may skip the mask for one token; here write the table, one row of True."
    if length == 0:
        return "a cache may skip the mask for a whole text; here write the table, a triangle of True."
    return "write the table for every length and every number of new tokens."


def _why_shape(shape: tuple[int, ...], length: int, new: int) -> str:
    total = length + new
    wanted = f"wanted {(new, total)}."
    if shape == (new, new):
        return f"the shape {shape}: the {length} cached tokens are missing; {wanted}"
    if shape == (total, total):
        return f"a row for every token; only the new ones ask, {new} of them: {wanted}"
    if shape == (total, new):
        return f"the shape {shape}: the table lies on its side, a row is a new token; {wanted}"
    return f"the shape {shape}; wanted (new, length + new) = {(new, total)}."


def _seen(table: Tensor) -> list[float]:
    """What attention gives with q = 0 (equal weights) over v = [0, 1, 2, 3, 4]: the mean of the places seen."""
    new, total = table.shape
    q, k = torch.zeros(1, 1, new, 2), torch.zeros(1, 1, total, 2)
    v = torch.arange(total).float().view(1, 1, total, 1).expand(1, 1, total, 2)
    return [round(value, 4) for value in attention(q, k, v, table[None, None])[0, 0, :, 0].tolist()]


def _flat(found, where: str) -> list:
    """A list of places as a list; (1, new) tensors too. Wrong for a table: then the pair stands in the other order."""
    if isinstance(found, Tensor):
        nested, places = found.ndim > 1 and found.numel() != found.shape[-1], found.reshape(-1).tolist()
    elif isinstance(found, Iterable) and not isinstance(found, (str, bytes, dict)):
        places = list(found)
        nested = any(isinstance(p, (list, tuple)) or isinstance(p, Tensor) and p.ndim for p in places)
    else:
        raise Wrong(f"{where} should be a list of places; it is {found!r}.")
    if nested or any(isinstance(place, bool) for place in places):
        raise Wrong(f"{where} should be a list of places; is it may_attend? Order: (positions, may_attend).")
    return places


_SHARES = {  # of the bill that comes out where one factor is forgotten
    "layers": "one layer's share; every layer keeps its own keys and values",
    "kv_heads": "one KV head's share; every KV head keeps its own keys and values",
    "head_dim": "as if a key were one number; each key and each value has head_dim of them",
    "tokens": "the bill of one token; every token held has its own keys and values",
    "sequences": "the bill of one sequence; each sequence has a cache of its own",
}


@exercise("2.3", "The bill")
def _bill(answer, **given) -> str:
    (bill,) = functions(answer, "bill")
    cases = (
        ((30, 3, 64, 1000, 2), {}, 23_040_000),  # SmolLM2-135M, 16 bit
        ((32, 32, 128, 4096, 2), {}, 2 * 2**30),  # Llama-2-7B
        ((32, 8, 128, 1, 2), {}, 131_072),  # Llama-3-8B, one token
        ((30, 3, 64, 1000, 4), {}, 46_080_000),
        ((30, 3, 64, 1000, 2), {"sequences": 4}, 92_160_000),
    )
    for args, more, want in cases:
        where = said(bill, *args, **more)
        returned = call(bill, *args, **more)
        for unit, size in (("MB", 1e6), ("MiB", 2**20), ("GB", 1e9), ("GiB", 2**30)):
            if isinstance(returned, (int, float)) and math.isclose(returned, want / size, rel_tol=1e-3):
                raise Wrong(f"{where} gave {returned:,.4g}: that is in {unit}; bytes are wanted, {want:,}.")
        got = whole(returned, where)
        if got != want:
            _explain_bill(bill, args, more, got, want)
    return "No query head and no MLP parameter appears in the bill."


def _explain_bill(bill: Callable, args: tuple, more: dict, got: int, want: int) -> None:
    if got == 69_120_000:
        raise Wrong("69,120,000 is what 9 query heads give; the cache holds KV heads, of which there are 3.")
    where = said(bill, *args, **more)
    forgotten = _without_effect(bill, args, more, got)
    if forgotten == "bytes_per_value":  # told with 4 bytes, where half is not what a forgotten K or V gives
        _explain_bytes(bill)
    if got * 2 == want:
        raise Wrong(f"{where} gave {got:,}, half of {want:,}: K and V are two tensors a layer.")
    if got == 8 * want:
        raise Wrong(f"{where} gave {got:,}, eight times {want:,}: those are bits.")
    if more and got * more["sequences"] ** 2 == want:
        raise Wrong(
            f"{where} gave {got:,}, divided by sequences; each sequence has a cache of its own: multiply by them."
        )
    if forgotten:
        raise Wrong(f"{where} gave {got:,}; wanted {want:,}. That is {_SHARES[forgotten]}.")
    raise Wrong(f"{where} gave {got:,}; wanted {want:,}.")


def _without_effect(bill: Callable, args: tuple, more: dict, got: int) -> str:
    """The first argument whose double changes nothing; "" where each counts."""
    names = ("layers", "kv_heads", "head_dim", "tokens", "bytes_per_value")
    for place, name in enumerate(names):
        double = [2 * value if i == place else value for i, value in enumerate(args)]
        if call(bill, *double, **more) == got:
            return name
    return "sequences" if more and call(bill, *args) == got else ""


def _explain_bytes(bill: Callable) -> None:
    args, want = (30, 3, 64, 1000, 4), 46_080_000
    where = said(bill, *args)
    got = whole(call(bill, *args), where)
    part = {4 * got: ", a quarter of", 2 * got: ", half of"}.get(want, "; wanted")
    raise Wrong(f"{where} gave {got:,}{part} {want:,}: each value takes bytes_per_value bytes.")


@exercise("2.4", "When the cache outweighs the weights")
def _outweighs(answer, **given) -> str:
    (equal_at,) = functions(answer, "equal_at")
    llama_2, per_token = 2 * 6_738_415_616, 2 * 32 * 32 * 128 * 2
    cases = (
        ((llama_2, per_token), {}),
        ((2 * 8_030_261_248, 2 * 32 * 8 * 128 * 2), {}),  # Llama-3-8B, fp16
        ((4 * 134_515_008, 2 * 30 * 3 * 64 * 4), {}),  # SmolLM2-135M, float32
        ((llama_2, per_token), {"sequences": 8}),
        ((1000, 10), {"sequences": 2}),  # the example: nothing is left over
    )
    for (weights, token), more in cases:
        sequences = more.get("sequences", 1)
        want = weights // (token * sequences)  # 25,705 · 122,532 · 11,676 · 3,213 · 50
        where = said(equal_at, weights, token, **more)
        returned = call(equal_at, weights, token, **more)
        if isinstance(returned, float) and math.isfinite(returned) and want < returned < want + 1:
            raise Wrong(f"{where} gave {returned:,.2f}: whole tokens are wanted, rounded down to {want:,}.")
        got = whole(returned, where)
        if got != want:
            raise Wrong(f"{where} gave {got:,}{_why_tokens(got, weights, token, sequences)}")
    return (
        "Fewer KV heads push that point out: Llama-3-8B holds almost five times as many tokens as Llama-2-7B."
    )


def _why_tokens(got: int, weights: int, token: int, sequences: int) -> str:
    want, left_over = divmod(weights, token * sequences)
    if got == want + 1:
        return f": with that many the cache is already the heavier one; round down, {want:,}."
    if got == want - 1 and not left_over:
        return f"; with {want:,} both weigh the same, and equal is still not more: wanted {want:,}."
    if sequences > 1 and got == weights // token:
        return f", the tokens of all sequences together; {sequences} share them, {want:,} each."
    if sequences > 1 and got >= (weights // token) * sequences:
        return ": more sequences fill the memory sooner, not later; divide by them."
    if got == token // weights:
        return ": weights divided by bytes per token, not the other way round."
    return f"; wanted {want:,}."


class _Preallocated(Cache):
    """A cache of fixed capacity, buffers (rows, kv_heads, capacity, head_dim); tokens from ``length`` on are not read."""

    def __init__(self, config: DecoderConfig, capacity: int = 16) -> None:
        shape = (1, config.num_kv_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_layers)]
        self.length = 0

    def positions(self, new: int) -> Tensor:
        return torch.arange(self.length, self.length + new)[None]

    def mask(self, new: int) -> Tensor:
        return _causal(self.length, new)[None, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = self.length + k.shape[2]
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            kept[:, :, self.length : total] = new
        return self.keys[layer][:, :, :total], self.values[layer][:, :, :total]


_Preallocated.__name__ = "PreallocatedCache"  # a learner reads it in Python's own messages


@exercise("2.5", "Take it back")
def _take_it_back(answer, **given) -> str:
    (truncate,) = functions(answer, "truncate")
    decoder = _with_weights(Decoder(_tiny_config()))
    tokens = [(5 * i + 2) % 61 for i in range(10)]
    with torch.inference_mode(), one_thread():
        _keeps_all(truncate, decoder, tokens)
        zeroed = _keeps_seven(truncate, decoder, tokens)
        for length in (1, 0):  # fewer than layers: a cut through the list of layers shows
            _cut_in_place(truncate, _filled(decoder, tokens), length)
        _refuses(truncate, decoder, tokens)
    note = " (Zeros behind the new length are not needed: nobody reads there.)" if zeroed else ""
    return f"Going back costs nothing: the length moves, no number does.{note}"


def _filled(decoder: Decoder, tokens: list[int]) -> _Preallocated:
    cache = _Preallocated(decoder.config)
    decoder(torch.tensor([tokens]), cache)
    return cache


def _held(cache, length: int) -> Tensor:
    """Keys and values of the first ``length`` tokens in all layers, copied."""
    return torch.cat(
        [torch.as_tensor(kept)[:, :, :length].flatten() for kept in (*cache.keys, *cache.values)]
    )


def _cut(truncate: Callable, cache: _Preallocated, length: int):
    """What ``truncate(cache, length)`` returns; an exception is Wrong."""
    held = cache.length
    where = f"truncate(cache, {length}) on a cache of {held} tokens"
    try:
        return truncate(cache, length)
    except NotImplementedError:
        raise Unanswered from None
    except ValueError as error:
        raise Wrong(f"{where} raised {named(error)}. It can keep 0 to {held} tokens.") from None
    except Exception as error:
        if isinstance(error, AttributeError) and error.obj is cache:
            raise Wrong(
                f"truncate(cache, {length}) asks for cache.{error.name}. This cache has only keys, values and length; "
                "write what truncate does."
            ) from None
        raise Wrong(f"{where} raised {named(error)}.") from None


def _keeps_all(truncate: Callable, decoder: Decoder, tokens: list[int]) -> None:
    cache = _filled(decoder, tokens)
    before = _held(cache, 10)
    _cut(truncate, cache, 10)
    where = "truncate(cache, 10) on a cache of 10 tokens"
    if cache.length == 0 or _blank(cache, 10):
        seven = _filled(decoder, tokens)
        _cut(truncate, seven, 7)
        if seven.length == 3:
            raise Wrong(
                f"{where} left {cache.length}; wanted 10. `length` is how many tokens stay, not how many go."
            )
        if seven.length and not _blank(seven, 7):  # only the cut by nothing went wrong
            raise Wrong(
                f"{where} should keep all 10: −0 emptied it. Nothing was to be removed, "
                "and a slice [:-0] keeps nothing; cut to the length, not by a number of tokens."
            )
    if cache.length != 10:
        raise Wrong(f"{where} left {cache.length}; wanted 10.")
    if not cache.keys or not cache.values or not torch.equal(before, _held(cache, 10)):
        raise Wrong(f"{where} changed keys or values; it should leave all as it is.")


def _blank(cache, length: int) -> bool:
    """Whether nothing is left of the keys of the first ``length`` tokens."""
    return all(not kept[:, :, :length].any() for kept in cache.keys)


def _cut_in_place(truncate: Callable, cache: _Preallocated, length: int) -> None:
    """Cut 10 tokens to ``length``; Wrong unless the length, and only the length, moved."""
    layers, addresses, before = len(cache.keys), _addresses(cache), _held(cache, length)
    returned = _cut(truncate, cache, length)
    after = f"After truncate(cache, {length}) the length is"
    if cache.length == 10:
        copied = returned is not None and returned is not cache
        raise Wrong(
            f"{after} still 10: set cache.length{'; a copy handed back is not seen' if copied else ''}."
        )
    if cache.length == 10 - length:
        raise Wrong(f"{after} {cache.length}: {length} is the length to keep, not the number to remove.")
    if cache.length != length:
        raise Wrong(f"{after} {cache.length}; wanted {length}.")
    if (left := {len(cache.keys), len(cache.values)}) != {layers}:
        raise Wrong(
            f"truncate(cache, {length}) left {min(left)} of {layers} layers: cache.keys and cache.values are lists of "
            "layers, so [:length] on them cuts layers, not tokens."
        )
    if _addresses(cache) != addresses:
        raise Wrong(
            "The buffers were replaced by new tensors or slices; a preallocated cache keeps its buffers as they are."
        )
    if not torch.equal(before, _held(cache, length)):
        raise Wrong(f"truncate(cache, {length}) changed keys or values of the {length} tokens to keep.")


def _keeps_seven(truncate: Callable, decoder: Decoder, tokens: list[int]) -> bool:
    """Whether what lies behind the length was zeroed; Wrong unless three tokens can be decoded again."""
    cache = _filled(decoder, tokens)
    _cut_in_place(truncate, cache, 7)
    zeroed = all(not kept[:, :, 7:10].any() for kept in cache.keys)
    again = [40, 8, 23]
    for place, token in enumerate(again):
        got = decoder(torch.tensor([[token]]), cache)[:, -1]
        want = decoder(torch.tensor([tokens[:7] + again[: place + 1]]))[:, -1]
        if not torch.allclose(got, want, atol=1e-4):
            far = (got - want).abs().max().item()
            raise Wrong(
                f"After truncate(cache, 7), token {8 + place} gets other logits than from scratch (by {far:.1e})."
            )
    return zeroed


def _addresses(cache) -> list:
    return [(tuple(kept.shape), kept.data_ptr()) for kept in (*cache.keys, *cache.values)]


def _refuses(truncate: Callable, decoder: Decoder, tokens: list[int]) -> None:
    for length in (11, -1):
        cache = _filled(decoder, tokens)
        call_text = f"truncate(cache, {length}) on a cache of 10 tokens"
        try:
            truncate(cache, length)
        except ValueError as error:
            if not all(re.search(rf"(?<!\d){number}(?!\d)", str(error)) for number in (length, 10)):
                raise Wrong(
                    f"{call_text} raises, but the text should name {length} and 10: {str(error)!r}."
                ) from None
        except Exception as error:
            raise Wrong(f"{call_text} raised {named(error)}; a ValueError is wanted.") from None
        else:
            why = "it would read a place nobody wrote" if length > 0 else "a length is never negative"
            raise Wrong(f"{call_text} was accepted; {why}. Raise a ValueError that names {length} and 10.")
        if cache.length != 10:
            raise Wrong(
                f"{call_text} raises, but the length is {cache.length} afterwards: look before you cut."
            )


class _Growing(Cache):
    """Keys and values grow by concatenation; stands in for the chapter's cache where none is given."""

    def __init__(self, config: DecoderConfig) -> None:
        self.keys = [
            torch.zeros(1, config.num_kv_heads, 0, config.head_dim) for _ in range(config.num_layers)
        ]
        self.values = list(self.keys)
        self.length = 0

    positions, mask = _Preallocated.positions, _Preallocated.mask

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer] = torch.cat((self.keys[layer], k), dim=2)
        self.values[layer] = torch.cat((self.values[layer], v), dim=2)
        return self.keys[layer], self.values[layer]


class _Counting(Decoder):
    """A decoder that remembers the tokens fed to it."""

    seen: tuple[Tensor, ...] = ()

    @property
    def fed(self) -> int:
        """Tokens fed, in all rows."""
        return sum(tokens.numel() for tokens in self.seen)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        if isinstance(tokens, Tensor):
            self.seen = (*self.seen, tokens.clone())
        return super().hidden(tokens, cache)


@exercise("2.6", "One prompt, many roads")
def _many_roads(answer, cache_class: Callable | None = None, **given) -> str:
    fork, continue_all = functions(answer, "fork", "continue_all")
    decoder = _with_weights(_Counting(_tiny_config()))
    with torch.inference_mode(), one_thread():
        fed = in_order(
            ("fork", lambda: _judge_fork(fork, decoder, cache_class or _Growing)),
            ("continue_all", lambda: _judge_continuations(continue_all, decoder)),
        )
    return f"Three roads from one prefill: {fed} tokens fed, where three separate runs feed {3 * 12 + 3 * 4}."


def _judge_fork(fork: Callable, decoder: Decoder, cache_class: Callable) -> None:
    parent = cache_class(decoder.config)
    decoder(torch.tensor([[3, 14, 15, 9, 26]]), parent)
    before, layers = _held(parent, 5), len(parent.keys)
    child = call(fork, parent, 3)
    if child is parent:
        raise Wrong("fork gave the parent itself back; its rows should be copied into a new cache.")
    if not all(hasattr(child, name) for name in ("keys", "values", "length", "advance")):
        raise Wrong(f"fork should give a cache; it gave a {type(child).__name__}.")
    if {len(child.keys), len(child.values)} != {layers}:
        raise Wrong(
            f"fork(cache, 3) has {len(child.keys)} tensors in its keys and {len(child.values)} in its values; "
            f"wanted {layers}, one a layer."
        )
    _judge_rows(child, parent)
    _parent_is_as_before(parent, before)
    _nothing_is_shared(child, parent)
    for step in ([[5], [35], [8]], [[9], [7], [9]]):
        try:
            decoder(torch.tensor(step), child)
        except Exception as error:
            raise Wrong(f"Feeding three rows to fork(cache, 3) raised {named(error)}.") from None
    _parent_is_as_before(parent, before)


def _judge_rows(child, parent) -> None:
    """Wrong unless the child of a parent with one row and 5 tokens holds three copies of it."""
    rows = [kept.shape[0] for kept in (*child.keys, *child.values)]
    shape, one = tuple(child.keys[0].shape), tuple(parent.keys[0].shape)
    for axis, what in ((1, "KV heads"), (2, "tokens"), (3, "features")):
        if len(shape) == 4 and shape[0] == 1 and shape[axis] == 3 * one[axis]:
            raise Wrong(
                f"fork(cache, 3) repeats the {what}: its keys have the shape {shape}; rows are dimension 0."
            )
    if set(rows) != {3}:
        raise Wrong(
            f"fork(cache, 3) has {rows[0]} row(s) in its keys and {rows[-1]} in its values; wanted 3 in every layer."
        )
    if child.length != 5:
        raise Wrong(
            f"fork(cache, 3) of 5 tokens has length {child.length}; wanted 5, or the next position is wrong."
        )
    for row in range(3):
        for kept, from_parent in zip(
            (*child.keys, *child.values), (*parent.keys, *parent.values), strict=True
        ):
            if not torch.equal(kept[row], from_parent[0]):
                raise Wrong(f"Row {row} of fork(cache, 3) does not hold the parent's keys and values.")
    if hasattr(parent, "rows") and getattr(child, "rows", None) != 3:
        raise Wrong(
            f"fork(cache, 3).rows is {getattr(child, 'rows', None)}; wanted 3: a cache also says how many rows it has."
        )


def _parent_is_as_before(parent, before: Tensor) -> None:
    shapes = {kept.shape[2] for kept in (*parent.keys, *parent.values)}
    if parent.length != 5 or shapes != {5} or not torch.equal(before, _held(parent, 5)):
        raise Wrong(
            "The parent changed while its fork was used: they share lists or tensors. Build new lists in the fork."
        )


def _nothing_is_shared(child, parent) -> None:
    """Write into row 0 of each tensor of the child: neither the parent nor another row may change."""
    for kept, from_parent in zip((*child.keys, *child.values), (*parent.keys, *parent.values), strict=True):
        old, others = from_parent.clone(), kept[1:].clone()
        row = kept[0].clone()
        kept[0] += 1
        places = [
            place
            for place, now, then in (("the parent", from_parent, old), ("the other rows", kept[1:], others))
            if not torch.equal(now, then)
        ]
        kept[0] = row
        if places:
            raise Wrong(
                f"A number written into row 0 of fork(cache, 3) reaches {' and '.join(places)}: they share memory. "
                "repeat copies the numbers, expand does not."
            )


_AS_A_COLUMN = "The first tokens go in as a column, one per row: shape (3, 1)."
_FORK_THE_CACHE = "a road sees another road's tokens: use a fork"


def _judge_continuations(continue_all: Callable, decoder: _Counting) -> int:
    """The number of tokens fed; Wrong unless the three continuations are right and the prompt was fed once."""
    prompt, firsts, new = [(11 * i + 4) % 61 for i in range(12)], [17, 2, 44], 5
    longer = [_alone(decoder, prompt + [first], new) for first in firsts]
    want = [row[:new] for row in longer]
    decoder.seen = ()
    try:
        got = _token_lists(call(continue_all, decoder, list(prompt), list(firsts), new))
    except Wrong as wrong:
        raise Wrong(_with_way_out(str(wrong), decoder.seen, len(prompt))) from None
    fed, enough = decoder.fed, len(prompt) + len(firsts) * (new - 1)
    if len(got) == new and all(len(row) == len(firsts) for row in got):
        raise Wrong("The table lies on its side: one list per first token.")
    if len(got) != len(firsts):
        as_row = any(tokens.shape == (1, len(firsts)) for tokens in decoder.seen)
        hint = f" {_AS_A_COLUMN}" if as_row else ""
        raise Wrong(f"continue_all gave {len(got)} continuations for {len(firsts)} first tokens.{hint}")
    if any(row[: len(prompt)] == prompt for row in got):
        raise Wrong("The continuations should start with their first token; the prompt is not part of them.")
    if got in ([row[1:] for row in want], [row[1:] for row in longer]):
        raise Wrong(
            f"In each list the first token itself is missing in front; with it, a list holds {new} tokens."
        )
    if any(len(row) != new for row in got):
        raise Wrong(
            f"Each continuation should hold {new} tokens, its first token included; the lists hold {[len(r) for r in got]}."
        )
    if fed > len(prompt) + len(firsts) * new:
        raise Wrong(_why_so_many(decoder.seen, prompt, fed, enough))
    if got != want:
        _explain_rows(got, want, firsts, decoder.seen)
    return fed


def _with_way_out(message: str, seen: tuple[Tensor, ...], length: int) -> str:
    """The message of an exception in continue_all, and what to do where the cause is known."""
    if "nothing is left to feed" in message:
        sequence = re.search(r"sequence has (\d+)", message)
        if sequence and int(sequence[1]) > length:
            return f"The cache holds more than the prompt: {_FORK_THE_CACHE}."
        return (
            "Nothing was left to feed: generate wants the whole text, prompt + first token, "
            "and feeds what the cache lacks."
        )
    if seen and seen[-1].numel() == 3 and seen[-1].shape != (3, 1):
        later = any(tokens.shape == (3, 1) for tokens in seen)
        return (
            f"{message} {_AS_A_COLUMN}{' So do the later ones: argmax(-1, keepdim=True).' if later else ''}"
        )
    if seen and seen[-1].numel() == length and seen[-1].shape != (1, length):
        return f"{message} The prompt goes in as one row: shape (1, {length})."
    return message


def _why_so_many(seen: tuple[Tensor, ...], prompt: list[int], fed: int, enough: int) -> str:
    start = f"{fed} tokens were fed where {enough} are enough: "
    body = prompt[:-1]  # its last token may be kept back and fed with the roads
    rows = [row for tokens in seen for row in tokens.tolist()]
    times = sum(row[i : i + len(body)] == body for row in rows for i in range(len(row)))
    if times > 1:
        return (
            f"{start}the prompt went through the model more than once. "
            "Feed it once, fork its cache, then feed one token a row."
        )
    return (
        f"{start}the prompt ({len(prompt)}) once, then one token per road and step. "
        "Feed only each road's newest token."
    )


def _explain_rows(
    got: list[list[int]], want: list[list[int]], firsts: list[int], seen: tuple[Tensor, ...]
) -> None:
    known, tails = all(row[0] in firsts for row in got), [row[1:] for row in want]
    if known and all(row[1:] in tails for row in got):
        raise Wrong(
            "The rows are mixed: a continuation belongs to another first token. Row i must follow first_tokens[i]."
        )
    for row, first in zip(got, firsts, strict=True):
        if row[0] != first:
            raise Wrong(f"A continuation is {row}; it should start with the first token given, {first}.")
    if got[0] == want[0] and all(len(tokens) == 1 for tokens in seen):
        raise Wrong(f"Only the first continuation is right; {_FORK_THE_CACHE}.")
    row = next(i for i in range(len(got)) if got[i] != want[i])
    same = next(i for i in range(len(want[row])) if got[row][i] != want[row][i])
    hint = f" It is right up to token {same}: was the newest token fed?" if same > 1 else ""
    raise Wrong(f"After first token {firsts[row]} came {got[row]}; alone it continues {want[row]}.{hint}")


def _alone(decoder: Decoder, tokens: list[int], new: int) -> list[int]:
    """The last of ``tokens`` and ``new`` greedy ones, each from a full forward."""
    start = len(tokens) - 1
    for _ in range(new):
        tokens = [*tokens, decoder(torch.tensor([tokens]), logits_to_keep=1)[0, -1].argmax().item()]
    return tokens[start:]


def _token_lists(found) -> list[list[int]]:
    try:
        rows = found.tolist() if isinstance(found, Tensor) else [list(row) for row in found]
        return [[int(token) for token in row] for row in rows]
    except Exception:
        raise Wrong(
            f"continue_all should give a list of lists of tokens; it gave a {type(found).__name__}."
        ) from None
