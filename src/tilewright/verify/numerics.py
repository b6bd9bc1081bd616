"""The numerics policy: how far a kernel may be from the float64 oracle, and how that is measured.

An error is counted in ulps of the output dtype at the oracle's value plus 2^-24 of A, the sum of absolute terms that
the op declares. A kernel passes when its largest error is at most twice the baseline's plus 2, and its RMS error at
most 1.2 times the baseline's (2 times in float32), pooled over cases. The baseline is the reference itself in the
call's dtypes: float32 accumulation, rounded at its stated points. NaN and Inf must stand exactly where the baseline
has them, but for values near the largest of the output dtype: there Inf is the number next to it, or whatever lies
beyond, and how far off that is counts as any error does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FACTOR, MAX_ULPS = 2.0, 2.0
RMS_FACTOR = {torch.float32: 2.0}
RMS_FACTOR_HALF = 1.2
RMS_MARGIN, RMS_FLOOR = 0.05, {torch.float32: 0.5}
RMS_FLOOR_HALF = 0.3
"""What is always allowed: a result that is rounded right has an RMS error of 0.29 ulp, and a baseline may be luckier (a
copy, a single product, a mean that is small beside its terms)."""
POOL = 1 << 16
"""RMS errors are compared over at least this many elements; with fewer, RMS_SMALL times the limit is allowed."""
RMS_SMALL = 2.0
RMS_LEAST = 256
"""Below this an RMS says no more than the largest error does."""
_MIN_EXPONENT = {torch.float32: -126, torch.float16: -14, torch.bfloat16: -126, torch.float64: -1022}


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at each of `values` (float64)."""
    exponent = torch.frexp(values.abs()).exponent - 1
    exponent = exponent.clamp(min=_MIN_EXPONENT[dtype]).double()
    return torch.exp2(exponent) * torch.finfo(dtype).eps


@dataclass
class Errors:
    """Errors of one output against the oracle, in ulps; adds up over cases."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    misplaced: int = 0
    """Elements whose NaN or Inf is not where the baseline has one."""

    @property
    def rms(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def add(self, other: Errors) -> None:
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.count += other.count
        self.misplaced += other.misplaced


def errors(
    found: Tensor, oracle: Tensor, baseline: Tensor, scale: Tensor | None, narrowed: Tensor | None = None
) -> Errors:
    """Errors of `found` in its own dtype against `oracle` (float64); `scale` is A, `narrowed` the terms that may be
    rounded on the way, both broadcast to it. Where they are not finite they allow nothing."""
    found64 = found.double()
    unit = ulp(oracle, found.dtype)
    # What may be rounded on the way is off by an ulp of each, as of the output.
    for terms, each in ((scale, 2.0**-24), (narrowed, torch.finfo(found.dtype).eps)):
        if terms is not None:
            unit = unit + terms.expand_as(oracle).nan_to_num(nan=0.0, posinf=0.0) * each
    most = torch.finfo(found.dtype).max
    over = torch.isinf(baseline) & (oracle * baseline.sign() + unit >= most) & torch.isfinite(oracle)
    finite = torch.isfinite(baseline) & torch.isfinite(oracle) | over
    same = torch.where(
        finite, ~torch.isnan(found64), (found64 == baseline.double()) | (torch.isnan(found64) & torch.isnan(baseline))
    )
    nearest = torch.where(
        found64 > most, oracle.clamp(min=most), torch.where(found64 < -most, oracle.clamp(max=-most), found64)
    )
    error = torch.where(finite, (nearest - oracle).abs() / unit, 0.0)
    error = torch.nan_to_num(error, nan=0.0, posinf=1e30)
    return Errors(
        float(error.max()) if error.numel() else 0.0,
        float(error.square().sum()),
        int(finite.sum()),
        int((~same).sum()),
    )


def largest_allowed(baseline: Errors) -> float:
    return MAX_FACTOR * baseline.largest + MAX_ULPS


def rms_allowed(baseline: Errors, dtype: torch.dtype) -> float:
    """The limit on the pooled RMS error; wider where the pool is small, since its RMS is then noisy."""
    if baseline.count < RMS_LEAST:
        return math.inf
    limit = RMS_FACTOR.get(dtype, RMS_FACTOR_HALF) * baseline.rms + RMS_MARGIN
    limit *= 1.0 if baseline.count >= POOL else RMS_SMALL
    return max(limit, RMS_FLOOR.get(dtype, RMS_FLOOR_HALF))


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, for comparisons in which NaN equals NaN and -0 differs from 0."""
    # One element is contiguous whatever its stride is, and keeps it; a view of bytes wants 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
