"""Device code of silu_attention and hstu_attention in TileLang: one tile of queries of one head a block.

Only `tilelang.py` beside this file calls these, when a launch is compiled. A block walks every key that some row of its
tile may see; what a row does not see is selected away. Keys and values past the end are 0 in shared memory, whatever
lies there. Loads, packed sequences and dropout are those of attention. float32 is multiplied without tensor cores,
which would round to TF32. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import activation
from tilewright.ops.attention.tilelang_programs import I64, U32, draw, find_sequence, i32, i64, load_rows
from tilewright.ops.tilelang_rows import F32


def position(i: Any, shared: Any, last: Any) -> Any:
    return T.min(T.max(i - shared, 0), last)


@T.macro
def find_spans(lowest, highest, first, there, behind, bounds, causal, context, windowed):
    """[lowest[i], highest[i]) of the keys that row `first` + i sees beside itself: `masks.spans`."""
    for i in T.Parallel(lowest.shape[0]):
        lowest[i] = 0
        highest[i] = there
        if windowed:
            if (bounds[2] <= 0) | (position(first + i, bounds[0], behind - bounds[0]) < behind - bounds[0] - bounds[2]):
                lowest[i] = T.max(position(first + i, bounds[0], behind - bounds[0]) - bounds[1], 0)
                highest[i] = position(first + i, bounds[0], behind - bounds[0]) + bounds[1] + 1 + bounds[0]
                if lowest[i] > 0:
                    lowest[i] = lowest[i] + bounds[0]
                if highest[i] > behind:  # targets are as near as the last of the history
                    highest[i] = there
        if causal:
            highest[i] = first + i + 1
            if first + i <= bounds[0]:
                if position(first + i, bounds[0], behind - bounds[0]) <= 0:
                    highest[i] = 0
        if first + i >= behind:
            highest[i] = T.min(highest[i], behind)
        if context:
            if first + i <= bounds[0]:
                highest[i] = T.max(highest[i], behind)
        if behind <= bounds[0]:  # no history: everyone sees itself
            highest[i] = 0


def room(largest: Any) -> Any:
    """The power of two that brings `largest` to 2^13, as far as one can: float16 ends at 2^16."""
    exponent = T.min(T.max(T.shift_right(T.reinterpret("int32", largest), 23), 20), 254)
    return T.reinterpret(F32, T.shift_left(267 - exponent, 23))


def inverse(power: Any) -> Any:
    """1 / a power of two, without rounding."""
    return T.reinterpret(F32, T.int32(0x7F000000) - T.reinterpret("int32", power))


def forward(
    *, dtype: str, starts_dtype: str, targets_dtype: str, mask_dtype: str, m: int, n: int, d: int, dv: int,
    threads: int, unit: int, packed: bool, targeted: bool, scaled: bool, has_mask: bool, causal: bool, context: bool,
    windowed: bool, drops: bool, lifts: bool, started: bool, saving: bool,
) -> Any:  # fmt: skip
    """o, and a copy of seed and offset where they are saved."""
    size = T.dynamic("size", "int64")
    simple = dtype == F32

    @T.prim_func
    def hstu_forward(
        q: T.Tensor((size,), dtype), k: T.Tensor((size,), dtype), v: T.Tensor((size,), dtype),
        seq_offsets: T.Tensor((size,), starts_dtype), num_targets: T.Tensor((size,), targets_dtype),
        attn_scale: T.Tensor((size,), F32), mask: T.Tensor((size,), mask_dtype), seed: T.Tensor((size,), I64),
        offset: T.Tensor((size,), I64), o: T.Tensor((size,), dtype), state: T.Tensor((size,), I64),
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
            first, length, there, behind = (
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
            )  # fmt: skip
            start, end, at = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            q_start, k_start, v_start, mask_start, number = (
                T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64),
            )  # fmt: skip
            q_tile = T.alloc_shared((m, d), dtype)
            k_tile = T.alloc_shared((n, d), dtype)
            v_tile = T.alloc_shared((n, dv), dtype)
            scores = T.alloc_fragment((m, n), F32)
            total = T.alloc_fragment((m, dv), F32)
            weights = T.alloc_shared((m, n), F32) if simple else T.alloc_fragment((m, n), dtype)
            if drops:
                kept = T.alloc_shared((m, n), "uint8")
                c0, c1 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
                c2, c3 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
            if has_mask:
                flags, some = T.alloc_fragment((m, n), F32), T.alloc_fragment((n,), F32)
                seen_by_one = T.alloc_shared((n,), F32)
            if lifts:
                power, before, largest = (
                    T.alloc_fragment((m,), F32), T.alloc_fragment((m,), F32), T.alloc_fragment((m,), F32),
                )  # fmt: skip
                T.fill(power, T.float32(2.0**120))

            # Tiles of one head follow each other; the last ones, which see the most, go first.
            slot = tiles - 1 - T.truncmod(program, tiles)
            pair = T.truncdiv(program, tiles)
            batch = i64(T.truncdiv(pair, heads))
            head = i64(T.truncmod(pair, heads))
            token = T.int64(0)
            if packed:
                ends = T.alloc_local((3,), "int32")
                find_sequence(ends, slot, seq_offsets, (count, turns), m)
                low = ends[0]
                token = i64(seq_offsets[low])
                first = (slot - i32(T.truncdiv(token, T.int64(m))) - low) * m
                length = i32(rows - token)
                there = 0
                if low < count:
                    length = i32(i64(seq_offsets[low + 1]) - token)
                    there = length
                behind = there
                if targeted:
                    if low < count:
                        behind = there - i32(num_targets[low])
            else:
                first = slot * m
                length = i32(rows)
                there = i32(keys)
                behind = there

            # Keys [start, end) are all that some row of the tile may see.
            start = 0
            end = there
            if packed:
                if causal:
                    end = T.min(first + m, there)
                    if context:
                        if first <= shared:
                            end = there
                if windowed and causal:
                    at = T.min(first + m, length) - 1
                    if (tail <= 0) | (position(at, shared, behind - shared) < behind - shared - tail):
                        at = position(first, shared, behind - shared)
                        if at > window:
                            start = T.truncdiv(at - window + shared, n) * n
            if first >= length:  # a slot that no tile has
                end = start
            q_start = batch * q_batch + token * q_row + head * q_head
            k_start = batch * k_batch + token * k_row + head * k_head
            v_start = batch * v_batch + token * v_row + head * v_head
            mask_start = batch * mask_batch + head * mask_head
            number = head * rows + token  # of the first row of dropout

            if packed:
                lowest, highest = T.alloc_shared((m,), "int32"), T.alloc_shared((m,), "int32")
                find_spans(lowest, highest, first, there, behind, (shared, window, tail), causal, context, windowed)
            load_rows(q_tile, q, (q_start, q_row), first, (length, vectors), unit)
            T.clear(total)
            for step in T.serial(T.truncdiv(T.max(end - start, 0) + (n - 1), n)):
                at = start + step * n
                load_rows(k_tile, k, (k_start, k_row), at, (there, vectors), unit)
                load_rows(v_tile, v, (v_start, v_row), at, (there, v_vectors), unit)
                T.clear(scores)
                if simple:
                    for i, j in T.Parallel(m, n):
                        for s in T.serial(d):
                            scores[i, j] += q_tile[i, s] * k_tile[j, s]
                else:
                    T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(m, n):
                    scores[i, j] = activation("silu", scores[i, j] * alpha)
                if packed:
                    for i, j in T.Parallel(m, n):
                        if (at + j < lowest[i]) | (at + j >= highest[i]) | (at + j >= there) | (first + i >= length):
                            if (at + j != first + i) | (at + j >= there):
                                scores[i, j] = T.float32(0)
                elif has_mask:
                    for i, j in T.Parallel(m, n):
                        flags[i, j] = T.float32(0)
                        if (first + i < length) & (at + j < there):
                            flags[i, j] = T.Cast(
                                F32, mask[mask_start + i64(first + i) * mask_row + i64(at + j) * mask_step]
                            )
                    for i, j in T.Parallel(m, n):
                        scores[i, j] = T.Select(flags[i, j] == T.float32(0), T.float32(0), scores[i, j] * flags[i, j])
                        flags[i, j] = T.Select(flags[i, j] == T.float32(0), T.float32(0), T.float32(1))
                    T.reduce_max(flags, some, dim=0)
                    T.copy(some, seen_by_one)
                    for j, c in T.Parallel(n, dv):  # what nobody sees may hold anything
                        if seen_by_one[j] == T.float32(0):
                            v_tile[j, c] = T.Cast(dtype, T.float32(0))
                else:
                    for i, j in T.Parallel(m, n):
                        if (first + i >= length) | (at + j >= there):
                            scores[i, j] = T.float32(0)
                if drops:
                    start_ = offset[0] if started else T.int64(0)
                    draw(kept, c0, c1, c2, c3, (seed[0], start_, limit), number + i64(first), at)
                    for i, j in T.Parallel(m, n):
                        if kept[i, j] == T.uint8(0):
                            scores[i, j] = T.float32(0)
                if lifts:  # float16 holds each row best where its largest weight is about 2^13
                    T.copy(power, before)
                    T.reduce_absmax(scores, largest, dim=1)
                    for i in T.Parallel(m):
                        power[i] = T.min(power[i], room(largest[i]))
                    for i in T.Parallel(m):
                        before[i] = power[i] * inverse(before[i])
                    for i, c in T.Parallel(m, dv):
                        total[i, c] *= before[i]
                    for i, j in T.Parallel(m, n):
                        scores[i, j] *= power[i]
                for i, j in T.Parallel(m, n):
                    weights[i, j] = T.Cast(F32 if simple else dtype, scores[i, j])
                if simple:
                    for i, c in T.Parallel(m, dv):
                        for s in T.serial(n):
                            total[i, c] += weights[i, s] * v_tile[s, c]
                else:
                    T.gemm(weights, v_tile, total, policy=T.GemmWarpPolicy.FullRow)
            if lifts:
                for i, c in T.Parallel(m, dv):
                    total[i, c] *= inverse(power[i])
            for i, c in T.Parallel(m, dv):
                if (first + i < length) & (c // unit < v_vectors):
                    o[(((batch * rows + token + i64(first + i)) * heads + head) * v_vectors) * unit + c] = T.Cast(
                        dtype,
                        total[i, c]
                        * (kept_scale * (attn_scale[(token + i64(first + i)) * factor_step] if scaled else post)),
                    )
            if saving:
                if program == 0:
                    for i in T.Parallel(2):
                        if i == 0:
                            state[0] = seed[0]
                        else:
                            state[1] = offset[0] if started else T.int64(0)

    return hstu_forward
