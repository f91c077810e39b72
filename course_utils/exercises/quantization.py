"""The checks of chapter 1's exercises: the floor, scales, their price, zero points, nibbles and a better scale."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    said,
    short,
    tensor,
    unchanged,
    whole,
)

# Why is nothing won at 8 bits by a smaller scale? The notebook prints these; one letter is the answer (exercise 1.6).
WHY_NOT_AT_8_BITS = {
    "a": "At 8 bits every weight comes back exactly, so there is no error left to lower.",
    "b": "At 8 bits a row's largest weight is not far from the others, so there is nothing to cut off.",
    "c": "At 8 bits the steps are so fine that cutting off the largest weights costs more than finer steps save.",
}


# --- what several checks need ----------------------------------------------------------------------------------------


def _list(values: Tensor) -> str:
    return f"[{', '.join(digits(value) for value in values.tolist())}]"


def _parts(found, where: str, *names: str) -> tuple:
    """The result of a function that returns several things; Wrong where it does not."""
    wanted = f"({', '.join(names)})"
    if not isinstance(found, (tuple, list)):
        raise Wrong(f"{where} should return {wanted}; it returns a {type(found).__name__}.")
    if len(found) != len(names):
        raise Wrong(f"{where} should return {wanted}; it returns {len(found)} thing(s).")
    for name, part in zip(names, found, strict=True):
        if part is None:
            raise Wrong(f"{where} returns None as {name}.")
    return tuple(found)


class _NaNWatch(TorchFunctionMode):
    """Sees a NaN go into a tensor of whole numbers, where nothing of it is left to see."""

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        written = args[0] if result is None and args else result  # q[row] = … returns nothing
        if isinstance(written, Tensor) and not (written.is_floating_point() or written.dtype == torch.bool):
            read = [part for part in args if isinstance(part, Tensor) and part.is_floating_point()]
            self.seen = self.seen or any(bool(part.isnan().any()) for part in read)
        return result


_CAST = "invalid value encountered in cast"  # NumPy's word for the same


@contextmanager
def _nan_is_seen() -> Iterator[_NaNWatch]:
    with warnings.catch_warnings(), _NaNWatch() as watch:
        warnings.filterwarnings("error", _CAST, RuntimeWarning)
        yield watch


# --- 1.1 -------------------------------------------------------------------------------------------------------------

_READ_ONCE = "a token needs each weight once, so it is read once"


@exercise("1.1", "How many milliseconds must a token cost?")
def _floor(answer, **given) -> str:
    (floor_ms,) = functions(answer, "floor_ms")
    smol, llama = 134_515_008, 6_738_415_616
    cases = (
        (smol, 32, 12e9),
        (smol, 8, 12e9),
        (llama, 16, 320e9),
        (llama, 4, 320e9),
    )  # 44.84 11.21 42.12 10.53
    for place, args in enumerate(cases):
        where = _floor_call(floor_ms, *args)
        got = number((again if place else attempt)(where, floor_ms, *args), where)
        want = _floor_ms(*args)
        if not math.isclose(got, want, rel_tol=1e-3, abs_tol=0.05):  # one decimal is enough
            raise Wrong(f"{where} gave {digits(got)}{_why_ms(floor_ms, args, got, want)}")
    return "A quarter of the bits, a quarter of the floor. No token comes sooner; whether it comes that soon is the kernel's part."


def _floor_call(floor_ms: Callable, num_params: int, bits: int, bandwidth: float) -> str:
    return f"{name_of(floor_ms)}({num_params:_}, {bits}, {bandwidth / 1e9:g}e9)"


def _floor_ms(num_params: int, bits: int, bandwidth: float) -> float:
    return num_params * bits / 8 / bandwidth * 1e3


_MS_FACTORS = (  # got / wanted where a unit went wrong
    (8, "8 times too much: bits are not bytes. Divide by 8."),
    (64, "64 times too much: divide by 8 to come from bits to bytes, do not multiply."),
    (1 / 8, "an eighth: the 8 of bits to bytes was divided by twice."),
    (1e-3, "1,000 times too little: those are seconds. A second has 1,000 ms."),
    (1e3, "1,000 times too much: those are microseconds."),
    (8e-3, "neither bytes nor milliseconds: divide the bits by 8 and multiply the seconds by 1,000."),
    (
        1e-6,
        "a million times too little: to come from seconds to milliseconds multiply by 1,000, do not divide.",
    ),
    (1e-9, "a thousand million times too little: the bandwidth is given in bytes per second, not in GB/s."),
    (
        1e-12,
        "far too little: the bandwidth is given in bytes per second, not in GB/s, and milliseconds are wanted.",
    ),
    (2, f"twice as much: {_READ_ONCE}."),
)


def _why_ms(floor_ms: Callable, args: tuple, got: float, want: float) -> str:
    bits, wanted = args[1], f"wanted {want:.2f}"
    if not got:
        cut = f"{bits} // 8 is 0; " if bits < 8 else ""
        return f"; {wanted}: {cut}// throws the fraction away, / keeps it."
    if bits < 8 and math.isclose(got, want * 8 / bits, rel_tol=1e-3):
        return f"; {wanted}: that is the floor of 8 bits. Two weights of 4 bits share a byte."
    ignored = _ignored(floor_ms, args, got)
    if ignored == "bandwidth" and math.isclose(got, args[0] * bits / 8):
        return f"; {wanted}: those are the bytes. Divide by the bandwidth."
    if ignored:
        return f"; {wanted}: {ignored} changes nothing in your function."
    if got == round(want) or got == math.floor(want):
        return f", rounded to whole milliseconds; {wanted}."
    for factor, why in _MS_FACTORS:
        if math.isclose(got, want * factor, rel_tol=1e-3):
            return f"; {wanted}: {why}"
    if any(math.isclose(got * want, product, rel_tol=1e-3) for product in (1e6, 1e3, 1, 125e3, 125, 0.125)):
        return f"; {wanted}: bytes belong above the line and the bandwidth below it. The inverse is tokens per time."
    if any(math.isclose(got / want, (1.024**k) ** sign, rel_tol=1e-3) for k in (1, 2, 3) for sign in (1, -1)):
        return f"; {wanted}: no 1,024 is needed. The bandwidth counts bytes, and a second has 1,000 ms."
    return f"; {wanted}."


def _ignored(floor_ms: Callable, args: tuple, got: float) -> str:
    """The first argument whose double changes nothing; "" where each counts."""
    for place, name in enumerate(("num_params", "bits", "bandwidth")):
        double = [2 * value if i == place else value for i, value in enumerate(args)]
        where = _floor_call(floor_ms, *double)
        if number(again(where, floor_ms, *double), where) == got:
            return name
    return ""


# --- 1.2 -------------------------------------------------------------------------------------------------------------

_NAN = (
    "A row of zeros has absmax 0, so its scale is 0 and w / scale is 0/0: NaN, and as int8 whatever the machine "
    "makes of it. Give such a row another scale, such as 1."
)


@exercise("1.2", "A scale that survives")
def _scale_that_survives(answer, **given) -> str:
    (one_scale_a_row,) = functions(answer, "one_scale_a_row")
    with torch.inference_mode(), one_thread():
        _judge_small_rows(one_scale_a_row)
        _judge_many_rows(one_scale_a_row)
        _judge_half_rows(one_scale_a_row)
    return "Zeros stay zeros, each row's largest weight comes back as it was, and no weight is off by more than half a step."


def _judge_small_rows(function: Callable) -> None:
    """HAZARDS 1: the row of zeros, and [25, −51, 76, −127] at 5/127."""
    w = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 3.0, -5.0]])
    q, scale = _rows(function, w, "[[0, 0, 0, 0], [1, −2, 3, −5]]", first=True)
    if q[0].any():
        raise Wrong(f"The row of zeros came back as q = {q[0].tolist()}; zeros are wanted.")
    row, value = "[1, −2, 3, −5]", scale[1].item()
    _judge_minus_128(q, w, row)
    for wrong, why in _SCALES:
        if math.isclose(value, wrong, rel_tol=1e-3):
            raise Wrong(f"The scale of {row} is {digits(value)}, {why} Wanted 5/127 = 0.03937.")
    _judge_fit(q, scale, w, row_name=lambda _: row)
    if not math.isclose(value, 5 / 127, rel_tol=1e-4):
        raise Wrong(f"The scale of {row} is {digits(value)}; wanted absmax / 127 = 5/127 = 0.03937.")


_SCALES = (  # of the row [1, −2, 3, −5]
    (3 / 127, "3/127: the largest weight without its sign is 5. Take abs() before the largest."),
    (-5 / 127, "negative: take abs() before the largest."),
    (
        8 / 255,
        "8/255, from the least to the largest: that is the scale with a zero point. Here it is absmax / 127.",
    ),
    (5 / 255, "5/255: half of the 255 values are negative, so 5 is 127 steps from 0."),
    (5 / 128, "5/128: q ends at 127, so the largest weight does not come back as it was."),
    (5 / 127.5, "5/127.5: q ends at 127, so the largest weight does not come back as it was."),
    (127 / 5, "127/5, upside down: a weight is q · scale."),
    (5, "absmax itself: the 127 steps up to it must share it."),
    (1, "1: the row's own absmax does not appear in it."),
)


def _judge_many_rows(function: Callable) -> None:
    w = (
        torch.randn(6, 40, generator=torch.Generator().manual_seed(12))
        * torch.tensor([[1.0, 3, 0.5, 9, 1, 0.7]]).T
    )
    q, scale = _rows(function, w, "a matrix of 6 rows and 40 columns")
    _judge_minus_128(q, w, "a row")
    _judge_fit(q, scale, w, row_name=lambda i: f"row {i} of a matrix of 6 × 40")


def _judge_half_rows(function: Callable) -> None:
    """HAZARDS 2: 1e−6/127 is below the least float16."""
    w = torch.tensor([[1e-6, -5e-7, 8e-7, 1e-6], [1e-5, -4e-6, 7e-6, 2e-6], [0.5, -0.25, 0.1, 0.3]]).half()
    where = "a float16 matrix with a row of 1e−6"
    q, scale = _rows(function, w, where, look_for_nan=False)
    if not q[0].any() or not scale[0].item():
        survives = _rows(function, w.float(), where)[0][0].any()
        raise Wrong(
            "The float16 row of 1e−6 came back as zeros: 1e−6/127 is smaller than the least float16, so the scale "
            "became 0. Compute it in float32, from w.float()."
            if survives
            else f"The row of 1e−6 came back as zeros: its scale is {digits(scale[0].item())}, wanted 7.98e-09. "
            "A least scale (or one added) flattens small rows: replace a scale only where it is 0."
        )
    want = w.double().abs().amax(1) / 127
    if scale[0].item() > want[0].item() * 1.05 and math.isclose(
        scale[2].item(), want[2].item(), rel_tol=1e-2
    ):
        raise Wrong(
            f"The scale of the row of 1e−6 is {digits(scale[0].item())}, wanted 7.98e-09. "
            "A least scale (or one added) spoils small rows: replace a scale only where it is 0."
        )
    _judge_fit(q, scale, w, row_name=lambda i: f"row {i} of {where}")


def _rows(function: Callable, w: Tensor, what: str, first: bool = False, look_for_nan: bool = True):
    """(q, scale) of a matrix, int8 and (out, 1) float64; Wrong for other shapes and types and for a NaN on the way."""
    where = f"{name_of(function)} of {what}"
    try:
        with _nan_is_seen() as watch, unchanged(where, w):
            found = (attempt if first else again)(where, function, w)
    except Wrong as wrong:
        raise Wrong(_rows_way_out(str(wrong))) from None
    q, scale = (
        tensor(part, f"{name} from {where}")
        for part, name in zip(_parts(found, where, "q", "scale"), ("q", "scale"), strict=True)
    )
    if scale.shape == w.shape and not scale.is_floating_point() and q.numel() in (1, len(w)):
        raise Wrong(f"{where} returns them in the other order: (q, scale) is wanted.")
    if q.shape != w.shape:
        raise Wrong(f"q has the shape {tuple(q.shape)}; wanted that of w, {tuple(w.shape)}.")
    _judge_row_scale(scale, w, "A row")
    if look_for_nan and (watch.seen or q.is_floating_point() and q.isnan().any() or scale.isnan().any()):
        raise Wrong(_NAN)
    if q.dtype != torch.int8:
        raise Wrong(f"q has the type {dtype_name(q)}; int8 is wanted{_WHY_TYPE.get(q.dtype, '')}.")
    if not scale.isfinite().all():
        raise Wrong(f"A scale of {what} is {_list(scale.flatten())}; it must be finite.")
    return q, scale.reshape(-1, 1).double()


_WHY_TYPE = {
    torch.uint8: ": half of the weights are negative, and uint8 has no place for them",
    torch.float32: ": rounding alone saves nothing, the bytes do. Add .to(torch.int8)",
    torch.float16: ": rounding alone saves nothing, the bytes do. Add .to(torch.int8)",
}


def _rows_way_out(message: str) -> str:
    if _CAST in message:
        return _NAN
    if "must match the size" in message or "could not be broadcast" in message:
        return f"{message} One scale a row is a column, (out, 1): keepdim=True makes it one."
    return message


def _judge_row_scale(scale: Tensor, w: Tensor, who: str) -> None:
    """Wrong unless there is one scale a row, in a floating type."""
    rows, columns = w.shape
    shape = tuple(scale.shape)
    if shape not in ((rows, 1), (rows,)):
        why = ""
        if scale.numel() == 1:
            why = ": one scale for the whole matrix. The largest weight of one row spends it for all; take amax(dim=1)"
        elif scale.numel() == columns:
            why = ": a scale a column. A row of w makes one output; take amax(dim=1), not dim=0"
        elif shape == (rows, columns):
            why = ": a scale for every weight costs more than the weights"
        raise Wrong(f"The scale has the shape {shape}; wanted ({rows}, 1), one a row{why}.")
    if not scale.is_floating_point():
        raise Wrong(f"The scale has the type {dtype_name(scale)}; float32 is wanted.")


def _judge_minus_128(q: Tensor, w: Tensor, row: str) -> None:
    """HAZARDS 3: int8 has −128, the narrow range has not."""
    low = q == -128
    if (low & (w > 0)).any():
        raise Wrong(
            "A largest weight became −128, with the wrong sign: 128 does not fit into int8 and wraps. absmax / 127 keeps it at 127."
        )
    if low.any():
        raise Wrong(
            f"In the q of {row} there is −128; the range is −127 to 127, the same on both sides. The scale is absmax / 127."
        )


def _judge_fit(q: Tensor, scale: Tensor, w: Tensor, row_name: Callable[[int], str]) -> None:
    """Wrong unless every weight is off by at most half a step and the absmax of each row is exact."""
    exact = w.double()
    if len(w) > 1 and scale.unique().numel() == 1 and exact.abs().amax(1).unique().numel() > 1:
        raise Wrong("All rows have the same scale; each row has its own absmax. Take amax(dim=1).")
    back = q.double() * scale
    off = (back - exact).abs()
    over = (off > scale.abs() * 0.501).nonzero()
    if len(over):
        row, column = over[0].tolist()
        steps, inside = exact / scale, (exact / scale).abs().amax() <= 127.5
        causes = (
            (
                steps.trunc(),
                "q was cut off, not rounded, so the error grows to a whole step. Round before .to(torch.int8).",
            ),
            (
                steps.floor(),
                "q was rounded down, so the error grows to a whole step. torch.round goes to the nearest.",
            ),
            (
                steps.ceil(),
                "q was rounded up, so the error grows to a whole step. torch.round goes to the nearest.",
            ),
        )
        why = next((f" {why}" for cut, why in causes if inside and (cut == q).double().mean() > 0.9), "")
        raise Wrong(
            f"{_capital(row_name(row))}: {digits(exact[row, column].item())} came back as "
            f"{digits(back[row, column].item())}, with a step of {digits(scale[row].item())}.{why}"
        )
    largest = exact.abs().amax(1, keepdim=True)
    wrong = ((back.abs().amax(1, keepdim=True) - largest).abs() > largest * 1e-5).nonzero()
    if len(wrong):
        row = wrong[0, 0].item()
        place = exact[row].abs().argmax()
        raise Wrong(
            f"{_capital(row_name(row))}: the largest weight, {exact[row, place].item():.6g}, came back as "
            f"{back[row, place].item():.6g}. It should come back as it was: scale = absmax / 127 in float32, q up to 127."
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- 1.3 -------------------------------------------------------------------------------------------------------------


@exercise("1.3", "The price of a scale")
def _price_of_a_scale(answer, **given) -> str:
    price, smallest_group = function_and(answer, "price", "smallest_group")
    in_order(("price", lambda: _judge_price(price)))
    if smallest_group is None or smallest_group is ...:
        raise Unanswered("price is right so far; smallest_group is still empty.")
    _judge_group(whole(smallest_group, "smallest_group"))
    return "At 64 the scale adds a quarter of a bit to each weight. 128 would add an eighth, but does not divide 576."


def _judge_price(price: Callable) -> None:
    for place, args in enumerate(((4, 128, 16), (4, 128, 16, 4), (4, 32, 16), (8, 576, 32), (3, 64, 32, 8))):
        where = said(price, *args)
        got = number((again if place else attempt)(where, price, *args), where)
        want = _price(*args)
        if not math.isclose(got, want, rel_tol=1e-6):
            raise Wrong(f"{where} gave {got:,.6g}; wanted {want:.6g}{_why_price(got, *args)}")


def _price(bits: int, group_size: int, scale_bits: int, zero_bits: int = 0) -> float:
    return bits + (scale_bits + zero_bits) / group_size


def _why_price(got: float, bits: int, group_size: int, scale_bits: int, zero_bits: int = 0) -> str:
    want, shared = _price(bits, group_size, scale_bits, zero_bits), "the weights of a group share one"
    causes = (
        (bits + scale_bits / group_size, "zero_bits is not counted: a group also keeps its zero point."),
        (bits + scale_bits / group_size + zero_bits, f"every weight pays a whole zero point; {shared}."),
        (
            bits + scale_bits + zero_bits,
            f"every weight pays a whole scale; {shared}, so divide by group_size.",
        ),
        (bits + scale_bits, f"every weight pays a whole scale; {shared}, so divide by group_size."),
        (bits + scale_bits + zero_bits / group_size, f"every weight pays a whole scale; {shared}."),
        (want * group_size, "those are the bits of a whole group; divide by group_size."),
        (want * group_size / 8, "those are the bytes of a whole group; bits per weight are wanted."),
        (want / 8, "those are bytes; bits are wanted."),
        (want - bits, "that is what the scale adds; the weight's own bits come on top."),
        (bits, "the scale costs nothing there. Were two whole numbers divided with //?"),
        (
            (bits + scale_bits + zero_bits) / group_size,
            "the weight's own bits are divided too: every weight has its own.",
        ),
        (bits + group_size / scale_bits, "the division is upside down: scale_bits / group_size."),
        (bits * (1 + scale_bits / group_size), "add what the scale costs, do not multiply with it."),
    )
    for value, why in causes:
        if math.isclose(got, value, rel_tol=1e-6) and not math.isclose(value, want, rel_tol=1e-6):
            return f": {why}"
    return ": it was rounded; keep all digits." if abs(got - want) < 0.05 else "."


_FEATURES, _LIMIT = 576, 4.3


def _judge_group(size: int) -> None:
    if size < 1:
        raise Wrong(f"smallest_group is {size}; a group has at least one weight.")
    groups, left_over = divmod(_FEATURES, size)
    cost = _price(4, size, 16)
    if left_over:
        raise Wrong(
            f"{size} does not divide {_FEATURES}: {groups} group(s), and {left_over} weights are left over. "
            f"{'Look among the divisors of 576.' if cost < _LIMIT else f'And it costs {cost:.4g} bits.'}"
        )
    if size == 9:
        raise Wrong("9 is how many groups a row has; how many weights has a group?")
    if cost >= _LIMIT:
        raise Wrong(f"With groups of {size} a weight costs {cost:.4g} bits; less than {_LIMIT} is wanted.")
    if size != 64:
        raise Wrong(
            f"Groups of {size} cost {cost:.4g} bits, less than {_LIMIT}; but a smaller divisor of {_FEATURES} does too."
        )


# --- 1.4 -------------------------------------------------------------------------------------------------------------

_ROUND_THEN_SHIFT = "q = round(w / scale) + zero_point, then the clamp"


@exercise("1.4", "Where the zero goes")
def _where_the_zero_goes(answer, **given) -> str:
    (with_zero_point,) = functions(answer, "with_zero_point")
    with torch.inference_mode(), one_thread():
        _judge_example(with_zero_point)
        many = torch.randn(200, generator=torch.Generator().manual_seed(4)) + 0.7
        many[50] = 0
        _judge_range(with_zero_point, many, 8, "200 weights from {} to {}")
        _judge_range(with_zero_point, torch.tensor([0.5, 1.0, 3.0]), 4, "[0.5, 1, 3]")
        _judge_range(with_zero_point, torch.tensor([-3.0, -1.0, -0.4]), 4, "[−3, −1, −0.4]")
        _judge_zeros(with_zero_point)
    return "The steps reach from the least weight to the largest, and 0 has a step of its own, so a zero stays a zero."


def _affine(w: Tensor, bits: int) -> tuple[Tensor, float, int]:
    """(q, scale, zero point) in float64, the reference."""
    least, largest = min(w.min().item(), 0.0), max(w.max().item(), 0.0)
    scale = (largest - least) / (2**bits - 1) or 1.0
    zero = round(-least / scale)
    return (w.double() / scale).round().add(zero).clamp(0, 2**bits - 1), scale, zero


def _with_zero_point(
    function: Callable, w: Tensor, bits: int, what: str, first: bool = False
) -> tuple[Tensor, float, float]:
    """(q, scale, zero point) of a 1-D w; Wrong for other shapes and types."""
    where = f"{name_of(function)}({what}, {bits})"
    try:
        with _nan_is_seen() as watch, unchanged(where, w):
            found = (attempt if first else again)(where, function, w, bits)
    except Wrong as wrong:
        raise Wrong(_NO_RANGE if _CAST in str(wrong) else str(wrong)) from None
    q, scale, zero = _parts(found, where, "q", "scale", "zero_point")
    q, scale, zero = (
        tensor(q, f"q from {where}"),
        tensor(scale, f"scale from {where}"),
        tensor(zero, f"zero_point from {where}"),
    )
    if q.shape != w.shape:
        raise Wrong(
            f"{where} gives q the shape {tuple(q.shape)}; wanted that of w, {tuple(w.shape)}. Order: (q, scale, zero_point)."
        )
    if scale.numel() != 1 or zero.numel() != 1:
        raise Wrong(
            f"{where}: one scale and one zero point are wanted; {scale.numel()} and {zero.numel()} came."
        )
    if watch.seen or not (scale.isfinite().all() and q.isfinite().all() and zero.isfinite().all()):
        raise Wrong(_NO_RANGE if not w.any() else f"{where}: there is a NaN or an infinity in it.")
    scale, zero = scale.item(), zero.item()
    if zero and abs(zero) < 1 and float(scale).is_integer():
        raise Wrong(
            f"{where} returns scale {digits(scale)} and zero point {digits(zero)}: the order is (q, scale, zero_point)."
        )
    if q.is_floating_point() and not torch.equal(q, q.round()):
        raise Wrong(f"{where} gives q = {_list(q[:4])}; whole numbers are wanted: round.")
    if q.is_floating_point():
        raise Wrong(f"{where} gives q the type {dtype_name(q)}; uint8 is wanted. Add .to(torch.uint8).")
    return q.double(), float(scale), zero


_NO_RANGE = "Zeros alone have no range, so the scale is 0 and w / scale is 0/0: NaN. Give them another scale, such as 1."


def _judge_zero_point(zero: float, w: Tensor, bits: int, where: str) -> None:
    q, scale, want = _affine(w, bits)
    least, largest, top = w.min().item(), w.max().item(), 2**bits - 1
    says = f"{where} gives zero point {digits(zero)}"
    if least < 0 < largest and math.isclose(zero, least, rel_tol=1e-5):
        raise Wrong(
            f"{says}, the least weight; wanted {want}: the whole number that stands for the weight 0."
        )
    if zero != int(zero):
        raise Wrong(f"{says}; a whole number is wanted, one that q may take: round it to {want}.")
    if (least > 0 or largest < 0) and not 0 <= zero <= top:
        raise Wrong(
            f"{says}, outside 0 to {top}: the range from the least to the largest weight leaves out 0. "
            "Take min(w.min(), 0) and max(w.max(), 0)."
        )
    if want and zero == -want:
        raise Wrong(
            f"{says}; wanted {want}. It is the q that stands for the weight 0, and a weight is (q − zero_point) · scale."
        )
    if not 0 <= zero <= top:
        raise Wrong(f"{says}; it should be one of the values of q, 0 to {top}. Wanted {want}.")


def _judge_example(function: Callable) -> None:
    """HAZARDS 4: [−1, 0, 1, 2] at 4 bits is scale 0.2, zero point 5 and q = [0, 5, 10, 15]."""
    w, what = torch.tensor([-1.0, 0.0, 1.0, 2.0]), "[−1, 0, 1, 2]"
    q, scale, zero = _with_zero_point(function, w, 4, what, first=True)
    for wrong, why in (
        (3 / 16, "3/16: 16 values have 15 steps between them."),
        (2 / 7, "absmax / 7, the scale without a zero point; here the range goes from −1 to 2."),
        (2 / 15, "2/15: the range is from −1 to 2, so 3 wide."),
        (3 / 255, "3/255: at 4 bits there are 15 steps. Use bits."),
        (5, "upside down: a weight is (q − zero_point) · scale."),
        (3, "the whole range; 15 steps must share it."),
    ):
        if math.isclose(scale, wrong, rel_tol=1e-3):
            raise Wrong(f"The scale of {what} at 4 bits is {digits(scale)}, {why} Wanted 0.2.")
    if not math.isclose(scale, 0.2, rel_tol=1e-4):
        raise Wrong(f"The scale of {what} at 4 bits is {digits(scale)}; wanted 3/15 = 0.2.")
    _judge_zero_point(zero, w, 4, f"{name_of(function)}({what}, 4)")
    if zero != 5:
        half = " Half of the range is no place for 0 here: it is 5 steps above −1." if zero in (7, 8) else ""
        raise Wrong(f"The zero point of {what} at 4 bits is {zero:g}; wanted round(1 / 0.2) = 5.{half}")
    _explain_q(q, f"The q of {what} at 4 bits is {[int(value) for value in q]}")


def _explain_q(q: Tensor, says: str) -> None:
    causes = (
        (
            [5, 5, 10, 15],
            "−1 became 0: the zero point was added after the clamp, which had cut −5 to 0. Clamp last.",
        ),
        (
            [0, 0, 5, 10],
            "the zero point is not in it: −1 was cut off, and all the others come back as 1 less.",
        ),
        ([-5, 0, 5, 10], "the zero point is not in it; add it before the clamp, then no q is negative."),
        ([251, 0, 5, 10], "the zero point is not in it; −5 wraps to 251 in uint8. Add it before the clamp."),
        ([0, 0, 0, 5], "the zero point was taken off; to quantize, it is added."),
        ([15, 10, 5, 0], "upside down: the least weight is q = 0."),
        ([-8, -3, 2, 7], "signed values. Without a sign they go from 0 to 15."),
    )
    for wrong, why in causes:
        if q.tolist() == wrong:
            raise Wrong(f"{says}: {why} Wanted [0, 5, 10, 15].")
    if q.tolist() != [0, 5, 10, 15]:
        raise Wrong(f"{says}; wanted [0, 5, 10, 15]: {_ROUND_THEN_SHIFT}.")


def _judge_range(function: Callable, w: Tensor, bits: int, what: str) -> None:
    """Wrong unless q stays in its range and every weight comes back within half a step."""
    what = what.format(digits(w.min().item()), digits(w.max().item()))
    q, scale, zero = _with_zero_point(function, w, bits, what)
    top, (_, want, middle) = 2**bits - 1, _affine(w, bits)
    where = f"{name_of(function)}({what}, {bits})"
    _judge_zero_point(zero, w, bits, where)
    if bits != 4 and math.isclose(scale, want * top / 15, rel_tol=1e-3):
        raise Wrong(f"{where} has scale {digits(scale)}: that is for 4 bits. {bits} bits have {top} steps.")
    if not math.isclose(scale, want, rel_tol=1e-3):
        always = "" if w.min() < 0 < w.max() else ", since the range includes 0"
        raise Wrong(f"{where} has scale {digits(scale)}; wanted {digits(want)}{always}.")
    if not 0 <= q.min() <= q.max() <= top:
        raise Wrong(
            f"{where} has q from {q.min():g} to {q.max():g}; {bits} bits without a sign hold 0 to {top}."
        )
    if zero != middle:
        raise Wrong(f"{where} has zero point {zero:g}; wanted round(−least / scale) = {middle}.")
    exact = w.double()
    off = ((q - zero) * scale - exact).abs()
    if off.max() > scale * 0.501:
        place = off.argmax()
        came = f"{where}: {digits(exact[place].item())} came back as {digits(((q - zero) * scale)[place].item())}"
        raise Wrong(f"{came}, with a step of {digits(scale)}. {_why_off(q, exact, scale, zero, top)}")


def _why_off(q: Tensor, exact: Tensor, scale: float, zero: int, top: int) -> str:
    steps, least = exact / scale, min(exact.min().item(), 0.0)
    together = (steps - least / scale).round().clamp(0, top)
    if torch.equal(q, together):
        return "q and zero point were rounded apart: round((w − least) / scale) is not round(w / scale) + zero_point."
    if any(
        torch.equal(q, (cut(steps) + zero).clamp(0, top)) for cut in (torch.trunc, torch.floor)
    ) or torch.equal(q, (steps + zero).trunc().clamp(0, top)):
        return "q was cut off, not rounded: the error grows to a whole step. Round before .to(torch.uint8)."
    if (q > 127).sum() == 0 and top > 127:
        return f"No q passes 127; the clamp's end is {top} at 8 bits."
    return f"At most half a step is allowed: {_ROUND_THEN_SHIFT}."


def _judge_zeros(function: Callable) -> None:
    q, scale, zero = _with_zero_point(function, torch.zeros(4), 4, "[0, 0, 0, 0]")
    if ((q - zero) * scale).any():
        raise Wrong(f"[0, 0, 0, 0] came back as {_list((q - zero) * scale)}; zeros are wanted.")


# --- 1.5 -------------------------------------------------------------------------------------------------------------


@exercise("1.5", "Two to a byte")
def _two_to_a_byte(answer, **given) -> str:
    pack, unpack = functions(answer, "pack", "unpack")
    with torch.inference_mode(), one_thread():
        in_order(("pack", lambda: _judge_pack(pack)), ("unpack", lambda: _judge_unpack(unpack)))
    return "Two weights share a byte and come back in order, with their signs; an odd length comes back too."


def _nibbles(q: Tensor, offset: int = 8, mask: int = 15) -> Tensor:
    return (q.to(torch.int64) + offset) & mask


def _pairs(low: Tensor, high: Tensor) -> Tensor:
    return (low | high << 4) & 0xFF


def _packed(q: Tensor) -> Tensor:
    """(length / 2,) int64, low nibble first, offset 8, an odd length padded with 0: the reference."""
    q = torch.cat((q, q.new_zeros(len(q) % 2)))
    return _pairs(_nibbles(q[0::2]), _nibbles(q[1::2]))


_PROBE = (-1, 7, -8, -1, 3, -8, 0, 5)  # HAZARDS 7, 9: 0xF7, 0x70, 0x0B; and 0xD8


def _judge_pack(pack: Callable) -> None:
    q = torch.tensor(_PROBE, dtype=torch.int8)
    got, want = _bytes(pack, q, _PROBE, first=True), _packed(q)
    if not torch.equal(got, want):
        place = int((got != want).nonzero()[0])
        pair = f"({_signed(_PROBE[2 * place])}, {_signed(_PROBE[2 * place + 1])})"
        why = _why_packed(got, q)
        raise Wrong(
            f"The pair {pair} became 0x{int(got[place]):02X}; wanted 0x{int(want[place]):02X}{f': {why}' if why else '.'}"
        )
    for values in (tuple(range(-8, 8)), (-3, 4, -8, 7, -5), (6,)):
        q = torch.tensor(values, dtype=torch.int8)
        got, want = _bytes(pack, q, values), _packed(q)
        odd = len(values) % 2
        if (
            not torch.equal(got[: len(want) - odd], want[: len(want) - odd])
            or odd
            and got[-1] & 15 != want[-1] & 15
        ):
            last = " The last value stands alone, in the low nibble." if odd else ""
            raise Wrong(f"pack({_few(values)}) gave {_hex(got)}; wanted {_hex(want)}.{last}")


def _signed(value: int) -> str:
    return str(value).replace("-", "−")


def _few(values: Sequence[int]) -> str:
    shown = [_signed(value) for value in values]
    return f"[{', '.join(shown)}]" if len(shown) <= 8 else f"[{', '.join(shown[:2])}, …, {shown[-1]}]"


def _hex(packed: Tensor) -> str:
    return f"[{', '.join(f'0x{int(value):02X}' for value in packed)}]"


def _bytes(pack: Callable, q: Tensor, values: Sequence[int], first: bool = False) -> Tensor:
    """The packed bytes as int64; Wrong for another type or length."""
    where, size = f"pack({_few(values)})", (len(values) + 1) // 2
    try:
        with unchanged(where, q):
            found = (attempt if first else again)(where, pack, q)
    except Wrong as wrong:
        if len(values) % 2 and " raised " in str(wrong):
            raise Wrong(
                f"{wrong} An odd length leaves the last value alone: append a 0 before packing."
            ) from None
        raise
    packed = tensor(found, where)
    count = packed.numel()
    if count == len(values) and count != size:
        raise Wrong(
            f"{where} gave {count} bytes for {count} values: each has a byte of its own. Two share one."
        )
    if count != size:
        lost = ": the last value is lost. Append a 0 before packing" if count == len(values) // 2 else ""
        raise Wrong(f"{where} gave {count} bytes; {len(values)} values need {size}{lost}.")
    if packed.dtype != torch.uint8:
        why = (
            ": 15 shifted by 4 is 240, and int8 ends at 127. Add .to(torch.uint8) before the shift"
            if packed.dtype == torch.int8
            else ""
        )
        raise Wrong(f"{where} has the type {dtype_name(packed)}; uint8 is wanted{why}.")
    return packed.flatten().to(torch.int64)


def _why_packed(got: Tensor, q: Tensor) -> str:
    """The cause of wrong bytes where it is a known one, else an empty text."""
    even, odd = q[0::2], q[1::2]
    first, second = q[: len(q) // 2], q[len(q) // 2 :]
    clipped, twos = functools.partial(_clipped), functools.partial(_nibbles, offset=0)
    causes = (
        (
            _pairs(_nibbles(odd), _nibbles(even)),
            "swapped nibbles. The first value belongs into the low one, the second is shifted up by 4.",
        ),
        (
            _pairs(clipped(even), clipped(odd)),
            "the negative values were clipped to 0. Add the offset 8 first, then all are 0 to 15.",
        ),
        (
            _pairs(clipped(odd), clipped(even)),
            "the negative values were clipped to 0. Add the offset 8 first; and the first value belongs into the low nibble.",
        ),
        (
            _pairs(twos(even), twos(odd)),
            "those are the lowest 4 bits as they are (two's complement). The course adds 8 first.",
        ),
        (
            _pairs(twos(odd), twos(even)),
            "8 is not added, and the nibbles are swapped: the first value belongs into the low one.",
        ),
        (
            _pairs(even.long(), odd.long()),
            "8 is not added, so the sign of the first value runs into the second. Add 8, then all are 0 to 15.",
        ),
        (_pairs(_nibbles(even, 7), _nibbles(odd, 7)), "the offset is 8: −8 becomes 0."),
        (
            _pairs(_nibbles(first), _nibbles(second)),
            "the halves of the list were paired. A byte holds neighbours: q[0::2] and q[1::2].",
        ),
        (
            _pairs(_nibbles(second), _nibbles(first)),
            "the halves of the list were paired. A byte holds neighbours: q[0::2] and q[1::2].",
        ),
        (
            _nibbles(even) + _nibbles(odd),
            "both values were added in the same nibble. Shift the second up by 4.",
        ),
        (_nibbles(even) | _nibbles(odd), "both values stand in the same nibble. Shift the second up by 4."),
        (_nibbles(even) | _nibbles(odd) << 3, "the second value is shifted by 3. A nibble is 4 bits wide."),
    )
    return next((why for wrong, why in causes if torch.equal(got, wrong)), "")


def _clipped(q: Tensor) -> Tensor:
    return q.to(torch.int64).clamp(0, 15)


def _judge_unpack(unpack: Callable) -> None:
    for place, values in enumerate((_PROBE, tuple(range(-8, 8)), (-3, 4, -8, 7, -5), (6,))):
        want = torch.tensor(values)
        packed = _packed(want).to(torch.uint8)
        where = (
            f"unpack({_hex(packed)}, {len(values)})"
            if len(values) <= 8
            else f"unpack({len(packed)} bytes, {len(values)})"
        )
        with unchanged(where, packed):
            found = (again if place else attempt)(where, unpack, packed, len(values))
        got = tensor(found, where).flatten()
        why = _why_unpacked(got, packed, len(values))
        if why:
            raise Wrong(f"{where} gave {_few(got.tolist())}: {why}")
        if got.tolist() != want.tolist():
            raise Wrong(f"{where} gave {_few(got.tolist())}; wanted {_few(values)}.")
        if got.dtype != torch.int8:
            raise Wrong(f"{where} has the type {dtype_name(got)}; int8 is wanted. Add .to(torch.int8).")


def _why_unpacked(got: Tensor, packed: Tensor, length: int) -> str:
    """The cause of wrong values where it is a known one, else an empty text."""
    byte = packed.to(torch.int64)
    low, high = byte & 15, byte >> 4
    full = torch.stack((low, high), dim=1).flatten() - 8
    if got.numel() == len(full) != length:
        return (
            f"{len(full)} values, where {length} were packed. The last nibble is filling; cut with [:length]."
        )
    if got.numel() == len(packed) != length:
        return "one value a byte; each byte holds two."
    if got.numel() != length:
        return f"{got.numel()} values, where {length} were packed."
    if torch.equal(got.long(), full[:length]):
        return ""
    twos_low, twos_high = ((nibble ^ 8) - 8 for nibble in (low, high))
    causes = (
        (_woven(high - 8, low - 8), "swapped nibbles. The low nibble is the first of the two."),
        (
            torch.cat((low, high)) - 8,
            "first all low nibbles, then all high ones. Neighbours come from one byte: stack them, then flatten.",
        ),
        (
            torch.cat((high, low)) - 8,
            "first all high nibbles, then all low ones. Neighbours come from one byte: stack them, then flatten.",
        ),
        (_woven(low, high), "the offset is still in it. Take 8 off."),
        (
            _woven(high, low),
            "the offset is still in it, and the nibbles are swapped. Take 8 off; the low nibble comes first.",
        ),
        (_woven(twos_low, twos_high), "read as two's complement. The offset is 8: take 8 off."),
        (_woven(byte - 8, high - 8), "the low nibble was not cut out of its byte: & 15."),
        (_woven(low - 8, (byte & 0xF0) - 8), "the high nibble was not shifted down: >> 4."),
        (_woven(low - 7, high - 7), "the offset is 8: 0 becomes −8."),
    )
    for wrong, why in causes:
        if torch.equal(_as_byte(got.long()), _as_byte(wrong[:length])):
            return why
    if got.dtype == torch.uint8 and torch.equal(got.long(), full[:length] & 0xFF):
        return "uint8 has no negative values, so they wrap. Turn to int8 before 8 is taken off."
    return ""


def _woven(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=1).flatten()


def _as_byte(values: Tensor) -> Tensor:
    """The same whether a value wrapped in 8 bits or not."""
    return values & 0xFF


# --- 1.6 -------------------------------------------------------------------------------------------------------------

_RATIOS = (
    0.7,
    1.0,
    0.5,
    0.85,
    0.6,
    0.4,
    0.9,
    0.75,
    0.95,
    0.55,
    0.8,
    0.65,
    0.45,
)  # in no order: none may be relied on


@exercise("1.6", "A better scale than absmax")
def _better_scale(answer, weights: Tensor | None = None, **given) -> str:
    search_scale, why = function_and(answer, "search_scale", "why")
    with torch.inference_mode(), one_thread():
        w = _given_weights(weights)
        in_order(("search_scale", lambda: _judge_search(search_scale, w)))
        _judge_why(why)
        three, eight = (_gain(search_scale, w, bits) for bits in (3, 8))
    return (
        f"On {'the matrix given' if weights is not None else 'random rows'} the squared error falls to {three:.2f} of "
        f"absmax's at 3 bits, and to {eight:.2f} at 8."
    )


def _given_weights(weights) -> Tensor:
    """(out, in) float32 on the CPU; random rows where none are given."""
    if weights is None:
        return torch.randn(64, 576, generator=torch.Generator().manual_seed(6))
    if not isinstance(weights, Tensor) or weights.ndim != 2 or not weights.is_floating_point():
        raise Wrong(
            "weights should be a matrix of weights, such as a linear layer's .weight.data; pass weights=sample."
        )
    return weights.detach().float().cpu()


def _base(w: Tensor, bits: int) -> Tensor:
    """absmax's scale of each row, (out,) float64."""
    return w.double().abs().amax(1) / (2 ** (bits - 1) - 1)


