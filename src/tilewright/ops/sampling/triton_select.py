"""How Triton finds what top-k and top-p keep, without sorting rows: keys, masses, and the launches of both ways.

Every token has a key: the bits of its probability, then its index, falling. No two are equal, and what is kept is all
from some key on. That key is found digit by digit: many programs count a row's tokens (or add up their masses) by the
digit, and every program of the next launch picks the digit in which k (or the share p) is reached. Sums are of whole
numbers, so that atomics in any order come to the same. Where k is small, each block's largest keys are sorted instead,
and one program a row chooses among them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.residual.triton_dropout import philox
from tilewright.ops.sampling.selection import LARGEST as _LARGEST
from tilewright.ops.triton_rows import row_start

LARGEST = tl.constexpr(_LARGEST)
HIGHEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def place(total_columns, BLOCK: tl.constexpr):
    """Row, block of it, columns [BLOCK] and which of them exist."""
    blocks = tl.cdiv(total_columns, BLOCK).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    row = (program // blocks).to(tl.int64)
    block = (program % blocks).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    return row, block, columns, columns < total_columns


@triton.jit
def read(probs, row, columns, inside, stride, outer, count):
    """Bits of float32, and which are of no probability: those count as 0. -0 is 0."""
    value = tl.load(probs + row_start(row, stride, outer, count) + columns, mask=inside, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == 0.0, 0, bits)
    bad = inside & ((bits < 0) | (bits >= LARGEST))
    return tl.where(bad, 0, bits), bad


@triton.jit
def keys(bits, columns, inside, INDEX: tl.constexpr):
    """Keys, and -1 where there is no token. INDEX bits are of the index."""
    key = (bits.to(tl.int64) << INDEX) | ((1 << INDEX) - 1 - columns)
    return tl.where(inside, key, -1)


@triton.jit
def mass(bits, top, UNIT: tl.constexpr):
    """Whole units of mass; `top` is the bits of the row's largest."""
    exponent = bits >> 23
    significand = ((bits & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)).to(tl.int64)
    shift = tl.maximum(exponent, 1) - tl.maximum(top >> 23, 1) + (UNIT - 23)
    left, right = tl.maximum(shift, 0).to(tl.int64), tl.minimum(tl.maximum(-shift, 0), 63).to(tl.int64)
    return (significand << left) >> right


@triton.jit
def top_of(peaks, row, blocks, PARTS: tl.constexpr):
    """Bits of the row's largest; LARGEST or above, or 0, where it is no distribution."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * blocks + part, mask=part < blocks, other=0), axis=0)


@triton.jit
def limits(row_k, row_p, row, top_k, top_p, total_columns):
    """k and p of a row, and whether both are numbers that mean something."""
    k = tl.minimum(top_k, total_columns)
    p = tl.minimum(tl.cast(top_p, tl.float32), 1.0)
    good = k >= 1
    if row_k is not None:
        own = tl.load(row_k + row).to(tl.int64)
        good = good & (own >= 1)
        k = tl.minimum(k, tl.maximum(own, 1))
    if row_p is not None:
        share = tl.load(row_p + row).to(tl.float32)
        good = good & (share == share)
        p = tl.where(share < p, share, p)
    return k, p, good


@triton.jit
def share_of(total, p):
    """The least whole mass that is `p` of `total` or more, at least 1."""
    product = p.to(tl.float64) * total.to(tl.float64)
    whole = product.to(tl.int64)
    whole += tl.where(whole.to(tl.float64) < product, 1, 0)
    return tl.maximum(whole, 1)


@triton.jit
def part_of(total, word):
    """u * total without its fraction, u = (word >> 8) * 2^-24."""
    upper = (word >> 8).to(tl.int64)
    return upper * (total >> 24) + ((upper * (total & 0xFFFFFF)) >> 24)


@triton.jit
def draw_word(seed, offset, row):
    start = tl.load(offset) if offset is not None else tl.full([], 0, tl.int64)
    word, _, _, _ = philox(start, row, tl.load(seed))
    return word


@triton.jit
def pick(counts, prefix, want, WIDTH: tl.constexpr):
    """The digit at which counts, from the highest digit down, reach `want`: the prefix with it, and what is left."""
    digit = tl.arange(0, 1 << WIDTH)
    found = tl.load(counts + ((1 << WIDTH) - 1 - digit))
    before = tl.sum(tl.where(tl.cumsum(found, axis=0) < want, 1, 0), axis=0)
    before = tl.minimum(before, (1 << WIDTH) - 1)
    above = tl.sum(tl.where(digit < before, found, 0), axis=0)
    return (prefix << WIDTH) | ((1 << WIDTH) - 1 - before).to(tl.int64), want - above


@triton.jit
def survey(
    probs, peaks, counts, probs_stride, probs_outer, probs_count, total_columns, cells,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bits of each block, and LARGEST where something in it is no probability. Counts begin at 0."""
    row, block, columns, inside = place(total_columns, BLOCK)
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    blocks = tl.cdiv(total_columns, BLOCK)
    tl.store(peaks + row * blocks + block, tl.max(tl.where(bad, LARGEST, bits), axis=0))
    if counts is not None:
        for start in tl.range(block * BLOCK, cells, blocks * BLOCK):
            cell = start + tl.arange(0, BLOCK)
            tl.store(counts + row * cells + cell, tl.zeros([BLOCK], tl.int64), mask=cell < cells)


