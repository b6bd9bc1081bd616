"""The seed of a call that draws and was given none."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.core.errors import InvalidArgument


def drawn(op: str, device: torch.device) -> Tensor:
    """int64[1] on `device`, from torch's generator there.

    Raises:
        InvalidArgument: a CUDA graph is captured, whose replays would all draw the same.
    """
    if not torch.compiler.is_compiling() and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            op,
            "seed",
            "None while a CUDA graph is captured",
            "pass seed and offset, int64[1] on the device, and advance one between replays",
        )
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