def _squares(difference: Tensor) -> Tensor:
    return difference.square().sum(1)


def _errors(w: Tensor, scale: Tensor, bits: int, cost: Callable = _squares, clamped: bool = True) -> Tensor:
    """What each row costs at its scale, (out,) float64."""
    top, exact = 2 ** (bits - 1) - 1, w.double()
    q = (exact / scale[:, None]).round()
    q = q.clamp(-top, top) if clamped else q
    return cost(q * scale[:, None] - exact)


def _table(w: Tensor, bits: int, ratios: Sequence[float], **how) -> Tensor:
    """(out, ratios) float64: what each row costs at each ratio."""
    return torch.stack([_errors(w, ratio * _base(w, bits), bits, **how) for ratio in ratios], dim=1)


def _small_rows() -> Tensor:
    """(12, 48): from rows without to rows with weights far out, so that they want different ratios."""
    w = torch.randn(12, 48, generator=torch.Generator().manual_seed(16))
    return w.sign() * w.abs() ** torch.linspace(0.2, 2.5, 12)[:, None]


def _judge_search(search_scale: Callable, weights: Tensor) -> None:
    w = _small_rows()
    _judge_lone_ratio(search_scale, w)
    for bits in (3, 4):
        _judge_choice(search_scale, w, bits, "a matrix of 12 rows")
    for bits in (3, 8):
        _judge_choice(search_scale, weights, bits, f"the matrix of {weights.shape[0]} rows given")


