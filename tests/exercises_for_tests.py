"""What the tests of all chapters' exercises share."""

from __future__ import annotations

import pytest
import torch

from course_utils.exercises import check, judge


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are quicker on one thread; a test module takes this by importing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hears(id: str, answer, sentence: str, **given) -> None:
    """The answer is refused with this sentence; strict, it raises."""
    with pytest.raises(AssertionError) as refused:
        check(id, answer, strict=True, **given)
    assert sentence in str(refused.value) and "✗" in str(refused.value)
    assert ".." not in str(refused.value) and ".:" not in str(refused.value)


def unanswered(
    id: str, answer, sentence: str = "Write your answer above and run the cell again.", **given
) -> None:
    """The answer counts as none, and this is what is said."""
    result = judge(id, answer, **given)
    assert (result.state, result.sentence) == ("not answered yet", sentence)
