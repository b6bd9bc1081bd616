"""Element types and functions: exact where they say so, against torch, float64 and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tilewright.tile import dtypes, numbers
from tilewright.tile.lower import math
from tilewright.tile.oracle.interpreter import fold

F32 = np.float32


def _every_kind(count: int = 1 << 18) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 464.0, 465.0, 448.0, 1e-40, 65504.0, 65520.0], F32)
    return np.concatenate([bits.view(F32), edges, np.linspace(-500, 500, 4001, dtype=F32)])


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_half_precision_rounds_as_torch(dtype: str, other: torch.dtype) -> None:
    values = _every_kind()
    mine = dtypes.ALL[dtype].rounded(values)
    theirs = torch.from_numpy(values).to(other).float().numpy()
    assert np.array_equal(mine, theirs, equal_nan=True)


def test_fp8_saturates_where_torch_clamps() -> None:
    """465 is 448, infinity too; NaN stays."""
    values = _every_kind()
    mine = dtypes.float8_e4m3fn.rounded(values)
    clamped = torch.from_numpy(values).clamp(-448.0, 448.0)
    assert np.array_equal(mine, clamped.to(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
    codes = np.arange(256, dtype=np.uint8)
    decoded = dtypes.float8_e4m3fn.decode(codes)
    assert np.array_equal(decoded, torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)


def test_fma_rounds_once() -> None:
    a, b, c = F32(1 - 2**-23), F32(1 + 2**-23), F32(16777218)
    assert numbers.fma(a, b, c) == 16777218 != F32(np.float64(a) * np.float64(b) + np.float64(c))
    sample = np.random.default_rng(1)
    x, y, z = (sample.normal(size=4000).astype(F32) * F32(2.0) ** sample.integers(-20, 20, 4000) for _ in range(3))
    x, y, z = (v.astype(F32) for v in (x, y, z))
    for p, q, r, got in zip(x, y, z, numbers.fma(x, y, z), strict=True):
        exact = Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        below, above = np.nextafter(got, F32(-np.inf)), np.nextafter(got, F32(np.inf))
        error = abs(Fraction(float(got)) - exact)
        assert error <= min(abs(Fraction(float(below)) - exact), abs(Fraction(float(above)) - exact))


@pytest.mark.parametrize(
    ("name", "low", "high", "ulps"), [("exp", -104, 89, 1.5), ("exp2", -150, 128, 1.5), ("log", 1e-40, 3e38, 1.5)]
)
def test_functions_are_accurate(name: str, low: float, high: float, ulps: float) -> None:
    x = np.linspace(low, high, 200001).astype(F32)
    if name == "log":
        x = np.exp(np.linspace(np.log(low), np.log(high), 200001)).astype(F32)
    with np.errstate(over="ignore"):
        mine = math.FUNCTIONS[name](numbers.NumpyBuilder(), x)
        true = getattr(np, name)(x.astype(np.float64))
        step = np.abs(np.spacing(true.astype(F32))).astype(np.float64)
        finite = np.isfinite(true.astype(F32))
    assert np.max(np.abs(mine[finite] - true[finite]) / step[finite]) <= ulps


def test_functions_at_their_ends() -> None:
    b = numbers.NumpyBuilder()
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 200.0, -200.0], F32)
    with np.errstate(all="ignore"):
        assert np.array_equal(math.exp(b, x), np.array([np.nan, np.inf, 0, 1, 1, np.inf, 0], F32), equal_nan=True)
        assert np.array_equal(math.exp2(b, x), np.array([np.nan, np.inf, 0, 1, 1, np.inf, 0], F32), equal_nan=True)
        logs = math.log(b, np.array([np.nan, np.inf, -1.0, 0.0, -0.0, 1.0], F32))
    assert np.array_equal(logs, np.array([np.nan, np.inf, np.nan, -np.inf, -np.inf, 0], F32), equal_nan=True)
    halves = np.array([2.5, 3.5, -0.25, 8388609.0, -2.5, np.inf, np.nan], F32)
    assert np.array_equal(math.rint(b, halves), np.rint(halves), equal_nan=True)
    assert np.signbit(math.rint(b, halves)[2])


def test_casts_to_integers_saturate_and_nan_gives_zero() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 127.5, 2.5, -2.5, 3e9, -3e9], F32)
    found = numbers.cast(x, dtypes.float32, dtypes.int8, "nearest_even", True)
    assert found.tolist() == [0, 127, -128, 127, 2, -2, 127, -128]
    found = numbers.cast(x, dtypes.float32, dtypes.int32, "toward_zero", True)
    assert found.tolist() == [0, 2**31 - 1, -(2**31), 127, 2, -2, 2**31 - 1, -(2**31)]


def test_maximum_propagates_nan_unless_told() -> None:
    x, nan = np.array([3.0, np.nan, 2.0], F32), np.array([np.nan, 1.0, 5.0], F32)
    assert np.isnan(numbers.maximum(x, nan))[:2].all()
    assert numbers.maximum(x, nan, "ignore").tolist() == [3.0, 1.0, 5.0]
    assert np.isnan(fold(x, "max", -np.inf, 8, 1))


def test_folds_pad_with_the_identity() -> None:
    """The variance of five ones is 0, and the largest of three -1e4 is -1e4: nothing of the padding counts."""
    ones = np.ones(5, F32)
    mean = fold(ones, "sum", 0.0, 8, 4) / F32(5)
    assert fold((ones - mean) ** 2, "sum", 0.0, 8, 4) == 0.0
    assert fold(np.full(3, -1e4, F32), "max", -np.inf, 8, 4) == -1e4


def test_philox_equals_the_published_answer() -> None:
    """Of Random123's known answers: all zeros, and all ones."""
    zero = np.zeros(4, np.int64)
    words = numbers.philox(zero, zero, zero, np.arange(4))
    assert [f"{w:08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = np.full(4, -1, np.int64)
    words = numbers.philox(ones, ones, ones, np.arange(4))
    assert [f"{w:08x}" for w in words] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