def _judge_lone_ratio(search_scale: Callable, w: Tensor) -> None:
    """One ratio leaves no choice, so the scale itself shows: absmax / 3 and half of absmax / 7."""
    for ratio, bits in ((1.0, 3), (1.0, 4), (0.5, 4)):
        scale = _row_scales(search_scale, w, bits, [ratio], first=(ratio, bits) == (1.0, 3))
        want, top = ratio * _base(w, bits), 2 ** (bits - 1) - 1
        if torch.allclose(scale, want, rtol=1e-4):
            continue
        says = f"{name_of(search_scale)}(w, {bits}, [{ratio}]): row 0 has scale {digits(scale[0].item())}, wanted {digits(want[0].item())}"
        absmax = w.double().abs().amax(1)
        causes = (
            (torch.full_like(want, ratio), "that is the ratio; the scale is ratio · absmax / " + f"{top}."),
            (ratio * absmax, f"that is ratio · absmax; divide by {top}, the largest q."),
            (
                ratio * absmax / 2 ** (bits - 1),
                f"divide by {top}, not by {top + 1}: q goes from −{top} to {top}.",
            ),
            (
                ratio * absmax / (2**bits - 1),
                f"divide by {top}: half of the values of {bits} bits are negative.",
            ),
            (ratio * absmax * 2 / (2**bits - 1), f"divide by {top}: q goes from −{top} to {top}."),
            (ratio * absmax / 127, "127 is the largest q of 8 bits. Use bits."),
            (ratio * absmax / 3, "3 is the largest q of 3 bits. Use bits."),
            (
                ratio * w.double().amax(1) / top,
                "the largest weight without its sign counts: take abs() first.",
            ),
            (
                ratio * absmax.amax().expand_as(absmax) / top,
                "that is the absmax of the whole matrix; each row has its own.",
            ),
            (_base(w, bits), "the ratio given was not used."),
            (want / ratio**2, "divided by the ratio; multiply, so that a smaller ratio gives finer steps."),
        )
        for wrong, why in causes:
            if torch.allclose(scale, wrong, rtol=1e-4):
                raise Wrong(f"{says}: {why}")
        raise Wrong(f"{says}: with one ratio only, it is ratio · absmax / {top}.")


