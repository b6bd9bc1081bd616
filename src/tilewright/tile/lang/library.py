"""Fragments and functions that kernels share, written in the language itself: nothing here is known to the compiler."""

from __future__ import annotations

from typing import Any

from tilewright.tile.lang.kernel import fragment
from tilewright.tile.lang.tiles import Tile, View


@fragment
def store_as(t: Any, v: Tile, at: Any, y: View) -> None:
    """The usual epilogue: round to y.dtype and store."""
    t.store(y[at], v.to(y.dtype))


def sigmoid(t: Any, x: Tile) -> Tile:
    """1 / (1 + exp(-x)). At -infinity it is 0."""
    one: Tile = 1.0 + t.exp(-x)
    return 1.0 / one


def softmax(t: Any, x: Tile, axis: int = -1) -> Tile:
    """exp(x - max(x)) over its sum. A row of -infinity gives NaN."""
    e: Tile = t.exp(x - t.max(x, axis=axis, keep=True))
    total: Tile = t.sum(e, axis=axis, keep=True)
    return e / total
