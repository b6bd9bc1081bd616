"""How a product is cut into tiles, best guess first, and which fit the shared memory of a device. Needs no compiler.

Keys: `m`, `n` of the output and `k` of the sum a step; `group` rows of tiles that are walked together, so that they
find each other's columns in the L2; warps and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.shared_memory import shared_bytes

Shape = tuple[int, int, int, int, int]
"""m, n, k, warps, stages."""

WIDE: tuple[Shape, ...] = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (256, 128, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 4),
    (64, 256, 64, 8, 4),
    (128, 64, 64, 4, 4),
)
NARROW: tuple[Shape, ...] = ((64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 8, 3), (64, 256, 64, 8, 3))
STAYING: tuple[tuple[Shape, int], ...] = (
    ((128, 256, 64, 8, 4), 16),
    ((128, 256, 64, 8, 4), 8),
    ((128, 256, 64, 8, 3), 16),
    ((128, 128, 64, 8, 4), 8),
)
"""Of programs that stay, each with its group: measured on an H100, 968 x 2048 x 32768 and 8192 x 4096 x 14336."""
FEW: tuple[Shape, ...] = ((16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 32, 128, 4, 4), (16, 64, 64, 4, 3))
"""For rows that fill half a tile, or a sixteenth. A multiprocessor multiplies 64 rows at a time, or 16."""
SINGLE: tuple[Shape, ...] = ((64, 64, 16, 4, 2), (64, 64, 32, 8, 2), (128, 64, 16, 8, 2), (32, 64, 32, 4, 2))
"""float32 is multiplied without tensor cores, in registers."""
TILES: tuple[Shape, ...] = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (64, 64, 64, 4, 4))
"""Of TileLang programs."""


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Of y = x W^T: rows of x, rows of weight."""
    return _fitting(call, power_of_2_at_least(call.x.rows), power_of_2_at_least(call.weight.rows))


def staying_configs(call: Call) -> tuple[Config, ...]:
    """Of the same by programs that stay. What a tile is stored through takes shared memory beside the stages, and as
    much again where z is stored too, and where a residual is read."""
    found = []
    parts = 1 + call.has("z") + call.has("residual")
    for (m, n, k, warps, stages), group in STAYING:
        room = shared_bytes(call.device) - parts * m * min(n, 128) * 2
        fitting = min(stages, room // ((m + n) * k * 2))
        if fitting >= 2:
            found.append(Config(m=m, n=n, k=k, group=group, num_warps=warps, num_stages=fitting))
    return tuple(dict.fromkeys(found))


def by_descriptor(call: Call) -> Iterable[Reason]:
    """Hardware copies of tiles want rows that lie one after another, at multiples of 16 bytes, and fewer than 2^31."""
    if call.x.dtype == torch.float32:
        yield Reason("x", "dtype fp32, which tensor cores round", "takes fp16, bf16")
    for name in ("x", "weight", "y"):
        facts: TensorFacts = call[name]
        step = facts.row_levels[0][1] * facts.dtype.itemsize
        if len(facts.row_levels) > 1 or facts.align < 16 or step % 16 or not 16 <= step < 2**40:
            yield Reason(name, f"strides {list(facts.stride)}; takes rows at multiples of 16 bytes in one run")
        elif max(facts.rows, facts.columns) >= 2**31:
            yield Reason(name, f"{facts.rows} x {facts.columns}; takes sizes below 2^31")
    if call.x.rows <= 64 and call.device.is_gpu:  # only a matter of time, of which an interpreter has its own
        yield Reason("x", f"{call.x.rows} rows; half of a tile would be empty")


def backward_configs(call: Call) -> tuple[Config, ...]:
    """Of both products of the gradient: dx has the rows of x, dweight those of weight."""
    rows = call.x.rows if call.has("dx") else call.weight.rows
    return _fitting(call, power_of_2_at_least(rows), power_of_2_at_least(call.x.columns))


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """The same for TileLang: `threads` a block and `stages`. What has fewer rows than a tile wastes the rest of it."""
    if call.x.dtype == torch.float32:
        wanted: tuple[Shape, ...] = ((64, 64, 16, 4, 2), (32, 64, 16, 4, 2))
    else:
        rows = power_of_2_at_least(call.x.rows)
        wanted = TILES if rows > 64 else (TILES[-1], TILES[1])
    found = _deepest(wanted, shared_bytes(call.device), call.x.dtype.itemsize)
    return tuple(Config(m=m, n=n, k=k, group=8, threads=32 * warps, stages=stages) for m, n, k, warps, stages in found)


def _fitting(call: Call, rows: int, columns: int) -> tuple[Config, ...]:
    """Tiles for so many rows and columns of output, which count by the power of two above, as in a call class."""
    itemsize = call.x.dtype.itemsize
    if call.x.dtype == torch.float32:
        wanted = SINGLE if rows > 32 else (SINGLE[-1], *SINGLE[:-1])
    elif rows <= 16:
        wanted = FEW
    else:
        wanted = NARROW if rows <= 64 else (*WIDE, *NARROW[:2])
    wanted = tuple(shape for shape in wanted if shape[1] <= max(columns, 64))
    room = shared_bytes(call.device)
    return tuple(
        Config(m=m, n=n, k=k, group=8, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in _deepest(wanted, room, itemsize)
    )


def _deepest(wanted: tuple[Shape, ...], room: int, itemsize: int) -> list[Shape]:
    """The tiles with as many stages as fit; two at least, else the tile is left out."""
    found: dict[Shape, None] = {}
    for m, n, k, warps, stages in wanted:
        stages = min(stages, room // ((m + n) * k * itemsize))
        if stages >= 2:
            found[m, n, k, warps, stages] = None
    return list(found)
