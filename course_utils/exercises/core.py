"""How an answer is judged and shown, and what the chapters' checks share.

The order of judgement is the same everywhere: is it answered · right type and shape · a known wrong answer, with its
own sentence · one failing input with what came and what was wanted · passed, with one sentence of what it means.

A chapter adds a check with a function that raises :class:`Wrong` or :class:`Unanswered`, or returns that last sentence::

    @exercise("2.3", "The bill")
    def _bill(answer, **given) -> str: ...
"""

from __future__ import annotations

import dis
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from course_utils.claims import emit, html_table, text_table

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
    """Register the decorated function as the check of exercise ``id``, such as "2.3" or, of a deep dive, "1A.2"."""

    def register(judge: Callable[..., str]) -> Callable[..., str]:
        EXERCISES[id] = Exercise(id, title, judge)
        return judge

    return register


def check(id: str, answer=None, *more, strict: bool = False, **given) -> None:
    """Judge an answer and show the result; what ``answer`` is stands in the exercise's text.

    Two functions given without brackets count as a pair.
    Never raises in a notebook: an exercise without an answer is "not answered yet", so that all cells can be run.
    ``strict=True`` (tests) raises AssertionError unless the answer passes.
    """
    result = judge(id, (answer, *more) if more else answer, **given)
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
        if _is_missing(answer):
            raise Unanswered
        return Result(id, PASSED, EXERCISES[id].judge(answer, **given))
    except Unanswered as missing:
        return Result(id, UNANSWERED, str(missing) or "Write your answer above and run the cell again.")
    except Wrong as wrong:
        return Result(id, WRONG, str(wrong))
    except Exception as error:  # whatever a learner's code does must not stop the notebook
        return Result(id, WRONG, f"The check stopped with {named(error)}.")


def summary(chapter: int | str | None = None) -> None:
    """Show the exercises of a chapter (1) or a deep dive ("1A") with their states, and the count.

    None: of all chapters and deep dives met in this session. A chapter's count leaves its deep dives out.
    """
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
    return attempt(said(function, *args, **kwargs), function, *args, **kwargs)


def attempt(where: str, function: Callable, *args, **kwargs):
    """The same as :func:`call` where the call has a name of its own, as for a matrix too large to print."""
    try:
        returned = function(*args, **kwargs)
    except NotImplementedError:
        raise Unanswered from None
    except Exception as error:
        raise Wrong(f"{where} raised {named(error)}.") from None
    if returned is None:
        raise Unanswered(f"{where} returns nothing yet.")
    return returned


def said(function: Callable, *args, **kwargs) -> str:
    """A call as one would write it: ``kv_bytes(30, 3, 64, 1_000, 2)``."""

    def shown(value) -> str:
        if isinstance(value, int):
            return f"{value:_}"
        return repr(value) if len(repr(value)) <= 60 else "…"

    parts = [shown(value) for value in args] + [f"{name}={shown(value)}" for name, value in kwargs.items()]
    return f"{name_of(function)}({', '.join(parts)})"


def functions(answer, *names: str) -> tuple[Callable, ...]:
    """The answer as functions of these names; Wrong where it is something else.

    One that is missing is Unanswered; of several, a missing one comes as a function that returns nothing, so that
    the others are judged (:func:`in_order`).
    """
    found = answer if isinstance(answer, (tuple, list)) else (answer,)
    wanted = names[0] if len(names) == 1 else f"({', '.join(names)})"
    if len(found) != len(names):
        way_out = f" Pass both in brackets: {wanted}." if len(names) == 2 else ""
        raise Wrong(f"The answer should be {wanted}; {len(found)} thing(s) came.{way_out}")
    for name, function in zip(names, found, strict=True):
        if not (_is_missing(function) or callable(function)):
            raise Wrong(f"{name} should be a function; it is {function!r}.")
    if len(names) == 1 and _is_missing(found[0]):
        raise Unanswered
    return tuple(function if callable(function) else _returns_nothing for function in found)


def in_order(*parts: tuple[str, Callable[[], object]]):
    """Judge (name, judgement) one after the other; the last one's result. A missing part is said with those right."""
    right = []
    for name, judgement in parts:
        try:
            result = judgement()
        except Unanswered:
            so_far = f"{', '.join(right)} is right so far; " if right else ""
            raise Unanswered(f"{so_far}{name} returns nothing yet.") from None
        right.append(name)
    return result


