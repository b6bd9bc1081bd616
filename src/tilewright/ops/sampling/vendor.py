"""What torch itself has of the sampling family: aten's softmax and its gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.reason import Reason

_aten = torch.ops.aten


def plain(call: Call) -> Iterable[Reason]:
    """aten has no scale."""
    if call.scale != 1.0:
        yield Reason("scale", f"{call.scale}; takes 1")


def softmax(x: Tensor, *, dim: int, **_: Any) -> tuple[Tensor, ...]:
    return (_aten._softmax(x, dim, False).contiguous(),)


def softmax_backward(dy: Tensor, y: Tensor, *, dim: int, **_: Any) -> tuple[Tensor, ...]:
    return (_aten._softmax_backward_data(dy, y, dim, y.dtype).contiguous(),)
