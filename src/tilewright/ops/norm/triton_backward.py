"""How Triton runs the backward of every norm: rows in, dx and one partial row of each weight gradient a program out.

A second, small launch adds the partial rows in a fixed order, so gradients are the same bits every time. From Hopper on
it is on the chip before the first one ends: that says early that it may start, and it waits itself (PDL). Rows too wide
for the registers take a launch of their own for the two sums of a row; the tile kernel then works on column blocks.
The forward is in `triton`, what both share in `triton_tiles`, the choice of rows and warps in `triton_configs`.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.norm.triton_tiles import (
    has_two_levels,
    load_tile,
    load_weight,
    mean_of,
    power_of_2,
    row_arguments,
    row_offsets,
    row_sum,
    row_sums,
    store_tile,
    tile_columns,
    tile_constants,
)


@triton.jit
def _gradient_tile(base, row, columns, column_stride, mask, MASKED: tl.constexpr, UNIT: tl.constexpr):
    if UNIT:
        return load_tile(base + row + columns, mask, MASKED, "evict_first").to(tl.float32)
    else:
        return load_tile(base + row + columns.to(tl.int64) * column_stride, mask, MASKED, "").to(tl.float32)


@triton.jit
def _normalised(value, centre, root, CENTER: tl.constexpr, STORED: tl.constexpr):
    """The normalised value again. STORED: l2_norm saved it, rounded."""
    if STORED:
        return value
    elif CENTER:
        return (value - centre) * root
    else:
        return value * root


@triton.jit(do_not_specialize=["total_rows", "x_inner", "dy_inner", "dh_inner"])
def norm_backward_rows(
    dy, x, weight, mean, rstd, dh, dots, dx, partials,
    dy_stride, dy_outer, dy_inner, dy_column, x_stride, x_outer, x_inner, dh_stride, dh_outer, dh_inner, dh_column,
    total_rows, total_columns, divisor, weight_offset,
    HAS_DY: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_OFFSET: tl.constexpr,
    CENTER: tl.constexpr, STORED: tl.constexpr, CAST: tl.constexpr, INNER: tl.constexpr,
    DY_UNIT: tl.constexpr, DH_UNIT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, NEEDS_DPRE_BIAS: tl.constexpr,
    DOTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
    POWER: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs along axis 0 share the rows, every `num_programs`-th tile each; axis 1 cuts columns if DOTS are given.

    With e = dy * w and n the normalised value, D = rstd * (e - mean(e) - n * mean(e * n)) + dh; mean(e) only if CENTER.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    total_columns = CHUNKS * LANES if EVEN and not DOTS else total_columns
    dy_stride = total_columns if dy_stride is None else dy_stride
    x_stride = total_columns if x_stride is None else x_stride
    dh_stride = total_columns if dh_stride is None else dh_stride
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(total_rows, ROWS)
    columns = tile_columns(CHUNKS, LANES)
    if DOTS:
        columns += tl.program_id(1) * (CHUNKS * LANES)
    inside = columns < total_columns
    lane_rows = tl.arange(0, ROWS).to(tl.int64)[:, None, None]
    MASKED: tl.constexpr = ROWS > 1 or not EVEN
    if HAS_WEIGHT and HAS_DY:
        scale = load_weight(weight, columns, inside, weight_offset, not EVEN, HAS_OFFSET, "evict_last")
    dweight = tl.zeros([ROWS, CHUNKS, LANES], tl.float32)
    dbias = tl.zeros([ROWS, CHUNKS, LANES], tl.float32)
    dpre_bias = tl.zeros([ROWS, CHUNKS, LANES], tl.float32)
    rows = program * ROWS + lane_rows
    if HAS_DY:
        # Too small for the pipeline's copies, so the next rows' statistics are fetched a round early by hand.
        next_root = tl.load(rstd + rows, mask=rows < total_rows, other=0.0)
        if CENTER:
            next_centre = tl.load(mean + rows, mask=rows < total_rows, other=0.0)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = tile * ROWS + lane_rows
        row_inside = rows < total_rows
        mask = row_inside if EVEN else inside & row_inside
        if HAS_DY:
            value = load_tile(
                x + row_offsets(rows, x_stride, x_outer, x_inner, INNER) + columns, mask, MASKED, "evict_first"
            ).to(tl.float32)
            upstream = _gradient_tile(
                dy, row_offsets(rows, dy_stride, dy_outer, dy_inner, INNER), columns, dy_column, mask, MASKED, DY_UNIT
            )
        if HAS_DH:
            total = _gradient_tile(
                dh, row_offsets(rows, dh_stride, dh_outer, dh_inner, INNER), columns, dh_column, mask, MASKED, DH_UNIT
            )
        if HAS_DY:
            root = next_root
            centre = 0.0
            ahead = rows + programs * ROWS
            next_root = tl.load(rstd + ahead, mask=ahead < total_rows, other=0.0)
            if CENTER:
                centre = next_centre
                next_centre = tl.load(mean + ahead, mask=ahead < total_rows, other=0.0)
            normal = _normalised(value, centre, root, CENTER, STORED)
            if not EVEN:
                normal = tl.where(inside, normal, 0.0)
            if NEEDS_DWEIGHT:
                if CAST:
                    dweight += upstream * normal.to(x.dtype.element_ty).to(tl.float32)
                else:
                    dweight += upstream * normal
            if NEEDS_DBIAS:
                dbias += upstream
            scaled = upstream * scale if HAS_WEIGHT else upstream
            if NEEDS_DX or NEEDS_DPRE_BIAS:
                if CENTER:
                    if DOTS:
                        product = tl.load(dots + rows, mask=row_inside, other=0.0)
                        average = tl.load(dots + total_rows + rows, mask=row_inside, other=0.0)
                    else:
                        product, average = row_sums(scaled * normal, scaled)
                        product = mean_of(product, divisor, POWER)
                        average = mean_of(average, divisor, POWER)
                    gradient = (scaled - average - normal * product) * root
                else:
                    if DOTS:
                        product = tl.load(dots + rows, mask=row_inside, other=0.0)
                    else:
                        product = mean_of(row_sum(scaled * normal), divisor, POWER)
                    gradient = (scaled - normal * product) * root
                if HAS_DH:
                    gradient += total
        else:
            gradient = total
        if NEEDS_DPRE_BIAS:
            dpre_bias += gradient if EVEN else tl.where(inside, gradient, 0.0)
        if NEEDS_DX:
            store_tile(dx + rows * total_columns + columns, gradient, mask, MASKED)
    if NEEDS_DWEIGHT:
        place = program * total_columns
        store_tile(partials + place + columns, tl.sum(dweight, axis=0, keep_dims=True), inside, not EVEN)
    if NEEDS_DBIAS:
        place = (NEEDS_DWEIGHT * programs + program) * total_columns
        store_tile(partials + place + columns, tl.sum(dbias, axis=0, keep_dims=True), inside, not EVEN)
    if NEEDS_DPRE_BIAS:
        place = ((NEEDS_DWEIGHT + NEEDS_DBIAS) * programs + program) * total_columns
        store_tile(partials + place + columns, tl.sum(dpre_bias, axis=0, keep_dims=True), inside, not EVEN)


@triton.jit(do_not_specialize=["total_rows", "x_inner", "dy_inner"])
def norm_backward_dots(
    dy, x, weight, mean, rstd, dots,
    dy_stride, dy_outer, dy_inner, dy_column, x_stride, x_outer, x_inner,
    total_rows, total_columns, divisor, weight_offset,
    HAS_WEIGHT: tl.constexpr, HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, STORED: tl.constexpr,
    INNER: tl.constexpr, DY_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean(e * n), and mean(e) if CENTER, of one row a program: what a column block of the tile kernel cannot know."""
    dy_stride = total_columns if dy_stride is None else dy_stride
    x_stride = total_columns if x_stride is None else x_stride
    row = tl.program_id(0).to(tl.int64)
    x_row = row_offsets(row, x_stride, x_outer, x_inner, INNER)
    dy_row = row_offsets(row, dy_stride, dy_outer, dy_inner, INNER)
    root = tl.load(rstd + row)
    centre = tl.load(mean + row) if CENTER else 0.0
    product = tl.zeros([BLOCK], tl.float32)
    average = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, total_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < total_columns
        value = load_tile(x + x_row + columns, inside, True, "").to(tl.float32)
        scaled = _gradient_tile(dy, dy_row, columns, dy_column, inside, True, DY_UNIT)
        if HAS_WEIGHT:
            scaled *= load_weight(weight, columns, inside, weight_offset, True, HAS_OFFSET, "evict_last")
        product += tl.where(inside, scaled * _normalised(value, centre, root, CENTER, STORED), 0.0)
        if CENTER:
            average += scaled
    tl.store(dots + row, tl.math.div_rn(tl.sum(product, axis=0), divisor))
    if CENTER:
        tl.store(dots + total_rows + row, tl.math.div_rn(tl.sum(average, axis=0), divisor))


