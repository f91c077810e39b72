"""The two exercises of deep dive 1A: the right answer passes, and each known wrong one hears its own sentence."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import nbformat
import numpy
import pytest
import torch

from course_utils.chapters.quantization import bits_per_weight, scheme_of
from course_utils.exercises import check, judge
from course_utils.exercises.kernels import INT4_BITS, MACHINES
from tests.exercises_for_tests import hears, one_thread, unanswered  # noqa: F401

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "deep_dives" / "01a_kernels.ipynb"


# --- 1A.1 ------------------------------------------------------------------------------------------------------------


def timed(
    together=max,
    in_bytes=lambda bits: bits / 8,
    in_weights=lambda bits: 1,
    unit=lambda read, work: (1000 * read, 1000 * work),
    change=lambda ms: ms,
):
    """A right kernel_ms, and with other arguments wrong ones."""

    def kernel_ms(rows, cols, bits_per_weight, bandwidth, weights_per_second):
        read = rows * cols * in_bytes(bits_per_weight) / bandwidth
        work = rows * cols * in_weights(bits_per_weight) / weights_per_second
        return change(together(*unit(read, work)))

    return kernel_ms


def added(read, work):
    return read + work


def without(place: int, value):
    """A kernel_ms for which one argument is always the same."""
    return lambda *args: timed()(*(value if i == place else arg for i, arg in enumerate(args)))


def cut(r, c, b, w, s):
    return max(r * c * b // 8 // w, r * c // s) * 1000


@pytest.mark.parametrize(
    "right",
    [timed(), timed(change=lambda ms: round(ms, 2)), timed(change=torch.tensor), timed(change=numpy.float64)],
)
@pytest.mark.parametrize("bound", ["A", " a.", "machine A"])
def test_how_fast_passes(right, bound):
    check("1A.1", (right, bound), strict=True)


def test_how_fast_says_what_it_means():
    """The sentence's numbers: 12e9 bytes a second are 20.8e9 weights of 4.625 bits."""
    assert timed()(1000, 1000, 8, 1e9, 5e8) == 2.0
    sentence = judge("1A.1", (timed(), "A")).sentence
    assert sentence.startswith("A's memory brings 20.8e9 weights of 4.625 bits a second, but A works on 16e9")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            timed(added),
            "kernel_ms(49_152, 576, 8, 12e9, 20e9) gave 3.775; wanted 2.359: that is the sum of the two times. "
            "They overlap: take the larger.",
        ),
        (timed(min), "gave 1.416; wanted 2.359: that is the smaller of the two times."),
        (
            timed(lambda read, work: read),
            "kernel_ms(49_152, 576, 4.625, 16e9, 10e9) gave 1.023; wanted 2.831: that is the time of reading alone.",
        ),
        (timed(lambda read, work: work), "wanted 2.359: that is the time of the arithmetic alone."),
        (timed(lambda read, work: (read + work) / 2), "that is the mean of the two times."),
        (timed(in_bytes=lambda bits: bits), "gave 18.87; wanted 2.359: bits are not bytes: divide"),
        (
            timed(in_bytes=lambda bits: 8 * bits),
            "a byte has 8 bits: divide bits_per_weight by 8, do not mult",
        ),
        (timed(in_bytes=lambda bits: bits / 64), "bits_per_weight is divided by 8 twice."),
        (timed(in_bytes=lambda bits: bits // 8), "4.5 // 8 is 0: // throws the fraction away"),
        (timed(in_bytes=lambda bits: math.ceil(bits / 8)), "takes 4.5/8 of a byte; do not round up."),
        (timed(in_bytes=lambda bits: int(bits) / 8), "the fraction of bits_per_weight counts too"),
        (timed(in_weights=lambda bits: bits / 8), "weights_per_second counts weights, not bytes"),
        (timed(in_weights=lambda bits: bits), "weights_per_second counts weights, not bits"),
        (timed(in_weights=lambda bits: 2), "weights_per_second counts weights, not operations"),
        (timed(change=lambda ms: ms / 1e3), "those are seconds. A second has 1,000 ms."),
        (timed(change=lambda ms: 1e3 * ms), "gave 2,359; wanted 2.359: those are microseconds."),
        (timed(change=lambda ms: ms / 1e6), "multiply by 1,000, do not divide."),
        (timed(change=lambda ms: ms / 1e9), "are given per second, not in billions; no 1e9 is needed."),
        (timed(unit=lambda read, work: (1e3 * read, work)), "that is the time of reading alone."),
        (
            timed(added, in_bytes=lambda bits: bits),
            "bits are not bytes: divide bits_per_weight by 8. And that is the sum of the two times.",
        ),
        (
            timed(min, change=lambda ms: ms / 1e3),
            "that is the smaller of the two times. The product ends with the longer one. And those are seconds.",
        ),
        (timed(change=round), "gave 2; wanted 2.359: it is rounded to whole ms; keep the fraction."),
        (cut, "gave 0; wanted 2.359: // throws the fraction away, / keeps it."),
        (without(0, 4096), "rows changes nothing in your function."),
        (without(1, 4096), "cols changes nothing in your function."),
        (without(2, 8), "bits_per_weight changes nothing in your function."),
        (without(3, 12e9), "bandwidth changes nothing in your function."),
        (without(4, 20e9), "weights_per_second changes nothing in your function."),
        (timed(change=lambda ms: ms + 3), "gave 5.359; wanted 2.359."),
        (timed(change=str), "should be a number; it is '2.35"),
        (timed(change=lambda ms: math.inf), "should be a number; it is inf."),
        (
            lambda *args: timed()(*args) if args[2] == 8 else None,
            "(49_152, 576, 4.625, 16e9, 10e9) is None, though other calls are answered.",
        ),
        (lambda *args: 1 / 0, "raised ZeroDivisionError: division by zero."),
        (2.359, "kernel_ms should be a function; it is 2.359."),
    ],
)
def test_how_fast_names_wrong_times(wrong, sentence):
    hears("1A.1", (wrong, "A"), sentence)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            "B",
            "Not B: B's memory brings 10.4e9 weights of 4.625 bits a second, fewer than the 14e9 that B could work on. "
            "It waits for the bytes.",
        ),
        ("Both", "Not both: B's memory brings 10.4e9 weights"),
        (
            "neither",
            "Not neither: A's memory brings 20.8e9 weights of 4.625 bits a second, more than the 16e9 that A",
        ),
        ("none", "Not neither: "),
        ("C", 'arithmetic_bound should be "A", "B", "both" or "neither"; it is \'C\'.'),
        (True, 'should be "A", "B", "both" or "neither"; it is True.'),
        (["A", "A"], "it is ['A', 'A']."),
    ],
)
def test_how_fast_names_wrong_machines(wrong, sentence):
    hears("1A.1", (timed(), wrong), sentence)


