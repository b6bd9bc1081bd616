"""Which threads an access must wait for, when memory was written by another layout than it is read by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from tilewright.tile.errors import TileError
from tilewright.tile.layout.linear import Layout, Span


def scope(source: Layout, target: Layout) -> str:
    """Who is waited for: "" where each thread has what it wants, "warp" where a lane of its warp has it, or "block".

    A thread finds an element in its warp where the element differs from the thread's own by something that registers
    (and lanes) of the source reach. So the question is of spans, not of single bits, also where layouts hold copies:
    with a copy or a skewed column a bit-by-bit rule says "warp" where the element is in another one.

    Raises:
        TileError: the layouts are of tiles of different extents.
    """
    if source.axes != target.axes:
        raise TileError(f"a tile of {source.axes} does not become one of {target.axes}")
    lanes, warps = _moves(source.lane, target.lane), _moves(source.warp, target.warp)
    mine, warp = Span(source.reg), Span(source.reg + source.lane)
    if all(move in mine for move in (*target.reg, *lanes, *warps)):
        return ""
    return "warp" if all(move in warp for move in (*target.reg, *target.lane, *warps)) else "block"


def _moves(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """By how much columns differ; a missing one is a copy."""
    return [x ^ y for x, y in zip_longest(a, b, fillvalue=0)]
