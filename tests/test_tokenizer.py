"""Text to ids and back, and the chat template, against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from course_utils.catalog import CATALOG, DEFAULT
from course_utils.checkpoints import fetch
from course_utils.model_files import CheckpointError
from course_utils.tokenizer import Tokenizer

pytest_plugins = ("tests.gguf_for_tests",)
TEXTS = [
    "The capital of France is Paris.",
    "  leading, and   inner\t\tspaces  \n\n\nnew lines \r\n",
    "def add(a, b):\n    return a + b  # 12 + 30 = 42\n",
    "naïve café, Größe, Москва, 日本語, 한국어, العربية, हिन्दी, 👩‍👩‍👧 🎉",
    "3.14159, 2024-12-31, 1,000,000 and x2",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "don't I'll we've IT'S",
    "\x00\x7f\u200b\ufeff",
    "",
    " ",
]


@pytest.fixture
def tiny_tokenizer(tiny, copied):
    return Tokenizer(fetch("tiny"))


def test_tokenizer_round_trips_and_shows_pieces(tiny_tokenizer):
    t = tiny_tokenizer
    for text in TEXTS:
        ids = t.encode(text)
        assert isinstance(ids, list) and all(isinstance(i, int) for i in ids)
        assert t.decode(ids) == text
    ids = t.encode("hello the 12")
    assert t.pieces(ids) == ["he", "ll", "o", " the", " ", "1", "2"]  # a digit is a token by itself
    assert t.pieces(t.encode("a  12")) == ["a", "  ", "1", "2"]  # … split off before the words are
    assert t.pieces(t.encode("é")) == ["\ufffd", "\ufffd"] and t.decode(t.encode("é")) == "é"
    assert t.decode(torch.tensor(ids)) == "hello the 12" and t.pieces([]) == []
    assert t.pieces([1]) == ["<|im_start|>"]
    assert t.decode([1, *ids], skip_special_tokens=True) == "hello the 12"
    assert t.vocab_size == len(t.get_vocab()) == 3 + 256 + 5 and t.get_vocab()["<|im_end|>"] == 2
    assert t.eos_ids == frozenset({0, 2}) and isinstance(t.eos_ids, frozenset)


def test_chat_equals_transformers_template(tiny_tokenizer):
    """HAZARDS 78: chat returns ids, not a mapping; they equal apply_chat_template's with return_dict=False."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(fetch("tiny"))
    several = [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": "  again\n"},
    ]
    one = [{"role": "user", "content": "hello"}]
    for ours, messages in (
        (tiny_tokenizer.chat("hello"), one),
        (tiny_tokenizer.chat(one), one),
        (tiny_tokenizer.chat(several), several),
        (tiny_tokenizer.chat(several[1:], system="Answer in French."), several),
    ):
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours == expected and type(ours) is list
    assert tiny_tokenizer.decode(tiny_tokenizer.chat("hello")).endswith(
        "hello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_start_and_end_tokens(tiny, copied):
    """A tokenizer that adds a start token: encode does, chat leaves it to the template. Well-known end tokens count."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    folder = fetch("tiny")
    plain = Tokenizer(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    adds = Tokenizer(folder)
    assert adds.encode("hello") == [1, *plain.encode("hello")]
    assert adds.encode("hello", add_special_tokens=False) == plain.encode("hello")
    assert adds.chat("hello") == plain.chat("hello")
    assert adds.eos_ids == frozenset({0, 2, 7})


def test_chat_errors_are_plain(tiny_tokenizer, tiny):
    with pytest.raises(ValueError, match="a system message is in messages already"):
        tiny_tokenizer.chat([{"role": "system", "content": "x"}], system="y")
    folder = fetch("tiny")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses this conversation: roles must alternate"):
        Tokenizer(folder).chat("hello")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].__class__.__mro__ }}"
    )  # templates are foreign code
    with pytest.raises(ValueError, match="template failed"):
        Tokenizer(folder).chat("hello")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(folder).chat("hello")
    settings = folder / "tokenizer_config.json"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": named}))
    assert Tokenizer(folder).chat("hello") == tiny_tokenizer.chat("hello")
    with pytest.raises(CheckpointError, match="no tokenizer.json"):
        Tokenizer(tiny.cache)


# --- the real checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_tokenizer_equals_transformers(real_model):
    """Against transformers on the converted folder, and against its own conversion of the GGUF's tokenizer.

    The latter does not split digits off before words, as SmolLM2's tokenizer and llama.cpp do; that shows only where
    several spaces stand before a digit.
    """
    from transformers import AutoTokenizer

    _, tokenizer = real_model
    folder = fetch(DEFAULT)
    ours = AutoTokenizer.from_pretrained(folder)
    from_gguf = AutoTokenizer.from_pretrained(folder, gguf_file=CATALOG[DEFAULT].file)
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8")[:4000], "a  12"]:
        ids = tokenizer.encode(text)
        assert ids == ours.encode(text)
        assert tokenizer.decode(ids) == text
        if not re.search(r"\s\s\d", text):
            assert ids == from_gguf.encode(text), text
    assert tokenizer.pieces(tokenizer.encode("a  12")) == ["a", "  ", "1", "2"]
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_ids == frozenset({0, 2})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    for case in (messages, messages[1:]):
        expected = ours.apply_chat_template(case, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(case) == list(expected)
