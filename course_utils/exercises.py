"""Checks of the exercises (COURSE 7.1): ``check("2.3", answer)`` says in one sentence what is right or wrong.

The order of judgement is the same everywhere: is it answered · right type and shape · a known wrong answer, with its
own sentence · one failing input with what came and what was wanted · passed, with one sentence of what it means.

A chapter adds a check with a function that raises :class:`Wrong` or :class:`Unanswered`, or returns that last sentence::

    @exercise("2.3", "The bill")
    def _bill(answer, **given) -> str: ...
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from course_utils.claims import emit, html_table, text_table
from course_utils.decoder import Cache, Decoder, DecoderConfig, attention

PASSED, WRONG, UNANSWERED = "passed", "not right yet", "not answered yet"
_SYMBOLS = {PASSED: "✓", WRONG: "✗", UNANSWERED: "○"}


class Wrong(Exception):
    """The answer is not right; the text is the sentence the learner reads."""


class Unanswered(Exception):
    """There is no answer yet: None, or a stub."""


@dataclass(frozen=True)
class Result:
    """One judgement: the exercise, its state (PASSED, WRONG or UNANSWERED) and one sentence."""

    id: str
    state: str
    sentence: str

    def __str__(self) -> str:
        return f"{_SYMBOLS[self.state]} Exercise {self.id}: {self.state}. {self.sentence}".strip()


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    judge: Callable[..., str]


EXERCISES: dict[str, Exercise] = {}
_results: dict[str, Result] = {}


def exercise(id: str, title: str) -> Callable:
    """Register the decorated function as the check of exercise ``id``, such as "2.3"."""

    def register(judge: Callable[..., str]) -> Callable[..., str]:
        EXERCISES[id] = Exercise(id, title, judge)
        return judge

    return register


def check(id: str, answer=None, strict: bool = False, **given) -> None:
    """Judge an answer and show the result; what ``answer`` is stands in the exercise's text.

    Never raises in a notebook: an exercise without an answer is "not answered yet", so that all cells can be run.
    ``strict=True`` (tests) raises AssertionError unless the answer passes.
    """
    result = judge(id, answer, **given)
    _results[id] = result
    symbol, sentence = _SYMBOLS[result.state], escape(result.sentence)
    html = f"<div><b>{symbol} Exercise {escape(id)}: {result.state}.</b> {sentence}</div>"
    emit(
        html, str(result), {"kind": "exercise", "id": id, "state": result.state, "sentence": result.sentence}
    )
    if strict and result.state != PASSED:
        raise AssertionError(str(result))


def judge(id: str, answer=None, **given) -> Result:
    """The judgement of ``check`` without showing it. Raises nothing an answer could cause."""
    if id not in EXERCISES:
        known = ", ".join(sorted(EXERCISES, key=_order))
        return Result(id, WRONG, f"There is no exercise {id!r}; the course has {known}.")
    try:
        _must_be_answered(answer)
        return Result(id, PASSED, EXERCISES[id].judge(answer, **given))
    except Unanswered as missing:
        return Result(id, UNANSWERED, str(missing) or "Write your answer above and run the cell again.")
    except Wrong as wrong:
        return Result(id, WRONG, str(wrong))
    except Exception as error:  # whatever a learner's code does must not stop the notebook
        return Result(id, WRONG, f"The check stopped with {_named(error)}.")


def summary(chapter: int | None = None) -> None:
    """Show the exercises of a chapter (None: of all chapters met in this session) with their states, and the count."""
    met = {id.split(".")[0] for id in _results if id in EXERCISES} if chapter is None else {str(chapter)}
    chosen = [EXERCISES[id] for id in sorted(EXERCISES, key=_order) if not met or id.split(".")[0] in met]
    states = [_results[e.id].state if e.id in _results else UNANSWERED for e in chosen]
    rows = [(e.id, e.title, f"{_SYMBOLS[state]} {state}") for e, state in zip(chosen, states, strict=True)]
    head = ("exercise", "title", "state")
    count = f"{states.count(PASSED)} of {len(chosen)} solved"
    html = f"{html_table(head, [[escape(cell) for cell in row] for row in rows])}<p><b>{count}</b></p>"
    fields = {"kind": "exercises", "solved": states.count(PASSED), "of": len(chosen)}
    emit(html, f"{text_table(head, rows)}\n{count}", fields)


def reset() -> None:
    """Forget all results of this process."""
    _results.clear()


# --- for the checks --------------------------------------------------------------------------------------------------


def call(function: Callable, *args, **kwargs):
    """What the learner's function returns. Nothing returned counts as not answered, an exception as wrong."""
    try:
        returned = function(*args, **kwargs)
    except NotImplementedError:
        raise Unanswered from None
    except Exception as error:
        raise Wrong(f"{said(function, *args, **kwargs)} raised {_named(error)}.") from None
    if returned is None:
        raise Unanswered(f"{said(function, *args, **kwargs)} returns nothing yet.")
    return returned


