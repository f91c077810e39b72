"""The definitions that chapter 2 exports: every cache equals the plain model, and every length is absolute."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from course_utils.chapters.kv_cache import (
    CausalCache,
    KVCache,
    StaticKVCache,
    kv_bytes,
    reuse_prefix,
    step_work,
    tokens_until_equal,
)
from course_utils.decoder import Decoder, DecoderConfig
from course_utils.evaluation import greedy_choices
from course_utils.generation import generate

SMOLLM = DecoderConfig(49152, 576, 1536, 30, 9, 3, 64, tie_embeddings=True)


def grow(config, rows=1, device=None, dtype=None):
    return KVCache(config, rows, device, dtype)


def static(config, rows=1, device=None, dtype=None):
    return StaticKVCache(config, 24, rows, device, dtype)


@pytest.fixture
def tiny(tiny_decoder):
    return tiny_decoder()


@pytest.fixture(params=[grow, static], ids=["growing", "static"])
def make(request):
    return request.param


def tokens_of(decoder, *shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, decoder.config.vocab_size, shape, generator=generator).to(decoder.device)


@torch.inference_mode()
def fed(decoder, cache, tokens, *pieces):
    """Logits of all tokens, fed in pieces of these sizes."""
    return torch.cat([decoder(piece, cache) for piece in tokens.split(pieces, dim=1)], dim=1)


# --- equality with the plain model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 7), (5, 1, 1, 5), (1, 11)])
@pytest.mark.parametrize("rows", [1, 3])
def test_any_split_gives_the_plain_logits(tiny, make, pieces, rows):
    """HAZARDS 34, 35, 36: positions advance, the mask is aligned lower right, nobody sees the future."""
    tokens = tokens_of(tiny, rows, 12)
    with torch.inference_mode():
        plain = tiny(tokens)
    cache = make(tiny.config, rows)
    cached = fed(tiny, cache, tokens, *pieces)
    assert cache.length == 12
    torch.testing.assert_close(cached, plain, atol=1e-4, rtol=0)
    assert torch.equal(cached.argmax(-1), plain.argmax(-1))


def test_prefill_does_not_see_the_future(tiny, make):
    """HAZARDS 34: [1,2,3,4] and [1,2,3,9] give the same logits at places 0 to 2."""
    one, other = (fed(tiny, make(tiny.config), torch.tensor([t]), 4) for t in ([1, 2, 3, 4], [1, 2, 3, 9]))
    torch.testing.assert_close(one[:, :3], other[:, :3], atol=1e-6, rtol=0)
    assert not torch.allclose(one[:, 3], other[:, 3], atol=1e-3)


def test_positions_and_mask():
    """HAZARDS 35: after 3 tokens, 2 new ones stand at 3 and 4 and see rows 11110 and 11111."""
    cache = CausalCache(rows=2)
    assert cache.mask(4) is None and cache.positions(4).tolist() == [[0, 1, 2, 3]] * 2
    cache.length = 3
    assert cache.positions(2).tolist() == [[3, 4]] * 2 and cache.positions(2).dtype == torch.int64
    assert cache.mask(2).int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
    assert cache.mask(1) is None


@pytest.mark.parametrize("queries, wanted", [(1, [2.0]), (2, [1.5, 2.0])])
def test_attention_golden_values(make, queries, wanted):
    """HAZARDS 35: q = 0 and v = [0, 1, 2, 3, 4]; the top-left fault gives 0.0 and [0.0, 0.5]."""
    config = DecoderConfig(8, 4, 4, 1, 2, 1, 2)
    cache = make(config)
    v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 2)
    held = 5 - queries
    cache.begin(held)
    cache.attend(0, torch.zeros(1, 2, held, 2), torch.zeros(1, 1, held, 2), v[:, :, :held])
    cache.advance(held)
    cache.begin(queries)
    out = cache.attend(0, torch.zeros(1, 2, queries, 2), torch.zeros(1, 1, queries, 2), v[:, :, held:])
    for head in out[0]:
        torch.testing.assert_close(head[:, 0], torch.tensor(wanted))


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_heads(heads, kv_heads, make):
    torch.manual_seed(0)
    config = DecoderConfig(64, 32, 48, 2, heads, kv_heads, 8)
    decoder = Decoder(config).eval().requires_grad_(False)
    tokens = tokens_of(decoder, 1, 10)
    cache = make(config)
    torch.testing.assert_close(fed(decoder, cache, tokens, 6, 1, 3), decoder(tokens), atol=1e-4, rtol=0)
    assert cache.keys[0].shape[1] == kv_heads


@pytest.mark.slow
def test_the_real_model_writes_the_same_text(real_model, make_real):
    decoder, tokenizer = real_model
    prompt = tokenizer.chat("Name three rivers.")
    new = generate(decoder, prompt, 48, cache=make_real(decoder, len(prompt) + 48))
    assert new == greedy_choices(decoder, prompt, new)[0]


@pytest.fixture(params=["growing", "static"])
def make_real(request):
    if request.param == "growing":
        return lambda decoder, room: KVCache(decoder.config)
    return lambda decoder, room: StaticKVCache(decoder.config, room)


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 7)])
def test_equal_on_cuda(tiny, make, pieces):
    decoder = tiny.to("cuda")
    tokens = tokens_of(decoder, 2, 12)
    cached = fed(decoder, make(decoder.config, 2, "cuda"), tokens, *pieces)
    torch.testing.assert_close(cached, decoder(tokens), atol=1e-4, rtol=0)


# --- rewinding, keeping, forking -------------------------------------------------------------------------------------


def test_truncate_and_decode_again(tiny, make):
    """HAZARDS 39, 41: back to 7 of 10, decode three again: equals the first time and a fresh cache."""
    tokens = tokens_of(tiny, 1, 10)
    cache = make(tiny.config)
    first = fed(tiny, cache, tokens, 7, 1, 1, 1)
    cache.truncate(10)
    assert cache.length == 10  # "−0" must not empty it
    cache.truncate(7)
    again = fed(tiny, cache, tokens[:, 7:], 1, 1, 1)
    assert cache.length == 10 and torch.equal(again, first[:, 7:])
    other = tokens_of(tiny, 1, 3, seed=9)
    cache.truncate(7)
    branch = fed(tiny, cache, other, 1, 1, 1)
    with torch.inference_mode():
        plain = tiny(torch.cat((tokens[:, :7], other), dim=1))[:, 7:]
    torch.testing.assert_close(branch, plain, atol=1e-4, rtol=0)


def test_a_whole_forward_can_be_taken_back(tiny, make):
    tokens = tokens_of(tiny, 1, 9)
    cache = make(tiny.config)
    fed(tiny, cache, tokens, 4)[:, :4] if False else fed(tiny, cache, tokens[:, :4], 4)
    before = [k[:, :, :4].clone() for k in cache.keys + cache.values]
    fed(tiny, cache, tokens[:, 4:], 5)
    cache.truncate(4)
    after = [k[:, :, :4] for k in cache.keys + cache.values]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_interrupted_forward_leaves_no_trace(tiny, make):
    """A forward that breaks off after the first layers has written keys; the length has not moved, so they are dropped."""
    tokens = tokens_of(tiny, 1, 6)
    cache = make(tiny.config)
    fed(tiny, cache, tokens[:, :4], 4)
    cache.begin(2)
    noise = torch.randn(1, tiny.config.num_kv_heads, 2, tiny.config.head_dim)
    with torch.inference_mode():
        cache.update(0, noise, noise)
    rest = fed(tiny, cache, tokens[:, 4:], 2)
    with torch.inference_mode():
        torch.testing.assert_close(rest, tiny(tokens)[:, 4:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [-1, 11])
def test_truncate_refuses_what_is_not_there(tiny, make, length):
    cache = make(tiny.config)
    fed(tiny, cache, tokens_of(tiny, 1, 10), 10)
    with pytest.raises(ValueError, match=f"{length}.*10"):
        cache.truncate(length)
    assert cache.length == 10


def test_keep_a_path_of_a_tree(tiny, make):
    """Two drafts for one place, fed side by side; keeping the second's path equals having fed it alone."""
    tokens = tokens_of(tiny, 1, 6)
    cache = make(tiny.config)
    fed(tiny, cache, tokens[:, :4], 4)
    parents = [4, 4]  # both new tokens stand at place 4 and see the trunk and themselves
    cache.positions = lambda new: torch.tensor([parents])
    cache.mask = lambda new: torch.tensor([[[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]]]).bool()
    fed(tiny, cache, tokens[:, 4:], 2)
    del cache.positions, cache.mask
    cache.keep([0, 1, 2, 3, 5])
    assert cache.length == 5
    last = tokens_of(tiny, 1, 1, seed=5)
    after = fed(tiny, cache, last, 1)
    straight = torch.cat((tokens[:, :4], tokens[:, 5:], last), dim=1)
    with torch.inference_mode():
        torch.testing.assert_close(after, tiny(straight)[:, -1:], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="99"):
        cache.keep([0, 99])
    assert cache.length == 6
    cache.keep([])
    assert cache.length == 0


