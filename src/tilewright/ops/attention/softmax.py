"""Attention over visible keys and its gradient, in plain torch: the mathematics that dense and varlen share.

Tensors are [B, S, H, D]; `seen` is a mask of `masks.py`, `keep` (1 / (1 - p) or 0) is what dropout multiplies weights
by. Query head h reads key head h // (Hq / Hkv). Everything is in the accumulation dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.core.op import upcast
from tilewright.ops.residual.philox import random_words, threshold
from tilewright.ops.residual.philox import scale as kept_scale


def scale_of(scale: float | None, width: int) -> float:
    return 1.0 / math.sqrt(width) if scale is None else scale


def products(a: Tensor, b: Tensor) -> Tensor:
    """[B, Hq, Sa, Sb]: a [B, Sa, Hq, D] by b [B, Sb, Hkv, D]."""
    batch, rows, heads, width = a.shape
    groups = b.shape[2]
    found = torch.einsum("bigcd,bjgd->bgcij", a.reshape(batch, rows, groups, heads // groups, width), b)
    return found.reshape(batch, heads, rows, b.shape[1])


def weighted(p: Tensor, b: Tensor) -> Tensor:
    """[B, Sa, Hq, D]: sums over b [B, Sb, Hkv, D] with weights p [B, Hq, Sa, Sb]."""
    batch, heads, rows, keys = p.shape
    groups = b.shape[2]
    found = torch.einsum("bgcij,bjgd->bigcd", p.reshape(batch, groups, heads // groups, rows, keys), b)
    return found.reshape(batch, rows, heads, b.shape[3])


def gathered(p: Tensor, a: Tensor, groups: int) -> Tensor:
    """[B, Sb, Hkv, D]: sums over a [B, Sa, Hq, D], and over the heads of a group."""
    batch, heads, rows, keys = p.shape
    each = p.reshape(batch, groups, heads // groups, rows, keys)
    return torch.einsum("bgcij,bigcd->bjgd", each, a.reshape(batch, rows, groups, heads // groups, a.shape[3]))


def keep_of(state: Tensor | None, p: float, heads: int, rows: int, place: Tensor, batch: int) -> Tensor | None:
    """[B, Hq, Sq, Sk] factors of dropout: those of row (b Hq + h) Sq + i, column `place` [Sk]."""
    if p == 0.0 or state is None:
        return None
    words = random_words(batch * heads * rows, place.shape[0], state[:1], state[1:])
    keep = ((words >> 8) >= threshold(p)).reshape(batch, heads, rows, -1)
    return torch.where(keep[..., place], kept_scale(p), 0.0)


def hidden(gradient: Tensor, lengths: Tensor | int) -> Tensor:
    """0 past each length, whatever a query may hold: 0 times NaN is not 0."""
    if isinstance(lengths, int):
        return gradient
    there = torch.arange(gradient.shape[1], device=gradient.device)[None, :, None, None] < lengths
    return torch.where(there, gradient, 0.0)


def readable(tensor: Tensor, lengths: Tensor | int) -> Tensor:
    """`tensor` [B, S, H, D] in the accumulation dtype, with what lies past each length put to 0: it may be NaN."""
    if isinstance(lengths, int):
        return upcast(tensor)
    there = torch.arange(tensor.shape[1], device=tensor.device)[None, :, None, None] < lengths
    return torch.where(there, upcast(tensor), 0.0)


def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse), unrounded. Where every score is -Inf there is nothing to see: o = 0, lse = -Inf."""
    if not k.shape[1]:
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return o, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    s = torch.where(seen, products(q, k) * scale, -math.inf)
    m = s.amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    lse = (m + torch.log(total)).squeeze(-1)
    p = p / torch.where(total == 0.0, 1.0, total)
    return weighted(p if keep is None else p * keep, v), lse


def weights(q: Tensor, k: Tensor, seen: Tensor, lse: Tensor, scale: float) -> Tensor:
    """P of a forward pass, from its lse."""
    s = products(q, k) * scale - lse.unsqueeze(-1)
    return torch.where(seen & (lse.unsqueeze(-1) != -math.inf), torch.exp(s), 0.0)


def score_gradient(
    do: Tensor | None, dlse: Tensor | None, v: Tensor, o: Tensor, p: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    """dS = P (dP - delta + dlse) scale, with 0 wherever P is."""
    inner = torch.zeros_like(p[..., :1])
    if do is not None:
        inner = inner - (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)
    if dlse is not None:
        inner = inner + dlse.unsqueeze(-1)
    if do is not None:
        dp = products(do, v)
        inner = inner + (dp if keep is None else dp * keep)
    return torch.where(p == 0.0, 0.0, p * inner * scale)


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Tensor,
    keep: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), unrounded."""
    groups = k.shape[2]
    p = weights(q, k, seen, lse, scale)
    ds = score_gradient(do, dlse, v, o, p, keep, scale)
    dv = torch.zeros_like(v) if do is None else gathered(p if keep is None else p * keep, do, groups)
    return weighted(ds, k), gathered(ds, q, groups), dv
