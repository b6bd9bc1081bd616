"""What the Triton kernels of the family share: which rows a program has, where they lie, what each sees, and products
in float16.

Rows are counted in their sequence, in 32 bits; what they are multiplied by is 64. A row sees keys [low, high), and, of
packed sequences, itself: see `masks.spans`.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)
"""Sequences that are compared at a time."""
LEAST, MOST, MIDDLE = tl.constexpr(20), tl.constexpr(254), tl.constexpr(267)
"""Exponents of float32, between which numbers are lifted to 2^13: 127 + 13 + 127 = 267."""


@triton.jit(do_not_specialize=["count"])
def hstu_order(seq_offsets, order, count, M: tl.constexpr):
    """Sequences from the longest to the shortest, so that no long one comes last: order[r] is the r-th, and
    order[count + 1 + r] the number of tiles of M rows before it. The last is what lies behind all of them."""
    n = tl.program_id(0)
    count = count.to(tl.int32)
    mine = tl.full([1], -1, tl.int64)
    if n < count:
        mine = tl.load(seq_offsets + n + 1 + tl.arange(0, 1)).to(tl.int64)
        mine -= tl.load(seq_offsets + n + tl.arange(0, 1)).to(tl.int64)
    before, tiles = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for start in tl.range(0, count, BLOCK):
        other = start + tl.arange(0, BLOCK)
        there = other < count
        length = tl.load(seq_offsets + other + 1, mask=there, other=0).to(tl.int64)
        length -= tl.load(seq_offsets + other, mask=there, other=0).to(tl.int64)
        first = there & ((length > mine) | ((length == mine) & (other < n)))
        before += tl.sum(first.to(tl.int32), 0)
        tiles += tl.sum(tl.where(first, tl.cdiv(length, M), 0).to(tl.int32), 0)
    tl.store(order + before, n)
    tl.store(order + count + 1 + before, tiles)


@triton.jit
def place_of(program, order, seq_offsets, count, rows, heads, tiles, DOWN: tl.constexpr, M: tl.constexpr):
    """(sequence, head, first row of the tile, first token, tokens) of a program. Tiles of one head follow each other,
    so that what runs at a time shares what it walks; DOWN: the last ones, which see the most, go first."""
    heads = heads.to(tl.int32)
    if seq_offsets is not None:
        count = count.to(tl.int32)
        low, high = program * 0, program * 0 + count
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(order + count + 1 + middle) * heads <= program:
                low = middle
            else:
                high = middle - 1
        n = tl.load(order + low)
        first = tl.load(seq_offsets + n).to(tl.int64)
        last = rows.to(tl.int64)
        if n < count:
            last = tl.load(seq_offsets + n + 1).to(tl.int64)
        length = (last - first).to(tl.int32)
        mine = tl.cdiv(length, M)
        local = program - tl.load(order + count + 1 + low) * heads
        which = tl.maximum(mine, 1)
        head, tile = local // which, local % which
        if DOWN:
            tile = which - 1 - tile
        length = tl.where(head < heads, length, 0)  # programs that nobody needs
        return n, head.to(tl.int64), tile * M, first, length
    else:
        tiles = tiles.to(tl.int32)
        tile, pair = program % tiles, program // tiles
        if DOWN:
            tile = tiles - 1 - tile
        return pair // heads, (pair % heads).to(tl.int64), tile * M, rows * 0, rows.to(tl.int32)


@triton.jit
def spans(i, length, targets, shared, window, tail, CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr):
    """[low, high) of the keys that rows `i` see beside themselves: `masks.spans`."""
    behind = length - targets
    last = behind - shared
    u = tl.minimum(tl.maximum(i - shared, 0), last)
    target = (u == last) & (i >= behind)
    low = i * 0
    wide = low == 0
    if WINDOW:
        wide = (tail > 0) & (u >= last - tail)
        low = tl.where(wide | (u <= window), 0, u - window + shared)
    if CAUSAL:
        high = tl.where(target, behind, tl.where(u > 0, i + 1, 0))
    else:
        high = low * 0 + length
        if WINDOW:
            high = tl.where(wide | (u + window >= last), high, u + window + 1 + shared)
        high = tl.where(target, tl.minimum(high, behind), high)
    if CONTEXT:
        high = tl.where(u == 0, tl.maximum(high, behind), high)
    return low, tl.where(last > 0, tl.minimum(high, length), 0)


@triton.jit
def keys_of(
    query, inside, begin, length, there, targets, shared, window, tail,
    JAGGED: tl.constexpr, CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What keys a tile of queries walks: (low, high) of each row; of the walk under a mask the first key, how many
    tiles begin there, the key and the number where the next ones begin, then those where the last ones do, and how many
    there are; the first key of the walk without a mask, and how many tiles that has.

    Keys from `start` to `end` are seen by some row of the tile, those from `whole` to `edge` by all of them; the last
    ones by rows that see themselves apart.
    """
    if JAGGED:
        low, high = spans(query, length, targets, shared.to(tl.int32), window.to(tl.int32), tail.to(tl.int32),
                          CAUSAL, CONTEXT, WINDOW)  # fmt: skip
        start = tl.min(tl.where(inside, low, length), 0)
        if DROPS:
            start = start // 4 * 4  # words of the mask come by four
        end = tl.maximum(tl.max(tl.where(inside, high, 0), 0), start)
        whole = start
        if WINDOW:
            most = tl.max(tl.where(inside, low, 0), 0)
            whole = start + tl.minimum(tl.cdiv(tl.maximum(most - start, 0), N), tl.cdiv(end - start, N)) * N
        edge = tl.minimum(tl.maximum(tl.min(tl.where(inside, high, length), 0), start), end)
        edge = tl.maximum(start + (edge - start) // N * N, whole)
    else:
        low, high = query * 0, query * 0 + there
        start, whole, end = there * 0, there * 0, there
        edge = end // N * N
        if MASK:
            edge = start
    before = (whole - start) // N
    main = before + tl.maximum(tl.cdiv(end - edge, N), 0)
    again = tl.maximum(start + tl.cdiv(end - start, N) * N, begin)
    cut = main
    if JAGGED:
        cut += tl.maximum(tl.cdiv(tl.minimum(begin + M, length) - again, N), 0)
    return low, high, start, before, edge, main, again, cut, whole, (edge - whole) // N


@triton.jit
def queries_of(
    begin, rows, length, targets, shared, window, tail,
    JAGGED: tl.constexpr, CAUSAL: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What queries a tile of keys from `begin` on is walked by: (end of the context before it; start and end of those
    next to it; end of those that see all of it, which follow; end of those that see some, which follow; start of the
    tail), each of which but the third is walked under a mask."""
    if JAGGED:
        behind = length - targets
        last = behind - shared
        stop = tl.minimum(begin + N, length)  # of the keys
        seen = last > 0  # by others than themselves
        history = seen & (begin + N <= behind)
        if CAUSAL:
            seen = seen & (begin < behind)
            context = begin * 0
            if CONTEXT:
                context = tl.where(seen, tl.minimum(shared + 1, begin), 0)
            near, far = begin, stop
            whole, end = length, length
            if WINDOW:
                whole = tl.minimum(tl.maximum(shared, begin) + window + 1, behind)
                whole = tl.where(behind - window <= begin, length, whole)
                furthest = tl.maximum(shared, stop - 1) + window
                end = tl.where(behind <= furthest, length, tl.minimum(furthest + 1, behind))
        else:
            context = begin * 0
            near, far = tl.where(seen, 0, begin), tl.where(seen, 0, stop)
            whole, end = length, length
            if WINDOW:
                whole = begin * 0
        count = tl.where(history, tl.maximum(whole - far, 0) // M, 0)
        whole = far + count * M
        end = tl.where(seen, tl.maximum(end, whole), whole)
        again = length
        if WINDOW and CAUSAL:
            again = tl.maximum(end, tl.maximum(last - tail, 0) + shared)
            again = tl.where(seen & (tail > 0), tl.minimum(again, length), length)
        return context, near, far, whole, end, again
    else:
        none = rows * 0
        whole = none
        if not MASK:
            whole = rows // M * M
        return none, none, none, whole, rows, rows


@triton.jit
def tile_of(
    at, first, end, row_step, step, MASKED: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """[N, D] from row `first` on, 0 past `end`. Columns are `step` apart, or side by side."""
    if TMA:
        return at.load([first, 0])
    else:
        lines, columns = tl.arange(0, N), tl.arange(0, D)
        place = at + first * row_step + lines[:, None].to(tl.int64) * row_step
        place += (columns if step is None else columns * step)[None, :]
        if MASKED:
            there = (lines < end - first)[:, None]
            return tl.load(place, mask=there if WIDTH == D else there & (columns < WIDTH)[None, :], other=0.0)
        elif WIDTH == D:
            return tl.load(place)
        else:
            return tl.load(place, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def room(largest):
    """The power of two that brings `largest` to 2^13, as far as one can: float16 ends at 2^16."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    return ((-exponent + MIDDLE) << 23).to(tl.float32, bitcast=True)


@triton.jit
def room_for(M: tl.constexpr):
    """The power of rows that have no terms yet."""
    return tl.full([M], 2.0**120, tl.float32)


@triton.jit
def inverse(power):
    """1 / a power of two, without rounding."""
    return (-power.to(tl.int32, bitcast=True) + 0x7F000000).to(tl.float32, bitcast=True)


@triton.jit
def add_product(total, power, p, values, LIFTS: tl.constexpr, PRECISION: tl.constexpr):
    """(total + p values, power). p is rounded to the dtype of `values`. LIFTS (of float16): each row of p is lifted by
    a power of two to what that dtype holds best, and the total with it: weights are not bounded as those of a softmax
    are, and their gradients are small."""
    if LIFTS:
        new = tl.minimum(power, room(tl.max(tl.abs(p), 1)))
        total *= (new * inverse(power))[:, None]
        power = new
        p *= power[:, None]
    total = tl.dot(p.to(values.dtype), values, total, input_precision=PRECISION)
    return total, power
