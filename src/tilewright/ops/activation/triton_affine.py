"""How Triton runs what has parameters by column: one kernel forward, one backward, and the sum of its partial rows.

Forward is act(x * scale + bias + residual), each part left out at compile time where it is absent. Backward sums over
rows in two stages: programs share the rows of a block of columns and each writes one partial row of every sum; a second
launch adds those up in a fixed order, so gradients are the same bits every time. Configs are in `affine_configs`; what
elementwise families share is in `triton_rows`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.affine_configs import act_of, by_column, by_rows, residual_of, summed
from tilewright.ops.activation.configs import rows_and_columns
from tilewright.ops.activation.triton_functions import activation, chain
from tilewright.ops.triton_rows import load, places, store, sum_groups, tile_at, tile_place


@triton.jit
def by_columns(base, columns, total_columns):
    return tl.load(base + columns, mask=columns < total_columns, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit(do_not_specialize=["total_rows", "x_count", "residual_count"])
def affine_forward(
    x, scale, bias, residual, y, x_stride, x_outer, x_count, x_step,
    residual_stride, residual_outer, residual_count, residual_step, total_rows, total_columns,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(x * scale + bias + residual)."""
    rows, columns, mask = tile_at(tl.program_id(0).to(tl.int64), total_rows, total_columns, ROWS, BLOCK, FLAT)
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "")
    if HAS_SCALE:
        value *= by_columns(scale, columns, total_columns)
    if HAS_BIAS:
        value += by_columns(bias, columns, total_columns)
    if HAS_RESIDUAL:
        value += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, residual_step,
                      "")  # fmt: skip
    if ACT != "":
        value = activation(value, ACT)
    store(y, rows, columns, total_columns, mask, value)


@triton.jit
def backward_tile(
    dy, x, residual, dx, s, b, rows, columns, mask, total_columns, dy_stride, dy_outer, dy_count, dy_step,
    x_stride, x_outer, x_count, x_step, residual_stride, residual_outer, residual_count, residual_step,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, READS_X: tl.constexpr,
    NEEDS_DX: tl.constexpr,
):  # fmt: skip
    """dx of a tile is stored; (the gradient of the sum that the activation takes, x) come back, 0 beyond the mask."""
    d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, "")
    v = d
    if READS_X:
        v = load(x, rows, columns, mask, x_stride, x_outer, x_count, x_step, "")
    if ACT != "":
        g = v + b
        if HAS_RESIDUAL:
            g += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, residual_step,
                      "")  # fmt: skip
        d = tl.where(mask, chain(d, g, ACT), 0.0)  # of a bias that is not finite, beyond the mask too
    if NEEDS_DX:
        store(dx, rows, columns, total_columns, mask, d * s if HAS_SCALE else d)
    return d, v


