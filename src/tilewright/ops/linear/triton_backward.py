"""How Triton runs the gradient of linear: dz with its column sums, then the two products, each a tile a program.

With an activation dz is made once, in the dtype of x, and all read it; without one they read dy. Column sums
are two-stage in a fixed order, so dbias is the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.triton_functions import chain
from tilewright.ops.linear.triton_tiles import operand, product, tile_of
from tilewright.ops.triton_rows import row_places, row_start, sum_groups

ROWS, COLUMNS = 16, 128
"""A tile of the pass that makes dz."""
MOST_GROUPS = 64
"""Of rows, with a partial sum each: enough programs for a wide dy, few enough to add up quickly."""


@triton.jit(do_not_specialize=["dy_count", "z_count", "total_rows"])
def pointwise_gradient(
    dy, z, dz, partials,
    dy_stride, dy_outer, dy_count, dy_step, z_stride, z_outer, z_count, total_rows, total_columns, group_rows,
    ACT: tl.constexpr, MAKES_DZ: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dz = dy * act'(z) of `group_rows` rows and a block of columns; the sum of each column goes to `partials`."""
    group = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = columns < total_columns
    last = tl.minimum((group + 1) * group_rows, total_rows)
    dy_columns = columns if dy_step is None else columns * dy_step
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(group * group_rows, last, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < last)[:, None] & column_inside[None, :]
        place = row_start(rows, dy_stride, dy_outer, dy_count)[:, None] + dy_columns[None, :]
        value = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
        if ACT != "none":
            place = row_start(rows, z_stride, z_outer, z_count)[:, None] + columns[None, :]
            value = chain(value, tl.load(z + place, mask=mask, other=0.0).to(tl.float32), ACT)
            value = value.to(z.dtype.element_ty).to(tl.float32)  # as the products take it
        if MAKES_DZ:
            made = rows[:, None] * total_columns + columns[None, :]
            tl.store(dz + made, value.to(dz.dtype.element_ty), mask=mask)
        if SUMS:
            sums += tl.where(mask, value, 0.0)
    if SUMS:
        tl.store(partials + group * total_columns + columns, tl.sum(sums, axis=0), mask=column_inside)


@triton.jit(do_not_specialize=["dz_count"])
def input_gradient(
    dz, weight, dx, dz_stride, dz_outer, dz_count, dz_step, weight_stride, total_rows, total_columns, depth,
    EVEN: tl.constexpr, EVEN_N: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx = dz W."""
    first_row, first_column = tile_of(total_rows, total_columns, GROUP, M, N)
    rows = first_row + tl.arange(0, M)
    columns = first_column + tl.arange(0, N)
    steps = tl.arange(0, K).to(tl.int64)
    row_inside, column_inside = rows < total_rows, columns < total_columns
    dz_rows = row_start(tl.where(row_inside, rows, 0), dz_stride, dz_outer, dz_count)
    a = dz + dz_rows[:, None] + (steps if dz_step is None else steps * dz_step)[None, :]
    b = weight + (steps * weight_stride)[:, None] + columns[None, :]
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, depth, K):
        inside = steps < depth - start
        across = column_inside[None, :] if EVEN else inside[:, None] & column_inside[None, :]
        left = operand(a, inside[None, :], not EVEN)
        total = product(left, operand(b, across, not (EVEN and EVEN_N)), total)
        a += K if dz_step is None else K * dz_step
        b += K * weight_stride
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(dx + rows[:, None] * total_columns + columns[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["dz_count", "x_count", "depth"])
def weight_gradient(
    dz, x, dweight, dz_stride, dz_outer, dz_count, dz_step, x_stride, x_outer, x_count,
    total_rows, total_columns, depth,
    EVEN: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dweight = dz^T x: the sum goes over the rows of both."""
    first_row, first_column = tile_of(total_rows, total_columns, GROUP, M, N)
    rows = first_row + tl.arange(0, M)
    columns = first_column + tl.arange(0, N)
    row_inside, column_inside = rows < total_rows, columns < total_columns
    steps = tl.arange(0, K).to(tl.int64)
    dz_columns = (rows if dz_step is None else rows * dz_step)[:, None]
    a = dz + dz_columns + (steps * dz_stride)[None, :]
    b = x + (steps * x_stride)[:, None] + columns[None, :]
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, depth, K):
        inside = steps < depth - start
        if dz_count is not None:
            a = dz + dz_columns + row_start(start + steps, dz_stride, dz_outer, dz_count)[None, :]
        if x_count is not None:
            b = x + row_start(start + steps, x_stride, x_outer, x_count)[:, None] + columns[None, :]
        down = row_inside[:, None] if EVEN else inside[None, :] & row_inside[:, None]
        across = column_inside[None, :] if EVEN else inside[:, None] & column_inside[None, :]
        left, right = operand(a, down, not (EVEN and EVEN_M)), operand(b, across, not (EVEN and EVEN_N))
        total = product(left, right, total)
        a += K * dz_stride
        b += K * x_stride
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(dweight + rows[:, None] * total_columns + columns[None, :], total.to(dweight.dtype.element_ty), mask=mask)