@triton.jit(do_not_specialize=["groups"])
def sum_partials(
    partials, dweight, dbias, dpre_bias, groups, total_columns,
    NEEDS_DWEIGHT: tl.constexpr, NEEDS_DBIAS: tl.constexpr, NEEDS_DPRE_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[kinds, groups, C] partial rows to one row of each kind, rounded once. Axis 1 of the grid is the kind."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind = tl.program_id(1)
    inside = columns < total_columns
    base = partials + (kind.to(tl.int64) * groups) * total_columns + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, groups, ROWS):
        group = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        total += tl.load(base + group * total_columns, mask=(group < groups) & inside[None, :], other=0.0)
    result = tl.sum(total, axis=0)
    if NEEDS_DWEIGHT:
        if kind == 0:
            tl.store(dweight + columns, result.to(dweight.dtype.element_ty), mask=inside)
    if NEEDS_DBIAS:
        if kind == NEEDS_DWEIGHT:
            tl.store(dbias + columns, result.to(dbias.dtype.element_ty), mask=inside)
    if NEEDS_DPRE_BIAS:
        if kind == NEEDS_DWEIGHT + NEEDS_DBIAS:
            tl.store(dpre_bias + columns, result.to(dpre_bias.dtype.element_ty), mask=inside)


def rms_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """rms_norm_backward: the gradient of rms_norm and, with `dh`, of add_rms_norm."""
    return _backward(call, config, x=call.x, center=False, stored=False)


