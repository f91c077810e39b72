"""transformers: the very weights of a decoder in the library's own model, and its ``generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from course_utils.decoder import Decoder, DecoderConfig
from course_utils.model_files import tensor_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHES = ("no cache", "dynamic", "static")


def transformers_model(decoder: Decoder) -> PreTrainedModel:
    """The decoder's weights in transformers' own model, in eval mode; the tensors are shared, no memory is doubled.

    It has the decoder's device and dtype. The fused ``qkv`` and ``gate_up`` matrices are handed over as slices of their
    rows. Change a weight of one in place and the other changes with it.
    Raises ValueError where a layer of the decoder was replaced by one without plain weights, RuntimeError where the
    installed transformers wants other tensors.
    """
    state = _unfused(decoder)

    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_transformers_config(decoder.config), dtype=decoder.dtype)
    found = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    # Buffers (rotary frequencies) hold no weights and are computed anew, away from the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(decoder.device)
    _check_complete(model, found.missing_keys, found.unexpected_keys)
    return model.eval().requires_grad_(False)


def transformers_generate(
    model: PreTrainedModel, tokens: list[int], new_tokens: int, cache: str = "dynamic"
) -> list[int]:
    """Exactly ``new_tokens`` greedy tokens after ``tokens``, by ``model.generate`` -> the new ones only.

    cache: "no cache" feeds the whole text at every step, "dynamic" grows, "static" is allocated once (on a GPU the
    library compiles its step then). End-of-sequence tokens do not stop it, so that rivals produce the same number.
    Raises ValueError for another cache.
    """
    if cache not in CACHES:
        raise ValueError(f"cache={cache!r} is not one of {', '.join(CACHES)}")
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=cache != "no cache",
        cache_implementation="static" if cache == "static" else None,
        pad_token_id=0,
        # An id that no model chooses: None would be filled in from the model, and min_new_tokens would change the text.
        eos_token_id=model.config.vocab_size,
    )
    prompt = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return out[0, len(tokens) :].tolist()


def _transformers_config(config: DecoderConfig):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    family = Qwen3Config if config.qk_norm else Qwen2Config if config.qkv_bias else LlamaConfig
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"} | (config.rope_scaling or {})
    return family(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
    )


def _check_complete(model: PreTrainedModel, missing: list[str], unexpected: list[str]) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    missing = sorted({*missing, *(name for name, tensor in tensors if tensor.is_meta)})
    if missing or unexpected:
        from transformers import __version__

        raise RuntimeError(
            f"transformers {__version__} has other tensors in its {type(model).__name__} than the decoder: "
            f"left empty {missing[:3]}, not taken {unexpected[:3]}; install the version in requirements.txt"
        )


def _unfused(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's tensors under transformers' names; slices share their storage."""
    config = decoder.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parameters, state = dict(decoder.named_parameters()), {}
    for ours, theirs in tensor_names(config).items():
        if ours not in parameters:
            raise ValueError(
                f"the decoder has no {ours!r} (a layer was replaced?); give one with plain weights, as "
                "checkpoints.load returns it"
            )
        tensor = parameters[ours].detach()
        sizes = (heads, kv_heads, kv_heads) if len(theirs) == 3 else len(tensor) // len(theirs)
        state.update(zip(theirs, tensor.split(sizes), strict=True))
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state
