"""What torch itself has of the loss family: aten's binary cross entropy of logits, forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# aten's own numbers of the reductions
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def bce_with_logits(
    logits: Tensor, targets: Tensor, weight: Tensor | None, pos_weight: Tensor | None, *, reduction: str,
    out_dtype: torch.dtype | None, saving: bool, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    loss = torch.ops.aten.binary_cross_entropy_with_logits(logits, targets, weight, pos_weight, _REDUCTIONS[reduction])
    loss = loss.to(out_dtype or loss.dtype).contiguous()
    return (loss, None) if saving else (loss,)
