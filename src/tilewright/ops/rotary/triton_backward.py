"""How Triton runs the gradient of qkv_split_rope. What it means is said by its definition.

As in the forward a program takes tokens and heads of one part; where weight gradients are wanted it takes every so
many-th tile of its part, and leaves a row of partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.rotary.places import head_places, tokens_of
from tilewright.ops.rotary.split import head_width
from tilewright.ops.rotary.triton import halves, table_arguments
from tilewright.ops.rotary.triton import tile as tile_of
from tilewright.ops.rotary.triton_tiles import (
    load_angles,
    load_pair,
    load_rest,
    load_weight,
    spot,
    store_pair,
    table_row,
)
from tilewright.ops.triton_rows import sum_groups


@triton.jit
def turn_back(
    dy, place, cos, sin, rows, known, start, half, mask, token_mask, step, cos_row, cos_step, sin_row, sin_step,
    TURN: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """dz of a tile of pairs."""
    first, second = load_pair(dy, place, start, half, mask, step, INTERLEAVED, HALF)
    if TURN:
        c, s = load_angles(cos, sin, rows, start, half, token_mask, cos_row, cos_step, sin_row, sin_step, True, HALF)
        turned = tl.where(known, first * c - second * s, 0.0)
        second = tl.where(known, second * c + first * s, 0.0)
        first = turned
    return first, second


@triton.jit
def add_up(sums, first, second, start, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Adds a tile of pairs, over tokens and heads, to a row of sums that is this program's own. The barrier is for what
    another of its threads may read next."""
    index = start + tl.arange(0, HALF)
    inside = index < half
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart = 1 if INTERLEAVED else half
    place = sums + index * step
    tl.store(place, tl.load(place, mask=inside) + tl.sum(tl.sum(first, axis=0), axis=0), mask=inside)
    place += apart
    tl.store(place, tl.load(place, mask=inside) + tl.sum(tl.sum(second, axis=0), axis=0), mask=inside)
    tl.debug_barrier()


