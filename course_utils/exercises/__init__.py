"""Checks of the exercises: ``check("2.3", answer)`` says in one sentence what is right or wrong.

:mod:`~course_utils.exercises.core` judges and shows; each chapter's checks stand in a module of their own and are
registered here, on import.
"""

from course_utils.exercises import kernels, kv_cache, quantization
from course_utils.exercises.core import (
    EXERCISES,
    PASSED,
    UNANSWERED,
    WRONG,
    Exercise,
    Result,
    Unanswered,
    Wrong,
    call,
    check,
    exercise,
    functions,
    in_order,
    judge,
    reset,
    said,
    summary,
    whole,
)
from course_utils.exercises.quantization import WHY_NOT_AT_8_BITS

__all__ = [
    "EXERCISES",
    "PASSED",
    "UNANSWERED",
    "WHY_NOT_AT_8_BITS",
    "WRONG",
    "Exercise",
    "Result",
    "Unanswered",
    "Wrong",
    "call",
    "check",
    "exercise",
    "functions",
    "in_order",
    "judge",
    "kernels",
    "kv_cache",
    "quantization",
    "reset",
    "said",
    "summary",
    "whole",
]
