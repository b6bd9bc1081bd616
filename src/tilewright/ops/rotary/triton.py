"""How Triton turns heads: rope either way, and the forward of qkv_split_rope. What they mean is said by their
definitions.

A program takes some tokens and some heads of one part (q, k or v), so that a row of the tables serves many heads. Heads
that are turned whole, and fit a tile, are read once; others are walked, twice where they are normalised.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, TorchStep
from tilewright.ops.rotary.places import head_places, merged, tokens_of
from tilewright.ops.rotary.split import head_width
from tilewright.ops.rotary.triton_tiles import (
    divide,
    load_angles,
    load_pair,
    load_rest,
    load_weight,
    spot,
    store_pair,
    table_row,
)

WIDEST_HALF = 256
CACHE_ARGUMENTS = (
    "pos", "rope_pos", "pos_stride", "rope_stride", "cache_rows", "k_batch", "k_token", "k_head", "v_batch", "v_token",
    "v_head",
)  # fmt: skip
WALK = 128
"""Columns at a time of what is walked."""


@triton.jit
def squares(x, place, half, width, mask, step, BLOCK: tl.constexpr):
    """The sum of squares of each head [TOKENS, HEADS, 1]."""
    value, _, _ = load_rest(x, place, 0, width, mask, step, BLOCK)
    total = tl.sum(value * value, axis=2, keep_dims=True)
    for start in tl.range(BLOCK, width, BLOCK):
        value, _, _ = load_rest(x, place, start, width, mask, step, BLOCK)
        total += tl.sum(value * value, axis=2, keep_dims=True)
    return total


@triton.jit
def turn_part(
    x, place, cos, sin, weight, out, out_place, rows, known, half, width, divisor, mask, token_mask, step,
    cos_row, cos_step, sin_row, sin_step, eps, offset,
    TURN: tl.constexpr, CHECK: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    ONE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of heads: normalised, turned, stored. Returns 1 / rms [TOKENS, HEADS, 1]."""
    OUTSIDE: tl.constexpr = 0.0 if BACK else float("nan")
    r = tl.full([1, 1, 1], 1.0, tl.float32)
    if ONE:
        first, second = load_pair(x, place, 0, half, mask, step, INTERLEAVED, HALF)
        if NORM:
            total = tl.sum(first * first + second * second, axis=2, keep_dims=True)
            r = tl.math.div_rn(1.0, tl.math.sqrt_rn(total / divisor + eps))
            w1, w2 = load_weight(weight, 0, half, offset, INTERLEAVED, HALF)
            first, second = first * r * w1, second * r * w2
        if TURN:
            c, s = load_angles(cos, sin, rows, 0, half, token_mask, cos_row, cos_step, sin_row, sin_step, BACK, HALF)
            turned = first * c - second * s
            second = second * c + first * s
            first = turned
        if CHECK:
            first, second = tl.where(known, first, OUTSIDE), tl.where(known, second, OUTSIDE)
        store_pair(out, out_place, 0, half, mask, first, second, INTERLEAVED, HALF)
    else:
        if NORM:
            total = squares(x, place, half, width, mask, step, BLOCK)
            r = tl.math.div_rn(1.0, tl.math.sqrt_rn(total / divisor + eps))
        if TURN:
            for start in tl.range(0, half, HALF):
                first, second = load_pair(x, place, start, half, mask, step, INTERLEAVED, HALF)
                if NORM:
                    w1, w2 = load_weight(weight, start, half, offset, INTERLEAVED, HALF)
                    first, second = first * r * w1, second * r * w2
                c, s = load_angles(
                    cos, sin, rows, start, half, token_mask, cos_row, cos_step, sin_row, sin_step, BACK, HALF
                )  # fmt: skip
                turned = tl.where(known, first * c - second * s, OUTSIDE)
                second = tl.where(known, second * c + first * s, OUTSIDE)
                store_pair(out, out_place, start, half, mask, turned, second, INTERLEAVED, HALF)
        for start in tl.range(2 * half if TURN else 0, width, BLOCK):
            value, columns, inside = load_rest(x, place, start, width, mask, step, BLOCK)
            if NORM:
                w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
                value = value * r * w
            if CHECK:
                value = tl.where(known, value, OUTSIDE)
            tl.store(out + out_place + columns, value.to(out.dtype.element_ty), mask=inside)
    return r


