"""Transcendental functions as polynomials over a handful of exact operations.

Written once against `Builder`: lowering builds L1 with it, the interpreter computes with numpy. Both do the same
correctly rounded operations in the same order, so every target agrees bit for bit. After Cephes (Moshier, 1984-2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Builder = Any
"""Operations over float32 (`real`, `add`, `sub`, `mul`, `div`, `sqrt`, `fma`, `least`: a < b ? a : b, so b of a NaN,
`greatest`, `ldexp`: a * 2^n for a whole n from -152 to 130, rounded once) and int32 (`whole`, `iadd`, `isub`, `iand`,
`ior`, `shl`, `shr`); `bits` and `from_bits`; `select` by a condition that `less` or `equal` makes."""


MAGIC = 12582912.0
"""1.5 * 2^23: adding it rounds to an integer, which its last bits then hold."""
MAGIC_BITS = 0x4B400000
LOG2E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
ROOT_HALF_BITS = 0x3F3504F3


def exp(b: Builder, x: Any) -> Any:
    """e^x to about 1 ulp, denormal results included."""
    x = _clamp(b, x, -105.0, 90.0)
    shifted = b.fma(x, b.real(LOG2E), b.real(MAGIC))
    n = b.sub(shifted, b.real(MAGIC))
    r = b.fma(n, b.real(-LN2_HIGH), x)
    r = b.fma(n, b.real(-LN2_LOW), r)
    return b.ldexp(_exp_near(b, r), n)


def exp2(b: Builder, x: Any) -> Any:
    """2^x to about 1 ulp."""
    x = _clamp(b, x, -151.0, 129.0)
    shifted = b.add(x, b.real(MAGIC))
    n = b.sub(shifted, b.real(MAGIC))
    return b.ldexp(_exp_near(b, b.mul(b.sub(x, n), b.real(0.693147180559945309))), n)


def log(b: Builder, x: Any) -> Any:
    """The natural logarithm to about 1 ulp; -infinity at 0, NaN below."""
    denormal = b.less(x, b.real(2.0**-126))
    near = b.select(denormal, b.mul(x, b.real(2.0**25)), x)
    shifted = b.isub(b.bits(near), b.whole(ROOT_HALF_BITS))
    power = b.isub(b.shr(shifted, 23), b.select(denormal, b.whole(25), b.whole(0)))
    mantissa = b.from_bits(b.iadd(b.iand(shifted, b.whole(0x7FFFFF)), b.whole(ROOT_HALF_BITS)))
    e = b.sub(b.from_bits(b.iadd(power, b.whole(MAGIC_BITS))), b.real(MAGIC))
    f = b.sub(mantissa, b.real(1.0))
    square = b.mul(f, f)
    y = b.mul(b.mul(_horner(b, LOG, f), f), square)
    y = b.fma(e, b.real(LN2_LOW), y)
    y = b.fma(square, b.real(-0.5), y)
    y = b.fma(e, b.real(LN2_HIGH), b.add(f, y))
    y = b.select(b.less(b.real(3.4028234663852886e38), x), x, y)  # infinity
    y = b.select(b.equal(x, b.real(0.0)), b.real(float("-inf")), y)
    y = b.select(b.less(x, b.real(0.0)), b.real(float("nan")), y)
    return b.select(b.equal(x, x), y, x)


def rsqrt(b: Builder, x: Any) -> Any:
    return reciprocal(b, b.sqrt(x))


def reciprocal(b: Builder, x: Any) -> Any:
    return b.div(b.real(1.0), x)


def sigmoid(b: Builder, x: Any) -> Any:
    return reciprocal(b, b.add(b.real(1.0), exp(b, b.mul(x, b.real(-1.0)))))


def rint(b: Builder, x: Any) -> Any:
    """To the nearest integer, ties to even; -0.25 gives -0."""
    sign = b.iand(b.bits(x), b.whole(-0x80000000))
    size = b.from_bits(b.iand(b.bits(x), b.whole(0x7FFFFFFF)))
    rounded = b.sub(b.add(size, b.real(8388608.0)), b.real(8388608.0))
    near = b.from_bits(b.ior(b.bits(rounded), sign))
    return b.select(b.less(size, b.real(8388608.0)), near, x)


def _exp_near(b: Builder, r: Any) -> Any:
    """e^r for |r| up to ln(2) / 2."""
    return b.add(b.fma(_horner(b, EXP, r), b.mul(r, r), r), b.real(1.0))


def _clamp(b: Builder, x: Any, low: float, high: float) -> Any:
    """NaN stays: it is neither above nor below."""
    return b.greatest(b.real(low), b.least(b.real(high), x))


def _horner(b: Builder, coefficients: Sequence[float], x: Any) -> Any:
    y = b.real(coefficients[0])
    for c in coefficients[1:]:
        y = b.fma(y, x, b.real(c))
    return y


FUNCTIONS = {f.__name__: f for f in (exp, exp2, log, rint, rsqrt, reciprocal, sigmoid)}
