"""Fragments and functions that kernels share, written in the language itself: nothing here is known to the compiler."""

from __future__ import annotations

from typing import Any

from tilewright.tile.lang.kernel import fragment
from tilewright.tile.lang.tiles import Tile, View


@fragment
def store_as(t: Any, v: Tile, at: Any, y: View) -> None:
    """The usual epilogue: round to y.dtype and store."""
    t.store(y[at], v.to(y.dtype))


def softmax(t: Any, x: Tile, axis: int = -1, accuracy: str = "exact") -> Tile:
    """exp(x - max(x)) over its sum; fast: times the reciprocal of its sum. A row of -infinity gives NaN."""
    e: Tile = t.exp(x - t.max(x, axis=axis, keep=True), accuracy)
    total: Tile = t.sum(e, axis=axis, keep=True)
    return e / total if accuracy == "exact" else e * t.reciprocal(total, accuracy)
