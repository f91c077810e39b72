"""The course's own texts: prompts of four kinds, and prose to evaluate and to calibrate on (data/README.md:
sources).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KINDS = ("chat", "code", "summary", "copy")


@dataclass(frozen=True)
class Prompt:
    """One user turn. kind: chat, code, summary, or copy (the answer repeats parts of the prompt)."""

    kind: str
    id: str
    text: str
    system: str | None = None


def prompts(kind: str | None = None) -> list[Prompt]:
    """All prompts, or those of one kind, in the file's order. Raises ValueError for a kind there isn't."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    return [prompt for prompt in _all_prompts() if kind in (None, prompt.kind)]


def evaluation_text() -> str:
    """About 25,000 tokens of prose to measure perplexity on."""
    return _read("evaluation.txt")


def calibration_text() -> str:
    """About 10,000 tokens of prose to choose scales with; shares no passage with the evaluation text."""
    return _read("calibration.txt")


def data_folder() -> Path:
    """The clone's data/ folder, beside the package. Raises FileNotFoundError where the package was installed
    without it.
    """
    folder = Path(__file__).resolve().parent.parent / "data"
    if not (folder / "prompts.jsonl").is_file():
        raise FileNotFoundError(
            f"no course data at {folder}: the course is used from its clone. Clone the repository, and there run "
            "`pip install -e .` (or start Python in that folder)"
        )
    return folder


def _read(name: str) -> str:
    return (data_folder() / name).read_text(encoding="utf-8")


@cache
def _all_prompts() -> tuple[Prompt, ...]:
    return tuple(Prompt(**json.loads(line)) for line in _read("prompts.jsonl").splitlines())
