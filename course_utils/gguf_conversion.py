"""One GGUF file of the Llama family -> a folder with config.json, model.safetensors, tokenizer.json, chat template.

The weights are float32, which is what the 4-bit groups decode to exactly; 16 bits would round (scale · code + minimum
needs up to 24). They go by the decoder's own names, q, k, v and gate, up fused.

Sources: the GGUF specification and llama.cpp's convert_hf_to_gguf.py (tensor names, order of q's and k's rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from course_utils.decoder import DecoderConfig
from course_utils.model_files import (
    WEIGHTS,
    CheckpointError,
    UnsupportedModelError,
    config_from_transformers,
    tensor_names,
    write_json,
)
from course_utils.tokenizer import END_TOKENS

FORMAT = 1  # of the converted folder; raise it when the conversion changes, and old folders are left alone


def convert(gguf_file: Path, folder: Path) -> None:
    """Make ``folder``, which ``checkpoints.load_decoder`` and ``Tokenizer`` read, from a GGUF file of the Llama family.

    Tensors of any quantization that the gguf package decodes become float32. Raises UnsupportedModelError for another
    architecture or tokenizer, CheckpointError for a missing tensor, FileExistsError where the folder is there.
    """
    import gguf
    from safetensors.torch import save_file

    folder.mkdir()
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: _field(field) for name, field in reader.fields.items()}
    config = _gguf_config(fields, {tensor.name for tensor in reader.tensors})
    write_json(folder / "config.json", config)
    _write_tokenizer(folder, fields)
    state = _gguf_state(reader.tensors, config_from_transformers(config))
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


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
    ends = [end, *(tokens.index(token) for token in END_TOKENS if token in tokens)]
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
    for ours, theirs in tensor_names(config).items():
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
    write_json(
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
