"""How the Triton gradients of attention walk queries or keys, tile by tile. What is walked and kept is said by
`triton_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.attention.triton_backward_rows import FEWER, LOG2E
from tilewright.ops.attention.triton_tiles import seen_by
from tilewright.ops.triton_scores import kept


@triton.jit
def tile_of(
    at, which, head_step, first, end, row_step, step, MASKED: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[N, D] of the `which`-th head from row `first` on, 0 past `end`. Columns are `step` apart, or side by side."""
    if TMA:
        return tl.reshape(at.load([which, first, 0]), [N, D])
    else:
        lines, columns = tl.arange(0, N), tl.arange(0, D)
        place = at + which * head_step + first * row_step + lines[:, None].to(tl.int64) * row_step
        place += (columns if step is None else columns * step)[None, :]
        if MASKED:
            there = (lines < end - first)[:, None]
            return tl.load(place, mask=there if WIDTH == D else there & (columns < WIDTH)[None, :], other=0.0)
        elif WIDTH == D:
            return tl.load(place)
        else:
            return tl.load(place, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def weights_of(scores, power, factor, dtype: tl.constexpr):
    """P, which is not above 1, whatever large scores and their lse were rounded to. fp16's units come last, since large
    scores would round them away. NaN stays.
    In float32, what is subtracted is not scaled first: of large scores the rounding of a scale would show."""
    exponent = scores * factor - power
    if dtype == tl.float32:
        exponent *= LOG2E
    exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.exp2(exponent + FEWER if dtype == tl.float16 else exponent)


@triton.jit
def stat_of(stats, number, first, inside, M: tl.constexpr):
    """[M] of rows from `number` + `first` on."""
    if inside is None:
        return tl.load(stats + number + first + tl.arange(0, M))
    else:
        return tl.load(stats + number + first + tl.arange(0, M), mask=inside, other=0.0)


@triton.jit
def walk_queries(
    keys, values, q, do, stats, dk, dv, count, begin, split, resume, end, queries, place, there, batch,
    left, right, prefix_rows, prefix, prefix_kv_len, mask, mask_head, mask_row, mask_step, factor, q_head, q_row,
    do_head, do_row, do_step, seed, offset, numbers, head_rows, apart, first_place, limit, gain, up,
    MASKED: tl.constexpr, CLEAN: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, DROPS: tl.constexpr, GIVES_K: tl.constexpr, GIVES_V: tl.constexpr, JOINT: tl.constexpr,
    TMA: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv from `count` tiles of queries of each head of a group: `split` from query `begin` on, the others from
    `resume`, and none from `end` on. CLEAN where queries between may see nothing, and hold anything.

    One loop over heads and tiles: a loop over heads around it would take registers that large tiles need. Both products
    that P waits for come first, so that tensor cores are busy with those of P while dS is worked out.
    """
    for turn in tl.range(0, count * GROUP, disable_licm=MASKED):
        which, step = turn % GROUP, turn // GROUP
        first = begin + step * M
        if MASKED:
            first = tl.where(step < split, first, resume + (step - split) * M)
        rows, number = first + tl.arange(0, M), numbers + which * head_rows
        mine = tile_of(q, which, q_head, first, end, q_row, None, MASKED, TMA, M, D, WIDTH)
        scores = tl.dot(keys, mine.T, input_precision=PRECISION)
        if do is not None:
            grad = tile_of(do, which, do_head, first, end, do_row, do_step, MASKED, TMA, M, DV, V_WIDTH)
            if GIVES_K:
                ds = tl.dot(values, grad.T, input_precision=PRECISION)
        if MASKED:
            inside = rows < end
            power = stat_of(stats, number, first, inside, M)
            low, high = seen_by(rows, queries, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                                BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
            high = tl.where(inside & (power != float("inf")), high, 0)
            seen = (place[:, None] >= low[None, :]) & (place[:, None] < high[None, :])
            if mask is not None:
                where = mask + which * mask_head + (rows.to(tl.int64) * mask_row)[None, :]
                where += (place if mask_step is None else place.to(tl.int64) * mask_step)[:, None]
                seen = seen & tl.load(where, mask=seen, other=0).to(tl.int1)
            p = tl.where(seen, weights_of(scores, power[None, :], factor, mine.dtype), 0.0)
            if CLEAN:
                some = (tl.max(seen.to(tl.int32), 0) > 0)[:, None]
                mine = tl.where(some, mine, 0.0)
                if do is not None:
                    grad = tl.where(some, grad, 0.0)
        else:
            power = stat_of(stats, number, first, None, M)
            p = weights_of(scores, power[None, :], factor, mine.dtype)
        if DROPS:
            keep = tl.trans(kept(seed, offset, number + rows, first_place, limit, N))
        if GIVES_V:
            weights = (tl.where(keep, p, 0.0) if DROPS else p).to(grad.dtype)
            if not JOINT:
                dv = tl.dot(weights, grad, dv, input_precision=PRECISION)
        if GIVES_K:
            shift = stat_of(stats, number + apart, first, rows < end if MASKED else None, M)
            if up is not None:
                shift *= up
            if do is not None:
                if gain is not None:
                    ds *= gain
                if DROPS:
                    ds = tl.where(keep, ds, 0.0)
                ds = p * (ds - shift[None, :])
            else:
                ds = -p * shift[None, :]
            if MASKED:
                ds = tl.where(seen, ds, 0.0)  # 0 times what a query that sees nothing may hold is not 0
            narrow = ds.to(mine.dtype)
        # JOINT: nothing is worked out between these, for what is written to a register while a product reads others
        # makes the compiler wait for that product. It takes more registers.
        if GIVES_V and JOINT:
            dv = tl.dot(weights, grad, dv, input_precision=PRECISION)
        if GIVES_K:
            dk = tl.dot(narrow, mine, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def walk_keys(
    mine, grad, power, shift, k, v, dq, count, begin, split, resume, end, low, high, inside, mask_rows, mask_step,
    factor, k_row, v_row, seed, offset, numbers, limit, gain,
    MASKED: tl.constexpr, CLEAN: tl.constexpr, DROPS: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq from `count` tiles of keys: `split` from key `begin` on, the others from `resume`, and none from `end` on.
    CLEAN where keys between may be seen by nobody, and hold anything."""
    if MASKED:
        inside = inside & (power != float("inf"))  # of a row that sees nothing, though scores of -Inf are there
    for turn in tl.range(0, count):
        first = begin + turn * N
        if MASKED:
            first = tl.where(turn < split, first, resume + (turn - split) * N)
        keys = tile_of(k, 0, 0, first, end, k_row, None, MASKED, TMA, N, D, WIDTH)
        scores = tl.dot(mine, keys.T, input_precision=PRECISION)
        if grad is not None:
            values = tile_of(v, 0, 0, first, end, v_row, None, MASKED, TMA, N, DV, V_WIDTH)
            ds = tl.dot(grad, values.T, input_precision=PRECISION)
        p = weights_of(scores, power[:, None], factor, keys.dtype)
        if MASKED:
            place = first + tl.arange(0, N)
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None]) & inside[:, None]
            if mask_rows is not None:
                where = mask_rows[:, None] + (
                    place[None, :] if mask_step is None else place[None, :].to(tl.int64) * mask_step
                )
                seen = seen & tl.load(where, mask=seen, other=0).to(tl.int1)
            p = tl.where(seen, p, 0.0)
            if CLEAN:
                keys = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], keys, 0.0)
        if grad is not None:
            if gain is not None:
                ds *= gain[:, None]
            if DROPS:
                ds = tl.where(kept(seed, offset, numbers, first, limit, N), ds, 0.0)
            ds = p * (ds - shift[:, None])
        else:
            ds = -p * shift[:, None]
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq
