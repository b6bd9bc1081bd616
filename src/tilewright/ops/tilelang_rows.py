"""Rows and columns in TileLang, as elementwise families share them: tiles in registers, strided loads, sums.

A block takes `depth` vectors a thread of one row; dense tensors come as one long row. Sizes are run-time everywhere.
Columns are counted in vectors, so that the compiler sees that an access never crosses the end; so are strides where the
layout's letter is "v" ("s": element by element, with a column stride). The layout's digit says in how many levels of
strides the rows lie; None is absent. A parameter [C] has rows 0 apart. What is computed is the families' business.

Loads sit in `if` statements, not in `T.if_then_else`: there TileLang 0.1.15 hoists the vector load of a converted
operand out of the condition, which reads past the end of the tensor. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

F32 = "float32"


def f32(value: Any) -> Any:
    return T.Cast(F32, value)


def tile(vec: int, threads: int, depth: int, dtype: str = F32) -> Any:
    """Registers for a block's elements: neighbouring threads hold neighbouring vectors."""
    made = T.alloc_fragment((vec * threads * depth,), dtype)
    layout = T.Fragment(
        (vec * threads * depth,),
        forward_fn=lambda j: ((j // vec) % threads, (j // (vec * threads)) * vec + j % vec),
    )
    T.annotate_layout({made: layout})
    return made


def offset(layout: str, vec: int, row: Any, column: Any, place: tuple[Any, Any, Any, Any]) -> Any:
    """The int64 element offset of (row, column)."""
    count, outer, stride, step = place
    unit = vec if layout[1] == "v" else 1
    if layout[0] == "2":
        start = T.truncdiv(row, count) * (outer * unit) + T.truncmod(row, count) * (stride * unit)
    else:
        start = row * (stride * unit)
    return start + column if layout[1] == "v" else start + column * step


def place_of(index: Any, row_vectors: Any, chunk: int, flat: bool) -> tuple[Any, Any]:
    """The row of the int64 `index`-th tile and its first vector in that; `flat`: there is one row."""
    if flat:
        return T.int64(0), index * chunk
    per_row = T.truncdiv(row_vectors + (chunk - 1), T.int64(chunk))
    return T.truncdiv(index, per_row), T.truncmod(index, per_row) * chunk


@T.macro
def load_tile(to, source, layout, vec, row, first, row_vectors, place):
    """Fill a tile from vector `first` of a row; what lies beyond its end is 0."""
    T.clear(to)
    for j in T.Parallel(*to.shape):
        if first + j // vec < row_vectors:
            to[j] = source[offset(layout, vec, row, first * vec + j, place)]


@T.macro
def store_tile(to, source, vec, row, first, row_vectors):
    """A tile, in the output's dtype, into its dense output. Stored apart from what computes it, so in vectors."""
    for j in T.Parallel(*source.shape):
        if first + j // vec < row_vectors:
            to[(row * row_vectors + first) * vec + j] = source[j]
