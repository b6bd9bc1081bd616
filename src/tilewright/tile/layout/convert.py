"""What it costs to go from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tilewright.tile.errors import TileError
from tilewright.tile.layout.linear import Layout, Span


class Conversion(IntEnum):
    """What a conversion needs, cheapest first."""

    NOOP = 0
    """Each element is where it is wanted."""
    REGISTERS = 1
    """Other register numbers, the same for every lane and warp."""
    SELECT = 2
    """Registers of the same thread, whose numbers depend on the lane."""
    SHUFFLE = 3
    """Other lanes of the warp."""
    SHARED = 4
    """Other warps: shared memory and a barrier."""


def classify(source: Layout, target: Layout) -> Conversion:
    """The least that a conversion needs, exactly, also where layouts hold copies.

    A thread finds an element in its warp where the element differs from the thread's own by something that registers
    (and lanes) of the source reach. So the question is of spans, not of single bits: with a copy or a skewed column a
    bit-by-bit rule says SHUFFLE where the element is in another warp.

    Raises:
        TileError: the layouts are of tiles of different extents.
    """
    if source.extents != target.extents:
        raise TileError(f"a tile of {source.extents} does not become one of {target.extents}")
    if _same(source, target):
        return Conversion.NOOP
    registers, warp = Span(source.reg), Span(source.reg + source.lane)
    moves = [
        *target.reg,
        *(a ^ b for a, b in _pairs(source.lane, target.lane)),
        *(a ^ b for a, b in _pairs(source.warp, target.warp)),
    ]
    if all(m in registers for m in moves):
        # the register that holds what a lane wants is its own number and a part that lanes and warps add
        fixed = all(m == 0 for m in moves[len(target.reg) :])
        return Conversion.REGISTERS if fixed else Conversion.SELECT
    inside = [*target.reg, *target.lane, *(a ^ b for a, b in _pairs(source.warp, target.warp))]
    return Conversion.SHUFFLE if all(m in warp for m in inside) else Conversion.SHARED


def _same(source: Layout, target: Layout) -> bool:
    """Equal but for bits of the target that the source has not, which must be copies."""
    places = zip((source.reg, source.lane, source.warp), (target.reg, target.lane, target.warp), strict=True)
    return all(a == b for pair in places for a, b in _pairs(*pair))


def _pairs(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Columns side by side; a missing one is a copy."""
    count = max(len(a), len(b))
    return list(zip((*a, *[0] * (count - len(a))), (*b, *[0] * (count - len(b))), strict=True))
