"""The ops' kernels in tiles: what conformance does not ask of every backend."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.tile.runtime import target

pytestmark = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")


def ulps(found: torch.Tensor, exact: float) -> float:
    """The largest error of float32 values."""
    wanted = torch.tensor(exact)
    step = torch.nextafter(wanted, torch.tensor(torch.inf)) - wanted
    return float((found.double() - exact).abs().max() / step)


def test_sums_over_many_equal_rows_are_exact_to_a_few_ulp() -> None:
    """One running sum is rounded in the same direction each time: it was 33 ulp off in 65536 rows."""
    rows = 16384 + 5
    x, w = torch.full((rows, 8), 0.1), torch.ones(8, requires_grad=True)
    y = tw.scale_bias_add(x, w, None, None, backend="tile")
    y.backward(torch.full_like(y, 0.1))
    assert w.grad is not None
    assert ulps(w.grad, rows * float(x[0, 0]) ** 2) <= 4
    bag = torch.zeros(1, rows, dtype=torch.int64)
    mean = tw.embedding_bag_mean(torch.full((2, 8), 0.1), bag, padding_idx=None, backend="tile")
    assert ulps(mean, float(x[0, 0])) <= 4
