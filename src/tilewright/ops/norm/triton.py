"""How Triton runs the forward of every norm: one kernel for rows that fit the registers, one that walks wide rows.

Both serve rms_norm, add_rms_norm, layer_norm, add_layer_norm and l2_norm; what tells these apart is fixed at compile
time. What they share with the backward kernels lives in `triton_tiles`; how many rows and warps a program gets in
`triton_configs`. What the ops mean is said by their definitions in `forward`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
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
def reciprocal_root(square, eps, ROOT: tl.constexpr):
    """1 / sqrt(square + eps). "fast" is 2 ulp off: nothing in a 16-bit result, most of the error of a float32 one.

    "refined" mends that by one step of Newton's, with fewer instructions than a rounded root and division take, and no
    branches; it makes NaN of infinity, of which rsqrt is exact. "rounded" is for sums that may be subnormal, which
    rsqrt takes for 0.
    """
    square += eps
    if ROOT == "rounded":
        return tl.math.div_rn(1.0, tl.math.sqrt_rn(square))
    root = tl.math.rsqrt(square)
    if ROOT == "refined":
        better = tl.math.fma(-0.5 * root, tl.math.fma(square * root, root, -1.0), root)
        return tl.where(better == better, better, root)
    return root


@triton.jit
def launder(value, never):
    """`value` again, in a way that the compiler cannot see through; `never` is a condition that does not occur.

    What is used before and after a sum over the row would be kept widened to float32 meanwhile, at twice the registers.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True) ^ never.to(tl.int16)
        return bits.to(value.dtype, bitcast=True)
    else:
        return value


@triton.jit
def recentred(mean, shift):
    """The mean after a second look: `shift` is the mean of what the first one left. An infinite mean leaves NaN."""
    return tl.where(shift == shift, mean + shift, mean)


@triton.jit
def variance(square, left):
    """The mean square about the mean, of that about a value which lies `left` off. An infinite one stays infinite: the
    difference would be NaN."""
    return tl.where(square < float("inf"), square - left * left, square)


@triton.jit
def add_residual(x, residual, pre_bias, HAS_PRE_BIAS: tl.constexpr):
    """x + pre_bias + residual in that order, in float32."""
    value = x.to(tl.float32) + pre_bias if HAS_PRE_BIAS else x.to(tl.float32)
    return value + residual.to(tl.float32)


@triton.jit
def _norm_tile(
    tile, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
    x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
    total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
    HAS_RESIDUAL: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr, SAVE: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, LATE: tl.constexpr,
    FEW: tl.constexpr, POWER: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    MASKED: tl.constexpr = ROWS > 1 or not EVEN
    EVICT: tl.constexpr = "" if FEW else "evict_first"
    columns = tile_columns(CHUNKS, LANES)
    inside = columns < total_columns
    rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None, None]
    row_inside = rows < total_rows
    mask = row_inside if EVEN else inside & row_inside
    out = rows * total_columns + columns

    value = load_tile(x + row_offsets(rows, x_stride, x_outer, x_inner, INNER) + columns, mask, MASKED, EVICT)
    if HAS_RESIDUAL:
        other = row_offsets(rows, residual_stride, residual_outer, residual_inner, INNER) + columns
        other = load_tile(residual + other, mask, MASKED, EVICT)
        value = add_residual(value, other, added, HAS_PRE_BIAS).to(x.dtype.element_ty)
        store_tile(h + out, value, mask, MASKED)
    never = total_rows < 0
    normal = value.to(tl.float32)
    if FEW and (HAS_WEIGHT or HAS_BIAS):
        # Else the compiler issues the loads of the weights only after the row has come, and a lone row waits twice.
        normal = tl.where(never, scale + shift, normal)
    if CENTER:
        centre = mean_of(row_sum(normal), divisor, POWER)
        normal -= centre
        if not EVEN:
            normal = tl.where(inside, normal, 0.0)
        left, square = row_sums(normal, normal * normal)
        left = mean_of(left, divisor, POWER)
        square = variance(mean_of(square, divisor, POWER), left)
        if LATE:
            normal = launder(value, never).to(tl.float32) - centre
        normal -= left
        if SAVE:
            tl.store(mean + rows, recentred(centre, left), mask=row_inside)
    else:
        square = mean_of(row_sum(normal * normal), divisor, POWER)
        if LATE:
            normal = launder(value, never).to(tl.float32)
    root = reciprocal_root(square, eps, ROOT)
    if SAVE:
        tl.store(rstd + rows, root, mask=row_inside)
    normal *= root
    if CAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    if LATE:
        if HAS_WEIGHT:
            scale = load_weight(weight, columns, inside, weight_offset, not EVEN, HAS_OFFSET, "evict_last")
        if HAS_BIAS:
            shift = load_weight(bias, columns, inside, 0.0, not EVEN, False, "evict_last")
    if HAS_WEIGHT:
        normal *= scale
    if HAS_BIAS:
        normal += shift
    store_tile(y + out, normal, mask, MASKED)


