"""Float32 logits, their binary cross entropy and its gradient, for tests of what is saved. Not a test module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, C = 6, 40
backends = pytest.mark.parametrize("backend", [None, pytest.param("triton", marks=pytest.mark.interpreted)])
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def leaf(seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(ROWS, C, generator=generator) * 4, torch.rand(ROWS, C, generator=generator)
    return x.to(device).requires_grad_(), y.to(device)


def wanted(x: Tensor, y: Tensor, reduction: str = "mean", dy: float = 1.0) -> Tensor:
    wide = x.detach().double().requires_grad_()
    loss = F.binary_cross_entropy_with_logits(wide, y.double(), reduction=reduction)
    return torch.autograd.grad(loss * dy, wide)[0].float()


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def held(loss: Tensor) -> list[Tensor]:
    """What the node of autograd's graph holds for its first backward; nothing once that has run."""
    node: Any = loss.grad_fn
    return [] if node.held is None else [t for tensors in node.held._tensors for t in tensors]


def skip_unless_it_runs(backend: str, device: str) -> None:
    """Skip a test of TileLang or of tiles where they do not run."""
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    if backend != "triton" and (device == "cpu") != (backend == "tile"):
        pytest.skip(f"{backend} does not run on {device}")