def test_fork_shares_nothing_and_leaves_the_parent(tiny, make):
    tokens = tokens_of(tiny, 1, 5)
    cache = make(tiny.config)
    fed(tiny, cache, tokens, 5)
    before = [t.clone() for t in cache.keys + cache.values]
    roads = cache.fork(3)
    column = torch.tensor([[1], [2], [3]])
    together = fed(tiny, roads, column, 1)
    assert roads.rows == 3 and roads.length == 6 and cache.length == 5 and cache.rows == 1
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys + cache.values, strict=True))
    for row in range(3):
        alone = make(tiny.config)
        fed(tiny, alone, tokens, 5)
        solo = fed(tiny, alone, column[row : row + 1], 1)
        torch.testing.assert_close(together[row : row + 1], solo, atol=1e-5, rtol=0)
    with torch.inference_mode():
        roads.keys[0].zero_()
    assert torch.equal(before[0], cache.keys[0])


# --- a prefix used again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted, rest",
    [
        ([1, 2, 3, 4, 5], [5]),  # an extension
        ([1, 2, 3, 4], [4]),  # all held: the last is fed again
        ([1, 2], [2]),  # a shorter text
        ([1, 2, 9, 9], [9, 9]),  # parts after two
        ([7, 8], [7, 8]),  # nothing shared
    ],
)
def test_reuse_prefix(tiny, make, wanted, rest):
    held = [1, 2, 3, 4]
    cache = make(tiny.config)
    fed(tiny, cache, torch.tensor([held]), 4)
    assert reuse_prefix(cache, held, wanted) == rest
    assert cache.length == len(wanted) - len(rest)
    logits = fed(tiny, cache, torch.tensor([rest]), len(rest))[:, -1]
    with torch.inference_mode():
        torch.testing.assert_close(logits, tiny(torch.tensor([wanted]))[:, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("held, wanted", [([1, 2], [1]), ([1, 2, 3, 4, 5], [1]), ([1, 2, 3, 4], [])])
def test_reuse_prefix_refuses_a_wrong_account(tiny, make, held, wanted):
    cache = make(tiny.config)
    fed(tiny, cache, torch.tensor([[1, 2, 3, 4]]), 4)
    with pytest.raises(ValueError, match="4"):
        reuse_prefix(cache, held, wanted)
    assert cache.length == 4


# --- memory ----------------------------------------------------------------------------------------------------------


def test_kv_bytes():
    """HAZARDS 37 and FACTS 1.3: 23,040,000 for 1,000 tokens of SmolLM2-135M in 16 bit, not 69,120,000."""
    assert kv_bytes(30, 3, 64, 1000, 2) == 23_040_000
    assert kv_bytes(32, 32, 128, 4096, 2) == 2 * 2**30
    assert kv_bytes(32, 8, 128, 1, 2) == 131_072
    assert kv_bytes(32, 8, 128, 10, 2, sequences=3) == 30 * 131_072


def test_kv_bytes_is_what_the_tensors_hold(tiny):
    config = tiny.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    cache = KVCache(config, rows=2)
    fed(tiny, cache, tokens_of(tiny, 2, 9), 9)
    assert cache.nbytes == kv_bytes(*shape, 9, 4, sequences=2)
    assert StaticKVCache(config, 24, rows=2).nbytes == kv_bytes(*shape, 24, 4, sequences=2)
    half = KVCache(replace(config), dtype=torch.bfloat16)
    assert half.keys[0].dtype == torch.bfloat16 and half.nbytes == 0


def test_tokens_until_equal():
    """COURSE 4.7: Llama-2-7B, Llama-3-8B, SmolLM2-135M in float32, and eight sequences of Llama-2-7B."""
    assert tokens_until_equal(2 * 6_738_415_616, 524_288) == 25_705
    assert tokens_until_equal(2 * 8_030_261_248, 131_072) == 122_532
    assert tokens_until_equal(4 * 134_515_008, 46_080) == 11_676
    assert tokens_until_equal(2 * 6_738_415_616, 524_288, sequences=8) == 3_213


def test_static_cache_stays_where_it_is_and_refuses_more(tiny):
    cache = StaticKVCache(tiny.config, capacity=8)
    address = [t.data_ptr() for t in cache.keys + cache.values]
    fed(tiny, cache, tokens_of(tiny, 1, 6), 6)
    with pytest.raises(ValueError, match="capacity=8.*6.*3"):
        fed(tiny, cache, tokens_of(tiny, 1, 3), 3)
    assert cache.length == 6
    cache.truncate(0)
    fed(tiny, cache, tokens_of(tiny, 1, 8), 8)
    assert address == [t.data_ptr() for t in cache.keys + cache.values]


def test_nothing_outlives_the_cache(tiny):
    """HAZARDS 45: after ``del`` the tensors are gone."""
    cache = KVCache(tiny.config)
    fed(tiny, cache, tokens_of(tiny, 1, 6), 6)
    ghosts = [weakref.ref(cache), weakref.ref(cache.keys[0])]
    del cache
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]


# --- the count of work -----------------------------------------------------------------------------------------------


def test_step_work_counts_every_product():
    """Against a count over the decoder's own matrices and an explicit sum over (query, key) pairs."""
    with torch.device("meta"):
        decoder = Decoder(SMOLLM)
    blocks = sum(w.numel() for w in decoder.blocks.parameters() if w.ndim == 2)
    head = decoder.lm_head.weight.numel()
    for new, context in ((1, 1), (1, 64), (64, 64), (5, 12)):
        work = step_work(SMOLLM, new, context)
        assert work["linear"] == 2 * new * blocks + 2 * head
        pairs = sum(place + 1 for place in range(context - new, context))
        assert work["attention"] == 4 * 30 * 9 * 64 * pairs
