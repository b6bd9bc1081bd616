"""Device code of softmax and its gradient in TileLang: a block has a row.

A row that fits the block's registers (`whole`) is read once; a longer one is walked, and read again for each of its
passes. How tensors are read is in `tilelang_rows`; only `tilelang.py` beside this file calls these, when a launch is
compiled. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.tilelang_rows import F32, f32, load_tile, store_tile, tile


def softmax_forward(
    *, dtype: str, vec: int, threads: int, depth: int, whole: bool, x_layout: str
) -> Any:  # fmt: skip
    """y = exp(scale * x - largest) / sum. A NaN is in the sum, whatever the maximum makes of it."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def softmax_forward(
        x: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype),
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        row_vectors: T.int64, scale: T.float32, rows: T.int32,
    ):  # fmt: skip
        with T.Kernel(rows, threads=threads) as block:
            row = T.Cast("int64", block)
            place = (x_inner, x_outer, x_stride, x_step)
            turns = T.ceildiv(row_vectors, T.int64(chunk))
            xs = tile(vec, threads, depth, dtype)
            terms = tile(vec, threads, depth)
            top = T.alloc_fragment((1,), F32)
            total = T.alloc_fragment((1,), F32)
            T.fill(terms, -T.infinity(F32))
            for turn in T.serial(turns):
                load_tile(xs, x, x_layout, vec, row, turn * chunk, row_vectors, place)
                for j in T.Parallel(vec * chunk):
                    if turn * chunk + j // vec < row_vectors:
                        terms[j] = T.max(terms[j], f32(xs[j]) * scale)
            T.reduce_max(terms, top, dim=0)
            T.clear(terms)
            for turn in T.serial(turns):
                if not whole:
                    load_tile(xs, x, x_layout, vec, row, turn * chunk, row_vectors, place)
                for j in T.Parallel(vec * chunk):
                    if turn * chunk + j // vec < row_vectors:
                        terms[j] += T.exp(f32(xs[j]) * scale - top[0])
            T.reduce_sum(terms, total, dim=0)
            for turn in T.serial(turns):
                if not whole:
                    load_tile(xs, x, x_layout, vec, row, turn * chunk, row_vectors, place)
                for j in T.Parallel(vec * chunk):
                    xs[j] = T.Cast(dtype, T.exp(f32(xs[j]) * scale - top[0]) / total[0])
                store_tile(y, xs, vec, row, turn * chunk, row_vectors)

    return softmax_forward


def softmax_backward(
    *, dtype: str, vec: int, threads: int, depth: int, whole: bool, dy_layout: str, y_layout: str
) -> Any:  # fmt: skip
    """dx = scale * y * (dy - sum of dy * y)."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def softmax_backward(
        dy: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype), dx: T.Tensor((n,), dtype),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        y_inner: T.int64, y_outer: T.int64, y_stride: T.int64, y_step: T.int64,
        row_vectors: T.int64, scale: T.float32, rows: T.int32,
    ):  # fmt: skip
        with T.Kernel(rows, threads=threads) as block:
            row = T.Cast("int64", block)
            turns = T.ceildiv(row_vectors, T.int64(chunk))
            ds = tile(vec, threads, depth, dtype)
            ys = tile(vec, threads, depth, dtype)
            terms = tile(vec, threads, depth)
            total = T.alloc_fragment((1,), F32)
            T.clear(terms)
            for turn in T.serial(turns):
                load_tile(ds, dy, dy_layout, vec, row, turn * chunk, row_vectors,
                          (dy_inner, dy_outer, dy_stride, dy_step))  # fmt: skip
                load_tile(ys, y, y_layout, vec, row, turn * chunk, row_vectors, (y_inner, y_outer, y_stride, y_step))
                for j in T.Parallel(vec * chunk):  # beyond the end of the row both are 0
                    terms[j] += f32(ds[j]) * f32(ys[j])
            T.reduce_sum(terms, total, dim=0)
            for turn in T.serial(turns):
                if not whole:
                    load_tile(ds, dy, dy_layout, vec, row, turn * chunk, row_vectors,
                              (dy_inner, dy_outer, dy_stride, dy_step))  # fmt: skip
                    load_tile(ys, y, y_layout, vec, row, turn * chunk, row_vectors,
                              (y_inner, y_outer, y_stride, y_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    ds[j] = T.Cast(dtype, scale * f32(ys[j]) * (f32(ds[j]) - total[0]))
                store_tile(dx, ds, vec, row, turn * chunk, row_vectors)

    return softmax_backward
