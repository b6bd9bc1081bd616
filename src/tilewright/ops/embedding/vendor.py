"""What torch itself has of the embedding family: aten's embedding_bag in its mean mode, and its dense gradient.

aten reads whatever an id points at, so ids that do not count are sent to a row that it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.reason import Reason
from tilewright.ops.embedding.bag import masks

_aten = torch.ops.aten
_MEAN = 1


def one_rounding(call: Call) -> Iterable[Reason]:
    """On a CPU aten rounds the sum before it divides, and adds gradients in half precision."""
    if not call.device.is_gpu and call.weight.dtype != torch.float32:
        yield Reason("weight", f"dtype {DTYPE_NAMES[call.weight.dtype]}: on a CPU aten sums in it", "takes fp32")


def on_a_cpu(call: Call) -> Iterable[Reason]:
    """Measured with torch 2.11 on an H100, 26 ids of 62 rows of 384 columns: the gradient of embedding_bag itself."""
    if call.device.is_gpu:
        yield Reason("device", "aten's gradient of bags ends in an illegal memory access on some small calls here")


def a_row_to_leave_out(call: Call) -> Iterable[Reason]:
    """What does not count needs a row that aten leaves out, or a bag that is NaN anyway."""
    padding, spoils = call.padding_idx, call.out_of_range == "error"
    if padding != 0 and not (padding is None and spoils):
        yield Reason(
            "padding_idx", f"{padding}: aten leaves out rows only", 'takes 0, or None with out_of_range="error"'
        )


def embedding_bag_mean(
    weight: Tensor, indices: Tensor, *, padding_idx: int | None, out_of_range: str, saving: bool, **_: Any
) -> tuple[Tensor, ...]:
    counted, bad = masks(indices, weight.shape[0], padding_idx)
    *bags, many = indices.shape
    ids = torch.where(counted, indices, 0).reshape(-1)
    offsets = torch.arange(0, ids.numel(), many, dtype=ids.dtype, device=ids.device)
    left_out = -1 if padding_idx is None else padding_idx
    out = _aten._embedding_bag(weight, ids, offsets, False, _MEAN, False, None, False, left_out)[0]
    out = out.reshape(*bags, weight.shape[1])
    if out_of_range == "error":
        out = out.masked_fill_(bad.any(-1, keepdim=True), math.nan)
    return (out, counted.sum(-1).float()) if saving else (out,)


def embedding_bag_mean_backward(
    dout: Tensor, indices: Tensor, count: Tensor, weight: Tensor, *, padding_idx: int | None, saving: bool
) -> tuple[Tensor, ...]:
    rows, columns = weight.shape
    many = indices.shape[-1]
    counted, _ = masks(indices, rows, padding_idx)
    ids = torch.where(counted, indices.long(), rows).reshape(-1)  # one row more, which is left out and cut off
    bags = torch.arange(count.numel(), device=ids.device).unsqueeze(-1).expand(-1, many).reshape(-1)
    largest = ids.new_empty(0)  # of the maximum mode alone
    dweight = _aten._embedding_bag_dense_backward(
        dout.reshape(-1, columns).contiguous(), ids, bags, count.reshape(-1).long(), largest, rows + 1, False, _MEAN,
        None, rows,
    )  # fmt: skip
    return (dweight[:rows],)