def _row_scales(
    search_scale: Callable, w: Tensor, bits: int, ratios: list[float], first: bool = False
) -> Tensor:
    """The scales as (out,) float64; Wrong for another shape or type."""
    where = f"{name_of(search_scale)}(w, {bits}, {ratios if len(ratios) < 4 else 'ratios'})"
    given = w.clone()
    try:
        with unchanged(where, given):
            found = (attempt if first else again)(where, search_scale, given, bits, list(ratios))
    except Wrong as wrong:
        raise Wrong(_rows_way_out(str(wrong))) from None
    if isinstance(found, (tuple, list)) and any(isinstance(part, Tensor) for part in found):
        raise Wrong(f"{where} returns {len(found)} things; only the scale is wanted, (out, 1).")
    scale = tensor(found, where)
    _judge_row_scale(scale, w, "A row")
    if not scale.isfinite().all() or (scale <= 0).any():
        raise Wrong(
            f"{where} has a scale that is {digits(scale.min().item())}; all should be above 0. Was a row never chosen for?"
        )
    return scale.flatten().double()


def _judge_choice(search_scale: Callable, w: Tensor, bits: int, what: str) -> None:
    """Wrong unless each row has, of the ratios, the one with the least squared error."""
    ratios = list(_RATIOS)
    scale = _row_scales(search_scale, w, bits, ratios)
    base, table = _base(w, bits), _table(w, bits, ratios)
    chosen = scale / base  # (out,) the ratio of each row
    alike = (chosen[:, None] - torch.tensor(ratios, dtype=torch.float64)).abs() < 1e-3
    if not alike.any(1).all():
        row = int((~alike.any(1)).nonzero()[0])
        raise Wrong(
            f"On {what} at {bits} bits row {row} has {chosen[row]:.3f} of absmax's scale; that is none of the ratios given."
        )
    least = table.amin(1)
    errors = table.gather(1, alike.int().argmax(1, keepdim=True))[:, 0]
    worse = (errors > least * 1.001 + 1e-30).nonzero()
    if not len(worse):
        return
    says = f"On {what} at {bits} bits "
    why = _why_choice(chosen, w, bits, ratios)
    if why:
        raise Wrong(f"{says}{why}")
    row = int(worse[0])
    best = ratios[int(table[row].argmin())]
    raise Wrong(
        f"{says}row {row} got ratio {chosen[row]:.2f} with a squared error of {digits(errors[row].item())}; "
        f"ratio {best:.2f} has {digits(table[row].min().item())}. Keep, for each row, the least of all ratios."
    )