def test_how_fast_half_done():
    empty = 'kernel_ms is right so far; arithmetic_bound is still empty: "A", "B", "both" or "neither".'
    unanswered("1A.1", (timed(), None), empty)
    unanswered("1A.1", (timed(), " "), empty)
    unanswered("1A.1", (lambda *args: None, None))
    unanswered("1A.1", (lambda *args: print(end=""), "A"), "kernel_ms returns nothing yet.")
    hears("1A.1", timed(), "Pass both in brackets: (kernel_ms, arithmetic_bound).")
    hears("1A.1", ("A", timed()), "The answer stands in the other order")


def test_the_check_asks_for_the_notebooks_machines_and_the_courses_int4():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    (source,) = (cell.source for cell in cells if cell.cell_type == "code" and '"1A.1"' in cell.source)
    (machines,) = re.findall(r"^machines = (.*)$", source, re.M)
    assert ast.literal_eval(machines) == MACHINES
    int4 = scheme_of("int4")
    assert int4.affine and INT4_BITS == bits_per_weight(int4.bits, int4.group_size, 32, 8) == 4.625


# --- 1A.2 ------------------------------------------------------------------------------------------------------------


POWERS = 16.0 ** torch.arange(8)
ONE_UP = torch.tensor([*POWERS[:7], 1])  # what the rows are divided by
SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]


def places(x):
    return x.reshape(-1, 8).T


def spread(x):
    return places(x) / ONE_UP[:, None]


def in_numpy(x):
    return (x.numpy().reshape(-1, 8).T * (1 / ONE_UP).numpy()[:, None]).astype("float32")


def in_a_loop(x):
    rows = [x[k::8] / (16**k if k < 7 else 1) for k in range(8)]
    return torch.stack(rows)


def in_place(x):
    rows = places(x)
    rows /= ONE_UP[:, None]
    return rows


@pytest.mark.parametrize("right", [spread, in_numpy, in_a_loop, lambda x: spread(x).contiguous()])
def test_spread_passes(right):
    check("1A.2", right, strict=True)


@pytest.mark.parametrize("words", [1, 8, 72])
def test_masked_nibbles_times_the_passing_answer_are_the_nibbles_times_x(words):
    """What the task says of it, with the masks and the signed words of the kernel (the topmost bit is the sign)."""
    generator = numpy.random.default_rng(words)
    nibbles = generator.integers(0, 16, (words, 8))
    nibbles[0] = 15  # every bit set: as a signed word, −1
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(numpy.uint8)
    word = packed.view(numpy.int32)[:, 0]
    assert word[0] == -1
    masked = [word & numpy.int32(0xF << 4 * k) for k in range(7)] + [
        word >> numpy.int32(28) & numpy.int32(15)
    ]
    x = torch.randn(8 * words, generator=torch.Generator().manual_seed(1))
    found = (numpy.array(masked).astype(float) * spread(x).double().numpy()).sum()
    assert found == pytest.approx((nibbles.flatten() * x.double().numpy()).sum(), rel=1e-12)


