"""Device code of the linear family in TileLang: one program for every product, one for what goes element by element.

Only `tilelang.py` beside this file calls these, when a launch is compiled. An operand's tile lies in shared memory as
it lies in memory: `a` as [m, k], or [k, m] where it is read by columns; `b` as [n, k] or [k, n]. Where a sum ends with
a step (`even`) what is past the end of an operand is read as its last row or vector: it only meets results that are
not stored, and the copy stays asynchronous. Elsewhere it is 0. Columns are counted in vectors. float32 is multiplied
without tensor cores, which would round to TF32. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import activation, chain
from tilewright.ops.tilelang_rows import f32, offset


def tile_of(block: Any, rows: Any, columns: Any, group: int, m: int, n: int) -> tuple[Any, Any]:
    """The first row and column of a block's tile. Tiles go down `group` rows of tiles, then right."""
    down = T.Cast("int32", T.truncdiv(rows + (m - 1), T.int64(m)))
    across = T.Cast("int32", T.truncdiv(columns + (n - 1), T.int64(n)))
    wide = across * group
    first = T.truncdiv(block, wide) * group
    height = T.min(down - first, group)
    place = T.truncmod(block, wide)
    row = T.Cast("int64", first + T.truncmod(place, height)) * m
    return row, T.Cast("int64", T.truncdiv(place, height)) * n


