"""What torch itself has of the activation family: aten's silu and gelu, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def silu(x: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return (_aten.silu(x).contiguous(),)


def gelu(x: Tensor, *, approximate: str, **_: Any) -> tuple[Tensor, ...]:
    return (_aten.gelu(x, approximate=approximate).contiguous(),)


def silu_backward(dy: Tensor, x: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return (_aten.silu_backward(dy, x).contiguous(),)


def gelu_backward(dy: Tensor, x: Tensor, *, approximate: str, **_: Any) -> tuple[Tensor, ...]:
    return (_aten.gelu_backward(dy, x, approximate=approximate).contiguous(),)
