"""Rows and columns in Triton, as elementwise families share them: tiles, strided loads, dense stores, sums of partials.

A tile is [ROWS, BLOCK] elements; where every tensor is dense (FLAT) rows do not matter and all elements are one row.
Where rows lie is told by four arguments a tensor, of which None means less work: see `load`. What is computed is the
families' business.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Launch, Scratch


@triton.jit
def tile_place(index, total_columns, BLOCK: tl.constexpr):
    """Which row of tiles the `index`-th is in, and which tile of that, both int64. Tiles are counted in 32 bits, as
    programs are: a division of 64 bits costs as much as many elements."""
    blocks = tl.cdiv(total_columns, BLOCK).to(tl.uint32)
    tile = tl.cast(index, tl.uint32)
    return (tile // blocks).to(tl.int64), (tile % blocks).to(tl.int64)


@triton.jit
def tile_at(index, total_rows, total_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Rows [ROWS, 1] and columns [1, BLOCK] of the int64 `index`-th tile, and which of its elements exist."""
    if FLAT:
        columns = index * BLOCK + tl.arange(0, BLOCK)[None, :]
        rows = tl.zeros([1, 1], tl.int64)
        return rows, columns, columns < total_columns
    else:
        down, across = tile_place(index, total_columns, BLOCK)
        rows = down * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        columns = across * BLOCK + tl.arange(0, BLOCK)[None, :]
        return rows, columns, (rows < total_rows) & (columns < total_columns)


@triton.jit
def row_start(rows, stride, outer, count):
    """Where rows begin: row r at r * stride (None: at 0, one row serves all) or, with `count` rows to a block, at
    (r // count) * outer + (r % count) * stride."""
    if count is not None:
        return (rows // count) * outer + (rows % count) * stride
    elif stride is not None:
        return rows * stride
    else:
        return rows * 0


@triton.jit
def load(base, rows, columns, mask, stride, outer, count, step, POLICY: tl.constexpr):
    """Elements in float32. Rows begin as `row_start` has it; columns are `step` apart (None: 1)."""
    place = row_start(rows, stride, outer, count) + (columns if step is None else columns * step)
    return tl.load(base + place, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store(base, rows, columns, total_columns, mask, value):
    """Into a dense output, rounded once."""
    tl.store(base + rows * total_columns + columns, value.to(base.dtype.element_ty), mask=mask)


def places(flat: bool, **tensors: TensorFacts | None) -> dict[str, Argument]:
    """The arguments by which `load` finds each tensor; a vector [C] serves every row, a scalar every element."""
    found: dict[str, Argument] = {}
    for name, facts in tensors.items():
        step = None
        if facts is not None and not flat:
            step = None if facts.column_stride == 1 else facts.column_stride
        rows = facts if facts is not None and not flat and len(facts.shape) > 1 else None
        found |= {**row_places(name, rows), f"{name}_step": step}
    return found


def row_places(name: str, facts: TensorFacts | None) -> dict[str, Argument]:
    """The arguments by which `row_start` finds the rows of a tensor."""
    levels = facts.row_levels if facts is not None else ()
    two = len(levels) == 2
    return {
        f"{name}_stride": levels[-1][1] if levels else None,
        f"{name}_outer": levels[0][1] if two else None,
        f"{name}_count": levels[-1][0] if two else None,
    }


@triton.jit(do_not_specialize=["groups"])
def add_groups(
    partials, first, second, groups, total_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """[sums, groups, C] partial sums to [C] for each sum, rounded once. Axis 1 of the grid is the sum."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < total_columns
    if second is not None:
        partials += tl.program_id(1).to(tl.int64) * groups * total_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, groups, ROWS):
        group = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        place = group * total_columns + columns[None, :]
        total += tl.load(partials + place, mask=(group < groups) & inside[None, :], other=0.0)
    result = tl.sum(total, axis=0)
    if tl.program_id(1) == 0:
        tl.store(first + columns, result.to(first.dtype.element_ty), mask=inside)
    if second is not None:
        if tl.program_id(1) == 1:
            tl.store(second + columns, result.to(second.dtype.element_ty), mask=inside)


def sum_groups(call: Call, partials: Scratch, *outputs: TensorFacts, pdl: bool = False) -> Launch:
    """The launch that adds up what each group of programs has left, in an order that their number fixes: [groups, C]
    to one output, or [2, groups, C] to two. Partial sums come in one or two reads, and about as many programs run as
    there are multiprocessors."""
    groups, columns = partials.shape[-2:]
    rows = min(256, max(16, triton.next_power_of_2(groups)))
    block = min(128, 8192 // rows)
    while block > 8 and len(outputs) * triton.cdiv(columns, block) < call.device.multiprocessors * 3 // 4:
        block //= 2
    first, second = outputs if len(outputs) == 2 else (outputs[0], None)
    args: dict[str, Argument] = {"partials": partials, "first": first, "second": second}
    args |= {"groups": groups, "total_columns": columns}
    constants = {"ROWS": rows, "COLUMNS": block, "PDL": pdl}
    options = {"num_warps": max(1, min(8, rows * block // 512))}
    return Launch(add_groups, (triton.cdiv(columns, block), len(outputs), 1), args, constants, options, pdl=pdl)
