"""The programs of the family's Triton gradients: what owns a tile of keys, for dk and dv, or of queries, for dq. How
they are launched is in `triton_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.activation.triton_functions import act_and_slope
from tilewright.ops.hstu.triton_tiles import (
    add_product,
    inverse,
    keys_of,
    place_of,
    queries_of,
    room_for,
    spans,
    tile_of,
)
from tilewright.ops.triton_scores import kept


@triton.jit
def walk_queries(
    keys, values, q, do, dk, dv, k_power, v_power, turns, first_of, second, third, fourth, starts, stops, end, place,
    there, targets, shared, window, tail, attn_scale, factor_step, mask, mask_row, mask_step, alpha, q_row, do_row,
    do_step, seed, offset, numbers, first_place, limit,
    MASKED: tl.constexpr, JAGGED: tl.constexpr, CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr,
    DROPS: tl.constexpr, LIFTS: tl.constexpr, GIVES_K: tl.constexpr, GIVES_V: tl.constexpr, TMA: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv from `turns` tiles of queries, from `first_of` on; under a mask from the turns `second`, `third` and
    `fourth` on those from `starts`, and none of a part from its `stops` on."""
    for turn in tl.range(0, turns, disable_licm=MASKED):  # what is kept across turns would spill
        first, stop = first_of + turn * M, end
        if MASKED:
            stop = stops[0]
            if JAGGED:
                first = tl.where(turn < second, first, starts[0] + (turn - second) * M)
                stop = tl.where(turn < second, stop, stops[1])
                first = tl.where(turn < third, first, starts[1] + (turn - third) * M)
                stop = tl.where(turn < third, stop, stops[2])
                first = tl.where(turn < fourth, first, starts[2] + (turn - fourth) * M)
                stop = tl.where(turn < fourth, stop, end)
        rows = first + tl.arange(0, M)
        mine = tile_of(q, first, end, q_row, None, MASKED, TMA, M, D, WIDTH)
        x = tl.dot(keys, mine.T, input_precision=PRECISION) * alpha
        grad = tile_of(do, first, end, do_row, do_step, MASKED, TMA, M, DV, V_WIDTH)
        p, slope = act_and_slope(x, "silu")
        if GIVES_K:
            dx = tl.dot(values, grad.T, input_precision=PRECISION) * slope
        else:
            dx = slope
        if attn_scale is not None:
            factor = tl.load(attn_scale + rows * factor_step, mask=rows < stop, other=0.0)[None, :]
            p *= factor
            dx *= factor
        if MASKED:
            inside = rows < stop
            if JAGGED:
                low, high = spans(rows, end, targets, shared, window, tail, CAUSAL, CONTEXT, WINDOW)
                seen = (place[:, None] >= low[None, :]) & (place[:, None] < high[None, :])
                seen = seen | (place[:, None] == rows[None, :])
            else:
                seen = (place < there)[:, None]
            seen = seen & inside[None, :]
            if mask is not None:
                where = mask + (rows.to(tl.int64) * mask_row)[None, :] + (place.to(tl.int64) * mask_step)[:, None]
                weight = tl.load(where, mask=seen, other=0.0).to(tl.float32)
                seen = seen & (weight != 0.0)
                p *= weight
                dx *= weight
            p, dx = tl.where(seen, p, 0.0), tl.where(seen, dx, 0.0)
            if mask is not None:  # what sees nothing may hold anything
                some = (tl.max(seen.to(tl.int32), 0) > 0)[:, None]
                mine, grad = tl.where(some, mine, 0.0), tl.where(some, grad, 0.0)
        if DROPS:
            keep = tl.trans(kept(seed, offset, numbers + rows, first_place, limit, N))
            p, dx = tl.where(keep, p, 0.0), tl.where(keep, dx, 0.0)
        if GIVES_V:
            dv, v_power = add_product(dv, v_power, p, grad, LIFTS, PRECISION)
        if GIVES_K:
            dk, k_power = add_product(dk, k_power, dx, mine, LIFTS, PRECISION)
    return dk, dv, k_power, v_power


