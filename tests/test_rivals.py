"""The wrappers keep their contract on the installed transformers."""

import pytest
import torch

from course_utils.generation import generate
from course_utils.rivals import CACHES, transformers_generate, transformers_model

pytest.importorskip("transformers")

FAMILIES = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_from_shared_tensors(tiny_decoder, family):
    decoder = tiny_decoder(**FAMILIES[family])
    model = transformers_model(decoder)
    tokens = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, decoder(tokens), atol=1e-4, rtol=0)
    query = model.model.layers[0].self_attn.q_proj.weight
    assert query.data_ptr() == decoder.blocks[0].attention.qkv.weight.data_ptr()


@pytest.mark.parametrize("cache", CACHES)
def test_exactly_as_many_tokens_as_asked_for(tiny_decoder, cache):
    """HAZARDS 86: an end-of-sequence token stops nobody; the text is plain greedy decoding."""
    decoder = tiny_decoder()
    model = transformers_model(decoder)
    model.config.eos_token_id = model.generation_config.eos_token_id = generate(decoder, [1, 2, 3], 3)[-1]
    assert transformers_generate(model, [1, 2, 3], 9, cache) == generate(decoder, [1, 2, 3], 9)


def test_unknown_cache(tiny_decoder):
    with pytest.raises(ValueError, match="sliding.*dynamic"):
        transformers_generate(None, [1], 1, "sliding")
