"""Device code of the norm family's backwards in TileLang. Flags, arguments, layouts: as in `tilelang_programs.py`.

Weight gradients are summed in two stages in an order that the shape and the grid fix: every group of threads of
`backward` sums the rows that it visits, a block writes one row of partial sums, and `reduce_columns` adds those rows
up. Rows too wide for registers take `backward` for dx alone, which keeps the two means of each row, and then
`partial_columns`.
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.norm.tilelang_programs import (
    F32,
    alloc,
    by_warp,
    column_of,
    dense,
    each_row,
    each_warp,
    f32,
    gather_sums,
    line,
    load_line,
    load_rows,
    share_sums,
    tile,
    warps,
)


def normalised(kind: str, value: Any, mean: Any, rstd: Any) -> Any:
    """n, the row before its weight. What `l2_norm` saves is that already."""
    if kind == "l2":
        return f32(value)
    return ((f32(value) - mean) if kind == "layer" else f32(value)) * rstd


def weighted(kind: str, value: Any, weight: Any, weight_offset: Any) -> Any:
    """e = dy * w."""
    if weight is None:
        return f32(value)
    return f32(value) * (f32(weight) + weight_offset if kind == "rms" else f32(weight))


@T.macro
def load_statistic(to, source, first_row, rows):
    for i in T.Parallel(*to.shape):
        to[i] = T.float32(0)
        if first_row + i < rows:
            to[i] = source[first_row + i]


@T.macro
def store_sum(partial, sums, columns, rows, first, at_row, columns_like):
    """One row of partial sums: those of the block's groups of threads, added up."""
    if rows == 1:
        for i, j in T.Parallel(*sums.shape):
            if first + j < columns:
                partial[dense(columns, at_row, first + j)] = sums[i, j]
    else:
        whole = alloc(columns_like, (sums.shape[1],))
        T.reduce_sum(sums, whole, dim=0)
        for j in T.Parallel(sums.shape[1]):
            if first + j < columns:
                partial[dense(columns, at_row, first + j)] = whole[j]


