"""How Triton runs embedding_bag_mean_sparse_backward: a few entries and a block of columns a program.

An entry is a place among all ids; its bag follows from that. Neighbouring entries are of one bag mostly, whose row of
`dout` then comes from a cache: the time is that of writing the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch
from tilewright.ops.embedding.triton import places as strides_of
from tilewright.ops.embedding.triton import row_start


@triton.jit(do_not_specialize=["total", "per_bag", "indices_inner", "dout_inner"])
def bag_entries(
    dout, indices, count, places, ids, values, dout_stride, dout_outer, dout_inner, dout_step, indices_stride,
    indices_outer, indices_inner, step, total, per_bag, total_columns,
    LEVELS: tl.constexpr, DOUT_LEVELS: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids = the id at each place; values = dout / count of its bag."""
    blocks = tl.cdiv(total_columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    entries = (program // blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < total
    place = tl.load(places + entries, mask=inside, other=0)
    if NARROW:  # a division of 32 bits costs half of one of 64
        bag = (place.to(tl.int32) // per_bag.to(tl.int32)).to(tl.int64)
    else:
        bag = place // per_bag
    many = tl.load(count + bag, mask=inside, other=1.0)
    start = row_start(bag, dout_stride, dout_outer, dout_inner, DOUT_LEVELS)[:, None]
    mask = inside[:, None] if EVEN else inside[:, None] & (columns < total_columns)[None, :]
    at = start + (columns if UNIT else columns.to(tl.int64) * dout_step)[None, :]
    share = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.math.div_rn(share, tl.zeros_like(share) + tl.maximum(many, 1.0)[:, None])
    to = (entries * total_columns)[:, None] + columns[None, :]
    tl.store(values + to, value.to(values.dtype.element_ty), mask=mask)
    first = row_start(bag, indices_stride, indices_outer, indices_inner, LEVELS)
    wanted = inside & ((program % blocks) == 0)
    one = tl.load(indices + first + (place - bag * per_bag) * step, mask=wanted, other=0)
    tl.store(ids + entries, one.to(tl.int64), mask=wanted)


def backward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean_sparse_backward."""
    dout: TensorFacts = call.dout
    indices: TensorFacts = call.indices
    total, columns = call.places.numel, dout.columns
    unit = dout.column_stride == 1
    args = {
        **{name: call[name] for name in ("dout", "indices", "count", "places", "ids", "values")},
        **strides_of("dout", dout),
        "dout_step": None if unit else dout.column_stride,
        **strides_of("indices", indices),
        "step": indices.column_stride,
        "total": total,
        "per_bag": indices.columns,
        "total_columns": columns,
    }
    constants = {
        "LEVELS": len(indices.row_levels),
        "DOUT_LEVELS": len(dout.row_levels),
        "UNIT": unit,
        "NARROW": indices.numel < 2**31,
        "EVEN": columns % config.block == 0,
        "ROWS": config.rows,
        "BLOCK": config.block,
    }
    grid = triton.cdiv(total, config.rows) * triton.cdiv(columns, config.block)
    return Launch(bag_entries, (grid, 1, 1), args, constants, {"num_warps": config.num_warps})
