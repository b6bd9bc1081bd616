"""The launches of attention's Triton gradients that go over rows, before those that go over tiles: what of a forward
pass the tiles need, and by which power of 2 score gradients are told in fp16.

A factor of a product is of half precision, and fp16 has neither the room for score gradients of large gradients nor
for weights among many: gradients would be finite where their terms are not. So there weights are told in units of
2^-WEIGHT_BITS, and score gradients times a power of 2, for which `attention_norms` and `attention_delta` leave the
norms of v and do: |dP| is not above their product. What is not finite counts for nothing there, nor do rows that see
nothing and keys that nobody sees; a tensor as a mask tells the latter too late. bf16 has the range of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.attention import arguments

LOG2E = tl.constexpr(arguments.LOG2E)
WEIGHT_BITS = 10
"""fp16 then holds weights down to 2^-24 in full precision."""
GRADIENT_BITS = 15
"""Score gradients, in the power of 2 that is chosen for them, are below 2^this, and rounding may double none."""
FEWER = tl.constexpr(WEIGHT_BITS)
ROOM = tl.constexpr(GRADIENT_BITS - WEIGHT_BITS)


@triton.jit(do_not_specialize=["rows", "heads", "total", "apart"])
def attention_delta(
    do, o, lse, dlse, stats, norms, do_batch, do_row, do_head, do_step, o_batch, o_row, o_head, o_step,
    lse_batch, lse_head, lse_row, dlse_batch, dlse_head, dlse_row, rows, heads, total, apart,
    R: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """stats[0] = lse, of half precision in powers of 2, and Inf where a row sees nothing, so that its weights are 0;
    stats[1] = delta - dlse; with `norms` also stats[2] = |do|, these two 0 where a row sees nothing, whatever it
    holds."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    mask = number < total
    row, which = number % rows, number // rows
    batch, head = which // heads, which % heads
    value = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, mask=mask, other=0.0)
    blind = value == float("-inf")
    if o.dtype.element_ty != tl.float32:
        value *= LOG2E
    tl.store(stats + number, tl.where(blind, float("inf"), value), mask=mask)
    found, squares = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    if dlse is not None:
        found -= tl.load(dlse + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=mask, other=0.0)
    if do is not None:
        columns = tl.arange(0, DV)
        there = mask[:, None] & (columns < V_WIDTH)[None, :]
        at = (batch * do_batch + row * do_row + head * do_head) * UNIT
        grad = do + at[:, None] + (columns if do_step is None else columns.to(tl.int64) * do_step)[None, :]
        at = (batch * o_batch + row * o_row + head * o_head) * UNIT
        out = o + at[:, None] + (columns if o_step is None else columns.to(tl.int64) * o_step)[None, :]
        upstream = tl.load(grad, mask=there, other=0.0).to(tl.float32)
        found += tl.sum(upstream * tl.load(out, mask=there, other=0.0), 1)
        squares += tl.sum(upstream * upstream, 1)
    tl.store(stats + apart + number, tl.where(blind, 0.0, found), mask=mask)
    if norms is not None:
        tl.store(stats + 2 * apart + number, tl.where(blind, 0.0, tl.sqrt(squares)), mask=mask)


@triton.jit(do_not_specialize=["rows", "heads", "total"])
def attention_norms(
    v, norms, v_batch, v_row, v_head, rows, heads, total,
    R: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """norms [B, Hkv, Sk] = |v|."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    mask, columns = number < total, tl.arange(0, DV)
    row, which = number % rows, number // rows
    at = (which // heads * v_batch + row * v_row + which % heads * v_head) * UNIT
    there = mask[:, None] & (columns < V_WIDTH)[None, :]
    values = tl.load(v + at[:, None] + columns[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(norms + number, tl.sqrt(tl.sum(values * values, 1)), mask=mask)


@triton.jit
def largest(at, first, end, CHUNK: tl.constexpr):
    """Of the absolute values of at[first:end] that are finite; 0 of none."""
    found = tl.zeros([CHUNK], tl.float32)
    for turn in tl.range(0, tl.maximum(tl.cdiv(end - first, CHUNK), 0)):
        place = first + turn * CHUNK + tl.arange(0, CHUNK)
        value = tl.abs(tl.load(at + place, mask=place < end, other=0.0))
        found = tl.maximum(found, tl.where(value < float("inf"), value, 0.0))
    return tl.max(found, 0)


@triton.jit
def lifted(bound, ROOM: tl.constexpr):
    """The power of 2 c for which c * bound is below 2^ROOM, and not below half of that; and what undoes it and the unit
    of weights."""
    exponent = ((bound.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    exponent = tl.minimum(tl.maximum(ROOM - 1 - exponent, -100), 100)
    up = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    down = ((127 - exponent - FEWER) << 23).to(tl.float32, bitcast=True)
    return up, down
