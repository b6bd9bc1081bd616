"""How Triton runs embedding_bag_mean_backward: sorted and deterministic, or with atomics.

Sorted: the occurrences of ids are sorted stably, by torch, so that those of one row of the table follow each other in
the order of the bags; then every row is the sum of its segment. A segment may be as long as all bags together, so whole
chunks of the sorted order that belong to one row are summed by programs of their own, and the row adds up the chunks.
Every row is written once, with zeros where no id points.

Atomic: each bag adds its share to its rows in float32. The order is not fixed, and half precision needs a table of
float32 beside; it pays where the table is small. What torch does better than a kernel of ours would (sorting, filling,
converting) are steps between the launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch, Stage, TorchStep
from tilewright.ops.embedding.configs import position_dtype
from tilewright.ops.embedding.triton import padding_of, standing_of
from tilewright.ops.triton_rows import row_places, row_start, tile_place

KEYS = 1024
"""Occurrences, or rows of the table, that one program of the small kernels takes."""
SPLIT = 8
"""Occurrences that a program of `chunk_sums` reads at a time, where the rows are not too wide for that."""


@triton.jit(do_not_specialize=["total", "ids", "indices_count", "table_rows", "padding"])
def bag_keys(
    indices, keys, indices_stride, indices_outer, indices_count, step, total, ids, table_rows, padding,
    HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id of each occurrence that counts; of every other one the number of rows, which sorts behind all ids."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    first = row_start(place // ids, indices_stride, indices_outer, indices_count)
    one = tl.load(indices + first + (place % ids) * step, mask=inside, other=0).to(tl.int64)
    counts, _ = standing_of(one, inside, table_rows, padding, HAS_PADDING)
    tl.store(keys + place, tl.where(counts, one, table_rows).to(keys.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["total", "table_rows"])
def segment_starts(keys, starts, total, table_rows, BLOCK: tl.constexpr):
    """Where in the sorted order the segment of each row starts, by bisection; of the row behind the last, the end."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row <= table_rows
    low = tl.zeros([BLOCK], tl.int64)
    high = low + total
    span = total
    while span > 0:  # one step for each bit of `total`: then low meets high
        middle = (low + high) // 2
        below = (low < high) & inside
        less = tl.load(keys + middle, mask=below, other=0).to(tl.int64) < row
        high = tl.where(below & (less == 0), middle, high)
        low = tl.where(below & less, middle + 1, low)
        span = span // 2
    tl.store(starts + row, low.to(starts.dtype.element_ty), mask=inside)