@triton.jit
def part_back(
    dy, place, x, x_place, weight, rstd, r_place, cos, sin, out, out_place, sums, first_sum, second_sum, rows, known,
    half, width, divisor, mask, token_mask, step, x_step, cos_row, cos_step, sin_row, sin_step, offset,
    TURN: tl.constexpr, NORM: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr,
    INTERLEAVED: tl.constexpr, ONE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of heads. Returns what the weight's gradient has come to where heads are ONE tile; else it is added to
    `sums`, a row that is this program's own."""
    if NORM:
        r = tl.load(rstd + r_place, mask=mask, other=0.0)
    if ONE:
        first, second = turn_back(
            dy, place, cos, sin, rows, known, 0, half, mask, token_mask, step, cos_row, cos_step, sin_row, sin_step,
            TURN, INTERLEAVED, HALF,
        )  # fmt: skip
        if NORM:
            x1, x2 = load_pair(x, x_place, 0, half, mask, x_step, INTERLEAVED, HALF)
            n1, n2 = x1 * r, x2 * r
            if NEEDS_DW:
                first_sum += first * n1
                second_sum += second * n2
            w1, w2 = load_weight(weight, 0, half, offset, INTERLEAVED, HALF)
            first, second = first * w1, second * w2
            mean = tl.sum(first * n1 + second * n2, axis=2, keep_dims=True) / divisor
            first, second = r * (first - n1 * mean), r * (second - n2 * mean)
        if NEEDS_DX:
            store_pair(out, out_place, 0, half, mask, first, second, INTERLEAVED, HALF)
    else:
        turned = 2 * half if TURN else 0
        if NORM:
            total = tl.zeros([mask.shape[0], mask.shape[1], 1], tl.float32)
            if TURN:
                for start in tl.range(0, half, HALF):
                    first, second = turn_back(
                        dy, place, cos, sin, rows, known, start, half, mask, token_mask, step,
                        cos_row, cos_step, sin_row, sin_step, TURN, INTERLEAVED, HALF,
                    )  # fmt: skip
                    x1, x2 = load_pair(x, x_place, start, half, mask, x_step, INTERLEAVED, HALF)
                    first, second = first * (x1 * r), second * (x2 * r)
                    if NEEDS_DW:
                        add_up(sums, first, second, start, half, INTERLEAVED, HALF)
                    w1, w2 = load_weight(weight, start, half, offset, INTERLEAVED, HALF)
                    total += tl.sum(first * w1 + second * w2, axis=2, keep_dims=True)
            for start in tl.range(turned, width, BLOCK):
                value, columns, inside = load_rest(dy, place, start, width, mask, step, BLOCK)
                if TURN:
                    value = tl.where(known, value, 0.0)
                other, _, _ = load_rest(x, x_place, start, width, mask, x_step, BLOCK)
                value *= other * r
                if NEEDS_DW:
                    index = start + tl.arange(0, BLOCK)
                    spots = sums + index
                    added = tl.sum(tl.sum(value, axis=0), axis=0)
                    tl.store(spots, tl.load(spots, mask=index < width) + added, mask=index < width)
                    tl.debug_barrier()
                w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
                total += tl.sum(value * w, axis=2, keep_dims=True)
            mean = total / divisor
        if NEEDS_DX:
            if TURN:
                for start in tl.range(0, half, HALF):
                    first, second = turn_back(
                        dy, place, cos, sin, rows, known, start, half, mask, token_mask, step,
                        cos_row, cos_step, sin_row, sin_step, TURN, INTERLEAVED, HALF,
                    )  # fmt: skip
                    if NORM:
                        x1, x2 = load_pair(x, x_place, start, half, mask, x_step, INTERLEAVED, HALF)
                        w1, w2 = load_weight(weight, start, half, offset, INTERLEAVED, HALF)
                        first = r * (first * w1 - x1 * r * mean)
                        second = r * (second * w2 - x2 * r * mean)
                    store_pair(out, out_place, start, half, mask, first, second, INTERLEAVED, HALF)
            for start in tl.range(turned, width, BLOCK):
                value, columns, inside = load_rest(dy, place, start, width, mask, step, BLOCK)
                if TURN:
                    value = tl.where(known, value, 0.0)
                if NORM:
                    other, _, _ = load_rest(x, x_place, start, width, mask, x_step, BLOCK)
                    w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
                    value = r * (value * w - other * r * mean)
                tl.store(out + out_place + columns, value.to(out.dtype.element_ty), mask=inside)
    return first_sum, second_sum


@triton.jit
def write_sums(sums, first, second, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """A program's partial sums, of tiles of pairs [TOKENS, HEADS, HALF]."""
    index = tl.arange(0, HALF)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart = 1 if INTERLEAVED else half
    tl.store(sums + index * step, tl.sum(tl.sum(first, axis=0), axis=0), mask=index < half)
    tl.store(sums + index * step + apart, tl.sum(tl.sum(second, axis=0), axis=0), mask=index < half)


@triton.jit
def clear(base, width, BLOCK: tl.constexpr):
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(base + columns, tl.zeros([BLOCK], tl.float32), mask=columns < width)


@triton.jit(do_not_specialize=["total_tokens", "seq", "table_rows", "q_heads", "kv_heads", "groups"])
def rotate_back(
    dq, dk, dv, cos, sin, qkv, rstd, q_norm, k_norm, position_ids, dqkv, partials,
    dq_batch, dq_token, dq_head, dq_step, dk_batch, dk_token, dk_head, dk_step, dv_batch, dv_token, dv_head, dv_step,
    x_batch, x_token, x_head, x_step, cos_row, cos_step, sin_row, sin_step, ids_batch, ids_token,
    total_tokens, seq, table_rows, half, width, divisor, q_heads, kv_heads, offset, groups,
    TURN: tl.constexpr, INTERLEAVED: tl.constexpr, ONE: tl.constexpr, NEEDS_DX: tl.constexpr,
    NEEDS_DQ_NORM: tl.constexpr, NEEDS_DK_NORM: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Axis 1 of the grid is the part. A part without an upstream gradient is 0."""
    part = tl.program_id(1)
    heads = tl.where(part == 0, q_heads, kv_heads)
    before = tl.where(part == 0, 0, q_heads + (part - 1) * kv_heads)
    blocks = tl.cdiv(heads, HEADS)
    tiles = tl.cdiv(total_tokens, TOKENS) * blocks
    SUMS: tl.constexpr = NEEDS_DQ_NORM or NEEDS_DK_NORM
    BOTH: tl.constexpr = NEEDS_DQ_NORM and NEEDS_DK_NORM
    sums = partials
    if SUMS:
        sums = partials + tl.program_id(0).to(tl.int64) * width
        if BOTH:
            sums += tl.where(part == 0, 0, groups * width)
    mine = ((part == 0) & NEEDS_DQ_NORM) | ((part == 1) & NEEDS_DK_NORM)
    if SUMS and not ONE:
        if mine:
            clear(sums, width, BLOCK)
        tl.debug_barrier()  # others of the program's threads add to it
    first_sum = tl.zeros([TOKENS, HEADS, HALF] if SUMS and ONE else [1, 1, 1], tl.float32)
    second_sum = first_sum
    for tile in tl.range(tl.program_id(0).to(tl.int64), tiles, groups):
        counted = tl.cast(tile, tl.uint32)
        across = tl.cast(blocks, tl.uint32)
        tokens = (counted // across).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        head = (counted % across).to(tl.int64) * HEADS + tl.arange(0, HEADS)[None, :, None]
        token_mask = tokens < total_tokens
        mask = token_mask & (head < heads)
        out_place = (tokens * (q_heads + 2 * kv_heads) + before + head) * width
        r_place = tokens * (q_heads + kv_heads) + before + head
        x_place = spot(tokens, seq, x_batch, x_token) + (before + head) * x_head
        rows, known = tokens, token_mask
        if TURN:
            rows, known = table_row(position_ids, tokens, seq, ids_batch, ids_token, token_mask, table_rows)
        if part == 0:
            if dq is not None:
                first_sum, second_sum = part_back(
                    dq, spot(tokens, seq, dq_batch, dq_token) + head * dq_head, qkv, x_place, q_norm, rstd, r_place,
                    cos, sin, dqkv, out_place, sums, first_sum, second_sum, rows, known, half, width, divisor, mask,
                    token_mask, dq_step, x_step, cos_row, cos_step, sin_row, sin_step, offset,
                    TURN, q_norm is not None, NEEDS_DX, NEEDS_DQ_NORM, INTERLEAVED, ONE, HALF, BLOCK,
                )  # fmt: skip
            elif NEEDS_DX:
                zero(dqkv, out_place, width, mask, BLOCK)
        if part == 1:
            if dk is not None:
                first_sum, second_sum = part_back(
                    dk, spot(tokens, seq, dk_batch, dk_token) + head * dk_head, qkv, x_place, k_norm, rstd, r_place,
                    cos, sin, dqkv, out_place, sums, first_sum, second_sum, rows, known, half, width, divisor, mask,
                    token_mask, dk_step, x_step, cos_row, cos_step, sin_row, sin_step, offset,
                    TURN, k_norm is not None, NEEDS_DX, NEEDS_DK_NORM, INTERLEAVED, ONE, HALF, BLOCK,
                )  # fmt: skip
            elif NEEDS_DX:
                zero(dqkv, out_place, width, mask, BLOCK)
        if NEEDS_DX:
            if part == 2:
                if dv is not None:
                    part_back(
                        dv, spot(tokens, seq, dv_batch, dv_token) + head * dv_head, qkv, x_place, k_norm, rstd,
                        r_place, cos, sin, dqkv, out_place, sums, first_sum, second_sum, rows, known, half, width,
                        divisor, mask, token_mask, dv_step, x_step, cos_row, cos_step, sin_row, sin_step, offset,
                        False, False, True, False, False, ONE, HALF, BLOCK,
                    )  # fmt: skip
                else:
                    zero(dqkv, out_place, width, mask, BLOCK)
    if SUMS and ONE:
        if mine:
            write_sums(sums, first_sum, second_sum, half, INTERLEAVED, HALF)


@triton.jit
def zero(out, place, width, mask, BLOCK: tl.constexpr):
    for start in tl.range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, None, :]
        inside = mask & (columns < width)
        tl.store(out + place + columns, tl.zeros(inside.shape, out.dtype.element_ty), mask=inside)


def backward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """qkv_split_rope_backward."""
    width, heads = head_width(call), call.q_heads + 2 * call.kv_heads
    given = next(call[name] for name in ("dq", "dk", "dv") if call.has(name))
    tokens, seq = tokens_of(given)
    half = halves(call, width)
    normed = call.has("q_norm") or call.has("k_norm")
    qkv: TensorFacts | None = call.qkv if normed else None
    args: dict[str, Argument] = {"qkv": qkv, "rstd": call.rstd if normed else None, "dqkv": call.tensors.get("dqkv")}
    x_places = (0, 0, 0) if qkv is None else head_places(qkv, heads)
    args |= dict(zip(("x_batch", "x_token", "x_head"), x_places, strict=True))
    args["x_step"] = None if qkv is None or qkv.column_stride == 1 else qkv.column_stride
    for name in ("dq", "dk", "dv"):
        facts: TensorFacts | None = call.tensors[name]
        places = (0, 0, 0) if facts is None else head_places(facts)
        args |= {name: facts, **dict(zip((f"{name}_batch", f"{name}_token", f"{name}_head"), places, strict=True))}
        args[f"{name}_step"] = None if facts is None or facts.column_stride == 1 else facts.column_stride
    most = max(call.q_heads, call.kv_heads)
    constants = tile_of(config, width, half, most, min(call.q_heads, call.kv_heads))
    constants |= {"TURN": call.has("cos"), "INTERLEAVED": call.style == "interleaved" and call.has("cos")}
    outputs = [facts for name in ("dq_norm", "dk_norm") if (facts := call.tensors.get(name)) is not None]
    constants |= {"NEEDS_DX": call.has("dqkv"), "NEEDS_DQ_NORM": call.has("dq_norm")}
    constants["NEEDS_DK_NORM"] = call.has("dk_norm")
    groups = triton.cdiv(tokens, constants["TOKENS"]) * triton.cdiv(most, constants["HEADS"])
    partials = None
    if outputs:
        groups = min(groups, call.device.multiprocessors * config.per_sm)
        partials = Scratch("partials", (len(outputs), groups, width))
    args |= {"q_norm": call.q_norm, "k_norm": call.k_norm, **table_arguments(call), "partials": partials}
    args |= {"total_tokens": tokens, "seq": seq, "half": half, "width": width, "divisor": float(width)}
    args |= {"q_heads": call.q_heads, "kv_heads": call.kv_heads, "offset": call.norm_offset, "groups": groups}
    parts = 3 if call.has("dqkv") else 2
    launch = Launch(rotate_back, (groups, parts, 1), args, constants, {"num_warps": config.num_warps})
    return launch if partials is None else (launch, sum_groups(call, partials, *outputs))
