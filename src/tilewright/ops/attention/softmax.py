"""Attention over visible keys and its gradient, in plain torch: the mathematics that dense and varlen share.

A pair of a query and a key that is not seen adds nothing to any sum, whatever both of them hold.

Tensors are [B, S, H, D]; `seen` is a mask of `masks.py`, `keep` (1 / (1 - p) or 0) is what dropout multiplies weights
by. Query head h reads key head h // (Hq / Hkv). Everything is in the accumulation dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.core.op import upcast
from tilewright.ops.attention import masks
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


def weighted(p: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """[B, Sa, Hq, D]: sums over b [B, Sb, Hkv, D] with weights p [B, Hq, Sa, Sb], which are 0 where not seen."""
    batch, heads, rows, _ = p.shape
    found = _over_seen("bgcij,bjgd->bigcd", p, b, b.shape[2], seen)
    return found.reshape(batch, rows, heads, b.shape[3])


def gathered(p: Tensor, a: Tensor, groups: int, seen: Tensor) -> Tensor:
    """[B, Sb, Hkv, D]: sums over a [B, Sa, Hq, D], and over the heads of a group."""
    batch, rows, heads, width = a.shape
    return _over_seen("bgcij,bigcd->bjgd", p, a.reshape(batch, rows, groups, heads // groups, width), groups, seen)


def _over_seen(equation: str, p: Tensor, x: Tensor, groups: int, seen: Tensor) -> Tensor:
    """The products of p and x, summed over pairs that are seen alone: 0 times what lies elsewhere may be NaN.

    Numbers that are not finite are put to 0 and looked for apart, NaN being Inf of both signs.
    """

    def product(weights: Tensor, values: Tensor) -> Tensor:
        return torch.einsum(equation, weights.unflatten(1, (groups, -1)), values)

    if _finite(x):
        return product(p, x)
    more, less = ((seen & ~beyond).to(p.dtype) for beyond in (p < 0.0, p > 0.0))  # 0 times Inf is both
    high, low = (((x == end) | x.isnan()).to(p.dtype) for end in (math.inf, -math.inf))
    above = product(more, high) + product(less, low) > 0.0
    below = product(more, low) + product(less, high) > 0.0
    total = product(p, torch.where(x.isfinite(), x, 0.0))
    found = total + torch.where(above, math.inf, 0.0) - torch.where(below, math.inf, 0.0)
    return torch.where(above | below, found, total)


def _finite(x: Tensor) -> bool:
    """Whether all of x is known to be finite, by its sum. To wait for that costs less than four more products; a CUDA
    graph that is captured cannot wait, and what is traced or transformed has no value."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if x.device.type == "cpu" or (x.is_cuda and not torch.cuda.is_current_stream_capturing()):
        return math.isfinite(x.detach().sum())
    return False


def read(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the accumulation dtype, with 0 in place of what nothing is seen of: autograd through a definition has
    gradients of 0 there too, and what is left is finite more often than not."""
    rows, keys = masks.used(seen, k.shape[2])
    return torch.where(rows, upcast(q), 0.0), torch.where(keys, upcast(k), 0.0), torch.where(keys, upcast(v), 0.0)


def keep_of(state: Tensor | None, p: float, heads: int, rows: int, place: Tensor, batch: int) -> Tensor | None:
    """[B, Hq, Sq, Sk] factors of dropout: those of row (b Hq + h) Sq + i, column `place` [Sk]."""
    if p == 0.0 or state is None:
        return None
    words = random_words(batch * heads * rows, place.shape[0], state[:1], state[1:])
    keep = ((words >> 8) >= threshold(p)).reshape(batch, heads, rows, -1)
    return torch.where(keep[..., place], kept_scale(p), 0.0)


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
    seen = active(seen, lse)
    p = torch.where(seen, p / total, 0.0)
    return weighted(p if keep is None else p * keep, v, seen), lse


def active(seen: Tensor, lse: Tensor) -> Tensor:
    """The pairs that count: a query whose scores are all -Inf sees nothing."""
    return seen & (lse != -math.inf).unsqueeze(-1)


def weights(q: Tensor, k: Tensor, seen: Tensor, lse: Tensor, scale: float) -> Tensor:
    """P of a forward pass, from its lse, of the pairs that are `active`. It is not above 1, whatever large scores and
    their lse were rounded to."""
    exponent = products(q, k) * scale - lse.unsqueeze(-1)
    return torch.where(seen, torch.exp(exponent.clamp(max=0.0)), 0.0)


def score_gradient(
    do: Tensor | None, dlse: Tensor | None, v: Tensor, o: Tensor, p: Tensor, seen: Tensor, keep: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """dS = P (dP - delta + dlse) scale, of the pairs that are `active`."""
    inner = torch.zeros_like(p[..., :1])
    if do is not None:
        inner = inner - (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)
    if dlse is not None:
        inner = inner + dlse.unsqueeze(-1)
    if do is not None:
        dp = products(do, v)
        inner = inner + (dp if keep is None else dp * keep)
    return torch.where(seen, p * inner * scale, 0.0)


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Tensor,
    keep: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), unrounded."""
    groups, seen = k.shape[2], active(seen, lse)
    p = weights(q, k, seen, lse, scale)
    ds = score_gradient(do, dlse, v, o, p, seen, keep, scale)
    dv = torch.zeros_like(v) if do is None else gathered(p if keep is None else p * keep, do, groups, seen)
    return weighted(ds, k, seen), gathered(ds, q, groups, seen), dv