@triton.jit(
    do_not_specialize=["rows", "keys", "count", "tiles", "heads", "shared", "window", "tail", "limit", "factor_step"]
)
def hstu_keys(
    do, q, k, v, order, seq_offsets, num_targets, attn_scale, mask, state, dk, dv,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, factor_step, count, rows, keys, tiles, heads, shared, window, tail,
    alpha, post, limit, kept_scale,
    CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, LIFTS: tl.constexpr,
    TMA: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys of one head."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    n, head, begin, token, there = place_of(tl.program_id(0), order, seq_offsets, count, keys, heads, tiles, False, N)
    if begin >= there:
        return
    JAGGED: tl.constexpr = seq_offsets is not None
    batch = n.to(tl.int64)
    if JAGGED:
        batch *= 0
    place = begin + tl.arange(0, N)
    inside = (place < there)[:, None]
    columns, v_columns = tl.arange(0, D), tl.arange(0, DV)
    store = inside if WIDTH == D else inside & (columns < WIDTH)[None, :]
    v_store = inside if V_WIDTH == DV else inside & (v_columns < V_WIDTH)[None, :]
    line = ((batch * keys + token + place) * heads + head)[:, None]
    if JAGGED:
        if n == count:  # behind the last sequence
            if dk is not None:
                tl.store(dk + line * WIDTH + columns[None, :], tl.zeros([N, D], dk.dtype.element_ty), mask=store)
            if dv is not None:
                tl.store(dv + line * V_WIDTH + v_columns[None, :], tl.zeros([N, DV], dv.dtype.element_ty), mask=v_store)
            return
    targets = 0
    if num_targets is not None:
        targets = tl.load(num_targets + n).to(tl.int32)
    shared, window, tail = shared.to(tl.int32), window.to(tl.int32), tail.to(tl.int32)
    end = there
    if not JAGGED:
        end = rows.to(tl.int32)
    context, near, far, whole, some, again = queries_of(
        begin, end, there, targets, shared, window, tail, JAGGED, CAUSAL, CONTEXT, WINDOW, mask is not None, M, N
    )
    mine = tile_of(
        k + batch * k_batch + token * k_row + head * k_head, begin, there, k_row, None, True, False, N, D, WIDTH
    )
    values = tile_of(
        v + batch * v_batch + token * v_row + head * v_head, begin, there, v_row, None, True, False, N, DV, V_WIDTH
    )
    at_q = q + batch * q_batch + token * q_row + head * q_head
    at_do = do + batch * do_batch + token * do_row + head * do_head
    if TMA:
        lines = tl.maximum(end, 1)
        at_q = tl.make_tensor_descriptor(at_q, [lines, WIDTH], [q_row, 1], [M, D])
        at_do = tl.make_tensor_descriptor(at_do, [lines, V_WIDTH], [do_row, 1], [M, DV])
    at_mask = None
    if mask is not None:
        at_mask = mask + batch * mask_batch + head * mask_head
    factors = None
    if attn_scale is not None:
        factors = attn_scale + token * factor_step
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)
    numbers = head * rows + token

    dk_tile, dv_tile = tl.zeros([N, D], tl.float32), tl.zeros([N, DV], tl.float32)
    k_power, v_power = room_for(N), room_for(N)
    GIVES_K: tl.constexpr = dk is not None
    GIVES_V: tl.constexpr = dv is not None
    if mask is None:
        dk_tile, dv_tile, k_power, v_power = walk_queries(
            mine, values, at_q, at_do, dk_tile, dv_tile, k_power, v_power, (whole - far) // M, far, 0, 0, 0, (0, 0, 0),
            (0, 0, 0), end, place, there, targets, shared, window, tail, factors, factor_step, at_mask, mask_row,
            mask_step, alpha, q_row, do_row, do_step, drawn, offsets, numbers, begin, limit,
            False, JAGGED, CAUSAL, CONTEXT, WINDOW, DROPS, LIFTS, GIVES_K, GIVES_V, TMA,
            M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    if JAGGED:
        second = tl.cdiv(context, M)
        third = second + tl.cdiv(far - near, M)
        fourth = third + tl.cdiv(some - whole, M)
        turns = fourth + tl.cdiv(end - again, M)
        first, stop = context * 0, context
    else:
        second, third, fourth = end * 0, end * 0, end * 0
        first, stop, turns = whole, end, tl.cdiv(end - whole, M)
    dk_tile, dv_tile, k_power, v_power = walk_queries(
        mine, values, at_q, at_do, dk_tile, dv_tile, k_power, v_power, turns, first, second, third, fourth,
        (near, whole, again), (stop, far, some), end, place, there, targets, shared, window, tail, factors, factor_step,
        at_mask, mask_row, mask_step, alpha, q_row, do_row, do_step, drawn, offsets, numbers, begin, limit,
        True, JAGGED, CAUSAL, CONTEXT, WINDOW, DROPS, LIFTS, GIVES_K, GIVES_V, TMA,
        M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip

    gain = kept_scale
    if attn_scale is None:
        gain *= post
    if dk is not None:
        if LIFTS:
            dk_tile *= inverse(k_power)[:, None]
        dk_tile = dk_tile * gain * alpha
        tl.store(dk + line * WIDTH + columns[None, :], dk_tile.to(dk.dtype.element_ty), mask=store)
    if dv is not None:
        if LIFTS:
            dv_tile *= inverse(v_power)[:, None]
        tl.store(dv + line * V_WIDTH + v_columns[None, :], (dv_tile * gain).to(dv.dtype.element_ty), mask=v_store)


@triton.jit
def walk_keys(
    q, grad, k, v, total, power, turns, begin, split, resume, split2, again, end, low, high, query, mask_rows,
    mask_step, inside, alpha, k_row, v_row, seed, offset, numbers, limit,
    MASKED: tl.constexpr, SELF: tl.constexpr, DROPS: tl.constexpr, LIFTS: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total + dX k over `turns` tiles of keys, as the forward walks them."""
    for turn in tl.range(0, turns):
        first = begin + turn * N
        if MASKED:
            first = tl.where(turn < split, first, resume + (turn - split) * N)
            first = tl.where(turn < split2, first, again + (turn - split2) * N)
        keys = tile_of(k, first, end, k_row, None, MASKED, TMA, N, D, WIDTH)
        x = tl.dot(q, keys.T, input_precision=PRECISION) * alpha
        values = tile_of(v, first, end, v_row, None, MASKED, TMA, N, DV, V_WIDTH)
        dx = tl.dot(grad, values.T, input_precision=PRECISION) * act_and_slope(x, "silu")[1]
        if MASKED:
            place = first + tl.arange(0, N)
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
            if SELF:
                seen = seen | (place[None, :] == query[:, None])
            seen = seen & inside[:, None]
            if mask_rows is not None:
                where = mask_rows[:, None] + place[None, :].to(tl.int64) * mask_step
                factor = tl.load(where, mask=seen, other=0.0).to(tl.float32)
                seen = seen & (factor != 0.0)
                dx *= factor
            dx = tl.where(seen, dx, 0.0)
            if mask_rows is not None:  # what nobody sees may hold anything
                some = tl.max(seen.to(tl.int32), 0) > 0
                keys = tl.where(some[:, None], keys, 0.0)
        if DROPS:
            dx = tl.where(kept(seed, offset, numbers, first, limit, N), dx, 0.0)
        total, power = add_product(total, power, dx, keys, LIFTS, PRECISION)
    return total, power


@triton.jit(
    do_not_specialize=["rows", "keys", "count", "tiles", "heads", "shared", "window", "tail", "limit", "factor_step"]
)
def hstu_queries(
    do, q, k, v, order, seq_offsets, num_targets, attn_scale, mask, state, dq,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, factor_step, count, rows, keys, tiles, heads, shared, window, tail,
    alpha, post, limit, kept_scale,
    CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, LIFTS: tl.constexpr,
    TMA: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of M queries of one head."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    n, head, begin, token, length = place_of(tl.program_id(0), order, seq_offsets, count, rows, heads, tiles, True, M)
    if begin >= length:
        return
    query = begin + tl.arange(0, M)
    inside = query < length
    JAGGED: tl.constexpr = seq_offsets is not None
    batch = n.to(tl.int64)
    if JAGGED:
        batch *= 0
    columns = tl.arange(0, D)
    store = inside[:, None] if WIDTH == D else inside[:, None] & (columns < WIDTH)[None, :]
    line = batch * rows + token + query
    out = dq + (line * heads + head)[:, None] * WIDTH + columns[None, :]
    there, targets = length, 0
    if JAGGED:
        if n == count:  # behind the last sequence
            tl.store(out, tl.zeros([M, D], tl.float32).to(dq.dtype.element_ty), mask=store)
            return
        if num_targets is not None:
            targets = tl.load(num_targets + n).to(tl.int32)
    else:
        there = keys.to(tl.int32)
    low, high, start, before, edge, main, again, cut, whole, turns = keys_of(
        query, inside, begin, length, there, targets, shared, window, tail,
        JAGGED, CAUSAL, CONTEXT, WINDOW, DROPS, mask is not None, M, N,
    )  # fmt: skip

    mine = tile_of(
        q + batch * q_batch + token * q_row + head * q_head, begin, length, q_row, None, True, False, M, D, WIDTH
    )
    grad = tile_of(
        do + batch * do_batch + token * do_row + head * do_head, begin, length, do_row, do_step, True, False,
        M, DV, V_WIDTH,
    )  # fmt: skip
    at_k = k + batch * k_batch + token * k_row + head * k_head
    at_v = v + batch * v_batch + token * v_row + head * v_head
    if TMA:
        lines = tl.maximum(there, 1)
        at_k = tl.make_tensor_descriptor(at_k, [lines, WIDTH], [k_row, 1], [N, D])
        at_v = tl.make_tensor_descriptor(at_v, [lines, V_WIDTH], [v_row, 1], [N, DV])
    mask_rows = None
    if mask is not None:
        mask_rows = mask + batch * mask_batch + head * mask_head + query.to(tl.int64) * mask_row
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)
    numbers = head * rows + token + query

    total = tl.zeros([M, D], tl.float32)
    power = room_for(M)
    if mask is None:
        total, power = walk_keys(
            mine, grad, at_k, at_v, total, power, turns, whole, 0, 0, 0, 0, there, low, high, query, mask_rows,
            mask_step, inside, alpha, k_row, v_row, drawn, offsets, numbers, limit,
            False, JAGGED, DROPS, LIFTS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    total, power = walk_keys(
        mine, grad, at_k, at_v, total, power, cut, start, before, edge, main, again, there, low, high, query,
        mask_rows, mask_step, inside, alpha, k_row, v_row, drawn, offsets, numbers, limit,
        True, JAGGED, DROPS, LIFTS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip
    if LIFTS:
        total *= inverse(power)[:, None]
    total *= kept_scale * alpha
    if attn_scale is not None:
        total *= tl.load(attn_scale + (token + query) * factor_step, mask=inside, other=0.0)[:, None]
    else:
        total *= post
    tl.store(out, total.to(dq.dtype.element_ty), mask=store)
