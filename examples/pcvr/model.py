"""A small conversion-rate model: embedding bags, a few norm + SwiGLU + dropout-residual blocks, one logit.

The model is written once, against a table of functions. `Torch` serves them with torch's own, `Tilewright` with ours;
parameters, data and, if wanted, dropout masks are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw

EPS = 1e-6


@dataclass(frozen=True)
class Functions:
    """What the model computes with. `bag(table, ids, sparse)`: whether the table's gradient is sparse.
    `dropout_add(x, residual, p, seed, offset)`: seed and offset are int64[1]."""

    bag: Callable[[Tensor, Tensor, bool], Tensor]
    norm: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor]
    dropout_add: Callable[..., Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _our_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return tw.swiglu(gate, up)


TORCH = Functions(
    bag=lambda table, ids, sparse: F.embedding_bag(ids, table, mode="mean", padding_idx=0, sparse=sparse),
    norm=lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    gate=_torch_gate,
    dropout_add=lambda x, residual, p, seed, offset: residual + F.dropout(x, p),
    loss=lambda x, y, p: F.binary_cross_entropy_with_logits(x, y, pos_weight=p),
)
SAME_MASKS = replace(
    TORCH,
    dropout_add=lambda x, residual, p, seed, offset: tw.dropout_add(
        x, residual, p=p, seed=seed, offset=offset, backend="reference"
    ),
)
"""Torch's functions with the masks of `tw.dropout_add`, drawn by its definition: slow, and equal in every element."""
TILEWRIGHT = Functions(
    bag=lambda table, ids, sparse: tw.embedding_bag_mean(table, ids, padding_idx=0, sparse_grad=sparse),
    norm=lambda x, w: tw.rms_norm(x, w, eps=EPS),
    gate=_our_gate,
    dropout_add=lambda x, residual, p, seed, offset: tw.dropout_add(x, residual, p=p, seed=seed, offset=offset),
    loss=lambda x, y, p: tw.bce_with_logits(x, y, None, p),
)


class Block(nn.Module):
    """x + dropout(down(swiglu(up(norm(x)))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, f: Functions, p: float, seed: Tensor, offset: Tensor) -> Tensor:
        z = self.down(f.gate(self.up(f.norm(x, self.norm))))
        return f.dropout_add(z, x, p, seed, offset)


class Model(nn.Module):
    """One table of embeddings a field, concatenated, mixed into `width`, `depth` blocks, a logit."""

    def __init__(self, fields: int, ids: int, width: int, depth: int, p: float, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(0.05 * torch.randn(ids, width)) for _ in range(fields)])
        self.mix = nn.Linear(fields * width, width)
        self.blocks = nn.ModuleList([Block(width, 4 * width) for _ in range(depth)])
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 1)
        self.p, self.sparse = p, sparse

    def forward(self, ids: Tensor, f: Functions, seed: Tensor, step: int) -> Tensor:
        # without a name for the bags, which nothing needs once they are joined
        x = self.mix(torch.cat([f.bag(t, bag, self.sparse) for t, bag in zip(self.tables, ids, strict=True)], -1))
        for number, block in enumerate(self.blocks):
            used = -(-x.shape[-1] // 4)  # offsets that one call consumes
            offset = torch.full((1,), (step * len(self.blocks) + number) * used, dtype=torch.int64, device=x.device)
            x = block(x, f, self.p, seed, offset)
        return self.head(f.norm(x, self.norm))
