"""How Triton runs softmax and its gradient. What they mean is said by their definitions.

Rows that fit the registers of a program are read once. Of wider ones, and of a few long ones, each program takes a
block: a first launch leaves what the row's sum needs of every block, a second writes the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.sampling.configs import main_of
from tilewright.ops.triton_rows import load, places, store, tile_place

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, scale):
    """scale * x; minus infinity where there is nothing."""
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "") * scale
    return tl.where(mask, value, float("-inf"))


@triton.jit
def power(value, largest, mask):
    """exp(value - largest), 0 where there is nothing; NaN where the largest is infinite."""
    return tl.where(mask, tl.exp2((value - largest) * LOG2E), 0.0)


@triton.jit
def place(ROWS: tl.constexpr, BLOCK: tl.constexpr, total_rows, total_columns):
    """Rows [ROWS, 1], columns [1, BLOCK] and mask of this program, and which block of its row it is."""
    down, across = tile_place(tl.program_id(0), total_columns, BLOCK)
    rows = down * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    columns = across * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, columns, (rows < total_rows) & (columns < total_columns), across


@triton.jit(do_not_specialize=["total_rows", "x_count"])
def softmax_rows(
    x, y, x_stride, x_outer, x_count, x_step, total_rows, total_columns, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows."""
    rows, columns, mask, _ = place(ROWS, BLOCK, total_rows, total_columns)
    value = scaled(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, scale)
    found = power(value, tl.max(value, axis=1, keep_dims=True), mask)
    found *= tl.math.div_rn(1.0, tl.sum(found, axis=1, keep_dims=True))
    store(y, rows, columns, total_columns, mask, found)


@triton.jit(do_not_specialize=["total_rows", "x_count"])
def softmax_parts(
    x, largest, sums, x_stride, x_outer, x_count, x_step, total_rows, total_columns, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of each block, and the sum of powers about it. NaN goes into the sum."""
    rows, columns, mask, across = place(ROWS, BLOCK, total_rows, total_columns)
    value = scaled(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, scale)
    most = tl.max(value, axis=1, keep_dims=True)
    # a block of minus infinity alone comes to nothing, unless the whole row is such
    total = tl.sum(power(value, tl.where(most == float("-inf"), 0.0, most), mask), axis=1, keep_dims=True)
    spot = rows * tl.cdiv(total_columns, BLOCK) + across
    tl.store(largest + spot, most, mask=rows < total_rows)
    tl.store(sums + spot, total, mask=rows < total_rows)


@triton.jit(do_not_specialize=["total_rows", "x_count"])
def softmax_whole(
    x, largest, sums, y, x_stride, x_outer, x_count, x_step, total_rows, total_columns, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A block of y. Every program adds up its row's blocks, in one order."""
    rows, columns, mask, _ = place(ROWS, BLOCK, total_rows, total_columns)
    parts = tl.cdiv(total_columns, BLOCK)
    part = tl.arange(0, PARTS)[None, :]
    inside = (part < parts) & (rows < total_rows)
    peaks = tl.load(largest + rows * parts + part, mask=inside, other=float("-inf"))
    most = tl.max(peaks, axis=1, keep_dims=True)
    shares = tl.load(sums + rows * parts + part, mask=inside, other=0.0)
    shares *= tl.where(peaks == float("-inf"), 1.0, tl.exp2((peaks - most) * LOG2E))
    total = tl.sum(tl.where(inside, shares, 0.0), axis=1, keep_dims=True)
    value = scaled(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, scale)
    store(y, rows, columns, total_columns, mask, power(value, most, mask) * tl.math.div_rn(1.0, total))


@triton.jit
def product(dy, y, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step):
    grad = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
    return grad, load(y, rows, columns, mask, y_stride, y_outer, y_count, y_step, "")


@triton.jit(do_not_specialize=["total_rows", "dy_count", "y_count"])
def softmax_rows_backward(
    dy, y, dx, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step, total_rows, total_columns,
    scale, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns, mask, _ = place(ROWS, BLOCK, total_rows, total_columns)
    grad, p = product(
        dy, y, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step
    )  # fmt: skip
    total = tl.sum(grad * p, axis=1, keep_dims=True)
    store(dx, rows, columns, total_columns, mask, scale * p * (grad - total))


@triton.jit(do_not_specialize=["total_rows", "dy_count", "y_count"])
def softmax_parts_backward(
    dy, y, sums, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step, total_rows,
    total_columns, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns, mask, across = place(ROWS, BLOCK, total_rows, total_columns)
    grad, p = product(
        dy, y, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step
    )  # fmt: skip
    spot = rows * tl.cdiv(total_columns, BLOCK) + across
    tl.store(sums + spot, tl.sum(grad * p, axis=1, keep_dims=True), mask=rows < total_rows)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "y_count"])
def softmax_whole_backward(
    dy, y, sums, dx, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step, total_rows,
    total_columns, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    rows, columns, mask, _ = place(ROWS, BLOCK, total_rows, total_columns)
    parts = tl.cdiv(total_columns, BLOCK)
    part = tl.arange(0, PARTS)[None, :]
    inside = (part < parts) & (rows < total_rows)
    total = tl.sum(tl.load(sums + rows * parts + part, mask=inside, other=0.0), axis=1, keep_dims=True)
    grad, p = product(
        dy, y, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, y_stride, y_outer, y_count, y_step
    )  # fmt: skip
    store(dx, rows, columns, total_columns, mask, scale * p * (grad - total))


def forward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """softmax."""
    tensors: dict[str, TensorFacts | None] = {"x": call.x}
    args: dict[str, Argument] = {**tensors, **places(False, **tensors), **_numbers(call)}
    grid, constants, options, parts = _cut(call, config)
    if not config.split:
        return Launch(softmax_rows, grid, {**args, "y": call.y}, constants, options)
    kept: dict[str, Argument] = {name: Scratch(name, (call.x.rows, parts)) for name in ("largest", "sums")}
    return (
        Launch(softmax_parts, grid, {**args, **kept}, constants, options),
        Launch(softmax_whole, grid, {**args, **kept, "y": call.y}, _with_parts(constants, parts), options),
    )


def backward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """softmax_backward."""
    tensors: dict[str, TensorFacts | None] = {"dy": call.dy, "y": call.y}
    args: dict[str, Argument] = {**tensors, **places(False, **tensors), **_numbers(call)}
    grid, constants, options, parts = _cut(call, config)
    if not config.split:
        return Launch(softmax_rows_backward, grid, {**args, "dx": call.dx}, constants, options)
    kept: dict[str, Argument] = {"sums": Scratch("sums", (call.dy.rows, parts))}
    return (
        Launch(softmax_parts_backward, grid, {**args, **kept}, constants, options),
        Launch(softmax_whole_backward, grid, {**args, **kept, "dx": call.dx}, _with_parts(constants, parts), options),
    )


def _numbers(call: Call) -> dict[str, Argument]:
    facts = main_of(call)
    return {"total_rows": facts.rows, "total_columns": facts.columns, "scale": call.scale}


def _cut(call: Call, config: Config) -> tuple[tuple[int, int, int], dict[str, int], dict[str, int], int]:
    facts = main_of(call)
    parts = triton.cdiv(facts.columns, config.block)
    grid = (triton.cdiv(facts.rows, config.rows) * parts, 1, 1)
    return grid, {"ROWS": config.rows, "BLOCK": config.block}, {"num_warps": config.num_warps}, parts


def _with_parts(constants: dict[str, int], parts: int) -> dict[str, int]:
    return {**constants, "PARTS": triton.next_power_of_2(parts)}