@T.macro
def load_tile(to, source, layout, vec, first, sizes, place, even):
    """Fill a tile of shared memory from row first[0] and vector first[1] of an operand of sizes[0] rows and sizes[1]
    vectors. (Tuples, since a macro gives a bare variable the name of its own parameter.)"""
    if even:
        for i, j in T.Parallel(*to.shape):
            row = T.min(first[0] + i, sizes[0] - 1)
            vector = T.min(first[1] + j // vec, sizes[1] - 1)
            to[i, j] = source[offset(layout, vec, row, vector * vec + j % vec, place)]
    else:
        T.clear(to)
        for i, j in T.Parallel(*to.shape):
            if (first[0] + i < sizes[0]) & (first[1] + j // vec < sizes[1]):
                to[i, j] = source[offset(layout, vec, first[0] + i, first[1] * vec + j, place)]


def product(
    *, dtype: str, bias_dtype: str, out_dtype: str, kind: str, m: int, n: int, k: int, group: int, threads: int,
    stages: int, a_layout: str, b_layout: str, residual_layout: str | None, a_columns: bool, b_columns: bool,
    a_vec: int, b_vec: int, vec: int, depth_steps: int | None, even: bool, has_bias: bool, saves: bool,
) -> Any:  # fmt: skip
    """out = act(a b + bias) + residual, and z = a b + bias: [rows, columns], a sum over `depth`.

    `a_columns`: a is stored as [depth, rows]; `b_columns`: b is stored as [columns, depth].
    """
    size = T.dynamic("size", "int64")
    simple = dtype == "float32"
    ahead = stages if even and depth_steps is not None else 0  # a pipeline's tail waits for a number that is known

    @T.prim_func
    def linear_product(
        a: T.Tensor((size,), dtype), b: T.Tensor((size,), dtype), bias: T.Tensor((size,), bias_dtype),
        residual: T.Tensor((size,), dtype), out: T.Tensor((size,), out_dtype), z: T.Tensor((size,), out_dtype),
        a_inner: T.int64, a_outer: T.int64, a_stride: T.int64, a_step: T.int64,
        b_inner: T.int64, b_outer: T.int64, b_stride: T.int64, b_step: T.int64,
        residual_inner: T.int64, residual_outer: T.int64, residual_stride: T.int64, residual_step: T.int64,
        rows: T.int64, columns: T.int64, depth: T.int64, row_vectors: T.int64, column_vectors: T.int64,
        depth_a_vectors: T.int64, depth_b_vectors: T.int64, out_vectors: T.int64, steps: T.int32, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row, column = T.alloc_var("int64"), T.alloc_var("int64")
            row, column = tile_of(block, rows, columns, group, m, n)
            a_tile = T.alloc_shared((k, m) if a_columns else (m, k), dtype)
            b_tile = T.alloc_shared((n, k) if b_columns else (k, n), dtype)
            total = T.alloc_fragment((m, n), "float32")
            a_place = (a_inner, a_outer, a_stride, a_step)
            b_place = (b_inner, b_outer, b_stride, b_step)
            T.clear(total)
            for step in T.Pipelined(steps if depth_steps is None else depth_steps, num_stages=ahead):
                first = T.Cast("int64", step) * k
                if a_columns:
                    load_tile(a_tile, a, a_layout, a_vec, (first, row // a_vec), (depth, row_vectors), a_place, even)
                else:
                    load_tile(a_tile, a, a_layout, a_vec, (row, first // a_vec), (rows, depth_a_vectors), a_place, even)
                if b_columns:
                    load_tile(b_tile, b, b_layout, b_vec, (column, first // b_vec), (columns, depth_b_vectors),
                              b_place, even)  # fmt: skip
                else:
                    load_tile(b_tile, b, b_layout, b_vec, (first, column // b_vec), (depth, column_vectors),
                              b_place, even)  # fmt: skip
                if simple:
                    for i, j in T.Parallel(m, n):
                        for s in T.serial(k):
                            total[i, j] += (a_tile[s, i] if a_columns else a_tile[i, s]) * (
                                b_tile[j, s] if b_columns else b_tile[s, j]
                            )
                else:
                    T.gemm(a_tile, b_tile, total, transpose_A=a_columns, transpose_B=b_columns)
            for i, j in T.Parallel(m, n):
                if (row + i < rows) & (column // vec + j // vec < out_vectors):
                    value = total[i, j]
                    if has_bias:
                        value = value + f32(bias[column + j])
                    if saves:
                        z[(row + i) * columns + column + j] = T.Cast(out_dtype, value)
                    value = activation(kind, value)
                    if residual_layout is not None:
                        value = value + f32(residual[offset(residual_layout, vec, row + i, column + j, (
                            residual_inner, residual_outer, residual_stride, residual_step))])  # fmt: skip
                    out[(row + i) * columns + column + j] = T.Cast(out_dtype, value)

    return linear_product


def pointwise(
    *, dtype: str, out_dtype: str, kind: str, threads: int, dy_layout: str, z_layout: str | None, makes_dz: bool,
    sums: bool,
) -> Any:  # fmt: skip
    """dz = dy * act'(z), element by element, of `group_rows` rows; the sum of each column goes to `partials`."""
    size = T.dynamic("size", "int64")

    @T.prim_func
    def linear_pointwise(
        dy: T.Tensor((size,), dtype), z: T.Tensor((size,), dtype), dz: T.Tensor((size,), dtype),
        partials: T.Tensor((size,), out_dtype),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        z_inner: T.int64, z_outer: T.int64, z_stride: T.int64, z_step: T.int64,
        rows: T.int64, columns: T.int64, group_rows: T.int32, blocks: T.int32, groups: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks, groups, threads=threads) as (block, group):
            first, row = T.alloc_var("int64"), T.alloc_var("int64")
            first = T.Cast("int64", block) * threads
            if sums:
                total = T.alloc_fragment((threads,), "float32")
                T.clear(total)
            for step in T.serial(group_rows):
                row = T.Cast("int64", group) * group_rows + step
                for j in T.Parallel(threads):
                    if (row < rows) & (first + j < columns):
                        value = f32(dy[offset(dy_layout, 1, row, first + j, (dy_inner, dy_outer, dy_stride, dy_step))])
                        if z_layout is not None:
                            value = chain(
                                kind,
                                value,
                                f32(z[offset(z_layout, 1, row, first + j, (z_inner, z_outer, z_stride, z_step))]),
                            )
                        value = T.Cast(dtype, value)  # as the products take it
                        if makes_dz:
                            dz[row * columns + first + j] = value
                        if sums:
                            total[j] += f32(value)
            if sums:
                for j in T.Parallel(threads):
                    if first + j < columns:
                        partials[T.Cast("int64", group) * columns + first + j] = T.Cast(out_dtype, total[j])

    return linear_pointwise
