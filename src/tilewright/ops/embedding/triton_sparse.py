"""How Triton runs embedding_bag_mean_sparse_backward: a few entries and a block of columns a program.

An entry is a place among all ids; its bag follows from that. Neighbouring entries are of one bag mostly, whose row of
`dout` then comes from a cache: the time is that of writing the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch
from tilewright.ops.embedding.triton_backward import bag_of, bag_share
from tilewright.ops.triton_rows import row_places, row_start, tile_place


@triton.jit(do_not_specialize=["total", "per_bag", "indices_count", "dout_count"])
def bag_entries(
    dout, indices, count, places, ids, values, dout_stride, dout_outer, dout_count, dout_step, indices_stride,
    indices_outer, indices_count, step, total, per_bag, total_columns,
    NARROW: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids = the id at each place; values = dout * (1 / count) of its bag."""
    down, across = tile_place(tl.program_id(0), total_columns, BLOCK)
    entries = down * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = across * BLOCK + tl.arange(0, BLOCK)
    inside = entries < total
    place = tl.load(places + entries, mask=inside, other=0)
    bag = bag_of(place, per_bag, NARROW)
    mask = inside[:, None] if EVEN else inside[:, None] & (columns < total_columns)[None, :]
    value = bag_share(dout, count, bag, inside, columns, mask, dout_stride, dout_outer, dout_count, dout_step)
    to = (entries * total_columns)[:, None] + columns[None, :]
    tl.store(values + to, value.to(values.dtype.element_ty), mask=mask)
    first = row_start(bag, indices_stride, indices_outer, indices_count)
    wanted = inside & (across == 0)
    one = tl.load(indices + first + (place - bag * per_bag) * step, mask=wanted, other=0)
    tl.store(ids + entries, one.to(tl.int64), mask=wanted)


def backward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean_sparse_backward."""
    dout: TensorFacts = call.dout
    indices: TensorFacts = call.indices
    total, columns = call.places.numel, dout.columns
    args = {
        **{name: call[name] for name in ("dout", "indices", "count", "places", "ids", "values")},
        **row_places("dout", dout),
        "dout_step": None if dout.column_stride == 1 else dout.column_stride,
        **row_places("indices", indices),
        "step": indices.column_stride,
        "total": total,
        "per_bag": indices.columns,
        "total_columns": columns,
    }
    constants = {
        "NARROW": indices.numel < 2**31,
        "EVEN": columns % config.block == 0,
        "ROWS": config.rows,
        "BLOCK": config.block,
    }
    grid = triton.cdiv(total, config.rows) * triton.cdiv(columns, config.block)
    return Launch(bag_entries, (grid, 1, 1), args, constants, {"num_warps": config.num_warps})
