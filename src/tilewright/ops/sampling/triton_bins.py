"""How Triton finds what one of top-k and top-p keeps with two passes over a row: bins first, keys of one bin then.

Probabilities fall into bins as their bits lie below those of the row's largest, all bins of one width, which is as
small as the row allows: for p nothing is counted that, with all that is smaller, has no more than a share of 1 - p.
`sift` counts tokens (or adds up masses) by bins, `gather` collects the keys of the bin in which k (or p) is reached,
and one program a row finds among those the least key that is kept. That program is the last of a row to be done, or
has a launch of its own. Keys, masses and what is drawn are those of `triton_select`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.sampling.configs import by_p
from tilewright.ops.sampling.selection import unit_bits
from tilewright.ops.sampling.triton_draw import write
from tilewright.ops.sampling.triton_select import (
    HIGHEST,
    LARGEST,
    draw_word,
    keys,
    limits,
    mass,
    part_of,
    place,
    read,
    share_of,
    top_of,
)
from tilewright.ops.triton_rows import row_places

TICKETS = tl.constexpr(4)
"""Counters of a row: programs that have sifted, programs that have gathered, keys in its room; one is spare."""


@triton.jit
def scan(
    probs, peaks, sums, counts, tickets, probs_stride, probs_outer, probs_count, total_columns,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bits of each block, LARGEST where something in it is no probability, and the block's sum, roughly.
    Counts and tickets begin at 0."""
    row, block, columns, inside = place(total_columns, BLOCK)
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    blocks = tl.cdiv(total_columns, BLOCK)
    tl.store(peaks + row * blocks + block, tl.max(tl.where(bad, LARGEST, bits), axis=0))
    tl.store(sums + row * blocks + block, tl.sum(bits.to(tl.float32, bitcast=True), axis=0))
    for start in tl.range(block * BLOCK, 1 << WIDTH, blocks * BLOCK):
        cell = start + tl.arange(0, BLOCK)
        tl.store(counts + (row << WIDTH) + cell, tl.zeros([BLOCK], tl.int64), mask=cell < (1 << WIDTH))
    if block == 0:
        tl.store(tickets + row * TICKETS + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))


@triton.jit
def weight(bits, top, MASS: tl.constexpr, UNIT: tl.constexpr):
    """What a token counts for in the search: its mass, or 1 unless its probability is 0 and it cannot matter."""
    if MASS:
        return mass(bits, top, UNIT)
    return tl.where(bits > 0, 1, 0).to(tl.int64)


