"""The six exercises of chapter 1: the right answer passes, and each known wrong one hears its own sentence."""

from __future__ import annotations

import numpy
import pytest
import torch

from course_utils.chapters import quantization
from course_utils.exercises import WHY_NOT_AT_8_BITS, check, judge
from course_utils.exercises.quantization import _RATIOS, _small_rows, _table
from tests.exercises_for_tests import hears, one_thread, unanswered  # noqa: F401

# --- 1.1 -------------------------------------------------------------------------------------------------------------


def floor_ms(num_params, bits, bandwidth):
    return num_params * bits / 8 / bandwidth * 1000


def changed(change):
    return lambda p, b, w: change(floor_ms(p, b, w))


@pytest.mark.parametrize("right", [floor_ms, changed(lambda ms: round(ms, 1)), changed(torch.tensor)])
def test_floor_passes(right):
    check("1.1", right, strict=True)
    assert [round(floor_ms(134_515_008, bits, 12e9), 2) for bits in (32, 8)] == [44.84, 11.21]
    assert round(floor_ms(6_738_415_616, 16, 320e9), 1) == 42.1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda p, b, w: p * b / w * 1000,
            "(134_515_008, 32, 12e9) gave 358.7; wanted 44.84: 8 times too much: bits are not",
        ),
        (lambda p, b, w: p * b * 8 / w * 1000, "64 times too much: divide by 8 to come from bits to bytes"),
        (changed(lambda ms: ms / 8), "an eighth: the 8 of bits to bytes was divided by twice"),
        (changed(lambda ms: ms / 1000), "1,000 times too little: those are seconds"),
        (
            changed(lambda ms: ms * 1000),
            "gave 44,838; wanted 44.84: 1,000 times too much: those are microseconds",
        ),
        (lambda p, b, w: p * b / w, "neither bytes nor milliseconds: divide the bits by 8"),
        (
            changed(lambda ms: ms / 1e6),
            "a million times too little: to come from seconds to milliseconds multiply",
        ),
        (changed(lambda ms: ms / 1e9), "the bandwidth is given in bytes per second, not in GB/s."),
        (
            changed(lambda ms: ms / 1e12),
            "the bandwidth is given in bytes per second, not in GB/s, and milliseconds",
        ),
        (changed(lambda ms: 2 * ms), "twice as much: a token needs each weight once, so it is read once."),
        (changed(lambda ms: ms * 1.024), "no 1,024 is needed"),
        (changed(lambda ms: ms / 1.024**3), "no 1,024 is needed"),
        (changed(lambda ms: 1000 / ms), "The inverse is tokens per time."),
        (lambda p, b, w: w / (p * b), "bytes belong above the line and the bandwidth below it"),
        (changed(round), "gave 45, rounded to whole milliseconds; wanted 44.84."),
        (changed(lambda ms: ms // 1), "gave 44, rounded to whole milliseconds; wanted 44.84."),
        (
            lambda p, b, w: p * b // 8 // w * 1000,
            "gave 0; wanted 44.84: // throws the fraction away, / keeps it.",
        ),
        (
            lambda p, b, w: p * (b // 8) / w * 1000,
            "4, 320e9) gave 0; wanted 10.53: 4 // 8 is 0; // throws the fraction",
        ),
        (
            lambda p, b, w: floor_ms(p, max(b, 8), w),
            "gave 21.06; wanted 10.53: that is the floor of 8 bits. Two weights",
        ),
        (
            lambda p, b, w: floor_ms(p, 32, w),
            "8, 12e9) gave 44.84; wanted 11.21: bits changes nothing in your function",
        ),
        (lambda p, b, w: floor_ms(p, b, 12e9), "bandwidth changes nothing in your function"),
        (lambda p, b, w: floor_ms(134_515_008, b, w), "num_params changes nothing in your function"),
        (lambda p, b, w: p * b / 8, "wanted 44.84: those are the bytes. Divide by the bandwidth."),
        (changed(lambda ms: ms + 3), "gave 47.84; wanted 44.84."),
        (changed(str), "should be a number; it is '44.8"),
        (changed(lambda ms: float("inf")), "should be a number; it is inf"),
        (
            lambda p, b, w: floor_ms(p, b, w) if b == 32 else None,
            "(134_515_008, 8, 12e9) is None, though other calls",
        ),
        (lambda p, b, w: 1 / 0, "raised ZeroDivisionError: division by zero."),
        (44.84, "floor_ms should be a function; it is 44.84."),
    ],
)
def test_floor_names_wrong_answers(wrong, sentence):
    hears("1.1", wrong, sentence)


# --- 1.2 -------------------------------------------------------------------------------------------------------------


def rows(
    scales=lambda w: w.abs().amax(1, keepdim=True) / 127,
    guard=lambda scale: torch.where(scale == 0, 1.0, scale),
    to_whole=torch.round,
    low=-127,
    high=127,
    cast=lambda q: q.to(torch.int8),
    prepare=lambda w: w.float(),
    give=lambda q, scale: (q, scale),
):
    """A right one_scale_a_row, and with other arguments wrong ones."""

    def one_scale_a_row(w):
        w = prepare(w)
        scale = guard(scales(w))
        return give(cast(to_whole(w / scale).clamp(low, high)), scale)

    return one_scale_a_row


def no_guard(scale):
    return scale


def in_numpy(w):
    w = w.float().numpy()
    scale = numpy.abs(w).max(1, keepdims=True) / 127
    with numpy.errstate(all="ignore"):
        steps = numpy.where(scale == 0, 0, w / scale)
    return numpy.round(steps).astype(numpy.int8), scale


def in_numpy_with_nan(w):
    w = w.float().numpy()
    scale = numpy.abs(w).max(1, keepdims=True) / 127
    return numpy.round(w / scale).astype(numpy.int8), scale


def in_numpy_without_column(w):
    w = w.float().numpy()
    return w / (numpy.abs(w).max(1) / 127), 1


@pytest.mark.parametrize(
    "right",
    [
        rows(),
        rows(give=lambda q, scale: (q, scale[:, 0])),
        rows(guard=lambda scale: scale.clamp(min=1e-30)),
        rows(guard=no_guard, cast=lambda q: q.nan_to_num().to(torch.int8)),  # finite, though its scale is 0
        rows(to_whole=lambda steps: (steps + 0.5).floor()),  # other ties
        rows(low=-128),  # never reached
        in_numpy,
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_scale_survives_passes(right):
    check("1.2", right, strict=True)


def test_scale_survives_gives_the_hazards_values():
    """HAZARDS 1, 2, 3."""
    q, scale = rows()(torch.tensor([[0.0, 0, 0, 0], [1, -2, 3, -5]]))
    assert q.tolist() == [[0, 0, 0, 0], [25, -51, 76, -127]] and scale[1].item() == pytest.approx(0.0393701)
    half = torch.tensor([[1e-6], [1e-5]]).half()
    q, scale = rows()(half)
    torch.testing.assert_close(q * scale, half.float())


def loops_over_rows(w):
    q, scale = torch.zeros(w.shape, dtype=torch.int8), torch.zeros(len(w), 1)
    for i, row in enumerate(w.float()):
        scale[i] = row.abs().max() / 127
        q[i] = (row / scale[i]).round()
    return q, scale


def in_place(w):
    scale = (w.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    w /= scale
    return w.round().to(torch.int8), scale


def in_half(w):
    scale = w.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (w / scale).round().clamp(-127, 127).to(torch.int8), scale


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (rows(guard=no_guard), "w / scale is 0/0: NaN, and as int8 whatever the machine makes of it."),
        (loops_over_rows, "w / scale is 0/0: NaN, and as int8 whatever the machine makes of it."),
        (in_numpy_with_nan, "w / scale is 0/0: NaN, and as int8 whatever the machine makes of it."),
        (rows(guard=no_guard, cast=lambda q: q), "w / scale is 0/0: NaN"),
        (
            rows(scales=lambda w: w.abs().amax(1, keepdim=True) / 128),
            "5/128: q ends at 127, so the largest weight does not come back as it was.",
        ),
        (
            rows(scales=lambda w: w.abs().amax(1, keepdim=True) / 128, low=-128),
            "there is −128; the range is −127 to 127",
        ),
        (
            rows(scales=lambda w: w.abs().amax(1, keepdim=True) / 127.5),
            "5/127.5: q ends at 127, so the largest weight does not come back as it was.",
        ),
        (
            rows(to_whole=torch.trunc),
            "−5]: -2 came back as -1.969, with a step of 0.03937. q was cut off, not rounded",
        ),
        (rows(to_whole=torch.floor), "q was rounded down, so the error grows to a whole step. torch.round"),
        (rows(to_whole=torch.ceil), "q was rounded up, so the error grows to a whole step."),
        (in_half, "came back as zeros: 1e−6/127 is smaller than the least float16, so the scale became 0."),
        (
            rows(guard=lambda s: s.clamp(min=1e-5)),
            "its scale is 1e-05, wanted 7.98e-09. A least scale (or one added)",
        ),
        (
            rows(guard=lambda s: s.clamp(min=1e-8)),
            "of 1e−6 is 1e-08, wanted 7.98e-09. A least scale (or one added) spoils",
        ),
        (
            rows(guard=lambda s: s + 1e-8),
            "of 1e−6 is 1.8e-08, wanted 7.98e-09. A least scale (or one added) spoils",
        ),
        (
            rows(scales=lambda w: w.abs().amax() / 127),
            "the shape (); wanted (2, 1), one a row: one scale for the whole",
        ),
        (
            rows(scales=lambda w: w.abs().amax(0, keepdim=True) / 127),
            "the shape (1, 4); wanted (2, 1), one a row: a scale a column",
        ),
        (rows(scales=lambda w: w.abs() / 127), "a scale for every weight costs more than the weights"),
        (
            rows(scales=lambda w: (w.abs().amax() / 127).expand(len(w), 1)),
            "All rows have the same scale; each row has its own",
        ),
        (
            rows(scales=lambda w: w.amax(1, keepdim=True) / 127),
            "3/127: the largest weight without its sign is 5.",
        ),
        (rows(scales=lambda w: w.amin(1, keepdim=True) / 127), "negative: take abs() before the largest"),
        (
            rows(scales=lambda w: (w.amax(1, True) - w.amin(1, True)) / 255),
            "8/255, from the least to the largest",
        ),
        (rows(scales=lambda w: w.abs().amax(1, True) / 255), "5/255: half of the 255 values are negative"),
        (
            rows(scales=lambda w: w.abs().amax(1, True)),
            "is 5, absmax itself: the 127 steps up to it must share it.",
        ),
        (rows(give=lambda q, s: (q, 1 / s)), "127/5, upside down: a weight is q · scale."),
        (
            rows(give=lambda q, s: (q, torch.ones_like(s))),
            "is 1, 1: the row's own absmax does not appear in it.",
        ),
        (rows(scales=lambda w: w.abs().mean(1, True) / 127), "came back as"),
        (
            rows(scales=lambda w: w.abs().amax(1) / 127),
            "One scale a row is a column, (out, 1): keepdim=True makes it one.",
        ),
        (rows(cast=lambda q: q), "q has the type float32; int8 is wanted: rounding alone saves nothing"),
        (
            rows(cast=lambda q: q.to(torch.uint8)),
            "q has the type uint8; int8 is wanted: half of the weights are negative",
        ),
        (rows(cast=lambda q: q.to(torch.int32)), "q has the type int32; int8 is wanted."),
        (rows(give=lambda q, s: (s, q)), "returns them in the other order: (q, scale) is wanted."),
        (rows(give=lambda q, s: (s[:, 0], q)), "returns them in the other order: (q, scale) is wanted."),
        (rows(give=lambda q, s: (q, s.long())), "The scale has the type int64; float32 is wanted."),
        (
            rows(give=lambda q, s: (q, s.bfloat16())),
            "It should come back as it was: scale = absmax / 127 in float32",
        ),
        (rows(give=lambda q, s: (q, s / 0)), "it must be finite"),
        (rows(give=lambda q, s: q), "should return (q, scale); it returns a Tensor."),
        (rows(give=lambda q, s: (q, s, 0)), "should return (q, scale); it returns 3 thing(s)."),
        (rows(give=lambda q, s: (q, None)), "returns None as scale."),
        (rows(give=lambda q, s: ("q", s)), "should be a tensor; it is 'q'."),
        (
            rows(give=lambda q, s: (q + (s == 1).to(torch.int8), s)),
            "The row of zeros came back as q = [1, 1, 1, 1]",
        ),
        (rows(high=100, low=-100), "−5]: -5 came back as -3.937, with a step of 0.03937."),
        (
            rows(scales=lambda w: w.abs().amax(1, True) / 100),
            "is 0.05; wanted absmax / 127 = 5/127 = 0.03937.",
        ),
        (rows(give=lambda q, s: (q[:, :2], s)), "q has the shape (2, 2); wanted that of w, (2, 4)."),
        (in_numpy_without_column, "One scale a row is a column, (out, 1): keepdim=True makes it one."),
        (
            lambda w: rows()(w) if len(w) == 2 else None,
            "of a matrix of 6 rows and 40 columns is None, though other",
        ),
        (
            lambda w: rows()(w) if w.dtype != torch.half else w.nothing,
            "of a float16 matrix with a row of 1e−6 raised",
        ),
        (in_place, "wrote into the tensor it was given; make a new one."),
        (lambda w: w.nothing, "raised AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_scale_survives_names_wrong_answers(wrong, sentence):
    hears("1.2", wrong, sentence)


def wraps_at_128(w):
    """/128 and no clamp: −128 fits, +128 wraps. The small example has no row with a positive absmax."""
    scale = w.float().abs().amax(1, keepdim=True) / (127 if len(w) == 2 else 128)
    scale = torch.where(scale == 0, 1.0, scale)
    return (w / scale).round().to(torch.int32).to(torch.int8), scale


def test_scale_survives_names_a_largest_weight_that_wraps():
    hears(
        "1.2",
        wraps_at_128,
        "A largest weight became −128, with the wrong sign: 128 does not fit into int8 and wraps.",
    )


# --- 1.3 -------------------------------------------------------------------------------------------------------------


def price(bits, group_size, scale_bits, zero_bits=0):
    return bits + (scale_bits + zero_bits) / group_size


@pytest.mark.parametrize("size", [64, 64.0, torch.tensor(64)])
def test_price_passes(size):
    check("1.3", (price, size), strict=True)
    check("1.3", price, size, strict=True)  # brackets forgotten
    assert [price(4, 128, 16), price(4, 128, 16, 4), price(4, 32, 16)] == [4.125, 4.15625, 4.5]
    divisors = [size for size in range(1, 577) if 576 % size == 0 and price(4, size, 16) < 4.3]
    assert min(divisors) == 64


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda b, g, s, z=0: b + s + z,
            "(4, 128, 16) gave 20; wanted 4.125: every weight pays a whole scale; the weights",
        ),
        (lambda b, g, s, z=0: b * g + s + z, "gave 528; wanted 4.125: those are the bits of a whole group"),
        (lambda b, g, s, z=0: (b * g + s + z) / 8, "those are the bytes of a whole group"),
        (lambda b, g, s, z=0: price(b, g, s, z) / 8, "those are bytes; bits are wanted"),
        (lambda b, g, s, z=0: (s + z) / g, "gave 0.125; wanted 4.125: that is what the scale adds"),
        (lambda b, g, s, z=0: b + (s + z) // g, "gave 4; wanted 4.125: the scale costs nothing there"),
        (lambda b, g, s, z=0: (b + s + z) / g, "the weight's own bits are divided too"),
        (lambda b, g, s, z=0: b + g / s, "gave 12; wanted 4.125: the division is upside down"),
        (
            lambda b, g, s, z=0: b * (1 + s / g),
            "gave 4.5; wanted 4.125: add what the scale costs, do not multiply",
        ),
        (
            lambda b, g, s, z=0: b + s / g,
            "(4, 128, 16, 4) gave 4.125; wanted 4.15625: zero_bits is not counted",
        ),
        (
            lambda b, g, s, z=0: b + s / g + z,
            "gave 8.125; wanted 4.15625: every weight pays a whole zero point",
        ),
        (
            lambda b, g, s, z=0: round(price(b, g, s, z), 2),
            "gave 4.12; wanted 4.125: it was rounded; keep all digits.",
        ),
        (lambda b, g, s, z=0: 2 * price(b, g, s, z), "gave 8.25; wanted 4.125."),
        (lambda b, g, s: b + s / g, "raised TypeError"),
        (lambda b, g, s, z=0: "4.125", "should be a number; it is '4.125'."),
        (
            lambda b, g, s, z=0: price(b, g, s) if not z else None,
            "(4, 128, 16, 4) is None, though other calls are answered.",
        ),
    ],
)
def test_price_names_wrong_formulas(wrong, sentence):
    hears("1.3", (wrong, 64), sentence)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            128,
            "128 does not divide 576: 4 group(s), and 64 weights are left over. Look among the divisors of 576.",
        ),
        (54, "54 does not divide 576: 10 group(s), and 36 weights are left over. Look among"),
        (50, "50 does not divide 576: 11 group(s), and 26 weights are left over. And it costs 4.32 bits."),
        (53.3, "smallest_group gave 53.30; a whole number is wanted."),
        (48, "With groups of 48 a weight costs 4.333 bits; less than 4.3 is wanted."),
        (32, "With groups of 32 a weight costs 4.5 bits"),
        (72, "Groups of 72 cost 4.222 bits, less than 4.3; but a smaller divisor of 576 does too."),
        (576, "but a smaller divisor of 576 does too"),
        (9, "9 is how many groups a row has; how many weights has a group?"),
        (0, "smallest_group is 0; a group has at least one weight."),
        ("64", "smallest_group should be a whole number; it is '64'."),
        (True, "smallest_group should be a whole number; it is True."),
    ],
)
def test_price_names_wrong_groups(wrong, sentence):
    hears("1.3", (price, wrong), sentence)


