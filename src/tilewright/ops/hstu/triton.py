"""How Triton runs silu_attention and hstu_attention: a tile of queries a program, which walks the keys that it sees.

Keys that every row of a tile sees need no mask; those at the edges, and the diagonal of rows that see themselves apart
(targets), are walked after them. Packed sequences go from the longest to the shortest. With TMA, keys and values come
through descriptors that end where the sequence does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.triton_functions import activation
from tilewright.ops.attention.configs import width_of
from tilewright.ops.hstu import arguments
from tilewright.ops.hstu.configs import by_descriptor
from tilewright.ops.hstu.triton_tiles import add_product, hstu_order, inverse, keys_of, place_of, room_for, tile_of
from tilewright.ops.triton_scores import DESCRIPTOR, kept, precision


@triton.jit
def walk(
    q, k, v, total, power, turns, begin, split, resume, split2, again, end, low, high, query, mask_rows, mask_step,
    inside, alpha, k_row, v_row, seed, offset, numbers, limit,
    MASKED: tl.constexpr, SELF: tl.constexpr, DROPS: tl.constexpr, LIFTS: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total + P v over `turns` tiles of keys: `split` from key `begin` on, up to `split2` from `resume`, the others
    from `again`. SELF: a row sees itself too."""
    for turn in tl.range(0, turns):
        first = begin + turn * N
        if MASKED:
            first = tl.where(turn < split, first, resume + (turn - split) * N)
            first = tl.where(turn < split2, first, again + (turn - split2) * N)
        keys = tile_of(k, first, end, k_row, None, MASKED, TMA, N, D, WIDTH)
        x = tl.dot(q, keys.T, input_precision=PRECISION) * alpha
        p = activation(x, "silu")
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
                p *= factor
            p = tl.where(seen, p, 0.0)
        if DROPS:
            p = tl.where(kept(seed, offset, numbers, first, limit, N), p, 0.0)
        values = tile_of(v, first, end, v_row, None, MASKED, TMA, N, DV, V_WIDTH)
        if mask_rows is not None:  # what nobody sees may hold anything
            some = tl.max(seen.to(tl.int32), 0) > 0
            values = tl.where(some[:, None], values, 0.0)
        total, power = add_product(total, power, p, values, LIFTS, PRECISION)
    return total, power


