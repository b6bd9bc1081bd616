"""What the Triton norm kernels share: tiles of rows, loads and stores, sums, and how a tensor's rows are addressed.

The kernels themselves are in `triton` (forward) and `triton_backward`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.core.call import TensorFacts
from tilewright.core.launch import Argument, Config

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
def load_weight(weight, columns, mask, offset, MASKED: tl.constexpr, HAS_OFFSET: tl.constexpr, EVICT: tl.constexpr):
    value = load_tile(weight + columns, mask, MASKED, EVICT).to(tl.float32)
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
def mean_of(total, divisor, POWER: tl.constexpr):
    """total / divisor. POWER is the divisor if that is a power of two: a product is as exact and has no branches."""
    if POWER:
        return total * (1.0 / POWER)
    else:
        return tl.math.div_rn(total, divisor)


def row_arguments(name: str, tensor: TensorFacts | None, two_levels: bool) -> dict[str, Argument]:
    """Where the rows of `tensor` lie, as the kernels take it. `row_offsets` says what the three numbers mean.

    None is a constant of the compiled kernel and costs it nothing: where rows lie side by side, or in one level.
    """
    if tensor is None:
        return {f"{name}_stride": None, f"{name}_outer": None, f"{name}_inner": None}
    levels = tensor.row_levels
    if len(levels) > 2:
        raise ValueError(f"{tensor}: the rows lie in {len(levels)} levels of strides; the kernels read two")
    inner, stride = levels[-1]
    if not two_levels:
        dense = stride == tensor.columns
        return {f"{name}_stride": None if dense else stride, f"{name}_outer": None, f"{name}_inner": None}
    return {f"{name}_stride": stride, f"{name}_outer": levels[0][1] if len(levels) == 2 else 0, f"{name}_inner": inner}


def has_two_levels(*tensors: TensorFacts | None) -> bool:
    return any(tensor is not None and len(tensor.row_levels) > 1 for tensor in tensors)


def tile_constants(columns: int, itemsize: int, config: Config) -> dict[str, Any]:
    """ROWS, CHUNKS, LANES and EVEN: `num_warps // rows` warps share a row, each reading 16 bytes a thread."""
    block = triton.next_power_of_2(columns)
    lanes = min(block, 32 * (16 // itemsize) * max(1, config.num_warps // config.rows))
    return {"ROWS": config.rows, "CHUNKS": block // lanes, "LANES": lanes, "EVEN": block == columns}


def power_of_2(divisor: int) -> int:
    """`divisor` if it is a power of two, else 0: what `mean_of` takes."""
    return divisor if divisor & (divisor - 1) == 0 else 0
