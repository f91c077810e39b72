"""The catalog, names and loading, on tiny models made here; the real checkpoint in the tests marked slow."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from course_utils import checkpoints
from course_utils.checkpoints import (
    CATALOG,
    CheckpointError,
    CourseDownloadError,
    fetch,
    load,
    load_decoder,
)
from course_utils.decoder import DecoderConfig
from tests.conftest import tiny_decoder
from tests.test_decoder import random_transformers_model, tokens

pytest_plugins = ("tests.gguf_for_tests",)
REAL = "SmolLM2-135M-Instruct"


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

    monkeypatch.setattr(checkpoints, "fetch_hub", refuse)
    name, folder = checkpoints._find("auto", torch.device("cuda"))
    lines = capsys.readouterr().out.splitlines()
    assert (name, folder.name) == ("tiny", "tiny-v1")
    assert lines[0] == "SmolLM2-1.7B-Instruct is out of reach (no way to the hub); using tiny instead"


def test_unknown_name_lists_the_known_ones(tiny):
    with pytest.raises(ValueError, match=rf"no model 'SmolLM3'.*{REAL}.*hub id"):
        fetch("SmolLM3")
    with pytest.raises(ValueError, match="no model './nowhere'"):
        load("./nowhere")


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


def test_decoder_is_named_after_the_weights_it_has(tiny, copied, llama_folder, monkeypatch, capsys):
    """The catalog's name, the hub's id, the folder's own name; the package model's where it serves instead."""
    assert tiny_decoder().name == load_decoder(llama_folder).name == ""
    assert load("tiny", device="cpu")[0].name == "tiny"
    monkeypatch.setattr(checkpoints, "fetch_hub", lambda repo, revision, total: llama_folder)
    assert load("someone/else", device="cpu")[0].name == "someone/else"
    assert load("SmolLM2-360M-Instruct", device="cpu")[0].name == "SmolLM2-360M-Instruct"
    assert load(llama_folder, device="cpu")[0].name == llama_folder.name
    monkeypatch.chdir(llama_folder)
    assert load(".", device="cpu")[0].name == llama_folder.name

    def refuse(*args):
        raise CourseDownloadError("no way to the hub")

    monkeypatch.setattr(checkpoints, "fetch_hub", refuse)
    monkeypatch.setattr(checkpoints, "default_name", lambda device: "SmolLM2-1.7B-Instruct")
    monkeypatch.setattr(checkpoints, "DEFAULT", "tiny")
    capsys.readouterr()
    decoder, _ = load(device="cpu")
    assert decoder.name == "tiny" and "using tiny instead" in capsys.readouterr().out


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


# --- the house -------------------------------------------------------------------------------------------------------


def test_import_is_cheap_and_quiet():
    """DESIGN 10, HAZARDS 29: importing pulls in none of the heavy libraries and prints nothing."""
    heavy = "transformers huggingface_hub bitsandbytes numba triton matplotlib gguf tokenizers jinja2"
    code = f"import sys, course_utils.checkpoints, course_utils.rivals; print([m for m in {heavy.split()} if m in sys.modules])"
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
def test_real_model_speaks(real_model):
    decoder, tokenizer = real_model
    ids = tokenizer.encode("The capital of France is")
    logits = decoder(torch.tensor([ids]), logits_to_keep=1)
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
    assert decoder.name == REAL and decoder.dtype == torch.float32
    assert decoder.config == DecoderConfig(
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
    chosen, _ = load(llama_folder, device="cuda")
    assert chosen.dtype in (torch.bfloat16, torch.float16)
