"""Tiles of pairs of columns in Triton, as the rotary kernels share them: [TOKENS, HEADS, HALF] of each of a pair.

Where a token lies is told by strides of batch and token; columns are `step` apart (None: 1).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(tokens, seq):
    """The sequence of each token, and its place there. The division is of 32 bits: one of 64 costs much more."""
    counted = tokens.to(tl.uint32)
    each = seq.to(tl.uint32)
    return (counted // each).to(tl.int64), (counted % each).to(tl.int64)


@triton.jit
def spot(tokens, seq, batch, stride):
    """Offsets of tokens, counted over all sequences of `seq`."""
    sequence, token = divide(tokens, seq)
    return sequence * batch + token * stride


@triton.jit
def load_pair(base, place, start, half, mask, step, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Columns `start`.. of the first and of the second of each pair, in float32."""
    if INTERLEAVED:
        columns = 2 * start + tl.arange(0, 2 * HALF)[None, None, :]
        inside = mask & (columns < 2 * half)
        both = tl.load(base + place + (columns if step is None else columns * step), mask=inside, other=0.0)
        both = both.to(tl.float32)
        return tl.split(tl.reshape(both, [both.shape[0], both.shape[1], HALF, 2]))
    else:
        columns = start + tl.arange(0, HALF)[None, None, :]
        inside = mask & (columns < half)
        second = columns + half
        first = tl.load(base + place + (columns if step is None else columns * step), mask=inside, other=0.0)
        other = tl.load(base + place + (second if step is None else second * step), mask=inside, other=0.0)
        return first.to(tl.float32), other.to(tl.float32)


@triton.jit
def store_pair(base, place, start, half, mask, first, second, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Into dense heads, rounded once."""
    if INTERLEAVED:
        columns = 2 * start + tl.arange(0, 2 * HALF)[None, None, :]
        both = tl.join(first, second)
        both = tl.reshape(both, [both.shape[0], both.shape[1], 2 * HALF])
        tl.store(base + place + columns, both.to(base.dtype.element_ty), mask=mask & (columns < 2 * half))
    else:
        columns = start + tl.arange(0, HALF)[None, None, :]
        inside = mask & (columns < half)
        tl.store(base + place + columns, first.to(base.dtype.element_ty), mask=inside)
        tl.store(base + place + columns + half, second.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_rest(base, place, start, width, mask, step, BLOCK: tl.constexpr):
    """Columns that are not turned, and which of them exist."""
    columns = start + tl.arange(0, BLOCK)[None, None, :]
    inside = mask & (columns < width)
    values = tl.load(base + place + (columns if step is None else columns * step), mask=inside, other=0.0)
    return values.to(tl.float32), columns, inside


@triton.jit
def table_row(position_ids, tokens, seq, ids_batch, ids_stride, token_mask, table_rows):
    """The row of each token in the tables, and whether there is one; a token without reads row 0."""
    if position_ids is None:
        rows = (tokens.to(tl.uint32) % seq.to(tl.uint32)).to(tl.int64)
    else:
        place = spot(tokens, seq, ids_batch, ids_stride)
        rows = tl.load(position_ids + place, mask=token_mask, other=0).to(tl.int64)
    known = (rows >= 0) & (rows < table_rows)
    return tl.where(known, rows, 0), known


@triton.jit
def load_angles(
    cos, sin, rows, start, half, mask, cos_row, cos_step, sin_row, sin_step, BACK: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """[TOKENS, 1, HALF] cosines and sines, the sines negated for the way back."""
    columns = start + tl.arange(0, HALF)[None, None, :]
    inside = mask & (columns < half)
    c = tl.load(cos + rows * cos_row + (columns if cos_step is None else columns * cos_step), mask=inside, other=0.0)
    s = tl.load(sin + rows * sin_row + (columns if sin_step is None else columns * sin_step), mask=inside, other=0.0)
    c, s = c.to(tl.float32), s.to(tl.float32)
    return c, -s if BACK else s


@triton.jit
def load_weight(weight, start, half, offset, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """[1, 1, HALF] weights of the first and of the second of each pair, the offset added."""
    index = start + tl.arange(0, HALF)[None, None, :]
    inside = index < half
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart = 1 if INTERLEAVED else half
    first = tl.load(weight + index * step, mask=inside, other=0.0).to(tl.float32) + offset
    second = tl.load(weight + index * step + apart, mask=inside, other=0.0).to(tl.float32) + offset
    return first, second
