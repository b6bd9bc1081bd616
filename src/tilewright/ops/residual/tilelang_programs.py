"""Device code of gated_residual and its gradient in TileLang.

Only `tilelang.py` beside this file calls these, when a launch is compiled. How tensors are read is in `tilelang_rows`.
`broadcast` says how the gate is spread: "none" (it has the shape of x), "rows" ([C]) or "columns" ([..., 1]).
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.tilelang_rows import F32, f32, load_tile, offset, place_of, store_tile, tile


def gated_forward(
    *, dtype: str, flat: bool, vec: int, threads: int, depth: int, broadcast: str, x_layout: str, gate_layout: str,
    gate_dtype: str, residual_layout: str,
) -> Any:  # fmt: skip
    """y = residual + x * gate."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def gated_forward(
        x: T.Tensor((n,), dtype), gate: T.Tensor((n,), gate_dtype), residual: T.Tensor((n,), dtype),
        y: T.Tensor((n,), dtype),
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        gate_inner: T.int64, gate_outer: T.int64, gate_stride: T.int64, gate_step: T.int64,
        residual_inner: T.int64, residual_outer: T.int64, residual_stride: T.int64, residual_step: T.int64,
        row_vectors: T.int64, tiles: T.int32,
    ):  # fmt: skip
        with T.Kernel(tiles, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            gate_place = (gate_inner, gate_outer, gate_stride, gate_step)
            xs = tile(vec, threads, depth, dtype)
            rs = tile(vec, threads, depth, dtype)
            load_tile(xs, x, x_layout, vec, row, first, row_vectors, (x_inner, x_outer, x_stride, x_step))
            load_tile(rs, residual, residual_layout, vec, row, first, row_vectors,
                      (residual_inner, residual_outer, residual_stride, residual_step))  # fmt: skip
            if broadcast == "columns":
                for j in T.Parallel(vec * chunk):
                    g = f32(gate[offset(gate_layout, vec, row, T.int64(0), gate_place)])
                    xs[j] = T.Cast(dtype, f32(rs[j]) + f32(xs[j]) * g)
            else:
                gs = tile(vec, threads, depth, gate_dtype)
                load_tile(gs, gate, gate_layout, vec, row, first, row_vectors, gate_place)
                for j in T.Parallel(vec * chunk):
                    xs[j] = T.Cast(dtype, f32(rs[j]) + f32(xs[j]) * f32(gs[j]))
            store_tile(y, xs, vec, row, first, row_vectors)

    return gated_forward


def gated_backward(
    *, dtype: str, flat: bool, vec: int, threads: int, depth: int, broadcast: str, summed: str, dy_layout: str,
    x_layout: str, gate_layout: str, gate_dtype: str, needs_dx: bool, needs_dgate: bool,
) -> Any:  # fmt: skip
    """dx = dy * gate and dgate = dy * x, those that are needed. `summed` "rows": a block keeps to its columns and
    visits every `groups`-th row; "columns": it walks one row."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def gated_backward(
        dy: T.Tensor((n,), dtype), x: T.Tensor((n,), dtype), gate: T.Tensor((n,), gate_dtype),
        dx: T.Tensor((n,), dtype), dgate: T.Tensor((n,), gate_dtype), partials: T.Tensor((n,), F32),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        x_inner: T.int64, x_outer: T.int64, x_stride: T.int64, x_step: T.int64,
        gate_inner: T.int64, gate_outer: T.int64, gate_stride: T.int64, gate_step: T.int64,
        rows: T.int64, row_vectors: T.int64, blocks: T.int32, groups: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks, groups, threads=threads) as (block, group):
            gate_place = (gate_inner, gate_outer, gate_stride, gate_step)
            ds = tile(vec, threads, depth, dtype)
            xs = tile(vec, threads, depth, dtype)
            if needs_dx and broadcast != "columns":
                gs = tile(vec, threads, depth, gate_dtype)
            if summed == "none" and needs_dgate:
                outs = tile(vec, threads, depth, gate_dtype)
            sums = tile(vec, threads, depth)
            T.clear(sums)
            turns = T.int64(1)
            if summed == "rows":
                turns = T.ceildiv(rows - group, T.Cast("int64", groups))
            if summed == "columns":
                turns = T.ceildiv(row_vectors, T.int64(chunk))
            for turn in T.serial(turns):
                row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
                if summed == "rows":
                    row, first = turn * groups + group, T.Cast("int64", block) * chunk
                if summed == "columns":
                    row, first = T.Cast("int64", block), turn * chunk
                load_tile(ds, dy, dy_layout, vec, row, first, row_vectors, (dy_inner, dy_outer, dy_stride, dy_step))
                if needs_dgate:
                    load_tile(xs, x, x_layout, vec, row, first, row_vectors, (x_inner, x_outer, x_stride, x_step))
                    if summed == "none":
                        for j in T.Parallel(vec * chunk):
                            outs[j] = T.Cast(gate_dtype, f32(ds[j]) * f32(xs[j]))
                        store_tile(dgate, outs, vec, row, first, row_vectors)
                    else:  # beyond the end of a row both are 0
                        for j in T.Parallel(vec * chunk):
                            sums[j] += f32(ds[j]) * f32(xs[j])
                if needs_dx:
                    if broadcast == "columns":
                        for j in T.Parallel(vec * chunk):
                            g = f32(gate[offset(gate_layout, vec, row, T.int64(0), gate_place)])
                            ds[j] = T.Cast(dtype, f32(ds[j]) * g)
                    else:
                        load_tile(gs, gate, gate_layout, vec, row, first, row_vectors, gate_place)
                        for j in T.Parallel(vec * chunk):
                            ds[j] = T.Cast(dtype, f32(ds[j]) * f32(gs[j]))
                    store_tile(dx, ds, vec, row, first, row_vectors)
            if summed == "rows":
                store_tile(partials, sums, vec, T.Cast("int64", group), T.Cast("int64", block) * chunk, row_vectors)
            if summed == "columns":
                whole = T.alloc_fragment((1,), F32)
                T.reduce_sum(sums, whole, dim=0)
                dgate[block] = T.Cast(gate_dtype, whole[0])

    return gated_backward
