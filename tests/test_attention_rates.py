"""What forward kernels of half precision multiply scores by, and what they subtract then: a multiply-add rounds once,
after both. An interpreter rounds twice, so the numbers themselves are looked at. Results are in `test_attention`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

from tilewright.ops.attention.triton_tiles import rates


@triton.jit
def _rates(tops, found, levels, factor, N: tl.constexpr):
    at = tl.arange(0, N)
    rate, level = rates(tl.load(tops + at), factor)
    tl.store(found + at, rate)
    tl.store(levels + at, level)


@pytest.mark.parametrize("factor", [64**-0.5, 72**-0.5 * 1.4426950408889634, 1.0, 3.0, 1e-3], ids=str)
def test_the_largest_weight_is_not_far_from_1(factor: float, device: str) -> None:
    """As a multiply-add has it, of largest scores from 0 to 1e30, of either sign."""
    generator = torch.Generator().manual_seed(2)
    tops = torch.randn(512, generator=generator) * 10.0 ** torch.linspace(-3, 30, 512)
    tops[0] = 0.0
    found, levels = torch.empty(512), torch.empty(512)
    tops, found, levels = (t.to(device) for t in (tops, found, levels))
    _rates[(1,)](tops, found, levels, factor, N=512)
    single = torch.tensor(factor, dtype=torch.float32).item()
    seen = set()
    for top, rate, level in zip(tops.tolist(), found.tolist(), levels.tolist(), strict=True):
        power = abs(Fraction(top) * Fraction(rate) - Fraction(level))
        assert power <= 2, (top, rate)
        small = abs(top * single) < 2**26
        assert rate == single if small else single <= rate < 2 * single and rate.hex().startswith("0x1.0000000000000p")
        seen.add(small)
    assert seen == {True, False}


def test_what_is_not_finite_stays(device: str) -> None:
    tops = torch.tensor([float("inf"), float("nan"), float("-inf"), 1.0], device=device)
    found, levels = torch.empty_like(tops), torch.empty_like(tops)
    _rates[(1,)](tops, found, levels, 0.5, N=4)
    torch.testing.assert_close(levels, tops * 0.5, equal_nan=True)
