"""What a model's folder holds, in transformers' format: config.json, the tensors' names, the files they are in.

Sources: the configuration classes and modelling code of transformers for Llama, Mistral, Qwen2 and Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from course_utils.decoder import DecoderConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class UnsupportedModelError(ValueError):
    """The model has a feature that the course's decoder lacks; the message names it."""


class CheckpointError(ValueError):
    """The folder's files do not fit its config: missing, unexpected or misshapen tensors, or missing files."""


def tensor_names(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
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


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it; CheckpointError for a folder without, or without all."""
    from safetensors import safe_open

    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS)
    if (folder / INDEX).is_file():
        files = {name: folder / shard for name, shard in read_json(folder / INDEX)["weight_map"].items()}
        absent = sorted({path.name for path in files.values() if not path.is_file()})
        if absent:
            raise CheckpointError(f"{folder}: {INDEX} lists files that are not there: {', '.join(absent)}")
        return files
    raise CheckpointError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}; other weight files are not read: "
        "save the model with transformers' save_pretrained, which writes safetensors"
    )


# --- configurations ---

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


# --- small files ---


def read_json(file: Path, default: dict | None = None) -> dict:
    """The file's content; where there is no such file, the default, or CheckpointError without one."""
    if not file.is_file():
        if default is not None:
            return default
        raise CheckpointError(
            f"{file.parent} has no {file.name}; a model folder holds config.json and safetensors"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def write_json(file: Path, content: Mapping) -> None:
    """The content as indented JSON, ended by a new line."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
