"""Device code of the family in TileLang where a block has a tile of queries of one head: o, and dq. What owns keys is
in `tilelang_gradients`.

Only `tilelang.py` beside this file calls these, when a launch is compiled. A block walks every key that some row of its
tile may see; what a row does not see is selected away. Keys and values past the end are 0 in shared memory, whatever
lies there. Loads, packed sequences and dropout are those of attention. float32 is multiplied without tensor cores,
which would round to TF32. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.activation.tilelang_programs import activation, slope
from tilewright.ops.attention.tilelang_programs import I64, U32, draw, find_sequence, i32, i64, load_rows
from tilewright.ops.tilelang_rows import F32


def position(i: Any, shared: Any, last: Any) -> Any:
    return T.min(T.max(i - shared, 0), last)


@T.macro
def find_spans(lowest, highest, place, bounds, causal, context, windowed):
    """[lowest[i], highest[i]) of the keys that row place[0] + i sees beside itself: `masks.spans`. place[1]: tokens,
    place[2]: where targets begin; `bounds`: shared, window, tail."""
    for i in T.Parallel(lowest.shape[0]):
        lowest[i] = 0
        highest[i] = place[1]
        if windowed:
            if (bounds[2] <= 0) | (
                position(place[0] + i, bounds[0], place[2] - bounds[0]) < place[2] - bounds[0] - bounds[2]
            ):
                lowest[i] = T.max(position(place[0] + i, bounds[0], place[2] - bounds[0]) - bounds[1], 0)
                highest[i] = position(place[0] + i, bounds[0], place[2] - bounds[0]) + bounds[1] + 1 + bounds[0]
                if lowest[i] > 0:
                    lowest[i] = lowest[i] + bounds[0]
                if highest[i] > place[2]:  # targets are as near as the last of the history
                    highest[i] = place[1]
        if causal:
            highest[i] = place[0] + i + 1
            if place[0] + i <= bounds[0]:
                if position(place[0] + i, bounds[0], place[2] - bounds[0]) <= 0:
                    highest[i] = 0
        if place[0] + i >= place[2]:
            highest[i] = T.min(highest[i], place[2])
        if context:
            if place[0] + i <= bounds[0]:
                highest[i] = T.max(highest[i], place[2])
        if place[2] <= bounds[0]:  # no history: everyone sees itself
            highest[i] = 0


@T.macro
def load_upstream(to, source, place, first, sizes, vec, stepped):
    """The rows of a gradient, as `load_rows` has them; `stepped`: its columns are place[2] elements apart, and so are
    all numbers in elements."""
    if stepped:
        T.clear(to)
        for i, c in T.Parallel(*to.shape):
            if (first + i < sizes[0]) & (c < sizes[1] * vec):
                to[i, c] = source[place[0] + i64(first + i) * place[1] + i64(c) * place[2]]
    else:
        load_rows(to, source, (place[0], place[1]), first, sizes, vec)


def room(largest: Any) -> Any:
    """The power of two that brings `largest` to 2^13, as far as one can: float16 ends at 2^16."""
    exponent = T.min(T.max(T.shift_right(T.reinterpret("int32", largest), 23), 20), 254)
    return T.reinterpret(F32, T.shift_left(267 - exponent, 23))


def inverse(power: Any) -> Any:
    """1 / a power of two, without rounding."""
    return T.reinterpret(F32, T.int32(0x7F000000) - T.reinterpret("int32", power))


@T.macro
def multiply(to, a, b, simple):
    """a bᵀ."""
    T.clear(to)
    if simple:
        for i, j in T.Parallel(*to.shape):
            for s in T.serial(a.shape[1]):
                to[i, j] += a[i, s] * b[j, s]
    else:
        T.gemm(a, b, to, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def add_product(total, weights, terms, values, simple):
    """total + terms values. `weights`: room for the terms in the dtype of `values`."""
    for i, j in T.Parallel(*terms.shape):
        weights[i, j] = T.Cast(weights.dtype, terms[i, j])
    if simple:
        for i, c in T.Parallel(*total.shape):
            for s in T.serial(weights.shape[1]):
                total[i, c] += weights[i, s] * values[s, c]
    else:
        T.gemm(weights, values, total, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def lift(total, terms, power, before, largest):
    """Lift rows of terms, and the total with them, to where float16 holds each best: its largest about 2^13."""
    T.copy(power, before)
    T.reduce_absmax(terms, largest, dim=1)
    for i in T.Parallel(power.shape[0]):
        power[i] = T.min(power[i], room(largest[i]))
    for i in T.Parallel(power.shape[0]):
        before[i] = power[i] * inverse(before[i])
    for i, c in T.Parallel(*total.shape):
        total[i, c] *= before[i]
    for i, j in T.Parallel(*terms.shape):
        terms[i, j] *= power[i]


@T.macro
def lower(total, power):
    for i, c in T.Parallel(*total.shape):
        total[i, c] *= inverse(power[i])


def queries(
    *, dtype: str, starts_dtype: str, targets_dtype: str, mask_dtype: str, m: int, n: int, d: int, dv: int,
    threads: int, unit: int, packed: bool, targeted: bool, scaled: bool, has_mask: bool, causal: bool, context: bool,
    windowed: bool, drops: bool, lifts: bool, started: bool, saving: bool, gradient: bool, stepped: bool,
) -> Any:  # fmt: skip
    """o, and a copy of seed and offset where they are saved; `gradient`: dq instead."""
    size = T.dynamic("size", "int64")
    simple = dtype == F32
    wide = d if gradient else dv

    @T.prim_func
    def hstu_queries(
        grad: T.Tensor((size,), dtype), q: T.Tensor((size,), dtype), k: T.Tensor((size,), dtype),
        v: T.Tensor((size,), dtype), seq_offsets: T.Tensor((size,), starts_dtype),
        num_targets: T.Tensor((size,), targets_dtype), attn_scale: T.Tensor((size,), F32),
        mask: T.Tensor((size,), mask_dtype), seed: T.Tensor((size,), I64), offset: T.Tensor((size,), I64),
        out: T.Tensor((size,), dtype), state: T.Tensor((size,), I64),
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
            first, length, there, behind = (
                T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32"),
            )  # fmt: skip
            start, end, at = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            q_start, k_start, v_start, do_start, mask_start, number = (
                T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64), T.alloc_var(I64),
                T.alloc_var(I64),
            )  # fmt: skip
            q_tile = T.alloc_shared((m, d), dtype)
            k_tile = T.alloc_shared((n, d), dtype)
            v_tile = T.alloc_shared((n, dv), dtype)
            scores = T.alloc_fragment((m, n), F32)
            total = T.alloc_fragment((m, wide), F32)
            weights = T.alloc_shared((m, n), F32) if simple else T.alloc_fragment((m, n), dtype)
            if gradient:
                do_tile = T.alloc_shared((m, dv), dtype)
                inner = T.alloc_fragment((m, n), F32)
            if drops:
                kept = T.alloc_shared((m, n), "uint8")
                c0, c1 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
                c2, c3 = T.alloc_fragment((m, n // 4), U32), T.alloc_fragment((m, n // 4), U32)
            if has_mask:
                flags, used = T.alloc_fragment((m, n), F32), T.alloc_shared((n,), "int32")
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
            do_start = batch * do_batch + token * do_row + head * do_head
            mask_start = batch * mask_batch + head * mask_head
            number = head * rows + token  # of the first row of dropout

            if packed:
                lowest, highest = T.alloc_shared((m,), "int32"), T.alloc_shared((m,), "int32")
                find_spans(lowest, highest, (first, there, behind), (shared, window, tail), causal, context, windowed)
            load_rows(q_tile, q, (q_start, q_row), first, (length, vectors), unit)
            if gradient:
                load_upstream(do_tile, grad, (do_start, do_row, do_step), first, (length, v_vectors), unit, stepped)
            T.clear(total)
            for step in T.serial(T.truncdiv(T.max(end - start, 0) + (n - 1), n)):
                at = start + step * n
                load_rows(k_tile, k, (k_start, k_row), at, (there, vectors), unit)
                load_rows(v_tile, v, (v_start, v_row), at, (there, v_vectors), unit)
                multiply(scores, q_tile, k_tile, simple)
                if gradient:
                    multiply(inner, do_tile, v_tile, simple)
                    for i, j in T.Parallel(m, n):
                        scores[i, j] = inner[i, j] * slope("silu", scores[i, j] * alpha)
                else:
                    for i, j in T.Parallel(m, n):
                        scores[i, j] = activation("silu", scores[i, j] * alpha)
                if packed:
                    for i, j in T.Parallel(m, n):
                        if (at + j < lowest[i]) | (at + j >= highest[i]) | (at + j >= there) | (first + i >= length):
                            if (at + j != first + i) | (at + j >= there):
                                scores[i, j] = T.float32(0)
                elif has_mask:
                    T.clear(used)
                    for i, j in T.Parallel(m, n):
                        flags[i, j] = T.float32(0)
                        if (first + i < length) & (at + j < there):
                            flags[i, j] = T.Cast(
                                F32, mask[mask_start + i64(first + i) * mask_row + i64(at + j) * mask_step]
                            )
                    for i, j in T.Parallel(m, n):
                        scores[i, j] = T.Select(flags[i, j] == T.float32(0), T.float32(0), scores[i, j] * flags[i, j])
                        if flags[i, j] != T.float32(0):
                            used[j] = 1
                    for j, c in T.Parallel(n, wide):  # what nobody sees may hold anything
                        if used[j] == 0:
                            if gradient:
                                k_tile[j, c] = T.Cast(dtype, T.float32(0))
                            else:
                                v_tile[j, c] = T.Cast(dtype, T.float32(0))
                else:
                    for i, j in T.Parallel(m, n):
                        if (first + i >= length) | (at + j >= there):
                            scores[i, j] = T.float32(0)
                if drops:
                    drawn = state[0] if gradient else seed[0]
                    start_ = state[1] if gradient else offset[0] if started else T.int64(0)
                    draw(kept, c0, c1, c2, c3, (drawn, start_, limit), number + i64(first), at)
                    for i, j in T.Parallel(m, n):
                        if kept[i, j] == T.uint8(0):
                            scores[i, j] = T.float32(0)
                if lifts:
                    lift(total, scores, power, before, largest)
                if gradient:
                    add_product(total, weights, scores, k_tile, simple)
                else:
                    add_product(total, weights, scores, v_tile, simple)
            if lifts:
                lower(total, power)
            for i, c in T.Parallel(m, wide):
                if (first + i < length) & (c // unit < (vectors if gradient else v_vectors)):
                    out[
                        (
                            ((batch * rows + token + i64(first + i)) * heads + head)
                            * (vectors if gradient else v_vectors)
                        )
                        * unit
                        + c
                    ] = T.Cast(
                        dtype,
                        total[i, c]
                        * (kept_scale * (attn_scale[(token + i64(first + i)) * factor_step] if scaled else post))
                        * (alpha if gradient else T.float32(1)),
                    )
            if saving:
                if program == 0:
                    for i in T.Parallel(2):
                        if i == 0:
                            state[0] = seed[0]
                        else:
                            state[1] = offset[0] if started else T.int64(0)

    return hstu_queries
