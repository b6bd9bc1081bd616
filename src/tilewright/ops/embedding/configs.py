"""How a call of the embedding family is cut into programs and threads, best guess first. Needs no Triton or TileLang.

A gather only waits for memory: a guess is about 16 bytes a thread and access, and about enough rows under way. Nothing
here was measured yet.
"""

from __future__ import annotations

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config

WIDEST = 1024
"""Columns of one program; wider rows are cut."""


def power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def position_dtype(count: int) -> torch.dtype:
    """What holds numbers from 0 to `count`."""
    return torch.int32 if count < 2**31 else torch.int64


def _tile(columns: int, itemsize: int, warps: int, accesses: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile of which each thread holds `accesses` times 16 bytes."""
    block = min(power_of_2_at_least(columns), WIDEST)
    rows = max(1, 32 * warps * accesses * 16 // itemsize // block)
    return min(rows, most, power_of_2_at_least(max(1, 65536 // block))), block


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `bags` and `block` columns a program; `ahead` rows of each bag under way; `num_warps`."""
    weight: TensorFacts = call.weight
    bags = power_of_2_at_least(call.indices.rows)
    found = []
    for warps, accesses, ahead in ((4, 1, 8), (2, 1, 8), (4, 1, 4), (8, 1, 8), (4, 2, 4), (1, 1, 16)):
        rows, block = _tile(weight.columns, weight.dtype.itemsize, warps, accesses, bags)
        found.append(Config(bags=rows, block=block, ahead=ahead, num_warps=warps))
    return tuple(dict.fromkeys(found))


def sorted_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `rows` and `block` columns a program; `chunk` occurrences that one program adds up; `num_warps`."""
    weight: TensorFacts = call.weight
    found = []
    for warps, chunk in ((1, 64), (2, 64), (4, 64), (1, 128), (1, 32), (2, 256)):
        rows, block = _tile(weight.columns, weight.dtype.itemsize, warps, 1, power_of_2_at_least(weight.rows))
        found.append(Config(rows=rows, block=block, chunk=chunk, num_warps=warps))
    return tuple(dict.fromkeys(found))


def atomic_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `bags` and `block` columns a program; `num_warps`. Atomics take a float each: 4 bytes a thread and access."""
    weight: TensorFacts = call.weight
    bags = power_of_2_at_least(call.indices.rows)
    found = []
    for warps, accesses in ((4, 1), (8, 1), (4, 2)):
        rows, block = _tile(weight.columns, 8, warps, accesses, bags)
        found.append(Config(bags=rows, block=block, num_warps=warps))
    return tuple(dict.fromkeys(found))
