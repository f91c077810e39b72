"""Chapter 2, KV cache. Generated from the notebooks; never edit this file.

Edit the cells tagged ``export`` and run ``make export``:

    notebooks/02_kv_cache.ipynb
"""

import copy

import torch

from course_utils.decoder import Cache, DecoderConfig
from course_utils.machine import linear_shapes


def step_work(config: DecoderConfig, fed: int, context: int) -> dict:
    """FLOPs of one forward that feeds the last `fed` of `context` tokens.

    Keys: linear (layers: every row; output matrix: one) and attention
    (a query sees the keys up to its own). Source: chapter 2, §2.2.
    """
    layers = sum(out * into * n for (out, into), n in linear_shapes(config))
    head = config.vocab_size * config.hidden_size
    pairs = fed * (2 * context - fed + 1) // 2  # (query, key)
    features = config.num_layers * config.num_heads * config.head_dim
    linear = 2 * fed * layers + 2 * head
    return {"linear": linear, "attention": 4 * features * pairs}


def predicted_seconds(machine, config, fed: int, context: int) -> float:
    """Seconds for one forward that feeds the last `fed` of `context` tokens.

    machine: Limits of course_utils.machine. Source: chapter 2, §2.2.
    """
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    per_layer = machine.attention_seconds(fed, context, *heads)
    per_layer += machine.elementwise_seconds(fed, config)
    head = [(config.vocab_size, config.hidden_size)]
    work = machine.matmul_seconds(fed, linear_shapes(config))
    work += machine.matmul_seconds(1, head) + config.num_layers * per_layer
    return machine.compose(work, config.num_layers)


class CausalCache(Cache):
    """Bookkeeping of texts that start at place 0 and have one length."""

    def __init__(self, rows=1, device=None):
        self.rows, self.device, self.length = rows, device, 0

    def positions(self, new):
        stop = self.length + new
        places = torch.arange(self.length, stop, device=self.device)
        return places.expand(self.rows, new)

    def mask(self, new):
        if new == 1 or self.length == 0:
            return None  # one row sees all; a whole text is causal anyway
        places = torch.arange(self.length + new, device=self.device)
        return (places <= places[self.length :, None])[None, None]


class KVCache(CausalCache):
    """Keys and values of every token fed; grows by concatenation.

    keys, values: per layer (rows, kv_heads, length or more, head_dim).
    """

    def __init__(self, config, rows=1, device=None, dtype=None):
        super().__init__(rows, device)
        shape = (rows, config.num_kv_heads, 0, config.head_dim)
        empty = torch.empty(shape, device=device, dtype=dtype)
        self.keys = [empty] * config.num_layers
        self.values = [empty] * config.num_layers

    def update(self, layer, k, v):
        held = slice(self.length)  # what lies behind `length` is dropped
        self.keys[layer] = torch.cat((self.keys[layer][:, :, held], k), 2)
        self.values[layer] = torch.cat((self.values[layer][:, :, held], v), 2)
        return self.keys[layer], self.values[layer]

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.keys + self.values)

    def truncate(self, length):  # the first `length` tokens stay
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}: choose 0 to {self.length}")
        self.length = length

    @torch.inference_mode()
    def keep(self, slots):  # the tokens at these places move to the front
        if not all(0 <= slot < self.length for slot in slots):
            raise ValueError(f"slots={slots}: {self.length} tokens are held")
        for held in self.keys + self.values:
            held[:, :, : len(slots)] = held[:, :, slots]
        self.length = len(slots)

    def fork(self, rows):  # one text becomes `rows` copies of it
        twin = copy.copy(self)
        twin.rows = self.rows * rows
        twin.keys = [k.repeat(rows, 1, 1, 1) for k in self.keys]
        twin.values = [v.repeat(rows, 1, 1, 1) for v in self.values]
        return twin


def kv_bytes(
    layers, kv_heads, head_dim, tokens, bytes_per_value, sequences=1
) -> int:
    """Bytes of all keys and values; the 2 counts both (chapter 2, §2.7)."""
    per_token = 2 * layers * kv_heads * head_dim * bytes_per_value
    return per_token * tokens * sequences


def tokens_until_equal(weight_bytes, bytes_per_token, sequences=1) -> int:
    """Tokens each sequence can hold before the caches outweigh the weights."""
    return weight_bytes // (bytes_per_token * sequences)


class StaticKVCache(KVCache):
    """The same promises, in buffers made once for `capacity` tokens.

    keys, values: per layer a (rows, kv_heads, capacity, head_dim) tensor.
    """

    def __init__(self, config, capacity, rows=1, device=None, dtype=None):
        super().__init__(config, rows, device, dtype)
        shape = (rows, config.num_kv_heads, capacity, config.head_dim)
        room = {"device": device, "dtype": dtype}
        self.keys = [torch.zeros(shape, **room) for _ in self.keys]
        self.values = [torch.zeros(shape, **room) for _ in self.values]
        self.capacity = capacity

    def begin(self, new):
        if self.length + new > self.capacity:
            raise ValueError(
                f"capacity={self.capacity} is too small for {self.length} held"
                f" and {new} new tokens; make it larger, or truncate first"
            )
        return super().begin(new)

    def update(self, layer, k, v):
        stop = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : stop] = k
        self.values[layer][:, :, self.length : stop] = v
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


def reuse_prefix(cache, held, tokens) -> list:
    """Cut the cache to what `held` shares with `tokens`; return the rest.

    held: the tokens the cache was fed. At least one token is returned: the
    last, where all are held. ValueError if `held` is not what it holds.
    """
    if len(held) != cache.length or not tokens:
        raise ValueError(
            f"held ({len(held)} tokens) and the cache ({cache.length}) must "
            f"agree, and tokens ({len(tokens)}) must not be empty"
        )
    limit = min(len(held), len(tokens) - 1)
    differing = (i for i in range(limit) if held[i] != tokens[i])
    shared = next(differing, limit)
    cache.truncate(shared)
    return tokens[shared:]
