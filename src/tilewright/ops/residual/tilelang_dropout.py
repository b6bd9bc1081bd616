"""Device code of dropout_add and its gradient in TileLang.

Only `tilelang.py` beside this file calls these, when a launch is compiled. How tensors are read is in `tilelang_rows`;
what the random numbers are, in `philox`. Words are drawn once for `share` columns side by side: four where a thread's
vectors hold whole groups of four, else one, of which three words go unused.
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.residual.philox import MULTIPLIERS, ROUNDS, WEYL
from tilewright.ops.tilelang_rows import f32, load_tile, place_of, store_tile, tile

U32, U64 = "uint32", "uint64"


def u32(value: Any) -> Any:
    return T.Cast(U32, value)


def words(vec: int, threads: int, depth: int, share: int) -> Any:
    """A word for every `share` elements, held by the thread that holds those."""
    count, near = vec * threads * depth // share, vec // share
    made = T.alloc_fragment((count,), U32)
    layout = T.Fragment(
        (count,), forward_fn=lambda g: ((g // near) % threads, (g // (near * threads)) * near + g % near)
    )
    T.annotate_layout({made: layout})
    return made


@T.macro
def draw(c0, c1, c2, c3, seed, offset, row, column, share):
    """Philox4x32-10 of each group of columns: four words in place of the counter."""
    for g in T.Parallel(*c0.shape):
        low = offset + T.shift_right(column + g * share, T.int64(2))
        c0[g] = u32(low)
        c1[g] = u32(T.shift_right(low, T.int64(32)))
        c2[g] = u32(row)
        c3[g] = T.uint32(0)  # of rows there are no more than blocks
    for turn in T.unroll(ROUNDS):
        for g in T.Parallel(*c0.shape):
            k0 = u32(seed) + T.uint32(WEYL[0]) * u32(turn)
            k1 = u32(T.shift_right(seed, T.int64(32))) + T.uint32(WEYL[1]) * u32(turn)
            first = T.Cast(U64, c0[g]) * T.uint64(MULTIPLIERS[0])
            second = T.Cast(U64, c2[g]) * T.uint64(MULTIPLIERS[1])
            one = u32(T.shift_right(second, T.uint64(32))) ^ c1[g] ^ k0
            three = u32(T.shift_right(first, T.uint64(32))) ^ c3[g] ^ k1
            c0[g] = one
            c1[g] = u32(second)
            c2[g] = three
            c3[g] = u32(first)


def word_of(c0: Any, c1: Any, c2: Any, c3: Any, j: Any, column: Any, share: int) -> Any:
    """The word of element `j` of a tile, which stands at `column`."""
    which = (j if share == 4 else column) % 4
    g = j // share
    return T.Select(which < 2, T.Select(which == 0, c0[g], c1[g]), T.Select(which == 2, c2[g], c3[g]))


def dropout_forward(
    *, dtype: str, flat: bool, vec: int, threads: int, depth: int, drops: bool, saving: bool, seeded: bool,
    started: bool, x_layout: str, residual_layout: str,
) -> Any:  # fmt: skip
    """y = residual + keep * x * scale; `saving`: the first block also copies seed and offset."""
    n = T.dynamic("n", "int64")
    chunk, share = threads * depth, 4 if vec % 4 == 0 else 1

    @T.prim_func
    def dropout_forward(
        x: T.Tensor((n,), dtype), residual: T.Tensor((n,), dtype), seed: T.Tensor((n,), "int64"),
        offset: T.Tensor((n,), "int64"), y: T.Tensor((n,), dtype), state: T.Tensor((n,), "int64"),
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        residual_inner: T.int64, residual_outer: T.int64, residual_stride: T.int64, residual_step: T.int64,
        row_vectors: T.int64, tiles: T.int32, limit: T.int64, scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(tiles, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            xs = tile(vec, threads, depth, dtype)
            rs = tile(vec, threads, depth, dtype)
            load_tile(xs, x, x_layout, vec, row, first, row_vectors, (x_inner, x_outer, x_stride, x_step))
            load_tile(rs, residual, residual_layout, vec, row, first, row_vectors,
                      (residual_inner, residual_outer, residual_stride, residual_step))  # fmt: skip
            if drops:
                c0, c1 = words(vec, threads, depth, share), words(vec, threads, depth, share)
                c2, c3 = words(vec, threads, depth, share), words(vec, threads, depth, share)
                draw(c0, c1, c2, c3, seed[0], offset[0] if started else T.int64(0), row, first * vec, share)
                values = tile(vec, threads, depth)
                for j in T.Parallel(vec * chunk):
                    keep = word_of(c0, c1, c2, c3, j, first * vec + j, share) > u32(limit)
                    values[j] = T.Select(keep, f32(xs[j]), T.float32(0))
                for j in T.Parallel(vec * chunk):  # apart, so in vectors
                    xs[j] = T.Cast(dtype, f32(rs[j]) + values[j] * scale)
            else:
                for j in T.Parallel(vec * chunk):
                    xs[j] = T.Cast(dtype, f32(rs[j]) + f32(xs[j]))
            store_tile(y, xs, vec, row, first, row_vectors)
            if saving:
                if block == 0:
                    for j in T.Parallel(2):
                        if j == 0:
                            state[0] = seed[0] if seeded else T.int64(0)
                        else:
                            state[1] = offset[0] if started else T.int64(0)

    return dropout_forward


def dropout_backward(*, dtype: str, flat: bool, vec: int, threads: int, depth: int, drops: bool, dy_layout: str) -> Any:
    """dx = keep * dy * scale."""
    n = T.dynamic("n", "int64")
    chunk, share = threads * depth, 4 if vec % 4 == 0 else 1

    @T.prim_func
    def dropout_backward(
        dy: T.Tensor((n,), dtype), state: T.Tensor((n,), "int64"), dx: T.Tensor((n,), dtype),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        row_vectors: T.int64, tiles: T.int32, limit: T.int64, scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(tiles, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            ds = tile(vec, threads, depth, dtype)
            load_tile(ds, dy, dy_layout, vec, row, first, row_vectors, (dy_inner, dy_outer, dy_stride, dy_step))
            if drops:
                c0, c1 = words(vec, threads, depth, share), words(vec, threads, depth, share)
                c2, c3 = words(vec, threads, depth, share), words(vec, threads, depth, share)
                draw(c0, c1, c2, c3, state[0], state[1], row, first * vec, share)
                values = tile(vec, threads, depth)
                for j in T.Parallel(vec * chunk):
                    keep = word_of(c0, c1, c2, c3, j, first * vec + j, share) > u32(limit)
                    values[j] = T.Select(keep, f32(ds[j]), T.float32(0))
                for j in T.Parallel(vec * chunk):  # apart, so in vectors
                    ds[j] = T.Cast(dtype, values[j] * scale)
            store_tile(dx, ds, vec, row, first, row_vectors)

    return dropout_backward
