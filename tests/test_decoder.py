"""The decoder against transformers: same logits for the four families, with and without a cache."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from course_utils.checkpoints import load_decoder
from course_utils.decoder import Cache, DecoderConfig, attention, rotary_frequencies
from course_utils.rivals import transformers_model
from tests.conftest import PlainCache, tiny_config, tiny_decoder

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def transformers_config(family: str, tied: bool):
    """A tiny config of transformers for a family by the names used below."""
    import transformers

    more = dict(tie_word_embeddings=tied)
    if family == "llama3":
        return transformers.LlamaConfig(
            **SIZES, **more, rope_parameters={"rope_theta": 500_000.0, **LLAMA3}, rms_norm_eps=1e-5
        )
    if family == "llama_linear":
        rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
        return transformers.LlamaConfig(**SIZES, **more, rope_parameters=rope)
    if family == "mistral":
        return transformers.MistralConfig(**SIZES, **more, sliding_window=None)
    if family == "qwen2":
        sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
        return transformers.Qwen2Config(**sizes, **more)
    if family == "qwen3":
        return transformers.Qwen3Config(**{**SIZES, "head_dim": 16}, **more)
    return transformers.LlamaConfig(**SIZES, **more)


def random_transformers_model(family: str, tied: bool, seed: int = 0):
    """A float32 model in eval mode whose weights, norms and biases are all random and wide."""
    import transformers

    config = transformers_config(family, tied)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


FAMILIES = ["llama", "llama3", "llama_linear", "mistral", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=[(f, t) for f in FAMILIES for t in (True, False)], ids=str)
def pair(request, tmp_path_factory):
    """(transformers' model, our decoder of the same weights, loaded from what transformers saved)."""
    model = random_transformers_model(*request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, load_decoder(folder)


def tokens(rows: int = 2, new: int = 40, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    return torch.randint(vocab, (rows, new), generator=torch.Generator().manual_seed(seed))


def stepwise(decoder, x: torch.Tensor, chunks) -> torch.Tensor:
    """Logits of x fed through one cache in pieces of the given lengths."""
    cache, start, logits = PlainCache(), 0, []
    for length in chunks:
        logits.append(decoder(x[:, start : start + length], cache))
        start += length
    assert start == x.shape[1] == cache.length
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def test_logits_equal_transformers_without_cache(pair):
    model, decoder = pair
    x = tokens()
    expected = model(x).logits
    assert expected.std() > 0.1  # else agreement would say nothing
    torch.testing.assert_close(decoder(x), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_logits_equal_transformers_with_cache(pair):
    """One step after a prompt, and every token by itself; HAZARDS 36: same argmax at every position."""
    model, decoder = pair
    x = tokens()
    expected = model(x).logits
    for chunks in ([39, 1], [1] * 40, [5, 7, 28]):
        logits = stepwise(decoder, x, chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.inference_mode()
def test_prompt_tokens_do_not_see_the_future_through_a_cache():
    """HAZARDS 34: prefill [1,2,3,4] and [1,2,3,9] agree at the first three places and not at the last."""
    decoder = tiny_decoder()
    one = decoder(torch.tensor([[1, 2, 3, 4]]), PlainCache())
    other = decoder(torch.tensor([[1, 2, 3, 9]]), PlainCache())
    torch.testing.assert_close(one[:, :3], other[:, :3], atol=1e-6, rtol=0)
    assert (one[:, 3] - other[:, 3]).abs().max() > 0.1


def test_queries_stand_at_the_end_of_a_cache():
    """HAZARDS 35: q zero, v = 0..4: one query gives 2.0, two give [1.5, 2.0] (top-left masks give 0.0, [0.0, 0.5])."""
    v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 2).contiguous()
    k = torch.randn(1, 1, 5, 2, generator=torch.Generator().manual_seed(0))
    assert attention(torch.zeros(1, 1, 1, 2), k, v)[0, 0, :, 0].tolist() == pytest.approx([2.0])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)[None, None]
    assert attention(torch.zeros(1, 1, 2, 2), k, v, mask)[0, 0, :, 0].tolist() == pytest.approx([1.5, 2.0])


def test_cache_of_the_tests_masks_the_same_way():
    """HAZARDS 35 through the protocol: 3 tokens held, 2 new."""
    cache = PlainCache()
    for new in (3, 2):
        cache.begin(new)
        start = cache.length
        v = torch.arange(float(start), start + new).view(1, 1, new, 1).expand(1, 1, new, 2)
        out = cache.attend(0, torch.zeros(1, 1, new, 2), torch.zeros(1, 1, new, 2), v)
        cache.advance(new)
    assert out[0, 0, :, 0].tolist() == pytest.approx([1.5, 2.0])


def test_many_queries_over_more_keys_need_a_mask():
    """HAZARDS 35: without a mask, is_causal would hide the wrong half; it is an error that says so."""
    with pytest.raises(ValueError, match="2 queries over 5 keys need a mask"):
        attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 4))
    with pytest.raises(ValueError, match="5 queries over 3 keys need a mask"):
        attention(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))


