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


def row_start(levels: int, unit: int, row: Any, place: tuple[Any, ...]) -> Any:
    """Where an int64 row begins: in one level of strides or in two (`place`: rows to a block, blocks apart, rows
    apart, in `unit` elements)."""
    count, outer, stride = place[:3]
    if levels == 2:
        return T.truncdiv(row, count) * (outer * unit) + T.truncmod(row, count) * (stride * unit)
    return row * (stride * unit)


def offset(layout: str, vec: int, row: Any, column: Any, place: tuple[Any, ...]) -> Any:
    """The int64 element offset of (row, column). `place`: that of `row_start`, the columns' stride and, where every row
    begins late, by how many vectors."""
    start = row_start(int(layout[0]), vec if layout[1] == "v" else 1, row, place)
    if len(place) > 4:
        column = place[4] * vec + column
    return start + column if layout[1] == "v" else start + column * place[3]


def place_of(index: Any, row_vectors: Any, chunk: int, flat: bool) -> tuple[Any, Any]:
    """The row of the int64 `index`-th tile and its first vector in that; `flat`: there is one row. Tiles are counted in
    32 bits, as blocks are: a division of 64 bits costs as much as many elements."""
    if flat:
        return T.int64(0), index * chunk
    per_row = T.Cast("int32", T.truncdiv(row_vectors + (chunk - 1), T.int64(chunk)))
    tile = T.Cast("int32", index)
    return T.Cast("int64", T.truncdiv(tile, per_row)), T.Cast("int64", T.truncmod(tile, per_row)) * chunk


@T.macro
def load_tile(to, source, layout, vec, row, first, row_vectors, place):
    """Fill a tile, in its dtype, from vector `first` of a row; what lies beyond its end is 0."""
    T.clear(to)
    for j in T.Parallel(*to.shape):
        if first + j // vec < row_vectors:
            to[j] = T.Cast(to.dtype, source[offset(layout, vec, row, first * vec + j, place)])


@T.macro
def store_tile(to, source, vec, row, first, row_vectors):
    """A tile, in the output's dtype, into its dense output. Stored apart from what computes it, so in vectors."""
    for j in T.Parallel(*source.shape):
        if first + j // vec < row_vectors:
            to[(row * row_vectors + first) * vec + j] = source[j]


def add_groups(*, dtypes: tuple[str, ...], lanes: int, depth: int) -> Any:
    """[sums, groups, C] partial sums to [C] for each of up to two sums, rounded once to its dtype: axis 1 of the grid.

    A block adds `lanes` columns; its threads take every `depth`-th group, then add up among themselves.
    """
    unroll = 4
    n = T.dynamic("n", "int64")
    here = T.Fragment((depth, lanes), forward_fn=lambda i, j: (i * lanes + j, 0))
    ahead_of = T.Fragment((unroll, depth, lanes), forward_fn=lambda u, i, j: (i * lanes + j, u))

    @T.prim_func
    def add_groups(
        partials: T.Tensor((n,), F32), first: T.Tensor((n,), dtypes[0]), second: T.Tensor((n,), dtypes[-1]),
        columns: T.int64, groups: T.int32, blocks: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks, len(dtypes), threads=lanes * depth) as (block, which):
            part = T.alloc_fragment((depth, lanes), F32)
            ahead = T.alloc_fragment((unroll, depth, lanes), F32)
            total = T.alloc_fragment((lanes,), F32)
            T.annotate_layout({part: here, ahead: ahead_of})
            column = T.Cast("int64", block) * lanes
            T.clear(part)
            for turn in T.serial(T.ceildiv(groups, depth * unroll)):
                T.clear(ahead)
                for u, i, j in T.Parallel(unroll, depth, lanes):
                    if ((turn * unroll + u) * depth + i < groups) & (column + j < columns):
                        ahead[u, i, j] = partials[
                            T.Cast("int64", which * groups + (turn * unroll + u) * depth + i) * columns + column + j
                        ]
                for u in T.unroll(unroll):
                    for i, j in T.Parallel(depth, lanes):
                        part[i, j] += ahead[u, i, j]
            T.reduce_sum(part, total, dim=0)
            for j in T.Parallel(lanes):
                if column + j < columns:
                    if which == 0:
                        first[column + j] = T.Cast(dtypes[0], total[j])
                    if len(dtypes) > 1:
                        if which == 1:
                            second[column + j] = T.Cast(dtypes[-1], total[j])

    return add_groups
