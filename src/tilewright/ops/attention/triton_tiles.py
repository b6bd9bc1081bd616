"""What the Triton kernels of attention share: which rows a program has, where they lie, what each may see.

A tile is M rows of packed queries: PACK heads that read the same keys, side by side for each query. Queries are counted
in their sequence, keys too, in 32 bits; what they are multiplied by is 64. A row sees the keys from `low` to `high`,
which says every mask but the one that is a tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(slot, cu_seqlens, count, PACK: tl.constexpr, M: tl.constexpr):
    """Which packed sequence the `slot`-th tile belongs to, and which tile of it that is.

    Sequence n has the slots from cu_seqlens[n] PACK // M + n on: enough for its tiles wherever it starts, and worked
    out without a sum over the others. Sequence `count` is what lies behind the last one.
    """
    low, high = slot * 0, count.to(tl.int32)
    while low < high:
        middle = (low + high + 1) // 2
        start = (tl.load(cu_seqlens + middle).to(tl.int64) * PACK // M).to(tl.int32) + middle
        if start <= slot:
            low = middle
        else:
            high = middle - 1
    return low, slot - (tl.load(cu_seqlens + low).to(tl.int64) * PACK // M).to(tl.int32) - low


@triton.jit
def place_of(slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, PACK: tl.constexpr, M: tl.constexpr):
    """(tile, first query, queries, first key, keys) of the `slot`-th tile, of one sequence of the batch or packed."""
    if cu_seqlens_q is not None:
        n, tile = sequence_of(slot, cu_seqlens_q, count, PACK, M)
        first = tl.load(cu_seqlens_q + n).to(tl.int64)
        first_key = tl.load(cu_seqlens_k + n).to(tl.int64)
        last, last_key = rows.to(tl.int64), first_key
        if n < count:
            last = tl.load(cu_seqlens_q + n + 1).to(tl.int64)
            last_key = tl.load(cu_seqlens_k + n + 1).to(tl.int64)
        return tile, first, (last - first).to(tl.int32), first_key, (last_key - first_key).to(tl.int32)
    else:
        there = keys.to(tl.int32)
        if kv_len is not None:
            there = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), keys).to(tl.int32)
        return slot, rows * 0, rows.to(tl.int32), keys * 0, there


@triton.jit
def seen_by(
    query, rows, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """[low, high) of the keys that each query sees."""
    place = query
    if BOTTOM:
        place += keys - rows
    low, high = query * 0, query * 0 + keys
    if LEFT:
        low = tl.maximum(place - left.to(tl.int32), 0)
    if RIGHT:
        high = tl.minimum(high, place + right.to(tl.int32) + 1)
    if PREFIX:
        most = prefix.to(tl.int32)
        if prefix_kv_len is not None:
            most = tl.minimum(tl.maximum(tl.load(prefix_kv_len + batch), 0), keys).to(tl.int32)
        high = tl.where(query < prefix_rows, tl.minimum(high, most), high)
    return low, high


@triton.jit
def seers(
    first, last, rows, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(start, whole, edge, end), the inverse of `seen_by`: no query outside [start, end) sees a key of [first, last),
    every one of [whole, edge) sees all of them."""
    shift = first * 0
    if BOTTOM:
        shift = keys - rows
    start, whole, edge, end = first * 0, first * 0, rows, rows
    if RIGHT:
        start = tl.maximum(first - right.to(tl.int32) - shift, 0)
        whole = tl.maximum(last - 1 - right.to(tl.int32) - shift, 0)
    if LEFT:
        edge = tl.minimum(edge, first + left.to(tl.int32) + 1 - shift)
        end = tl.minimum(end, last + left.to(tl.int32) - shift)
    if PREFIX:
        most, few = prefix.to(tl.int32), tl.minimum(prefix_rows, rows).to(tl.int32)
        if prefix_kv_len is not None:
            most = tl.load(prefix_kv_len + batch).to(tl.int32)
        start = tl.where(first >= most, tl.maximum(start, few), start)
        whole = tl.where(last > most, tl.maximum(whole, few), whole)
    return start, whole, edge, end


@triton.jit
def rates(top, factor):
    """(what scores are multiplied by, what is subtracted then) of rows whose largest scores are `top`: one multiply-add
    a score.

    The product of `top` is rounded to half an ulp, so that the largest weight is exp2 of that instead of 1: below 2^26,
    where an ulp is 4 at most, between 1/4 and 4. All weights of a row are off by that factor, which their sum takes
    out.
    Beyond, it may be exp2 of some hundred. There the rate is a power of 2, not below the factor, by which no product is
    rounded. Weights beside the largest then come out smaller; but scores so large are equal, or apart by so much that
    they are nothing, or rounding decides what they weigh.
    """
    level = top * factor
    bits = tl.cast(factor, tl.float32).to(tl.int32, bitcast=True)
    power = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    rate = tl.where(tl.abs(level) < 67108864.0, factor, power)
    return rate, top * rate
