"""GGUF files of the same weights in other formats, and llama.cpp as it decodes them."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from course_utils import rivals
from course_utils.checkpoints import load_decoder
from course_utils.generation import generate
from course_utils.gguf_conversion import convert
from course_utils.rivals import Unavailable, gguf_in, llama_cpp
from tests.conftest import PlainCache

pytest_plugins = ("tests.gguf_for_tests",)


def read(path):
    """(metadata, {tensor: (type, float32 values)}) of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.file_type"
    }
    tensors = {t.name: (t.tensor_type.name, gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    return fields, tensors


@pytest.mark.parametrize(("kind", "worst"), [("F32", 0.0), ("F16", 5e-4), ("Q8_0", 8e-3)])
def test_other_formats_hold_the_same_model(tiny_gguf, tmp_path, kind, worst):
    """Metadata, names and shapes stay; float32 is exact, the others within their rounding of the largest weight."""
    source = tiny_gguf[0]
    path = gguf_in(kind, source, tmp_path / "cache")
    assert path.name == f"tiny.{kind}.gguf"
    fields, tensors = read(source)
    found_fields, found = read(path)
    assert found_fields == fields and set(found) == set(tensors)
    for name, (_, values) in tensors.items():
        stored, copy = found[name]
        assert stored == (kind if values.ndim == 2 else "F32")
        assert copy.shape == values.shape
        assert np.abs(copy - values).max() <= worst * np.abs(values).max()


def test_what_is_there_is_kept_and_nothing_half_written_stays(tiny_gguf, tmp_path, monkeypatch):
    path = gguf_in("Q8_0", tiny_gguf[0], tmp_path)
    written = path.stat().st_mtime_ns
    assert gguf_in("Q8_0", tiny_gguf[0], tmp_path) == path and path.stat().st_mtime_ns == written
    import gguf

    def full(self, *args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="disk full"):
        gguf_in("F16", tiny_gguf[0], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.Q8_0.gguf"]
    with pytest.raises(ValueError, match="'Q2_K'.*F32, F16, Q8_0"):
        gguf_in("Q2_K", tiny_gguf[0], tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@torch.inference_mode()
def test_llama_cpp_decodes_what_our_decoder_decodes(tiny_gguf, tmp_path, kind, capfd):
    """Same weights, same prompt, cached greedy decoding; going back to a shorter text forgets the rest."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (the bench extra)")
    path = gguf_in(kind, tiny_gguf[0], tmp_path)
    convert(path, tmp_path / "folder")
    decoder = load_decoder(tmp_path / "folder")
    capfd.readouterr()
    model = llama_cpp(path, threads=1, context=64)
    assert capfd.readouterr() == ("", "")
    prompt = [5, 17, 100, 42, 8]
    expected = generate(decoder, prompt, 9, cache=PlainCache())
    same = 9 if kind == "F32" else 1  # Q8_0 products round what they are fed as well
    first = model.prefill(prompt)
    for _ in range(2):
        assert ([first] + model.decode(first, 8, len(prompt)))[:same] == expected[:same]
    assert model.decode(expected[2], 3, len(prompt) + 2)[: same - 1] == expected[3:6][: same - 1]
    assert model.prefill(prompt) == first


def test_llama_cpp_that_is_missing_or_refuses_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Unavailable, match="not installed: pip install llama-cpp-python"):
        llama_cpp("x.gguf")

    def refuse(*args, **kwargs):
        raise ValueError("Failed to load model from file: x.gguf\nmore")

    stand_in = types.SimpleNamespace(
        Llama=refuse, llama_log_set=lambda *args: None, llama_log_callback=lambda call: call
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", stand_in)
    monkeypatch.setattr(rivals.llama, "_silent", lambda: None)
    with pytest.raises(Unavailable, match="can't load x.gguf: Failed to load model from file: x.gguf$"):
        llama_cpp(tmp_path / "x.gguf")