def by_hand(q, k, v, mask):
    """Attention as the textbook writes it, keys repeated for the heads that share them."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("new", "total", "masked"), [(1, 7, False), (1, 7, True), (7, 7, False), (3, 7, True), (1, 1, False)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_the_textbook(new, total, masked, heads, kv_heads):
    """Grouped heads share keys in order; also with a mask that differs from row to row."""
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, new, 8, generator=g)
    k, v = (torch.randn(2, kv_heads, total, 8, generator=g) for _ in range(2))
    causal = torch.ones(new, total, dtype=torch.bool).tril(total - new)[None, None].expand(2, 1, new, total)
    mask = None
    if masked:
        mask = causal.clone()
        mask[1, :, :, :2] = False  # the second row may not see its first two tokens
        causal = mask
    torch.testing.assert_close(attention(q, k, v, mask), by_hand(q, k, v, causal), atol=1e-5, rtol=0)


def check_fully_masked_rows(device, dtype):
    g = torch.Generator().manual_seed(2)
    for heads, new in ((2, 3), (4, 3), (4, 1)):
        q = torch.randn(2, heads, new, 8, generator=g).to(device, dtype)
        k, v = (torch.randn(2, 2, 3, 8, generator=g).to(device, dtype) for _ in range(2))
        mask = torch.ones(new, 3, dtype=torch.bool).tril(3 - new).expand(2, 1, new, 3).clone().to(device)
        expected = attention(q, k, v, mask)
        mask[0, 0, 0] = False  # a padded query that may look nowhere
        out = attention(q, k, v, mask)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[1], expected[1], atol=1e-3 if dtype == torch.float16 else 1e-6, rtol=0)


def test_fully_masked_rows_are_finite():
    """HAZARDS 70: a query that may look nowhere gives a finite value and leaves the other rows alone."""
    check_fully_masked_rows("cpu", torch.float32)


class RaggedCache(PlainCache):
    """Rows of different lengths, padded on the left: positions and mask differ from row to row."""

    def __init__(self, pads) -> None:
        super().__init__()
        self.pads = torch.tensor(pads)

    def positions(self, new):
        places = torch.arange(self.length, self.length + new)[None] - self.pads[:, None]
        return places.clamp(min=0)

    def mask(self, new):
        total = self.length + new
        causal = torch.ones(new, total, dtype=torch.bool).tril(self.length)
        real = torch.arange(total)[None] >= self.pads[:, None]
        return causal[None, None] & real[:, None, None, :]


@torch.inference_mode()
def test_rows_of_different_lengths_equal_single_runs():
    """HAZARDS 64 and 70: positions per row come from the cache; padded rows equal the same rows alone."""
    decoder = tiny_decoder()
    cache = RaggedCache([2, 0])
    assert cache.positions(5).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    x = torch.tensor([[0, 0, 7, 8, 9], [1, 2, 3, 4, 5]])
    first, step = decoder(x, cache), torch.tensor([[10], [11]])
    assert cache.positions(1).tolist() == [[3], [5]]
    second = decoder(step, cache)
    assert torch.isfinite(first).all()
    for row, pads in enumerate((2, 0)):
        alone = decoder(torch.cat((x[row, pads:], step[row]))[None])
        torch.testing.assert_close(first[row, pads:], alone[0, :-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(second[row], alone[0, -1:], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_rows_do_not_touch_each_other():
    """HAZARDS 71: a row of a batch equals the row alone (float32, 1e-4), also step by step."""
    decoder, x = tiny_decoder(), tokens(rows=3, new=12)
    together = stepwise(decoder, x, [9, 1, 1, 1])
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], decoder(x[row : row + 1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotary_frequencies_equal_transformers(scaling, head_dim):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 500_000.0}
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": head_dim}, rope_parameters=rope)
    if scaling:
        expected, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    else:
        expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    ours = rotary_frequencies(tiny_config(head_dim=head_dim, rope_theta=500_000.0, rope_scaling=scaling))
    assert ours.dtype == torch.float32 and ours.shape == (head_dim // 2,)
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)


def test_frequencies_stay_exact_in_every_dtype():
    """bfloat16 frequencies would be off by 20 degrees after 800 tokens."""
    decoder = tiny_decoder(head_dim=64)
    exact = decoder.frequencies.clone()
    decoder.to(torch.bfloat16)
    assert decoder.dtype == torch.bfloat16 and torch.equal(decoder.frequencies, exact)
    cos, sin = decoder.angles(torch.tensor([[0, 800]]))
    assert cos.shape == sin.shape == (1, 1, 2, 64) and cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos[0, 0, 1, :32].float(), (800 * exact).cos(), atol=4e-3, rtol=0)


@torch.inference_mode()
def test_logits_to_keep_has_three_meanings():
    """0: all; n: the last n; a 1-D tensor: those places. Logits are float32 in every dtype."""
    decoder, x = tiny_decoder(), tokens(new=9)
    whole = decoder(x)
    assert whole.shape == (2, 9, 97)
    torch.testing.assert_close(decoder(x, logits_to_keep=1), whole[:, -1:], atol=1e-5, rtol=0)
    torch.testing.assert_close(decoder(x, logits_to_keep=4), whole[:, -4:], atol=1e-5, rtol=0)
    places = torch.tensor([5, 0, 7])
    torch.testing.assert_close(decoder(x, logits_to_keep=places), whole[:, places], atol=1e-5, rtol=0)
    torch.testing.assert_close(decoder.head(decoder.hidden(x)), whole, atol=1e-5, rtol=0)
    assert decoder.hidden(x).shape == (2, 9, 32)
    assert copy.deepcopy(decoder).to(torch.bfloat16)(x).dtype == torch.float32


@pytest.mark.parametrize("shape", [(3,), (2, 0), (1, 2, 3)])
def test_tokens_must_be_a_table(shape):
    with pytest.raises(ValueError, match=r"\(rows, new\).*got shape"):
        tiny_decoder()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 is not a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
    ],
)
def test_config_names_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_parameters_counts_a_shared_tensor_once():
    tied, untied = tiny_decoder(), tiny_decoder(tie_embeddings=False)
    assert tied.lm_head.weight is tied.embedding.weight
    assert untied.lm_head.weight is not untied.embedding.weight
    by_hand = 97 * 32 + 2 * (32 * (4 + 2 * 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert tied.num_parameters() == by_hand
    assert untied.num_parameters() == by_hand + 97 * 32


def test_a_cache_says_which_method_it_lacks():
    for call, name in (
        (lambda c: c.positions(1), "positions"),
        (lambda c: c.mask(1), "mask"),
        (lambda c: c.update(0, None, None), "update"),
    ):
        with pytest.raises(NotImplementedError, match=f"Cache must define {name}"):
            call(Cache())


@torch.inference_mode()
def test_cache_is_told_in_order_and_settles_before_it_grows():
    """DESIGN 2: begin (which settles) -> attend once a layer -> advance once; nothing is destroyed in advance."""
    said = []

    class Watched(PlainCache):
        def settle(self):
            said.append("settle")

        def positions(self, new):
            said.append(f"positions {new}")
            return super().positions(new)

        def update(self, layer, k, v):
            said.append(f"layer {layer}")
            assert k.shape == v.shape == (1, 2, 3, 8)  # KV heads, not query heads (HAZARDS 37)
            return super().update(layer, k, v)

        def advance(self, new):
            said.append(f"advance {new}")
            super().advance(new)

    tiny_decoder()(torch.tensor([[1, 2, 3]]), Watched())
    assert said == ["settle", "positions 3", "layer 0", "layer 1", "advance 3"]


def test_decoder_config_of_the_real_model_holds_as_many_parameters():
    """Sizes from the published config; the count is the catalog's."""
    config = DecoderConfig(49152, 576, 1536, 30, 9, 3, 64, rope_theta=100_000.0)
    layer = 576 * (9 + 2 * 3) * 64 + 9 * 64 * 576 + 3 * 576 * 1536 + 2 * 576
    assert config.vocab_size * 576 + 30 * layer + 576 == 134_515_008


