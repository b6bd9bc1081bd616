"""How rows of the sampling family are cut into programs, best guess first. Needs no Triton.

Keys of top_k_top_p: `block` columns a program, `num_warps`, and `choosing` warps of the program that has a row's keys.
Keys of softmax: `rows` a tile and `block` columns of it; `split` of 1 cuts a row among programs, which pass over it
twice; `num_warps`.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.ops.configs import power_of_2_at_least

WIDEST_ROW = 65536
"""Columns that one program holds in its registers."""

MOST_COLUMNS = 1 << 26
"""Of a row that programs share: each of them adds up what all have left."""


def main_of(call: Call) -> TensorFacts:
    found: TensorFacts = call.dy if "dy" in call.tensors else call.x
    return found


def softmax_configs(call: Call) -> tuple[Config, ...]:
    facts = main_of(call)
    block = power_of_2_at_least(facts.columns)
    cut = (
        Config(rows=1, block=4096, split=1, num_warps=4),
        Config(rows=1, block=8192, split=1, num_warps=8),
        Config(rows=1, block=16384, split=1, num_warps=16),
    )
    if block > WIDEST_ROW:
        return (cut[1], cut[0], cut[2])
    if block >= 8192:
        warps = min(32, max(8, block // 1024))
        whole = (Config(rows=1, block=block, split=0, num_warps=warps),
                 Config(rows=1, block=block, split=0, num_warps=max(4, warps // 2)))  # fmt: skip
        few = power_of_2_at_least(facts.rows) * 4 <= call.device.multiprocessors
        return (*cut[:2], *whole) if few else (*whole, *cut[:2])
    rows = max(1, min(64, 2048 // block))
    found = (
        Config(rows=rows, block=block, split=0, num_warps=4),
        Config(rows=max(1, rows // 2), block=block, split=0, num_warps=2 if block < 2048 else 8),
        Config(rows=rows * 2, block=block, split=0, num_warps=8),
        Config(rows=1, block=block, split=0, num_warps=max(1, min(8, block // 512))),
    )
    return tuple(dict.fromkeys(found))


def top_configs(call: Call) -> tuple[Config, ...]:
    """Of few columns one block. What programs share is small beside what they read where blocks are large."""
    probs: TensorFacts = call.probs
    width = max(128, power_of_2_at_least(probs.columns))
    found = ((4096, 8), (2048, 4), (8192, 16), (4096, 16), (8192, 8))
    least = max(128, power_of_2_at_least(-(-probs.columns // 4096)))
    return tuple(dict.fromkeys(
        Config(block=min(width, max(block, least)), num_warps=warps, choosing=8) for block, warps in found
    ))  # fmt: skip
