"""What the search by bins is made of: the record of a row, its ranges, the bin that is reached and the least key in it.

The passes over rows that call these, and their launches, are in `triton_bins`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.sampling.triton_select import HIGHEST, LARGEST, keys, limits, mass, read, share_of

ENDS = tl.constexpr(8)
"""What of a row there is one of: the bin that is reached, what of it is wanted (later: the least key that is kept),
programs that have sifted, programs that have gathered, keys in the room."""
LINE = tl.constexpr(128)
SIFTED, GATHERED, TAKEN = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def record_of(space, row, WIDTH: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr):
    """What is kept of a row, in one piece of memory, all int64: ends; by blocks, marks (the largest bits above the sum
    of the block, roughly), totals and masses; the room; counts by bins. A call allocates once, not eight times."""
    return space + row * (ENDS + 3 * PARTS + ROOM + (1 << WIDTH))


@triton.jit
def lines(start, LENGTH: tl.constexpr):
    """Places from `start` on as lines of LINE: what goes along a line stays in a warp, where a scan is cheap."""
    down, across = tl.arange(0, LENGTH // LINE), tl.arange(0, LINE)
    return start + down[:, None] * LINE + across[None, :]


@triton.jit
def reaching(amount, want, COUNT: tl.constexpr):
    """Of amounts in COUNT lines: the place at which their sum, from the first on, reaches `want` (1 or more), and the
    sum before it."""
    line, across = tl.arange(0, COUNT), tl.arange(0, LINE)
    sums = tl.sum(amount, axis=1)
    before = tl.cumsum(sums, axis=0) - sums
    here = (before < want) & (want <= before + sums)
    which = tl.sum(tl.where(here, line, 0), axis=0)
    passed = tl.sum(tl.where(here, before, 0), axis=0)
    own = tl.sum(tl.where(line[:, None] == which, amount, 0), axis=0)
    before = passed + tl.cumsum(own, axis=0) - own
    here = (before < want) & (want <= before + own)
    place_ = which * LINE + tl.sum(tl.where(here, across, 0), axis=0)
    return place_, tl.sum(tl.where(here, before, 0), axis=0)


@triton.jit
def weight(bits, top, MASS: tl.constexpr, UNIT: tl.constexpr):
    """What a token counts for in the search: its mass, or 1 unless its probability is 0 and it cannot matter."""
    if MASS:
        return mass(bits, top, UNIT)
    return tl.where(bits > 0, 1, 0).to(tl.int64)


@triton.jit
def ranges(
    base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a row: bits of the largest, the least bits that are counted, how many bits a bin has (as a shift), k, p, and
    whether all three are good.

    Tokens below (1 - p) * sum / columns have, all together, less than 1 - p of the sum: the nucleus does without them.
    A 32nd is taken off for the rounding of the sum, of masses and of the share; an infinite sum leaves all in.
    """
    k, p, good = limits(row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns)
    part = tl.arange(0, PARTS)
    marks = tl.load(base + ENDS + part, mask=part < blocks, other=0)
    top = (tl.max(marks, axis=0) >> 32).to(tl.int32)
    good = good & (top > 0) & (top < LARGEST)
    least = tl.full([], 1, tl.int32)
    if MASS:
        total = tl.sum((marks & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), axis=0)
        bound = (1.0 - tl.maximum(p, 0.0)) * 0.96875 * total / tl.cast(total_columns, tl.float32)
        bound = tl.where(bound < float("inf"), bound, 0.0)
        least = tl.minimum(tl.maximum(bound.to(tl.int32, bitcast=True), 1), top)
    span = top - least
    shift = tl.full([], 0, tl.int32)
    for bit in tl.static_range(WIDTH, 31):
        shift += tl.where((span >> bit) > 0, 1, 0)
    return top, least, shift, k, p, good


