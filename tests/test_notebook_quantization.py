"""Chapter 1's notebook: its bugs still show their symptom, and its verdicts follow what was measured."""

from types import SimpleNamespace

import pytest
import torch

from course_utils import claims
from course_utils.chapters.quantization import QuantizedLinear, pack_int4, quantize_absmax, unpack_int4
from tests.test_notebooks import code_cell, read, tagged


@pytest.fixture
def bugs():
    """The three cells tagged ``bug``, each cut off before it talks to a model."""
    return [cell.split("\ngarbled")[0] for cell in tagged(read("01"), "bug")]


def test_the_zero_row_becomes_nan(bugs, capsys):
    """HAZARDS 1; the chapter's own function leaves it zero."""
    sample = torch.randn(3, 4)
    names = {"sample": sample}
    exec(bugs[0], names)
    rows = names["rounded"](names["pruned"])
    assert rows[1].isnan().all() and rows[[0, 2]].isfinite().all()
    q, scale = quantize_absmax(names["pruned"])
    assert not q[1].any() and scale.isfinite().all()


def test_int8_products_wrap(bugs, capsys):
    """HAZARDS 15: 32 where 20,000 is right."""
    exec(bugs[1], {"torch": torch, "device": torch.device("cpu")})
    assert capsys.readouterr().out.startswith("32 where 100·100 + 100·100 = 20000")


def test_swapped_nibbles_pass_the_weak_test_only(bugs, capsys):
    """HAZARDS 8: equal neighbours don't notice the order, others do."""
    names = {"torch": torch, "unpack_int4": unpack_int4}
    exec(bugs[2], names)
    assert "test: True" in capsys.readouterr().out
    codes = torch.arange(-8, 8, dtype=torch.int8)
    wrong = unpack_int4(names["pack_again"](codes), 16)
    assert wrong.tolist() == codes.view(-1, 2).flip(1).flatten().tolist()
    assert torch.equal(unpack_int4(pack_int4(codes), 16), codes)


def test_the_swap_spoils_a_layer():
    layer = QuantizedLinear(torch.nn.Linear(64, 4, bias=False), "int4")
    right = layer.weight()
    layer.q = (layer.q << 4) | (layer.q >> 4)
    assert not torch.allclose(layer.weight(), right)


def card(cell: str, **names):
    """The card that the verdict's cell makes of these measurements."""
    stubs = {"claims": claims, "quick": False, "repeats": 9, "about": lambda repeats: f"{repeats} runs"}
    stubs["ratio"] = lambda timing, a, b: SimpleNamespace(median=timing)
    source = code_cell(read("01"), cell).replace("claims.verdict(", "card = claims.verdict(")
    exec(source, stubs | names, found := {})
    return found["card"]


@pytest.mark.parametrize(
    ("one", "many", "word"),
    [
        (2.5, 0.8, "holds on a condition"),
        (2.5, 2.4, "holds"),
        (0.7, 0.6, "does not hold here"),
        (1.05, 1.0, "does not hold here"),
    ],
)
def test_the_first_verdict_follows_one_row_and_many(one, many, word):
    found = card(
        '"C1", "LLM inference',
        one=one,
        curve={1: one, 64: many, 128: 9.9},
        counts=[1, 64, 128],
        fast=SimpleNamespace(most_rows=64),
        floor=0.024,
        floor_8=0.006,
        overhead=0.011,
        measured=0.067,
    )
    assert found.word == word
    assert found.measured == [f"int8 weights: a token {one:.2f}x as fast", f"64 rows {many:.2f}x as fast"]
    assert found.predicted == ["2.06x by floor and overhead, at one row"]
    assert "explain 52% of a token" in found.miss


@pytest.mark.parametrize(
    ("smaller", "faster", "worse", "word"),
    [
        (2.17, 2.5, 3.0, "holds on a condition"),
        (3.97, 2.5, 1.0, "holds"),
        (3.97, 2.5, 3.0, "holds on a condition"),
        (2.17, 0.8, 1.0, "does not hold here"),
        (None, None, None, "not tested here"),
    ],
)
def test_the_second_verdict_follows_size_speed_and_quality(smaller, faster, worse, word):
    told = (
        None
        if smaller is None
        else SimpleNamespace(b=SimpleNamespace(value=worse), a=SimpleNamespace(value=1.0))
    )
    found = card(
        "C2 = (",
        told=told,
        smaller=smaller,
        faster=faster,
        one=2.5,
        decoder=538,
        eight_bytes=100,
        stored_bytes=float,
        sizes={"float32": 3.78, "float16": 1.89, "int8": 1.0},
    )
    assert found.word == word
    assert found.measured[-1] == "ours, int8: 5.38x smaller, 2.50x as fast"
    if told is not None:
        assert found.measured[1] == f"its perplexity: {worse:.2f}x the original's"