def test_price_half_done():
    unanswered("1.3", (price, None), "price is right so far; smallest_group is still empty.")
    unanswered("1.3", (lambda b, g, s, z=0: None, None))
    unanswered("1.3", (lambda b, g, s, z=0: print(end=""), 64), "price returns nothing yet.")
    hears("1.3", price, "Pass both in brackets: (price, smallest_group).")
    hears("1.3", (64, price), "The answer stands in the other order: (price, smallest_group) is wanted.")
    hears("1.3", (4.125, 64), "price should be a function; it is 4.125.")


# --- 1.4 -------------------------------------------------------------------------------------------------------------


def affine(
    least=lambda w: min(w.min().item(), 0.0),
    largest=lambda w: max(w.max().item(), 0.0),
    top=lambda bits: 2**bits - 1,
    guard=lambda scale: scale or 1.0,
    whole=lambda w, scale, zero, top: (torch.round(w / scale) + zero).clamp(0, top),
    to_zero=lambda least, scale: round(-least / scale),
    cast=lambda q: q.to(torch.uint8),
    give=lambda q, scale, zero: (q, scale, zero),
):
    """A right with_zero_point, and with other arguments wrong ones."""

    def with_zero_point(w, bits):
        low = least(w)
        scale = guard((largest(w) - low) / top(bits))
        zero = to_zero(low, scale)
        return give(cast(whole(w, scale, zero, top(bits))), scale, zero)

    return with_zero_point


