"""Device code in TileLang of what has parameters by column: one program a pass.

Only `tilelang_affine.py` beside this file calls these, when a launch is compiled. A block keeps to `depth` vectors a
thread of the columns and walks over every `groups`-th row, so parameters are read once. Layouts, and how columns are
counted, are as in `tilelang_rows`. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import activation, chain
from tilewright.ops.tilelang_rows import F32, f32, load_tile, place_of, store_tile, tile


def result(kind: str, value: Any) -> Any:
    """act(value)."""
    return activation(kind, value) if kind else value


def share_of(block: Any, row_vectors: Any, chunk: int) -> tuple[Any, Any]:
    """A block's first vector of columns, and which share of the rows it has."""
    group, first = place_of(T.Cast("int64", block), row_vectors, chunk, False)
    return first, T.Cast("int32", group)


def forward(
    *, dtype: str, kind: str, vec: int, threads: int, depth: int, x_layout: str, residual_layout: str | None,
    scale_layout: str | None, scale_dtype: str, bias_layout: str | None, bias_dtype: str,
) -> Any:  # fmt: skip
    """y = act(x * scale + bias + residual)."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def affine_forward(
        x: T.Tensor((n,), dtype), scale: T.Tensor((n,), scale_dtype), bias: T.Tensor((n,), bias_dtype),
        residual: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype),
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        residual_inner: T.int64, residual_outer: T.int64, residual_stride: T.int64, residual_step: T.int64,
        scale_step: T.int64, bias_step: T.int64, row_vectors: T.int64, rows: T.int32, groups: T.int32,
        programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            first, group = share_of(block, row_vectors, chunk)
            xs = tile(vec, threads, depth, dtype)
            if scale_layout is not None:
                scales = tile(vec, threads, depth)
                load_tile(scales, scale, scale_layout, vec, T.int64(0), first, row_vectors, (0, 0, 0, scale_step))
            if bias_layout is not None:
                biases = tile(vec, threads, depth)
                load_tile(biases, bias, bias_layout, vec, T.int64(0), first, row_vectors, (0, 0, 0, bias_step))
            if residual_layout is not None:
                residuals = tile(vec, threads, depth, dtype)
            for turn in T.serial(T.ceildiv(rows - group, groups)):
                row = T.Cast("int64", group + turn * groups)
                load_tile(xs, x, x_layout, vec, row, first, row_vectors,
                          (x_inner, x_outer, x_stride, x_step))  # fmt: skip
                if residual_layout is not None:
                    load_tile(residuals, residual, residual_layout, vec, row, first, row_vectors,
                              (residual_inner, residual_outer, residual_stride, residual_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    value = f32(xs[j])
                    if scale_layout is not None:
                        value = value * scales[j]
                    if bias_layout is not None:
                        value = value + biases[j]
                    if residual_layout is not None:
                        value = value + f32(residuals[j])
                    xs[j] = T.Cast(dtype, result(kind, value))
                store_tile(y, xs, vec, row, first, row_vectors)

    return affine_forward


def backward(
    *, dtype: str, kind: str, vec: int, threads: int, depth: int, dy_layout: str, x_layout: str | None,
    residual_layout: str | None, scale_layout: str | None, scale_dtype: str, bias_layout: str | None, bias_dtype: str,
    needs_dx: bool, sums: tuple[str, ...],
) -> Any:  # fmt: skip
    """dx = d * scale with d = dy * act'(x + bias + residual), and partial sums over rows: "dscale" of d * x, "dbias"
    of d."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth
    acts = kind != ""
    reads_bias = acts and bias_layout is not None
    scaled = needs_dx and scale_layout is not None

    @T.prim_func
    def affine_backward(
        dy: T.Tensor((n,), dtype), x: T.Tensor((n,), dtype), scale: T.Tensor((n,), scale_dtype),
        bias: T.Tensor((n,), bias_dtype), residual: T.Tensor((n,), dtype), dx: T.Tensor((n,), dtype),
        partials: T.Tensor((n,), F32),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        residual_inner: T.int64, residual_outer: T.int64, residual_stride: T.int64, residual_step: T.int64,
        scale_step: T.int64, bias_step: T.int64, row_vectors: T.int64, rows: T.int32, groups: T.int32,
        programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            first, group = share_of(block, row_vectors, chunk)
            dys = tile(vec, threads, depth, dtype)
            ds = tile(vec, threads, depth)
            if x_layout is not None:
                xs = tile(vec, threads, depth, dtype)
            if scaled:
                scales = tile(vec, threads, depth)
                load_tile(scales, scale, scale_layout, vec, T.int64(0), first, row_vectors, (0, 0, 0, scale_step))
            if reads_bias:
                biases = tile(vec, threads, depth)
                load_tile(biases, bias, bias_layout, vec, T.int64(0), first, row_vectors, (0, 0, 0, bias_step))
            if residual_layout is not None:
                residuals = tile(vec, threads, depth, dtype)
            if "dscale" in sums:
                scale_sum = tile(vec, threads, depth)
                T.clear(scale_sum)
            if "dbias" in sums:
                bias_sum = tile(vec, threads, depth)
                T.clear(bias_sum)
            for turn in T.serial(T.ceildiv(rows - group, groups)):
                row = T.Cast("int64", group + turn * groups)
                load_tile(dys, dy, dy_layout, vec, row, first, row_vectors,
                          (dy_inner, dy_outer, dy_stride, dy_step))  # fmt: skip
                if x_layout is not None:
                    load_tile(xs, x, x_layout, vec, row, first, row_vectors,
                              (x_inner, x_outer, x_stride, x_step))  # fmt: skip
                if residual_layout is not None:
                    load_tile(residuals, residual, residual_layout, vec, row, first, row_vectors,
                              (residual_inner, residual_outer, residual_stride, residual_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    value = f32(dys[j])
                    if acts:
                        g = f32(xs[j])
                        if reads_bias:
                            g = g + biases[j]
                        if residual_layout is not None:
                            g = g + f32(residuals[j])
                        value = chain(kind, f32(dys[j]), g)
                    ds[j] = value
                if needs_dx:
                    for j in T.Parallel(vec * chunk):
                        if first + j // vec < row_vectors:
                            value = ds[j]
                            if scaled:
                                value = ds[j] * scales[j]
                            dx[(row * row_vectors + first) * vec + j] = T.Cast(dtype, value)
                if "dscale" in sums:
                    for j in T.Parallel(vec * chunk):
                        scale_sum[j] += ds[j] * f32(xs[j])
                if "dbias" in sums:
                    for j in T.Parallel(vec * chunk):
                        bias_sum[j] += ds[j]
            line = T.Cast("int64", group) * row_vectors + first
            if "dscale" in sums:
                for j in T.Parallel(vec * chunk):
                    if first + j // vec < row_vectors:
                        partials[line * vec + j] = scale_sum[j]
            if "dbias" in sums:
                behind = T.Cast("int64", groups * sums.index("dbias")) * row_vectors
                for j in T.Parallel(vec * chunk):
                    if first + j // vec < row_vectors:
                        partials[(behind + line) * vec + j] = bias_sum[j]

    return affine_backward
