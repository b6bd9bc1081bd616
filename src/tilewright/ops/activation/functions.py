"""The activation functions of the family in torch, their derivatives, and the absolute terms that rounding works on.

Everything here takes and returns the accumulation dtype. A function is named as kernels name it: "silu", "gelu_tanh"
(the form with tanh, written with the logistic function, which equals it exactly), "gelu" (the form with erf), "relu",
"relu2" (its square) or "none". In Triton they are in `triton_functions`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CUBIC = 0.044715
TWICE_ROOT = 2.0 * math.sqrt(2.0 / math.pi)
ROOT_HALF = math.sqrt(0.5)
LOG2E = math.log2(math.e)
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
FLAT = 64.0
"""Beyond this |g| the logistic function of the tanh form is 0 or 1, also in float64. Its inner derivative is taken at
no larger g, for its square would overflow and infinity times 0 is NaN."""
UNDERFLOW = 2.0**-102
"""What stands beside s(z) among the terms: 2^-24 of it is the smallest normal number. Where the exponential of the
logistic function overflows, s(z) is 0, also in the baseline."""
APPROXIMATIONS = {"tanh": "gelu_tanh", "none": "gelu"}
KINDS = ("none", "relu", "relu2", "silu", "gelu", "gelu_tanh")
TAIL = (
    -2.478846909070853e-05,
    0.10028935968875885,
    0.09432853758335114,
    0.1238306388258934,
    -0.026870032772421837,
    0.316508948802948,
    -0.34789639711380005,
    0.40582582354545593,
    -0.20079170167446136,
    0.03479960560798645,
)
TAIL_STEP = 0.25
"""How kernels compute the normal distribution below zero: exp(-a^2 / 2) q(t) at -a, with t = 1 / (1 + TAIL_STEP a), the
form of Hastings (1955). TAIL are the coefficients of q by rising powers: minimax of the relative error (Lawson's
iteration), 1.2e-8 up to a = 13, behind which float32 has no such number."""


def _inner(g: Tensor) -> Tensor:
    """z with (1 + tanh(z / 2)) / 2 = s(z)."""
    return TWICE_ROOT * g * (1.0 + CUBIC * g * g)


def _slope(g: Tensor) -> Tensor:
    """dz / dg."""
    near = g.clamp(-FLAT, FLAT)
    return TWICE_ROOT * (1.0 + 3.0 * CUBIC * near * near)


def _normal_cdf(g: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(g * ROOT_HALF))


def act(kind: str, g: Tensor) -> Tensor:
    """act(g). At -infinity silu and gelu are NaN, as in torch."""
    if kind == "none":
        return g
    if kind in ("relu", "relu2"):
        return torch.relu(g) if kind == "relu" else torch.relu(g).square()
    if kind == "silu":
        return g * torch.sigmoid(g)
    return g * torch.sigmoid(_inner(g)) if kind == "gelu_tanh" else g * _normal_cdf(g)


def derivative(kind: str, g: Tensor) -> Tensor:
    """act'(g). 1 - s(z) is s(-z), which does not cancel. At 0 relu has 0, as in torch."""
    if kind == "none":
        return torch.ones_like(g)
    if kind in ("relu", "relu2"):
        return torch.where(g <= 0.0, 0.0, torch.ones_like(g) if kind == "relu" else 2.0 * g)
    if kind == "silu":
        return torch.sigmoid(g) * (1.0 + g * torch.sigmoid(-g))
    if kind == "gelu_tanh":
        z = _inner(g)
        s = torch.sigmoid(z)
        return s + g * (s * torch.sigmoid(-z) * _slope(g))
    return _normal_cdf(g) + g * (DENSITY * torch.exp(-0.5 * g * g))


def chain(kind: str, upstream: Tensor, g: Tensor) -> Tensor:
    """upstream * act'(g). What a rectifier holds back is 0 whatever comes from above, as in torch."""
    if kind == "none":
        return upstream
    found = upstream * derivative(kind, g)
    return torch.where(g <= 0.0, 0.0, found) if kind in ("relu", "relu2") else found


def act_terms(kind: str, g: Tensor) -> Tensor:
    """The absolute terms of act(g): both of 1 + tanh or 1 + erf; of silu also what the exponential makes of the
    rounding of its argument."""
    size = g.abs()
    if kind in ("none", "relu", "relu2"):
        return act(kind, g).abs()
    if kind == "silu":
        return size * (torch.sigmoid(g) * (1.0 + size) + UNDERFLOW)
    inner = torch.tanh(_inner(g) / 2) if kind == "gelu_tanh" else torch.erf(g * ROOT_HALF)
    return 0.5 * size * (1.0 + inner.abs())


def derivative_terms(kind: str, g: Tensor) -> Tensor:
    """The absolute terms of act'(g), as `act_terms`; of silu too with the rounding of the exponential's argument. From
    |g| = 8 on the second term of a GELU is 0 in float32."""
    size = g.abs()
    if kind in ("none", "relu", "relu2"):
        return derivative(kind, g).abs()
    if kind == "silu":
        return (torch.sigmoid(g) + UNDERFLOW) * (1.0 + size).square()
    near = size.clamp(max=8.0)
    if kind == "gelu_tanh":
        t = torch.tanh(_inner(g) / 2)
        return 0.5 * (1.0 + t.abs()) + 0.25 * near * (1.0 + t * t) * _slope(near)
    density = DENSITY * torch.exp(-0.5 * g * g)
    return 0.5 * (1.0 + torch.erf(g * ROOT_HALF).abs()) + near * density * (1.0 + 0.5 * near * near)
