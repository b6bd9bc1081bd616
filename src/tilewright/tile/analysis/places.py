"""Along which axes of a tile an index counts: so which elements of memory its places are."""

from __future__ import annotations

from tilewright.tile.ir.tile_ir import Node, Shape, ViewType


def is_scalar(shape: Shape) -> bool:
    """Whether a value of this shape is one number."""
    return all(a == 1 for a in shape)


def counting(index: tuple[Node, ...], shape: Shape) -> list[Node]:
    """The indices that count along an axis of a shape."""
    return [node for node in index if counts(node, len(shape)) is not None]


def injective(index: tuple[Node, ...], shape: Shape) -> bool:
    """Whether different elements of a shape have different places: each axis counts along one index of its own."""
    free = [i for i, a in enumerate(shape) if a != 1]
    counted = {axis for node in index if (axis := counts(node, len(shape))) is not None}
    return set(free) <= counted


def counts(node: Node, rank: int) -> int | None:
    """The axis of a shape of `rank` along which an index is a count plus something that does not vary."""
    if node.op == "arange":
        return rank - 1
    if node.op == "broadcast":
        inner = counts(node.args[0], len(node.args[0].shape))
        if inner is None or inner not in node.attrs["axes"]:
            return None
        return int(rank - len(node.shape) + node.attrs["axes"].index(inner))
    if node.op == "binary" and node.attrs["kind"] in ("add", "sub"):
        left, right = node.args
        if is_scalar(right.shape):
            return counts(left, rank)
        if is_scalar(left.shape):
            return counts(right, rank)
    return None


def turned(view: ViewType, index: tuple[Node, ...], shape: Shape) -> tuple[int, ...]:
    """The order in which neighbours of memory are neighbours in a tile, where that is not the tile's own; else ()."""
    axis = counts(index[-1], len(shape)) if view.unit else None
    rest = [k for k in reversed(range(len(shape))) if k != axis]
    return () if axis is None or all(a == 1 for a in shape[axis + 1 :]) else (axis, *rest)