def in_tensors(w, bits):
    low, high = w.min().clamp(max=0), w.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round(-low / scale)
    return (
        torch.clamp(torch.round(w / scale) + zero, 0, 2**bits - 1).to(torch.uint8),
        scale,
        zero.to(torch.uint8),
    )


@pytest.mark.parametrize(
    "right",
    [
        affine(),
        in_tensors,
        affine(cast=lambda q: q.long()),
        affine(guard=lambda scale: max(scale, 1e-12)),
        affine(
            whole=lambda w, s, z, top: torch.round(w / s + z).clamp(0, top)
        ),  # HAZARDS 6: only ties differ
    ],
)
def test_zero_point_passes(right):
    """HAZARDS 4."""
    check("1.4", right, strict=True)
    q, scale, zero = right(torch.tensor([-1.0, 0, 1, 2]), 4)
    assert (q.tolist(), float(scale), int(zero)) == ([0, 5, 10, 15], pytest.approx(0.2), 5)


def always_four_bits(w, bits):
    return affine()(w, 4)


def writes(w, bits):
    q = affine()(w, bits)
    w.clamp_(0)
    return q


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        # HAZARDS 4: the known fault turns −1 into 0
        (
            affine(whole=lambda w, s, z, top: (w / s).round().clamp(0, top) + z),
            "−1 became 0: the zero point was added after the",
        ),
        (
            affine(whole=lambda w, s, z, top: ((w / s).round().clamp(0, top) + z).clamp(0, top)),
            "−1 became 0: the zero point was",
        ),
        (
            affine(whole=lambda w, s, z, top: (w / s).round().clamp(0, top)),
            "[0, 0, 5, 10]: the zero point is not in it: −1 was cut",
        ),
        (
            affine(whole=lambda w, s, z, top: (w / s).round(), cast=lambda q: q.to(torch.int8)),
            "[-5, 0, 5, 10]: the zero point is not",
        ),
        (
            affine(whole=lambda w, s, z, top: (w / s).round() % 256),
            "[251, 0, 5, 10]: the zero point is not in it; −5 wraps",
        ),
        (
            affine(whole=lambda w, s, z, top: ((w / s).round() - z).clamp(0, top)),
            "[0, 0, 0, 5]: the zero point was taken off",
        ),
        (affine(whole=lambda w, s, z, top: top - ((w / s).round() + z)), "[15, 10, 5, 0]: upside down"),
        (
            affine(whole=lambda w, s, z, top: (w / s).round() + z - 8, cast=lambda q: q.to(torch.int8)),
            "[-8, -3, 2, 7]: signed values",
        ),
        (
            affine(whole=lambda w, s, z, top: ((w / s).round() + z + 1).clamp(0, top)),
            "is [1, 6, 11, 15]; wanted [0, 5, 10, 15]: q = round(",
        ),
        (
            affine(to_zero=lambda low, s: -round(-low / s)),
            "gives zero point -5; wanted 5. It is the q that stands for the weight 0",
        ),
        (affine(to_zero=lambda low, s: low), "gives zero point -1, the least weight; wanted 5"),
        (affine(to_zero=lambda low, s: -low / s + 0.3), "gives zero point 5.3; a whole number is wanted"),
        (
            affine(to_zero=lambda low, s: -low / s),
            "200 weights from -1.902 to 3.535, 8) gives zero point 89.22; a whole",
        ),
        (
            affine(to_zero=lambda low, s: 8),
            "is 8; wanted round(1 / 0.2) = 5. Half of the range is no place for 0 here",
        ),
        (affine(to_zero=lambda low, s: 3), "is 3; wanted round(1 / 0.2) = 5."),
        (
            affine(to_zero=lambda low, s: 99),
            "gives zero point 99; it should be one of the values of q, 0 to 15. Wanted 5.",
        ),
        (affine(top=lambda bits: 2**bits), "3/16: 16 values have 15 steps between them."),
        (
            affine(least=lambda w: -w.abs().max().item(), top=lambda bits: 2**bits - 2),
            "absmax / 7, the scale without a zero point",
        ),
        (affine(least=lambda w: 0.0), "2/15: the range is from −1 to 2, so 3 wide."),
        (affine(top=lambda bits: 255), "3/255: at 4 bits there are 15 steps. Use bits."),
        (affine(top=lambda bits: 1), "is 3, the whole range; 15 steps must share it."),
        (
            affine(give=lambda q, s, z: (q, 1 / s, z)),
            "is 5, upside down: a weight is (q − zero_point) · scale.",
        ),
        (affine(give=lambda q, s, z: (q, 2 * s, z)), "is 0.4; wanted 3/15 = 0.2."),
        (
            affine(give=lambda q, s, z: (q, z, s)),
            "returns scale 5 and zero point 0.2: the order is (q, scale, zero_point).",
        ),
        (
            affine(give=lambda q, s, z: (s, z, q)),
            "q the shape (); wanted that of w, (4,). Order: (q, scale, zero_point).",
        ),
        (affine(give=lambda q, s, z: (q, s)), "should return (q, scale, zero_point); it returns 2 thing(s)."),
        (
            affine(give=lambda q, s, z: (q, s * torch.ones(4), z)),
            "one scale and one zero point are wanted; 4 and 1 came.",
        ),
        (
            affine(least=lambda w: w.min().item()),
            "3], 4) gives zero point -3, outside 0 to 15: the range from the least",
        ),
        (affine(largest=lambda w: w.max().item()), "−0.4], 4) gives zero point 17, outside 0 to 15"),
        (
            affine(whole=lambda w, s, z, top: torch.round((w - min(w.min().item(), 0)) / s).clamp(0, top)),
            "q and zero point were rounded apart: round((w − least) / scale) is not round(w / scale) + zero_point.",
        ),
        (
            affine(whole=lambda w, s, z, top: ((w / s).trunc() + z).clamp(0, top)),
            "q was cut off, not rounded",
        ),
        (affine(whole=lambda w, s, z, top: (w / s + z).clamp(0, top)), "q was cut off, not rounded"),
        (
            affine(whole=lambda w, s, z, top: ((w / s).round() + z).clamp(0, 15)),
            "No q passes 127; the clamp's end is 255 at 8 bits.",
        ),
        (
            affine(cast=lambda q: q.to(torch.int8)),
            "has q from -128 to 127; 8 bits without a sign hold 0 to 255.",
        ),
        (affine(cast=lambda q: q), "gives q the type float32; uint8 is wanted. Add .to(torch.uint8)."),
        (affine(cast=lambda q: q + 0.5), "whole numbers are wanted: round."),
        (always_four_bits, "that is for 4 bits. 8 bits have 255 steps."),
        (
            affine(
                guard=lambda scale: torch.tensor(scale),
                to_zero=lambda low, s: (-low / s).nan_to_num().round(),
            ),
            "Zeros alone have no range",
        ),
        (affine(guard=lambda scale: scale), "raised ZeroDivisionError"),
        (affine(to_zero=lambda low, s: 5), "3.535, 8) has zero point 5; wanted round(−least / scale) = 89."),
        (affine(give=lambda q, s, z: (q, s / 0, z)), "raised ZeroDivisionError"),
        (affine(give=lambda q, s, z: (q, s * torch.inf, z)), "4): there is a NaN or an infinity in it."),
        (
            affine(least=lambda w: w.min().item(), to_zero=lambda low, s: max(round(-low / s), 0)),
            "([0.5, 1, 3], 4) has scale 0.1667; wanted 0.2, since the range includes 0.",
        ),
        (
            affine(whole=lambda w, s, z, top: ((w / s).round() + z + (w > 2.5) * 2).clamp(0, top)),
            "At most half a step is allowed: q = round(w / scale) + zero_point, then the clamp.",
        ),
        (writes, "wrote into the tensor it was given"),
        (
            lambda w, bits: affine()(w, bits) if bits == 4 else None,
            "8) is None, though other calls are answered.",
        ),
    ],
)
def test_zero_point_names_wrong_answers(wrong, sentence):
    hears("1.4", wrong, sentence)