@triton.jit(do_not_specialize=["total_rows", "groups", "dy_count", "x_count", "residual_count"])
def affine_backward(
    dy, x, scale, bias, residual, dx, partials, dy_stride, dy_outer, dy_count, dy_step, x_stride, x_outer, x_count,
    x_step, residual_stride, residual_outer, residual_count, residual_step, total_rows, total_columns, groups,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    READS_X: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DSCALE: tl.constexpr, NEEDS_DBIAS: tl.constexpr,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = d * scale with d = dy * act'(x + bias + residual), and partial sums over rows of d * x and of d.

    With sums the programs of a block of columns share its rows, every `groups`-th tile each.
    """
    SUMS: tl.constexpr = NEEDS_DSCALE or NEEDS_DBIAS
    s = 1.0
    b = 0.0
    if SUMS:
        group, across = tile_place(tl.program_id(0), total_columns, BLOCK)
        columns = across * BLOCK + tl.arange(0, BLOCK)[None, :]
        if HAS_SCALE:
            s = by_columns(scale, columns, total_columns)
        if HAS_BIAS:
            b = by_columns(bias, columns, total_columns)
        dscale = tl.zeros([ROWS, BLOCK], tl.float32)
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
        for tile in tl.range(group, tl.cdiv(total_rows, ROWS), groups, num_stages=STAGES):
            rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
            mask = (rows < total_rows) & (columns < total_columns)
            d, v = backward_tile(
                dy, x, residual, dx, s, b, rows, columns, mask, total_columns, dy_stride, dy_outer, dy_count, dy_step,
                x_stride, x_outer, x_count, x_step, residual_stride, residual_outer, residual_count, residual_step,
                ACT, HAS_SCALE, HAS_RESIDUAL, READS_X, NEEDS_DX,
            )  # fmt: skip
            if NEEDS_DSCALE:
                dscale += d * v
            if NEEDS_DBIAS:
                dbias += d
        inside = columns < total_columns
        place = partials + group * total_columns + columns
        if NEEDS_DSCALE:
            tl.store(place, tl.sum(dscale, axis=0, keep_dims=True), mask=inside)
            place += groups * total_columns
        if NEEDS_DBIAS:
            tl.store(place, tl.sum(dbias, axis=0, keep_dims=True), mask=inside)
    else:
        rows, columns, mask = tile_at(tl.program_id(0).to(tl.int64), total_rows, total_columns, ROWS, BLOCK, FLAT)
        if HAS_SCALE:
            s = by_columns(scale, columns, total_columns)
        if HAS_BIAS:
            b = by_columns(bias, columns, total_columns)
        backward_tile(
            dy, x, residual, dx, s, b, rows, columns, mask, total_columns, dy_stride, dy_outer, dy_count, dy_step,
            x_stride, x_outer, x_count, x_step, residual_stride, residual_outer, residual_count, residual_step,
            ACT, HAS_SCALE, HAS_RESIDUAL, READS_X, NEEDS_DX,
        )  # fmt: skip


def _shared(
    call: Call, config: Config, **tensors: TensorFacts | None
) -> tuple[int, dict[str, Argument], dict[str, Any]]:
    """Programs where nothing is summed, and the arguments and constants of both passes."""
    shape, flat = rows_and_columns(call), not by_rows(call)
    rows, columns = (1, shape.numel) if flat else (shape.rows, shape.columns)
    bias, scale, residual = by_column(call, "bias"), by_column(call, "scale"), residual_of(call)
    tensors |= {"x": call.tensors.get("x"), "residual": residual}
    args: dict[str, Argument] = {**tensors, **places(flat, **tensors), "scale": scale, "bias": bias}
    args |= {"total_rows": rows, "total_columns": columns}
    constants = {
        "ACT": act_of(call),
        "HAS_SCALE": scale is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "FLAT": flat,
        "ROWS": config.rows,
        "BLOCK": config.block,
    }
    return triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.block), args, constants


def forward(call: Call, config: Config) -> Launch:
    """scale_bias_add and bias_act."""
    programs, args, constants = _shared(call, config)
    args["y"] = call.y
    return Launch(affine_forward, (programs, 1, 1), args, constants, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """Their gradients."""
    programs, args, constants = _shared(call, config, dy=call.dy)
    dy, sums = call.dy, summed(call)
    blocks, groups = triton.cdiv(dy.columns, config.block), triton.cdiv(dy.rows, config.rows)
    if sums:
        groups = min(groups, max(1, call.device.multiprocessors * config.per_sm // blocks))
        programs = groups * blocks
    partials = Scratch("partials", (len(sums), groups, dy.columns)) if sums else None
    args |= {"dx": call.tensors.get("dx"), "partials": partials, "groups": groups}
    constants |= {
        "READS_X": constants["ACT"] != "" or "dscale" in sums,
        "NEEDS_DX": call.has("dx"),
        "NEEDS_DSCALE": "dscale" in sums,
        "NEEDS_DBIAS": "dbias" in sums,
        "STAGES": config.get("stages", 1),
    }
    first = Launch(affine_backward, (programs, 1, 1), args, constants, {"num_warps": config.num_warps})
    return first if partials is None else (first, sum_groups(call, partials, *sums.values()))
