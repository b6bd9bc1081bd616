"""Device code of the family's gradients in TileLang where a block has a tile of keys of one head: dk and dv.

A block walks the queries that see some of its keys, and works on Xᵀ, so that Pᵀ and dXᵀ are left operands as they come
out of a product. What a query does not see is selected away. Rows, masks and products are those of `tilelang_programs`.
(No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import activation, slope
from tilewright.ops.attention.tilelang_programs import I64, U32, draw, find_sequence, i32, i64, load_rows
from tilewright.ops.hstu.tilelang_programs import add_product, find_spans, lift, load_upstream, lower, multiply
from tilewright.ops.tilelang_rows import F32


def keys(
    *, dtype: str, starts_dtype: str, targets_dtype: str, mask_dtype: str, m: int, n: int, d: int, dv: int,
    threads: int, unit: int, packed: bool, targeted: bool, scaled: bool, has_mask: bool, causal: bool, context: bool,
    windowed: bool, drops: bool, lifts: bool, stepped: bool, gives_k: bool, gives_v: bool,
) -> Any:  # fmt: skip
    """dk, dv or both of n keys."""
    size = T.dynamic("size", "int64")
    simple = dtype == F32

    @T.prim_func
    def hstu_keys(
        grad: T.Tensor((size,), dtype), q: T.Tensor((size,), dtype), k: T.Tensor((size,), dtype),
        v: T.Tensor((size,), dtype), seq_offsets: T.Tensor((size,), starts_dtype),
        num_targets: T.Tensor((size,), targets_dtype), attn_scale: T.Tensor((size,), F32),
        mask: T.Tensor((size,), mask_dtype), state: T.Tensor((size,), I64),
        dk_out: T.Tensor((size,), dtype), dv_out: T.Tensor((size,), dtype),
        do_batch: T.int64, do_row: T.int64, do_head: T.int64, do_step: T.int64,
        q_batch: T.int64, q_row: T.int64, q_head: T.int64, k_batch: T.int64, k_row: T.int64, k_head: T.int64,
        v_batch: T.int64, v_row: T.int64, v_head: T.int64,
        mask_batch: T.int64, mask_head: T.int64, mask_row: T.int64, mask_step: T.int64, factor_step: T.int64,
        count: T.int32, rows: T.int64, keys: T.int64, tiles: T.int32, heads: T.int32, shared: T.int32,
        window: T.int32, tail: T.int32, alpha: T.float32, post: T.float32, limit: T.int64, kept_scale: T.float32,
        turns: T.int32, vectors: T.int32, v_vectors: T.int32, programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as program:
            slot, pair, low = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            batch, head, token = T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64)
            first, there, behind, end = (
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
            )  # fmt: skip
            stop, front, near, some, again, at, upto = (
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
            )  # fmt: skip
            second, third, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            q_start, k_start, v_start, do_start, mask_start, number = (
                T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64),
                T.alloc_var(I64),
            )  # fmt: skip
            k_tile = T.alloc_shared((n, d), dtype)
            q_tile = T.alloc_shared((m, d), dtype)
            do_tile = T.alloc_shared((m, dv), dtype)
            scores = T.alloc_fragment((n, m), F32)
            weights = T.alloc_shared((n, m), F32) if simple else T.alloc_fragment((n, m), dtype)
            if gives_k:
                v_tile = T.alloc_shared((n, dv), dtype)
                inner = T.alloc_fragment((n, m), F32)
                dk_total = T.alloc_fragment((n, d), F32)
                T.clear(dk_total)
            if gives_v:
                dv_total = T.alloc_fragment((n, dv), F32)
                T.clear(dv_total)
            if drops:
                kept = T.alloc_shared((m, n), "uint8")
                c0, c1 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
                c2, c3 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
            if has_mask:
                flags, used = T.alloc_fragment((n, m), F32), T.alloc_shared((m,), "int32")
            if scaled:
                factors = T.alloc_shared((m,), F32)
            if lifts:
                before, largest = T.alloc_fragment((n,), F32), T.alloc_fragment((n,), F32)
                if gives_k:  # nothing tells the layout of a fragment that only one of both would use
                    k_power = T.alloc_fragment((n,), F32)
                    T.fill(k_power, T.float32(2.0**120))
                if gives_v:
                    v_power = T.alloc_fragment((n,), F32)
                    T.fill(v_power, T.float32(2.0**120))

            # Tiles of one head follow each other; the first ones, which most see, go first.
            slot = T.truncmod(program, tiles)
            pair = T.truncdiv(program, tiles)
            batch = i64(T.truncdiv(pair, heads))
            head = i64(T.truncmod(pair, heads))
            token = T.int64(0)
            if packed:
                ends = T.alloc_local((3,), "int32")
                find_sequence(ends, slot, seq_offsets, (count, turns), n)
                low = ends[0]
                token = i64(seq_offsets[low])
                first = (slot - i32(T.truncdiv(token, T.int64(n))) - low) * n
                there = i32(keys - token)
                end = 0
                if low < count:
                    there = i32(i64(seq_offsets[low + 1]) - token)
                    end = there
                behind = there
                if targeted:
                    if low < count:
                        behind = there - i32(num_targets[low])
            else:
                first = slot * n
                there = i32(keys)
                end = i32(rows)
                behind = there

            # The queries that see some of the keys: [0, front) of the context, [near, some), [again, end).
            front = 0
            near = 0
            some = end
            again = end
            if packed:
                stop = T.min(first + n, there)
                if causal:
                    near = first
                    if context:
                        front = T.min(shared + 1, first)
                    if windowed:
                        if behind - window > T.max(shared, stop - 1):
                            some = T.max(T.min(T.max(shared, stop - 1) + window + 1, behind), stop)
                            if tail > 0:
                                again = T.min(T.max(some, T.max(behind - shared - tail, 0) + shared), end)
                    if first >= behind:  # targets are seen by themselves alone
                        front = 0
                        some = stop
                        again = end
                if behind <= shared:  # and so is everyone without a history
                    front = 0
                    near = first
                    some = stop
                    again = end
            if (first >= there) | (end <= 0):  # a slot that no tile has, or what lies behind the last sequence
                front = 0
                near = 0
                some = 0
                again = end
            second = T.truncdiv(front + (m - 1), m)
            third = second + T.truncdiv(some - near + (m - 1), m)
            last = third + T.truncdiv(end - again + (m - 1), m)

            q_start = batch * q_batch + token * q_row + head * q_head
            k_start = batch * k_batch + token * k_row + head * k_head
            v_start = batch * v_batch + token * v_row + head * v_head
            do_start = batch * do_batch + token * do_row + head * do_head
            mask_start = batch * mask_batch + head * mask_head
            number = head * rows + token  # of the first row of dropout
            if packed:
                lowest, highest = T.alloc_shared((m,), "int32"), T.alloc_shared((m,), "int32")
            load_rows(k_tile, k, (k_start, k_row), first, (there, vectors), unit)
            if gives_k:
                load_rows(v_tile, v, (v_start, v_row), first, (there, v_vectors), unit)
            for step in T.serial(last):
                at = step * m
                upto = front
                if step >= second:
                    at = near + (step - second) * m
                    upto = some
                if step >= third:
                    at = again + (step - third) * m
                    upto = end
                load_rows(q_tile, q, (q_start, q_row), at, (upto, vectors), unit)
                load_upstream(do_tile, grad, (do_start, do_row, do_step), at, (upto, v_vectors), unit, stepped)
                if has_mask:
                    T.clear(used)
                    for i, j in T.Parallel(n, m):
                        flags[i, j] = T.float32(0)
                        if (first + i < there) & (at + j < upto):
                            flags[i, j] = T.Cast(
                                F32, mask[mask_start + i64(at + j) * mask_row + i64(first + i) * mask_step]
                            )
                    for i, j in T.Parallel(n, m):
                        if flags[i, j] != T.float32(0):
                            used[j] = 1
                    for j, c in T.Parallel(m, d):  # what sees nothing may hold anything
                        if used[j] == 0:
                            q_tile[j, c] = T.Cast(dtype, T.float32(0))
                    for j, c in T.Parallel(m, dv):
                        if used[j] == 0:
                            do_tile[j, c] = T.Cast(dtype, T.float32(0))
                multiply(scores, k_tile, q_tile, simple)
                if gives_k:
                    multiply(inner, v_tile, do_tile, simple)
                    for i, j in T.Parallel(n, m):
                        inner[i, j] = inner[i, j] * slope("silu", scores[i, j] * alpha)
                for i, j in T.Parallel(n, m):
                    scores[i, j] = activation("silu", scores[i, j] * alpha)
                if scaled:
                    for j in T.Parallel(m):
                        factors[j] = T.float32(0)
                        if at + j < upto:
                            factors[j] = attn_scale[(token + i64(at + j)) * factor_step]
                    for i, j in T.Parallel(n, m):
                        scores[i, j] *= factors[j]
                        if gives_k:
                            inner[i, j] *= factors[j]
                if packed:
                    find_spans(lowest, highest, (at, there, behind), (shared, window, tail), causal, context, windowed)
                    for i, j in T.Parallel(n, m):
                        if (
                            (first + i < lowest[j])
                            | (first + i >= highest[j])
                            | (first + i >= there)
                            | (at + j >= upto)
                        ):
                            if (first + i != at + j) | (at + j >= upto):
                                scores[i, j] = T.float32(0)
                                if gives_k:
                                    inner[i, j] = T.float32(0)
                elif has_mask:
                    for i, j in T.Parallel(n, m):
                        scores[i, j] = T.Select(flags[i, j] == T.float32(0), T.float32(0), scores[i, j] * flags[i, j])
                        if gives_k:
                            inner[i, j] = T.Select(flags[i, j] == T.float32(0), T.float32(0), inner[i, j] * flags[i, j])
                else:
                    for i, j in T.Parallel(n, m):
                        if (first + i >= there) | (at + j >= upto):
                            scores[i, j] = T.float32(0)
                            if gives_k:
                                inner[i, j] = T.float32(0)
                if drops:
                    draw(kept, c0, c1, c2, c3, (state[0], state[1], limit), number + i64(at), first)
                    for i, j in T.Parallel(n, m):
                        if kept[j, i] == T.uint8(0):
                            scores[i, j] = T.float32(0)
                            if gives_k:
                                inner[i, j] = T.float32(0)
                if gives_v:
                    if lifts:
                        lift(dv_total, scores, v_power, before, largest)
                    add_product(dv_total, weights, scores, do_tile, simple)
                if gives_k:
                    if lifts:
                        lift(dk_total, inner, k_power, before, largest)
                    add_product(dk_total, weights, inner, q_tile, simple)

            if gives_k:
                if lifts:
                    lower(dk_total, k_power)
                for i, c in T.Parallel(n, d):
                    if (first + i < there) & (c // unit < vectors):
                        dk_out[(((batch * keys + token + i64(first + i)) * heads + head) * vectors) * unit + c] = (
                            T.Cast(dtype, dk_total[i, c] * (kept_scale if scaled else kept_scale * post) * alpha)
                        )
            if gives_v:
                if lifts:
                    lower(dv_total, v_power)
                for i, c in T.Parallel(n, dv):
                    if (first + i < there) & (c // unit < v_vectors):
                        dv_out[(((batch * keys + token + i64(first + i)) * heads + head) * v_vectors) * unit + c] = (
                            T.Cast(dtype, dv_total[i, c] * (kept_scale if scaled else kept_scale * post))
                        )

    return hstu_keys
