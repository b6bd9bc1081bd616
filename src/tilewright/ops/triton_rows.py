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
def tile_at(index, total_rows, total_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Rows [ROWS, 1] and columns [1, BLOCK] of the int64 `index`-th tile, and which of its elements exist."""
    if FLAT:
        columns = index * BLOCK + tl.arange(0, BLOCK)[None, :]
        rows = tl.zeros([1, 1], tl.int64)
        return rows, columns, columns < total_columns
    else:
        blocks = tl.cdiv(total_columns, BLOCK)
        rows = (index // blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        columns = (index % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
        return rows, columns, (rows < total_rows) & (columns < total_columns)


@triton.jit
def load(base, rows, columns, mask, stride, outer, count, step, POLICY: tl.constexpr):
    """Elements in float32. Row r starts at r * stride (None: at 0, one row serves all) or, with `count` rows to a
    block, at (r // count) * outer + (r % count) * stride; columns are `step` apart (None: 1)."""
    place = columns if step is None else columns * step
    if count is not None:
        place = (rows // count) * outer + (rows % count) * stride + place
    elif stride is not None:
        place = rows * stride + place
    else:
        place = rows * 0 + place
    return tl.load(base + place, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store(base, rows, columns, total_columns, mask, value):
    """Into a dense output, rounded once."""
    tl.store(base + rows * total_columns + columns, value.to(base.dtype.element_ty), mask=mask)


def places(flat: bool, **tensors: TensorFacts | None) -> dict[str, Argument]:
    """The arguments by which `load` finds each tensor; a vector [C] serves every row, a scalar every element."""
    found: dict[str, Argument] = {}
    for name, facts in tensors.items():
        stride = outer = count = step = None
        if facts is not None and not flat:
            step = None if facts.column_stride == 1 else facts.column_stride
            levels = facts.row_levels if len(facts.shape) > 1 else ()
            if levels:
                inner, stride = levels[-1]
                outer, count = (levels[0][1], inner) if len(levels) == 2 else (None, None)
        found |= {f"{name}_stride": stride, f"{name}_outer": outer, f"{name}_count": count, f"{name}_step": step}
    return found


@triton.jit(do_not_specialize=["groups"])
def add_groups(
    partials, out, groups, total_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """[groups, C] partial sums to [C], rounded once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < total_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, groups, ROWS):
        group = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        place = group * total_columns + columns[None, :]
        total += tl.load(partials + place, mask=(group < groups) & inside[None, :], other=0.0)
    tl.store(out + columns, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=inside)


def sum_groups(call: Call, partials: Scratch, out: TensorFacts, pdl: bool) -> Launch:
    """The launch that adds up what each group of programs has left, in an order that their number fixes."""
    groups, columns = partials.shape
    rows = min(256, max(16, triton.next_power_of_2(groups)))
    block = min(128, 8192 // rows)
    while block > 8 and triton.cdiv(columns, block) < call.device.multiprocessors * 3 // 4:
        block //= 2
    args: dict[str, Argument] = {"partials": partials, "out": out, "groups": groups, "total_columns": columns}
    constants = {"ROWS": rows, "COLUMNS": block, "PDL": pdl}
    options = {"num_warps": max(1, min(8, rows * block // 512))}
    return Launch(add_groups, (triton.cdiv(columns, block), 1, 1), args, constants, options, pdl=pdl)
