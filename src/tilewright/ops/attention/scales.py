"""How far a right kernel may be from the definition: the sums of absolute terms of attention and of its gradient.

An error of a score is an error of its weight, relative to it. So a term of a sum over weights counts as often as the
score has absolute terms. What half-precision kernels may round on the way (the weights P and the score gradients dS,
each a factor of a product) is told apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.attention.softmax import active, gathered, products, score_gradient, weighted, weights

ROUNDING = (
    "once, at the output; a kernel may round P to the dtype of v for its product, in half precision: an ulp of each "
    "term is then allowed"
)
ROUNDING_BACKWARD = (
    "each output once; a kernel may round P and dS for their products, in half precision: an ulp of each term is then "
    "allowed"
)

Scales = dict[str, Tensor]


def _weights(q: Tensor, k: Tensor, seen: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """P, and the absolute terms of each score with those of lse and of a shift by the largest score."""
    p = weights(q, k, seen, lse, scale)
    terms = 2.0 * products(q.abs(), k.abs()) * abs(scale) + lse.abs().unsqueeze(-1) + 1.0
    return p, torch.where(seen, terms, 0.0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, seen: Tensor, keep: Tensor | None, scale: float
) -> tuple[Scales, Scales]:
    """(A, what may be rounded) of o and lse."""
    seen = active(seen, lse)
    p, terms = _weights(q, k, seen, lse, scale)
    mean = (p * terms).sum(-1, keepdim=True)
    kept = p if keep is None else p * keep
    a = {"o": weighted(kept * (terms + mean), v.abs(), seen), "lse": mean.squeeze(-1)}
    return a, {"o": weighted(kept.square(), v.square(), seen).sqrt()}


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Tensor,
    keep: Tensor | None, scale: float,
) -> tuple[Scales, Scales]:  # fmt: skip
    """(A, what may be rounded) of dq, dk and dv."""
    groups, seen = k.shape[2], active(seen, lse)
    p, terms = _weights(q, k, seen, lse, scale)
    ds = score_gradient(do, dlse, v, o, p, seen, keep, scale)
    inner = torch.zeros_like(p)
    if dlse is not None:
        inner = inner + dlse.abs().unsqueeze(-1)
    if do is not None:
        dp = products(do.abs(), v.abs())
        inner = inner + (dp if keep is None else dp * keep)
        inner = inner + (do * o).abs().sum(-1).transpose(1, 2).unsqueeze(-1)
    error = torch.where(seen, p * inner * abs(scale) + ds.abs() * terms, 0.0)
    kept = p if keep is None else p * keep
    a = {"dq": weighted(error, k.abs(), seen), "dk": gathered(error, q.abs(), groups, seen)}
    rounded = {
        "dq": weighted(ds.square(), k.square(), seen).sqrt(),
        "dk": gathered(ds.square(), q.square(), groups, seen).sqrt(),
    }
    if do is not None:
        a["dv"] = gathered(kept * terms, do.abs(), groups, seen)
        rounded["dv"] = gathered(kept.square(), do.square(), groups, seen).sqrt()
    return a, rounded
