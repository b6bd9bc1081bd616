"""How Triton finds what k, and p of it, keep with one pass over a row: the largest keys of small groups of tokens.

`scan` finds them. A bound that k of them reach is reached by k tokens. `choose`, one program a row, takes one that few
groups more than k reach, reads those groups again and no others, and finds among their keys the least that is kept. The
bound is on keys, of which no two are equal, so that ties cost nothing; and a group's tokens lie apart in its block, so
that likely tokens side by side are of many groups. Where they meet all the same, and more keys reach the bound than
there is room for, it is raised. Keys, masses and what is drawn are those of `triton_select`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.sampling.configs import by_p
from tilewright.ops.sampling.groups import room_of
from tilewright.ops.sampling.selection import unit_bits
from tilewright.ops.sampling.triton_bins_search import LINE, least_of, lines
from tilewright.ops.sampling.triton_draw import limits_of, shares
from tilewright.ops.sampling.triton_select import LARGEST, draw_word, keys, limits, mass, part_of, place, read, share_of
from tilewright.ops.triton_rows import row_places

ENDS = tl.constexpr(4)
"""What of a row there is one of: the least key that is kept, the mass of what is, and the bits of the row's largest, 0
where nothing is kept for want of a distribution, a k or a p."""
READ = tl.constexpr(2048)
"""Tokens that are read again at a time."""


@triton.jit
def record_of(space, row, WIDE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr):
    """What is kept of a row, in one piece of memory, all int64: ends; the largest keys of groups; which groups are read
    again; keys of these; by blocks, the largest bits and the mass (JOINT)."""
    return space + row * (ENDS + WIDE + 2 * ROOM + 2 * PARTS)


@triton.jit
def scan(
    probs, space, probs_stride, probs_outer, probs_count, total_columns,
    JOINT: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, INDEX: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest key of each group; one of LARGEST, where something in it is no probability."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, block, _, _ = place(total_columns, BLOCK)
    base = record_of(space, row, WIDE, ROOM, PARTS)
    group = tl.arange(0, BLOCK // GROUP)
    columns = block * BLOCK + tl.arange(0, GROUP)[:, None] * (BLOCK // GROUP) + group[None, :]
    inside = columns < total_columns
    bits, bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    largest = tl.max(keys(tl.where(bad, LARGEST, bits), columns, inside, INDEX), axis=0)
    tl.store(base + ENDS + block * (BLOCK // GROUP) + group, largest)
    if JOINT:
        tl.store(base + ENDS + WIDE + 2 * ROOM + block, tl.max(largest, axis=0) >> INDEX)


@triton.jit
def weigh(
    probs, space, probs_stride, probs_outer, probs_count, total_columns,
    WIDE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The mass of each block, of which p is a share in the order "joint"."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, block, columns, inside = place(total_columns, BLOCK)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tops = record_of(space, row, WIDE, ROOM, PARTS) + ENDS + WIDE + 2 * ROOM
    part = tl.arange(0, PARTS)
    every = tl.load(tops + part, mask=part < tl.cdiv(total_columns, BLOCK), other=0)
    top = tl.max(every, axis=0).to(tl.int32)
    tl.store(tops + PARTS + block, tl.sum(mass(bits, top, UNIT), axis=0))


@triton.jit
def bound_of(largest, k, INDEX: tl.constexpr):
    """A key that k of the largest keys or a few more reach, and how many do; the least of a token that is not 0, where
    fewer than k reach that."""
    low, high = tl.full([], 1 << INDEX, tl.int64), tl.max(largest)
    found = tl.sum((largest >= low).to(tl.int32))
    while (low < high) & (found > k + (k >> 2)):
        middle = low + ((high - low + 1) >> 1)
        upper = tl.sum((largest >= middle).to(tl.int32))
        if upper >= k:
            low = middle
            found = upper
        else:
            high = middle - 1
    return low, found


@triton.jit
def collect(
    probs, base, row, found, least, probs_stride, probs_outer, probs_count, total_columns,
    WIDE: tl.constexpr, ROOM: tl.constexpr, INDEX: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys from `least` on, of the `found` listed groups, go where there is room; returns how many there are."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    SOME: tl.constexpr = READ // GROUP
    total = tl.full([], 0, tl.int32)
    for start in tl.range(0, found, SOME):
        which = start + tl.arange(0, SOME)
        group = tl.load(base + ENDS + WIDE + which, mask=which < found, other=0)
        first = (group // GROUPS) * BLOCK + group % GROUPS
        columns = first[:, None] + tl.arange(0, GROUP)[None, :] * GROUPS
        inside = (which < found)[:, None] & (columns < total_columns)
        bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
        key = keys(bits, columns, inside, INDEX)
        stays = key >= least
        some = tl.sum(stays.to(tl.int32), axis=1)
        before = total + tl.cumsum(some, axis=0) - some
        spot = before[:, None] + tl.cumsum(stays.to(tl.int32), axis=1) - 1
        tl.store(base + ENDS + WIDE + ROOM + spot, key, mask=stays & (spot < ROOM))
        total += tl.sum(some, axis=0)
    tl.debug_barrier()  # others read what one thread has stored, or store there again
    return total


@triton.jit
def choose(
    probs, space, ids, valid, seed, offset, row_k, row_p, k_step, p_step, probs_stride, probs_outer, probs_count,
    top_k, top_p, total_columns, blocks,
    SHARE: tl.constexpr, JOINT: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr,
    INDEX: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: the least key that k, and with SHARE p, keep, and the token that is drawn."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        if ids is None:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    base = record_of(space, row, WIDE, ROOM, PARTS)
    k, p, good = limits(row_k, row_p, k_step, p_step, row, top_k, top_p, total_columns)
    group = lines(0, WIDE)
    largest = tl.load(base + ENDS + group, mask=group < blocks * (BLOCK // GROUP), other=-1)
    highest = tl.max(largest)
    top = (highest >> INDEX).to(tl.int32)
    good = good & (top > 0) & (top < LARGEST)

    least, found = bound_of(largest, k, INDEX)
    listed = largest >= least
    some = tl.sum(listed.to(tl.int32), axis=1)
    spot = (tl.cumsum(some, axis=0) - some)[:, None] + tl.cumsum(listed.to(tl.int32), axis=1) - 1
    tl.store(base + ENDS + WIDE + spot, group, mask=listed)
    tl.debug_barrier()  # others read what one thread has stored
    collected = collect(
        probs, base, row, found, least, probs_stride, probs_outer, probs_count, total_columns, WIDE, ROOM, INDEX, GROUP,
        BLOCK,
    )  # fmt: skip
    if collected > ROOM:
        while (collected > ROOM) | (collected < k):
            middle = least + ((highest - least + 1) >> 1)
            collected = collect(
                probs, base, row, found, middle, probs_stride, probs_outer, probs_count, total_columns, WIDE, ROOM,
                INDEX, GROUP, BLOCK,
            )  # fmt: skip
            if collected < k:
                highest = middle - 1
            else:
                least = middle

    at = tl.arange(0, ROOM)
    key = tl.load(base + ENDS + WIDE + ROOM + at, mask=at < collected, other=-1)
    kept_from = least_of(key, tl.where(key >= 0, 1, 0).to(tl.int64), k)
    amount = tl.where(key >= kept_from, mass((tl.maximum(key, 0) >> INDEX).to(tl.int32), top, UNIT), 0)
    if SHARE:
        total = tl.sum(amount, axis=0)
        if JOINT:
            part = tl.arange(0, PARTS)
            total = tl.sum(tl.load(base + ENDS + WIDE + 2 * ROOM + PARTS + part, mask=part < blocks, other=0), axis=0)
        if p < 1.0:
            nucleus = tl.where(key >= kept_from, key, -1)
            kept_from = tl.maximum(kept_from, least_of(nucleus, amount, share_of(total, p)))
        amount = tl.where(key >= kept_from, amount, 0)
    total = tl.sum(amount, axis=0)
    if ids is None:
        tl.store(base, kept_from)
        tl.store(base + 1, total)
        tl.store(base + 2, tl.where(good, top, 0).to(tl.int64))
    else:
        turned = tl.where(key >= kept_from, key & ((1 << INDEX) - 1), -1)  # the lowest index first
        spot = part_of(total, draw_word(seed, offset, row))
        token = (1 << INDEX) - 1 - least_of(turned, amount, spot + 1)
        tl.store(ids + row, tl.where(good, token, -1).to(tl.int32))
        tl.store(valid + row, good)


@triton.jit
def write(
    probs, space, y, probs_stride, probs_outer, probs_count, total_columns,
    WIDE: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, INDEX: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Probabilities that are kept, over the sum of their masses."""
    row, _, columns, inside = place(total_columns, BLOCK)
    base = record_of(space, row, WIDE, ROOM, PARTS)
    bits, _ = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    if PDL:
        tl.extra.cuda.gdc_wait()
    kept_from, total, top = tl.load(base), tl.load(base + 1), tl.load(base + 2).to(tl.int32)
    share = shares(bits, keys(bits, columns, inside, INDEX) >= kept_from, total, top, top > 0, UNIT)
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
    parts, room = triton.next_power_of_2(blocks), room_of(call)
    wide = max(LINE.value, triton.next_power_of_2(blocks * (config.block // config.group)))
    space = Scratch("space", (rows, ENDS.value + wide + 2 * room + 2 * parts), torch.int64)
    where: dict[str, Argument] = {"probs": probs, "space": space, **row_places("probs", probs)}
    where["total_columns"] = columns
    share = by_p(call)
    joint, pdl = share and call.order == "joint", bool(config.pdl)
    pieces = {"WIDE": wide, "ROOM": room, "PARTS": parts, "BLOCK": config.block, "PDL": pdl}
    index, unit = {"INDEX": (columns - 1).bit_length()}, {"UNIT": unit_bits(columns)}
    every, options = (rows * blocks, 1, 1), {"num_warps": config.num_warps}
    first = Launch(scan, every, where, {**pieces, **index, "GROUP": config.group, "JOINT": joint}, options)
    second = Launch(weigh, every, where, {**pieces, **unit}, options, pdl=pdl)
    ends = {**where, **limits_of(call), "blocks": blocks}
    ends |= drawn or dict.fromkeys(("ids", "valid", "seed", "offset"))
    sizes = {**pieces, **index, **unit, "GROUP": config.group, "SHARE": share, "JOINT": joint}
    chosen = {"num_warps": config.choosing}
    if call.device.kind == "cuda":  # ptxas rather spills a register or two than have a block less on a multiprocessor
        chosen["maxnreg"] = min(255, 65536 // (32 * config.choosing))
    third = Launch(choose, (rows, 1, 1), ends, sizes, chosen, pdl=pdl)
    last = Launch(write, every, {**where, "y": call.tensors.get("y")}, {**pieces, **index, **unit}, options, pdl=pdl)
    return (first, second, third) if joint else (first, third), last