# --- the real checkpoint ---------------------------------------------------------------------------------------------

TEXT = "The capital of France is Paris. def add(a, b):\n    return a + b  # 12 + 30 = 42\nWhat is a KV cache?"


@pytest.mark.slow
@torch.inference_mode()
def test_real_checkpoint_equals_transformers(real_model):
    decoder, tokenizer = real_model
    assert decoder.num_parameters() == 134_515_008
    x = torch.tensor([tokenizer.encode(TEXT)])
    model = transformers_model(decoder)
    expected = model(x).logits
    torch.testing.assert_close(decoder(x), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(stepwise(decoder, x, [x.shape[1] - 6] + [1] * 6), expected, atol=1e-4, rtol=0)


# --- the same on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@torch.inference_mode()
def test_gpu_logits_equal_cpu(pair):
    """float32 on CUDA (no TF32) against transformers on the CPU, whole and step by step."""
    model, decoder = pair
    decoder, x = copy.deepcopy(decoder).cuda(), tokens()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        expected = model(x).logits
        torch.testing.assert_close(decoder(x.cuda()).cpu(), expected, atol=1e-4, rtol=0)
        for chunks in ([39, 1], [1] * 40, [5, 7, 28]):
            torch.testing.assert_close(stepwise(decoder, x.cuda(), chunks).cpu(), expected, atol=1e-4, rtol=0)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.gpu
def test_gpu_fully_masked_rows_are_finite():
    """HAZARDS 70 on CUDA, float32 and float16."""
    check_fully_masked_rows("cuda", torch.float32)
    check_fully_masked_rows("cuda", torch.float16)


@pytest.mark.gpu
@pytest.mark.slow
@torch.inference_mode()
def test_gpu_real_checkpoint_equals_cpu(real_model):
    decoder, tokenizer = real_model
    x = torch.tensor([tokenizer.encode(TEXT)])
    on_gpu = copy.deepcopy(decoder).cuda()
    torch.testing.assert_close(on_gpu(x.cuda()).cpu(), decoder(x), atol=1e-3, rtol=0)
