"""Device code of the norm family's forwards in TileLang, and the pieces that the backwards share.

Only `tilelang.py` beside this file calls these, when a launch is compiled; it works out flags, arguments and grids.
Every program declares all the arguments that its pass may need: those that a set of flags does not use are left out of
the kernel by TileLang. Rows are run-time everywhere; only the number of columns and the layouts are compiled in.

How a tensor is read is its layout: None (absent) or a digit and a letter. The digit is the number of row levels (2:
rows come in groups of `_inner`, `_outer` apart, as heads of a fused projection do). The letter says whether every row
starts at a multiple of the vector ("v": strides are counted in vectors, so that the compiler can see it) or not ("s":
element by element, with a run-time column stride). Weights have the letter only.

Loads sit in `if` statements, not in `T.if_then_else`: there TileLang 0.1.15 hoists the vector load of a converted
operand out of the condition, which reads past the end of the tensor. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

F32 = "float32"


def f32(value: Any) -> Any:
    return T.Cast(F32, value)


def tile(rows: int, width: int, vec: int, lanes: int) -> Any:
    """Each row is spread over `lanes` neighbouring threads, in vectors: every access is coalesced."""

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        return i * lanes + (j // vec) % lanes, (j // (vec * lanes)) * vec + j % vec

    return T.Fragment((rows, width), forward_fn=place)


def line(rows: int, width: int, vec: int, lanes: int) -> Any:
    """A row of weights, held once by each of the `rows` groups of threads."""

    def place(j: Any, copy: Any = 0) -> tuple[Any, Any]:
        return copy * lanes + (j // vec) % lanes, (j // (vec * lanes)) * vec + j % vec

    return T.Fragment((width,), forward_fn=place, replicate=rows)


def warps(width: int, vec: int, lanes: int) -> tuple[int, int]:
    """How many warps share a row and how many of its elements each one holds."""
    count = max(1, lanes // 32)
    return count, width // count


def by_warp(rows: int, width: int, vec: int, lanes: int) -> Any:
    """The elements of `tile`, in the same places, as [rows, warps, elements of a warp]: see `column_of`."""
    count, span = warps(width, vec, lanes)
    near = lanes // count

    def place(i: Any, w: Any, e: Any) -> tuple[Any, Any]:
        return i * lanes + w * near + (e // vec) % near, (e // (vec * near)) * vec + e % vec

    return T.Fragment((rows, count, span), forward_fn=place)


def column_of(w: Any, e: Any, width: int, vec: int, lanes: int) -> Any:
    """The column of element `e` of warp `w`."""
    count, _ = warps(width, vec, lanes)
    chunk = vec * (lanes // count)
    return (e // chunk) * (chunk * count) + w * chunk + e % chunk


def each_row(rows: int, lanes: int) -> Any:
    """One value a row, held by all of its threads."""
    return T.Fragment((rows,), forward_fn=lambda i, copy=0: (i * lanes + copy, 0), replicate=lanes)


def each_warp(rows: int, lanes: int) -> Any:
    """One value for each row and warp, held by all threads of the warp."""
    count = max(1, lanes // 32)
    near = lanes // count
    return T.Fragment((rows, count), forward_fn=lambda i, w, copy=0: (i * lanes + w * near + copy, 0), replicate=near)


def alloc(layout: Any, shape: tuple[int, ...], dtype: str = F32) -> Any:
    """Registers laid out as told."""
    fragment = T.alloc_fragment(shape, dtype)
    T.annotate_layout({fragment: layout})
    return fragment


def at(layout: str, vec: int, row: Any, column: Any, place: tuple[Any, Any, Any, Any]) -> Any:
    """The int64 element offset of (row, column); the int32 row is widened before it multiplies."""
    inner, outer, stride, step = place
    unit = vec if layout[1] == "v" else 1
    if layout[0] == "2":
        high, low = T.Cast("int64", T.truncdiv(row, inner)), T.Cast("int64", T.truncmod(row, inner))
        start = high * (outer * unit) + low * (stride * unit)
    else:
        start = T.Cast("int64", row) * (stride * unit)
    return start + (column if layout[1] == "v" else column * step)


def along(layout: str, column: Any, place: tuple[Any]) -> Any:
    """The offset in a weight. A run-time step of 1 also keeps the compiler from taking a vector for aligned. (The step
    comes in a tuple: a macro renames a scalar that it is given alone, and the launch finds arguments by name.)"""
    return column if layout == "v" else column * place[0]


def dense(columns: int, row: Any, column: Any) -> Any:
    """The offset in a fresh contiguous output."""
    return T.Cast("int64", row) * columns + column


@T.macro
def load_rows(to, source, layout, vec, columns, first_row, rows, first, place):
    """Fill a tile; rows and columns outside of the tensor are 0."""
    T.clear(to)
    for i, j in T.Parallel(*to.shape):
        if (first_row + i < rows) & (first + j < columns):
            to[i, j] = source[at(layout, vec, first_row + i, first + j, place)]


@T.macro
def load_line(to, source, layout, columns, first, place):
    """Fill a row of weights; columns outside of the tensor are 0."""
    T.clear(to)
    for j in T.Parallel(*to.shape):
        if first + j < columns:
            to[j] = source[along(layout, first + j, place)]


@T.macro
def store_rows(to, tile_, columns, first_row, rows, first):
    for i, j in T.Parallel(*tile_.shape):
        if (first_row + i < rows) & (first + j < columns):
            to[dense(columns, first_row + i, first + j)] = tile_[i, j]


@T.macro
def share_sums(terms, part, shared, slot, warp_count):
    """First half of a row sum: add up within each warp, by shuffles, and show the other warps."""
    T.reduce_sum(terms, part, dim=2)
    if warp_count > 1:
        for i, w in T.Parallel(*part.shape):
            shared[slot, i, w] = part[i, w]


@T.macro
def gather_sums(part, shared, slot, warp_count, out):
    """Second half: every thread adds the warps' sums in the same order. Two barriers, however many warps there are,
    where `T.reduce_sum` across warps needs two for each halving."""
    for i in T.Parallel(*out.shape):
        out[i] = part[i, 0] if warp_count == 1 else T.float32(0)
    if warp_count > 1:
        for w in T.unroll(warp_count):
            for i in T.Parallel(*out.shape):
                out[i] += shared[slot, i, w]


def forward(
    *, columns: int, dtype: str, x_layout: str, residual_layout: str | None, pre_bias_layout: str | None,
    pre_bias_dtype: str, weight_layout: str | None, weight_dtype: str, bias_layout: str | None, bias_dtype: str,
    centred: bool, divisor: float, cast_before_weight: bool, saving: bool, vec: int, lanes: int, block_rows: int,
    tiles: int,
) -> Any:  # fmt: skip
    """y (and h, mean, rstd) of `block_rows` rows a block.

    With one tile a row is held in the registers of `lanes` threads and read once. With several it is walked in tiles,
    once for each statistic and once for y; a residual sum is then read back from h.
    """
    C, R = columns, block_rows
    width = -(-C // (vec * lanes * tiles)) * vec * lanes
    rows_like, columns_like = tile(R, width, vec, lanes), line(R, width, vec, lanes)
    warps_like, (warp_count, span) = by_warp(R, width, vec, lanes), warps(width, vec, lanes)
    held = tiles == 1
    h_place = (1, 0, C // vec, 1)
    n = T.dynamic("n", "int64")

    @T.prim_func
    def norm_forward(
        x: T.Tensor((n,), dtype), residual: T.Tensor((n,), dtype), pre_bias: T.Tensor((n,), pre_bias_dtype),
        weight: T.Tensor((n,), weight_dtype), bias: T.Tensor((n,), bias_dtype), y: T.Tensor((n,), dtype),
        h: T.Tensor((n,), dtype), mean: T.Tensor((n,), F32), rstd: T.Tensor((n,), F32),
        rows: T.int32, eps: T.float32, weight_offset: T.float32, x_inner: T.int32, x_outer: T.int64,
        x_stride: T.int64, x_step: T.int64, residual_inner: T.int32, residual_outer: T.int64,
        residual_stride: T.int64, residual_step: T.int64, weight_step: T.int64, bias_step: T.int64,
        pre_bias_step: T.int64,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(rows, R), threads=R * lanes) as block:
            xs = alloc(rows_like, (R, width), dtype)
            terms = alloc(warps_like, (R, warp_count, span))
            part = alloc(each_warp(R, lanes), (R, warp_count))
            row_mean = alloc(each_row(R, lanes), (R,))
            row_rstd = alloc(each_row(R, lanes), (R,))
            shared = T.alloc_shared((2, R, warp_count), F32)
            x_place = (x_inner, x_outer, x_stride, x_step)
            if residual_layout is not None:
                rs = alloc(rows_like, (R, width), dtype)
                residual_place = (residual_inner, residual_outer, residual_stride, residual_step)
            if pre_bias_layout is not None:
                ps = alloc(columns_like, (width,), pre_bias_dtype)
            if weight_layout is not None:
                ws = alloc(columns_like, (width,), weight_dtype)
                if held:
                    load_line(ws, weight, weight_layout, C, 0, (weight_step,))
            if bias_layout is not None:
                bs = alloc(columns_like, (width,), bias_dtype)
                if held:
                    load_line(bs, bias, bias_layout, C, 0, (bias_step,))

            T.clear(terms)
            for k in T.serial(tiles):
                load_rows(xs, x, x_layout, vec, C, block * R, rows, k * width, x_place)
                if residual_layout is not None:
                    load_rows(rs, residual, residual_layout, vec, C, block * R, rows, k * width, residual_place)
                    if pre_bias_layout is not None:
                        load_line(ps, pre_bias, pre_bias_layout, C, k * width, (pre_bias_step,))
                        for i, j in T.Parallel(R, width):
                            xs[i, j] = T.Cast(dtype, f32(xs[i, j]) + f32(ps[j]) + f32(rs[i, j]))
                    else:
                        for i, j in T.Parallel(R, width):
                            xs[i, j] = T.Cast(dtype, f32(xs[i, j]) + f32(rs[i, j]))
                    store_rows(h, xs, C, block * R, rows, k * width)
                for i, w, e in T.Parallel(R, warp_count, span):
                    value = f32(xs[i, column_of(w, e, width, vec, lanes)])
                    terms[i, w, e] += value if centred else value * value
            if centred:
                share_sums(terms, part, shared, 0, warp_count)
                gather_sums(part, shared, 0, warp_count, row_mean)
                for i in T.Parallel(R):
                    row_mean[i] = row_mean[i] / T.float32(C)
                T.clear(terms)
                for k in T.serial(tiles):
                    if not held:
                        if residual_layout is not None:
                            load_rows(xs, h, "1v", vec, C, block * R, rows, k * width, h_place)
                        else:
                            load_rows(xs, x, x_layout, vec, C, block * R, rows, k * width, x_place)
                    for i, w, e in T.Parallel(R, warp_count, span):
                        j = column_of(w, e, width, vec, lanes)
                        value = f32(xs[i, j]) - row_mean[i]
                        terms[i, w, e] += T.if_then_else(k * width + j < C, value * value, T.float32(0))
            share_sums(terms, part, shared, 1, warp_count)
            gather_sums(part, shared, 1, warp_count, row_rstd)
            for i in T.Parallel(R):
                # the approximate root is 2 ulp off: most of the error of a float32 norm
                row_rstd[i] = T.ieee_frsqrt(row_rstd[i] / T.float32(divisor) + eps)
            for k in T.serial(tiles):
                if not held:
                    if residual_layout is not None:
                        load_rows(xs, h, "1v", vec, C, block * R, rows, k * width, h_place)
                    else:
                        load_rows(xs, x, x_layout, vec, C, block * R, rows, k * width, x_place)
                    if weight_layout is not None:
                        load_line(ws, weight, weight_layout, C, k * width, (weight_step,))
                    if bias_layout is not None:
                        load_line(bs, bias, bias_layout, C, k * width, (bias_step,))
                for i, j in T.Parallel(R, width):
                    if (block * R + i < rows) & (k * width + j < C):
                        value = (f32(xs[i, j]) - row_mean[i] if centred else f32(xs[i, j])) * row_rstd[i]
                        if cast_before_weight:
                            value = f32(T.Cast(dtype, value))
                        if weight_layout is not None:
                            value = value * (f32(ws[j]) if centred else f32(ws[j]) + weight_offset)
                        if bias_layout is not None:
                            value = value + f32(bs[j])
                        y[dense(C, block * R + i, k * width + j)] = T.Cast(dtype, value)
            if saving:
                for i in T.Parallel(R):
                    if block * R + i < rows:
                        if centred:
                            mean[block * R + i] = row_mean[i]
                        rstd[block * R + i] = row_rstd[i]

    return norm_forward
