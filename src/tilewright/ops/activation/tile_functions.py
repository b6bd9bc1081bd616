"""The activation functions in the tile language and their derivatives: what `functions` is in torch."""

from __future__ import annotations

from typing import Any

from tilewright.ops.activation.functions import CUBIC, DENSITY, FLAT, LOG2E, TAIL, TAIL_STEP, TWICE_ROOT

NEAR = (0.3989422794692572, -0.06649029684310648, 0.009972365569566264, -0.0011813320428796599, 1.0298218143898555e-4)
WITHIN = 0.75
"""NEAR is (normal(g) - 1/2) / g by rising powers of g^2, up to |g| = WITHIN: interpolation at Chebyshev's nodes, off by
3e-9 of the distribution."""


def logistics(t: Any, z: Any, accuracy: str) -> tuple[Any, Any]:
    """(s(z), s(-z)) of one exponential and one quotient; neither cancels."""
    far = t.sigmoid(-t.abs(z), accuracy)
    near = 1.0 - far
    return t.where(z < 0.0, far, near), t.where(z < 0.0, near, far)


def inner(t: Any, g: Any) -> Any:
    """z with (1 + tanh(z / 2)) / 2 = s(z)."""
    return TWICE_ROOT * g * t.fma(g * g, CUBIC, 1.0)


def normal(t: Any, g: Any, accuracy: str) -> tuple[Any, Any]:
    """The normal distribution at g, and exp(-g^2 / 2). Neither tail cancels, as 1 + erf does; but about 0 terms of
    theirs do, and an odd series is the exacter one."""
    r = t.reciprocal(t.fma(t.abs(g), TAIL_STEP, 1.0), accuracy)
    ratio = t.fma(r, TAIL[-1], TAIL[-2])
    for coefficient in reversed(TAIL[:-2]):
        ratio = t.fma(ratio, r, coefficient)
    bell = t.exp2((-0.5 * LOG2E) * (g * g), accuracy)
    tail = ratio * bell
    found = t.where(g < 0.0, tail, 1.0 - tail)
    if accuracy == "exact":
        slope = t.fma(g * g, NEAR[-1], NEAR[-2])
        for coefficient in reversed(NEAR[:-2]):
            slope = t.fma(slope, g * g, coefficient)
        found = t.where(t.abs(g) < WITHIN, t.fma(g, slope, 0.5), found)
    return found, bell


def act(t: Any, kind: str, g: Any, accuracy: str) -> Any:
    """act(g) in float32. A product with s, not a quotient: minus infinity times 0 is NaN, as the contract has it."""
    if kind in ("relu", "relu2"):
        return t.where(g < 0.0, 0.0, g if kind == "relu" else g * g)  # NaN is not below zero, and stays
    if kind == "silu":
        return g * t.sigmoid(g, accuracy)
    if kind == "gelu_tanh":
        return g * t.sigmoid(inner(t, g), accuracy)
    return g * normal(t, g, accuracy)[0]


def act_and_slope(t: Any, kind: str, g: Any, accuracy: str) -> tuple[Any, Any]:
    """act(g) and act'(g), for what they share."""
    if kind == "silu":
        s, rest = logistics(t, g, accuracy)
        return g * s, s * (1.0 + g * rest)
    if kind == "gelu_tanh":
        s, rest = logistics(t, inner(t, g), accuracy)
        square = t.minimum(g * g, FLAT * FLAT)  # else infinity times 0, of a finite g
        slope = TWICE_ROOT * t.fma(square, 3.0 * CUBIC, 1.0)
        return g * s, s + g * (s * rest * slope)
    below, bell = normal(t, g, accuracy)
    return g * below, below + g * (DENSITY * bell)


def chain(t: Any, kind: str, upstream: Any, g: Any, accuracy: str) -> Any:
    """upstream * act'(g). What a rectifier holds back is 0 whatever comes from above."""
    if kind in ("relu", "relu2"):
        return t.where(g <= 0.0, 0.0, upstream if kind == "relu" else upstream * (2.0 * g))
    return upstream * act_and_slope(t, kind, g, accuracy)[1]
