"""How Triton runs linear: one tile of y a program, the epilogue in registers. The gradient is in `triton_backward`.

Tiles are read through pointers, asynchronously and `num_stages` deep. Rows past the end are read as row 0, whose
results are not stored; only the end of a sum has to be masked, and only where K is no multiple of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.activation.triton_functions import activation
from tilewright.ops.linear.triton_tiles import forward_arguments, operand, product, tile_of
from tilewright.ops.triton_rows import row_places, row_start


@triton.jit
def epilogue(
    total, bias, residual, y, z, rows, residual_rows, columns, total_rows, total_columns,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """y = act(total + b) + residual of some columns; z = total + b if SAVE."""
    mask = (rows < total_rows)[:, None] & (columns < total_columns)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < total_columns, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None] * total_columns + columns[None, :]
    if SAVE:
        tl.store(z + place, total.to(z.dtype.element_ty), mask=mask)
    value = activation(total, ACT)
    if HAS_RESIDUAL:
        place_of_residual = residual_rows[:, None] + columns[None, :]
        value += tl.load(residual + place_of_residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_count", "residual_count", "total_rows"])
def linear_forward(
    x, weight, bias, residual, y, z,
    x_stride, x_outer, x_count, residual_stride, residual_outer, residual_count, weight_stride,
    total_rows, total_columns, depth,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    EVEN: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y = act(x W^T + b) + residual; z = x W^T + b if SAVE."""
    first_row, first_column = tile_of(total_rows, total_columns, GROUP, M, N)
    rows = first_row + tl.arange(0, M)
    columns = first_column + tl.arange(0, N)
    steps = tl.arange(0, K)
    row_inside, column_inside = rows < total_rows, columns < total_columns
    x_rows = row_start(tl.where(row_inside, rows, 0), x_stride, x_outer, x_count)
    weight_rows = tl.where(column_inside, columns, 0) * weight_stride
    a = x + x_rows[:, None] + steps[None, :]
    b = weight + weight_rows[None, :] + steps[:, None]
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, depth, K):
        inside = steps < depth - start
        total = product(operand(a, inside[None, :], not EVEN), operand(b, inside[:, None], not EVEN), total)
        a += K
        b += K
    residual_rows = rows
    if HAS_RESIDUAL:
        residual_rows = row_start(rows, residual_stride, residual_outer, residual_count)
    if HALVES:  # a wide tile's epilogue in two parts, for which the registers suffice
        left, right = tl.split(tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)))
        columns = first_column + tl.arange(0, N // 2)
        epilogue(left, bias, residual, y, z, rows, residual_rows, columns, total_rows, total_columns,
                 ACT, HAS_BIAS, HAS_RESIDUAL, SAVE)  # fmt: skip
        columns += N // 2
        epilogue(right, bias, residual, y, z, rows, residual_rows, columns, total_rows, total_columns,
                 ACT, HAS_BIAS, HAS_RESIDUAL, SAVE)  # fmt: skip
    else:
        epilogue(total, bias, residual, y, z, rows, residual_rows, columns, total_rows, total_columns,
                 ACT, HAS_BIAS, HAS_RESIDUAL, SAVE)  # fmt: skip


def forward(call: Call, config: Config) -> Launch:
    """y, and z where it is saved."""
    x, weight = call.x, call.weight
    args: dict[str, Argument] = {**forward_arguments(call), **row_places("x", x)}
    constants = {
        "ACT": call.act,
        "HAS_BIAS": call.has("bias"),
        "HAS_RESIDUAL": call.has("residual"),
        "SAVE": call.has("z"),
        "EVEN": x.columns % config.k == 0,
        "HALVES": config.m * config.n >= 128 * 32 * config.num_warps,
        "GROUP": config.group,
        "M": config.m,
        "N": config.n,
        "K": config.k,
    }
    grid = (triton.cdiv(x.rows, config.m) * triton.cdiv(weight.rows, config.n), 1, 1)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(linear_forward, grid, args, constants, options)