_COSTS = (  # how a row was judged, other than by its squared error
    (
        lambda d: d.abs().sum(1),
        "the least absolute error; squares are asked, in which few large errors weigh more.",
    ),
    (lambda d: d.abs().amax(1), "the smallest largest error; the sum of the squares of all is asked."),
    (lambda d: d.sum(1).abs(), "the smallest sum of errors, in which signs cancel. Square before the sum."),
    (lambda d: d.sum(1), "the most negative sum of errors. Square before the sum."),
    (lambda d: -d.sum(1), "the most negative sum of errors. Square before the sum."),
)


def _why_choice(chosen: Tensor, w: Tensor, bits: int, ratios: list[float]) -> str:
    """The cause of wrong choices where it is a known one, else an empty text."""
    known = torch.tensor(ratios, dtype=torch.float64)
    alone = [ratio for ratio in ratios if ((chosen - ratio).abs() < 1e-3).all()]  # the one ratio of all rows
    together = ratios[int(_table(w, bits, ratios).sum(0).argmin())]
    if alone == [min(ratios)] or _agree(chosen, known[_table(w, bits, ratios, clamped=False).argmin(1)]):
        return (
            "the smallest of the ratios wins (nearly) everywhere. Take the least error, and count what clipping costs: "
            f"clamp q to ±{2 ** (bits - 1) - 1}, then take the difference from w itself."
        )
    if alone == [together]:
        return f"all rows got the same ratio, {together:.2f}. Sum the errors over dim=1: each row chooses for itself."
    if alone == [1]:
        return "every row kept absmax's scale, though smaller ones have a smaller squared error."
    for place, when in ((0, "first"), (-1, "last")):
        if alone == [ratios[place]]:
            return f"every row got the {when} of the ratios: was its error compared with the least so far, row by row?"
    for cost, what in _COSTS:
        if _agree(chosen, known[_table(w, bits, ratios, cost=cost).argmin(1)]):
            return f"the rows were chosen by {what}"
    return ""


