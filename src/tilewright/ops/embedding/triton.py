"""How Triton runs embedding_bag_mean: a few bags and a block of columns a program, one row of each bag at a time.

A thread keeps its columns of a bag's sum in registers from the first id to the last, so that nothing is exchanged
between threads and the order of the sum is that of the ids. `AHEAD` rows are asked for before the first is added. Where
bags are few, `SPLIT` parts of each are summed side by side and added at the end. The gradient is in `triton_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.triton_rows import row_places, row_start, tile_place


@triton.jit
def standing_of(ids, inside, table_rows, padding, HAS_PADDING: tl.constexpr):
    """Which of `ids` (int64) count, and which are bad: neither a row of the table nor padding."""
    in_table = (ids >= 0) & (ids < table_rows)
    if HAS_PADDING:
        real = inside & (ids != padding)
    else:
        real = inside
    return real & in_table, real & (in_table == 0)


@triton.jit(do_not_specialize=["total_bags", "ids", "indices_count", "table_rows", "padding"])
def bag_mean(
    weight, indices, out, count, weight_stride, indices_stride, indices_outer, indices_count, step, total_bags, ids,
    total_columns, table_rows, padding,
    HAS_PADDING: tl.constexpr, NAN: tl.constexpr, SAVE: tl.constexpr,
    EVEN: tl.constexpr, BAGS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = the mean over each bag; count = how many of its ids count, if SAVE. NAN: a bad id makes its bag NaN."""
    down, across = tile_place(tl.program_id(0), total_columns, BLOCK)
    parts = tl.arange(0, BAGS * SPLIT).to(tl.int64)
    bags = down * BAGS + parts // SPLIT
    columns = across * BLOCK + tl.arange(0, BLOCK)
    has_bag, has_column = bags < total_bags, columns[None, :] < total_columns
    first = indices + row_start(bags, indices_stride, indices_outer, indices_count)
    total = tl.zeros([BAGS * SPLIT, BLOCK], tl.float32)
    counted = tl.zeros([BAGS * SPLIT], tl.int32)
    spoilt = tl.zeros([BAGS * SPLIT], tl.int32)
    for start in tl.range(0, ids, AHEAD * SPLIT):
        for ahead in tl.static_range(AHEAD):  # independent loads: the compiler issues them before the first sum
            place = start + ahead * SPLIT + parts % SPLIT
            inside = has_bag & (place < ids)
            # ids are one-dimensional up to here: in two dimensions every thread would load one for each of its columns
            one = tl.load(first + (place if step is None else place * step), mask=inside, other=0).to(tl.int64)
            counts, bad = standing_of(one, inside, table_rows, padding, HAS_PADDING)
            mask = counts[:, None] if EVEN else counts[:, None] & has_column
            row = tl.load(weight + (one * weight_stride)[:, None] + columns[None, :], mask=mask, other=0.0)
            total += row.to(tl.float32)
            counted += counts.to(tl.int32)
            if NAN:
                spoilt |= bad.to(tl.int32)
    if SPLIT > 1:
        total = tl.sum(tl.reshape(total, [BAGS, SPLIT, BLOCK]), axis=1)
        counted = tl.sum(tl.reshape(counted, [BAGS, SPLIT]), axis=1)
        spoilt = tl.max(tl.reshape(spoilt, [BAGS, SPLIT]), axis=1)
        bags = down * BAGS + tl.arange(0, BAGS).to(tl.int64)
        has_bag = bags < total_bags
    many = counted.to(tl.float32)
    mean = tl.math.div_rn(total, tl.zeros([BAGS, BLOCK], tl.float32) + tl.maximum(many, 1.0)[:, None])
    if NAN:
        mean = tl.where(spoilt[:, None] != 0, float("nan"), mean)
    mask = has_bag[:, None] if EVEN else has_bag[:, None] & has_column
    tl.store(out + (bags * total_columns)[:, None] + columns[None, :], mean.to(out.dtype.element_ty), mask=mask)
    if SAVE:
        tl.store(count + bags, many, mask=has_bag & (across == 0))


def padding_of(call: Call) -> tuple[dict[str, Argument], dict[str, bool]]:
    """The padding id and whether there is one."""
    return {"padding": call.padding_idx}, {"HAS_PADDING": call.padding_idx is not None}


def forward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean."""
    weight, indices = call.weight, call.indices
    padding, has_padding = padding_of(call)
    grid = triton.cdiv(indices.rows, config.bags) * triton.cdiv(weight.columns, config.block)
    args: dict[str, Argument] = {
        "weight": weight,
        "indices": indices,
        "out": call.out,
        "count": call["count"],
        "weight_stride": weight.row_levels[-1][1],
        **row_places("indices", indices),
        "step": None if indices.column_stride == 1 else indices.column_stride,
        "total_bags": indices.rows,
        "ids": indices.columns,
        "total_columns": weight.columns,
        "table_rows": weight.rows,
        **padding,
    }
    constants = {
        **has_padding,
        "NAN": call.out_of_range == "error",
        "SAVE": call.saving,
        "EVEN": weight.columns % config.block == 0,
        "BAGS": config.bags,
        "SPLIT": config.split,
        "BLOCK": config.block,
        "AHEAD": config.ahead,
    }
    return Launch(bag_mean, (grid, 1, 1), args, constants, {"num_warps": config.num_warps})
