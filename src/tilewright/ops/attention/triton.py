"""How Triton runs attention and varlen_attention: one tile of queries a program, over its keys with an online softmax.

The scale is folded into the exponent. Keys that every row of a tile sees need no mask; those at the edges are walked
apart. Where queries are few, PARTS programs share the keys of a tile, and a second kernel merges what they found. With
TMA, keys and values come through descriptors that end where the sequence does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.configs import packed_heads, width_of
from tilewright.ops.attention.triton_tiles import place_of, rates, seen_by
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.triton_scores import DESCRIPTOR, kept, precision

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of(
    at, first, end, row_step, MASKED: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, FROM: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[N, D] of keys or values from `first` and column FROM on, 0 past `end` and WIDTH."""
    if TMA:
        return at.load([first, 0])
    else:
        place = at + first * row_step  # a product of 64 bits, as the step has
        lines, columns = tl.arange(0, N), FROM + tl.arange(0, D)
        place += lines[:, None].to(tl.int64) * row_step + columns[None, :]
        if MASKED:
            there = (lines < end - first)[:, None]
            return tl.load(place, mask=there if FROM + D <= WIDTH else there & (columns < WIDTH)[None, :], other=0.0)
        elif FROM + D <= WIDTH:
            return tl.load(place)
        else:
            return tl.load(place, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def span(
    row, M, queries, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
    PACK: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(start, whole, edge, end): keys [start, end) are seen by some of the M rows from `row` on, [whole, edge) by all.

    Both bounds of `seen_by` grow with the query, so the first and the last row tell.
    """
    rows = queries * PACK
    first, last = row // PACK, tl.maximum(tl.minimum(row + M, rows) - 1, 0) // PACK
    start, edge = seen_by(first, queries, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                          BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    whole, end = seen_by(last, queries, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                         BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    some = row < rows
    start = tl.where(some, tl.minimum(start, keys), keys)
    end = tl.where(some, tl.minimum(tl.maximum(end, 0), keys), 0)
    return start, tl.where(some, whole, start), tl.minimum(edge, end), end


@triton.jit
def walk(
    q, q_rest, k, v, total, rest, sums, top, start, stop, end, low, high, mask_rows, mask_step, mask_rows_there, factor,
    k_row, v_row, seed, offset, numbers, limit,
    MASKED: tl.constexpr, GAPS: tl.constexpr, SIGN: tl.constexpr, DROPS: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax over keys [start, stop): (sum of exp2 times v, the same of its other columns, sum of exp2, largest
    score). GAPS: there may be some that no row sees; their values are put to 0, for 0 times NaN is NaN."""
    for first in tl.range(start, stop, N):
        keys = tile_of(k, first, end, k_row, MASKED, TMA, N, 0, D, WIDTH)
        if D_REST:
            keys_rest = tile_of(k, first, end, k_row, MASKED, TMA, N, D, D_REST, WIDTH)
        scores = tl.dot(q, keys.T, input_precision=PRECISION)
        if D_REST:
            scores = tl.dot(q_rest, keys_rest.T, scores, input_precision=PRECISION)
        if SIGN != 1:
            scores *= SIGN
        if MASKED:
            place = first + tl.arange(0, N)
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
            if mask_rows is not None:
                where = mask_rows[:, None] + (place[None, :] if mask_step is None else place[None, :] * mask_step)
                seen = seen & tl.load(where, mask=seen & mask_rows_there[:, None], other=0).to(tl.int1)
            scores = tl.where(seen, scores, float("-inf"))
            if GAPS:
                used = tl.max(scores, 0) != float("-inf")
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # no key yet: exp2(-Inf - 0) is 0, of -Inf + Inf it is NaN
        if q.dtype == tl.float32:  # the difference first: where `top` grows, a rounding of its product would show
            p = tl.math.exp2((scores - base[:, None]) * factor)
        else:
            rate, level = rates(base, factor)
            p = tl.math.exp2(scores * rate[:, None] - level[:, None])
        shrink = tl.math.exp2((top - base) * factor)
        sums = sums * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        if DV_REST:
            rest = rest * shrink[:, None]
        top = new
        if DROPS:
            p = tl.where(kept(seed, offset, numbers, first, limit, N), p, 0.0)
        values = tile_of(v, first, end, v_row, MASKED, TMA, N, 0, DV, V_WIDTH)
        p = p.to(values.dtype)
        if GAPS:  # not in the mask of the load: the compiler gives up on one that waits for a product
            values = tl.where(used[:, None], values, 0.0)
        total = tl.dot(p, values, total, input_precision=PRECISION)
        if DV_REST:
            values_rest = tile_of(v, first, end, v_row, MASKED, TMA, N, DV, DV_REST, V_WIDTH)
            if GAPS:
                values_rest = tl.where(used[:, None], values_rest, 0.0)
            rest = tl.dot(p, values_rest, rest, input_precision=PRECISION)
    return total, rest, sums, top


@triton.jit(
    do_not_specialize=[
        "rows", "keys", "count", "tiles", "heads", "group", "left", "right", "prefix_rows", "prefix", "limit",
    ]
)  # fmt: skip
def attention_forward(
    q, k, v, kv_len, cu_seqlens_q, cu_seqlens_k, prefix_kv_len, mask, seed, offset, o, lse, state,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, left, right, prefix_rows, prefix, count, rows, keys,
    tiles, heads, group, factor, limit, kept_scale,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, DROPS: tl.constexpr,
    SIGN: tl.constexpr, TMA: tl.constexpr, PACK: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr,
    DV_REST: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o and lse of M rows; of a part of the keys, both as they are merged: lse in powers of 2, o in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    unit = tl.full((), UNIT, tl.int64)  # not the number itself: a stride that fits 32 bits may not when multiplied
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    program = tl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    # Tiles of one head follow each other, so that what runs at a time shares keys in the L2; the last ones, which see
    # the most, go first.
    slot = tiles.to(tl.int32) - 1 - program % tiles.to(tl.int32)
    group_of_heads = program // tiles.to(tl.int32)
    groups = (heads // PACK).to(tl.int32)
    batch = (group_of_heads // groups).to(tl.int64)
    head = (group_of_heads % groups).to(tl.int64) * PACK
    tile, first_query, queries, first_key, there = place_of(
        slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, PACK, M
    )

    row = tile * M + tl.arange(0, M)
    inside = row < queries * PACK
    query = row // PACK
    which = head + row % PACK
    low, high = seen_by(query, queries, there, batch, left, right, prefix_rows, prefix, prefix_kv_len,
                        BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
    high = tl.where(inside, high, 0)
    columns = tl.arange(0, D)
    q_place = q + batch * q_batch + (first_query + query) * q_row + which * q_head
    q_mask = inside[:, None] if D <= WIDTH else inside[:, None] & (columns < WIDTH)[None, :]
    mine = tl.load(q_place[:, None] + columns[None, :], mask=q_mask, other=0.0)
    mine_rest = None
    if D_REST:
        columns = D + tl.arange(0, D_REST)
        q_mask = inside[:, None] & (columns < WIDTH)[None, :]
        mine_rest = tl.load(q_place[:, None] + columns[None, :], mask=q_mask, other=0.0)

    # Keys [start, end) are seen by some row of the tile, those of [whole, edge) by all of them. Tiles of keys begin
    # with one that is seen, or where a mask or random numbers want them to.
    start, whole, edge, end = span(
        tile * M, M, queries, there, batch, left, right, prefix_rows, prefix, prefix_kv_len, PACK, BOTTOM, LEFT, RIGHT,
        PREFIX,
    )  # fmt: skip
    if mask is not None or DROPS:
        start = start // N * N
    origin = start
    whole = origin + tl.cdiv(tl.maximum(whole - origin, 0), N) * N
    if PARTS > 1:
        share = tl.cdiv(tl.maximum(tl.cdiv(end - start, N), 0), PARTS) * N
        start = start + part * share
        end = tl.minimum(end, start + share)
    whole = tl.maximum(tl.minimum(whole, origin + tl.cdiv(end - origin, N) * N), start)
    edge = tl.maximum(origin + (tl.minimum(edge, end) - origin) // N * N, whole)

    key_head = head // group
    k_first = k + batch * k_batch + first_key * k_row + key_head * k_head
    v_first = v + batch * v_batch + first_key * v_row + key_head * v_head
    if TMA:
        lines = tl.maximum(end, 1)
        at_k = tl.make_tensor_descriptor(k_first, [lines, WIDTH], [k_row, 1], [N, D])
        at_v = tl.make_tensor_descriptor(v_first, [lines, V_WIDTH], [v_row, 1], [N, DV])
    else:
        at_k, at_v = k_first, v_first

    numbers = ((batch * heads + which) * rows + first_query + query).to(tl.int64)  # of rows: of lse, and of dropout
    if mask is not None:
        mask_rows = mask + batch * mask_batch + which * mask_head + query.to(tl.int64) * mask_row
    else:
        mask_rows = None
    drawn, offsets = 0, 0
    if DROPS:
        drawn = tl.load(seed)
        if offset is not None:
            offsets = tl.load(offset)
        else:
            offsets = drawn * 0
        if state is not None:
            if tl.program_id(0) == 0:
                tl.store(state, drawn)
                tl.store(state + 1, offsets)

    total = tl.zeros([M, DV], tl.float32)
    sums = tl.zeros([M], tl.float32)
    rest = tl.zeros([M, DV_REST], tl.float32) if DV_REST else sums  # a stand-in, for None is no result
    top = tl.full([M], float("-inf"), tl.float32)
    if mask is None:
        if LEFT:
            total, rest, sums, top = walk(
                mine, mine_rest, at_k, at_v, total, rest, sums, top, start, whole, end, low, high, mask_rows, mask_step,
                inside, factor, k_row, v_row, drawn, offsets, numbers, limit,
                True, PREFIX or DROPS, SIGN, DROPS, TMA, N, D, D_REST, DV, DV_REST, WIDTH, V_WIDTH, PRECISION,
            )  # fmt: skip
        total, rest, sums, top = walk(
            mine, mine_rest, at_k, at_v, total, rest, sums, top, whole, edge, end, low, high, mask_rows, mask_step,
            inside, factor, k_row, v_row, drawn, offsets, numbers, limit,
            False, False, SIGN, DROPS, TMA, N, D, D_REST, DV, DV_REST, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    else:
        edge = start
    total, rest, sums, top = walk(
        mine, mine_rest, at_k, at_v, total, rest, sums, top, edge, end, end, low, high, mask_rows, mask_step,
        inside, factor, k_row, v_row, drawn, offsets, numbers, limit,
        True, mask is not None or (LEFT and (PREFIX or DROPS)), SIGN, DROPS, TMA, N, D, D_REST, DV, DV_REST,
        WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip

    scale = tl.where(sums == 0.0, 0.0, 1.0 / sums)  # of NaN it is NaN
    if DROPS:
        scale *= kept_scale
    level = top * factor + tl.math.log2(sums)  # -Inf where nothing was seen
    if PARTS > 1:
        numbers = numbers * PARTS + part
        out = o + numbers * V_WIDTH
    else:
        level *= LN2
        out = o + ((batch * rows + first_query + query) * heads + which) * V_WIDTH
    tl.store(lse + numbers, level, mask=inside)
    put(out, total, scale, inside, 0, DV, V_WIDTH)
    if DV_REST:
        put(out, rest, scale, inside, DV, DV_REST, V_WIDTH)


@triton.jit
def put(out, total, scale, inside, FROM: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr):
    """The columns of o from FROM on: `total` times `scale`, and 0 where the scale is, whatever the total."""
    found = tl.where((scale == 0.0)[:, None], 0.0, total * scale[:, None])
    columns = FROM + tl.arange(0, DV)
    there = inside[:, None] if FROM + DV <= V_WIDTH else inside[:, None] & (columns < V_WIDTH)[None, :]
    tl.store(out[:, None] + columns[None, :], found.to(out.dtype.element_ty), mask=there)


def columns_of(facts: TensorFacts, whole: bool) -> tuple[int, int]:
    """How many columns of a head are in one tile, and how many in a second, where two powers of two are fewer than
    one: 64 and 16 of 72. `whole`: in one tile."""
    wide = width_of(facts)
    rest = max(16, power_of_2_at_least(facts.columns - wide // 2))
    return (wide // 2, rest) if not whole and 32 < wide > wide // 2 + rest else (wide, 0)


def forward(call: Call, config: Config) -> Launch | list[Launch]:
    """o, lse, and the random state where it is saved."""
    q, k, v = call.q, call.k, call.v
    pack, parts = packed_heads(call), config.parts
    batch = q.shape[0] if len(q.shape) == 4 else 1
    count, unit = arguments.tiles_of(call, config.m, pack), arguments.unit_of(q, k, v)
    tensors: dict[str, Argument] = {name: call.tensors[name] for name in ("q", "k", "v", "o", "lse", "state")}
    if parts > 1:
        tensors |= parted(call, parts)
    drops = call.dropout_p > 0.0
    (wide, rest), (v_wide, v_rest) = (columns_of(facts, bool(config.tma)) for facts in (q, v))
    args: dict[str, Argument] = {
        **tensors,
        **{name: call.tensors[name] if drops else None for name in ("seed", "offset", "state")},
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.mask_arguments(call), **arguments.heads_of(call), **arguments.number_arguments(call),
        "tiles": count,
    }  # fmt: skip
    constants = {
        **arguments.mask_constants(call), "DROPS": drops, "SIGN": arguments.sign_of(call),
        "TMA": bool(config.tma), "PACK": pack, "PARTS": parts,
        "M": config.m, "N": config.n, "D": wide, "D_REST": rest, "DV": v_wide, "DV_REST": v_rest,
        "WIDTH": q.columns, "V_WIDTH": v.columns, "UNIT": unit,
        "PRECISION": precision(call), "PDL": parts > 1 and follows(call),
    }  # fmt: skip
    programs = count * batch * (q.shape[-2] // pack) * parts
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    workspace = Scratch("descriptors", (programs * 2 * DESCRIPTOR,), torch.uint8) if config.tma else None
    made = Launch(attention_forward, (programs, 1, 1), args, constants, options, workspace=workspace)
    if parts == 1:
        return made
    return [made, merge(call, parts, tensors)]


@triton.jit(do_not_specialize=["rows", "total"])
def attention_merge(
    part_o, part_lse, o, lse, rows, heads, total, v_width,
    PARTS: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of o and of lse from those of their parts. It is on the chip before the last of them is done (PDL)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    parts, columns, inside = tl.arange(0, PARTS), tl.arange(0, DV), number < total
    place = number[:, None] * PARTS + parts[None, :]
    levels = tl.load(part_lse + place, mask=inside[:, None], other=0.0)
    top = tl.max(levels, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.math.exp2(levels - base[:, None])
    there = inside[:, None] & (columns < v_width)[None, :]
    values = tl.load(part_o + place[:, :, None] * v_width + columns[None, None, :], mask=there[:, None, :], other=0.0)
    whole = tl.sum(weights, 1)
    found = tl.sum(values * weights[:, :, None], 1) * tl.where(whole == 0.0, 0.0, 1.0 / whole)[:, None]
    tl.store(lse + number, (base + tl.math.log2(whole)) * LN2, mask=inside)
    query, which = number % rows, number // rows
    token = which // heads * rows + query
    out = o + ((token * heads + which % heads) * v_width)[:, None] + columns[None, :]
    tl.store(out, found.to(o.dtype.element_ty), mask=there)


def parted(call: Call, parts: int) -> dict[str, Argument]:
    """o and lse of the parts of each row."""
    lines = call.lse.numel * parts
    return {"o": Scratch("part_o", (lines, call.v.columns)), "lse": Scratch("part_lse", (lines,))}


def merge(call: Call, parts: int, found: dict[str, Argument]) -> Launch:
    """The launch that makes o and lse of them: about 4096 numbers a program of four warps."""
    q, wide, total = call.q, width_of(call.v), call.lse.numel
    rows = max(1, 4096 // (parts * wide))
    args: dict[str, Argument] = {"part_o": found["o"], "part_lse": found["lse"], "o": call.o, "lse": call.lse}
    args |= {"rows": q.shape[-3], "heads": q.shape[-2], "total": total, "v_width": call.v.columns}
    pdl = follows(call)
    constants = {"PARTS": parts, "R": rows, "DV": wide, "PDL": pdl}
    return Launch(attention_merge, (-(-total // rows), 1, 1), args, constants, {"num_warps": 4}, pdl=pdl)


def follows(call: Call) -> bool:
    """Whether the launch that merges may start while parts are still at work: it waits itself, as they say early."""
    return call.device.kind == "cuda" and call.device.sm >= 90