def _agree(chosen: Tensor, others: Tensor) -> bool:
    """Whether nearly all rows chose those: near ties may fall either way."""
    return ((chosen - others).abs() < 1e-3).double().mean().item() > 0.95


def _judge_why(why) -> None:
    letters = ", ".join(WHY_NOT_AT_8_BITS)
    if why is None or why is ... or isinstance(why, str) and not why.strip():
        raise Unanswered(f"search_scale is right so far; why is still empty: one of {letters}.")
    word = why.strip().lower().rstrip(".):") if isinstance(why, str) else why
    letter = next(
        (key for key, text in WHY_NOT_AT_8_BITS.items() if word in (key, text.lower().rstrip("."))), None
    )
    if letter is None:
        raise Wrong(f"why should be one of the letters {letters}; it is {short(why)}.")
    if letter == "a":
        raise Wrong(
            "Not a: at 8 bits weights still come back rounded. Measure the squared error at ratio 1.0; it is small, not 0."
        )
    if letter == "b":
        raise Wrong(
            "Not b: the weights are the same at 3 bits, and there cutting off the largest ones pays. What changes is the step."
        )


def _gain(search_scale: Callable, w: Tensor, bits: int) -> float:
    """The squared error with the scales found, as a share of that with absmax's."""
    found = _errors(w, _row_scales(search_scale, w, bits, list(_RATIOS)), bits).sum()
    return (found / _errors(w, _base(w, bits), bits).sum()).item()
