"""The numerics policy by itself: what counts as an error near the largest number of a dtype, where some results are Inf
and some are not. What the suite makes of it with real kernels is in `test_planted_faults`.
"""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.verify.numerics import Errors, errors, largest_allowed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def judged(found: float, oracle: float, baseline: float, dtype: torch.dtype, terms: float = 0.0) -> tuple[Errors, bool]:
    """(errors of one number, whether it passes beside the baseline); `terms` are the absolute terms in it."""
    exact = torch.tensor([oracle], dtype=torch.float64)
    scale = torch.tensor([terms], dtype=torch.float64)
    given, known = (torch.tensor([x], dtype=torch.float64).to(dtype) for x in (found, baseline))
    mine, base = errors(given, exact, known, scale), errors(known, exact, known, scale)
    return mine, not mine.misplaced and mine.largest <= largest_allowed(base)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beside_the_largest_number_inf_is_the_next_one(dtype: torch.dtype, sign: float) -> None:
    """Whichever of two neighbours the baseline rounded to, the other passes; two further on neither does."""
    most = torch.finfo(dtype).max
    step = most - most / (2.0 - torch.finfo(dtype).eps) * (2.0 - 2.0 * torch.finfo(dtype).eps)  # an ulp
    for baseline in (most, math.inf):
        for found, passes in ((most, True), (math.inf, True), (most - step, True), (-math.inf, False), (0.0, False)):
            mine, passed = judged(sign * found, sign * (most + 0.5 * step), sign * baseline, dtype)
            assert passed == passes, (found, baseline, mine)
            assert not mine.misplaced
    assert not judged(sign * math.inf, sign * (most - 8.0 * step), sign * (most - 8.0 * step), dtype)[1]
    assert not judged(sign * most, sign * (most + 8.0 * step), sign * math.inf, dtype)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_beyond_the_largest_number_there_is_inf_alone(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert judged(math.inf, 20.0 * most, math.inf, dtype)[1]
    for found in (most, 0.5 * most, -math.inf, -most, math.nan):
        assert not judged(found, 20.0 * most, math.inf, dtype)[1], found
    assert judged(math.inf, math.inf, math.inf, dtype)[1]
    assert not judged(most, math.inf, math.inf, dtype)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_terms_allow_is_allowed_there_too(dtype: torch.dtype) -> None:
    """Terms of 2^24 times a hundredth of the largest: a result may be off by twice that."""
    most = torch.finfo(dtype).max
    terms = 2.0**24 * 0.01 * most
    assert judged(math.inf, 0.99 * most, 0.99 * most, dtype, terms)[1]
    assert judged(0.99 * most, 1.005 * most, math.inf, dtype, terms)[1]
    assert not judged(math.inf, 0.9 * most, 0.9 * most, dtype, terms)[1]
    assert not judged(0.9 * most, 1.005 * most, math.inf, dtype, terms)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_baseline_that_is_inf_far_below_asks_for_inf(dtype: torch.dtype) -> None:
    """A contract may say so; the definition in float64 has no such number."""
    most = torch.finfo(dtype).max
    assert judged(math.inf, 0.5 * most, math.inf, dtype)[1]
    assert judged(0.5 * most, 0.5 * most, math.inf, dtype)[0].misplaced == 1


@pytest.mark.parametrize("terms", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_that_are_not_finite_allow_nothing(dtype: torch.dtype, terms: float) -> None:
    """A is NaN where an Inf among its terms meets a 0, and Inf where an input is: what is finite there is judged by its
    ulps alone."""
    assert judged(1.0, 1.0, 1.0, dtype, terms)[1]
    assert not judged(2.0, 1.0, 1.0, dtype, terms)[1]