@triton.jit(do_not_specialize=["total_tokens", "seq", "table_rows", "q_heads", "kv_heads", "cache_rows"])
def rotate(
    x, cos, sin, position_ids, q_norm, k_norm, q, k, v, rstd, x_batch, x_token, x_head, x_step,
    cos_row, cos_step, sin_row, sin_step, ids_batch, ids_token, total_tokens, seq, table_rows, half, width, divisor,
    q_heads, kv_heads, eps, offset, pos, rope_pos, pos_stride, rope_stride, cache_rows,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    APPEND: tl.constexpr, TURN: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr, ONE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Axis 1 of the grid is the part. Heads of a token lie side by side in x: those of q, of k, of v. APPEND: k and v
    are caches, of which token s of a sequence is row pos + s; what has no row there is not written, and its q NaN."""
    part = tl.program_id(1)
    heads = tl.where(part == 0, q_heads, kv_heads)
    blocks = tl.cdiv(heads, HEADS).to(tl.uint32)
    index = tl.program_id(0).to(tl.uint32)
    tokens = (index // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = (index % blocks).to(tl.int64) * HEADS + tl.arange(0, HEADS)[None, :, None]
    token_mask = tokens < total_tokens
    mask = token_mask & (head < heads)
    before = tl.where(part == 0, 0, q_heads + (part - 1) * kv_heads)
    place = spot(tokens, seq, x_batch, x_token) + (before + head) * x_head
    out_place = (tokens * heads + head) * width
    k_place, v_place, kv_mask, rows, known = out_place, out_place, mask, tokens, token_mask
    if APPEND:
        batch, token = divide(tokens, seq)
        at = token + tl.load(pos + batch * pos_stride, mask=token_mask, other=0).to(tl.int64)
        k_place = batch * k_batch + at * k_token + head * k_head
        v_place = batch * v_batch + at * v_token + head * v_head
        fits = (at >= 0) & (at < cache_rows)
        kv_mask = mask & fits
        rows, known = at, fits
        if rope_pos is not None:
            rows = token + tl.load(rope_pos + batch * rope_stride, mask=token_mask, other=0).to(tl.int64)
        if TURN:
            known = (rows >= 0) & (rows < table_rows)
            rows = tl.where(known, rows, 0)
            known = known & fits
    elif TURN:
        rows, known = table_row(position_ids, tokens, seq, ids_batch, ids_token, token_mask, table_rows)
    if part == 0:
        r = turn_part(
            x, place, cos, sin, q_norm, q, out_place, rows, known, half, width, divisor, mask, token_mask, x_step,
            cos_row, cos_step, sin_row, sin_step, eps, offset,
            TURN, TURN or APPEND, q_norm is not None, BACK, INTERLEAVED, ONE, HALF, BLOCK,
        )  # fmt: skip
        if rstd is not None:
            r = tl.broadcast_to(r, [TOKENS, HEADS, 1])
            tl.store(rstd + tokens * (q_heads + kv_heads) + head, r, mask=mask)
    if k is not None:
        if part == 1:
            r = turn_part(
                x, place, cos, sin, k_norm, k, k_place, rows, known, half, width, divisor, kv_mask, token_mask, x_step,
                cos_row, cos_step, sin_row, sin_step, eps, offset,
                TURN, TURN, k_norm is not None, BACK, INTERLEAVED, ONE, HALF, BLOCK,
            )  # fmt: skip
            if rstd is not None:
                r = tl.broadcast_to(r, [TOKENS, HEADS, 1])
                tl.store(rstd + tokens * (q_heads + kv_heads) + q_heads + head, r, mask=mask)
        if part == 2:
            turn_part(
                x, place, cos, sin, k_norm, v, v_place, rows, known, half, width, divisor, kv_mask, token_mask, x_step,
                cos_row, cos_step, sin_row, sin_step, eps, offset,
                False, False, False, BACK, False, ONE, HALF, BLOCK,
            )  # fmt: skip


def table_arguments(call: Call) -> dict[str, Argument]:
    """Where the tables and the ids lie."""
    found: dict[str, Argument] = {}
    for name in ("cos", "sin"):
        facts: TensorFacts | None = call.tensors[name]
        found[name] = facts
        found[f"{name}_row"] = 0 if facts is None else facts.stride[0]
        found[f"{name}_step"] = None if facts is None or facts.column_stride == 1 else facts.column_stride
    ids: TensorFacts | None = call.tensors.get("position_ids")
    lead = None if ids is None else merged(ids, 1)
    found |= {"position_ids": ids, "ids_batch": lead[1] if lead else 0}
    found["ids_token"] = 0 if ids is None else ids.stride[-1]
    found["table_rows"] = call.cos.shape[0] if call.has("cos") else 0
    return found


def tile(config: Config, width: int, half: int, heads: int, fewer: int = 0) -> dict[str, Any]:
    """The constants that say how large a tile is. Heads turned whole, and not too wide, are one. A part of `fewer`
    heads is to leave few threads idle."""
    whole = 2 * half == width and half <= WIDEST_HALF
    lanes = triton.next_power_of_2(max(1, half if whole else min(half, WALK // 2)))
    across = min(config.heads, triton.next_power_of_2(heads))
    across = min(across, max(4, triton.next_power_of_2(fewer))) if fewer else across
    elements = max(1, config.elements // (2 * lanes if whole else WALK))
    across = min(across, elements)
    return {"ONE": whole, "HEADS": across, "TOKENS": max(1, elements // across), "HALF": lanes, "BLOCK": WALK}


def halves(call: Call, width: int) -> int:
    """Pairs that are turned; without tables those that a head has, so that it is read whole."""
    return call.cos.shape[1] if call.has("cos") else width // 2


def turned(call: Call, config: Config) -> Launch:
    """rope, and its gradient."""
    name, out = ("dy", "dx") if call.op == "rope_backward" else ("x", "y")
    x: TensorFacts = call[name]
    batch, token, head = head_places(x)
    args: dict[str, Argument] = {"x": x, "q": call[out], "x_batch": batch, "x_token": token, "x_head": head}
    args |= {"q_norm": None, "k_norm": None, "k": None, "v": None, "rstd": None, "eps": 0.0, "offset": 0.0}
    args |= {"q_heads": x.shape[-2], "kv_heads": 0}
    return _launch(call, config, x, args, x.shape[-2], x.columns, tokens_of(x), parts=1)


def split(call: Call, config: Config) -> Launch:
    """qkv_split_rope."""
    qkv: TensorFacts = call.qkv
    heads = call.q_heads + 2 * call.kv_heads
    batch, token, head = head_places(qkv, heads)
    args: dict[str, Argument] = {"x": qkv, "x_batch": batch, "x_token": token, "x_head": head}
    args |= {name: call[name] for name in ("q_norm", "k_norm", "q", "k", "v", "rstd")}
    args |= {"eps": call.norm_eps, "offset": call.norm_offset, "q_heads": call.q_heads, "kv_heads": call.kv_heads}
    most = max(call.q_heads, call.kv_heads)
    return _launch(call, config, qkv, args, most, head_width(call), tokens_of(qkv, False), parts=3)


def append(call: Call, config: Config) -> Launch | tuple[TorchStep, Launch]:
    """qkv_split_rope_append. In place the caches are written by their own strides, and not read."""
    qkv: TensorFacts = call.qkv
    over = bool(call.aliased)
    k, v = (call.k_cache, call.v_cache) if over else (call.k_cached, call.v_cached)
    heads = call.q_heads + 2 * call.kv_heads
    batch, token, head = head_places(qkv, heads)
    args: dict[str, Argument] = {"x": qkv, "x_batch": batch, "x_token": token, "x_head": head}
    args |= {"q_norm": call.q_norm, "k_norm": call.k_norm, "q": call.q, "k": k, "v": v, "rstd": None}
    args |= {"eps": call.norm_eps, "offset": call.norm_offset, "q_heads": call.q_heads, "kv_heads": call.kv_heads}
    args |= {"pos": call.pos, "rope_pos": call.rope_pos, "cache_rows": call.k_cache.shape[-3]}
    for name, facts in (("pos", call.pos), ("rope", call.rope_pos)):
        lead = None if facts is None else merged(facts, 0)
        args[f"{name}_stride"] = lead[1] if lead else 0
    for name, facts in (("k", k), ("v", v)):
        args |= dict(zip((f"{name}_batch", f"{name}_token", f"{name}_head"), head_places(facts), strict=True))
    most = max(call.q_heads, call.kv_heads)
    launch = _launch(call, config, qkv, args, most, head_width(call), tokens_of(qkv, False), parts=3)
    if over:
        return launch
    names = ("k_cache", "v_cache", "k_cached", "v_cached")
    return TorchStep(_copy_caches, {name: call[name] for name in names}), launch


def _copy_caches(k_cache: Tensor, v_cache: Tensor, k_cached: Tensor, v_cached: Tensor) -> None:
    k_cached.copy_(k_cache)
    v_cached.copy_(v_cache)


def _launch(
    call: Call, config: Config, x: TensorFacts, args: dict[str, Argument], heads: int, width: int,
    tokens: tuple[int, int], parts: int,
) -> Launch:  # fmt: skip
    half = halves(call, width)
    constants = tile(config, width, half, heads, 0 if parts == 1 else min(call.q_heads, call.kv_heads))
    constants |= {"TURN": call.has("cos"), "BACK": call.op.endswith("backward")}
    constants["INTERLEAVED"] = call.style == "interleaved" and call.has("cos")
    constants["APPEND"] = "pos" in args
    args = {**dict.fromkeys(CACHE_ARGUMENTS), **args}
    args |= {"x_step": None if x.column_stride == 1 else x.column_stride, **table_arguments(call)}
    args |= {"total_tokens": tokens[0], "seq": tokens[1], "half": half, "width": width}
    args["divisor"] = float(width)
    programs = triton.cdiv(tokens[0], constants["TOKENS"]) * triton.cdiv(heads, constants["HEADS"])
    return Launch(rotate, (programs, parts, 1), args, constants, {"num_warps": config.num_warps})
