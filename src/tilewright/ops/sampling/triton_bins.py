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
from tilewright.ops.sampling.triton_bins_search import (
    ENDS,
    GATHERED,
    LINE,
    SIFTED,
    TAKEN,
    find_bin,
    from_room,
    from_row,
    last_of_row,
    lines,
    ranges,
    reaching,
    record_of,
    weight,
)
from tilewright.ops.sampling.triton_draw import limits_of, shares
from tilewright.ops.sampling.triton_select import LARGEST, draw_word, keys, mass, part_of, place, read
from tilewright.ops.triton_rows import row_places


@triton.jit
def scan(
    probs, space, probs_stride, probs_outer, probs_count, total_columns,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Marks of each block: LARGEST, where something in it is no probability. Counts and tickets begin at 0."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, block, columns, inside = place(total_columns, BLOCK)
    base = record_of(space, row, WIDTH, ROOM, PARTS)
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    peak = tl.max(tl.where(bad, LARGEST, bits), axis=0).to(tl.int64)
    total = tl.sum(bits.to(tl.float32, bitcast=True), axis=0).to(tl.int32, bitcast=True)
    tl.store(base + ENDS + block, (peak << 32) | total.to(tl.int64))
    counts = base + ENDS + 3 * PARTS + ROOM
    for start in tl.range(block * BLOCK, 1 << WIDTH, tl.cdiv(total_columns, BLOCK) * BLOCK):
        cell = start + tl.arange(0, BLOCK)
        tl.store(counts + cell, tl.zeros([BLOCK], tl.int64), mask=cell < (1 << WIDTH))
    if block == 0:
        tl.store(base + tl.arange(0, ENDS), tl.zeros([ENDS], tl.int64))


@triton.jit
def early(
    probs, row, columns, inside, probs_stride, probs_outer, probs_count, WAITS: tl.constexpr, TELLS: tl.constexpr
):
    """`read`, before it waits for the launch ahead (PDL). Nothing but `scan` has no wait, and when it starts the
    probabilities are there: what launches leave each other is touched after the wait alone. TELLS: the launch behind
    may start and do the same."""
    if TELLS:
        tl.extra.cuda.gdc_launch_dependents()
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    if WAITS:
        tl.extra.cuda.gdc_wait()
    return bits, bad


@triton.jit
def sift(
    probs, space, row_k, row_p, k_step, p_step, probs_stride, probs_outer, probs_count, top_k, top_p, total_columns,
    MASS: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts, or masses, of a row by bins, and of each block in all. TAIL: the last program finds the bin."""
    row, block, columns, inside = place(total_columns, BLOCK)
    base, blocks = record_of(space, row, WIDTH, ROOM, PARTS), tl.cdiv(total_columns, BLOCK)
    bits, _ = early(probs, row, columns, inside, probs_stride, probs_outer, probs_count, PDL, PDL)
    top, least, shift, k, p, good = ranges(
        base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    amount = weight(bits, top, MASS, UNIT)
    tl.store(base + ENDS + PARTS + block, tl.sum(amount, axis=0))
    counted = (bits >= least) & (amount > 0) & good
    cells = base + ENDS + 3 * PARTS + ROOM + ((top - bits) >> shift)
    tl.atomic_add(cells, amount, mask=counted, sem="relaxed")
    if TAIL:
        if last_of_row(base + SIFTED, blocks):
            find_bin(base, blocks, k, p, good, MASS, WIDTH, ROOM, PARTS)


@triton.jit
def find_bins(
    space, row_k, row_p, k_step, p_step, top_k, top_p, total_columns, blocks,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    base = record_of(space, row, WIDTH, ROOM, PARTS)
    _top, _least, _shift, k, p, good = ranges(
        base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    find_bin(base, blocks, k, p, good, MASS, WIDTH, ROOM, PARTS)


@triton.jit
def finish(
    probs, base, ids, valid, seed, offset, row, probs_stride, probs_outer, probs_count, total_columns, blocks,
    top, least, shift, good,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row: the least key that is kept, masses of all blocks with those of its bin, and the token that is drawn."""
    reached = tl.load(base, cache_modifier=".cg")
    want = tl.load(base + 1, cache_modifier=".cg")
    gathered = tl.load(base + TAKEN, cache_modifier=".cg")
    masses = base + ENDS + 2 * PARTS
    kept_from = tl.full([], 0, tl.int64)
    if reached < (1 << WIDTH):
        if gathered <= ROOM:
            kept_from = from_room(base, gathered, want, top, MASS, ROOM, INDEX, UNIT, PARTS, BLOCK)
        else:
            highest = top.to(tl.int64) - (reached << shift)
            lowest = tl.maximum(highest - (tl.full([], 1, tl.int64) << shift) + 1, least)
            kept_from = from_row(
                probs, masses, row, probs_stride, probs_outer, probs_count, total_columns, blocks, top, lowest << INDEX,
                (highest << INDEX) | ((1 << INDEX) - 1), want, MASS, INDEX, UNIT, BLOCK,
            )  # fmt: skip
    if ids is None:
        tl.debug_barrier()  # all threads have read what was wanted
        tl.store(base + 1, kept_from)
    else:
        tl.debug_barrier()  # masses are read by other threads than wrote them
        part = tl.arange(0, PARTS)
        every = tl.load(masses + part, mask=part < blocks, other=0, cache_modifier=".cg")
        spot = part_of(tl.sum(every, axis=0), draw_word(seed, offset, row))
        before = tl.cumsum(every, axis=0) - every
        hit = (before <= spot) & (spot < before + every)
        drawn = tl.sum(tl.where(hit, part, 0), axis=0).to(tl.int64)
        spot -= tl.sum(tl.where(hit, before, 0), axis=0)
        columns = lines(drawn * BLOCK, BLOCK)
        inside = columns < total_columns
        bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
        stays = keys(bits, columns, inside, INDEX) >= kept_from
        token, _ = reaching(tl.where(stays, mass(bits, top, UNIT), 0), spot + 1, BLOCK // LINE)
        token += drawn * BLOCK
        tl.store(ids + row, tl.where(good, token, -1).to(tl.int32))
        tl.store(valid + row, good)


@triton.jit
def gather(
    probs, space, ids, valid, seed, offset, row_k, row_p, k_step, p_step, probs_stride, probs_outer, probs_count,
    top_k, top_p, total_columns,
    MASS: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keys of the bin that was found go where there is room for them, in any order; the mass of all bins above it is
    added up for each block. TAIL: the last program of a row finishes it."""
    row, block, _, _ = place(total_columns, BLOCK)
    columns = lines(block * BLOCK, BLOCK)
    inside = columns < total_columns
    base, blocks = record_of(space, row, WIDTH, ROOM, PARTS), tl.cdiv(total_columns, BLOCK)
    bits, _ = early(probs, row, columns, inside, probs_stride, probs_outer, probs_count, PDL, PDL and ids is None)
    top, least, shift, _k, _p, good = ranges(
        base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    reached = tl.load(base, cache_modifier=".cg").to(tl.int32)
    own = tl.where(inside & (bits >= least), (top - bits) >> shift, 1 << WIDTH)
    above = (own < reached) | (reached == (1 << WIDTH))
    tl.store(base + ENDS + 2 * PARTS + block, tl.sum(tl.where(above, mass(bits, top, UNIT), 0)))
    found = (own == reached) & (reached < (1 << WIDTH))
    some = tl.sum(found.to(tl.int32), axis=1)
    total = tl.sum(some, axis=0)
    if total > 0:
        start = tl.atomic_add(base + TAKEN, total.to(tl.int64), sem="relaxed")
        before = tl.cumsum(some, axis=0) - some
        spot = start + before[:, None] + tl.cumsum(found.to(tl.int32), axis=1) - 1
        key = keys(bits, columns, inside, INDEX)
        tl.store(base + ENDS + 3 * PARTS + spot, key, mask=found & (spot < ROOM))
    if TAIL:
        if last_of_row(base + GATHERED, blocks):
            finish(
                probs, base, ids, valid, seed, offset, row, probs_stride, probs_outer, probs_count, total_columns,
                blocks, top, least, shift, good, MASS, WIDTH, ROOM, INDEX, UNIT, PARTS, BLOCK,
            )  # fmt: skip


@triton.jit
def finish_rows(
    probs, space, ids, valid, seed, offset, row_k, row_p, k_step, p_step, probs_stride, probs_outer, probs_count,
    top_k, top_p, total_columns,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    base, blocks = record_of(space, row, WIDTH, ROOM, PARTS), tl.cdiv(total_columns, BLOCK)
    top, least, shift, _k, _p, good = ranges(
        base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    finish(
        probs, base, ids, valid, seed, offset, row, probs_stride, probs_outer, probs_count, total_columns, blocks,
        top, least, shift, good, MASS, WIDTH, ROOM, INDEX, UNIT, PARTS, BLOCK,
    )  # fmt: skip


@triton.jit
def write(
    probs, space, y, row_k, row_p, k_step, p_step, probs_stride, probs_outer, probs_count, top_k, top_p, total_columns,
    MASS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Probabilities that are kept, over the sum of their masses."""
    row, _, columns, inside = place(total_columns, BLOCK)
    base, blocks = record_of(space, row, WIDTH, ROOM, PARTS), tl.cdiv(total_columns, BLOCK)
    bits, _ = early(probs, row, columns, inside, probs_stride, probs_outer, probs_count, PDL, False)
    top, _least, _shift, _k, _p, good = ranges(
        base, row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns, blocks, MASS, WIDTH, PARTS
    )  # fmt: skip
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(base + ENDS + 2 * PARTS + part, mask=part < blocks, other=0), axis=0)
    kept = keys(bits, columns, inside, INDEX) >= tl.load(base + 1)
    share = shares(bits, kept, total, top, good, UNIT)
    tl.store(y + row * total_columns + columns, share.to(y.dtype.element_ty), mask=inside)


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
    parts = triton.next_power_of_2(blocks)
    space = Scratch("space", (rows, ENDS.value + 3 * parts + config.room + (1 << config.width)), torch.int64)
    where: dict[str, Argument] = {"probs": probs, **row_places("probs", probs), "total_columns": columns}
    numbers: dict[str, Argument] = {"space": space, **limits_of(call)}
    pieces = {"WIDTH": config.width, "ROOM": config.room, "PARTS": parts}
    cut = {"BLOCK": config.block}
    search = {"MASS": by_p(call), **pieces}
    draw = {**search, "INDEX": (columns - 1).bit_length(), "UNIT": unit_bits(columns), **cut}
    counting = {**search, "UNIT": draw["UNIT"], **cut}
    every, each = (rows * blocks, 1, 1), (rows, 1, 1)
    options, tail = {"num_warps": config.num_warps}, bool(config.tail)
    pdl = bool(config.pdl)
    within = {}
    if call.device.kind == "cuda":  # ptxas rather spills a register or two than have a block less on a multiprocessor
        within = {"maxnreg": max(96, min(12 * config.block, 65536) // (32 * config.num_warps))}
    ends = {**where, **numbers, **(drawn or dict.fromkeys(("ids", "valid", "seed", "offset")))}
    launches = [
        Launch(scan, every, {**where, "space": space}, {**pieces, **cut, "PDL": pdl}, options),
        Launch(sift, every, {**where, **numbers}, {**counting, "TAIL": tail, "PDL": pdl}, options, pdl=pdl),
        Launch(gather, every, ends, {**draw, "TAIL": tail, "PDL": pdl}, {**options, **within}, pdl=pdl),
    ]
    if not tail:
        launches.insert(2, Launch(find_bins, each, {**numbers, "blocks": blocks}, search, options))
        launches.append(Launch(finish_rows, each, ends, draw, {**options, **within}))
    last = {**where, **numbers, "y": call.tensors.get("y")}
    return tuple(launches), Launch(write, every, last, {**draw, "PDL": pdl}, options, pdl=pdl)