def layer_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """layer_norm_backward: the gradient of layer_norm and, with `dh`, of add_layer_norm."""
    return _backward(call, config, x=call.x, center=True, stored=False)


def l2_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """l2_norm_backward: what forward saved is y, the normalised value itself."""
    return _backward(call, config, x=call.y, center=False, stored=True)


GRADIENTS = ("dweight", "dbias", "dpre_bias")


def _backward(call: Call, config: Config, x: TensorFacts, center: bool, stored: bool) -> tuple[Launch, ...]:
    dy, dh = call.tensors.get("dy"), call.tensors.get("dh")
    weight, mean = call.tensors.get("weight"), call.tensors.get("mean")
    needed = {name: call.has(name) for name in GRADIENTS}
    weight_offset = float(call.options.get("weight_offset", 0.0))
    two_levels = has_two_levels(x, dy, dh)
    walks = "block" in config
    needs_dots = walks and dy is not None and (call.has("dx") or needed["dpre_bias"])
    dots = Scratch("dots", (2 if center else 1, x.rows)) if needs_dots else None
    pdl = call.device.kind == "cuda" and call.device.sm >= 90 and any(needed.values())
    divisor = 1 if stored else x.columns
    dy_rows = {**row_arguments("dy", dy, two_levels), "dy_column": dy.column_stride if dy is not None else None}
    sizes: dict[str, Argument] = {
        "total_rows": x.rows,
        "total_columns": x.columns,
        "divisor": float(divisor),
        "weight_offset": weight_offset or None,
    }
    shared: dict[str, Any] = {
        "HAS_WEIGHT": weight is not None,
        "HAS_OFFSET": weight_offset != 0.0,
        "CENTER": center,
        "STORED": stored,
        "INNER": two_levels,
        "DY_UNIT": dy is None or dy.column_stride == 1,
    }
    launches = []
    if dots is not None:
        launches.append(
            Launch(
                norm_backward_dots,
                (x.rows, 1, 1),
                {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": call.rstd, "dots": dots}
                | dy_rows | row_arguments("x", x, two_levels) | sizes,
                {**shared, "BLOCK": config.block},
                {"num_warps": config.dot_warps, "num_stages": 1},
            )
        )  # fmt: skip
    width = config.columns if walks else x.columns
    tile = tile_constants(width, x.dtype.itemsize, config)
    tile["EVEN"] = x.columns % (tile["CHUNKS"] * tile["LANES"]) == 0
    cuts = math.ceil(x.columns / (tile["CHUNKS"] * tile["LANES"]))
    groups = min(math.ceil(x.rows / config.rows), max(1, call.device.multiprocessors * config.per_sm // cuts))
    kinds = sum(needed.values())
    partials = Scratch("partials", (kinds, groups, x.columns)) if kinds else None
    launches.append(
        Launch(
            norm_backward_rows,
            (groups, cuts, 1),
            {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": call.rstd, "dh": dh, "dots": dots,
             "dx": call.tensors.get("dx"), "partials": partials}
            | dy_rows | row_arguments("x", x, two_levels) | row_arguments("dh", dh, two_levels)
            | {"dh_column": dh.column_stride if dh is not None else None} | sizes,
            {
                "HAS_DY": dy is not None,
                "HAS_DH": dh is not None,
                **shared,
                "CAST": bool(call.options.get("cast_before_weight", False)),
                "DH_UNIT": dh is None or dh.column_stride == 1,
                "NEEDS_DX": call.has("dx"),
                **{f"NEEDS_{name.upper()}": need for name, need in needed.items()},
                "DOTS": walks,
                **tile,
                "POWER": power_of_2(divisor),
                "STAGES": config.get("stages", 1),
                "PDL": pdl,
            },
            {"num_warps": config.num_warps, "num_stages": 1},
        )
    )  # fmt: skip
    if partials is not None:
        launches.append(_sum_launch(call, partials, needed, pdl))
    return tuple(launches)


def _sum_launch(call: Call, partials: Scratch, needed: dict[str, bool], pdl: bool) -> Launch:
    """All partial rows of a column block in one or two reads, and as many blocks as there are multiprocessors."""
    kinds, groups, columns = partials.shape
    rows = min(512, max(16, triton.next_power_of_2(groups)))
    block = min(128, 8192 // rows)
    while block > 8 and kinds * math.ceil(columns / block) < call.device.multiprocessors * 3 // 4:
        block //= 2
    return Launch(
        sum_partials,
        (math.ceil(columns / block), kinds, 1),
        {"partials": partials, **{name: call.tensors.get(name) for name in GRADIENTS}, "groups": groups}
        | {"total_columns": columns},
        {f"NEEDS_{name.upper()}": need for name, need in needed.items()} | {"ROWS": rows, "COLUMNS": block, "PDL": pdl},
        {"num_warps": max(1, min(8, rows * block // 512)), "num_stages": 1},
        pdl=pdl,
    )