@triton.jit(
    do_not_specialize=["rows", "keys", "count", "tiles", "heads", "shared", "window", "tail", "limit", "factor_step"]
)
def hstu_forward(
    q, k, v, order, seq_offsets, num_targets, attn_scale, mask, seed, offset, o, state,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    mask_batch, mask_head, mask_row, mask_step, factor_step, count, rows, keys, tiles, heads, shared, window, tail,
    alpha, post, limit, kept_scale,
    CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, LIFTS: tl.constexpr,
    TMA: tl.constexpr, UNIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of M rows of one head."""
    unit = tl.full((), UNIT, tl.int64)  # not the number itself: a stride that fits 32 bits may not when multiplied
    q_batch, q_row, q_head = q_batch * unit, q_row * unit, q_head * unit
    k_batch, k_row, k_head = k_batch * unit, k_row * unit, k_head * unit
    v_batch, v_row, v_head = v_batch * unit, v_row * unit, v_head * unit
    drawn, offsets = 0, 0
    if DROPS:
        drawn = tl.load(seed)
        offsets = drawn * 0
        if offset is not None:
            offsets = tl.load(offset)
        if state is not None:
            if tl.program_id(0) == 0:
                tl.store(state, drawn)
                tl.store(state + 1, offsets)
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
    v_columns = tl.arange(0, DV)
    store = inside[:, None] if V_WIDTH == DV else inside[:, None] & (v_columns < V_WIDTH)[None, :]
    line = batch * rows + token + query
    out = o + (line * heads + head)[:, None] * V_WIDTH + v_columns[None, :]

    there, targets = length, 0
    if JAGGED:
        if n == count:  # behind the last sequence there is nothing to see
            tl.store(out, tl.zeros([M, DV], tl.float32).to(o.dtype.element_ty), mask=store)
            return
        if num_targets is not None:
            targets = tl.load(num_targets + n).to(tl.int32)
    else:
        there = keys.to(tl.int32)
    low, high, start, before, edge, main, again, cut, whole, turns = keys_of(
        query, inside, begin, length, there, targets, shared, window, tail,
        JAGGED, CAUSAL, CONTEXT, WINDOW, DROPS, mask is not None, M, N,
    )  # fmt: skip

    q_place = q + batch * q_batch + (token + query) * q_row + head * q_head
    q_mask = inside[:, None] if WIDTH == D else inside[:, None] & (columns < WIDTH)[None, :]
    mine = tl.load(q_place[:, None] + columns[None, :], mask=q_mask, other=0.0)
    at_k = k + batch * k_batch + token * k_row + head * k_head
    at_v = v + batch * v_batch + token * v_row + head * v_head
    if TMA:
        lines = tl.maximum(there, 1)
        at_k = tl.make_tensor_descriptor(at_k, [lines, WIDTH], [k_row, 1], [N, D])
        at_v = tl.make_tensor_descriptor(at_v, [lines, V_WIDTH], [v_row, 1], [N, DV])
    mask_rows = None
    if mask is not None:
        mask_rows = mask + batch * mask_batch + head * mask_head + query.to(tl.int64) * mask_row
    numbers = head * rows + token + query  # of rows of dropout: of packed tokens alone

    total = tl.zeros([M, DV], tl.float32)
    power = room_for(M)
    if mask is None:
        total, power = walk(
            mine, at_k, at_v, total, power, turns, whole, 0, 0, 0, 0, there, low, high, query, mask_rows,
            mask_step, inside, alpha, k_row, v_row, drawn, offsets, numbers, limit,
            False, JAGGED, DROPS, LIFTS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
        )  # fmt: skip
    total, power = walk(
        mine, at_k, at_v, total, power, cut, start, before, edge, main, again, there, low, high, query, mask_rows,
        mask_step, inside, alpha, k_row, v_row, drawn, offsets, numbers, limit,
        True, JAGGED, DROPS, LIFTS, TMA, N, D, DV, WIDTH, V_WIDTH, PRECISION,
    )  # fmt: skip
    if LIFTS:
        total *= inverse(power)[:, None]
    if DROPS:
        total *= kept_scale
    if attn_scale is not None:
        total *= tl.load(attn_scale + (token + query) * factor_step, mask=inside, other=0.0)[:, None]
    else:
        total *= post
    tl.store(out, total.to(o.dtype.element_ty), mask=store)


def forward(call: Call, config: Config) -> list[Launch]:
    """o, and the random state where it is saved."""
    q, k, v = call.q, call.k, call.v
    unit = arguments.unit_of(q, k, v)
    stages, order = ordered(call, config.m, "order")
    descriptors = bool(config.tma) and by_descriptor(call, "k", "v")
    args: dict[str, Argument] = {
        **{name: call.tensors[name] for name in ("q", "k", "v")}, "order": order, **arguments.tensors(call),
        **{name: call.tensors.get(name) for name in ("seed", "offset", "o", "state")},
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.numbers(call, config.m),
    }  # fmt: skip
    constants = {
        **arguments.constants(call), "TMA": descriptors, "UNIT": unit, "M": config.m, "N": config.n,
        "D": width_of(q), "DV": width_of(v), "WIDTH": q.columns, "V_WIDTH": v.columns, "PRECISION": precision(call),
    }  # fmt: skip
    programs = arguments.programs(call, q, config.m)
    workspace = Scratch("descriptors", (programs * 2 * DESCRIPTOR,), torch.uint8) if descriptors else None
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return [*stages, Launch(hstu_forward, (programs, 1, 1), args, constants, options, workspace=workspace)]


def ordered(call: Call, rows: int, name: str) -> tuple[list[Launch], Scratch | None]:
    """What puts packed sequences in order, by tiles of so many rows."""
    if "seq_offsets" not in call.tensors:
        return [], None
    count = call.seq_offsets.shape[0] - 1
    order = Scratch(name, (2, count + 1), torch.int32)
    args: dict[str, Argument] = {"seq_offsets": call.seq_offsets, "order": order, "count": count}
    return [Launch(hstu_order, (count + 1, 1, 1), args, {"M": rows}, {"num_warps": 4})], order