def test_zero_point_of_zeros_that_come_back_as_something_else():
    def with_zero_point(w, bits):
        return affine()(w, bits) if w.any() else (torch.ones(4, dtype=torch.uint8), 1.0, 0)

    hears("1.4", with_zero_point, "[0, 0, 0, 0] came back as [1, 1, 1, 1]; zeros are wanted.")


# --- 1.5 -------------------------------------------------------------------------------------------------------------


def pack(q):
    if len(q) % 2:
        q = torch.cat((q, q.new_zeros(1)))
    nibbles = (q + 8).to(torch.uint8)
    return nibbles[0::2] | nibbles[1::2] << 4


def unpack(packed, length):
    pairs = torch.stack((packed & 15, packed >> 4), dim=1)
    return (pairs.flatten().to(torch.int8) - 8)[:length]


def packs(
    nibble=lambda q: (q + 8).to(torch.uint8),
    join=lambda a, b: a | b << 4,
    even=slice(0, None, 2),
    odd=slice(1, None, 2),
):
    """A right pack, and with other arguments wrong ones."""

    def pack(q):
        q = nibble(torch.cat((q, q.new_zeros(len(q) % 2))))
        return join(q[even], q[odd])

    return pack


def unpacks(
    low=lambda p: p & 15,
    high=lambda p: p >> 4,
    weave=lambda a, b: torch.stack((a, b), 1).flatten(),
    signed=lambda n: n.to(torch.int8) - 8,
):
    """A right unpack, and with other arguments wrong ones."""
    return lambda packed, length: signed(weave(low(packed), high(packed)))[:length]