@triton.jit
def bag_of(occurrence, ids, NARROW: tl.constexpr):
    """The bag of an id by its place among all ids."""
    if NARROW:  # a division of 32 bits costs half of one of 64
        return (occurrence.to(tl.int32) // ids.to(tl.int32)).to(tl.int64)
    else:
        return occurrence // ids


@triton.jit
def bag_share(dout, count, bag, inside, columns, mask, dout_stride, dout_outer, dout_count, dout_step):
    """dout * (1 / count) of each bag, in float32; 0 where `mask` says so."""
    many = tl.load(count + bag, mask=inside, other=1.0)
    place = row_start(bag, dout_stride, dout_outer, dout_count)[:, None]
    place += (columns if dout_step is None else columns.to(tl.int64) * dout_step)[None, :]
    return tl.load(dout + place, mask=mask, other=0.0).to(tl.float32) * (1.0 / tl.maximum(many, 1.0))[:, None]


@triton.jit(do_not_specialize=["ids", "dout_count", "table_rows"])
def chunk_sums(
    dout, count, keys, order, partials, ids, total_columns, table_rows, dout_stride, dout_outer, dout_count, dout_step,
    NARROW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over each whole chunk of the sorted order that belongs to one row of the table."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_column = columns < total_columns
    start = chunk * CHUNK
    key = tl.load(keys + start)
    if (key == tl.load(keys + start + (CHUNK - 1))) & (key.to(tl.int64) < table_rows):
        total = tl.zeros([SPLIT, BLOCK], tl.float32)
        inside = tl.arange(0, SPLIT) >= 0
        for offset in tl.range(0, CHUNK, SPLIT):
            bag = bag_of(tl.load(order + start + offset + tl.arange(0, SPLIT)), ids, NARROW)
            total += bag_share(
                dout, count, bag, inside, columns, has_column[None, :], dout_stride, dout_outer, dout_count, dout_step
            )
        tl.store(partials + chunk * total_columns + columns, tl.sum(total, axis=0), mask=has_column)


@triton.jit(do_not_specialize=["ids", "dout_count", "table_rows"])
def segment_sums(
    dout, count, order, starts, partials, dweight, ids, total_columns, table_rows, dout_stride, dout_outer, dout_count,
    dout_step,
    NARROW: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """dweight: of each row what of its segment lies outside whole chunks, then the chunks, in the sorted order each."""
    down, across = tile_place(tl.program_id(0), total_columns, BLOCK)
    rows = down * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = across * BLOCK + tl.arange(0, BLOCK)
    has_row, has_column = rows < table_rows, columns[None, :] < total_columns
    begin = tl.load(starts + rows, mask=has_row, other=0).to(tl.int64)
    end = tl.load(starts + rows + 1, mask=has_row, other=0).to(tl.int64)
    first = (begin + CHUNK - 1) // CHUNK
    chunks = tl.maximum(end // CHUNK - first, 0)
    head = tl.where(chunks > 0, first * CHUNK, end) - begin
    tail = begin + chunks * CHUNK  # what a position behind the head has to skip
    singles = end - tail
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.max(singles, axis=0)
    for start in tl.range(0, most, AHEAD):
        for ahead in tl.static_range(AHEAD):
            place = start + ahead
            inside = place < singles
            position = tl.where(place < head, begin, tail) + place
            mask = inside[:, None] if EVEN else inside[:, None] & has_column
            bag = bag_of(tl.load(order + position, mask=inside, other=0), ids, NARROW)
            total += bag_share(dout, count, bag, inside, columns, mask, dout_stride, dout_outer, dout_count, dout_step)
    if partials is not None:
        for chunk in tl.range(0, tl.max(chunks, axis=0)):
            inside = chunk < chunks
            mask = inside[:, None] if EVEN else inside[:, None] & has_column
            place = ((first + chunk) * total_columns)[:, None] + columns[None, :]
            total += tl.load(partials + place, mask=mask, other=0.0)
    mask = has_row[:, None] if EVEN else has_row[:, None] & has_column
    tl.store(
        dweight + (rows * total_columns)[:, None] + columns[None, :], total.to(dweight.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["total_bags", "ids", "indices_count", "dout_count", "table_rows", "padding"])
def bag_scatter(
    dout, count, indices, sums, indices_stride, indices_outer, indices_count, step, dout_stride, dout_outer, dout_count,
    dout_step, total_bags, ids, total_columns, table_rows, padding,
    HAS_PADDING: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[id] += dout / count for every id that counts: read once a bag, added with atomics."""
    down, across = tile_place(tl.program_id(0), total_columns, BLOCK)
    bags = down * BAGS + tl.arange(0, BAGS).to(tl.int64)
    columns = across * BLOCK + tl.arange(0, BLOCK)
    has_bag, has_column = bags < total_bags, columns[None, :] < total_columns
    place = row_start(bags, dout_stride, dout_outer, dout_count)[:, None]
    place += (columns if dout_step is None else columns * dout_step)[None, :]
    share = tl.load(dout + place, mask=has_bag[:, None] & has_column, other=0.0).to(tl.float32)
    many = tl.maximum(tl.load(count + bags, mask=has_bag, other=1.0), 1.0)
    share *= (1.0 / many)[:, None]
    first = indices + row_start(bags, indices_stride, indices_outer, indices_count)
    for one in tl.range(0, ids):
        row = tl.load(first + one * step, mask=has_bag, other=0).to(tl.int64)
        counts, _ = standing_of(row, has_bag, table_rows, padding, HAS_PADDING)
        tl.atomic_add(
            sums + (row * total_columns)[:, None] + columns[None, :], share, mask=counts[:, None] & has_column,
            sem="relaxed",
        )  # fmt: skip


def sort(keys: Tensor, in_order: Tensor, order: Tensor) -> None:
    """Stable, so that the occurrences of one row stay in the order of the bags."""
    torch.sort(keys, stable=True, out=(in_order, order))


def clear(sums: Tensor) -> None:
    sums.zero_()


def convert(dweight: Tensor, sums: Tensor) -> None:
    dweight.copy_(sums)


def by_sorting(call: Call, config: Config) -> tuple[Stage, ...]:
    """embedding_bag_mean_backward, the same bits every time."""
    indices: TensorFacts = call.indices
    dweight: TensorFacts = call.dweight
    total, columns, table_rows = indices.numel, dweight.columns, dweight.rows
    padding, has_padding = padding_of(call)
    keys = Scratch("keys", (total,), position_dtype(table_rows))
    in_order = Scratch("in_order", (total,), keys.dtype)
    order = Scratch("order", (total,), torch.int64)
    starts = Scratch("starts", (table_rows + 1,), position_dtype(total))
    whole = total // config.chunk
    partials = Scratch("partials", (whole, columns)) if whole else None
    rows: dict[str, Argument] = {
        "ids": indices.columns,
        "total_columns": columns,
        "table_rows": table_rows,
        **row_places("dout", call.dout),
        "dout_step": None if call.dout.column_stride == 1 else call.dout.column_stride,
    }
    constants = {
        "NARROW": total < 2**31,
        "CHUNK": config.chunk,
        "BLOCK": config.block,
    }
    blocks = triton.cdiv(columns, config.block)
    stages: list[Stage] = [
        Launch(
            bag_keys,
            (triton.cdiv(total, KEYS), 1, 1),
            {
                "indices": indices,
                "keys": keys,
                **row_places("indices", indices),
                "step": indices.column_stride,
                "total": total,
            }
            | {"ids": indices.columns, "table_rows": table_rows, **padding},
            {**has_padding, "BLOCK": KEYS},
        ),
        TorchStep(sort, {"keys": keys, "in_order": in_order, "order": order}),
        Launch(
            segment_starts,
            (triton.cdiv(table_rows + 1, KEYS), 1, 1),
            {"keys": in_order, "starts": starts, "total": total, "table_rows": table_rows},
            {"BLOCK": KEYS},
        ),
    ]
    if partials is not None:
        stages.append(
            Launch(
                chunk_sums,
                (whole, blocks, 1),
                {"dout": call.dout, "count": call["count"], "keys": in_order, "order": order, "partials": partials}
                | rows,
                {**constants, "SPLIT": max(1, min(SPLIT, 4096 // config.block))},
            )
        )
    stages.append(
        Launch(
            segment_sums,
            (triton.cdiv(table_rows, config.rows) * blocks, 1, 1),
            {"dout": call.dout, "count": call["count"], "order": order, "starts": starts, "partials": partials}
            | {"dweight": dweight, **rows},
            {**constants, "EVEN": columns % config.block == 0, "ROWS": config.rows, "AHEAD": config.ahead},
            {"num_warps": config.num_warps},
        )
    )
    return tuple(stages)


def by_atomics(call: Call, config: Config) -> tuple[Stage, ...]:
    """embedding_bag_mean_backward, in the order in which bags happen to come."""
    indices: TensorFacts = call.indices
    dweight: TensorFacts = call.dweight
    padding, has_padding = padding_of(call)
    wide = dweight.dtype == torch.float32
    sums = dweight if wide else Scratch("sums", dweight.shape)
    grid = triton.cdiv(indices.rows, config.bags) * triton.cdiv(dweight.columns, config.block)
    scatter = Launch(
        bag_scatter,
        (grid, 1, 1),
        {"dout": call.dout, "count": call["count"], "indices": indices, "sums": sums, **row_places("indices", indices)}
        | {"step": indices.column_stride, **row_places("dout", call.dout)}
        | {"dout_step": None if call.dout.column_stride == 1 else call.dout.column_stride}
        | {"total_bags": indices.rows, "ids": indices.columns, "total_columns": dweight.columns}
        | {"table_rows": dweight.rows, **padding},
        {
            **has_padding,
            "BAGS": config.bags,
            "BLOCK": config.block,
        },
        {"num_warps": config.num_warps},
    )
    stages: list[Stage] = [TorchStep(clear, {"sums": sums}), scatter]
    return (*stages, *([] if wide else [TorchStep(convert, {"dweight": dweight, "sums": sums})]))