def whole(value, where: str) -> int:
    """``value`` as int; Wrong where it is no whole number."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Wrong(f"{where} should be a whole number; it is {value!r}.")
    if value != int(value):
        raise Wrong(f"{where} gave {value:,.2f}; a whole number is wanted.")
    return int(value)


def again(where: str, function: Callable, *args):
    """What a function returns that has answered before: None is then wrong, not unanswered."""
    try:
        return attempt(where, function, *args)
    except Unanswered:
        raise Wrong(f"{where} is None, though other calls are answered.") from None


def number(value, where: str) -> float:
    """``value`` as float; Wrong where it is no finite number."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except Exception:
        found = math.nan
    if not math.isfinite(found):
        raise Wrong(f"{where} should be a number; it is {short(value)}.")
    return found


def tensor(value, where: str) -> Tensor:
    """``value`` as a tensor on the CPU; Wrong where it is none."""
    try:
        return torch.as_tensor(value).detach().cpu()
    except Exception:
        raise Wrong(f"{where} should be a tensor; it is {short(value)}.") from None


def function_and(answer, name: str, other: str) -> tuple[Callable, object]:
    """An answer of a function and something else; the function may be missing, then it returns nothing."""
    wanted = f"({name}, {other})"
    found = answer if isinstance(answer, (tuple, list)) else (answer,)
    if len(found) != 2:
        raise Wrong(
            f"The answer should be {wanted}; {len(found)} thing(s) came. Pass both in brackets: {wanted}."
        )
    if callable(found[1]) and not callable(found[0]):
        raise Wrong(f"The answer stands in the other order: {wanted} is wanted.")
    return functions(found[0], name)[0], found[1]


@contextmanager
def unchanged(where: str, *given: Tensor) -> Iterator[None]:
    """Wrong where the function wrote into what it was given."""
    before = [one.clone() for one in given]
    yield
    for now, old in zip(given, before, strict=True):
        if now.dtype != old.dtype or now.shape != old.shape or not torch.equal(now, old):
            raise Wrong(f"{where} wrote into the tensor it was given; make a new one.")


def name_of(function: Callable) -> str:
    """Its name, or words for it where it has none."""
    return getattr(function, "__name__", "your function")


def short(value) -> str:
    """``value`` as Python writes it, or the name of its type where that is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def digits(value: float) -> str:
    """Four digits, without a power of ten where that reads better: 44.84, 358,700, 7.98e-09."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def dtype_name(values: Tensor) -> str:
    """The dtype without its package: float32."""
    return str(values.dtype).removeprefix("torch.")


def _is_missing(answer) -> bool:
    """Whether it is None, ``...``, a stub, or a tuple, list or dict that still holds one of them.

    A tuple in which one function is written has begun: :func:`functions` tells what is missing.
    """
    if isinstance(answer, dict):
        return any(_is_missing(part) for part in answer.values())
    if isinstance(answer, (tuple, list)):
        begun = any(callable(part) and not _is_missing(part) for part in answer)
        return not begun and any(_is_missing(part) for part in answer)
    return answer is None or answer is ... or inspect.isfunction(answer) and _is_stub(answer)


def _returns_nothing(*args, **kwargs) -> None:
    """Stands in for a function that was not given."""


def _is_stub(function: Callable) -> bool:
    """Whether the body is only ``pass``, ``...``, a docstring or ``return None``."""
    idle = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}
    return all(
        i.opname in idle and (i.opname == "RESUME" or i.argval is None)
        for i in dis.get_instructions(function)
    )


def named(error: BaseException) -> str:
    """An exception's class and the first line of its text, without the full stop."""
    text = str(error).strip()
    return (
        f"{type(error).__name__}: {text.splitlines()[0].removesuffix('.')}" if text else type(error).__name__
    )


def _order(id: str) -> list:
    """1.2, 1.10, 1A.1, 2.1: by number, a chapter's deep dives after it."""
    parts = [re.fullmatch(r"([0-9]*)(.*)", part, re.DOTALL).groups() for part in id.split(".")]
    return [(not count, int(count or 0), letters) for count, letters in parts]


@contextmanager
def one_thread():
    """Tiny matrices on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