def said(function: Callable, *args, **kwargs) -> str:
    """A call as one would write it: ``kv_bytes(30, 3, 64, 1_000, 2)``."""

    def shown(value) -> str:
        if isinstance(value, int):
            return f"{value:_}"
        return repr(value) if len(repr(value)) <= 60 else "…"

    parts = [shown(value) for value in args] + [f"{name}={shown(value)}" for name, value in kwargs.items()]
    return f"{getattr(function, '__name__', 'your function')}({', '.join(parts)})"


def functions(answer, *names: str) -> tuple[Callable, ...]:
    """The answer as functions of these names; Wrong where it is something else, Unanswered where one is missing."""
    found = answer if isinstance(answer, (tuple, list)) else (answer,)
    wanted = names[0] if len(names) == 1 else f"({', '.join(names)})"
    if len(found) != len(names):
        raise Wrong(f"The answer should be {wanted}; {len(found)} thing(s) came.")
    for name, function in zip(names, found, strict=True):
        _must_be_answered(function)
        if not callable(function):
            raise Wrong(f"{name} should be a function; it is {function!r}.")
    return tuple(found)


def whole(value, where: str) -> int:
    """``value`` as int; Wrong where it is no whole number."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Wrong(f"{where} should be a whole number; it is {value!r}.")
    if value != int(value):
        raise Wrong(f"{where} gave {value:,.2f}; a whole number is wanted.")
    return int(value)


def _must_be_answered(answer) -> None:
    """Unanswered for None, ``...``, a stub, or a tuple, list or dict that still holds one of them."""
    if isinstance(answer, dict):
        answer = tuple(answer.values())
    if isinstance(answer, (tuple, list)):
        for part in answer:
            _must_be_answered(part)
    elif answer is None or answer is ... or inspect.isfunction(answer) and _is_stub(answer):
        raise Unanswered


def _is_stub(function: Callable) -> bool:
    """Whether the body is only ``pass``, ``...``, a docstring or ``return None``."""
    idle = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}
    return all(
        i.opname in idle and (i.opname == "RESUME" or i.argval is None)
        for i in dis.get_instructions(function)
    )


def _named(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _order(id: str) -> list:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in id.split(".")]


@contextmanager
def _one_thread():
    """Tiny matrices on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _tiny_config() -> DecoderConfig:
    return DecoderConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def _with_weights(decoder: Decoder) -> Decoder:
    """Random weights, the same each time, wide enough for the logits of different tokens to differ clearly."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in decoder.requires_grad_(False).named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return decoder.eval()


# --- chapter 2: KV cache ---------------------------------------------------------------------------------------------


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
    if rows["q"] == 0:
        raise Wrong(
            "q has one new row: the new token asks once. It is not kept afterwards, but it must be computed."
        )
    if 0 in (rows["k"], rows["v"]):
        raise Wrong(
            "k and v have one new row each: later tokens will look at the new one too, so it must be computed."
        )
    if rows["q"] > 1:
        raise Wrong(f"q has one new row, not {rows['q']}: nobody asks an old question again.")
    for name in "kv":
        if rows[name] != 1:
            raise Wrong(
                f"{name} has one new row, not {rows[name]}: the rows of earlier tokens depend on nothing that "
                "comes after them, so they are the same as before."
            )
    return "One new row each, and the past stays as it was. " + _change_in_the_past(decoder, tokens)


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
    places = row.shape[1] - 1
    return f"Run with and without an extra token, the logits of {places} earlier ones differ by at most {change:.1e}{reason}."


@exercise("2.2", "Where am I?")
def _where_am_i(answer, **given) -> str:
    positions, may_attend = functions(answer, "positions", "may_attend")
    _judge_positions(positions)
    _judge_table(may_attend)
    return "The new tokens stand behind the cached ones and see all of them, themselves, and nothing later."


def _judge_positions(positions: Callable) -> None:
    for length, new in ((3, 2), (0, 4), (7, 1), (5, 3)):
        where = said(positions, length, new)
        found = call(positions, length, new)
        got = [whole(place, where) for place in _flat(found, where)]
        want = list(range(length, length + new))
        if got == want:
            continue
        if got == list(range(new)):
            raise Wrong(
                f"{where} gave {got}: positions from 0, as if the cache were empty. Add what it holds."
            )
        if got == list(range(length + new)):
            raise Wrong(f"{where} gave {got}: only the new tokens are fed, so only their places are wanted.")
        if got == [place + 1 for place in want]:
            raise Wrong(
                f"{where} gave {got}, one too far: places count from 0, so the first free one is {length}."
            )
        if new > 1 and len(set(got)) == 1 and len(got) == new:
            raise Wrong(f"{where} gave {got}: each new token has a place of its own.")
        raise Wrong(f"{where} gave {got}; wanted {want}.")


def _judge_table(may_attend: Callable) -> None:
    two, one = _table(may_attend, 3, 2), _table(may_attend, 4, 1)
    where = said(may_attend, 3, 2)
    if torch.equal(two, ~torch.ones(2, 5, dtype=torch.bool).tril(3)):
        raise Wrong(f"{where} is the other way round: True stands where a token may look.")
    _sees_something(may_attend, 3, 2)
    _sees_something(may_attend, 4, 1)
    means = [_seen(one), _seen(two)]
    came = f"With q = 0 and v = [0, 1, 2, 3, 4] attention gives {means[0][0]} for one new token and {means[1]} for two"
    if means[1] == [0.0, 0.5]:
        raise Wrong(
            f"{came}; wanted 2.0 and [1.5, 2.0]. The triangle starts top-left, as if the cache were empty: "
            "shift it by length."
        )
    if means[1] == [2.0, 2.0]:
        raise Wrong(f"In {where} the first new token sees the second, its own future.")
    if means[1] == [1.0, 1.5]:
        raise Wrong(f"In {where} the new tokens do not see themselves; a token may look at its own place.")
    if means != [[2.0], [1.5, 2.0]]:
        raise Wrong(f"{came}; wanted 2.0 and [1.5, 2.0].")
    four = _sees_something(may_attend, 0, 4)
    if four.triu(1).any():
        raise Wrong(f"{said(may_attend, 0, 4)}: in a prefill of 4 a token sees its own future.")
    for length, new in ((3, 2), (0, 4), (4, 1), (6, 3)):
        want = torch.ones(new, length + new, dtype=torch.bool).tril(length)
        got = _table(may_attend, length, new)
        if not torch.equal(got, want):
            raise Wrong(
                f"{said(may_attend, length, new)} gave {got.int().tolist()}; wanted {want.int().tolist()}."
            )


def _sees_something(may_attend: Callable, length: int, new: int) -> Tensor:
    table = _table(may_attend, length, new)
    if not table.any(dim=1).all():
        where = said(may_attend, length, new)
        raise Wrong(f"A row of {where} hides everything: every token may look at least at itself.")
    return table


def _table(may_attend: Callable, length: int, new: int) -> Tensor:
    where = said(may_attend, length, new)
    found = call(may_attend, length, new)
    try:
        table = torch.as_tensor(found)
    except Exception:
        raise Wrong(f"{where} should be a table of True and False; it is {found!r}.") from None
    if table.ndim == 4 and table.shape[:2] == (1, 1):
        table = table[0, 0]
    if tuple(table.shape) == (new, new) and length:
        raise Wrong(
            f"{where} has the shape {(new, new)}: the {length} cached tokens are missing; wanted {(new, length + new)}."
        )
    if tuple(table.shape) == (length + new, length + new) and length:
        raise Wrong(
            f"{where} has a row for every token; only the new ones ask, {new} of them: wanted {(new, length + new)}."
        )
    if tuple(table.shape) != (new, length + new):
        raise Wrong(
            f"{where} has the shape {tuple(table.shape)}; wanted (new, length + new) = {(new, length + new)}."
        )
    if table.dtype != torch.bool and not torch.isin(table, torch.tensor([0, 1], dtype=table.dtype)).all():
        raise Wrong(f"{where} should hold True and False; it holds numbers of type {table.dtype}.")
    return table.bool().cpu()


def _seen(table: Tensor) -> list[float]:
    """What attention gives with q = 0 (equal weights) over v = [0, 1, 2, 3, 4]: the mean of the places seen."""
    new, total = table.shape
    q, k = torch.zeros(1, 1, new, 2), torch.zeros(1, 1, total, 2)
    v = torch.arange(total).float().view(1, 1, total, 1).expand(1, 1, total, 2)
    return [round(value, 4) for value in attention(q, k, v, table[None, None])[0, 0, :, 0].tolist()]


def _flat(found, where: str) -> list:
    if isinstance(found, Tensor):
        return found.reshape(-1).tolist()
    if isinstance(found, Iterable) and not isinstance(found, (str, bytes, dict)):
        return list(found)
    raise Wrong(f"{where} should be a list of places; it is {found!r}.")


@exercise("2.3", "The bill")
def _bill(answer, **given) -> str:
    (kv_bytes,) = functions(answer, "kv_bytes")
    cases = (
        ((30, 3, 64, 1000, 2), {}, 23_040_000),  # SmolLM2-135M, 16 bit
        ((32, 32, 128, 4096, 2), {}, 2 * 2**30),  # Llama-2-7B
        ((32, 8, 128, 1, 2), {}, 131_072),  # Llama-3-8B, one token
        ((30, 3, 64, 1000, 2), {"sequences": 4}, 92_160_000),
    )
    for args, more, want in cases:
        where = said(kv_bytes, *args, **more)
        returned = call(kv_bytes, *args, **more)
        for unit, size in (("MB", 1e6), ("MiB", 2**20), ("GB", 1e9), ("GiB", 2**30)):
            if isinstance(returned, (int, float)) and math.isclose(returned, want / size, rel_tol=1e-3):
                raise Wrong(f"{where} gave {returned:,.4g}: that is in {unit}; bytes are wanted, {want:,}.")
        got = whole(returned, where)
        if got == want:
            continue
        if got == 69_120_000:
            raise Wrong(
                "69,120,000 is what 9 query heads give; the cache holds KV heads, of which there are 3."
            )
        if 2 * got == want:
            raise Wrong(f"{where} gave {got:,}, half of {want:,}: K and V are two tensors a layer.")
        if got == 8 * want:
            raise Wrong(f"{where} gave {got:,}, eight times {want:,}: those are bits.")
        if more and got * more["sequences"] == want:
            raise Wrong(
                f"{where} gave {got:,}, the bill of one sequence; each sequence has a cache of its own."
            )
        if got * args[0] == want:
            raise Wrong(
                f"{where} gave {got:,}, one layer's share; every layer keeps its own keys and values."
            )
        raise Wrong(f"{where} gave {got:,}; wanted {want:,}.")
    return "The bill is set by layers, KV heads and tokens alone: no parameter of the MLP appears in it."


@exercise("2.4", "When the cache outweighs the weights")
def _outweighs(answer, **given) -> str:
    (tokens_until_equal,) = functions(answer, "tokens_until_equal")
    llama_2, per_token = 2 * 6_738_415_616, 2 * 32 * 32 * 128 * 2
    cases = (
        ((llama_2, per_token), {}),
        ((2 * 8_030_261_248, 2 * 32 * 8 * 128 * 2), {}),  # Llama-3-8B, fp16
        ((4 * 134_515_008, 2 * 30 * 3 * 64 * 4), {}),  # SmolLM2-135M, float32
        ((llama_2, per_token), {"sequences": 8}),
    )
    for (weights, token), more in cases:
        sequences = more.get("sequences", 1)
        want = weights // (token * sequences)  # 25,705 · 122,532 · 11,676 · 3,213
        where = said(tokens_until_equal, weights, token, **more)
        returned = call(tokens_until_equal, weights, token, **more)
        if isinstance(returned, float) and returned != int(returned) and int(returned) == want:
            raise Wrong(f"{where} gave {returned:,.2f}: whole tokens are wanted, rounded down to {want:,}.")
        got = whole(returned, where)
        if got == want:
            continue
        if got == want + 1:
            raise Wrong(
                f"{where} gave {got:,}: with that many the cache is already the heavier one; round down, {want:,}."
            )
        if sequences > 1 and got == weights // token:
            raise Wrong(
                f"{where} gave {got:,}, the tokens of all sequences together; {sequences} share them, {want:,} each."
            )
        if sequences > 1 and got >= (weights // token) * sequences:
            raise Wrong(
                f"{where} gave {got:,}: more sequences fill the memory sooner, not later; divide by them."
            )
        if got == token // weights:
            raise Wrong(f"{where} gave {got:,}: weights divided by bytes per token, not the other way round.")
        raise Wrong(f"{where} gave {got:,}; wanted {want:,}.")
    return (
        "Fewer KV heads push that point out: Llama-3-8B holds almost five times as many tokens as Llama-2-7B."
    )


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
        return torch.ones(new, self.length + new, dtype=torch.bool).tril(self.length)[None, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = self.length + k.shape[2]
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            kept[:, :, self.length : total] = new
        return self.keys[layer][:, :, :total], self.values[layer][:, :, :total]


@exercise("2.5", "Take it back")
def _take_it_back(answer, **given) -> str:
    (truncate,) = functions(answer, "truncate")
    decoder = _with_weights(Decoder(_tiny_config()))
    tokens = [(5 * i + 2) % 61 for i in range(10)]
    with torch.inference_mode(), _one_thread():
        _keeps_all(truncate, decoder, tokens)
        zeroed = _keeps_seven(truncate, decoder, tokens)
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


def _cut(truncate: Callable, cache: _Preallocated, length: int) -> None:
    held = cache.length
    try:
        truncate(cache, length)
    except NotImplementedError:
        raise Unanswered from None
    except Exception as error:
        raise Wrong(
            f"truncate(cache, {length}) on a cache of {held} tokens raised {_named(error)}."
        ) from None


def _keeps_all(truncate: Callable, decoder: Decoder, tokens: list[int]) -> None:
    cache = _filled(decoder, tokens)
    before = _held(cache, 10)
    _cut(truncate, cache, 10)
    emptied = cache.length == 0 or all(not kept[:, :, :10].any() for kept in cache.keys)
    if emptied:
        raise Wrong(
            "truncate(cache, 10) on a cache of 10 tokens should keep all 10: −0 emptied it. Nothing was to be removed, "
            "and a slice [:-0] keeps nothing; cut to the length, not by a number of tokens."
        )
    if cache.length != 10:
        raise Wrong(f"truncate(cache, 10) on a cache of 10 tokens left length {cache.length}; wanted 10.")
    if not torch.equal(before, _held(cache, 10)):
        raise Wrong(
            "truncate(cache, 10) on a cache of 10 tokens changed keys or values; it should leave all as it is."
        )


def _keeps_seven(truncate: Callable, decoder: Decoder, tokens: list[int]) -> bool:
    cache = _filled(decoder, tokens)
    addresses, before = _addresses(cache), _held(cache, 7)
    _cut(truncate, cache, 7)
    if cache.length == 10:
        raise Wrong(
            "After truncate(cache, 7) the length is still 10: set cache.length; a copy handed back is not seen."
        )
    if cache.length == 3:
        raise Wrong(
            "After truncate(cache, 7) the length is 3: 7 is the length to keep, not the number to remove."
        )
    if cache.length != 7:
        raise Wrong(f"After truncate(cache, 7) the length is {cache.length}; wanted 7.")
    if _addresses(cache) != addresses:
        raise Wrong(
            "The buffers were replaced by new tensors or slices; a preallocated cache keeps its buffers as they are."
        )
    if not torch.equal(before, _held(cache, 7)):
        raise Wrong("truncate(cache, 7) changed keys or values of the 7 tokens to keep.")
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
            if not (str(length).lstrip("-") in str(error) and "10" in str(error)):
                raise Wrong(
                    f"{call_text} raises, but the text should name {length} and 10: {str(error)!r}."
                ) from None
        except Exception as error:
            raise Wrong(f"{call_text} raised {_named(error)}; a ValueError is wanted.") from None
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
    """A decoder that counts the tokens fed to it, in all rows."""

    fed = 0

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        self.fed += tokens.numel()
        return super().hidden(tokens, cache)


@exercise("2.6", "One prompt, many roads")
def _many_roads(answer, cache_class: Callable | None = None, **given) -> str:
    fork, continue_all = functions(answer, "fork", "continue_all")
    decoder = _with_weights(_Counting(_tiny_config()))
    with torch.inference_mode(), _one_thread():
        _judge_fork(fork, decoder, cache_class or _Growing)
        fed = _judge_continuations(continue_all, decoder)
    return f"Three roads from one prefill: {fed} tokens fed, where three separate runs feed {3 * 12 + 3 * 4}."


def _judge_fork(fork: Callable, decoder: Decoder, cache_class: Callable) -> None:
    parent = cache_class(decoder.config)
    decoder(torch.tensor([[3, 14, 15, 9, 26]]), parent)
    before = _held(parent, 5)
    child = call(fork, parent, 3)
    if child is parent:
        raise Wrong("fork gave the parent itself back; its rows should be copied into a new cache.")
    if not all(hasattr(child, name) for name in ("keys", "values", "length", "advance")):
        raise Wrong(f"fork should give a cache; it gave a {type(child).__name__}.")
    rows = [kept.shape[0] for kept in (*child.keys, *child.values)]
    if set(rows) != {3}:
        raise Wrong(
            f"fork(cache, 3) has {rows[0]} row(s) in its keys and {rows[-1]} in its values; wanted 3 in every layer."
        )
    if child.length != 5:
        raise Wrong(
            f"fork(cache, 3) of 5 tokens has length {child.length}; wanted 5, or the next position is wrong."
        )
    for row in range(3):
        if not all(
            torch.equal(c[row], p[0])
            for c, p in zip(child.keys + child.values, parent.keys + parent.values, strict=True)
        ):
            raise Wrong(f"Row {row} of fork(cache, 3) does not hold the parent's keys and values.")
    for step in ([[5], [35], [8]], [[9], [7], [9]]):
        try:
            decoder(torch.tensor(step), child)
        except Exception as error:
            raise Wrong(f"Feeding three rows to fork(cache, 3) raised {_named(error)}.") from None
    if (
        parent.length != 5
        or any(kept.shape[2] != 5 for kept in parent.keys)
        or not torch.equal(before, _held(parent, 5))
    ):
        raise Wrong(
            "The parent changed while its fork was used: they share lists or tensors. Build new lists in the fork."
        )


def _judge_continuations(continue_all: Callable, decoder: _Counting) -> int:
    prompt, firsts, new = [(11 * i + 4) % 61 for i in range(12)], [17, 2, 44], 5
    want = [_alone(decoder, prompt + [first], new - 1) for first in firsts]
    decoder.fed = 0
    got = _token_lists(call(continue_all, decoder, list(prompt), list(firsts), new))
    fed, enough = decoder.fed, len(prompt) + len(firsts) * (new - 1)
    if len(got) != len(firsts):
        raise Wrong(f"continue_all gave {len(got)} continuations for {len(firsts)} first tokens.")
    if any(row[: len(prompt)] == prompt for row in got):
        raise Wrong("The continuations should start with their first token; the prompt is not part of them.")
    if [len(row) for row in got] == [new - 1] * 3 and got == [row[1:] for row in want]:
        raise Wrong(
            f"The first tokens are missing: each list starts with its first token and holds {new} in all."
        )
    if any(len(row) != new for row in got):
        raise Wrong(
            f"Each continuation should hold {new} tokens, its first token included; the lists hold {[len(r) for r in got]}."
        )
    if fed > len(prompt) + len(firsts) * new:
        raise Wrong(
            f"{fed} tokens were fed where {enough} are enough: the prompt went through the model more than once. "
            "Feed it once, fork its cache, then feed one token a row."
        )
    if got != want:
        _explain_rows(got, want, firsts)
    return fed


def _explain_rows(got: list[list[int]], want: list[list[int]], firsts: list[int]) -> None:
    tails = [row[1:] for row in want]
    if all(row[1:] in tails for row in got):
        raise Wrong(
            "The rows are mixed: a continuation belongs to another first token. Row i must follow first_tokens[i]."
        )
    row = next(i for i in range(len(got)) if got[i] != want[i])
    raise Wrong(f"After first token {firsts[row]} came {got[row]}; alone it continues {want[row]}.")


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