@triton.jit
def advance(
    counts, state, bounds, peaks, row_k, row_p, row, block, top_k, top_p, total_columns, cells,
    STEP: tl.constexpr, STEPS: tl.constexpr, BEFORE: tl.constexpr, MASS_BEFORE: tl.constexpr,
    WIDTH_BEFORE: tl.constexpr, BIN: tl.constexpr,
):  # fmt: skip
    """What the step before has come to. BEFORE: "none" (there is none), "first" or "later" of its search. Returns
    (prefix, what is left of the want, whether all is kept)."""
    k, p, _ = limits(row_k, row_p, row, top_k, top_p, total_columns)
    prefix, want = tl.full([], 0, tl.int64), k.to(tl.int64)
    if BEFORE != "none":
        own = counts + row * cells + (STEP - 1) * BIN
        if BEFORE == "later":
            prefix = tl.load(state + (row * STEPS + STEP - 1) * 2)
            want = tl.load(state + (row * STEPS + STEP - 1) * 2 + 1)
        elif MASS_BEFORE:
            want = share_of(tl.sum(tl.load(own + tl.arange(0, 1 << WIDTH_BEFORE)), axis=0), p)
        prefix, want = pick(own, prefix, want, WIDTH_BEFORE)
    return prefix, want, p >= 1.0


