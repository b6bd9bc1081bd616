"""How far a right kernel may be from the definition: the sums of absolute terms of attention and of its gradient.

An error of a score is an error of its weight, relative to it. So a term of a sum over weights counts as often as the
score has absolute terms; where that is no small error, as the exponential has it, and P is not above 1. What
half-precision kernels may round on the way (the weights P and the score gradients dS, each a factor of a product) is
told apart.

fp16 tells numbers to 2^-25 of 1, and no further. So score gradients are told in a power of 2 by which the largest that
there could be, were its weight 1, is beyond 2^14: 2^-39 of that is what rounding may take. It shows in a gradient where
terms of that size would be beyond fp16, and nowhere else.
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
    "allowed, and 2^-39 of what dS could be if P were 1"
)
LEAST = 2.0**-29
"""2^-39, in ulps of fp16."""
UNIT = 2.0**-24
"""Of what A counts."""

Scales = dict[str, Tensor]


def _weights(q: Tensor, k: Tensor, seen: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """P, and the absolute terms of each score with those of lse and of a shift by the largest score: what P may be off
    by, in 2^-24 of itself. A score of -Inf has the weight 0, which is off by nothing."""
    p = weights(q, k, seen, lse, scale)
    terms = 2.0 * products(q.abs(), k.abs()) * abs(scale) + lse.abs().unsqueeze(-1) + 1.0
    terms = torch.where(terms.isfinite(), terms, 0.0)
    raised = torch.minimum(torch.expm1(terms * UNIT), 1.0 / p.clamp(min=1e-300))
    return p, torch.where(seen, torch.maximum(terms, raised / UNIT), 0.0)


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
    reach = [most * abs(scale) for most in _reach(do, dlse, v, o, seen, keep)]
    inner = torch.zeros_like(p)
    if dlse is not None:
        inner = inner + dlse.abs().unsqueeze(-1)
    if do is not None:
        dp = products(do.abs(), v.abs())
        inner = inner + (dp if keep is None else dp * keep)
        inner = inner + (do * o).abs().sum(-1).transpose(1, 2).unsqueeze(-1)
    error = torch.where(seen, p * (1.0 + terms * UNIT) * inner * abs(scale) + ds.abs() * terms, 0.0)
    kept = p if keep is None else p * keep
    a = {"dq": weighted(error, k.abs(), seen), "dk": gathered(error, q.abs(), groups, seen)}
    of_queries, of_keys = (torch.where(seen, ds.square() + (LEAST * most).square(), 0.0) for most in reach)
    rounded = {
        "dq": weighted(of_queries, k.square(), seen).sqrt(),
        "dk": gathered(of_keys, q.square(), groups, seen).sqrt(),
    }
    if do is not None:
        a["dv"] = gathered(kept * terms, do.abs(), groups, seen)
        rounded["dv"] = gathered(kept.square(), do.square(), groups, seen).sqrt()
    return a, rounded


def _reach(
    do: Tensor | None, dlse: Tensor | None, v: Tensor, o: Tensor, seen: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What dP - delta + dlse could be by the norms of do and v, of all that a query sees [B, Hq, Sq, 1], and of all
    that see a key [B, Hq, 1, Sk]. What is not finite counts for nothing."""
    most = torch.zeros(*seen.shape[:3], 1, dtype=v.dtype, device=v.device)
    if not seen.numel():
        return most, most[..., :1, :]
    if dlse is not None:
        most = most - dlse.unsqueeze(-1)
    if do is not None:
        most = most + (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)
    most = torch.nan_to_num(most, 0.0, 0.0, 0.0).abs()
    if do is not None:
        lengths = torch.nan_to_num(v.norm(dim=-1), 0.0, 0.0, 0.0).repeat_interleave(do.shape[2] // v.shape[2], 2)
        longest = torch.where(seen, lengths.transpose(1, 2).unsqueeze(2), 0.0).amax(-1, keepdim=True)
        terms = torch.nan_to_num(do.norm(dim=-1), 0.0, 0.0, 0.0).transpose(1, 2).unsqueeze(-1) * longest
        most = most + (terms if keep is None else terms * keep.max())
    groups = v.shape[2]  # query heads that read the same keys are summed
    seers = torch.where(seen, most, 0.0).unflatten(1, (groups, -1)).amax((2, 3), keepdim=True)
    return most, seers.expand(-1, -1, most.shape[1] // groups, -1, -1).flatten(1, 2)
