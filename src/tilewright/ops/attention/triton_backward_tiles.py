"""The programs of attention's Triton gradients that own a tile: of keys, for dk and dv (and what they add to dq, in the
fused form), or of queries, for dq. What they walk is in `triton_backward_walks`, how they are launched in
`triton_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.attention.triton_backward_rows import ROOM, WEIGHT_BITS, largest, lifted
from tilewright.ops.attention.triton_backward_walks import (
    tile_of,
    walk_keys,
    walk_keys_ahead,
    walk_queries,
    walk_queries_ahead,
)
from tilewright.ops.attention.triton_tiles import place_of, seen_by, seers

LEAST = tl.constexpr(2.0**-WEIGHT_BITS)
SPAN = tl.constexpr(1024)
"""Numbers of rows that are read at a time."""


@triton.jit(
    do_not_specialize=[
        "rows", "keys", "count", "tiles", "heads", "left", "right", "prefix_rows", "prefix", "limit", "apart",
    ]
)  # fmt: skip
def attention_keys(
    do, q, k, v, stats, norms, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, mask, state, dk, dv, dq_sum,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, left, right, prefix_rows, prefix, count, rows, keys,
    tiles, heads, factor, limit, kept_scale, scale, apart,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, DROPS: tl.constexpr,
    JOINT: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys of one head. Where `dq_sum` is given, what they add to dq is added to it."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = tl.program_id(0)
    # Tiles of one head follow each other, so that what runs at a time shares queries in the L2; the first ones, which
    # most queries see, go first.
    slot, pair = program % tiles.to(tl.int32), program // tiles.to(tl.int32)
    key_heads = (heads // GROUP).to(tl.int32)
    batch, key_head = (pair // key_heads).to(tl.int64), (pair % key_heads).to(tl.int64)
    tile, first_key, length, first_query, queries = place_of(
        slot, batch, keys, rows, None, cu_seqlens_k, cu_seqlens_q, count, 1, N
    )
    there = length
    if kv_len is not None:
        there = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), keys).to(tl.int32)

    first = tile * N
    last = tl.minimum(first + N, there)
    place = first + tl.arange(0, N)
    k_first = k + batch * k_batch + first_key * k_row + key_head * k_head
    v_first = v + batch * v_batch + first_key * v_row + key_head * v_head
    mine = tile_of(k_first, 0, first, there, k_row, None, True, False, N, D, WIDTH)
    values = tile_of(v_first, 0, first, there, v_row, None, True, False, N, DV, V_WIDTH)
    # Keys that nobody sees, before what the first query does or behind what the last does, may hold anything.
    lowest, _ = seen_by(first * 0, queries, there, batch, left, right, 0, prefix, None, BOTTOM, LEFT, RIGHT, False)
    _, highest = seen_by(queries - 1, queries, there, batch, left, right, 0, prefix, None, BOTTOM, LEFT, RIGHT, False)
    if dq_sum is not None:  # which is a sum over these
        mine = tl.where(((place >= lowest) & (place < highest))[:, None], mine, 0.0)

    # Queries [start, end) see some key of the tile, those of [whole, edge) all of them. Tiles are counted from `start`
    # on: those before see nothing, maybe not even another key, and may hold anything.
    start, whole, edge, end = seers(first, last, queries, there, batch, left, right, prefix_rows, prefix,
                                    prefix_kv_len, BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    start = tl.minimum(start, queries)
    end = tl.where(first < there, tl.maximum(end, start), start)
    if mask is not None:
        whole, edge = start, start
    else:
        most = tl.cdiv(end - start, M)
        before = tl.minimum(tl.cdiv(tl.maximum(whole - start, 0), M), most)
        whole = start + tl.where(last - first < N, most, before) * M
        edge = tl.maximum(start + tl.maximum(tl.minimum(edge, end) - start, 0) // M * M, whole)
    before = (whole - start) // M
    cut = before + tl.maximum(tl.cdiv(end - edge, M), 0)
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)
    gain, up, down = None, None, None
    if DROPS:
        gain = kept_scale
    if norms is not None:
        terms, sums = 0.0, 0.0
        for which in tl.range(0, GROUP):
            rows_of = stats + (batch * heads + key_head * GROUP + which) * rows + first_query
            terms = tl.maximum(terms, largest(rows_of + 2 * apart, start, end, SPAN))
            sums = tl.maximum(sums, largest(rows_of + apart, start, end, SPAN))
        lengths = norms + (batch * key_heads + key_head) * keys + first_key
        terms *= largest(lengths, tl.maximum(first, lowest), tl.minimum(last, highest), N)
        up, down = lifted((terms * kept_scale if DROPS else terms) + sums, ROOM)
        gain = up * kept_scale if DROPS else up

    dk_tile = tl.zeros([N, D], tl.float32)
    dv_tile = tl.zeros([N, DV], tl.float32)
    at_q = q + batch * q_batch + first_query * q_row + key_head * GROUP * q_head
    at_do = do
    if do is not None:
        at_do = do + batch * do_batch + first_query * do_row + key_head * GROUP * do_head
    at_stats, at_sum = stats, dq_sum
    if TMA:
        if dq_sum is not None:
            at_sum = dq_sum + ((batch * heads + key_head * GROUP) * rows + first_query) * D
            at_sum = tl.make_tensor_descriptor(
                at_sum, [GROUP, tl.maximum(queries, 1), D], [rows.to(tl.int64) * D, D, 1], [1, M, D]
            )
        at_stats = tl.make_tensor_descriptor(stats, [(2 * apart).to(tl.int32)], [1], [M])
        lines = tl.maximum(end, 1)  # what lies behind them is 0
        at_q = tl.make_tensor_descriptor(at_q, [GROUP, lines, WIDTH], [q_head, q_row, 1], [1, M, D])
        if do is not None:
            at_do = tl.make_tensor_descriptor(at_do, [GROUP, lines, V_WIDTH], [do_head, do_row, 1], [1, M, DV])
    CLEAN: tl.constexpr = mask is not None or (PREFIX and LEFT)
    GIVES_K: tl.constexpr = dk is not None or dq_sum is not None
    for which in tl.range(0, GROUP):
        head = key_head * GROUP + which
        number = (batch * heads + head) * rows + first_query
        one_q = at_q
        one_do = at_do  # each by itself: what is compiled takes no None in a tuple
        at_mask = mask
        if not TMA:
            one_q = at_q + which * q_head
            if do is not None:
                one_do = at_do + which * do_head
        if mask is not None:
            at_mask = mask + batch * mask_batch + head * mask_head
        if AHEAD and mask is None and not DROPS and do is not None and dk is not None and dv is not None:
            dk_tile, dv_tile = walk_queries_ahead(
                mine, values, one_q, one_do, which, at_stats, dk_tile, dv_tile, (edge - whole) // M, whole, end, factor,
                q_row, do_row, do_step, number, apart, gain, up, TMA, M, D, DV, WIDTH, V_WIDTH, PRECISION,
            )  # fmt: skip
        elif mask is None:
            dk_tile, dv_tile = walk_queries(
                mine, values, one_q, one_do, at_sum, which, at_stats, dk_tile, dv_tile, (edge - whole) // M,
                whole, 0, 0, end, queries, place, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                at_mask, mask_row, mask_step, factor, q_row, do_row, do_step, drawn, offsets, number, apart, first,
                limit, gain, up, down, False, False, BOTTOM, LEFT, RIGHT, PREFIX, DROPS, GIVES_K,
                dv is not None and do is not None, JOINT, TMA, M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
            )  # fmt: skip
        dk_tile, dv_tile = walk_queries(
            mine, values, one_q, one_do, at_sum, which, at_stats, dk_tile, dv_tile, cut,
            start, before, edge, end, queries, place, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
            at_mask, mask_row, mask_step, factor, q_row, do_row, do_step, drawn, offsets, number, apart, first, limit,
            gain, up, down, True, CLEAN, BOTTOM, LEFT, RIGHT, PREFIX, DROPS, GIVES_K,
            dv is not None and do is not None, JOINT, TMA, M, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip

    token = (batch * keys + first_key + place) * key_heads + key_head
    inside, real = (place < length)[:, None], (place < there)[:, None]  # no weight times NaN is not 0
    if dk is not None:
        dk_tile = tl.where(real, dk_tile, 0.0)
        if down is not None:
            dk_tile *= down
        columns = tl.arange(0, D)
        store = inside if WIDTH == D else inside & (columns < WIDTH)[None, :]
        tl.store(dk + token[:, None] * WIDTH + columns[None, :], (dk_tile * scale).to(dk.dtype.element_ty), mask=store)
    if dv is not None:
        dv_tile = tl.where(real, dv_tile, 0.0)
        if DROPS:
            dv_tile *= kept_scale
        if norms is not None:
            dv_tile *= LEAST
        columns = tl.arange(0, DV)
        store = inside if V_WIDTH == DV else inside & (columns < V_WIDTH)[None, :]
        tl.store(dv + token[:, None] * V_WIDTH + columns[None, :], dv_tile.to(dv.dtype.element_ty), mask=store)


@triton.jit(
    do_not_specialize=[
        "rows", "keys", "count", "tiles", "heads", "left", "right", "prefix_rows", "prefix", "limit",
        "apart",
    ]
)  # fmt: skip
def attention_queries(
    do, q, k, v, stats, norms, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, mask, state, dq,
    do_batch, do_row, do_head, do_step, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, left, right, prefix_rows, prefix, count, rows, keys,
    tiles, heads, factor, limit, kept_scale, scale, apart,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, DROPS: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of M queries of one head."""
    unit = tl.full((), UNIT, tl.int64)  # a stride that fits 32 bits may not when multiplied
    do_batch, do_row, do_head = do_batch * unit, do_row * unit, do_head * unit
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = tl.program_id(0)
    slot = tiles.to(tl.int32) - 1 - program % tiles.to(tl.int32)  # as in forward: the last ones see the most
    pair = program // tiles.to(tl.int32)
    batch, head = (pair // heads.to(tl.int32)).to(tl.int64), (pair % heads.to(tl.int32)).to(tl.int64)
    tile, first_query, queries, first_key, there = place_of(
        slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, 1, M
    )
    begin = tile * M
    query = begin + tl.arange(0, M)
    inside = query < queries
    low, high = seen_by(query, queries, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                        BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    q_first = q + batch * q_batch + first_query * q_row + head * q_head
    mine = tile_of(q_first, 0, begin, queries, q_row, None, True, False, M, D, WIDTH)
    grad = None
    if do is not None:
        do_first = do + batch * do_batch + first_query * do_row + head * do_head
        grad = tile_of(do_first, 0, begin, queries, do_row, do_step, True, False, M, DV, V_WIDTH)
    numbers = (batch * heads + head) * rows + first_query + query
    power = tl.load(stats + numbers, mask=inside, other=0.0)
    shift = tl.load(stats + apart + numbers, mask=inside, other=0.0)

    # Keys [start, end) are seen by some row of the tile, those of [whole, edge) by all of them. Tiles are counted from
    # `start` on: those before may hold anything.
    lowest = tl.minimum(tl.min(tl.where(inside, low, there), 0), there)
    start = lowest // 4 * 4 if DROPS else lowest  # words of the mask come by four
    end = tl.maximum(tl.minimum(tl.max(tl.where(inside, high, 0), 0), there), start)
    if mask is not None:
        whole, edge = start, start
    else:
        whole, edge = start, end
        if LEFT:
            most = tl.max(tl.where(inside, low, 0), 0)
            whole = start + tl.minimum(tl.cdiv(tl.maximum(most - start, 0), N), tl.cdiv(end - start, N)) * N
        if RIGHT or PREFIX:
            edge = tl.minimum(tl.maximum(tl.min(tl.where(inside, high, there), 0), start), end)
        edge = tl.maximum(start + (edge - start) // N * N, whole)
    before = (whole - start) // N
    cut = before + tl.maximum(tl.cdiv(end - edge, N), 0)

    key_head = head // GROUP
    at_k = k + batch * k_batch + first_key * k_row + key_head * k_head
    at_v = v + batch * v_batch + first_key * v_row + key_head * v_head
    if TMA:
        lines = tl.maximum(end, 1)
        at_k = tl.make_tensor_descriptor(at_k, [1, lines, WIDTH], [k_row, k_row, 1], [1, N, D])
        at_v = tl.make_tensor_descriptor(at_v, [1, lines, V_WIDTH], [v_row, v_row, 1], [1, N, DV])
    mask_rows = None
    if mask is not None:
        mask_rows = mask + batch * mask_batch + head * mask_head + query.to(tl.int64) * mask_row
    drawn, offsets = 0, 0
    if DROPS:
        drawn, offsets = tl.load(state), tl.load(state + 1)
    gain, down = None, None
    if DROPS:
        gain = tl.zeros([M], tl.float32) + kept_scale
    if norms is not None:
        terms = tl.load(stats + 2 * apart + numbers, mask=inside, other=0.0)
        terms *= largest(norms + (batch * (heads // GROUP) + key_head) * keys + first_key, lowest, end, SPAN)
        up, down = lifted((terms * kept_scale if DROPS else terms) + tl.abs(shift), ROOM)
        shift *= up
        gain = up * kept_scale if DROPS else up

    total = tl.zeros([M, D], tl.float32)
    if AHEAD and mask is None and do is not None and not DROPS:
        total = walk_keys_ahead(
            mine, grad, power, shift, at_k, at_v, total, (edge - whole) // N, whole, end, factor, k_row, v_row, gain,
            TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    elif mask is None:
        total = walk_keys(
            mine, grad, power, shift, at_k, at_v, total, (edge - whole) // N, whole, 0, 0, end, low, high, inside,
            mask_rows, mask_step, factor, k_row, v_row, drawn, offsets, numbers, limit, gain,
            False, False, DROPS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    total = walk_keys(
        mine, grad, power, shift, at_k, at_v, total, cut, start, before, edge, end, low, high, inside,
        mask_rows, mask_step, factor, k_row, v_row, drawn, offsets, numbers, limit, gain,
        True, mask is not None or (LEFT and (DROPS or PREFIX)), DROPS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip

    if down is not None:
        total *= down[:, None]
    columns = tl.arange(0, D)
    store = inside[:, None] if WIDTH == D else inside[:, None] & (columns < WIDTH)[None, :]
    token = (batch * rows + first_query + query) * heads + head
    out = dq + token[:, None] * WIDTH + columns[None, :]
    tl.store(out, (total * scale).to(dq.dtype.element_ty), mask=store)
