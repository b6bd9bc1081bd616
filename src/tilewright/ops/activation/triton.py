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
from tilewright.ops.activation.configs import inputs_of, is_flat, kind_of, packing, rows_and_columns
from tilewright.ops.activation.triton_functions import activation, slope


@triton.jit
def tile_of(total_rows, total_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """This program's rows [ROWS, 1] and columns [1, BLOCK], and which of them exist. FLAT: one row of all elements."""
    program = tl.program_id(0).to(tl.int64)
    if FLAT:
        columns = program * BLOCK + tl.arange(0, BLOCK)[None, :]
        rows = tl.zeros([1, 1], tl.int64)
        return rows, columns, columns < total_rows.to(tl.int64) * total_columns
    else:
        blocks = tl.cdiv(total_columns, BLOCK)
        rows = (program // blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
        return rows, columns, (rows < total_rows) & (columns < total_columns)


@triton.jit
def load(base, rows, columns, mask, stride, outer, count, step, INNER: tl.constexpr, UNIT: tl.constexpr):
    """Elements in float32. Rows lie in one level of strides or in two (`count` rows to a block, `outer` apart)."""
    if INNER:
        start = (rows // count) * outer + (rows % count) * stride
    else:
        start = rows * stride
    place = base + start + (columns if UNIT else columns * step)
    return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store(base, rows, columns, total_columns, mask, value):
    tl.store(base + rows * total_columns + columns, value.to(base.dtype.element_ty), mask=mask)


# Gate and up in one tensor: PACK is "pairs" where they alternate, else "halves", and GATE_AT and UP_AT say which of the
# two each is, 0 or 1. Without PACK they are tensors of their own and both numbers 0.


@triton.jit
def load_pairs(
    base, total_rows, total_columns, stride, outer, count,
    GATE_AT: tl.constexpr, INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(gate, up) of this program's columns: read together, then taken apart."""
    rows, columns, mask = tile_of(total_rows, 2 * total_columns, ROWS, 2 * BLOCK, FLAT)
    both = load(base, rows, columns, mask, stride, outer, count, 1, INNER, True)
    first, second = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    if GATE_AT == 0:
        return first, second
    else:
        return second, first


@triton.jit
def store_pairs(
    base, total_rows, total_columns, first, second, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows, columns, mask = tile_of(total_rows, 2 * total_columns, ROWS, 2 * BLOCK, FLAT)
    both = tl.reshape(tl.join(first, second), [ROWS, 2 * BLOCK])
    store(base, rows, columns, 2 * total_columns, mask, both)


@triton.jit(do_not_specialize=["total_rows", "gate_count", "up_count"])
def act_forward(
    gate, up, y, gate_stride, gate_outer, gate_count, up_stride, up_outer, up_count, total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, PACK: tl.constexpr, GATE_AT: tl.constexpr, UP_AT: tl.constexpr,
    INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(gate) * up, or act(gate)."""
    rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
    if PACK == "pairs":
        g, u = load_pairs(
            gate, total_rows, total_columns, gate_stride, gate_outer, gate_count, GATE_AT, INNER, FLAT, ROWS, BLOCK
        )
        value = activation(g, ACT) * u
    else:
        at = columns + GATE_AT * total_columns
        g = load(gate, rows, at, mask, gate_stride, gate_outer, gate_count, 1, INNER, True)
        value = activation(g, ACT)
        if HAS_UP:
            at = columns + UP_AT * total_columns
            value *= load(up, rows, at, mask, up_stride, up_outer, up_count, 1, INNER, True)
    store(y, rows, columns, total_columns, mask, value)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "gate_count", "up_count"])
def act_backward(
    dy, gate, up, dgate, dup, dy_stride, dy_outer, dy_count, dy_step, gate_stride, gate_outer, gate_count,
    up_stride, up_outer, up_count, total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, PACK: tl.constexpr, GATE_AT: tl.constexpr, UP_AT: tl.constexpr,
    NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr,
    DY_UNIT: tl.constexpr, INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dy * up * act'(gate) and dup = dy * act(gate), those that are needed. Without up it is 1."""
    rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
    d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, INNER, DY_UNIT)
    if PACK == "pairs":
        g, u = load_pairs(
            gate, total_rows, total_columns, gate_stride, gate_outer, gate_count, GATE_AT, INNER, FLAT, ROWS, BLOCK
        )
        of_gate = d * u * slope(g, ACT)
        of_up = d * activation(g, ACT)
        if GATE_AT == 0:
            store_pairs(dgate, total_rows, total_columns, of_gate, of_up, FLAT, ROWS, BLOCK)
        else:
            store_pairs(dgate, total_rows, total_columns, of_up, of_gate, FLAT, ROWS, BLOCK)
    else:
        width = 2 * total_columns if PACK == "halves" else total_columns
        gate_at = columns + GATE_AT * total_columns
        up_at = columns + UP_AT * total_columns
        g = load(gate, rows, gate_at, mask, gate_stride, gate_outer, gate_count, 1, INNER, True)
        if NEEDS_DGATE:
            if HAS_UP:
                u = load(up, rows, up_at, mask, up_stride, up_outer, up_count, 1, INNER, True)
                store(dgate, rows, gate_at, width, mask, d * u * slope(g, ACT))
            else:
                store(dgate, rows, gate_at, width, mask, d * slope(g, ACT))
        if NEEDS_DUP:
            store(dup, rows, up_at, width, mask, d * activation(g, ACT))


def places(two_levels: bool, **tensors: TensorFacts | None) -> dict[str, Argument]:
    """Where the rows of each tensor lie: see `load`."""
    found: dict[str, Argument] = {}
    for name, facts in tensors.items():
        levels = facts.row_levels if facts is not None else ((0, 0),)
        count, stride = levels[-1]
        outer = levels[0][1] if len(levels) == 2 else 0
        given = facts is not None
        found |= {
            f"{name}_stride": stride if given else None,
            f"{name}_outer": outer if given and two_levels else None,
            f"{name}_count": count if given and two_levels else None,
        }
    return found


def _cut(call: Call, config: Config) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid, and the constants that both kernels share."""
    pack, second = packing(call), call.options.get("gate") == "second"
    shape, flat = rows_and_columns(call), is_flat(call)
    rows, columns = (1, shape.numel) if flat else (shape.rows, shape.columns)
    programs = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.block)
    two_levels = not flat and any(len(facts.row_levels) > 1 for facts in inputs_of(call).values())
    constants = {"INNER": two_levels, "FLAT": flat, "ROWS": config.rows, "BLOCK": config.block, "ACT": kind_of(call)}
    constants |= {"PACK": pack, "GATE_AT": int(second), "UP_AT": int(pack != "" and not second)}
    return (programs, 1, 1), constants


def _inputs(call: Call) -> tuple[TensorFacts, TensorFacts | None]:
    """(gate, up): tensors of their own, or one that holds both; or x alone."""
    x = call.tensors.get("x")
    return (call.gate, call.up) if x is None else (x, x if packing(call) else None)


def forward(call: Call, config: Config) -> Launch:
    """swiglu, geglu and their packed forms, silu and gelu."""
    grid, constants = _cut(call, config)
    gate, up = _inputs(call)
    args: dict[str, Argument] = {
        "gate": gate,
        "up": up,
        "y": call.y,
        **places(constants["INNER"], gate=gate, up=up),
        "total_rows": gate.rows,
        "total_columns": call.y.columns,
    }
    return Launch(act_forward, grid, args, {**constants, "HAS_UP": up is not None}, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> Launch:
    """The gradients of the same."""
    grid, constants = _cut(call, config)
    gate, up = _inputs(call)
    dx = call.tensors.get("dx")
    dgate, dup = call.tensors.get("dgate", dx), call.tensors.get("dup", dx if packing(call) else None)
    unit = call.dy.column_stride == 1
    args: dict[str, Argument] = {
        "dy": call.dy,
        "gate": gate,
        "up": up,
        "dgate": dgate,
        "dup": dup,
        **places(constants["INNER"], dy=call.dy, gate=gate, up=up),
        "dy_step": None if unit else call.dy.column_stride,
        "total_rows": gate.rows,
        "total_columns": call.dy.columns,
    }
    constants |= {"HAS_UP": up is not None, "DY_UNIT": unit}
    constants |= {"NEEDS_DGATE": dgate is not None, "NEEDS_DUP": dup is not None}
    return Launch(act_backward, grid, args, constants, {"num_warps": config.num_warps})
