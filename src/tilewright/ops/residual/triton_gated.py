"""How Triton runs gated_residual and its gradient. What the ops mean is said by their definitions.

The gate's gradient is summed in two stages where the gate is [C]: a program keeps to a block of columns and visits
every so many rows, then a second launch adds what each has left. Where it is [..., 1] a program keeps to its rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.residual.configs import gate_of, is_flat, sum_of
from tilewright.ops.triton_rows import load, places, store, sum_groups, tile_at


@triton.jit
def gate_at(gate, rows, columns, mask, stride, outer, count, step, BROADCAST: tl.constexpr):
    """The gate of a tile; [ROWS, 1] of it where all columns of a row share one."""
    if BROADCAST == "columns":
        return load(gate, rows, columns * 0, mask, stride, outer, count, step, "evict_last")
    elif BROADCAST == "rows":
        return load(gate, rows, columns, mask, stride, outer, count, step, "evict_last")
    else:
        return load(gate, rows, columns, mask, stride, outer, count, step, "")


@triton.jit(do_not_specialize=["total_rows", "x_count", "gate_count", "residual_count"])
def gated_forward(
    x, gate, residual, y, x_stride, x_outer, x_count, x_step, gate_stride, gate_outer, gate_count, gate_step,
    residual_stride, residual_outer, residual_count, residual_step, total_rows, total_columns,
    BROADCAST: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = residual + x * gate."""
    rows, columns, mask = tile_at(tl.program_id(0).to(tl.int64), total_rows, total_columns, ROWS, BLOCK, FLAT)
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "")
    value *= gate_at(gate, rows, columns, mask, gate_stride, gate_outer, gate_count, gate_step, BROADCAST)
    value += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, residual_step,
                  "")  # fmt: skip
    store(y, rows, columns, total_columns, mask, value)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "x_count", "gate_count"])
def gated_backward(
    dy, x, gate, dx, dgate, partials, dy_stride, dy_outer, dy_count, dy_step, x_stride, x_outer, x_count, x_step,
    gate_stride, gate_outer, gate_count, gate_step, total_rows, total_columns,
    BROADCAST: tl.constexpr, SUM: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DGATE: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx = dy * gate and dgate = dy * x, those that are needed. SUM "rows": a program sums every `num_programs`-th tile
    of its columns; "columns": all tiles of its rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(total_columns, BLOCK)
    if SUM == "rows":
        start = program * blocks + tl.program_id(1)
        stop = tl.cdiv(total_rows, ROWS) * blocks
        step = tl.num_programs(0) * blocks
    elif SUM == "columns":
        start = program * blocks
        stop = start + blocks
        step = 1
    else:
        start = program
        stop = program + 1
        step = 1
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in tl.range(start, stop, step):
        rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, FLAT)
        d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
        if NEEDS_DGATE:
            value = d * load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "")
            if SUM == "none":
                store(dgate, rows, columns, total_columns, mask, value)
            else:
                total += tl.where(mask, value, 0.0)
        if NEEDS_DX:
            g = gate_at(gate, rows, columns, mask, gate_stride, gate_outer, gate_count, gate_step, BROADCAST)
            store(dx, rows, columns, total_columns, mask, d * g)
    if SUM == "rows":
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(partials + program * total_columns + columns, tl.sum(total, axis=0), mask=columns < total_columns)
    if SUM == "columns":
        rows = program * ROWS + tl.arange(0, ROWS)
        tl.store(dgate + rows, tl.sum(total, axis=1).to(dgate.dtype.element_ty), mask=rows < total_rows)


def _shared(call: Call, config: Config, **tensors: TensorFacts) -> tuple[int, int, dict[str, Argument], dict[str, Any]]:
    """Tiles of rows and of columns, and the arguments and constants that both passes have."""
    x, flat = call.x, is_flat(call)
    rows, columns = (1, x.numel) if flat else (x.rows, x.columns)
    args: dict[str, Argument] = {**tensors, **places(flat, **tensors), "total_rows": rows, "total_columns": columns}
    tile = {"FLAT": flat, "ROWS": 1 if flat else config.rows, "BLOCK": config.block}
    return triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, config.block), args, tile


def forward(call: Call, config: Config) -> Launch:
    """gated_residual."""
    high, wide, args, constants = _shared(call, config, x=call.x, gate=call.gate, residual=call.residual)
    args["y"] = call.y
    constants["BROADCAST"] = gate_of(call)
    return Launch(gated_forward, (high * wide, 1, 1), args, constants, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """gated_residual_backward."""
    high, wide, args, constants = _shared(call, config, dy=call.dy, x=call.x, gate=call.gate)
    summed = sum_of(call)
    groups = min(high, -(-call.device.multiprocessors * config.per_sm // wide))
    partials = Scratch("partials", (groups, call.x.columns)) if summed == "rows" else None
    pdl = partials is not None and call.device.kind == "cuda" and call.device.sm >= 90
    grids = {"rows": (groups, wide, 1), "columns": (high, 1, 1), "none": (high * wide, 1, 1)}
    args |= {"dx": call.tensors.get("dx"), "partials": partials}
    args["dgate"] = None if partials is not None else call.tensors.get("dgate")
    constants |= {"BROADCAST": gate_of(call), "SUM": summed, "PDL": pdl}
    constants |= {"NEEDS_DX": call.has("dx"), "NEEDS_DGATE": call.has("dgate")}
    first = Launch(gated_backward, grids[summed], args, constants, {"num_warps": config.num_warps})
    return (first,) if partials is None else (first, sum_groups(call, partials, call.dgate, pdl=pdl))