def by_loop(q):
    values = [*q.tolist(), *[-8] * (len(q) % 2)]  # filled with zero bits: any filling will do
    return torch.tensor(
        [low + 8 + 16 * (high + 8) for low, high in zip(values[::2], values[1::2], strict=True)],
        dtype=torch.uint8,
    )


@pytest.mark.parametrize("right", [(pack, unpack), (packs(), unpacks()), (by_loop, unpack)])
def test_two_to_a_byte_passes(right):
    """HAZARDS 7, 8, 9."""
    check("1.5", right, strict=True)
    pairs = ((-1, 7), (-8, -1), (3, -8))
    assert [right[0](torch.tensor(pair, dtype=torch.int8)).item() for pair in pairs] == [0xF7, 0x70, 0x0B]
    five = torch.tensor([-3, 4, -8, 7, -5], dtype=torch.int8)
    assert len(right[0](five)) == 3 and torch.equal(right[1](right[0](five), 5), five)


def shifts_int8(q):
    q = torch.cat((q, q.new_zeros(len(q) % 2))) + 8
    return q[0::2] | q[1::2] << 4


def in_place_pack(q):
    q += 8
    return pack(q - 8)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            packs(even=slice(1, None, 2), odd=slice(0, None, 2)),
            "The pair (−1, 7) became 0x7F; wanted 0xF7: swapped nibbles.",
        ),
        (
            packs(nibble=lambda q: q.clamp(0, 15).to(torch.uint8)),
            "(−1, 7) became 0x70; wanted 0xF7: the negative values were clipped to 0.",
        ),
        (
            packs(nibble=lambda q: q.clamp(0, 15).to(torch.uint8), join=lambda a, b: b | a << 4),
            "the negative values were clipped to 0. Add the offset 8 first; and the first value belongs into the low nibble.",
        ),
        (
            packs(nibble=lambda q: q.to(torch.uint8) & 15),
            "those are the lowest 4 bits as they are (two's complement).",
        ),
        (
            packs(nibble=lambda q: q.to(torch.uint8) & 15, join=lambda a, b: b | a << 4),
            "8 is not added, and the nibbles are swapped",
        ),
        (
            packs(nibble=lambda q: q.to(torch.uint8)),
            "8 is not added, so the sign of the first value runs into the second.",
        ),
        (packs(nibble=lambda q: (q + 7).to(torch.uint8) & 15), "the offset is 8: −8 becomes 0."),
        (
            lambda q: (q[: len(q) // 2] + 8).to(torch.uint8) | (q[len(q) // 2 :] + 8).to(torch.uint8) << 4,
            "the halves of the list were paired.",
        ),
        (
            lambda q: (q[len(q) // 2 :] + 8).to(torch.uint8) | (q[: len(q) // 2] + 8).to(torch.uint8) << 4,
            "the halves of the list were paired.",
        ),
        (packs(join=lambda a, b: a + b), "both values were added in the same nibble"),
        (packs(join=lambda a, b: a | b), "both values stand in the same nibble. Shift the second up by 4."),
        (packs(join=lambda a, b: a | b << 3), "the second value is shifted by 3. A nibble is 4 bits wide."),
        (packs(join=lambda a, b: a ^ (b << 4) ^ 1), "The pair (−1, 7) became 0xF6; wanted 0xF7."),
        (
            lambda q: (q + 8).to(torch.uint8),
            "gave 8 bytes for 8 values: each has a byte of its own. Two share one.",
        ),
        (lambda q: pack(q)[:1], "gave 1 bytes; 8 values need 4."),
        (
            lambda q: pack(q[: len(q) // 2 * 2]),
            "gave 2 bytes; 5 values need 3: the last value is lost. Append a 0 before packing.",
        ),
        (
            lambda q: (q[0::2] + 8).to(torch.uint8) | (q[1::2] + 8).to(torch.uint8) << 4,
            "An odd length leaves the last value alone: append a 0",
        ),
        (
            lambda q: pack(torch.cat((q[:-1], q.new_zeros(1), q[-1:]))) if len(q) % 2 else pack(q),
            "gave [0xC5, 0xF0, 0x38]; wanted [0xC5, 0xF0, 0x83]. The last value stands alone, in the low nibble.",
        ),
        (
            lambda q: pack(q.flip(0)) if len(q) % 2 else pack(q),
            "The last value stands alone, in the low nibble.",
        ),
        (lambda q: pack(q) if len(q) != 16 else pack(q).flip(0), "pack([−8, −7, …, 7]) gave [0xFE, "),
        (shifts_int8, "has the type int8; uint8 is wanted: 15 shifted by 4 is 240, and int8 ends at 127."),
        (lambda q: pack(q).long(), "has the type int64; uint8 is wanted."),
        (in_place_pack, "wrote into the tensor it was given"),
        (lambda q: "0xF7", "should be a tensor; it is '0xF7'."),
        (
            lambda q: pack(q) if len(q) != 5 else None,
            "pack([−3, 4, −8, 7, −5]) is None, though other calls are answered.",
        ),
        (lambda q: q.nothing, "raised AttributeError"),
    ],
)
def test_two_to_a_byte_names_wrong_packs(wrong, sentence):
    hears("1.5", (wrong, unpack), sentence)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            unpacks(weave=lambda a, b: torch.stack((b, a), 1).flatten()),
            "gave [7, −1, −1, −8, −8, 3, 5, 0]: swapped nibbles. The low",
        ),
        (unpacks(weave=lambda a, b: torch.cat((a, b))), "first all low nibbles, then all high ones."),
        (unpacks(weave=lambda a, b: torch.cat((b, a))), "first all high nibbles, then all low ones."),
        (
            unpacks(signed=lambda n: n.to(torch.int8)),
            "gave [7, 15, 0, 7, 11, 0, 8, 13]: the offset is still in it. Take 8 off.",
        ),
        (
            unpacks(weave=lambda a, b: torch.stack((b, a), 1).flatten(), signed=lambda n: n.to(torch.int8)),
            "the offset is still in it, and the nibbles",
        ),
        (unpacks(signed=lambda n: (n.to(torch.int8) ^ 8) - 8), "read as two's complement. The offset is 8"),
        (unpacks(low=lambda p: p), "the low nibble was not cut out of its byte: & 15."),
        (unpacks(high=lambda p: p & 0xF0), "the high nibble was not shifted down: >> 4."),
        (unpacks(signed=lambda n: n.to(torch.int8) - 7), "the offset is 8: 0 becomes −8."),
        (
            unpacks(signed=lambda n: n - 8),
            "uint8 has no negative values, so they wrap. Turn to int8 before 8 is taken off.",
        ),
        (unpacks(signed=lambda n: n.long() - 8), "has the type int64; int8 is wanted. Add .to(torch.int8)."),
        (
            lambda p, n: unpack(p, 2 * len(p)),
            "6 values, where 5 were packed. The last nibble is filling; cut with [:length].",
        ),
        (lambda p, n: unpack(p, n)[::2], "one value a byte; each byte holds two."),
        (lambda p, n: unpack(p, n)[1:], "7 values, where 8 were packed."),
        (lambda p, n: unpack(p, n).flip(0), "]; wanted [−1, 7, −8, −1, 3, −8, 0, 5]."),
        (
            lambda p, n: unpack(p, n) if n != 16 else None,
            "unpack(8 bytes, 16) is None, though other calls are answered.",
        ),
        (lambda p, n: "x", "should be a tensor; it is 'x'."),
    ],
)
def test_two_to_a_byte_names_wrong_unpacks(wrong, sentence):
    hears("1.5", (pack, wrong), sentence)


def test_two_to_a_byte_half_done():
    unanswered("1.5", (pack, None), "pack is right so far; unpack returns nothing yet.")
    unanswered("1.5", (None, unpack), "pack returns nothing yet.")
    hears("1.5", pack, "Pass both in brackets: (pack, unpack).")


# --- 1.6 -------------------------------------------------------------------------------------------------------------


def searches(
    base=lambda w, top: w.abs().amax(1, keepdim=True) / top,
    top=lambda bits: 2 ** (bits - 1) - 1,
    clamp=lambda q, top: q.clamp(-top, top),
    against=lambda w, scale, top: w,
    cost=lambda difference: difference.square().sum(1, keepdim=True),
    choose=lambda errors: errors.argmin(0),
    give=lambda scale, base: scale,
):
    """A right search_scale, and with other arguments wrong ones."""

    def search_scale(w, bits, ratios):
        absmax, end = base(w, top(bits)), top(bits)
        scales = torch.stack([ratio * absmax for ratio in ratios])  # (ratios, out, 1)
        backs = [clamp((w / scale).round(), end) * scale for scale in scales]
        errors = torch.stack(
            [cost(back - against(w, scale, end)) for back, scale in zip(backs, scales, strict=True)]
        )
        return give(scales.gather(0, choose(errors)[None])[0], absmax)

    return search_scale


def keeps_the_best(w, bits, ratios):
    top = 2 ** (bits - 1) - 1
    absmax = w.abs().amax(1, keepdim=True)
    best = torch.full_like(absmax, float("inf"))
    scale = absmax / top
    for ratio in ratios:
        tried = ratio * absmax / top
        q = torch.clamp(torch.round(w / tried), -top, top)
        error = (w - q * tried).square().sum(1, keepdim=True)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(error, best)
    return scale


@pytest.fixture(scope="module")
def sample():
    """Rows with a few weights far out, as a real layer has them."""
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) ** 3


