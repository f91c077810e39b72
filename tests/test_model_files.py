"""Which configurations the decoder can run, and how the others are refused."""

from __future__ import annotations

import pytest

from course_utils.checkpoints import load
from course_utils.model_files import UnsupportedModelError, config_from_transformers
from tests.test_decoder import LLAMA3, SIZES


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