@triton.jit(do_not_specialize=["total_rows", "x_inner", "residual_inner"])
def norm_rows(
    x, residual, pre_bias, weight, bias, y, h, mean, rstd,
    x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
    total_rows, total_columns, divisor, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr, SAVE: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, LATE: tl.constexpr,
    FEW: tl.constexpr, POWER: tl.constexpr, ROOT: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. A program takes one tile, or every `num_programs`-th with the next ones on their way."""
    total_columns = CHUNKS * LANES if EVEN else total_columns  # by a constant, addresses take a shift
    x_stride = total_columns if x_stride is None else x_stride
    residual_stride = total_columns if residual_stride is None else residual_stride
    EVICT: tl.constexpr = "" if FEW else "evict_last"
    columns = tile_columns(CHUNKS, LANES)
    inside = columns < total_columns
    scale = 1.0
    shift = 0.0
    added = 0.0
    if HAS_PRE_BIAS:
        added = load_weight(pre_bias, columns, inside, 0.0, not EVEN, False, EVICT)
    if not LATE:
        if HAS_WEIGHT:
            scale = load_weight(weight, columns, inside, weight_offset, not EVEN, HAS_OFFSET, EVICT)
        if HAS_BIAS:
            shift = load_weight(bias, columns, inside, 0.0, not EVEN, False, EVICT)
    program = tl.program_id(0).to(tl.int64)
    if PERSISTENT:
        for tile in tl.range(program, tl.cdiv(total_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _norm_tile(
                tile, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
                x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
                total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
                HAS_RESIDUAL, HAS_PRE_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_OFFSET, CENTER, CAST, SAVE, INNER,
                ROWS, CHUNKS, LANES, EVEN, LATE, FEW, POWER, ROOT,
            )  # fmt: skip
    else:
        _norm_tile(
            program, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
            x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
            total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
            HAS_RESIDUAL, HAS_PRE_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_OFFSET, CENTER, CAST, SAVE, INNER,
            ROWS, CHUNKS, LANES, EVEN, LATE, FEW, POWER, ROOT,
        )  # fmt: skip


@triton.jit
def _wide_block(
    start, source, residual, pre_bias, source_row, residual_row, total_columns,
    ADD: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One block of a row in its storage dtype; with ADD, the rounded sum of x, pre_bias and residual."""
    columns = start + tl.arange(0, BLOCK)
    inside = columns < total_columns
    value = tl.load(source + source_row + columns, mask=inside, other=0.0, eviction_policy=EVICT)
    if ADD:
        other = tl.load(residual + residual_row + columns, mask=inside, other=0.0, eviction_policy="evict_first")
        added = 0.0
        if HAS_PRE_BIAS:
            added = tl.load(pre_bias + columns, mask=inside, other=0.0).to(tl.float32)
        value = add_residual(value, other, added, HAS_PRE_BIAS).to(source.dtype.element_ty)
    return value, columns, inside


@triton.jit(do_not_specialize=["total_rows", "x_inner", "residual_inner"])
def norm_wide_rows(
    x, residual, pre_bias, weight, bias, y, h, mean, rstd,
    x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
    total_rows, total_columns, divisor, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr, SAVE: tl.constexpr, INNER: tl.constexpr,
    ROOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, read in blocks once for each sum and once more to write; the later reads hit the L2."""
    x_stride = total_columns if x_stride is None else x_stride
    residual_stride = total_columns if residual_stride is None else residual_stride
    row = tl.program_id(0).to(tl.int64)
    x_row = row_offsets(row, x_stride, x_outer, x_inner, INNER)
    residual_row = row  # of no residual, whose levels are None
    if HAS_RESIDUAL:
        residual_row = row_offsets(row, residual_stride, residual_outer, residual_inner, INNER)
    out = row * total_columns
    partial = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, total_columns, BLOCK):
        value, columns, inside = _wide_block(
            start, x, residual, pre_bias, x_row, residual_row, total_columns, HAS_RESIDUAL, HAS_PRE_BIAS, BLOCK,
            "evict_last",
        )  # fmt: skip
        if HAS_RESIDUAL:
            tl.store(h + out + columns, value, mask=inside)
        wide = value.to(tl.float32)
        partial += wide if CENTER else wide * wide
    total = tl.math.div_rn(tl.sum(partial, axis=0), divisor)
    if HAS_RESIDUAL:
        # The sum is read back, not formed again, and other threads of the block may have written what this one reads.
        tl.debug_barrier()
        source, source_row = h, out
    else:
        source, source_row = x, x_row
    centre = 0.0
    if CENTER:
        partial = tl.zeros([BLOCK], tl.float32)
        left = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, total_columns, BLOCK):
            value, columns, inside = _wide_block(
                start, source, residual, pre_bias, source_row, 0, total_columns, False, False, BLOCK, "evict_last"
            )
            wide = tl.where(inside, value.to(tl.float32) - total, 0.0)
            left += wide
            partial += wide * wide
        shift = tl.math.div_rn(tl.sum(left, axis=0), divisor)
        square = variance(tl.math.div_rn(tl.sum(partial, axis=0), divisor), shift)
        centre = recentred(total, shift)
        if SAVE:
            tl.store(mean + row, centre)
    else:
        square = total
    root = reciprocal_root(square, eps, ROOT)
    if SAVE:
        tl.store(rstd + row, root)
    for start in tl.range(0, total_columns, BLOCK):
        value, columns, inside = _wide_block(
            start, source, residual, pre_bias, source_row, 0, total_columns, False, False, BLOCK, "evict_first"
        )
        normal = value.to(tl.float32)
        if CENTER:
            normal -= centre
        normal *= root
        if CAST:
            normal = normal.to(x.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            normal *= load_weight(weight, columns, inside, weight_offset, True, HAS_OFFSET, "evict_last")
        if HAS_BIAS:
            normal += load_weight(bias, columns, inside, 0.0, True, False, "evict_last")
        tl.store(y + out + columns, normal.to(y.dtype.element_ty), mask=inside)


def _root(call: Call) -> str:
    exact = call.has("rstd") or call.x.dtype == torch.float32
    return "rounded" if call.eps < 2.0**-126 else "refined" if exact else "fast"


def forward(call: Call, config: Config) -> Launch:
    """The launch of any forward op of the family. A config with `block` walks the row; others hold it whole."""
    x: TensorFacts = call.x
    tensors = {name: call.tensors.get(name) for name in ("residual", "pre_bias", "weight", "bias", "h", "mean", "rstd")}
    weight_offset = float(call.options.get("weight_offset", 0.0))
    divisor = 1 if call.op == "l2_norm" else x.columns
    two_levels = has_two_levels(x, tensors["residual"])
    args: dict[str, Argument] = {
        "x": x,
        **{name: tensors[name] for name in ("residual", "pre_bias", "weight", "bias")},
        "y": call.y,
        **{name: tensors[name] for name in ("h", "mean", "rstd")},
        **row_arguments("x", x, two_levels),
        **row_arguments("residual", tensors["residual"], two_levels),
        "total_rows": x.rows,
        "total_columns": x.columns,
        "divisor": float(divisor),
        "eps": float(call.eps),
        "weight_offset": weight_offset or None,
    }
    constants: dict[str, Any] = {
        **{f"HAS_{name.upper()}": tensors[name] is not None for name in ("residual", "pre_bias", "weight", "bias")},
        "HAS_OFFSET": weight_offset != 0.0,
        "CENTER": call.op in ("layer_norm", "add_layer_norm"),
        "CAST": bool(call.options.get("cast_before_weight", False)),
        "SAVE": call.has("rstd"),
        "INNER": two_levels,
        "ROOT": _root(call),
    }
    options = {"num_warps": config.num_warps, "num_stages": 1}
    if "block" in config:
        return Launch(norm_wide_rows, (x.rows, 1, 1), args, {**constants, "BLOCK": config.block}, options)
    tiles = math.ceil(x.rows / config.rows)
    per_sm = config.get("per_sm", 0)
    constants |= {"POWER": power_of_2(divisor), **tile_constants(x.columns, x.dtype.itemsize, config)}
    constants |= {name.upper(): bool(config.get(name, 0)) for name in ("late", "few")}
    constants |= {"PERSISTENT": per_sm > 0, "STAGES": config.get("stages", 1)}
    programs = min(tiles, call.device.multiprocessors * per_sm) if per_sm else tiles
    return Launch(norm_rows, (programs, 1, 1), args, constants, options)
