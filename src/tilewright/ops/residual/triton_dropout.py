"""How Triton runs dropout_add and its gradient. What they mean is said by their definitions.

A program draws four words at once for four columns side by side, as the counter has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.residual.dropout import drops
from tilewright.ops.residual.philox import scale, threshold
from tilewright.ops.triton_rows import load, places, store, tile_at


@triton.jit
def kept(seed, offset, index, total_columns, least, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements [ROWS, BLOCK] of the `index`-th tile stay."""
    blocks = tl.cdiv(total_columns, BLOCK)
    rows = (index // blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    low = offset + (index % blocks) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    rows, low = tl.broadcast(rows, low)
    a, b, c, d = tl.philox(
        seed,
        low.to(tl.uint32),
        (low >> 32).to(tl.uint32),
        rows.to(tl.uint32),
        (rows >> 32).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
    return (words >> 8).to(tl.int32) >= least


@triton.jit(do_not_specialize=["total_rows", "x_count", "residual_count", "least"])
def dropout_forward(
    x, residual, seed, offset, y, state, x_stride, x_outer, x_count, x_step,
    residual_stride, residual_outer, residual_count, residual_step, total_rows, total_columns, least, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = residual + keep * x * scale, and the copies of seed and offset that the gradient needs."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, False)
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "evict_first")
    number = tl.load(seed) if seed is not None else tl.full([], 0, tl.int64)
    start = tl.load(offset) if offset is not None else tl.full([], 0, tl.int64)
    if DROPS:
        value = tl.where(kept(number, start, index, total_columns, least, ROWS, BLOCK), value * scale, 0.0)
    value += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, residual_step,
                  "evict_first")  # fmt: skip
    store(y, rows, columns, total_columns, mask, value)
    if state is not None:
        if index == 0:
            tl.store(state, number)
            tl.store(state + 1, start)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "least"])
def dropout_backward(
    dy, state, dx, dy_stride, dy_outer, dy_count, dy_step, total_rows, total_columns, least, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = keep * dy * scale."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, False)
    value = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "evict_first")
    if DROPS:
        keep = kept(tl.load(state), tl.load(state + 1), index, total_columns, least, ROWS, BLOCK)
        value = tl.where(keep, value * scale, 0.0)
    store(dx, rows, columns, total_columns, mask, value)


def forward(call: Call, config: Config) -> Launch:
    """dropout_add."""
    tensors: dict[str, TensorFacts | None] = {"x": call.x, "residual": call.residual}
    args: dict[str, Argument] = {**tensors, **places(False, **tensors)}
    args |= {"seed": call.seed, "offset": call.offset, "y": call.y, "state": call.state}
    return _launch(dropout_forward, call, config, call.x, args)


def backward(call: Call, config: Config) -> Launch:
    """dropout_add_backward."""
    args: dict[str, Argument] = {"dy": call.dy, "state": call.state, "dx": call.dx, **places(False, dy=call.dy)}
    return _launch(dropout_backward, call, config, call.dy, args)


def _launch(function: object, call: Call, config: Config, shape: TensorFacts, args: dict[str, Argument]) -> Launch:
    args |= {"total_rows": shape.rows, "total_columns": shape.columns}
    args |= {"least": threshold(call.p), "scale": scale(call.p)}
    tiles = triton.cdiv(shape.rows, config.rows) * triton.cdiv(shape.columns, config.block)
    constants = {"DROPS": drops(call.training, call.p), "ROWS": config.rows, "BLOCK": config.block}
    return Launch(function, (tiles, 1, 1), args, constants, {"num_warps": config.num_warps})
