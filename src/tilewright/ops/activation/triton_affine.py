"""How Triton runs what has parameters by column: one kernel forward, one backward, and the sum of its partial rows.

Forward is act(x * scale + bias + residual), each part left out at compile time where it is absent. Backward sums over
rows in two stages: programs share the rows of a block of columns and each writes one partial row of every sum; a second
launch adds those up in a fixed order, so gradients are the same bits every time. Configs are in `affine_configs`; what
both passes share with the other activations is in `triton`.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.affine_configs import act_of, by_column, by_rows, residual_of, row_inputs, summed
from tilewright.ops.activation.configs import rows_and_columns
from tilewright.ops.activation.triton import load, places, store, tile_of
from tilewright.ops.activation.triton_functions import activation, chain


@triton.jit
def by_columns(base, columns, total_columns):
    return tl.load(base + columns, mask=columns < total_columns, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit(do_not_specialize=["total_rows", "x_count", "residual_count"])
def affine_forward(
    x, scale, bias, residual, y, x_stride, x_outer, x_count, residual_stride, residual_outer, residual_count,
    total_rows, total_columns,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = act(x * scale + bias + residual)."""
    rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
    value = load(x, rows, columns, mask, x_stride, x_outer, x_count, 1, INNER, True)
    if HAS_SCALE:
        value *= by_columns(scale, columns, total_columns)
    if HAS_BIAS:
        value += by_columns(bias, columns, total_columns)
    if HAS_RESIDUAL:
        value += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, 1, INNER, True)
    if ACT != "":
        value = activation(value, ACT)
    store(y, rows, columns, total_columns, mask, value)


