"""How Triton runs the activation family: one kernel forward and one backward, for one input or a gate and a value.

What tells the ops apart is fixed at compile time. A program takes a tile of [ROWS, BLOCK] elements; where every tensor
is dense (FLAT) the rows do not matter and it takes BLOCK elements of the whole. The sizes of tiles are in `configs`;
what the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.activation.configs import inputs_of, is_flat, kind_of, rows_and_columns

CUBIC = tl.constexpr(0.044715)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
FLAT_SQUARE = tl.constexpr(4096.0)  # the square of functions.FLAT


@triton.jit
def logistic(z):
    """s(z). The exponential may be infinite: its reciprocal is 0."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def inner(g):
    return TWICE_ROOT * g * (1.0 + CUBIC * g * g)


@triton.jit
def activation(g, ACT: tl.constexpr):
    """act(g) in float32. A product with s, not a quotient: minus infinity times 0 is NaN, as the contract has it."""
    if ACT == "silu":
        return g * logistic(g)
    elif ACT == "gelu_tanh":
        return g * logistic(inner(g))
    else:
        return g * (0.5 * (1.0 + tl.math.erf(g * ROOT_HALF)))


@triton.jit
def slope(g, ACT: tl.constexpr):
    """act'(g). 1 - s(z) is written s(-z), which does not cancel."""
    if ACT == "silu":
        return logistic(g) * (1.0 + g * logistic(-g))
    elif ACT == "gelu_tanh":
        z = inner(g)
        s = logistic(z)
        square = tl.minimum(g * g, FLAT_SQUARE)  # else infinity times 0, of a finite g
        return s + g * (s * logistic(-z) * (TWICE_ROOT * (1.0 + 3.0 * CUBIC * square)))
    else:
        return 0.5 * (1.0 + tl.math.erf(g * ROOT_HALF)) + g * (DENSITY * tl.exp(-0.5 * g * g))


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


@triton.jit(do_not_specialize=["total_rows", "gate_count", "up_count"])
def act_forward(
    gate, up, y, gate_stride, gate_outer, gate_count, up_stride, up_outer, up_count, total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(gate) * up, or act(gate)."""
    rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
    g = load(gate, rows, columns, mask, gate_stride, gate_outer, gate_count, 1, INNER, True)
    if HAS_UP:
        u = load(up, rows, columns, mask, up_stride, up_outer, up_count, 1, INNER, True)
        value = activation(g, ACT) * u
    else:
        value = activation(g, ACT)
    store(y, rows, columns, total_columns, mask, value)


@triton.jit(do_not_specialize=["total_rows", "dy_count", "gate_count", "up_count"])
def act_backward(
    dy, gate, up, dgate, dup, dy_stride, dy_outer, dy_count, dy_step, gate_stride, gate_outer, gate_count,
    up_stride, up_outer, up_count, total_rows, total_columns,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, NEEDS_DGATE: tl.constexpr, NEEDS_DUP: tl.constexpr,
    DY_UNIT: tl.constexpr, INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dy * up * act'(gate) and dup = dy * act(gate), those that are needed. Without up it is 1."""
    rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
    d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, INNER, DY_UNIT)
    g = load(gate, rows, columns, mask, gate_stride, gate_outer, gate_count, 1, INNER, True)
    if NEEDS_DGATE:
        if HAS_UP:
            u = load(up, rows, columns, mask, up_stride, up_outer, up_count, 1, INNER, True)
            store(dgate, rows, columns, total_columns, mask, d * u * slope(g, ACT))
        else:
            store(dgate, rows, columns, total_columns, mask, d * slope(g, ACT))
    if NEEDS_DUP:
        store(dup, rows, columns, total_columns, mask, d * activation(g, ACT))


def _places(two_levels: bool, **tensors: TensorFacts | None) -> dict[str, Argument]:
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
    shape, flat = rows_and_columns(call), is_flat(call)
    rows, columns = (1, shape.numel) if flat else (shape.rows, shape.columns)
    programs = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.block)
    two_levels = not flat and any(len(facts.row_levels) > 1 for facts in inputs_of(call).values())
    constants = {"INNER": two_levels, "FLAT": flat, "ROWS": config.rows, "BLOCK": config.block, "ACT": kind_of(call)}
    return (programs, 1, 1), constants


def forward(call: Call, config: Config) -> Launch:
    """swiglu, geglu, silu and gelu."""
    grid, constants = _cut(call, config)
    up: TensorFacts | None = call.tensors.get("up")
    gate: TensorFacts = call.gate if up is not None else call.x
    args: dict[str, Argument] = {
        "gate": gate,
        "up": up,
        "y": call.y,
        **_places(constants["INNER"], gate=gate, up=up),
        "total_rows": gate.rows,
        "total_columns": gate.columns,
    }
    return Launch(act_forward, grid, args, {**constants, "HAS_UP": up is not None}, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> Launch:
    """The gradients of the same."""
    grid, constants = _cut(call, config)
    up: TensorFacts | None = call.tensors.get("up")
    gate: TensorFacts = call.gate if up is not None else call.x
    dgate = call.tensors.get("dgate" if up is not None else "dx")
    dup = call.tensors.get("dup")
    unit = call.dy.column_stride == 1
    args: dict[str, Argument] = {
        "dy": call.dy,
        "gate": gate,
        "up": up,
        "dgate": dgate,
        "dup": dup,
        **_places(constants["INNER"], dy=call.dy, gate=gate, up=up),
        "dy_step": None if unit else call.dy.column_stride,
        "total_rows": gate.rows,
        "total_columns": gate.columns,
    }
    constants |= {"HAS_UP": up is not None, "DY_UNIT": unit}
    constants |= {"NEEDS_DGATE": dgate is not None, "NEEDS_DUP": dup is not None}
    return Launch(act_backward, grid, args, constants, {"num_warps": config.num_warps})
