"""What Triton kernels over tiles of scores share, with a softmax or without: which scores dropout keeps, how products
of float32 are taken, room for descriptors. Masks and places belong to each family.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.ops.residual.triton_dropout import philox

DESCRIPTOR = 128
"""Bytes of one."""


@triton.jit
def kept(seed, offset, rows, first, limit, N: tl.constexpr):
    """Which weights [M, N] of mask rows `rows` and columns from `first` (a multiple of 4) on stay."""
    low = offset + first // 4 + tl.arange(0, N // 4)[None, :]
    rows, low = tl.broadcast(rows[:, None], low)
    a, b, c, d = philox(low, rows, seed)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [rows.shape[0], N])
    return words > limit.to(tl.uint32)


def precision(call: Call) -> str:
    """How float32 is multiplied. NVIDIA's tensor cores do it in three products of TF32, which leave out 2^-22 of each:
    a product in registers holds whole rows of both operands there, for which they do not suffice."""
    return "tf32x3" if call.device.kind == "cuda" and call.q.dtype == torch.float32 else "ieee"