@triton.jit
def backward_tile(
    dy, x, residual, dx, s, b, rows, columns, mask, total_columns, dy_stride, dy_outer, dy_count, dy_step,
    x_stride, x_outer, x_count, residual_stride, residual_outer, residual_count,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, READS_X: tl.constexpr,
    NEEDS_DX: tl.constexpr, DY_UNIT: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dx of a tile is stored; (the gradient of the sum that the activation takes, x) come back, 0 beyond the mask."""
    d = load(dy, rows, columns, mask, dy_stride, dy_outer, dy_count, dy_step, INNER, DY_UNIT)
    v = d
    if READS_X:
        v = load(x, rows, columns, mask, x_stride, x_outer, x_count, 1, INNER, True)
    if ACT != "":
        g = v + b
        if HAS_RESIDUAL:
            g += load(residual, rows, columns, mask, residual_stride, residual_outer, residual_count, 1, INNER, True)
        d = tl.where(mask, chain(d, g, ACT), 0.0)  # of a bias that is not finite, beyond the mask too
    if NEEDS_DX:
        store(dx, rows, columns, total_columns, mask, d * s if HAS_SCALE else d)
    return d, v


@triton.jit(do_not_specialize=["total_rows", "groups", "dy_count", "x_count", "residual_count"])
def affine_backward(
    dy, x, scale, bias, residual, dx, partials, dy_stride, dy_outer, dy_count, dy_step, x_stride, x_outer, x_count,
    residual_stride, residual_outer, residual_count, total_rows, total_columns, groups,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    READS_X: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DSCALE: tl.constexpr, NEEDS_DBIAS: tl.constexpr,
    DY_UNIT: tl.constexpr, INNER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx = d * scale with d = dy * act'(x + bias + residual), and partial sums over rows of d * x and of d.

    With sums the programs of a block of columns share its rows, every `groups`-th tile each.
    """
    SUMS: tl.constexpr = NEEDS_DSCALE or NEEDS_DBIAS
    s = 1.0
    b = 0.0
    if SUMS:
        program = tl.program_id(0).to(tl.int64)
        blocks = tl.cdiv(total_columns, BLOCK)
        group = program // blocks
        columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
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
                x_stride, x_outer, x_count, residual_stride, residual_outer, residual_count,
                ACT, HAS_SCALE, HAS_RESIDUAL, READS_X, NEEDS_DX, DY_UNIT, INNER,
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
        rows, columns, mask = tile_of(total_rows, total_columns, ROWS, BLOCK, FLAT)
        if HAS_SCALE:
            s = by_columns(scale, columns, total_columns)
        if HAS_BIAS:
            b = by_columns(bias, columns, total_columns)
        backward_tile(
            dy, x, residual, dx, s, b, rows, columns, mask, total_columns, dy_stride, dy_outer, dy_count, dy_step,
            x_stride, x_outer, x_count, residual_stride, residual_outer, residual_count,
            ACT, HAS_SCALE, HAS_RESIDUAL, READS_X, NEEDS_DX, DY_UNIT, INNER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["groups"])
def sum_partials(
    partials, first, second, groups, total_columns, BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """[sums, groups, C] partial rows to one row of each sum, rounded once. Axis 1 of the grid is the sum."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    which = tl.program_id(1)
    inside = columns < total_columns
    base = partials + which.to(tl.int64) * groups * total_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, groups, ROWS):
        group = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        total += tl.load(base + group * total_columns + columns, mask=(group < groups) & inside, other=0.0)
    result = tl.sum(total, axis=0, keep_dims=True)
    if which == 0:
        tl.store(first + columns, result.to(first.dtype.element_ty), mask=inside)
    if BOTH:
        if which == 1:
            tl.store(second + columns, result.to(second.dtype.element_ty), mask=inside)


def _shared(call: Call, config: Config) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Arguments and constants of both passes: what there is, and where its rows lie."""
    shape = rows_and_columns(call)
    bias, scale = by_column(call, "bias"), by_column(call, "scale")
    two_levels = by_rows(call) and any(len(facts.row_levels) > 1 for facts in row_inputs(call))
    residual = residual_of(call)
    args: dict[str, Argument] = {
        "x": call.tensors.get("x"),
        "scale": scale,
        "bias": bias,
        "residual": residual,
        **places(two_levels, x=call.tensors.get("x"), residual=residual),
        "total_rows": shape.rows,
        "total_columns": shape.columns,
    }
    constants = {
        "ACT": act_of(call),
        "HAS_SCALE": scale is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "INNER": two_levels,
        "FLAT": not by_rows(call),
        "ROWS": config.rows,
        "BLOCK": config.block,
    }
    return args, constants


def _programs(call: Call, config: Config) -> int:
    shape = rows_and_columns(call)
    rows, columns = (shape.rows, shape.columns) if by_rows(call) else (1, shape.numel)
    return math.ceil(rows / config.rows) * math.ceil(columns / config.block)


def forward(call: Call, config: Config) -> Launch:
    """scale_bias_add and bias_act."""
    args, constants = _shared(call, config)
    args["y"] = call.y
    return Launch(affine_forward, (_programs(call, config), 1, 1), args, constants, {"num_warps": config.num_warps})


def backward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """Their gradients."""
    args, constants = _shared(call, config)
    dy, sums = call.dy, summed(call)
    blocks = math.ceil(dy.columns / config.block)
    tiles, programs = math.ceil(dy.rows / config.rows), _programs(call, config)
    groups = tiles
    if sums:
        groups = min(tiles, max(1, call.device.multiprocessors * config.per_sm // blocks))
        programs = groups * blocks
    partials = Scratch("partials", (len(sums), groups, dy.columns)) if sums else None
    args |= {"dy": dy, "dx": call.tensors.get("dx"), "partials": partials, "groups": groups}
    args |= {**places(constants["INNER"], dy=dy), "dy_step": None if dy.column_stride == 1 else dy.column_stride}
    constants |= {
        "READS_X": constants["ACT"] != "" or "dscale" in sums,
        "NEEDS_DX": call.has("dx"),
        "NEEDS_DSCALE": "dscale" in sums,
        "NEEDS_DBIAS": "dbias" in sums,
        "DY_UNIT": dy.column_stride == 1,
        "STAGES": config.get("stages", 1),
    }
    options = {"num_warps": config.num_warps}
    first = Launch(affine_backward, (programs, 1, 1), args, constants, options)
    return (first, _sum_launch(call, partials, list(sums.values()))) if partials is not None else first


def _sum_launch(call: Call, partials: Scratch, outputs: list[TensorFacts]) -> Launch:
    """Partial rows in one or two reads, and about as many blocks as there are multiprocessors."""
    sums, groups, columns = partials.shape
    rows = min(256, max(16, triton.next_power_of_2(groups)))
    block = max(8, min(128, 8192 // rows))
    while block > 8 and sums * math.ceil(columns / block) < call.device.multiprocessors * 3 // 4:
        block //= 2
    args: dict[str, Argument] = {"partials": partials, "first": outputs[0], "second": outputs[-1]}
    return Launch(
        sum_partials,
        (math.ceil(columns / block), sums, 1),
        {**args, "groups": groups, "total_columns": columns},
        {"BOTH": sums > 1, "ROWS": rows, "COLUMNS": block},
        {"num_warps": max(1, min(8, rows * block // 512))},
    )