def test_spread_of_the_notebooks_example():
    found = spread(torch.arange(16.0))
    assert found[1].tolist() == [1 / 16, 9 / 16] and found[7].tolist() == [7, 15]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (places, "places of 24 values: nothing is divided. Nibble k is left where it is, so it counts 16^k"),
        (lambda x: places(x) / POWERS[:, None], "row 7 is divided too. The topmost nibble is shifted down"),
        (lambda x: places(x) * ONE_UP[:, None], "multiplied by 16^k. The nibble already counts 16^k times"),
        (
            lambda x: torch.cat((places(x)[:7] / 2.0 ** torch.arange(7)[:, None], places(x)[7:])),
            "the rows are divided by 2^k. A nibble has 4 bits",
        ),
        (
            lambda x: torch.cat((places(x)[:7] / POWERS[1:, None], places(x)[7:])),
            "the rows are divided by 16^(k + 1). The lowest nibble, k = 0, counts once",
        ),
        (
            lambda x: places(x) / torch.tensor([*POWERS[:7], 16**6])[:, None],
            "row 7 is divided by 16^6. The topmost nibble is shifted down",
        ),
        (
            lambda x: places(x) / torch.tensor([*POWERS[:7], -1])[:, None],
            "row 7 has the other sign. Shifted down and masked, the topmost nibble is 0 to 15",
        ),
        (lambda x: places(x) // ONE_UP[:, None], "// throws the fraction away, / keeps it."),
        (
            lambda x: torch.cat((spread(x)[:7].floor(), spread(x)[7:])),
            "// throws the fraction away, / keeps it.",
        ),
        (
            lambda x: x.reshape(8, -1) / ONE_UP[:, None],
            "x was cut into 8 pieces. A word meets 8 neighbours of x, so cut it into pieces of 8",
        ),
        (
            lambda x: x.reshape(8, -1),
            "turn them: .T. And nothing is divided.",
        ),
        (
            lambda x: (x.reshape(-1, 8) / ONE_UP).reshape(8, -1),
            "each word's eight values stand in one line. reshape does not turn a matrix",
        ),
        (
            lambda x: places(x)[SWAPPED] / ONE_UP[:, None],
            "neighbours are swapped. The lowest nibble meets the first of the eight.",
        ),
        (
            lambda x: places(x)[SWAPPED],
            "neighbours are swapped. The lowest nibble meets the first of the eight. And nothing is divided.",
        ),
        (
            lambda x: spread(x)[SWAPPED],
            "neighbouring rows are swapped. The lowest nibble meets the first",
        ),
        (
            lambda x: places(x).flip(0) / ONE_UP[:, None],
            "the eight values of a word stand the other way round. The lowest nibble meets the first",
        ),
        (lambda x: spread(x).flip(0), "the rows stand the other way round. Row 0 belongs to the lowest"),
        (lambda x: spread(x).flip(1), "the words stand the other way round. Column 0 is for the first word"),
        (lambda x: spread(x).T, "of 24 values holds a row for each word; a row for each of the eight"),
        (lambda x: spread(x).flatten(), "of 24 values has the shape (24,); wanted (8, 3)."),
        (
            lambda x: spread(x).double(),
            "has the type float64; float32 is wanted, as x has it: the kernel is compiled for it.",
        ),
        (lambda x: spread(x) * torch.tensor([1, 1, 2.0])[: len(x) // 8], "row 0 holds "),
        (lambda x: torch.cat((spread(x)[:7], spread(x)[:1])), "row 7 holds "),
        (lambda x: torch.cat((spread(x)[:7], spread(x)[:1])), ", x[7], undivided."),
        (lambda x: torch.cat((spread(x)[:2], spread(x)[1:2], spread(x)[3:])), ", x[2] / 16^2."),
        (lambda x: spread(x) / 0, "row 0 holds "),
        (in_place, "of 24 values wrote into the tensor it was given; make a new one."),
        (lambda x: "x", "should be a tensor; it is 'x'."),
        (lambda x: spread(x) if len(x) == 24 else None, "of 64 values is None, though other calls"),
        (lambda x: 1 / 0, "of 24 values raised ZeroDivisionError: division by zero."),
        (3, "spread should be a function; it is 3."),
    ],
)
def test_spread_names_wrong_answers(wrong, sentence):
    hears("1A.2", wrong, sentence)


@pytest.mark.parametrize("length", [64, 8])
def test_spread_is_judged_at_every_length(length):
    hears("1A.2", lambda x: places(x) if len(x) == length else spread(x), f"of {length} values: nothing is")


# --- both ------------------------------------------------------------------------------------------------------------


def test_stub_and_raising_stub_are_not_answered():
    def raises(*args):
        raise NotImplementedError

    for stub in (None, ..., lambda *args: None, raises):
        unanswered("1A.2", stub)
        assert judge("1A.1", (stub, None)).state == "not answered yet"


@pytest.mark.parametrize("id", ["1A.1", "1A.2"])
@pytest.mark.parametrize(
    "answer", [3, "x", [], {}, object(), lambda: 1, (1, 2, 3), lambda *a: object(), lambda *a: torch.zeros(0)]
)
def test_nothing_is_raised_whatever_the_answer_is(id, answer):
    assert judge(id, answer).state == "not right yet"
    assert judge(id, (answer, answer)).state == "not right yet"
    assert "The check stopped" not in str(judge(id, answer)) + str(judge(id, (answer, answer)))
