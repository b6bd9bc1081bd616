"""How Triton runs dropout_add and its gradient. What they mean is said by their definitions.

A program draws four words at once for four columns side by side, as the counter has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.residual.dropout import drops
from tilewright.ops.residual.philox import MULTIPLIERS, WEYL, limit, scale
from tilewright.ops.residual.philox import ROUNDS as _ROUNDS
from tilewright.ops.triton_rows import load, places, store, tile_at, tile_place

ROUNDS = tl.constexpr(_ROUNDS)
FIRST, SECOND = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
WEYL_LOW, WEYL_HIGH = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])


@triton.jit
def multiplied(a, FACTOR: tl.constexpr):
    """High and low 32 bits of a product: one instruction, where two multiplications would be two."""
    whole = a.to(tl.uint64) * FACTOR
    return (whole >> 32).to(tl.uint32), whole.to(tl.uint32)


@triton.jit
def philox(low, rows, seed):
    """Philox4x32-10, as `philox` has it: four words of the counter with low 64 bits `low` and high ones `rows`."""
    c0, c1 = low.to(tl.uint32), (low >> 32).to(tl.uint32)
    c2, c3 = rows.to(tl.uint32), (rows >> 32).to(tl.uint32)
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high0, low0 = multiplied(c0, FIRST)
        high1, low1 = multiplied(c2, SECOND)
        c0 = high1 ^ c1 ^ key_low
        c1 = low1
        c2 = high0 ^ c3 ^ key_high
        c3 = low0
        key_low += WEYL_LOW
        key_high += WEYL_HIGH
    return c0, c1, c2, c3


@triton.jit
def kept(
    seed, offset, index, total_columns, limit, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """Which elements [ROWS, BLOCK] of the `index`-th tile stay: those whose word is above `limit`. SHARE columns, four
    or eight side by side, are drawn by the thread that loads them."""
    down, across = tile_place(index, total_columns, BLOCK)
    rows = down * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    low = offset + across * (BLOCK // 4) + tl.arange(0, BLOCK // SHARE)[None, :] * (SHARE // 4)
    rows, low = tl.broadcast(rows, low)
    a, b, c, d = philox(low, rows, seed)
    if SHARE == 8:
        e, f, g, h = philox(low + 1, rows, seed)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
    return words > limit.to(tl.uint32)


@triton.jit(do_not_specialize=["total_rows", "x_count", "residual_count", "limit"])
def dropout_forward(
    x, residual, seed, offset, y, state, x_stride, x_outer, x_count, x_step,
    residual_stride, residual_outer, residual_count, residual_step, total_rows, total_columns, limit, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """y = residual + keep * x * scale, and the copies of seed and offset that the gradient needs."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, False)
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "")
    number = tl.load(seed) if seed is not None else tl.full([], 0, tl.int64)
    start = tl.load(offset) if offset is not None else tl.full([], 0, tl.int64)
    if DROPS:
        value = tl.where(kept(number, start, index, total_columns, limit, ROWS, BLOCK, SHARE), value, 0.0) * scale
    value += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, residual_step,
                  "")  # fmt: skip
    store(y, rows, columns, total_columns, mask, value)
    if state is not None:
        if index == 0:
            tl.store(state, number)
            tl.store(state + 1, start)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "limit"])
def dropout_backward(
    dy, state, dx, dy_stride, dy_outer, dy_count, dy_step, total_rows, total_columns, limit, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """dx = keep * dy * scale."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, False)
    value = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
    if DROPS:
        keep = kept(tl.load(state), tl.load(state + 1), index, total_columns, limit, ROWS, BLOCK, SHARE)
        value = tl.where(keep, value, 0.0) * scale
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
    args |= {"limit": limit(call.p), "scale": scale(call.p)}
    tiles = triton.cdiv(shape.rows, config.rows) * triton.cdiv(shape.columns, config.block)
    constants = {"DROPS": drops(call.training, call.p), "ROWS": config.rows, "BLOCK": config.block}
    constants["SHARE"] = 8 if shape.dtype.itemsize == 2 and config.block >= 8 else 4  # as many as one access has
    return Launch(function, (tiles, 1, 1), args, constants, {"num_warps": config.num_warps})
