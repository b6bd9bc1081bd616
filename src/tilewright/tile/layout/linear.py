"""Layouts: linear maps over GF(2) from a place (register, lane, warp) to an element of a tile.

Extents are powers of two, so places and coordinates are bit strings; bit i of the lane number contributes the column
`lane[i]`, and contributions combine by XOR. Whom to wait for between two of them is in
`convert`. CPU kernels have no lanes and no warps: only the vector axis is theirs to choose.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.tile.errors import TileError


class Span:
    """The vectors that a set of columns reaches, by a basis: one vector of each length."""

    def __init__(self, columns: Iterable[int]) -> None:
        self.basis: dict[int, int] = {}
        for column in columns:
            if rest := self.rest(column):
                self.basis[rest.bit_length()] = rest

    def rest(self, vector: int) -> int:
        """What the span does not reach of a vector."""
        while found := self.basis.get(vector.bit_length()):
            vector ^= found
        return vector

    def __contains__(self, vector: int) -> bool:
        return self.rest(vector) == 0

    @property
    def rank(self) -> int:
        return len(self.basis)


@dataclass(frozen=True)
class Layout:
    """A map onto the elements of a tile, row-major flat. A column 0 is a copy. `axes` names extents, the last fastest.

    Raises:
        TileError: an extent that is no power of two, a column outside of the tile, an element without a place.
    """

    reg: tuple[int, ...]
    lane: tuple[int, ...]
    warp: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, extent in self.axes:
            if extent < 1 or extent & (extent - 1):
                raise TileError(f"axis {name} has extent {extent}; a layout needs a power of two")
        if any(not 0 <= c < self.size for c in self.columns):
            raise TileError(f"a column of {self.columns} lies outside of a tile of {self.size} elements")
        if 1 << Span(self.columns).rank != self.size:
            raise TileError("some elements of the tile have no place")

    @property
    def size(self) -> int:
        return math.prod(extent for _, extent in self.axes)

    @property
    def columns(self) -> tuple[int, ...]:
        return self.reg + self.lane + self.warp

    def at(self, reg: int = 0, lane: int = 0, warp: int = 0) -> int:
        """The flat element of a place."""
        number = reg | lane << len(self.reg) | warp << len(self.reg + self.lane)
        return functools.reduce(operator.xor, (c for i, c in enumerate(self.columns) if number >> i & 1), 0)

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(extent for _, extent in self.axes)

    def plot(self, path: str | Path = "", title: str = "") -> str:
        """A picture of it as SVG text (see `plot.svg`), written to a file where a path is given."""
        from tilewright.tile.layout.plot import svg  # it draws layouts, and knows this file

        text = svg(self, title)
        if path:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def owners(self) -> dict[int, tuple[int, ...]]:
        """(register, lane, warp) of each element's owner, which stores it: the least of its copies, by warp first."""
        found: dict[int, tuple[int, ...]] = {}
        for warp, lane, reg in itertools.product(*(range(1 << len(b)) for b in (self.warp, self.lane, self.reg))):
            found.setdefault(self.at(reg, lane, warp), (reg, lane, warp))
        return found


def blocked(axes: Mapping[str, int], vector: int, lanes: int, warps: int) -> Layout:
    """The usual layout of a row-major tile: neighbours of the last axis in registers, then lanes, then warps, then more
    registers. Lanes and warps beyond the tile hold copies."""
    size = math.prod(axes.values())
    steps = iter([1 << i for i in range(size.bit_length() - 1)])
    reg, lane, warp = ([next(steps, 0) for _ in range(n.bit_length() - 1)] for n in (vector, lanes, warps))
    return Layout((*filter(None, reg), *steps), tuple(lane), tuple(warp), tuple(axes.items()))
