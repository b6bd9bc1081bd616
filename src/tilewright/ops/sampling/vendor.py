"""What torch itself has of the sampling family: aten's softmax and its gradient.

aten has no scale: with one, numbers are multiplied in float32 before or after. Of half precision its gradient rounds
dy times y before it sums, so it is given float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def softmax(x: Tensor, *, scale: float, **_: Any) -> tuple[Tensor, ...]:
    if scale == 1.0:
        return (_aten._softmax(x, -1, False).contiguous(),)
    return (_aten._softmax(x.float() * scale, -1, False).to(x.dtype).contiguous(),)


def softmax_backward(dy: Tensor, y: Tensor, *, scale: float, **_: Any) -> tuple[Tensor, ...]:
    if scale == 1.0 and dy.dtype == y.dtype == torch.float32:
        return (_aten._softmax_backward_data(dy, y, -1, y.dtype).contiguous(),)
    wide = _aten._softmax_backward_data(dy.float(), y.float(), -1, torch.float32)
    return ((wide * scale).to(dy.dtype).contiguous(),)