@triton.jit
def search(
    probs, peaks, counts, state, bounds, row_k, row_p, probs_stride, probs_outer, probs_count, top_k, top_p,
    total_columns, cells,
    STEP: tl.constexpr, STEPS: tl.constexpr, BEFORE: tl.constexpr, MASS_BEFORE: tl.constexpr, MASS: tl.constexpr,
    STARTS: tl.constexpr, LIMITED: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_BEFORE: tl.constexpr, BIN: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One step: counts, or masses, by the digit at SHIFT, of the keys that begin with the prefix. STARTS: the first of
    its search. LIMITED: only keys that the search for k has left."""
    row, block, columns, inside = place(total_columns, BLOCK)
    prefix, want, _ = advance(
        counts, state, bounds, peaks, row_k, row_p, row, block, top_k, top_p, total_columns, cells,
        STEP, STEPS, BEFORE, MASS_BEFORE, WIDTH_BEFORE, BIN,
    )  # fmt: skip
    least = tl.full([], 0, tl.int64)
    if STARTS and BEFORE != "none":  # the search for k is over
        least = prefix
        if block == 0:
            tl.store(bounds + row * 2, least)
    elif LIMITED:
        least = tl.load(bounds + row * 2)
    if STARTS:
        prefix = tl.full([], 0, tl.int64)
    elif block == 0:
        tl.store(state + (row * STEPS + STEP) * 2, prefix)
        tl.store(state + (row * STEPS + STEP) * 2 + 1, want)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    key = keys(bits, columns, inside, INDEX)
    counted = inside & ((key >> (SHIFT + WIDTH)) == prefix)
    if LIMITED:
        counted = counted & (key >= least)
    digit = (key >> SHIFT) & ((1 << WIDTH) - 1)
    amount = tl.full([BLOCK], 1, tl.int64)
    if MASS:
        amount = mass(bits, top_of(peaks, row, tl.cdiv(total_columns, BLOCK), PARTS), UNIT)
        counted = counted & (amount > 0)
    tl.atomic_add(counts + row * cells + STEP * BIN + digit, amount, mask=counted, sem="relaxed")


@triton.jit
def tally(
    probs, peaks, counts, state, bounds, masses, row_k, row_p, probs_stride, probs_outer, probs_count, top_k, top_p,
    total_columns, cells,
    STEP: tl.constexpr, STEPS: tl.constexpr, BEFORE: tl.constexpr, MASS_BEFORE: tl.constexpr,
    WIDTH_BEFORE: tl.constexpr, BOTH: tl.constexpr, BIN: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key that is kept, and the mass of what each block keeps. BOTH: k has been searched for before p."""
    row, block, columns, inside = place(total_columns, BLOCK)
    least, _, every = advance(
        counts, state, bounds, peaks, row_k, row_p, row, block, top_k, top_p, total_columns, cells,
        STEP, STEPS, BEFORE, MASS_BEFORE, WIDTH_BEFORE, BIN,
    )  # fmt: skip
    if MASS_BEFORE:
        least = tl.where(every, 0, least)
        if BOTH:
            least = tl.maximum(least, tl.load(bounds + row * 2))
    if block == 0:
        tl.store(bounds + row * 2 + 1, least)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    blocks = tl.cdiv(total_columns, BLOCK)
    amount = mass(bits, top_of(peaks, row, blocks, PARTS), UNIT)
    kept = keys(bits, columns, inside, INDEX) >= least
    tl.store(masses + row * blocks + block, tl.sum(tl.where(kept, amount, 0), axis=0))


@triton.jit
def largest_keys(
    probs, peaks, found, probs_stride, probs_outer, probs_count, total_columns,
    K: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The K largest keys of each block, and what `survey` says of it."""
    row, block, columns, inside = place(total_columns, BLOCK)
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    spot = row * tl.cdiv(total_columns, BLOCK) + block
    tl.store(peaks + spot, tl.max(tl.where(bad, LARGEST, bits), axis=0))
    tl.store(found + spot * K + tl.arange(0, K), tl.topk(keys(bits, columns, inside, INDEX), K))


@triton.jit
def choose(
    peaks, found, bounds, masses, ids, valid, seed, offset, row_k, row_p, top_k, top_p, total_columns, blocks,
    K: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row: the K largest keys of all blocks, of these what k and p keep, and the token that is drawn."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    every = tl.load(found + row * blocks * K + at, mask=at < blocks * K, other=-1)
    key = tl.topk(every, K)
    rank = tl.arange(0, K)
    k, p, good = limits(row_k, row_p, row, top_k, top_p, total_columns)
    top = top_of(peaks, row, blocks, PARTS)
    good = good & (top > 0) & (top < LARGEST)
    among = (rank < k) & (key >= 0)
    amount = tl.where(among, mass((tl.maximum(key, 0) >> INDEX).to(tl.int32), top, UNIT), 0)
    before = tl.cumsum(amount, axis=0) - amount
    want = tl.where(p >= 1.0, HIGHEST, share_of(tl.sum(amount, axis=0), p))
    stays = among & (before < want)
    amount = tl.where(stays, amount, 0)
    total = tl.sum(amount, axis=0)
    if ids is None:
        tl.store(bounds + row * 2 + 1, tl.min(tl.where(stays, key, HIGHEST), axis=0))
        tl.store(masses + row, total)
    else:
        index = (1 << INDEX) - 1 - (key & ((1 << INDEX) - 1))
        earlier = (index[None, :] < index[:, None]) & stays[None, :]
        below = tl.sum(tl.where(earlier, amount[None, :], 0), axis=1)
        spot = part_of(total, draw_word(seed, offset, row))
        drawn = stays & (below <= spot) & (spot < below + amount)
        token = tl.sum(tl.where(drawn, index, 0), axis=0)
        tl.store(ids + row, tl.where(good, token, -1).to(tl.int32))
        tl.store(valid + row, good)
