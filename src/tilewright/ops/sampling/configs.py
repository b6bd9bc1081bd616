"""How rows of the sampling family are cut into programs, best guess first. Needs no Triton.

Keys of top_k_top_p: `block` columns a program, `num_warps`, `choosing` warps of the program that has a row's keys, and
`digit` bits of a key that a step tells.
Keys of the search by bins: `block`, `num_warps`; `tail` of 1 lets the last program of a row do what comes once a row,
of 0 a launch of its own; `pdl` of 1 lets a launch begin before the one ahead ends; 2^`width` bins, and `room` for keys
of one of them.
Keys of softmax: `rows` a tile and `block` columns of it; `split` of 1 cuts a row among programs, which pass over it
twice; `num_warps`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import few_blocks, power_of_2_at_least
from tilewright.ops.tilelang_places import vector

WIDEST_ROW, WIDEST_BACKWARD = 32768, 16384
"""Columns that one program holds in its registers, of one tensor and of two: of twice as many some spill."""

MOST_BLOCKS = 4096
"""Of a row of probabilities: each program of a later launch looks at what all have left."""
FEW_ROWS = 8
MOST_CHOSEN = 8192
"""Keys that one program sorts: of twice as many registers spill, with any number of warps."""
WIDEST_BLOCK = 8192
MOST_COLUMNS = 1 << 26
"""Of a row that programs share: each of them adds up what all have left."""


def main_of(call: Call) -> TensorFacts:
    found: TensorFacts = call.dy if "dy" in call.tensors else call.x
    return found


def softmax_configs(call: Call) -> tuple[Config, ...]:
    facts = main_of(call)
    block, backward = power_of_2_at_least(facts.columns), "dy" in call.tensors
    cut = (
        Config(rows=1, block=4096, split=1, num_warps=4),
        Config(rows=1, block=8192, split=1, num_warps=16 if backward else 8),
        Config(rows=1, block=16384, split=1, num_warps=16),
    )
    if block > (WIDEST_BACKWARD if backward else WIDEST_ROW):
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


def keys_of(call: Call, block: int) -> tuple[int, int]:
    """Of a call that keeps few tokens: keys that each block of a row finds, and how many of all blocks are sorted."""
    found = max(2, power_of_2_at_least(call.top_k))
    return found, max(found, power_of_2_at_least(-(-call.probs.columns // block) * found))


def sorts(call: Call, block: int) -> bool:
    """Whether one program can sort what the blocks of a row have found; else keys are searched for."""
    return bool(call.few) and keys_of(call, block)[1] <= MOST_CHOSEN


def top_configs(call: Call) -> tuple[Config, ...]:
    """Large digits and small blocks for a few rows: fewer launches, and fewer tokens that meet in a bin. With many rows
    what every program adds up of the bins would cost more than that."""
    probs: TensorFacts = call.probs
    width = max(128, power_of_2_at_least(probs.columns))
    least = max(128, power_of_2_at_least(-(-probs.columns // MOST_BLOCKS)))
    few = ((4096, 8, 8, 13), (2048, 4, 16, 12), (8192, 16, 8, 13), (4096, 16, 16, 12), (4096, 8, 16, 11))
    many = ((8192, 16, 8, 10), (4096, 8, 8, 10), (8192, 8, 8, 11), (2048, 4, 8, 10), (4096, 16, 8, 10))
    wanted = few if power_of_2_at_least(probs.rows) <= FEW_ROWS else many
    found = []
    for block, warps, choosing, digit in wanted:
        block = min(width, max(block, least))
        while call.few and block < min(width, WIDEST_BLOCK) and not sorts(call, block):
            block *= 2  # fewer have keys that are sorted
        warps = max(warps, block // 1024)
        if sorts(call, block):
            choosing = max(choosing, keys_of(call, block)[1] // 512)
        found.append(Config(block=block, num_warps=warps, choosing=choosing, digit=digit))
    return tuple(dict.fromkeys(found))


def by_k(call: Call) -> bool:
    """Whether k can leave anything out."""
    return call.has("row_k") or (call.top_k is not None and call.top_k < call.probs.columns)


def by_p(call: Call) -> bool:
    """Whether p can leave anything out."""
    return call.has("row_p") or (call.top_p is not None and call.top_p < 1.0)


def one_filter(call: Call) -> Iterable[Reason]:
    """One search finds what one of k and p keeps."""
    if by_k(call) == by_p(call):
        yield Reason("top_p", f"{'both k and p' if by_k(call) else 'neither k nor p'} of the call; takes one of them")


def bins_configs(call: Call) -> tuple[Config, ...]:
    """Many small programs for a few rows; with many rows what each does but once is dear."""
    probs: TensorFacts = call.probs
    width = max(128, power_of_2_at_least(probs.columns))
    least = max(128, power_of_2_at_least(-(-probs.columns // (MOST_BLOCKS // 2))))
    few = ((1024, 4, 1, 1), (2048, 8, 1, 1), (4096, 8, 1, 1), (2048, 8, 1, 0), (2048, 8, 0, 0))
    many = ((4096, 8, 1, 1), (2048, 8, 1, 1), (4096, 16, 0, 0), (8192, 16, 0, 0))
    found = []
    for block, warps, tail, pdl in few if power_of_2_at_least(probs.rows) <= FEW_ROWS else many:
        block = min(width, max(block, least))
        tail = tail if call.device.kind != "hip" else 0
        pdl = pdl if call.device.kind == "cuda" and call.device.sm >= 90 else 0
        warps, bins = max(1, min(warps, block // 128)), min(11, width.bit_length() - 1)
        found.append(Config(block=block, num_warps=warps, tail=tail, pdl=pdl, width=bins, room=min(width, 1024)))
    return tuple(dict.fromkeys(found))


def tilelang_vector(call: Call) -> int:
    facts = main_of(call)
    return vector(facts.columns, facts.dtype.itemsize)


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang program counts its blocks in int32: one a row."""
    facts = main_of(call)
    return few_blocks(facts.name, facts.rows, 1)


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block, which has a row; `depth` accesses of a thread before it goes on."""
    vectors = main_of(call).columns // tilelang_vector(call)
    found = []
    for threads in (256, 128, 512):
        threads = min(threads, max(32, power_of_2_at_least(vectors)))
        found.append(Config(threads=threads, depth=min(8, power_of_2_at_least(-(-vectors // threads)))))
    return tuple(dict.fromkeys(found))