@pytest.mark.parametrize(
    "right", [searches(), keeps_the_best, searches(give=lambda scale, base: scale[:, 0])]
)
@pytest.mark.parametrize("why", ["c", " C ", "c)", WHY_NOT_AT_8_BITS["c"]])
def test_better_scale_passes(right, why, sample):
    check("1.6", (right, why), weights=sample, strict=True)
    check("1.6", right, why, weights=sample, strict=True)  # brackets forgotten


@pytest.mark.parametrize(
    "change", [torch.nn.Parameter, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double]
)
def test_better_scale_takes_any_weight(change, sample):
    check("1.6", (keeps_the_best, "c"), weights=change(sample), strict=True)


def test_better_scale_says_what_is_won_on_the_matrix_given(sample):
    base = sample.abs().amax(1, keepdim=True).double()

    def error(bits, ratios):
        tables = []
        for ratio in ratios:
            step = ratio * base / (2 ** (bits - 1) - 1)
            q = (sample / step).round().clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1)
            tables.append((sample - q * step).square().sum(1))
        return torch.stack(tables).amin(0).sum().item()

    three, eight = (error(bits, _RATIOS) / error(bits, [1.0]) for bits in (3, 8))
    assert judge("1.6", (keeps_the_best, "c"), weights=sample).sentence == (
        f"On the matrix given the squared error falls to {three:.2f} of absmax's at 3 bits, and to {eight:.2f} at 8."
    )
    assert three < 0.9 < eight
    # rows of 576 normal weights, as without a matrix: much is won at 3 bits and nothing at 8
    sentence = judge("1.6", (keeps_the_best, "c")).sentence
    assert sentence.startswith("On random rows the squared error falls to 0.4") and sentence.endswith(
        "to 1.00 at 8."
    )


