"""Element operations in numpy, each rounded as the language says: the interpreter computes with it.

float32 arithmetic of numpy is IEEE and contracts nothing; what numpy lacks (fma, casts that saturate) is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilewright.tile.dtypes import Array, DType
from tilewright.tile.lower.math import FUNCTIONS

F32, I32 = np.float32, np.int32


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding. In float64 the product is exact, and the sum is rounded to odd before float32: a
    plain float64 sum would be rounded twice."""
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        finite = np.isfinite(total) & np.isfinite(error) & (error != 0)
        bits = total.view(np.int64)
        away = np.where((error > 0) == (total > 0), bits + 1, bits - 1).view(np.float64)
        odd = np.where(finite & (bits & 1 == 0), away, total)
        return odd.astype(F32)


def _extreme(more: Callable[..., Any]) -> Callable[..., Array]:
    def extreme(a: Array, b: Array, nan: str = "propagate") -> Array:
        """Of equal values (0 and -0) the second; of NaN the NaN, with nan="ignore" the other, "second" the second."""
        found = np.where(more(a, b), a, b)
        if a.dtype.kind != "f" or nan == "second":
            return found
        return np.where(np.isnan(b if nan == "ignore" else a), a, found)

    return extreme


maximum, minimum = _extreme(np.greater), _extreme(np.less)


def cast(x: Array, source: DType, target: DType, round: str, saturate: bool) -> Array:
    """A value of `source` as one of `target`."""
    if target.floating:
        if saturate and target.largest:
            x = np.where(np.isnan(x), x, np.clip(x, -target.largest, target.largest))
        return target.rounded(x.astype(F32))
    if source.floating:
        low, high = target.bounds
        whole = np.rint(x) if round == "nearest_even" else np.trunc(x)
        clipped = np.clip(np.where(np.isnan(whole), 0.0, whole).astype(np.float64), low, high)
        inside = clipped < float(high)  # which is 2^63 for an int64: none itself
        return np.where(inside, np.where(inside, clipped, 0.0).astype(np.int64), np.int64(high)).astype(target.storage)
    if saturate and target.integer:
        x = np.clip(x, *target.bounds)
    with np.errstate(over="ignore"):
        return x.astype(target.storage)


BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide, "mod": np.mod,
    "max": maximum, "min": minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add, "prod": np.multiply, "max": maximum, "min": minimum, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


def by_halves(combine: str, x: Array) -> Array:
    """Fold the first axis, a power of two: its first half and its second, until one is left."""
    while len(x) > 1:
        half = len(x) // 2
        x = np.asarray(COMBINE[combine](x[:half], x[half:]))
    return np.asarray(x[0])


def identity(combine: str, dtype: DType) -> Any:
    """What changes nothing when it is folded in."""
    if combine in ("max", "min"):
        low, high = (-math.inf, math.inf) if dtype.floating else dtype.bounds
        return low if combine == "max" else high
    value = {"sum": 0, "prod": 1, "and": True, "or": False}[combine]
    return float(value) if dtype.floating else value


def _method(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda _, *args: np.asarray(function(*args))


class NumpyBuilder:
    """`lower.math.Builder` over arrays."""

    add = iadd = _method(np.add)
    sub = isub = _method(np.subtract)
    mul, div, sqrt, fma = _method(np.multiply), _method(np.divide), _method(np.sqrt), _method(fma)
    less, equal, select = _method(np.less), _method(np.equal), _method(np.where)
    iand, ior = _method(np.bitwise_and), _method(np.bitwise_or)

    real, whole = _method(F32), _method(I32)
    least, greatest = _method(partial(minimum, nan="second")), _method(partial(maximum, nan="second"))
    bits = _method(lambda a: np.asarray(a, F32).view(I32))
    from_bits = _method(lambda a: np.asarray(a, I32).view(F32))
    shl, shr = _method(np.left_shift), _method(np.right_shift)

    def ldexp(self, a: Array, n: Array) -> Array:
        """In two steps, of which the first is exact."""
        whole = np.where(np.isnan(n), 0.0, n).astype(I32)
        half = whole >> 1
        first, second = ((k + 127 << 23).astype(I32).view(F32) for k in (half, whole - half))
        return np.asarray(np.multiply(np.multiply(a, first), second))


UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "not": np.logical_not, "sqrt": np.sqrt,
    **{kind: partial(function, NumpyBuilder()) for kind, function in FUNCTIONS.items()},
}  # fmt: skip


def philox(seed: Array, counter: Array, row: Array, word: Array) -> Array:
    """Philox4x32-10 (Salmon et al., 2011): word `word` of the block with key `seed`, counter (counter, row)."""
    shape = np.broadcast_shapes(seed.shape, counter.shape, row.shape, word.shape)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c, r, k = (np.broadcast_to(v, shape).astype(np.uint64) for v in (counter, row, seed))
    x = [c & low, c >> half, r & low, r >> half]
    key = [k & low, k >> half]
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(second >> half) ^ x[1] ^ key[0], second & low, (first >> half) ^ x[3] ^ key[1], first & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    chosen = np.choose(np.broadcast_to(word, shape), x)
    return np.asarray(chosen).astype(np.uint32)


def printed(text: str, axes: int, dtype: DType) -> str:
    """How a `print` writes an element, for printf and for Python's `%`: which instance, which index of so many axes,
    the value."""
    place = f" [{', '.join(['%ld'] * axes)}]" if axes else ""
    return f"(%ld, %ld, %ld) {text.replace('%', '%%')}{place} {'%.9g' if dtype.floating else '%ld'}"
