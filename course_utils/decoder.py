"""A decoder-only language model you can read in one sitting: Llama, Mistral, Qwen2 and Qwen3 are this program.

Shapes, in the names used all through the course: ``rows`` sequences in the batch, ``new`` tokens fed now, ``total``
tokens a query may look at, ``heads`` query heads, ``kv_heads`` heads that keys and values have, ``head_dim`` features
of one head. A :class:`Cache` is the only thing that remembers anything between two calls.

Sources: Vaswani et al. 2017 (attention), Zhang and Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary positions), Shazeer
2020 (SwiGLU), Ainslie et al. 2023 (grouped-query attention), Touvron et al. 2023 (their combination in Llama).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """The numbers that make one model of the family; every size counts features unless it says otherwise."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    # {"rope_type": "llama3", ...}: the slow rotations slowed further; {"rope_type": "linear", "factor": ...}: all
    rope_scaling: dict | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs of features")
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(f"rope_type={kind!r} is not supported; known: default, linear, llama3")


class Cache:
    """What the decoder expects of a cache: ``begin``, ``attend`` once a layer, ``advance`` (chapter 2 builds it).

    A simple cache defines three methods and inherits the rest: ``positions(new)``, ``mask(new)`` and
    ``update(layer, k, v)``. Nothing may be destroyed in ``advance``: whatever a cache evicts or rounds, it does in the
    next ``begin`` (``settle``), so that the last forward can always be taken back exactly with ``truncate``.
    """

    length = 0  # tokens held, the same in every row

    def positions(self, new: int) -> Tensor:
        """(rows, new) int64: the places in their sequences of the tokens fed now."""
        raise NotImplementedError(f"{type(self).__name__} must define positions(new)")

    def mask(self, new: int) -> Tensor | None:
        """(rows or 1, 1, new, total) bool, True where a query may look. None: a whole sequence, or one free row."""
        raise NotImplementedError(f"{type(self).__name__} must define mask(new)")

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep (rows, kv_heads, new, head_dim) keys and values; return all, (rows, kv_heads, total, head_dim)."""
        raise NotImplementedError(f"{type(self).__name__} must define update(layer, k, v)")

    def settle(self) -> None:
        """Carry out what was put off: called at the start of the next forward."""

    def begin(self, new: int) -> Tensor:
        self.settle()
        self._mask = self.mask(new)
        return self.positions(new)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.update(layer, k, v)
        return attention(q, k, v, self._mask)

    def advance(self, new: int) -> None:
        self.length += new


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of q (rows, heads, new, head_dim) over k, v (rows, kv_heads, total, head_dim) -> like q.

    mask: bool, broadcast to (rows, heads, new, total), True where a query may look. None stands for the two cases that
    need no mask: the whole sequence from its start (new == total, causal), or one query that may see everything.
    Raises ValueError for None with 1 < new < total, where torch's ``is_causal`` would hide the wrong half.
    """
    new, total = q.shape[2], k.shape[2]
    if mask is None and 1 < new != total:
        raise ValueError(
            f"{new} queries over {total} keys need a mask: only the cache knows where the queries stand"
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and new > 1, enable_gqa=q.shape[1] != k.shape[1]
    )


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """(head_dim / 2,) float32: radians a pair of features turns per token."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":  # slow pairs are slowed further, quick ones left alone, those between blended
        context = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = context * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x (rows, heads, new, head_dim) by its token's angle.

    (a, b) becomes (a·cos − b·sin, b·cos + a·sin); the minus is in the first half of ``sin`` (see Decoder.angles).
    """
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        rows, new, _ = x.shape
        # (rows, heads + 2·kv_heads, new, head_dim)
        qkv = self.qkv(x).view(rows, new, -1, self.head_dim).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(qk, cos, sin).split((self.heads, self.kv_heads), dim=1)
        attended = attention(q, k, v) if cache is None else cache.attend(self.layer, q, k, v)
        return self.out(attended.transpose(1, 2).reshape(rows, new, -1))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """The whole model. ``forward`` is ``head(hidden(tokens))``; a cache, where given, is told of every token fed.

    The embedding and the head are one tensor where ``config.tie_embeddings`` says so.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.name = ""  # whose weights these are, for labels: ``checkpoints.load`` sets it
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    def _apply(self, fn, recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        # .to(bfloat16) has rounded the frequencies too, by up to 20° after 800 tokens; they stay exact.
        self.frequencies = rotary_frequencies(self.config).to(self.frequencies.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (rows, 1, new, head_dim) in the model's dtype, computed in float32; sin is signed for rotate."""
        turned = positions[:, None, :, None].float() * self.frequencies.float()
        cos, sin = turned.cos(), turned.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(self.dtype), sin.to(self.dtype)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """(rows, new) int64 tokens -> (rows, new, hidden_size), after the last norm.

        Raises ValueError where the tokens are not a table of at least one column.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (rows, new) with new ≥ 1; got shape {tuple(tokens.shape)}")
        new = tokens.shape[1]
        if cache is None:
            positions = torch.arange(new, device=tokens.device)[None]
        else:
            positions = cache.begin(new)
        cos, sin = self.angles(positions)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, cache)
        if cache is not None:
            cache.advance(new)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """(…, hidden_size) -> (…, vocab_size) float32 logits."""
        return self.lm_head(hidden).float()

    def forward(self, tokens: Tensor, cache: Cache | None = None, logits_to_keep: int | Tensor = 0) -> Tensor:
        """Logits (rows, kept, vocab_size) float32. logits_to_keep: 0 all, n the last n, or a 1-D tensor of places."""
        hidden = self.hidden(tokens, cache)
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.head(hidden)

    def num_parameters(self) -> int:
        """Parameters, a shared tensor counted once."""
        return sum(p.numel() for p in self.parameters())