def test_rows_of_the_check_want_different_ratios():
    """One ratio for all rows, and the least absolute error, can only be seen where the right ratios differ."""
    for bits in (3, 4):
        table = _table(_small_rows(), bits, _RATIOS)
        assert len(table.argmin(1).unique()) >= 4
        assert _RATIOS[table.sum(0).argmin()] not in (_RATIOS[0], _RATIOS[-1], 1, min(_RATIOS))
        assert (
            table.argmin(1) != _table(_small_rows(), bits, _RATIOS, cost=lambda d: d.abs().sum(1)).argmin(1)
        ).sum() >= 3


def stops_early(w, bits, ratios):
    """Only as long as the error falls."""
    scale = keeps_the_best(w, bits, ratios[:1])
    error = float("inf")
    for ratio in sorted(ratios, reverse=True):
        tried = keeps_the_best(w, bits, [ratio])
        top = 2 ** (bits - 1) - 1
        now = (w - (w / tried).round().clamp(-top, top) * tried).square().sum(1, keepdim=True)
        if (now > error).any():
            break
        scale, error = tried, now
    return scale


def sums_over_rows(w, bits, ratios):
    """One ratio for the whole matrix."""
    costs = [float(_table(w, bits, [ratio]).sum()) for ratio in ratios]
    return keeps_the_best(w, bits, [ratios[costs.index(min(costs))]])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda w, b, r: torch.full((len(w), 1), r[0]),
            "that is the ratio; the scale is ratio · absmax / 3.",
        ),
        (searches(give=lambda s, base: s * 3), "that is ratio · absmax; divide by 3, the largest q."),
        (
            searches(base=lambda w, top: w.abs().amax(1, True) / (top + 1)),
            "divide by 3, not by 4: q goes from −3 to 3.",
        ),
        (
            searches(base=lambda w, top: w.abs().amax(1, True) / (2 * top + 1)),
            "divide by 3: half of the values of 3 bits are negative.",
        ),
        (
            searches(base=lambda w, top: w.abs().amax(1, True) / (top + 0.5)),
            "divide by 3: q goes from −3 to 3.",
        ),
        (searches(top=lambda bits: 127), "127 is the largest q of 8 bits. Use bits."),
        (searches(top=lambda bits: 3), "(w, 4, [1.0]): row 0 has scale"),
        (searches(top=lambda bits: 3), "3 is the largest q of 3 bits. Use bits."),
        (
            searches(base=lambda w, top: w.amax(1, True) / top),
            "the largest weight without its sign counts: take abs() first.",
        ),
        (
            searches(base=lambda w, top: (w.abs().amax() / top).expand(len(w), 1)),
            "that is the absmax of the whole matrix",
        ),
        (lambda w, b, r: keeps_the_best(w, b, [1.0]), "(w, 4, [0.5]): row 0 has scale"),
        (lambda w, b, r: keeps_the_best(w, b, [1.0]), "the ratio given was not used."),
        (lambda w, b, r: keeps_the_best(w, b, [1 / ratio for ratio in r]), "divided by the ratio; multiply"),
        (searches(give=lambda s, base: s * 1.3), "with one ratio only, it is ratio · absmax / 3."),
        (
            lambda w, b, r: keeps_the_best(w, b, r) * (1 if len(r) == 1 else 0.97),
            "that is none of the ratios given",
        ),
        (searches(clamp=lambda q, top: q), "clamp q to ±3, then take the difference from w itself."),
        (
            searches(against=lambda w, s, top: w.clamp(-s * top, s * top)),
            "and count what clipping costs: clamp q to ±3",
        ),
        (
            lambda w, b, r: keeps_the_best(w, b, r[:1]),
            "every row got the first of the ratios: was its error compared",
        ),
        (
            lambda w, b, r: keeps_the_best(w, b, r[-1:]),
            "every row got the last of the ratios: was its error compared",
        ),
        (
            lambda w, b, r: keeps_the_best(w, b, [max(r)]),
            "every row kept absmax's scale, though smaller ones",
        ),
        (sums_over_rows, "all rows got the same ratio, 0."),
        (sums_over_rows, "Sum the errors over dim=1: each row chooses for itself."),
        (
            searches(choose=lambda errors: errors.argmax(0)),
            "the smallest of the ratios wins (nearly) everywhere. Take the least error",
        ),
        (
            searches(cost=lambda d: d.abs().sum(1, True)),
            "the rows were chosen by the least absolute error; squares are asked",
        ),
        (
            searches(cost=lambda d: d.abs().amax(1, True)),
            "chosen by the smallest largest error; the sum of the squares",
        ),
        (searches(cost=lambda d: d.sum(1, True).abs()), "the smallest sum of errors, in which signs cancel."),
        (searches(cost=lambda d: d.sum(1, True)), "the most negative sum of errors. Square before the sum."),
        (searches(cost=lambda d: -d.sum(1, True)), "the most negative sum of errors. Square before the sum."),
        (
            searches(cost=lambda d: d.square()[:, :4].sum(1, True)),
            "Keep, for each row, the least of all ratios.",
        ),
        (searches(give=lambda s, base: (s, base)), "returns 2 things; only the scale is wanted, (out, 1)."),
        (
            searches(give=lambda s, base: s.amax()),
            "wanted (12, 1), one a row: one scale for the whole matrix.",
        ),
        (searches(give=lambda s, base: s * 0), "has a scale that is 0; all should be above 0."),
        (searches(give=lambda s, base: s.long()), "The scale has the type int64; float32 is wanted."),
        (searches(base=lambda w, top: w.abs_().amax(1, True) / top), "wrote into the tensor it was given"),
        (searches(base=lambda w, top: w.abs().amax(1) / top), "keepdim=True makes it one."),
        (
            lambda w, b, r: keeps_the_best(w, b, r if len(w) == 12 else r[1:]),
            "On the matrix of 40 rows given at 3 bits row ",
        ),
        (lambda w, b, r: "x", "should be a tensor; it is 'x'."),
        (
            lambda w, b, r: keeps_the_best(w, b, r) if b == 3 else None,
            "(w, 4, [1.0]) is None, though other calls are answered.",
        ),
    ],
)
def test_better_scale_names_wrong_searches(wrong, sentence, sample):
    hears("1.6", (wrong, "c"), sentence, weights=sample)


