"""The checks of deep dive 1A's exercises: how fast a kernel may be, and nibbles without a shift."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course_utils.exercises.core import (
    Unanswered,
    Wrong,
    again,
    attempt,
    digits,
    dtype_name,
    exercise,
    function_and,
    functions,
    in_order,
    name_of,
    number,
    one_thread,
    short,
    tensor,
    unchanged,
)

# Bytes and weights per second of the two machines in exercise 1A.1, and the bits of its kernel.
MACHINES = {"A": (12e9, 16e9), "B": (6e9, 14e9)}
INT4_BITS = 4 + (32 + 8) / 64  # a float32 scale and a zero point of 8 bits for 64 weights

_NO_FRACTION = "// throws the fraction away, / keeps it."


# --- 1A.1 ------------------------------------------------------------------------------------------------------------

_CASES = (  # (rows, cols, bits_per_weight, bandwidth, weights_per_second); the bytes, then the arithmetic take longer
    (49_152, 576, 8, 12e9, 20e9),
    (49_152, 576, 4.625, 16e9, 10e9),
    (128_256, 4_096, 32, 50e9, 150e9),
    (128_256, 4_096, 4.5, 12e9, 40e9),
    (32_000, 4_096, 4, 90e9, 8e9),
)


@exercise("1A.1", "How fast may a kernel be?")
def _how_fast(answer, **given) -> str:
    kernel_ms, bound = function_and(answer, "kernel_ms", "arithmetic_bound")
    in_order(("kernel_ms", lambda: _judge_kernel_ms(kernel_ms)))
    _judge_bound(bound)
    return (
        f"{_pace('A')}, but A works on {_billions(MACHINES['A'][1])} only. "
        "There, fewer bits would make the model smaller and no product faster."
    )


def _read_ms(rows: int, cols: int, bits: float, bandwidth: float, speed: float) -> float:
    return 1e3 * rows * cols * bits / 8 / bandwidth


def _work_ms(rows: int, cols: int, bits: float, bandwidth: float, speed: float) -> float:
    return 1e3 * rows * cols / speed


def _kernel_ms(*args: float) -> float:
    return max(_read_ms(*args), _work_ms(*args))


def _said(function: Callable, rows: int, cols: int, bits: float, *rates: float) -> str:
    speeds = ", ".join(f"{rate / 1e9:g}e9" for rate in rates)
    return f"{name_of(function)}({rows:_}, {cols:_}, {bits:g}, {speeds})"


def _results(function: Callable, cases: Sequence[tuple], first: bool = False) -> list[float]:
    """What the function returns for each case; the very first call may still be unanswered."""
    found = []
    for place, args in enumerate(cases):
        where = _said(function, *args)
        returned = (attempt if first and not place else again)(where, function, *args)
        found.append(number(returned, where))
    return found


def _judge_kernel_ms(kernel_ms: Callable) -> None:
    got = _results(kernel_ms, _CASES, first=True)
    for args, value in zip(_CASES, got, strict=True):
        want = _kernel_ms(*args)
        if not math.isclose(value, want, rel_tol=1e-3, abs_tol=0.0051):  # two decimals are enough
            says = f"{_said(kernel_ms, *args)} gave {digits(value)}; wanted {digits(want)}"
            why = _why_ms(kernel_ms, got)
            raise Wrong(f"{says}: {why}" if why else f"{says}.")


# What may be wrong with a result, by its four parts. Of each part the first is right. The wrong ones may come together.
_BYTES = (  # bytes a weight
    (lambda bits: bits / 8, ""),
    (lambda bits: bits, "bits are not bytes: divide bits_per_weight by 8."),
    (lambda bits: 8 * bits, "a byte has 8 bits: divide bits_per_weight by 8, do not multiply."),
    (lambda bits: bits / 64, "bits_per_weight is divided by 8 twice."),
    (lambda bits: bits // 8, f"4.5 // 8 is 0: {_NO_FRACTION}"),
    (lambda bits: math.ceil(bits / 8), "a weight of 4.5 bits takes 4.5/8 of a byte; do not round up."),
    (lambda bits: int(bits) / 8, "the fraction of bits_per_weight counts too: it holds the scales."),
)
_WEIGHTS = (  # what weights_per_second is held against, for a weight
    (lambda bits: 1, ""),
    (lambda bits: bits / 8, "weights_per_second counts weights, not bytes: divide rows · cols by it."),
    (lambda bits: bits, "weights_per_second counts weights, not bits: divide rows · cols by it."),
    (lambda bits: 2, "weights_per_second counts weights, not operations: each weight counts once."),
)
_TOGETHER = (
    (max, ""),
    (lambda read, work: read + work, "that is the sum of the two times. They overlap: take the larger."),
    (min, "that is the smaller of the two times. The product ends with the longer one."),
    (
        lambda read, work: read,
        "that is the time of reading alone. Where the arithmetic takes longer, its time counts.",
    ),
    (
        lambda read, work: work,
        "that is the time of the arithmetic alone. Where reading takes longer, its time counts.",
    ),
    (
        lambda read, work: (read + work) / 2,
        "that is the mean of the two times. The product ends with the longer one.",
    ),
)
_UNITS = (
    (1e3, ""),
    (1, "those are seconds. A second has 1,000 ms."),
    (1e6, "those are microseconds. A second has 1,000 ms."),
    (1e-3, "to come from seconds to ms multiply by 1,000, do not divide."),
    (1e-6, "bandwidth and weights_per_second are given per second, not in billions; no 1e9 is needed."),
)


def _why_ms(kernel_ms: Callable, got: list[float]) -> str:
    """The cause of wrong results where it is a known one, else an empty text."""
    if not any(got):
        return _NO_FRACTION
    ignored = _ignored(kernel_ms, got)
    if ignored and not _known(got, faults=1):  # the time of one side alone has a sentence that helps more
        return f"{ignored} changes nothing in your function."
    if got == [round(_kernel_ms(*args)) for args in _CASES]:
        return "it is rounded to whole ms; keep the fraction."
    return _known(got, faults=1) or _known(got, faults=2)


def _known(got: list[float], faults: int) -> str:
    """The sentences of the known wrong results with so many faults."""
    for parts in itertools.product(_BYTES, _WEIGHTS, _TOGETHER, _UNITS):
        sentences = [sentence for _, sentence in parts if sentence]
        if len(sentences) != faults:
            continue
        in_bytes, in_weights, together, unit = (part for part, _ in parts)
        wrong = [
            unit * together(rows * cols * in_bytes(bits) / bandwidth, rows * cols * in_weights(bits) / speed)
            for rows, cols, bits, bandwidth, speed in _CASES
        ]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(got, wrong, strict=True)):
            return " And ".join(sentences)
    return ""


def _ignored(kernel_ms: Callable, got: list[float]) -> str:
    """The first argument whose double changes no result; "" where each counts."""
    names = ("rows", "cols", "bits_per_weight", "bandwidth", "weights_per_second")
    for place, name in enumerate(names):
        doubled = [tuple(2 * v if i == place else v for i, v in enumerate(args)) for args in _CASES]
        if _results(kernel_ms, doubled) == got:
            return name
    return ""


_ANSWERS = {"a": "A", "b": "B", "both": "both", "neither": "neither", "none": "neither"}


def _judge_bound(bound) -> None:
    choices = '"A", "B", "both" or "neither"'
    if bound is None or bound is ... or isinstance(bound, str) and not bound.strip():
        raise Unanswered(f"kernel_ms is right so far; arithmetic_bound is still empty: {choices}.")
    word = bound.strip().lower().removeprefix("machine").strip(" .\"'") if isinstance(bound, str) else ""
    if word not in _ANSWERS:
        raise Wrong(f"arithmetic_bound should be {choices}; it is {short(bound)}.")
    if _ANSWERS[word] == "neither":
        raise Wrong(
            f"Not neither: {_pace('A')}, more than the {_billions(MACHINES['A'][1])} that A works on."
        )
    if _ANSWERS[word] != "A":
        raise Wrong(
            f"Not {_ANSWERS[word]}: {_pace('B')}, fewer than the {_billions(MACHINES['B'][1])} that B could work on. "
            "It waits for the bytes."
        )


def _pace(machine: str) -> str:
    weights = MACHINES[machine][0] / (INT4_BITS / 8)
    return f"{machine}'s memory brings {_billions(weights)} weights of {INT4_BITS:g} bits a second"


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g}e9"


# --- 1A.2 ------------------------------------------------------------------------------------------------------------


@exercise("1A.2", "Nibbles without a shift")
def _nibbles_without_a_shift(answer, **given) -> str:
    (spread,) = functions(answer, "spread")
    with torch.inference_mode(), one_thread():
        for place, length in enumerate((24, 64, 8)):
            _judge_spread(spread, _x(length), first=not place)
    return (
        "Seven of eight nibbles need no shift in the kernel, and no digit of x is lost: "
        "16^k changes the exponent of a float32 alone."
    )


def _x(length: int) -> Tensor:
    """(length,) float32: no two alike, none 0, some negative."""
    return torch.randn(length, generator=torch.Generator().manual_seed(length))


_POWERS = 16.0 ** torch.arange(7)


def _divided(places: Tensor, by: Tensor = _POWERS) -> Tensor:
    """(8, words) with its first rows divided."""
    return torch.cat((places[: len(by)] / by[:, None], places[len(by) :]))


_DIVISIONS = (  # of rows that stand in the right places; the first is right
    (_divided, ""),
    (
        lambda places: places,
        "nothing is divided. Nibble k is left where it is, so it counts 16^k times too much.",
    ),
    (
        lambda places: _divided(places, 16.0 ** torch.arange(8)),
        "row 7 is divided too. The topmost nibble is shifted down, so it counts once.",
    ),
    (
        lambda places: _divided(places, 1 / _POWERS),
        "the rows are multiplied by 16^k. The nibble already counts 16^k times too much: divide.",
    ),
    (
        lambda places: _divided(places, 2.0 ** torch.arange(7)),
        "the rows are divided by 2^k. A nibble has 4 bits, so the next one counts 2^4 = 16 times as much.",
    ),
    (
        lambda places: _divided(places, 16.0 ** torch.arange(1, 8)),
        "the rows are divided by 16^(k + 1). The lowest nibble, k = 0, counts once: 16^0.",
    ),
    (
        lambda places: torch.cat((_divided(places)[:7], places[7:] / 16**6)),
        "row 7 is divided by 16^6. The topmost nibble is shifted down, so it counts once.",
    ),
    (
        lambda places: torch.cat((_divided(places)[:7], -places[7:])),
        "row 7 has the other sign. Shifted down and masked, the topmost nibble is 0 to 15 like the others.",
    ),
    (lambda places: _divided(places).floor(), _NO_FRACTION),
    (lambda places: torch.cat((_divided(places)[:7].floor(), places[7:])), _NO_FRACTION),
)
_SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]
_LAYOUTS = (  # (x, divide) → (8, words); the first is right
    (lambda x, divide: divide(x.reshape(-1, 8).T), ""),
    (
        lambda x, divide: divide(x.reshape(8, -1)),
        "row 0 holds the first x in a row: x was cut into 8 pieces. A word meets 8 neighbours of x, so cut it into "
        "pieces of 8, reshape(-1, 8), and turn them: .T.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T).T.reshape(8, -1),
        "each word's eight values stand in one line. reshape does not turn a matrix: take .T, the row is the nibble.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T[_SWAPPED]),
        "neighbours are swapped. The lowest nibble meets the first of the eight.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T)[_SWAPPED],
        "neighbouring rows are swapped. The lowest nibble meets the first of the eight.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T.flip(0)),
        "the eight values of a word stand the other way round. The lowest nibble meets the first of them.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T).flip(0),
        "the rows stand the other way round. Row 0 belongs to the lowest nibble.",
    ),
    (
        lambda x, divide: divide(x.reshape(-1, 8).T).flip(1),
        "the words stand the other way round. Column 0 is for the first word, x[0] to x[7].",
    ),
)


def _judge_spread(spread: Callable, x: Tensor, first: bool) -> None:
    words, where = len(x) // 8, f"{name_of(spread)} of {len(x)} values"
    with unchanged(where, x):
        found = (attempt if first else again)(where, spread, x)
    found = tensor(found, where)
    want = _divided(x.reshape(-1, 8).T)
    _judge_shape(found, want, where)
    if found.dtype != torch.float32:
        raise Wrong(
            f"{where} has the type {dtype_name(found)}; float32 is wanted, as x has it: the kernel is compiled for it."
        )
    if torch.allclose(found, want, rtol=1e-6, atol=0):
        return
    why = _why_spread(found, x)
    if why:
        raise Wrong(f"{where}: {why}")
    k, j = ((found - want).abs() <= want.abs() * 1e-6).logical_not().nonzero()[0].tolist()
    by = f"x[{8 * j + k}] / 16^{k}" if k < 7 else f"x[{8 * j + k}], undivided"
    raise Wrong(
        f"{where}: row {k} holds {digits(found[k, j].item())} for word {j} of {words}; "
        f"wanted {digits(want[k, j].item())}, {by}."
    )


def _judge_shape(found: Tensor, want: Tensor, where: str) -> None:
    if found.shape != want.shape and found.shape == want.T.shape:
        raise Wrong(f"{where} holds a row for each word; a row for each of the eight nibbles is wanted: .T.")
    if found.shape != want.shape:
        raise Wrong(f"{where} has the shape {tuple(found.shape)}; wanted {tuple(want.shape)}.")


def _why_spread(found: Tensor, x: Tensor) -> str:
    """The cause of wrong values where it is a known one, else an empty text."""
    known = sorted(
        itertools.product(_LAYOUTS, _DIVISIONS), key=lambda pair: sum(bool(why) for _, why in pair)
    )
    for (layout, wrong_place), (divide, wrong_factor) in known:
        if torch.allclose(found, layout(x, divide), rtol=1e-6, atol=0):
            return " And ".join(filter(None, (wrong_place, wrong_factor)))
    return ""
