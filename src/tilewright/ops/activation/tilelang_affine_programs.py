"""Device code in TileLang of what has parameters by column: one program a pass, and the sum of partial rows.

Only `tilelang_affine.py` beside this file calls these, when a launch is compiled. A block keeps to `depth` vectors a
thread of the columns and walks over every `groups`-th row, so parameters are read once. Layouts, and how columns are
counted, are as in `tilelang_programs`. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import F32, activation, at, chain, f32, load_tile, tile


def result(kind: str, value: Any) -> Any:
    """act(value)."""
    return activation(kind, value) if kind else value


def place_of(block: Any, row_vectors: Any, chunk: int) -> tuple[Any, Any]:
    """A block's first vector of columns, and which share of the rows it has."""
    index = T.Cast("int64", block)
    blocks = T.truncdiv(row_vectors + (chunk - 1), T.int64(chunk))
    return T.truncmod(index, blocks) * chunk, T.Cast("int32", T.truncdiv(index, blocks))


@T.macro
def load_line(to, source, layout, vec, first, row_vectors, place):
    """Parameters of the block's columns, in float32; what lies beyond the end is 0."""
    T.clear(to)
    for j in T.Parallel(*to.shape):
        if first + j // vec < row_vectors:
            to[j] = f32(source[at("1" + layout[1], vec, T.int64(0), first * vec + j, place)])


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
            first, group = place_of(block, row_vectors, chunk)
            xs = tile(vec, threads, depth, dtype)
            if scale_layout is not None:
                scales = tile(vec, threads, depth, F32)
                load_line(scales, scale, scale_layout, vec, first, row_vectors, (0, 0, 0, scale_step))
            if bias_layout is not None:
                biases = tile(vec, threads, depth, F32)
                load_line(biases, bias, bias_layout, vec, first, row_vectors, (0, 0, 0, bias_step))
            if residual_layout is not None:
                residuals = tile(vec, threads, depth, dtype)
            for turn in T.serial(T.ceildiv(rows - group, groups)):
                row = T.Cast("int64", group + turn * groups)
                load_tile(xs, x, x_layout, vec, row, T.int64(0), first, row_vectors,
                          (x_inner, x_outer, x_stride, x_step))  # fmt: skip
                if residual_layout is not None:
                    load_tile(residuals, residual, residual_layout, vec, row, T.int64(0), first, row_vectors,
                              (residual_inner, residual_outer, residual_stride, residual_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    if first + j // vec < row_vectors:
                        value = f32(xs[j])
                        if scale_layout is not None:
                            value = value * scales[j]
                        if bias_layout is not None:
                            value = value + biases[j]
                        if residual_layout is not None:
                            value = value + f32(residuals[j])
                        y[(row * row_vectors + first) * vec + j] = T.Cast(dtype, result(kind, value))

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
            first, group = place_of(block, row_vectors, chunk)
            dys = tile(vec, threads, depth, dtype)
            ds = tile(vec, threads, depth, F32)
            if x_layout is not None:
                xs = tile(vec, threads, depth, dtype)
            if scaled:
                scales = tile(vec, threads, depth, F32)
                load_line(scales, scale, scale_layout, vec, first, row_vectors, (0, 0, 0, scale_step))
            if reads_bias:
                biases = tile(vec, threads, depth, F32)
                load_line(biases, bias, bias_layout, vec, first, row_vectors, (0, 0, 0, bias_step))
            if residual_layout is not None:
                residuals = tile(vec, threads, depth, dtype)
            if "dscale" in sums:
                scale_sum = tile(vec, threads, depth, F32)
                T.clear(scale_sum)
            if "dbias" in sums:
                bias_sum = tile(vec, threads, depth, F32)
                T.clear(bias_sum)
            for turn in T.serial(T.ceildiv(rows - group, groups)):
                row = T.Cast("int64", group + turn * groups)
                load_tile(dys, dy, dy_layout, vec, row, T.int64(0), first, row_vectors,
                          (dy_inner, dy_outer, dy_stride, dy_step))  # fmt: skip
                if x_layout is not None:
                    load_tile(xs, x, x_layout, vec, row, T.int64(0), first, row_vectors,
                              (x_inner, x_outer, x_stride, x_step))  # fmt: skip
                if residual_layout is not None:
                    load_tile(residuals, residual, residual_layout, vec, row, T.int64(0), first, row_vectors,
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


def reduce_rows(*, dtypes: tuple[str, ...], lanes: int, depth: int) -> Any:
    """The sum of the rows of partials[k], [groups, columns], for up to two outputs, rounded once to each one's dtype.

    A block adds `lanes` columns; its threads take every `depth`-th row, then add up among themselves.
    """
    unroll = 4
    n = T.dynamic("n", "int64")
    here = T.Fragment((depth, lanes), forward_fn=lambda i, j: (i * lanes + j, 0))
    ahead_of = T.Fragment((unroll, depth, lanes), forward_fn=lambda u, i, j: (i * lanes + j, u))

    @T.prim_func
    def affine_reduce_rows(
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

    return affine_reduce_rows