def test_better_scale_sees_a_search_that_stops_early(sample):
    hears(
        "1.6",
        (stops_early, "c"),
        "ratio 0.85 has 0.479. Keep, for each row, the least of all ratios.",
        weights=sample,
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("a", "Not a: at 8 bits weights still come back rounded."),
        (" B.", "Not b: the weights are the same at 3 bits"),
        (WHY_NOT_AT_8_BITS["b"], "Not b: "),
        ("d", "why should be one of the letters a, b, c; it is 'd'."),
        (3, "why should be one of the letters a, b, c; it is 3."),
    ],
)
def test_better_scale_names_wrong_reasons(wrong, sentence, sample):
    hears("1.6", (keeps_the_best, wrong), sentence, weights=sample)


def test_better_scale_half_done(sample):
    empty = "search_scale is right so far; why is still empty: one of a, b, c."
    unanswered("1.6", (keeps_the_best, None), empty, weights=sample)
    unanswered("1.6", (keeps_the_best, ""), empty, weights=sample)
    unanswered("1.6", (lambda w, b, r: None, None), weights=sample)
    unanswered(
        "1.6", (lambda w, b, r: print(end=""), "c"), "search_scale returns nothing yet.", weights=sample
    )
    hears("1.6", keeps_the_best, "Pass both in brackets: (search_scale, why).", weights=sample)
    hears("1.6", ("c", keeps_the_best), "The answer stands in the other order", weights=sample)
    hears("1.6", (keeps_the_best, "c"), "pass weights=sample", weights=[1, 2])


# --- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["1.1", "1.2", "1.4"])
def test_stub_and_raising_stub_are_not_answered(id):
    def raises(*args):
        raise NotImplementedError

    for stub in (None, lambda *args: None, raises):
        unanswered(id, stub)
    assert judge(id, lambda *args: print(end="")).state == "not answered yet"


@pytest.mark.parametrize("id", [f"1.{number}" for number in range(1, 7)])
@pytest.mark.parametrize(
    "answer", [3, "x", [], {}, object(), lambda: 1, (1, 2, 3), lambda *a: object(), lambda *a: torch.zeros(0)]
)
def test_nothing_is_raised_whatever_the_answer_is(id, answer):
    assert judge(id, answer).state == "not right yet"
    assert judge(id, (answer, answer)).state == "not right yet"
    assert "The check stopped" not in str(judge(id, answer)) + str(judge(id, (answer, answer)))


def test_the_chapters_own_functions_pass():
    def with_zero_point(w, bits):
        q, scale, zero_point = quantization.quantize_affine(w[None], bits)
        return q[0], scale, zero_point

    check("1.2", quantization.quantize_absmax, strict=True)
    check("1.3", (quantization.bits_per_weight, 64), strict=True)
    check("1.4", with_zero_point, strict=True)
    check("1.5", (quantization.pack_int4, quantization.unpack_int4), strict=True)
