"""Rows and columns in Triton, as elementwise families share them: tiles, strided loads, dense stores, sums of partials.

A tile is [ROWS, BLOCK] elements; where every tensor is dense (FLAT) rows do not matter and all elements are one row.
Where rows lie is told by four arguments a tensor, of which None means less work: see `load`. What is computed is the
families' business.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import TensorFacts
from tilewright.core.launch import Argument


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