@triton.jit
def find_bin(
    base, blocks, k, p, good, MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr
):
    """The bin in which k or p is reached, and what of it is wanted; a bin behind all where everything is kept."""
    part = tl.arange(0, PARTS)
    every = tl.load(base + ENDS + PARTS + part, mask=part < blocks, other=0, cache_modifier=".cg")
    total = tl.sum(every, axis=0)
    if MASS:
        want, all_kept = share_of(total, p), p >= 1.0
    else:
        want, all_kept = k.to(tl.int64), k >= total
    cells = base + ENDS + 3 * PARTS + ROOM
    found = tl.load(cells + lines(0, 1 << WIDTH), cache_modifier=".cg")
    reached, above = reaching(found, want, (1 << WIDTH) // LINE)
    reached = tl.where(all_kept | (good == 0), 1 << WIDTH, reached)
    tl.store(base, reached.to(tl.int64))
    tl.store(base + 1, want - above)


@triton.jit
def last_of_row(ticket, blocks):
    """Whether this program is the last of its row to come here: then it sees what all others have stored before."""
    tl.debug_barrier()  # what other threads of this program stored comes before the ticket, too
    return tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == blocks - 1


@triton.jit
def least_of(key, amount, want):
    """Of keys in registers (-1 is none): the one at which amounts, from the largest key down, reach `want`. Bounds are
    keys themselves, so that bits which all have in common cost no turn."""
    low = tl.min(tl.where(key >= 0, key, HIGHEST), axis=0)
    high = tl.max(key, axis=0)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        upper = (key >= middle) & (key <= high)
        found = tl.sum(tl.where(upper, amount, 0), axis=0)
        if found >= want:
            low = tl.min(tl.where(upper, key, HIGHEST), axis=0)
        else:
            want -= found
            high = tl.max(tl.where(key < middle, key, -1), axis=0)
    return low


@triton.jit
def least_in_row(
    probs, row, probs_stride, probs_outer, probs_count, total_columns, top, low, high, want,
    MASS: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The same, of the row's keys from `low` to `high`, read again each turn: where more are alike than there is room
    for."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        found = tl.full([], 0, tl.int64)
        above = tl.full([], (1 << 63) - 1, tl.int64)
        below = tl.full([], -1, tl.int64)
        for start in tl.range(0, total_columns, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            inside = columns < total_columns
            bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
            key = keys(bits, columns, inside, INDEX)
            upper = (key >= middle) & (key <= high)
            found += tl.sum(tl.where(upper, weight(bits, top, MASS, UNIT), 0), axis=0)
            above = tl.minimum(above, tl.min(tl.where(upper, key, HIGHEST), axis=0))
            below = tl.maximum(below, tl.max(tl.where((key >= low) & (key < middle), key, -1), axis=0))
        if found >= want:
            low = above
        else:
            want -= found
            high = below
    return low


@triton.jit
def from_room(
    base, gathered, want, top,
    MASS: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key that is kept, of those in the room; masses of these are added to those of their blocks."""
    spot = tl.arange(0, ROOM)
    key = tl.load(base + ENDS + 3 * PARTS + spot, mask=spot < gathered, other=-1, cache_modifier=".cg")
    bits = (tl.maximum(key, 0) >> INDEX).to(tl.int32)
    kept_from = least_of(key, weight(bits, top, MASS, UNIT), want)
    block = ((1 << INDEX) - 1 - (key & ((1 << INDEX) - 1))) // BLOCK
    stays = (key >= 0) & (key >= kept_from)
    tl.atomic_add(base + ENDS + 2 * PARTS + block, mass(bits, top, UNIT), mask=stays, sem="relaxed")
    return kept_from


@triton.jit
def from_row(
    probs, masses, row, probs_stride, probs_outer, probs_count, total_columns, blocks, top, low, high, want,
    MASS: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, of the row's keys from `low` to `high`; masses of all blocks are written anew."""
    CHUNK: tl.constexpr = BLOCK if BLOCK < 1024 else 1024  # of more, keys and masses take too many registers
    kept_from = least_in_row(
        probs, row, probs_stride, probs_outer, probs_count, total_columns, top, low, high, want, MASS, INDEX, UNIT,
        CHUNK,
    )  # fmt: skip
    for block in tl.range(0, blocks):
        total = tl.full([], 0, tl.int64)
        for part in tl.range(0, BLOCK // CHUNK):
            columns = tl.cast(block, tl.int64) * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
            inside = columns < total_columns
            bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
            stays = keys(bits, columns, inside, INDEX) >= kept_from
            total += tl.sum(tl.where(stays, mass(bits, top, UNIT), 0), axis=0)
        tl.store(masses + block, total)
    return kept_from
