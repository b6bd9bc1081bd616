"""Device code of the loss family in TileLang: bce_with_logits, the sum of its partial sums, its gradient and a multiple
of what forward has saved of that.

Only `tilelang.py` beside this file calls these, when a launch is compiled. How tensors are read is in `tilelang_rows`.
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.loss.log1p import LOG1P
from tilewright.ops.tilelang_rows import F32, f32, load_tile, place_of, store_tile, tile

__all__ = ["backward", "forward", "scale", "total"]


def one() -> Any:
    return T.float32(1)


def softplus(x: Any, u: Any) -> Any:
    """log(1 + exp(-x)); u = exp(-|x|), which does not overflow."""
    ratio = T.float32(LOG1P[-1])
    for coefficient in LOG1P[-2::-1]:
        ratio = ratio * u + T.float32(coefficient)
    return u * ratio + T.max(-x, T.float32(0))


def slope(x: Any, y: Any, u: Any, p: Any) -> Any:
    """(1 - y) s(x) - p y s(-x), with both logistic functions from one exponential and one quotient; no p is 1."""
    near = one() / (one() + u)  # s(|x|); u * near is s(-|x|)
    below = x < T.float32(0)
    positive = y * T.Select(below, near, u * near)
    if p is not None:
        positive = p * positive
    return (one() - y) * T.Select(below, u * near, near) - positive


def forward(
    *, dtype: str, loss_dtype: str, flat: bool, vec: int, threads: int, depth: int, reduce: bool, keep: bool,
    logits_layout: str,
    targets_layout: str, weight_layout: str | None, weight_dtype: str, pos_weight_layout: str | None,
    pos_weight_dtype: str,
) -> Any:  # fmt: skip
    """The loss of each element; `reduce`: the sum of every `programs`-th tile, one number a block; `keep`: in `unit`
    the gradient for an upstream of 1, over `divisor`."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def bce_forward(
        logits: T.Tensor((n,), dtype), targets: T.Tensor((n,), dtype), weight: T.Tensor((n,), weight_dtype),
        pos_weight: T.Tensor((n,), pos_weight_dtype), loss: T.Tensor((n,), loss_dtype), partials: T.Tensor((n,), F32),
        unit: T.Tensor((n,), F32),
        logits_inner: T.int64, logits_outer: T.int64, logits_stride: T.int64, logits_step: T.int64,
        targets_inner: T.int64, targets_outer: T.int64, targets_stride: T.int64, targets_step: T.int64,
        weight_inner: T.int64, weight_outer: T.int64, weight_stride: T.int64, weight_step: T.int64,
        pos_weight_inner: T.int64, pos_weight_outer: T.int64, pos_weight_stride: T.int64, pos_weight_step: T.int64,
        row_vectors: T.int64, tiles: T.int64, programs: T.int32, divisor: T.float32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            xs = tile(vec, threads, depth, dtype)
            ys = tile(vec, threads, depth, dtype)
            if weight_layout is not None:
                ws = tile(vec, threads, depth, weight_dtype)
            if pos_weight_layout is not None:
                ps = tile(vec, threads, depth, pos_weight_dtype)
            if reduce:
                sums = tile(vec, threads, depth)
                T.clear(sums)
            else:
                found = tile(vec, threads, depth, loss_dtype)
            if keep:
                units = tile(vec, threads, depth)
                upstream = T.ieee_fdiv(one(), divisor)
            for turn in T.serial(T.ceildiv(tiles - block, T.Cast("int64", programs))):
                row, first = place_of(turn * programs + block, row_vectors, chunk, flat)
                load_tile(xs, logits, logits_layout, vec, row, first, row_vectors,
                          (logits_inner, logits_outer, logits_stride, logits_step))  # fmt: skip
                load_tile(ys, targets, targets_layout, vec, row, first, row_vectors,
                          (targets_inner, targets_outer, targets_stride, targets_step))  # fmt: skip
                if weight_layout is not None:
                    load_tile(ws, weight, weight_layout, vec, row, first, row_vectors,
                              (weight_inner, weight_outer, weight_stride, weight_step))  # fmt: skip
                if pos_weight_layout is not None:
                    load_tile(ps, pos_weight, pos_weight_layout, vec, row, first, row_vectors,
                              (pos_weight_inner, pos_weight_outer, pos_weight_stride, pos_weight_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    tail = T.exp(-T.abs(f32(xs[j])))
                    value = softplus(f32(xs[j]), tail)
                    if pos_weight_layout is not None:
                        value = value * (one() + (f32(ps[j]) - one()) * f32(ys[j]))
                    value = value + (one() - f32(ys[j])) * f32(xs[j])
                    if weight_layout is not None:
                        value = value * f32(ws[j])
                    if reduce:
                        if first + j // vec < row_vectors:
                            sums[j] += value
                    else:
                        found[j] = T.Cast(loss_dtype, value)
                    if keep:
                        p = f32(ps[j]) if pos_weight_layout is not None else None
                        factor = upstream * f32(ws[j]) if weight_layout is not None else upstream
                        units[j] = factor * slope(f32(xs[j]), f32(ys[j]), tail, p)
                if not reduce:
                    store_tile(loss, found, vec, row, first, row_vectors)
                if keep:
                    store_tile(unit, units, vec, row, first, row_vectors)
            if reduce:
                whole = T.alloc_fragment((1,), F32)
                T.reduce_sum(sums, whole, dim=0)
                partials[block] = whole[0]

    return bce_forward


def total(*, dtype: str, threads: int) -> Any:
    """One number from those of all blocks, divided and rounded once."""
    n = T.dynamic("n", "int64")

    @T.prim_func
    def bce_total(
        partials: T.Tensor((n,), F32), loss: T.Tensor((n,), dtype), groups: T.int32, divisor: T.float32,
    ):  # fmt: skip
        with T.Kernel(1, threads=threads) as _:
            sums = tile(1, threads, 1)
            whole = T.alloc_fragment((1,), F32)
            T.clear(sums)
            for turn in T.serial(T.ceildiv(groups, threads)):
                for j in T.Parallel(threads):
                    if turn * threads + j < groups:
                        sums[j] += partials[turn * threads + j]
            T.reduce_sum(sums, whole, dim=0)
            loss[0] = T.Cast(dtype, whole[0] / divisor)

    return bce_total


def backward(
    *, dtype: str, dy_dtype: str, flat: bool, vec: int, threads: int, depth: int, dy_layout: str | None,
    logits_layout: str, targets_layout: str, weight_layout: str | None, weight_dtype: str,
    pos_weight_layout: str | None, pos_weight_dtype: str,
) -> Any:  # fmt: skip
    """dlogits = d w ((1 - y) s(x) - p y s(-x)). Without a layout of dy, d is one number over `divisor`."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def bce_backward(
        dy: T.Tensor((n,), dy_dtype), logits: T.Tensor((n,), dtype), targets: T.Tensor((n,), dtype),
        weight: T.Tensor((n,), weight_dtype), pos_weight: T.Tensor((n,), pos_weight_dtype),
        dlogits: T.Tensor((n,), dtype),
        dy_inner: T.int64, dy_outer: T.int64, dy_stride: T.int64, dy_step: T.int64,
        logits_inner: T.int64, logits_outer: T.int64, logits_stride: T.int64, logits_step: T.int64,
        targets_inner: T.int64, targets_outer: T.int64, targets_stride: T.int64, targets_step: T.int64,
        weight_inner: T.int64, weight_outer: T.int64, weight_stride: T.int64, weight_step: T.int64,
        pos_weight_inner: T.int64, pos_weight_outer: T.int64, pos_weight_stride: T.int64, pos_weight_step: T.int64,
        row_vectors: T.int64, programs: T.int32, divisor: T.float32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            row, first = place_of(T.Cast("int64", block), row_vectors, chunk, flat)
            if dy_layout is None:
                upstream = T.ieee_fdiv(f32(dy[0]), divisor)
            xs = tile(vec, threads, depth, dtype)
            ys = tile(vec, threads, depth, dtype)
            load_tile(xs, logits, logits_layout, vec, row, first, row_vectors,
                      (logits_inner, logits_outer, logits_stride, logits_step))  # fmt: skip
            load_tile(ys, targets, targets_layout, vec, row, first, row_vectors,
                      (targets_inner, targets_outer, targets_stride, targets_step))  # fmt: skip
            if dy_layout is not None:
                ds = tile(vec, threads, depth, dy_dtype)
                load_tile(ds, dy, dy_layout, vec, row, first, row_vectors, (dy_inner, dy_outer, dy_stride, dy_step))
            if weight_layout is not None:
                ws = tile(vec, threads, depth, weight_dtype)
                load_tile(ws, weight, weight_layout, vec, row, first, row_vectors,
                          (weight_inner, weight_outer, weight_stride, weight_step))  # fmt: skip
            if pos_weight_layout is not None:
                ps = tile(vec, threads, depth, pos_weight_dtype)
                load_tile(ps, pos_weight, pos_weight_layout, vec, row, first, row_vectors,
                          (pos_weight_inner, pos_weight_outer, pos_weight_stride, pos_weight_step))  # fmt: skip
            for j in T.Parallel(vec * chunk):
                tail = T.exp(-T.abs(f32(xs[j])))
                p = f32(ps[j]) if pos_weight_layout is not None else None
                factor = upstream if dy_layout is None else f32(ds[j])
                if weight_layout is not None:
                    factor = factor * f32(ws[j])
                xs[j] = T.Cast(dtype, factor * slope(f32(xs[j]), f32(ys[j]), tail, p))
            store_tile(dlogits, xs, vec, row, first, row_vectors)

    return bce_backward


def scale(*, dy_dtype: str, in_place: bool, vec: int, threads: int, depth: int, unit_layout: str) -> Any:
    """dlogits = dy * unit, both dense. `in_place`: they are one tensor, which stays as it is where dy is 1."""
    n = T.dynamic("n", "int64")
    chunk = threads * depth

    @T.prim_func
    def bce_scale(
        dy: T.Tensor((n,), dy_dtype), unit: T.Tensor((n,), F32), dlogits: T.Tensor((n,), F32),
        unit_inner: T.int64, unit_outer: T.int64, unit_stride: T.int64, unit_step: T.int64,
        row_vectors: T.int64, tiles: T.int64, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            d = f32(dy[0])
            turns = T.ceildiv(tiles - block, T.Cast("int64", programs))
            if in_place:
                turns = T.Select(d == one(), T.int64(0), turns)
            values = tile(vec, threads, depth)
            for turn in T.serial(turns):
                first = (turn * programs + block) * chunk
                load_tile(values, unit, unit_layout, vec, T.int64(0), first, row_vectors,
                          (unit_inner, unit_outer, unit_stride, unit_step))  # fmt: skip
                for j in T.Parallel(vec * chunk):
                    values[j] = d * values[j]
                store_tile(dlogits, values, vec, T.int64(0), first, row_vectors)

    return bce_scale
