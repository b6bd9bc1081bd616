"""How Triton runs the activation family: one kernel forward and one backward, for one input or a gate and a value.

What tells the ops apart is fixed at compile time. A program takes a tile of [ROWS, BLOCK] elements; where every tensor
is dense (FLAT) the rows do not matter and it takes BLOCK elements of the whole. The functions are in
`triton_functions`, the sizes of tiles in `configs`; what the ops mean is said by their definitions. What has parameters
by column is in `triton_affine`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.activation.configs import is_flat, kind_of, packing, rows_and_columns
from tilewright.ops.activation.triton_functions import act_and_slope, activation
from tilewright.ops.triton_rows import load, places, store, tile_at

# Gate and up in one tensor: PACK is "pairs" where they alternate, else "halves", and GATE_AT and UP_AT say which of the
# two each is, 0 or 1. Without PACK they are tensors of their own and both numbers 0.


@triton.jit
def load_pairs(
    base, index, total_rows, total_columns, stride, outer, count,
    GATE_AT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(gate, up) of a tile's columns: read together, then taken apart."""
    rows, columns, mask = tile_at(index, total_rows, 2 * total_columns, ROWS, 2 * BLOCK, FLAT)
    both = load(base, rows, columns, mask, stride, outer, count, None, "")
    first, second = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    if GATE_AT == 0:
        return first, second
    else:
        return second, first


@triton.jit
def store_pairs(
    base, index, total_rows, total_columns, first, second, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows, columns, mask = tile_at(index, total_rows, 2 * total_columns, ROWS, 2 * BLOCK, FLAT)
    both = tl.reshape(tl.join(first, second), [ROWS, 2 * BLOCK])
    store(base, rows, columns, 2 * total_columns, mask, both)


@triton.jit(do_not_specialize=["total_rows", "gate_count", "up_count"])
def act_forward(
    gate, up, y, gate_stride, gate_outer, gate_count, gate_step, up_stride, up_outer, up_count, up_step,
    total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, PACK: tl.constexpr, GATE_AT: tl.constexpr, UP_AT: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(gate) * up, or act(gate)."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, FLAT)
    if PACK == "pairs":
        g, u = load_pairs(
            gate, index, total_rows, total_columns, gate_stride, gate_outer, gate_count, GATE_AT, FLAT, ROWS, BLOCK
        )
        value = activation(g, ACT) * u
    else:
        at = columns + GATE_AT * total_columns
        g = load(gate, rows, at, mask, gate_stride, gate_outer, gate_count, gate_step, "")
        value = activation(g, ACT)
        if HAS_UP:
            at = columns + UP_AT * total_columns
            value *= load(up, rows, at, mask, up_stride, up_outer, up_count, up_step, "")
    store(y, rows, columns, total_columns, mask, value)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "gate_count", "up_count"])
def act_backward(
    dy, gate, up, dgate, dup, dy_stride, dy_outer, dy_count, dy_step, gate_stride, gate_outer, gate_count, gate_step,
    up_stride, up_outer, up_count, up_step, total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, PACK: tl.constexpr, GATE_AT: tl.constexpr, UP_AT: tl.constexpr,
    NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dy * up * act'(gate) and dup = dy * act(gate), those that are needed. Without up it is 1."""
    index = tl.program_id(0).to(tl.int64)
    rows, columns, mask = tile_at(index, total_rows, total_columns, ROWS, BLOCK, FLAT)
    d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
    if PACK == "pairs":
        g, u = load_pairs(
            gate, index, total_rows, total_columns, gate_stride, gate_outer, gate_count, GATE_AT, FLAT, ROWS, BLOCK
        )
        value, slope = act_and_slope(g, ACT)
        of_gate = d * u * slope
        of_up = d * value
        if GATE_AT == 0:
            store_pairs(dgate, index, total_rows, total_columns, of_gate, of_up, FLAT, ROWS, BLOCK)
        else:
            store_pairs(dgate, index, total_rows, total_columns, of_up, of_gate, FLAT, ROWS, BLOCK)
    else:
        width = 2 * total_columns if PACK == "halves" else total_columns
        gate_at = columns + GATE_AT * total_columns
        up_at = columns + UP_AT * total_columns
        g = load(gate, rows, gate_at, mask, gate_stride, gate_outer, gate_count, gate_step, "")
        value, slope = act_and_slope(g, ACT)
        if NEEDS_DGATE:
            if HAS_UP:
                u = load(up, rows, up_at, mask, up_stride, up_outer, up_count, up_step, "")
                store(dgate, rows, gate_at, width, mask, d * u * slope)
            else:
                store(dgate, rows, gate_at, width, mask, d * slope)
        if NEEDS_DUP:
            store(dup, rows, up_at, width, mask, d * value)


def _shared(
    call: Call, config: Config, **tensors: TensorFacts | None
) -> tuple[tuple[int, int, int], dict[str, Argument], dict[str, Any]]:
    """Grid, and the arguments and constants that both kernels have."""
    pack, second = packing(call), call.options.get("gate") == "second"
    shape, flat = rows_and_columns(call), is_flat(call)
    rows, columns = (1, shape.numel) if flat else (shape.rows, shape.columns)
    programs = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.block)
    x = call.tensors.get("x")  # gate and up are tensors of their own, or one that holds both; or x is all there is
    gate, up = (call.gate, call.up) if x is None else (x, x if pack else None)
    tensors |= {"gate": gate, "up": up}
    args: dict[str, Argument] = {**tensors, **places(flat, **tensors), "total_rows": rows, "total_columns": columns}
    constants = {"ACT": kind_of(call), "HAS_UP": up is not None, "PACK": pack}
    constants |= {"GATE_AT": int(second), "UP_AT": int(pack != "" and not second)}
    constants |= {"FLAT": flat, "ROWS": config.rows, "BLOCK": config.block}
    return (programs, 1, 1), args, constants


def forward(call: Call, config: Config) -> Launch:
    """swiglu, geglu and their packed forms, silu and gelu."""
    grid, args, constants = _shared(call, config)
    args["y"] = call.y
    return Launch(act_forward, grid, args, constants, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> Launch:
    """The gradients of the same."""
    grid, args, constants = _shared(call, config, dy=call.dy)
    dx = call.tensors.get("dx")
    dgate, dup = call.tensors.get("dgate", dx), call.tensors.get("dup", dx if packing(call) else None)
    args |= {"dgate": dgate, "dup": dup}
    constants |= {"NEEDS_DGATE": dgate is not None, "NEEDS_DUP": dup is not None}
    return Launch(act_backward, grid, args, constants, {"num_warps": config.num_warps})
