"""How a call of the embedding family is cut into programs and threads, best guess first. Needs no Triton or TileLang.

A gather only waits for memory: a guess is about 16 bytes a thread and access, and about enough rows under way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least

WIDEST = 1024
"""Columns of one program; wider rows are cut."""


def position_dtype(count: int) -> torch.dtype:
    """What holds numbers from 0 to `count`."""
    return torch.int32 if count < 2**31 else torch.int64


def _tile(columns: int, elements: int, most: int) -> tuple[int, int]:
    """Rows, `most` at most, and columns of a tile of about so many elements."""
    block = min(power_of_2_at_least(columns), WIDEST)
    return min(max(1, elements // block), most), block


def vector(facts: TensorFacts) -> int:
    """Elements of the widest access that the rows of a tensor allow."""
    if facts.column_stride != 1:
        return 1
    return math.gcd(max(1, facts.vector_bytes() // facts.dtype.itemsize), facts.columns)


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `bags` and `block` columns a program; `split` parts of a bag side by side; `ahead` rows of each under way;
    `num_warps`."""
    weight: TensorFacts = call.weight
    bags = power_of_2_at_least(call.indices.rows)
    found: list[Config] = []
    wanted = [(4, 2, 4), (4, 1, 4), (8, 2, 4), (4, 1, 8), (2, 1, 8), (1, 1, 8)]
    few = bags <= 4 * call.device.multiprocessors  # the time of one bag counts
    for warps, accesses, ahead in [(8, 1, 4), (4, 1, 4), *wanted] if few else wanted:
        elements = 32 * warps * accesses * vector(weight)
        rows, block = _tile(weight.columns, elements, 64)
        warps = max(warps, min(8, block // (64 * vector(weight))))  # a thread holds two vectors of a wide row at most
        split = min(rows, power_of_2_at_least(call.indices.columns)) if few and len(found) < 2 else 1
        found.append(Config(bags=min(rows // split, bags), split=split, block=block, ahead=ahead, num_warps=warps))
    return tuple(dict.fromkeys(found))


def sorted_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `rows` and `block` columns a program; `ahead` occurrences of each row under way; `chunk` occurrences that
    one program adds up; `num_warps`."""
    weight: TensorFacts = call.weight
    found = []
    wanted = ((4, 1, 2, 64), (2, 1, 4, 64), (4, 1, 1, 64), (4, 1, 4, 128), (1, 1, 4, 64))
    for warps, accesses, ahead, chunk in wanted:
        elements = 32 * warps * accesses * vector(call.dout)
        rows, block = _tile(weight.columns, elements, power_of_2_at_least(weight.rows))
        found.append(Config(rows=rows, block=block, ahead=ahead, chunk=chunk, num_warps=warps))
    return tuple(dict.fromkeys(found))


def atomic_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `bags` and `block` columns a program; `num_warps`. A thread adds a few floats, 4 bytes an atomic."""
    weight: TensorFacts = call.weight
    bags = power_of_2_at_least(call.indices.rows)
    found = []
    for warps, accesses in ((4, 2), (8, 2), (4, 4)):
        rows, block = _tile(weight.columns, 32 * warps * accesses, bags)
        found.append(Config(bags=rows, block=block, num_warps=warps))
    return tuple(dict.fromkeys(found))


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang program takes one bag, or one row of the table."""
    facts = call.weight if "dweight" in call.tensors else call.indices
    blocks = power_of_2_at_least(-(-call.weight.columns // 32))
    if power_of_2_at_least(facts.rows) * blocks > MOST_BLOCKS:
        yield Reason(facts.name, f"{facts.rows} rows; takes {MOST_BLOCKS // blocks}")


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a row and `depth` vectors of a thread; `ahead` rows under way; `chunk` as `sorted_configs`."""
    facts: TensorFacts = call.dout if "dweight" in call.tensors else call.weight
    threads = min(256, max(32, power_of_2_at_least(facts.columns // vector(facts))))
    wanted = ((threads, 2, 2, 64), (threads, 2, 4, 64), (max(32, threads // 2), 4, 2, 32), (threads, 1, 2, 256))
    if "dweight" not in call.tensors:
        wanted = ((threads, 2, 8, 0), (threads, 2, 4, 0), (max(32, threads // 2), 2, 8, 0), (threads, 2, 16, 0))
    return tuple(dict.fromkeys(Config(threads=t, depth=d, ahead=a, chunk=c) for t, d, a, c in wanted))
