"""llama.cpp, the CPU yardstick of the benchmarks, and GGUF files of one and the same weights in other formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from course_utils.rivals.quantization import Unavailable

KINDS = ("F32", "F16", "Q8_0")


def llama_cpp(path: str | os.PathLike, threads: int = 2, context: int = 1024) -> LlamaCpp:
    """A GGUF file in llama.cpp on the CPU, quiet. Raises Unavailable where llama-cpp-python is missing or refuses it."""
    try:
        from llama_cpp import Llama, llama_log_set
    except ImportError:
        raise Unavailable("llama.cpp is not installed: pip install llama-cpp-python") from None
    except (OSError, RuntimeError) as error:
        raise Unavailable(
            f"llama.cpp's library does not load: {str(error).strip().splitlines()[0]}"
        ) from None
    llama_log_set(_silent(), None)
    try:
        model = Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            verbose=False,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise Unavailable(
            f"llama.cpp can't load {Path(path).name}: {str(error).strip().splitlines()[0]}"
        ) from None
    return LlamaCpp(model)


@cache
def _silent():
    """A log callback that writes nothing, kept for as long as the library may call it (verbose=False lets some by)."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """Greedy decoding of one text with llama.cpp's cache, in token ids."""

    def __init__(self, model) -> None:
        self._model = model

    def prefill(self, tokens: Sequence[int]) -> int:
        """Forget everything, feed the tokens, return the likeliest next one."""
        self._model.n_tokens = 0
        return self._feed(list(tokens))

    def decode(self, token: int, count: int, length: int) -> list[int]:
        """``count`` greedy tokens after ``token``, fed one a step behind the first ``length`` tokens of the text."""
        self._model.n_tokens = length  # what the cache holds beyond is dropped before the next token
        found = []
        for _ in range(count):
            token = self._feed([token])
            found.append(token)
        return found

    def _feed(self, tokens: list[int]) -> int:
        self._model.eval(tokens)
        # -1: the last token's logits, the only ones that are computed
        logits = self._model._ctx.get_logits_ith(-1)
        return int(np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),)).argmax())


def gguf_in(kind: str, source: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """A GGUF file in ``folder`` with all metadata and the very weights of ``source``, its matrices as ``kind``.

    kind: "F32" (exact), "F16", "Q8_0" (groups of 32, float16 scale). Vectors stay float32. A file that is there is
    taken as it is. Raises ValueError for another kind, or a matrix whose rows no group divides.
    """
    import gguf

    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    source, folder = Path(source), Path(folder)
    target = folder / f"{source.name.split('.')[0]}.{kind}.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _write(gguf, reader, kind, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _write(gguf, reader, kind: str, target: Path) -> None:
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(
                {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16}.get(
                    kind, gguf.LlamaFileType.MOSTLY_Q8_0
                )
            )
        elif name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
