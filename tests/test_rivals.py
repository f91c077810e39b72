"""The wrappers keep their contract on the installed transformers."""

import pytest
import torch

from course_utils import rivals
from course_utils.checkpoints import load_decoder
from course_utils.generation import generate
from course_utils.model_files import tensor_names
from course_utils.rivals import CACHES, transformers_generate, transformers_model
from tests.test_decoder import FAMILIES, random_transformers_model, tokens

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_model_has_the_same_weights_and_shares_them(family, tied, tmp_path, capfd):
    """From transformers' model through the decoder and back: same tensors, same logits, no byte of weights copied."""
    original = random_transformers_model(family, tied)
    original.save_pretrained(tmp_path)
    decoder, x = load_decoder(tmp_path), tokens()
    capfd.readouterr()
    model = transformers_model(decoder)
    assert capfd.readouterr() == ("", "")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    expected = original.state_dict()
    assert set(model.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x).logits, original(x).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(x).logits, decoder(x), atol=1e-4, rtol=0)

    def memory(module):
        return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    assert memory(model) == memory(decoder)


@torch.inference_mode()
def test_a_change_in_one_is_a_change_in_the_other(tiny_decoder):
    decoder, x = tiny_decoder(), tokens()
    model, before = transformers_model(decoder), decoder(x)
    decoder.blocks[0].attention.qkv.weight.mul_(2.0)
    model.model.layers[1].mlp.up_proj.weight.mul_(2.0)
    assert (decoder(x) - before).abs().max() > 1e-2
    torch.testing.assert_close(model(x).logits, decoder(x), atol=1e-4, rtol=0)


def test_dtype_is_the_decoders(tiny_decoder):
    model = transformers_model(tiny_decoder().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_missing_and_unknown_tensors_are_named(tiny_decoder, monkeypatch):
    """Nothing stays empty in silence: neither a layer that was replaced nor a name that the library has changed."""
    decoder = tiny_decoder(qkv_bias=True)
    monkeypatch.setattr(
        rivals.generate,
        "tensor_names",
        lambda config: {
            ours: tuple(name.replace("o_proj", "out_proj") for name in theirs)
            for ours, theirs in tensor_names(config).items()
        },
    )
    with pytest.raises(
        RuntimeError, match=r"left empty .*0.self_attn.o_proj.*not taken .*0.self_attn.out_proj"
    ):
        transformers_model(decoder)
    decoder.blocks[1].mlp.down = torch.nn.Identity()
    with pytest.raises(ValueError, match="no 'blocks.1.mlp.down.weight'"):
        transformers_model(decoder)


@pytest.mark.gpu
@torch.inference_mode()
def test_gpu_model_shares_there(tiny_decoder):
    decoder, x = tiny_decoder().cuda(), tokens().cuda()
    model = transformers_model(decoder)
    assert model.device.type == "cuda"
    torch.testing.assert_close(model(x).logits, decoder(x), atol=1e-4, rtol=0)


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
