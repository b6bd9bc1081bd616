"""Attention by SiLU and its gradient, in plain torch, and how far a right kernel may be from it: what the dense and the
jagged op share.

Tensors are [B, S, H, D]. `seen` is True where a pair counts (None: everywhere), `factor` multiplies weights (of the
mask, of dropout, of each query; it broadcasts to [B, H, Sq, Sk]), `scale` scores. All is in the accumulation dtype.
What is not seen is selected away: SiLU of -Inf is NaN, and so is 0 times NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = (
    "once, at the output; a kernel may round P to the dtype of v for its product, in half precision: an ulp of each "
    "term is then allowed"
)
ROUNDING_BACKWARD = (
    "each output once; a kernel may round P and dX for their products, in half precision: an ulp of each term is then "
    "allowed"
)
STEEPEST, MOST_BENT = 1.1, 0.5
"""The largest slope of SiLU, and the largest of its slope."""
STEPS = 4.0
"""Roundings of float32 in SiLU and in its slope."""

Scales = dict[str, Tensor]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """[B, H, Sa, Sb] of a [B, Sa, H, D] and b [B, Sb, H, D]."""
    return torch.einsum("bihd,bjhd->bhij", a, b)


def _weighted(p: Tensor, b: Tensor) -> Tensor:
    """[B, Sa, H, D]: sums over b [B, Sb, H, D] with weights p [B, H, Sa, Sb]."""
    return torch.einsum("bhij,bjhd->bihd", p, b)


def _gathered(p: Tensor, a: Tensor) -> Tensor:
    """[B, Sb, H, D]: sums over a [B, Sa, H, D]."""
    return torch.einsum("bhij,bihd->bjhd", p, a)


def _select(seen: Tensor | None, values: Tensor) -> Tensor:
    return values if seen is None else torch.where(seen, values, 0.0)


def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, factor: Tensor | float, scale: float) -> Tensor:
    """o [B, Sq, H, Dv], unrounded."""
    x = _products(q, k) * scale
    return _weighted(_select(seen, x * torch.sigmoid(x) * factor), v)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, factor: Tensor | float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), unrounded."""
    x = _products(q, k) * scale
    s = torch.sigmoid(x)
    p = _select(seen, x * s * factor)
    dx = _select(seen, _products(do, v) * factor * (s * (1.0 + x * torch.sigmoid(-x))) * scale)
    return _weighted(dx, k), _gathered(dx, q), _gathered(p, do)


def scales(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, factor: Tensor | float, scale: float
) -> tuple[Scales, Scales]:
    """(A, what may be rounded) of o. An error of a score is one of its weight, as steep as SiLU is."""
    x = _products(q, k) * scale
    terms = _products(q.abs(), k.abs()) * abs(scale)
    p = _select(seen, x * torch.sigmoid(x) * factor)
    error = _select(seen, terms * factor).abs() * STEEPEST + p.abs() * STEPS
    o = {"o": _weighted(error, v.abs())}
    return _finite(o), _finite({"o": _weighted(p.square(), v.square()).sqrt()})


def scales_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, factor: Tensor | float, scale: float
) -> tuple[Scales, Scales]:
    """(A, what may be rounded) of dq, dk and dv."""
    x = _products(q, k) * scale
    terms = _products(q.abs(), k.abs()) * abs(scale)
    s = torch.sigmoid(x)
    p = _select(seen, x * s * factor)
    inner, dp = _products(do.abs(), v.abs()), _products(do, v)
    dx = _select(seen, dp * factor * (s * (1.0 + x * torch.sigmoid(-x))) * scale)
    error = (inner * (STEEPEST + STEPS) + dp.abs() * terms * MOST_BENT) * abs(scale)
    error = _select(seen, error * factor).abs()
    of_p = _select(seen, terms * factor).abs() * STEEPEST + p.abs() * STEPS
    a = {"dq": _weighted(error, k.abs()), "dk": _gathered(error, q.abs()), "dv": _gathered(of_p, do.abs())}
    rounded = {
        "dq": _weighted(dx.square(), k.square()).sqrt(),
        "dk": _gathered(dx.square(), q.square()).sqrt(),
        "dv": _gathered(p.square(), do.square()).sqrt(),
    }
    return _finite(a), _finite(rounded)


def _finite(found: Scales) -> Scales:
    return {n: torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0) for n, t in found.items()}
