"""How Triton runs top_k_top_p_renorm and top_k_top_p_sample: what is done with the key from which on tokens are kept,
and which launches find it. What is meant is said by the definitions; how the key is found in `triton_select`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.sampling.configs import keys_of, sorts
from tilewright.ops.sampling.selection import unit_bits
from tilewright.ops.sampling.triton_select import (
    LARGEST,
    choose,
    draw_word,
    keys,
    largest_keys,
    limits,
    mass,
    part_of,
    place,
    read,
    search,
    survey,
    tally,
    top_of,
)
from tilewright.ops.triton_rows import row_places

VALUE_BITS = 31


@triton.jit
def write(
    probs, peaks, bounds, masses, y, row_k, row_p, probs_stride, probs_outer, probs_count, top_k, top_p, total_columns,
    summed, INDEX: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Probabilities that are kept, over the sum of the row's `summed` masses. In float64: a sum may be any float32."""
    row, _, columns, inside = place(total_columns, BLOCK)
    value = tl.load(bounds + row * 2 + 1)
    bits, _bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
    top = top_of(peaks, row, tl.cdiv(total_columns, BLOCK), PARTS)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(masses + row * summed + part, mask=part < summed, other=0), axis=0)
    exponent = (tl.maximum(top >> 23, 1) - 127 - UNIT).to(tl.int64)
    unit = ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    _k, _p, good = limits(row_k, row_p, row, top_k, top_p, total_columns)
    good = good & (top > 0) & (top < LARGEST)
    factor = 1.0 / (tl.maximum(total, 1).to(tl.float64) * unit)
    share = (bits.to(tl.float32, bitcast=True).to(tl.float64) * factor).to(tl.float32)
    share = tl.where(keys(bits, columns, inside, INDEX) >= value, share, 0.0)
    share = tl.where(good, share, float("nan"))
    tl.store(y + row * total_columns + columns, share.to(y.dtype.element_ty), mask=inside)


