"""A decoder in the manner of Llama on tilewright's ops, with random weights, and the same by torch's functions.

Parameters are a function of a seed. Buffers are owned once: a step allocates nothing that outlives it, and everything
that changes from step to step (tokens, positions, lengths, the random offset) is a tensor on the device, so that one
captured step serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    layers: int = 8
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 2816
    vocab: int = 32000
    rows: int = 2048
    """The longest sequence: rows of the caches."""
    batch: int = 4


@dataclass
class Layer:
    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class State:
    """What a generation owns: caches, and where each sequence is."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        shape = (sizes.layers, sizes.batch, sizes.rows, sizes.kv_heads, sizes.head_dim)
        self.k = torch.full(shape, torch.nan, dtype=dtype, device=device)  # rows are written before they are read
        self.v = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.length = torch.zeros(sizes.batch, dtype=torch.int32, device=device)
        """Rows of the caches that are filled: the next token's position."""
        self.tokens = torch.zeros(sizes.batch, sizes.rows + 1, dtype=torch.int32, device=device)
        """The text: prompts, then what was drawn."""
        self.seed = torch.full((1,), seed, dtype=torch.int64, device=device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)


class Decoder:
    def __init__(self, sizes: Sizes, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> Tensor:
            made = torch.randn(rows, columns, generator=generator) * columns**-0.5
            return made.to(device, dtype)

        def ones() -> Tensor:
            return torch.ones(sizes.width, dtype=dtype, device=device)

        inner, both = sizes.heads * sizes.head_dim, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.embedding = drawn(sizes.vocab, sizes.width) * sizes.width**0.5
        self.layers = [
            Layer(
                ones(), drawn(both, sizes.width), drawn(sizes.width, inner),
                ones(), drawn(2 * sizes.hidden, sizes.width), drawn(sizes.width, sizes.hidden),
            )
            for _ in range(sizes.layers)
        ]  # fmt: skip
        self.norm, self.head = ones(), drawn(sizes.vocab, sizes.width)
        frequencies = 10000.0 ** (-torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim)
        angles = torch.arange(sizes.rows, dtype=torch.float64)[:, None] * frequencies
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def logits(self, tokens: Tensor, state: State) -> Tensor:
        """Logits [B, V] after the last of `tokens` [B, S], which stand behind what is cached. Fills their rows of the
        caches; `state.length` is the caller's to advance."""
        sizes, end = self.sizes, state.length + tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        h = tw.rms_norm(x, self.layers[0].norm, eps=EPS)
        for i, layer in enumerate(self.layers):
            q, k, v = tw.qkv_split_rope_append_(
                tw.linear(h, layer.qkv), state.k[i], state.v[i], state.length, self.cos, self.sin,
                q_heads=sizes.heads, kv_heads=sizes.kv_heads, style="half",
            )  # fmt: skip
            o = tw.attention(q, k, v, kv_len=end, causal=True, align="bottom_right")
            h, x = tw.add_rms_norm(tw.linear(o.flatten(-2), layer.out), x, layer.mlp_norm, eps=EPS)
            inner = tw.swiglu_packed(tw.linear(h, layer.gate_up), gate="first")
            after = self.layers[i + 1].norm if i + 1 < len(self.layers) else self.norm
            h, x = tw.add_rms_norm(tw.linear(inner, layer.down), x, after, eps=EPS)
        return tw.linear(h[:, -1], self.head)

    def by_torch(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] after every token of whole sequences, without a cache."""
        sizes, (batch, rows) = self.sizes, tokens.shape
        x = F.embedding(tokens, self.embedding)
        cos, sin = (t[:rows, None].to(x.dtype).repeat(1, 1, 2) for t in (self.cos, self.sin))
        for layer in self.layers:
            h = F.linear(F.rms_norm(x, (sizes.width,), layer.norm, EPS), layer.qkv).unflatten(-1, (-1, sizes.head_dim))
            q, k, v = h.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), 2)
            q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
            heads = (t.transpose(1, 2) for t in (q, k, v))
            o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            x = x + F.linear(o.transpose(1, 2).reshape(batch, rows, -1), layer.out)
            gate, up = F.linear(F.rms_norm(x, (sizes.width,), layer.mlp_norm, EPS), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x, (sizes.width,), self.norm, EPS), self.head)