def backward(
    *, columns: int, dtype: str, dy_layout: str | None, x_layout: str, weight_layout: str | None, weight_dtype: str,
    dh_layout: str | None, kind: str, cast_before_weight: bool, dx_needed: bool, sums: tuple[str, ...], keep: bool,
    vec: int, lanes: int, block_rows: int, tiles: int, ahead: bool, blocks: int,
) -> Any:  # fmt: skip
    """dx of every row, and partial sums over rows for each of `sums` ("weight", "bias", "pre_bias", in this order).

    `kind` is "rms", "layer" or "l2" (there `x` is the forward's y). With e = dy * w and n the normalised row,
    dx = rstd (e - mean(e) - n mean(e n)) + dh, without mean(e) where nothing was centred. `keep` also stores the means.
    `ahead` loads a block's next rows while it works on these; `blocks` a multiprocessor bounds the registers (0: not).
    """
    C, R = columns, block_rows
    width = -(-C // (vec * lanes * tiles)) * vec * lanes
    held = tiles == 1
    divisor = 1.0 if kind == "l2" else float(C)
    rows_like, columns_like = tile(R, width, vec, lanes), line(R, width, vec, lanes)
    row_like = each_row(R, lanes)
    warps_like, (warp_count, span) = by_warp(R, width, vec, lanes), warps(width, vec, lanes)
    ahead = ahead and held and dy_layout is not None
    means = dy_layout is not None and (dx_needed or "pre_bias" in sums)
    n = T.dynamic("n", "int64")

    @T.prim_func
    def norm_backward(
        dy: T.Tensor((n,), dtype), x: T.Tensor((n,), dtype), weight: T.Tensor((n,), weight_dtype),
        mean: T.Tensor((n,), F32), rstd: T.Tensor((n,), F32), dh: T.Tensor((n,), dtype), dx: T.Tensor((n,), dtype),
        partial: T.Tensor((n,), F32), row_means: T.Tensor((n,), F32),
        rows: T.int32, programs: T.int32, weight_offset: T.float32, dy_inner: T.int32, dy_outer: T.int64,
        dy_stride: T.int64, dy_step: T.int64, x_inner: T.int32, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        dh_inner: T.int32, dh_outer: T.int64, dh_stride: T.int64, dh_step: T.int64, weight_step: T.int64,
    ):  # fmt: skip
        with T.Kernel(programs, threads=R * lanes) as block:
            if blocks:
                T.annotate_min_blocks_per_sm(blocks)
            xs = alloc(rows_like, (R, width), dtype)
            dys = alloc(rows_like, (R, width), dtype)
            terms = alloc(rows_like, (R, width))
            row_mean = alloc(row_like, (R,))
            row_rstd = alloc(row_like, (R,))
            mean_e = alloc(row_like, (R,))
            mean_en = alloc(row_like, (R,))
            dy_place = (dy_inner, dy_outer, dy_stride, dy_step)
            x_place = (x_inner, x_outer, x_stride, x_step)
            if means:
                en_terms = alloc(warps_like, (R, warp_count, span))
                e_terms = alloc(warps_like, (R, warp_count, span))
                en_part = alloc(each_warp(R, lanes), (R, warp_count))
                e_part = alloc(each_warp(R, lanes), (R, warp_count))
                shared = T.alloc_shared((2, R, warp_count), F32)
            if dh_layout is not None:
                dhs = alloc(rows_like, (R, width), dtype)
                dh_place = (dh_inner, dh_outer, dh_stride, dh_step)
            if weight_layout is not None:
                ws = alloc(columns_like, (width,), weight_dtype)
                if held:
                    load_line(ws, weight, weight_layout, C, 0, (weight_step,))
            if "weight" in sums:
                weight_sum = alloc(rows_like, (R, width))
                T.clear(weight_sum)
            if "bias" in sums:
                bias_sum = alloc(rows_like, (R, width))
                T.clear(bias_sum)
            if "pre_bias" in sums:
                pre_bias_sum = alloc(rows_like, (R, width))
                T.clear(pre_bias_sum)

            if ahead:
                next_xs = alloc(rows_like, (R, width), dtype)
                next_dys = alloc(rows_like, (R, width), dtype)
                next_rstd = alloc(row_like, (R,))
                load_rows(next_xs, x, x_layout, vec, C, block * R, rows, 0, x_place)
                load_rows(next_dys, dy, dy_layout, vec, C, block * R, rows, 0, dy_place)
                load_statistic(next_rstd, rstd, block * R, rows)
                if dh_layout is not None:
                    next_dhs = alloc(rows_like, (R, width), dtype)
                    load_rows(next_dhs, dh, dh_layout, vec, C, block * R, rows, 0, dh_place)
                if kind == "layer":
                    next_mean = alloc(row_like, (R,))
                    load_statistic(next_mean, mean, block * R, rows)
            for turn in T.serial(T.ceildiv(rows - block * R, programs * R)):
                first_row = (turn * programs + block) * R
                if ahead:
                    for i in T.Parallel(R):
                        row_rstd[i] = next_rstd[i]
                        if kind == "layer":
                            row_mean[i] = next_mean[i]
                    for i, j in T.Parallel(R, width):
                        xs[i, j] = next_xs[i, j]
                        dys[i, j] = next_dys[i, j]
                        if dh_layout is not None:
                            dhs[i, j] = next_dhs[i, j]
                    following = first_row + programs * R
                    load_rows(next_xs, x, x_layout, vec, C, following, rows, 0, x_place)
                    load_rows(next_dys, dy, dy_layout, vec, C, following, rows, 0, dy_place)
                    if dh_layout is not None:
                        load_rows(next_dhs, dh, dh_layout, vec, C, following, rows, 0, dh_place)
                    load_statistic(next_rstd, rstd, following, rows)
                    if kind == "layer":
                        load_statistic(next_mean, mean, following, rows)
                elif dy_layout is not None:
                    load_statistic(row_rstd, rstd, first_row, rows)
                    if kind == "layer":
                        load_statistic(row_mean, mean, first_row, rows)
                    if held:
                        load_rows(xs, x, x_layout, vec, C, first_row, rows, 0, x_place)
                        load_rows(dys, dy, dy_layout, vec, C, first_row, rows, 0, dy_place)
                if held and not ahead and dh_layout is not None:
                    load_rows(dhs, dh, dh_layout, vec, C, first_row, rows, 0, dh_place)
                if means:
                    T.clear(en_terms)
                    if kind == "layer":
                        T.clear(e_terms)
                    for k in T.serial(tiles):
                        if not held:
                            load_rows(xs, x, x_layout, vec, C, first_row, rows, k * width, x_place)
                            load_rows(dys, dy, dy_layout, vec, C, first_row, rows, k * width, dy_place)
                            if weight_layout is not None:
                                load_line(ws, weight, weight_layout, C, k * width, (weight_step,))
                        for i, w, e in T.Parallel(R, warp_count, span):
                            j = column_of(w, e, width, vec, lanes)
                            value = weighted(
                                kind, dys[i, j], ws[j] if weight_layout is not None else None, weight_offset
                            )
                            if kind == "layer":
                                e_terms[i, w, e] += value
                            product = normalised(kind, xs[i, j], row_mean[i], row_rstd[i]) * value
                            # a padded column of a row whose statistics are not finite is no number either
                            en_terms[i, w, e] += T.if_then_else(k * width + j < C, product, T.float32(0))
                    share_sums(en_terms, en_part, shared, 0, warp_count)
                    if kind == "layer":
                        share_sums(e_terms, e_part, shared, 1, warp_count)
                        gather_sums(e_part, shared, 1, warp_count, mean_e)
                    gather_sums(en_part, shared, 0, warp_count, mean_en)
                    for i in T.Parallel(R):
                        mean_en[i] = mean_en[i] / T.float32(divisor)
                        if kind == "layer":
                            mean_e[i] = mean_e[i] / T.float32(divisor)
                for k in T.serial(tiles):
                    if not held:
                        if dy_layout is not None:
                            load_rows(xs, x, x_layout, vec, C, first_row, rows, k * width, x_place)
                            load_rows(dys, dy, dy_layout, vec, C, first_row, rows, k * width, dy_place)
                            if weight_layout is not None:
                                load_line(ws, weight, weight_layout, C, k * width, (weight_step,))
                        if dh_layout is not None:
                            load_rows(dhs, dh, dh_layout, vec, C, first_row, rows, k * width, dh_place)
                    if dx_needed or "pre_bias" in sums:
                        for i, j in T.Parallel(R, width):
                            value = T.float32(0)
                            if dy_layout is not None:
                                value = weighted(
                                    kind, dys[i, j], ws[j] if weight_layout is not None else None, weight_offset
                                )
                                if kind == "layer":
                                    value = value - mean_e[i]
                                value = (
                                    value - normalised(kind, xs[i, j], row_mean[i], row_rstd[i]) * mean_en[i]
                                ) * row_rstd[i]
                            terms[i, j] = value + f32(dhs[i, j]) if dh_layout is not None else value
                    if dx_needed:
                        for i, j in T.Parallel(R, width):
                            if (first_row + i < rows) & (k * width + j < C):
                                dx[dense(C, first_row + i, k * width + j)] = T.Cast(dtype, terms[i, j])
                    if "pre_bias" in sums:
                        for i, j in T.Parallel(R, width):
                            pre_bias_sum[i, j] += terms[i, j]
                    if dy_layout is not None and "weight" in sums:
                        for i, j in T.Parallel(R, width):
                            value = normalised(kind, xs[i, j], row_mean[i], row_rstd[i])
                            if cast_before_weight:
                                value = f32(T.Cast(dtype, value))
                            weight_sum[i, j] += f32(dys[i, j]) * value
                    if dy_layout is not None and "bias" in sums:
                        for i, j in T.Parallel(R, width):
                            bias_sum[i, j] += f32(dys[i, j])
                if keep:
                    for i in T.Parallel(R):
                        if first_row + i < rows:
                            row_means[first_row + i] = mean_en[i]
                            if kind == "layer":
                                row_means[rows + first_row + i] = mean_e[i]
            if "weight" in sums:
                store_sum(partial, weight_sum, C, R, 0, sums.index("weight") * programs + block, columns_like)
            if "bias" in sums:
                store_sum(partial, bias_sum, C, R, 0, sums.index("bias") * programs + block, columns_like)
            if "pre_bias" in sums:
                store_sum(partial, pre_bias_sum, C, R, 0, sums.index("pre_bias") * programs + block, columns_like)

    return norm_backward


def partial_columns(
    *, columns: int, dtype: str, dy_layout: str | None, x_layout: str, weight_layout: str | None, weight_dtype: str,
    dh_layout: str | None, kind: str, cast_before_weight: bool, sums: tuple[str, ...], vec: int, lanes: int,
    block_rows: int,
) -> Any:  # fmt: skip
    """Partial sums over rows for rows that are too wide for registers: a block keeps to `lanes` vectors of columns.

    "pre_bias" sums dx before its rounding, from the two means that `backward(keep=True)` left for each row.
    """
    C, R = columns, block_rows
    width = vec * lanes
    rows_like, columns_like = tile(R, width, vec, lanes), line(R, width, vec, lanes)
    row_like = each_row(R, lanes)
    n = T.dynamic("n", "int64")

    @T.prim_func
    def norm_partial_columns(
        dy: T.Tensor((n,), dtype), x: T.Tensor((n,), dtype), weight: T.Tensor((n,), weight_dtype),
        mean: T.Tensor((n,), F32), rstd: T.Tensor((n,), F32), dh: T.Tensor((n,), dtype),
        partial: T.Tensor((n,), F32), row_means: T.Tensor((n,), F32),
        rows: T.int32, programs: T.int32, weight_offset: T.float32, dy_inner: T.int32, dy_outer: T.int64,
        dy_stride: T.int64, dy_step: T.int64, x_inner: T.int32, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        dh_inner: T.int32, dh_outer: T.int64, dh_stride: T.int64, dh_step: T.int64, weight_step: T.int64,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(C, width), programs, threads=R * lanes) as (column_block, block):
            xs = alloc(rows_like, (R, width), dtype)
            dys = alloc(rows_like, (R, width), dtype)
            row_mean = alloc(row_like, (R,))
            row_rstd = alloc(row_like, (R,))
            dy_place = (dy_inner, dy_outer, dy_stride, dy_step)
            x_place = (x_inner, x_outer, x_stride, x_step)
            if "weight" in sums:
                weight_sum = alloc(rows_like, (R, width))
                T.clear(weight_sum)
            if "bias" in sums:
                bias_sum = alloc(rows_like, (R, width))
                T.clear(bias_sum)
            if "pre_bias" in sums:
                pre_bias_sum = alloc(rows_like, (R, width))
                T.clear(pre_bias_sum)
                mean_e = alloc(row_like, (R,))
                mean_en = alloc(row_like, (R,))
                dh_place = (dh_inner, dh_outer, dh_stride, dh_step)
                if dh_layout is not None:
                    dhs = alloc(rows_like, (R, width), dtype)
                if weight_layout is not None:
                    ws = alloc(columns_like, (width,), weight_dtype)
                    load_line(ws, weight, weight_layout, C, column_block * width, (weight_step,))
            for turn in T.serial(T.ceildiv(rows - block * R, programs * R)):
                first_row = (turn * programs + block) * R
                if dy_layout is not None:
                    load_statistic(row_rstd, rstd, first_row, rows)
                    if kind == "layer":
                        load_statistic(row_mean, mean, first_row, rows)
                    load_rows(xs, x, x_layout, vec, C, first_row, rows, column_block * width, x_place)
                    load_rows(dys, dy, dy_layout, vec, C, first_row, rows, column_block * width, dy_place)
                    if "weight" in sums:
                        for i, j in T.Parallel(R, width):
                            value = normalised(kind, xs[i, j], row_mean[i], row_rstd[i])
                            if cast_before_weight:
                                value = f32(T.Cast(dtype, value))
                            weight_sum[i, j] += f32(dys[i, j]) * value
                    if "bias" in sums:
                        for i, j in T.Parallel(R, width):
                            bias_sum[i, j] += f32(dys[i, j])
                    if "pre_bias" in sums:
                        load_statistic(mean_en, row_means, first_row, rows)
                        if kind == "layer":
                            load_statistic(mean_e, row_means, rows + first_row, rows + rows)
                        for i, j in T.Parallel(R, width):
                            value = weighted(
                                kind, dys[i, j], ws[j] if weight_layout is not None else None, weight_offset
                            )
                            if kind == "layer":
                                value = value - mean_e[i]
                            value = (
                                value - normalised(kind, xs[i, j], row_mean[i], row_rstd[i]) * mean_en[i]
                            ) * row_rstd[i]
                            pre_bias_sum[i, j] += value
                if dh_layout is not None and "pre_bias" in sums:
                    load_rows(dhs, dh, dh_layout, vec, C, first_row, rows, column_block * width, dh_place)
                    for i, j in T.Parallel(R, width):
                        pre_bias_sum[i, j] += f32(dhs[i, j])
            first = column_block * width
            if "weight" in sums:
                store_sum(partial, weight_sum, C, R, first, sums.index("weight") * programs + block, columns_like)
            if "bias" in sums:
                store_sum(partial, bias_sum, C, R, first, sums.index("bias") * programs + block, columns_like)
            if "pre_bias" in sums:
                store_sum(partial, pre_bias_sum, C, R, first, sums.index("pre_bias") * programs + block, columns_like)

    return norm_partial_columns


def reduce_columns(*, columns: int, dtypes: tuple[str, ...], lanes: int, depth: int) -> Any:
    """out_k[C] = the sum of the rows of partial[k], for up to three outputs, rounded once to each one's dtype.

    A block adds `lanes` columns; its threads take every `depth`-th row, then add up among themselves.
    """
    C, unroll = columns, 4
    first, second, third = (*dtypes, F32, F32)[:3]
    n = T.dynamic("n", "int64")

    @T.prim_func
    def norm_reduce_columns(
        partial: T.Tensor((n,), F32),
        out0: T.Tensor((n,), first),
        out1: T.Tensor((n,), second),
        out2: T.Tensor((n,), third),
        count: T.int32,
    ):
        with T.Kernel(T.ceildiv(C, lanes), len(dtypes), threads=lanes * depth) as (block, which):
            part = alloc(T.Fragment((depth, lanes), forward_fn=lambda i, j: (i * lanes + j, 0)), (depth, lanes))
            ahead_like = T.Fragment((unroll, depth, lanes), forward_fn=lambda u, i, j: (i * lanes + j, u))
            ahead = alloc(ahead_like, (unroll, depth, lanes))
            total = T.alloc_fragment((lanes,), F32)
            T.clear(part)
            for turn in T.serial(T.ceildiv(count, depth * unroll)):
                T.clear(ahead)
                for u, i, j in T.Parallel(unroll, depth, lanes):
                    if ((turn * unroll + u) * depth + i < count) & (block * lanes + j < C):
                        ahead[u, i, j] = partial[
                            dense(C, which * count + (turn * unroll + u) * depth + i, block * lanes + j)
                        ]
                for u in T.unroll(unroll):
                    for i, j in T.Parallel(depth, lanes):
                        part[i, j] += ahead[u, i, j]
            T.reduce_sum(part, total, dim=0)
            for j in T.Parallel(lanes):
                if block * lanes + j < C:
                    if which == 0:
                        out0[block * lanes + j] = T.Cast(first, total[j])
                    if len(dtypes) > 1:
                        if which == 1:
                            out1[block * lanes + j] = T.Cast(second, total[j])
                    if len(dtypes) > 2:
                        if which == 2:
                            out2[block * lanes + j] = T.Cast(third, total[j])

    return norm_reduce_columns