def backward(call: Call, config: Config) -> list[Launch]:
    """dz and dbias first, then dx and dweight, those that are needed."""
    makes_dz = call.act != "none" and (call.has("dx") or call.has("dweight"))
    dz = Scratch("dz", call.dy.shape, call.x.dtype) if makes_dz else None
    found = [*_pointwise(call, dz)] if makes_dz or call.has("dbias") else []
    if call.has("dx"):
        found.append(_input(call, config, dz))
    if call.has("dweight"):
        found.append(_weight(call, config, dz))
    return found


def _pointwise(call: Call, dz: Scratch | None) -> list[Launch]:
    dy: TensorFacts = call.dy
    sums = call.has("dbias")
    rows = max(ROWS, triton.next_power_of_2(triton.cdiv(dy.rows, MOST_GROUPS)))
    groups = triton.cdiv(dy.rows, rows)
    partials = Scratch("partials", (groups, dy.columns)) if sums else None
    args: dict[str, Argument] = {
        "dy": dy,
        "z": call.z,
        "dz": dz,
        "partials": partials,
        **row_places("dy", dy),
        **row_places("z", call.z),
        "dy_step": None if dy.column_stride == 1 else dy.column_stride,
        "total_rows": dy.rows,
        "total_columns": dy.columns,
        "group_rows": rows,
    }
    constants = {
        "ACT": call.act,
        "MAKES_DZ": dz is not None,
        "SUMS": sums,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
    }
    blocks = triton.cdiv(dy.columns, COLUMNS)
    found = [Launch(pointwise_gradient, (blocks, groups, 1), args, constants, {"num_warps": 4})]
    if partials is not None:
        found.append(sum_groups(call, partials, call.dbias))
    return found


def _input(call: Call, config: Config, dz: Scratch | None) -> Launch:
    weight: TensorFacts = call.weight
    args = {**_upstream(call, dz), "weight": weight, "dx": call.dx}
    args |= {
        "weight_stride": weight.row_levels[0][1],
        "total_rows": call.x.rows,
        "total_columns": weight.columns,
        "depth": weight.rows,
    }
    constants: dict[str, bool | int] = {"EVEN": weight.rows % config.k == 0, "EVEN_N": weight.columns % config.n == 0}
    return _tiled(input_gradient, call.x.rows, weight.columns, args, constants, config)


def _weight(call: Call, config: Config, dz: Scratch | None) -> Launch:
    x: TensorFacts = call.x
    args = {**_upstream(call, dz), "x": x, "dweight": call.dweight, **row_places("x", x)}
    args |= {"total_rows": call.weight.rows, "total_columns": x.columns, "depth": x.rows}
    constants: dict[str, bool | int] = {
        "EVEN": x.rows % config.k == 0,
        "EVEN_M": call.weight.rows % config.m == 0,
        "EVEN_N": x.columns % config.n == 0,
    }
    return _tiled(weight_gradient, call.weight.rows, x.columns, args, constants, config)


def _upstream(call: Call, dz: Scratch | None) -> dict[str, Argument]:
    """What both products read: dz as it was made, or dy as it lies."""
    facts = call.dy if dz is None else dz.facts
    step = None if facts.column_stride == 1 else facts.column_stride
    return {"dz": call.dy if dz is None else dz, **row_places("dz", facts), "dz_step": step}


def _tiled(
    function: object, rows: int, columns: int, args: dict[str, Argument], constants: dict[str, bool | int],
    config: Config,
) -> Launch:  # fmt: skip
    grid = (triton.cdiv(rows, config.m) * triton.cdiv(columns, config.n), 1, 1)
    constants |= {"GROUP": config.group, "M": config.m, "N": config.n, "K": config.k}
    return Launch(function, grid, args, constants, {"num_warps": config.num_warps, "num_stages": config.num_stages})