@triton.jit
def draw(
    probs, peaks, bounds, masses, ids, valid, seed, offset, row_k, row_p, probs_stride, probs_outer, probs_count,
    top_k, top_p, total_columns, INDEX: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The block in which the drawn mass is reached looks for the token."""
    row, block, columns, inside = place(total_columns, BLOCK)
    blocks = tl.cdiv(total_columns, BLOCK)
    part = tl.arange(0, PARTS)
    every = tl.load(masses + row * blocks + part, mask=part < blocks, other=0)
    spot = part_of(tl.sum(every, axis=0), draw_word(seed, offset, row))
    spot -= tl.sum(tl.where(part < block, every, 0), axis=0)
    own = tl.sum(tl.where(part == block, every, 0), axis=0)
    top = top_of(peaks, row, blocks, PARTS)
    _k, _p, good = limits(row_k, row_p, row, top_k, top_p, total_columns)
    good = good & (top > 0) & (top < LARGEST)
    if good:
        if (spot >= 0) & (spot < own):
            bits, _bad = read(probs, row, columns, inside, probs_stride, probs_outer, probs_count)
            kept = keys(bits, columns, inside, INDEX) >= tl.load(bounds + row * 2 + 1)
            reached = tl.cumsum(tl.where(kept, mass(bits, top, UNIT), 0), axis=0)
            token = block * BLOCK + tl.sum(tl.where(reached <= spot, 1, 0), axis=0)
            tl.store(ids + row, token.to(tl.int32))
            tl.store(valid + row, good)
    elif block == 0:
        tl.store(ids + row, -1)
        tl.store(valid + row, good)


def renorm(call: Call, config: Config) -> tuple[Launch, ...]:
    """top_k_top_p_renorm."""
    return _found(call, config, "y")


def sample(call: Call, config: Config) -> tuple[Launch, ...]:
    """top_k_top_p_sample."""
    return _found(call, config, "ids")


def _found(call: Call, config: Config, what: str) -> tuple[Launch, ...]:
    probs: TensorFacts = call.probs
    rows, columns = probs.rows, probs.columns
    block = config.block
    blocks = triton.cdiv(columns, block)
    shared: dict[str, Argument] = {"probs": probs, **row_places("probs", probs), "total_columns": columns}
    numbers: dict[str, Argument] = {"row_k": call.row_k, "row_p": call.row_p}
    numbers |= {"top_k": columns if call.top_k is None else call.top_k}
    numbers |= {"top_p": 1.0 if call.top_p is None else call.top_p, "total_columns": columns}
    index = (columns - 1).bit_length()
    sizes = {"INDEX": index, "UNIT": unit_bits(columns), "PARTS": triton.next_power_of_2(blocks)}
    peaks, bounds = Scratch("peaks", (rows, blocks), torch.int32), Scratch("bounds", (rows, 2), torch.int64)
    grid, options = (rows * blocks, 1, 1), {"num_warps": config.num_warps}
    drawn: dict[str, Argument] = {}
    if what == "ids":
        drawn = {"ids": call.ids, "valid": call.valid, "seed": call.seed, "offset": call.offset}
    if sorts(call, block):
        k, wide_row = keys_of(call, block)
        found = Scratch("found", (rows, blocks, k), torch.int64)
        masses = Scratch("masses", (rows, 1), torch.int64)
        wide = {"K": k, "WIDE": wide_row, **sizes}
        kept: dict[str, Argument] = {"peaks": peaks, "found": found, **numbers, "blocks": blocks}
        kept |= drawn or dict.fromkeys(("ids", "valid", "seed", "offset"))
        kept |= dict.fromkeys(("bounds", "masses")) if drawn else {"bounds": bounds, "masses": masses}
        first = Launch(largest_keys, grid, {**shared, "peaks": peaks, "found": found},
                       {"K": k, "INDEX": index, "BLOCK": block}, options)  # fmt: skip
        second = Launch(choose, (rows, 1, 1), kept, wide, {"num_warps": config.choosing})
        if drawn:
            return first, second
        last = {**shared, **numbers, "peaks": peaks, "bounds": bounds, "masses": masses, "y": call.y, "summed": 1}
        return first, second, Launch(write, grid, last, {**sizes, "BLOCK": block}, options)
    masses = Scratch("masses", (rows, blocks), torch.int64)
    steps = _steps(call, VALUE_BITS + index, config.digit)
    cells = max(1, len(steps)) << config.digit
    counts = Scratch("counts", (rows, cells), torch.int64) if steps else None
    state = Scratch("state", (rows, max(1, len(steps)), 2), torch.int64)
    both = {"STEPS": max(1, len(steps)), "BIN": 1 << config.digit, **sizes, "BLOCK": block}
    places: dict[str, Argument] = {"peaks": peaks, "counts": counts, "state": state, "bounds": bounds, "cells": cells}
    launches = [Launch(survey, grid, {**shared, "peaks": peaks, "counts": counts, "cells": cells}, {"BLOCK": block},
                       options)]  # fmt: skip
    before: dict[str, Any] = {"BEFORE": "none", "MASS_BEFORE": False, "WIDTH_BEFORE": 1}
    for place_, step in enumerate(steps):
        launches.append(
            Launch(search, grid, {**shared, **numbers, **places}, {**both, **step, **before, "STEP": place_}, options)
        )
        before = {"BEFORE": "first" if step["STARTS"] else "later", "MASS_BEFORE": step["MASS"]}
        before["WIDTH_BEFORE"] = step["WIDTH"]
    searches = {step["MASS"] for step in steps}
    ends = {**both, **before, "STEP": len(steps), "BOTH": len(searches) == 2}
    launches.append(Launch(tally, grid, {**shared, **numbers, **places, "masses": masses}, ends, options))
    last = {**shared, **numbers, "peaks": peaks, "bounds": bounds, "masses": masses}
    small = {**sizes, "BLOCK": block}
    if drawn:
        return (*launches, Launch(draw, grid, {**last, **drawn}, small, options))
    return (*launches, Launch(write, grid, {**last, "y": call.y, "summed": blocks}, small, options))


def _steps(call: Call, bits: int, digit: int) -> list[dict[str, Any]]:
    """The digits of keys, from the highest, of the search for k and of that for p, where there are such."""
    by_k = call.has("row_k") or (call.top_k is not None and call.top_k < call.probs.columns)
    by_p = call.has("row_p") or (call.top_p is not None and call.top_p < 1.0)
    found = []
    for is_mass in [False] * by_k + [True] * by_p:
        left = bits
        while left > 0:
            width = min(digit, left)
            starts, left = left == bits, left - width
            limited = is_mass and by_k and call.order == "top_k_first"
            found.append({"MASS": is_mass, "STARTS": starts, "LIMITED": limited, "SHIFT": left, "WIDTH": width})
    return found
