"""The shipped texts: big enough, apart from each other, well-formed, and each named with its licence."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from course_utils import datasets
from course_utils.datasets import KINDS, calibration_text, data_folder, evaluation_text, prompts

TEXTS = ("prompts.jsonl", "evaluation.txt", "calibration.txt")
SPOKEN_FOR = {"README.md", "results", "draft"}  # results and draft: written by the course's own commands


def shingles(text: str, size: int = 20) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def test_every_kind_has_at_least_eight_prompts():
    counts = Counter(prompt.kind for prompt in prompts())
    assert set(counts) == set(KINDS) and min(counts.values()) >= 8
    for kind in KINDS:
        assert prompts(kind) == [prompt for prompt in prompts() if prompt.kind == kind]


def test_prompts_have_their_fields_and_ids_of_their_own():
    ids = [prompt.id for prompt in prompts()]
    assert len(set(ids)) == len(ids) and len({prompt.text for prompt in prompts()}) == len(ids)
    for prompt in prompts():
        assert re.fullmatch(rf"{prompt.kind}-[a-z_]+", prompt.id)
        assert prompt.text == prompt.text.strip() and len(prompt.text.split()) >= 10
        assert prompt.system is None or prompt.system == prompt.system.strip() != ""


def test_a_list_of_prompts_is_the_callers_own():
    prompts().clear()
    prompts("chat").clear()
    assert len(prompts()) > 32


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="kind='poem' is not one of chat, code, summary, copy"):
        prompts("poem")


@pytest.mark.parametrize("name", TEXTS)
def test_files_are_plain_utf_8(name):
    raw = (data_folder() / name).read_bytes()
    text = raw.decode("utf-8")
    assert b"\r" not in raw and "\ufeff" not in text and "\ufffd" not in text
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("text", [evaluation_text, calibration_text])
def test_prose_is_paragraphs_without_the_publishers_words(text):
    paragraphs = text().strip().split("\n\n")
    assert paragraphs[0] == "Chapter 1" and len(paragraphs) > 100
    assert not any(
        line != line.strip() or "  " in line for paragraph in paragraphs for line in paragraph.split("\n")
    )
    assert (
        max(paragraph.count("\n") for paragraph in paragraphs) <= 4
    )  # verse keeps its lines, prose has none
    assert not re.search(r"gutenberg|copyright|e-?text|https?:|--", text(), re.IGNORECASE)


def test_evaluation_and_calibration_share_no_passage():
    evaluation, calibration = shingles(evaluation_text()), shingles(calibration_text())
    assert len(evaluation) > 15_000 and len(calibration) > 6_000
    assert not evaluation & calibration
    shared = " ".join(evaluation_text().split()[500:520]) + " " + calibration_text()
    assert evaluation & shingles(shared), "the search itself must find a passage that is shared"


def test_the_readme_names_every_file_with_its_licence():
    rows = [
        line
        for line in (data_folder() / "README.md").read_text(encoding="utf-8").splitlines()
        if "| `" in line
    ]
    for path in data_folder().iterdir():
        if path.name in SPOKEN_FOR or path.name.startswith("."):
            continue
        row = [line for line in rows if f"`{path.name}" in line]
        assert len(row) == 1, f"data/README.md must have one row for {path.name}"
        assert re.search(r"CC BY 4.0|public domain|MIT|Apache-2.0", row[0])


def test_without_the_clone_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "course_utils" / "datasets.py"))
    with pytest.raises(FileNotFoundError, match=r"(?s)no course data at .*data.*clone.*pip install -e"):
        data_folder()


@pytest.mark.slow
def test_sizes_in_tokens(real_model):
    _, tokenizer = real_model
    evaluation, calibration = (
        len(tokenizer.encode(evaluation_text())),
        len(tokenizer.encode(calibration_text())),
    )
    assert 20_000 <= evaluation <= 30_000 and 8_000 <= calibration <= 12_000
    readme = (data_folder() / "README.md").read_text(encoding="utf-8")
    assert f"{evaluation:,} tokens" in readme and f"{calibration:,} tokens" in readme
    sizes = {prompt.id: len(tokenizer.encode(prompt.text)) for prompt in prompts()}
    assert min(sizes.values()) >= 12 and max(sizes.values()) <= 400
    assert (
        f"{len(sizes)} prompts" in readme
        and f"{min(sizes.values())} to {max(sizes.values())} tokens" in readme
    )
    for kind in KINDS:
        of_kind = [sizes[prompt.id] for prompt in prompts(kind)]
        assert min(of_kind) <= 60 and max(of_kind) >= 150, f"{kind} needs short and long prompts"