@triton.jit
def ranges(
    peaks, sums, row_k, row_p, row, top_k, top_p, total_columns, blocks,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a row: bits of the largest, the least bits that are counted, how many bits a bin has (as a shift), k, p, and
    whether all three are good.

    Tokens below (1 - p) * sum / columns have, all together, less than 1 - p of the sum: the nucleus does without them.
    A 32nd is taken off for the rounding of the sum, of masses and of the share; an infinite sum leaves all in.
    """
    k, p, good = limits(row_k, row_p, row, top_k, top_p, total_columns)
    top = top_of(peaks, row, blocks, PARTS)
    good = good & (top > 0) & (top < LARGEST)
    least = tl.full([], 1, tl.int32)
    if MASS:
        part = tl.arange(0, PARTS)
        total = tl.sum(tl.load(sums + row * blocks + part, mask=part < blocks, other=0.0), axis=0)
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
    counts, totals, picked, row, blocks, k, p, good,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The bin in which k or p is reached, and what of it is wanted; a bin behind all where everything is kept."""
    part = tl.arange(0, PARTS)
    every = tl.load(totals + row * blocks + part, mask=part < blocks, other=0, cache_modifier=".cg")
    total = tl.sum(every, axis=0)
    if MASS:
        want, all_kept = share_of(total, p), p >= 1.0
    else:
        want, all_kept = k.to(tl.int64), k >= total
    place_ = tl.arange(0, 1 << WIDTH)
    found = tl.load(counts + (row << WIDTH) + place_, cache_modifier=".cg")
    reached = tl.sum(tl.where(tl.cumsum(found, axis=0) < want, 1, 0), axis=0)
    above = tl.sum(tl.where(place_ < reached, found, 0), axis=0)
    reached = tl.where(all_kept | (good == 0), 1 << WIDTH, reached)
    tl.store(picked + row * 2, reached.to(tl.int64))
    tl.store(picked + row * 2 + 1, want - above)


@triton.jit
def last_of_row(tickets, row, blocks, WHICH: tl.constexpr):
    """Whether this program is the last of its row to come here: then it sees what all others have stored before."""
    tl.debug_barrier()  # what other threads of this program stored comes before the ticket, too
    taken = tl.atomic_add(tickets + row * TICKETS + WHICH, 1, sem="acq_rel", scope="gpu")
    return taken == blocks - 1


@triton.jit
def sift(
    probs, peaks, sums, counts, totals, picked, tickets, row_k, row_p, probs_stride, probs_outer, probs_count,
    top_k, top_p, total_columns,
    MASS: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts, or masses, of a row by bins, and of each block in all. TAIL: the last program finds the bin."""
    row, block, columns, inside = place(total_columns, BLOCK)
    blocks = tl.cdiv(total_columns, BLOCK)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    top, least, shift, k, p, good = ranges(
        peaks, sums, row_k, row_p, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    amount = weight(bits, top, MASS, UNIT)
    tl.store(totals + row * blocks + block, tl.sum(amount, axis=0))
    counted = (bits >= least) & (amount > 0) & good
    tl.atomic_add(counts + (row << WIDTH) + ((top - bits) >> shift), amount, mask=counted, sem="relaxed")
    if TAIL:
        if last_of_row(tickets, row, blocks, 0):
            find_bin(counts, totals, picked, row, blocks, k, p, good, MASS, WIDTH, PARTS)


@triton.jit
def find_bins(
    peaks, sums, counts, totals, picked, row_k, row_p, top_k, top_p, total_columns, blocks,
    MASS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    k, p, good = limits(row_k, row_p, row, top_k, top_p, total_columns)
    top = top_of(peaks, row, blocks, PARTS)
    good = good & (top > 0) & (top < LARGEST)
    find_bin(counts, totals, picked, row, blocks, k, p, good, MASS, WIDTH, PARTS)


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
    room, masses, row, blocks, gathered, want, top,
    MASS: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key that is kept, of those in the room; masses of these are added to those of their blocks."""
    spot = tl.arange(0, ROOM)
    key = tl.load(room + row * ROOM + spot, mask=spot < gathered, other=-1, cache_modifier=".cg")
    bits = (tl.maximum(key, 0) >> INDEX).to(tl.int32)
    kept_from = least_of(key, weight(bits, top, MASS, UNIT), want)
    block = ((1 << INDEX) - 1 - (key & ((1 << INDEX) - 1))) // BLOCK
    stays = (key >= 0) & (key >= kept_from)
    tl.atomic_add(masses + row * blocks + block, mass(bits, top, UNIT), mask=stays, sem="relaxed")
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
        tl.store(masses + row * blocks + block, total)
    return kept_from


@triton.jit
def finish(
    probs, room, masses, picked, tickets, bounds, ids, valid, seed, offset, row, probs_stride, probs_outer, probs_count,
    total_columns, blocks, top, least, shift, good,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row: the least key that is kept, masses of all blocks with those of its bin, and the token that is drawn."""
    bin_ = tl.load(picked + row * 2, cache_modifier=".cg")
    want = tl.load(picked + row * 2 + 1, cache_modifier=".cg")
    gathered = tl.load(tickets + row * TICKETS + 2, cache_modifier=".cg")
    kept_from = tl.full([], 0, tl.int64)
    if bin_ < (1 << WIDTH):
        if gathered <= ROOM:
            kept_from = from_room(room, masses, row, blocks, gathered, want, top, MASS, ROOM, INDEX, UNIT, BLOCK)
        else:
            highest = top.to(tl.int64) - (bin_ << shift)
            lowest = tl.maximum(highest - (tl.full([], 1, tl.int64) << shift) + 1, least)
            kept_from = from_row(
                probs, masses, row, probs_stride, probs_outer, probs_count, total_columns, blocks, top, lowest << INDEX,
                (highest << INDEX) | ((1 << INDEX) - 1), want, MASS, INDEX, UNIT, BLOCK,
            )  # fmt: skip
    if ids is None:
        tl.store(bounds + row * 2 + 1, kept_from)
    else:
        tl.debug_barrier()  # masses are read by other threads than wrote them
        part = tl.arange(0, PARTS)
        every = tl.load(masses + row * blocks + part, mask=part < blocks, other=0, cache_modifier=".cg")
        spot = part_of(tl.sum(every, axis=0), draw_word(seed, offset, row))
        before = tl.cumsum(every, axis=0) - every
        hit = (before <= spot) & (spot < before + every)
        drawn = tl.sum(tl.where(hit, part, 0), axis=0).to(tl.int64)
        spot -= tl.sum(tl.where(hit, before, 0), axis=0)
        columns = drawn * BLOCK + tl.arange(0, BLOCK)
        inside = columns < total_columns
        bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
        stays = keys(bits, columns, inside, INDEX) >= kept_from
        reached = tl.cumsum(tl.where(stays, mass(bits, top, UNIT), 0), axis=0)
        token = drawn * BLOCK + tl.sum(tl.where(reached <= spot, 1, 0), axis=0)
        tl.store(ids + row, tl.where(good, token, -1).to(tl.int32))
        tl.store(valid + row, good)


@triton.jit
def gather(
    probs, peaks, sums, room, masses, picked, tickets, bounds, ids, valid, seed, offset, row_k, row_p,
    probs_stride, probs_outer, probs_count, top_k, top_p, total_columns,
    MASS: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of the bin that was found go where there is room for them, in any order; the mass of all bins above it is
    added up for each block. TAIL: the last program of a row finishes it."""
    row, block, columns, inside = place(total_columns, BLOCK)
    blocks = tl.cdiv(total_columns, BLOCK)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    top, least, shift, _k, _p, good = ranges(
        peaks, sums, row_k, row_p, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    bin_ = tl.load(picked + row * 2).to(tl.int32)
    own = tl.where(inside & (bits >= least), (top - bits) >> shift, 1 << WIDTH)
    above = (own < bin_) | (bin_ == (1 << WIDTH))
    tl.store(masses + row * blocks + block, tl.sum(tl.where(above, mass(bits, top, UNIT), 0), axis=0))
    found = (own == bin_) & (bin_ < (1 << WIDTH))
    some = tl.sum(found.to(tl.int32), axis=0)
    if some > 0:
        start = tl.atomic_add(tickets + row * TICKETS + 2, some, sem="relaxed")
        spot = start + tl.cumsum(found.to(tl.int32), axis=0) - 1
        key = keys(bits, columns, inside, INDEX)
        tl.store(room + row * ROOM + spot, key, mask=found & (spot < ROOM))
    if TAIL:
        if last_of_row(tickets, row, blocks, 1):
            finish(
                probs, room, masses, picked, tickets, bounds, ids, valid, seed, offset, row, probs_stride, probs_outer,
                probs_count, total_columns, blocks, top, least, shift, good, MASS, WIDTH, ROOM, INDEX, UNIT, PARTS,
                BLOCK,
            )  # fmt: skip


@triton.jit
def finish_rows(
    probs, peaks, sums, room, masses, picked, tickets, bounds, ids, valid, seed, offset, row_k, row_p,
    probs_stride, probs_outer, probs_count, top_k, top_p, total_columns,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(total_columns, BLOCK)
    top, least, shift, _k, _p, good = ranges(
        peaks, sums, row_k, row_p, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    finish(
        probs, room, masses, picked, tickets, bounds, ids, valid, seed, offset, row, probs_stride, probs_outer,
        probs_count, total_columns, blocks, top, least, shift, good, MASS, WIDTH, ROOM, INDEX, UNIT, PARTS, BLOCK,
    )  # fmt: skip


def renorm(call: Call, config: Config) -> tuple[Launch, ...]:
    """top_k_top_p_renorm."""
    found, last = _found(call, config, None)
    return *found, last


def sample(call: Call, config: Config) -> tuple[Launch, ...]:
    """top_k_top_p_sample."""
    found, _ = _found(call, config, {name: call[name] for name in ("ids", "valid", "seed", "offset")})
    return found


def _found(call: Call, config: Config, drawn: dict[str, Argument] | None) -> tuple[tuple[Launch, ...], Launch]:
    """The launches that find what is kept, and draw of it if that is asked for; and one that would write it all."""
    probs: TensorFacts = call.probs
    rows, columns = probs.rows, probs.columns
    blocks = triton.cdiv(columns, config.block)
    scratch = {
        name: Scratch(name, (rows, size), dtype)
        for name, size, dtype in (
            ("peaks", blocks, torch.int32), ("sums", blocks, torch.float32), ("counts", 1 << config.width, torch.int64),
            ("totals", blocks, torch.int64), ("picked", 2, torch.int64), ("tickets", TICKETS.value, torch.int32),
            ("room", config.room, torch.int64), ("masses", blocks, torch.int64), ("bounds", 2, torch.int64),
        )
    }  # fmt: skip
    numbers: dict[str, Argument] = {"row_k": call.row_k, "row_p": call.row_p}
    numbers |= {"top_k": columns if call.top_k is None else call.top_k}
    numbers |= {"top_p": 1.0 if call.top_p is None else call.top_p, "total_columns": columns}
    where: dict[str, Argument] = {"probs": probs, **row_places("probs", probs), "total_columns": columns}
    known = {"MASS": by_p(call), "WIDTH": config.width, "PARTS": triton.next_power_of_2(blocks)}
    sizes = {"INDEX": (columns - 1).bit_length(), "UNIT": unit_bits(columns), "BLOCK": config.block}
    every, each = (rows * blocks, 1, 1), (rows, 1, 1)
    options = {"num_warps": config.num_warps}
    tail = bool(config.tail)

    def of(*names: str) -> dict[str, Argument]:
        return {name: scratch[name] for name in names}

    ends = dict(drawn) if drawn is not None else {**of("bounds"), **dict.fromkeys(("ids", "valid", "seed", "offset"))}
    ends = {"bounds": None, **ends}
    gathered = {**where, **numbers, **of("peaks", "sums", "room", "masses", "picked", "tickets"), **ends}
    sifted = of("peaks", "sums", "counts", "totals", "picked")
    launches = [
        Launch(scan, every, {**where, **of("peaks", "sums", "counts", "tickets")},
               {"WIDTH": config.width, "BLOCK": config.block}, options),
        Launch(sift, every, {**where, **numbers, **sifted, **of("tickets")},
               {**known, "TAIL": tail, "UNIT": sizes["UNIT"], "BLOCK": config.block}, options),
    ]  # fmt: skip
    if not tail:
        launches.append(Launch(find_bins, each, {**numbers, **sifted, "blocks": blocks}, known, options))
    launches.append(Launch(gather, every, gathered, {**known, **sizes, "TAIL": tail, "ROOM": config.room}, options))
    if not tail:
        launches.append(Launch(finish_rows, each, gathered, {**known, **sizes, "ROOM": config.room}, options))
    last = {**where, **numbers, **of("peaks", "bounds", "masses"), "y": call.tensors.get("y"), "summed": blocks}
    return tuple(launches), Launch(write, every, last, {**sizes, "PARTS": known["PARTS"]}, options)
