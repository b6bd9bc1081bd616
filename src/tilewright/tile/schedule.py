"""How an instance is spread over the threads of a GPU, as data. What the lowering makes of it is in `lower/threads`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tilewright.tile.errors import LowerError
from tilewright.tile.ir.tile_ir import Program, elements, static_size

WIDEST = 16
"""Bytes that one access of a thread moves at most."""
MANY = 256
"""A view whose rows have fewer elements does not decide how wide a vector is."""


@dataclass(frozen=True)
class Schedule:
    """`threads` an instance (a power of two, 32 to 1024), `instances` a block (more than one only of 32 threads),
    elements of a `vector` (a power of two, at most 16), and the `registers` of a thread that tiles may wait in.

    Raises:
        LowerError: numbers that no GPU has.
    """

    threads: int
    instances: int = 1
    vector: int = 4
    registers: int = 64

    def __post_init__(self) -> None:
        if self.threads & self.threads - 1 or not 32 <= self.threads <= 1024:
            raise LowerError(f"{self.threads} threads an instance: a power of two from 32 to 1024 is wanted")
        if self.vector & self.vector - 1 or not 1 <= self.vector <= 16:
            raise LowerError(f"vectors of {self.vector} elements: a power of two from 1 to 16 is wanted")
        if self.instances < 1 or (self.instances > 1 and self.threads != 32):
            raise LowerError(f"{self.instances} instances a block: several only where an instance is a warp")
        if self.instances * self.threads > 1024:
            raise LowerError(f"{self.instances * self.threads} threads a block: at most 1024")

    def json(self) -> dict[str, int]:
        return asdict(self)


def default(program: Program) -> Schedule:
    """The usual schedule: a row takes at most four vectors a thread, until the threads run out."""
    return _spread(program, longest_row(program), 4)


def worth_timing(program: Program, most: int) -> tuple[Schedule, ...]:
    """Schedules that the fastest may be among, best guess first, where no row has more than `most` elements.

    On an H200 rows that are folded were fastest at two vectors a thread, others at four; where there are few rows, at
    one. Of short rows a block has several, a warp each. The last is for tiles that do not fit so.
    """
    row = min(longest_row(program), most)
    folds = any(n.op == "reduce" for n in program.nodes)
    found = [_spread(program, row, vectors) for vectors in ((2, 4, 1) if folds else (4, 2, 1))]
    found += [replace(s, instances=2 * s.instances) for s in found if s.threads == 32]
    return tuple(dict.fromkeys((*found, _spread(program, longest_row(program), 2))))


def longest_row(program: Program) -> int:
    """The most elements that are dealt to threads at once: those of the last axis of any tile; or of all of it, where
    the author gave an order and nothing is folded."""
    ordered = [elements(n.shape) for n in program.nodes if "order" in n.attrs]
    if ordered and not any(n.op == "reduce" for n in program.nodes):
        return max(ordered)
    return max((static_size(n.shape[-1]) for n in program.nodes if n.shape), default=1)


def _spread(program: Program, row: int, vectors: int) -> Schedule:
    """The narrowest view with long rows moves 16 bytes an access, or 8 if it has bytes and another has not: a vector
    twice as long costs the others more registers than it saves accesses."""
    items = [v.dtype.itemsize for v in program.views.values() if v.rank and (v.most(-1) or MANY) >= MANY]
    vector = WIDEST // min([i for i in items if i > 1] or items, default=4)
    threads = 32
    while threads < 1024 and threads * vector * vectors < row:
        threads *= 2
    return Schedule(threads, 4 if threads == 32 else 1, vector)
