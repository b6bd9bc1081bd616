"""The activation functions in Triton and their derivatives, in float32: what `functions` is in torch.

Families that fuse an activation into kernels of their own take them from here.
"""

import triton
import triton.language as tl

from tilewright.ops.activation.functions import LOG2E as _LOG2E
from tilewright.ops.activation.functions import TAIL as _TAIL
from tilewright.ops.activation.functions import TAIL_STEP as _TAIL_STEP

CUBIC = tl.constexpr(0.044715)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
FAR = tl.constexpr(16.0)  # from 13 on exp(-g^2 / 2) is 0 in float32
FLAT_SQUARE = tl.constexpr(4096.0)  # the square of functions.FLAT
LOG2E, HALF_LOG2E = tl.constexpr(_LOG2E), tl.constexpr(0.5 * _LOG2E)
TAIL, TAIL_STEP, DEGREE = tl.constexpr(_TAIL), tl.constexpr(_TAIL_STEP), tl.constexpr(len(_TAIL) - 1)


@triton.jit
def reciprocal(d):
    """1 / d of d from 1 to infinity, to 3 ulp in two instructions: a quotient takes seven, which scale what is out of
    range."""
    root = tl.rsqrt(d)
    return root * root


@triton.jit
def logistic(z):
    """s(z). The exponential may be infinite: its reciprocal is 0."""
    return reciprocal(1.0 + tl.exp2(-LOG2E * z))


@triton.jit
def logistics(z):
    """(s(z), s(-z)) of one exponential and one reciprocal. The exponential may be infinite: its reciprocal is 0, and
    until then the smaller of the two is as small as a float32 can be; exp(-|z|) is flushed to 0 before."""
    far = reciprocal(1.0 + tl.exp2(LOG2E * tl.abs(z)))
    near = 1.0 - far
    return tl.where(z < 0.0, far, near), tl.where(z < 0.0, near, far)


@triton.jit
def inner(g):
    return TWICE_ROOT * g * (1.0 + CUBIC * g * g)


@triton.jit
def tail_of(g):
    """(a, the normal distribution at -a, exp(-a^2 / 2)) of a = |g|, or FAR where |g| is larger."""
    a = tl.minimum(tl.abs(g), FAR)
    d = 1.0 + TAIL_STEP * a
    near = reciprocal(d)
    t = near + near * (1.0 - d * near)  # Newton's step, exact to half an ulp
    ratio = t * TAIL[DEGREE] + TAIL[DEGREE - 1]
    for i in tl.static_range(2, DEGREE + 1):
        ratio = ratio * t + TAIL[DEGREE - i]
    bell = tl.exp2(-HALF_LOG2E * (a * a))
    return a, ratio * bell, bell


@triton.jit
def gelu(g, a, tail):
    """g times the normal distribution at g. Neither tail cancels, as 1 + erf does."""
    return tl.where(g < 0.0, g * tail, g - a * tail)


@triton.jit
def activation(g, ACT: tl.constexpr):
    """act(g) in float32. A product with s, not a quotient: minus infinity times 0 is NaN, as the contract has it."""
    if ACT == "none":
        return g
    elif ACT == "relu":
        return tl.where(g < 0.0, 0.0, g)  # NaN is not below zero, and stays
    elif ACT == "relu2":
        return tl.where(g < 0.0, 0.0, g * g)
    elif ACT == "silu":
        return g * logistic(g)
    elif ACT == "gelu_tanh":
        return g * logistic(inner(g))
    else:
        a, tail, _bell = tail_of(g)
        return gelu(g, a, tail)


@triton.jit
def act_and_slope(g, ACT: tl.constexpr):
    """act(g) and act'(g), for what they share. 1 - s(z) is s(-z), which does not cancel."""
    if ACT == "none":
        return g, tl.full(g.shape, 1.0, tl.float32)
    elif ACT == "relu":
        return activation(g, ACT), tl.where(g <= 0.0, 0.0, 1.0)
    elif ACT == "relu2":
        return activation(g, ACT), tl.where(g <= 0.0, 0.0, 2.0 * g)
    elif ACT == "silu":
        s, rest = logistics(g)
        return g * s, s * (1.0 + g * rest)
    elif ACT == "gelu_tanh":
        s, rest = logistics(inner(g))
        square = tl.minimum(g * g, FLAT_SQUARE)  # else infinity times 0, of a finite g
        return g * s, s + g * (s * rest * (TWICE_ROOT * (1.0 + 3.0 * CUBIC * square)))
    else:
        a, tail, bell = tail_of(g)
        return gelu(g, a, tail), tl.where(g < 0.0, tail, 1.0 - tail) + g * (DENSITY * bell)


@triton.jit
def chain(upstream, g, ACT: tl.constexpr):
    """upstream * act'(g). What a rectifier holds back is 0 whatever comes from above."""
    if ACT == "none":
        return upstream
    elif ACT == "relu" or ACT == "relu2":
        return tl.where(g <= 0.0, 0.0, upstream * act_and_slope(g, ACT)[1])
    else:
        return upstream * act_and_slope(g, ACT)[1]
