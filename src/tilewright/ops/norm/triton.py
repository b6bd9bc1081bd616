"""How Triton runs the forward of every norm: one kernel for rows that fit the registers, one that walks wide rows.

Both serve rms_norm, add_rms_norm, layer_norm, add_layer_norm and l2_norm; what tells these apart is fixed at compile
time. The tile helpers are shared with the backward kernels, which live in `triton_backward`; how many rows and warps a
program gets lives in `triton_configs`. What the ops mean is said by their definitions in `forward`.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch

# A tile is [ROWS, CHUNKS, LANES]: column c of a row stands at chunk c // LANES, lane c % LANES. Triton gives warps to
# the lanes first and then to the rows, so LANES decides how many warps share a row. With one warp a row the sums need
# no barrier at all.


@triton.jit
def tile_columns(CHUNKS: tl.constexpr, LANES: tl.constexpr):
    return tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def row_offsets(rows, stride, outer, inner, INNER: tl.constexpr):
    """Element offsets of int64 `rows` that lie in one level (row * stride) or in two (`inner` rows to a block)."""
    if INNER:
        return (rows // inner) * outer + (rows % inner) * stride
    else:
        return rows * stride


@triton.jit
def load_tile(pointers, mask, MASKED: tl.constexpr, EVICT: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def store_tile(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty))


@triton.jit
def load_weight(weight, columns, mask, offset, MASKED: tl.constexpr, HAS_OFFSET: tl.constexpr):
    value = load_tile(weight + columns, mask, MASKED, "evict_last").to(tl.float32)
    if HAS_OFFSET:
        value += offset
    return value


@triton.jit
def row_sum(values):
    return tl.sum(tl.sum(values, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def row_sums(first, second):
    """Both sums for one exchange between warps instead of two."""
    pair = tl.join(first, second)
    pair = tl.sum(tl.sum(pair, axis=1, keep_dims=True), axis=2, keep_dims=True)
    return tl.split(pair)


@triton.jit
def reciprocal_root(square, eps):
    """The approximate rsqrt is 2 ulp off and would be most of the error of a float32 norm; one row needs it once."""
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(square + eps))


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
def add_residual(x, residual, pre_bias):
    """x + pre_bias + residual in that order, in float32; `pre_bias` may be the scalar 0."""
    return x.to(tl.float32) + pre_bias + residual.to(tl.float32)


@triton.jit
def _norm_tile(
    tile, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
    x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
    total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
    HAS_RESIDUAL: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr, SAVE: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    MASKED: tl.constexpr = ROWS > 1 or not EVEN
    columns = tile_columns(CHUNKS, LANES)
    inside = columns < total_columns
    rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None, None]
    row_inside = rows < total_rows
    mask = row_inside if EVEN else inside & row_inside
    out = rows * total_columns + columns

    value = load_tile(x + row_offsets(rows, x_stride, x_outer, x_inner, INNER) + columns, mask, MASKED, "evict_first")
    if HAS_RESIDUAL:
        other = row_offsets(rows, residual_stride, residual_outer, residual_inner, INNER) + columns
        other = load_tile(residual + other, mask, MASKED, "evict_first")
        value = add_residual(value, other, added).to(x.dtype.element_ty)
        store_tile(h + out, value, mask, MASKED)
    never = total_rows < 0
    normal = value.to(tl.float32)
    if CENTER:
        centre = tl.math.div_rn(row_sum(normal), divisor)
        normal -= centre
        if not EVEN:
            normal = tl.where(inside, normal, 0.0)
        left, square = row_sums(normal, normal * normal)
        left = tl.math.div_rn(left, divisor)
        square = tl.math.div_rn(square, divisor) - left * left
        if LATE:
            normal = launder(value, never).to(tl.float32) - centre
        normal -= left
        if SAVE:
            tl.store(mean + rows, recentred(centre, left), mask=row_inside)
    else:
        square = tl.math.div_rn(row_sum(normal * normal), divisor)
        if LATE:
            normal = launder(value, never).to(tl.float32)
    root = reciprocal_root(square, eps)
    if SAVE:
        tl.store(rstd + rows, root, mask=row_inside)
    normal *= root
    if CAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    if LATE:
        if HAS_WEIGHT:
            scale = load_weight(weight, columns, inside, weight_offset, not EVEN, HAS_OFFSET)
        if HAS_BIAS:
            shift = load_weight(bias, columns, inside, 0.0, not EVEN, False)
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
    PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. A program takes one tile, or every `num_programs`-th with the next ones on their way."""
    columns = tile_columns(CHUNKS, LANES)
    inside = columns < total_columns
    scale = 1.0
    shift = 0.0
    added = 0.0
    if HAS_PRE_BIAS:
        added = load_weight(pre_bias, columns, inside, 0.0, not EVEN, False)
    if not LATE:
        if HAS_WEIGHT:
            scale = load_weight(weight, columns, inside, weight_offset, not EVEN, HAS_OFFSET)
        if HAS_BIAS:
            shift = load_weight(bias, columns, inside, 0.0, not EVEN, False)
    program = tl.program_id(0).to(tl.int64)
    if PERSISTENT:
        for tile in tl.range(program, tl.cdiv(total_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _norm_tile(
                tile, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
                x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
                total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
                HAS_RESIDUAL, HAS_PRE_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_OFFSET, CENTER, CAST, SAVE, INNER,
                ROWS, CHUNKS, LANES, EVEN, LATE,
            )  # fmt: skip
    else:
        _norm_tile(
            program, x, residual, pre_bias, weight, bias, y, h, mean, rstd,
            x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
            total_rows, total_columns, divisor, eps, weight_offset, scale, shift, added,
            HAS_RESIDUAL, HAS_PRE_BIAS, HAS_WEIGHT, HAS_BIAS, HAS_OFFSET, CENTER, CAST, SAVE, INNER,
            ROWS, CHUNKS, LANES, EVEN, LATE,
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
        value = add_residual(value, other, added).to(source.dtype.element_ty)
    return value, columns, inside


@triton.jit(do_not_specialize=["total_rows", "x_inner", "residual_inner"])
def norm_wide_rows(
    x, residual, pre_bias, weight, bias, y, h, mean, rstd,
    x_stride, x_outer, x_inner, residual_stride, residual_outer, residual_inner,
    total_rows, total_columns, divisor, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_PRE_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr, SAVE: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, read in blocks once for each sum and once more to write; the later reads hit the L2."""
    row = tl.program_id(0).to(tl.int64)
    x_row = row_offsets(row, x_stride, x_outer, x_inner, INNER)
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
        square = tl.math.div_rn(tl.sum(partial, axis=0), divisor) - shift * shift
        centre = recentred(total, shift)
        if SAVE:
            tl.store(mean + row, centre)
    else:
        square = total
    root = reciprocal_root(square, eps)
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
            normal *= load_weight(weight, columns, inside, weight_offset, True, HAS_OFFSET)
        if HAS_BIAS:
            normal += load_weight(bias, columns, inside, 0.0, True, False)
        tl.store(y + out + columns, normal.to(y.dtype.element_ty), mask=inside)


def row_arguments(name: str, tensor: TensorFacts | None, two_levels: bool) -> dict[str, Argument]:
    """Where the rows of `tensor` lie, as the kernels take it. `row_offsets` says what the three numbers mean."""
    if tensor is None:
        return {f"{name}_stride": 0, f"{name}_outer": 0, f"{name}_inner": 1}
    levels = tensor.row_levels
    if len(levels) > 2:
        raise ValueError(f"{tensor}: the rows lie in {len(levels)} levels of strides; the kernels read two")
    inner, stride = levels[-1]
    outer = levels[0][1] if len(levels) == 2 else 0
    return {f"{name}_stride": stride, f"{name}_outer": outer, f"{name}_inner": inner if two_levels else 1}


def has_two_levels(*tensors: TensorFacts | None) -> bool:
    return any(tensor is not None and len(tensor.row_levels) > 1 for tensor in tensors)


def tile_constants(columns: int, itemsize: int, config: Config) -> dict[str, Any]:
    """ROWS, CHUNKS, LANES and EVEN: `num_warps // rows` warps share a row, each reading 16 bytes a thread."""
    block = triton.next_power_of_2(columns)
    lanes = min(block, 32 * (16 // itemsize) * max(1, config.num_warps // config.rows))
    return {"ROWS": config.rows, "CHUNKS": block // lanes, "LANES": lanes, "EVEN": block == columns}


def forward(call: Call, config: Config) -> Launch:
    """The launch of any forward op of the family. A config with `block` walks the row; others hold it whole."""
    x: TensorFacts = call.x
    tensors = {name: call.tensors.get(name) for name in ("residual", "pre_bias", "weight", "bias", "h", "mean", "rstd")}
    weight_offset = float(call.options.get("weight_offset", 0.0))
    center = call.op in ("layer_norm", "add_layer_norm")
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
        "divisor": 1.0 if call.op == "l2_norm" else float(x.columns),
        "eps": float(call.eps),
        "weight_offset": weight_offset,
    }
    constants: dict[str, Any] = {
        "HAS_RESIDUAL": tensors["residual"] is not None,
        "HAS_PRE_BIAS": tensors["pre_bias"] is not None,
        "HAS_WEIGHT": tensors["weight"] is not None,
        "HAS_BIAS": tensors["bias"] is not None,
        "HAS_OFFSET": weight_offset != 0.0,
        "CENTER": center,
        "CAST": bool(call.options.get("cast_before_weight", False)),
        "SAVE": tensors["rstd"] is not None,
        "INNER": two_levels,
    }
    options = {"num_warps": config.num_warps, "num_stages": 1}
    if "block" in config:
        return Launch(norm_wide_rows, (x.rows, 1, 1), args, {**constants, "BLOCK": config.block}, options)
    tiles = math.ceil(x.rows / config.rows)
    per_sm = config.get("per_sm", 0)
    constants |= tile_constants(x.columns, x.dtype.itemsize, config)
    constants |= {"LATE": bool(config.get("late", 0)), "PERSISTENT": per_sm > 0, "STAGES": config.get("stages", 1)}
    programs = min(tiles, call.device.multiprocessors * per_sm) if per_sm else tiles
    return Launch(norm_rows, (programs, 1, 1), args, constants, options)
