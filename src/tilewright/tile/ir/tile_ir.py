"""L0, the tile IR: nodes over whole tiles, and regions of ordered effects.

A node is a value (or an effect) with a shape, a dtype and the author's line. Pure nodes are hash-consed; loads, stores,
cells and control are effects, kept in program order by their region. How programs come to be is in `lang`, what they
mean in `oracle.interpreter`, which rules they keep in `tile_verify`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.tile.dtypes import DType, boolean
from tilewright.tile.errors import Line


@dataclass(frozen=True)
class Dim:
    """An axis that has at most `most` elements, and at run time as many as the scalar `limit` says."""

    most: int
    limit: Node

    def __str__(self) -> str:
        return f"<={self.most}"


Axis = int | Dim
Shape = tuple[Axis, ...]

PURE = frozenset((
    "program_id", "num_programs", "size", "argument", "const", "arange", "unary", "binary", "fma", "where", "cast",
    "bitcast", "broadcast", "reshape", "reduce", "random",
))  # fmt: skip
EFFECTS = frozenset(("load", "store", "stage", "var", "get", "set", "loop", "when", "check", "print", "index"))
SCOPES = ("register", "shared")
"""Where a staged tile may wait. A CPU has one such place."""

COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
BINARY = COMPARISONS | frozenset(
    ["add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "and", "or", "xor", "shl", "shr"]
)
ACCURACIES = ("exact", "fast")
ROUNDED = frozenset(["exp", "exp2", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid"])
"""Functions of float32 that take an accuracy: with "fast" a GPU's approximate instruction may serve."""
UNARY = ROUNDED | {"neg", "abs", "not", "rint"}
COMBINES = frozenset(("sum", "prod", "max", "min", "and", "or"))


@dataclass(frozen=True)
class ViewType:
    """What a kernel is compiled for of a tensor argument.

    `sizes`: for each axis its size, or the most it may have, or None. `unit`: the last axis is dense. `levels`: by
    how many strides the first axis is stored: an axis of [4, 8] rows whose strides do not merge has two. `align`:
    bytes that the address and the strides of all axes but the dense one are multiples of; 0 where only the dtype's are.
    """

    dtype: DType
    sizes: tuple[int | Most | None, ...]
    unit: bool = True
    levels: int = 1
    align: int = 0

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def most(self, axis: int) -> int | None:
        """The most elements that an axis can have, where that is known."""
        size = self.sizes[axis]
        return size.value if isinstance(size, Most) else size


@dataclass(frozen=True)
class Most:
    """A size that is known at run time and is at most this."""

    value: int


@dataclass(eq=False, repr=False)
class Node:
    """One value or effect. `region` is the innermost region that it depends on."""

    op: str
    args: tuple[Node, ...]
    attrs: Mapping[str, Any]
    shape: Shape
    dtype: DType
    region: Region
    line: Line
    id: int

    @property
    def limits(self) -> list[Node]:
        """What says at run time how many elements its axes have."""
        return [a.limit for a in self.shape if isinstance(a, Dim)]

    @property
    def scalar(self) -> bool:
        return not self.shape

    def __repr__(self) -> str:
        return f"%{self.id}"


@dataclass(eq=False, repr=False)
class Region:
    """A body: effects in program order. The kernel's own has no parent."""

    parent: Region | None
    kind: str
    effects: list[Node] = field(default_factory=list)
    closed: str = ""
    """Why its values may not be used any more; "" while they may."""

    def all_effects(self) -> Iterator[Node]:
        """Its effects, those of inner regions after the effect that holds them."""
        for effect in self.effects:
            yield effect
            if "body" in effect.attrs:
                yield from effect.attrs["body"].all_effects()

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    def within(self, other: Region) -> bool:
        """Whether this is `other` or lies inside it."""
        return self is other or (self.parent is not None and self.parent.within(other))


@dataclass(eq=False, repr=False)
class Program:
    """A traced kernel: its arguments by name, in order, and its body."""

    name: str
    views: Mapping[str, ViewType]
    scalars: Mapping[str, DType]
    body: Region
    nodes: list[Node]
    inplace: frozenset[frozenset[str]] = frozenset()
    """Pairs of views that may be the same memory, element for element."""

    def effects(self) -> Iterator[Node]:
        """Every effect, in program order."""
        return self.body.all_effects()

    def written(self) -> set[str]:
        return {e.attrs["view"] for e in self.effects() if e.op == "store"}

    def may_meet(self, a: str, b: str) -> bool:
        """Whether two views may be the same memory."""
        return a == b or frozenset((a, b)) in self.inplace


def static_size(axis: Axis) -> int:
    """The number of elements that an axis has at most."""
    return axis.most if isinstance(axis, Dim) else axis


def elements(shape: Shape) -> int:
    """The number of elements of a tile at most."""
    return math.prod(map(static_size, shape))


def operands_first(root: Node, known: Callable[[Node], bool]) -> Iterator[Node]:
    """What a node needs that is not known, operands before what uses them, and the node itself. Each must be known
    before the next is asked for. Without recursion: long chains are common."""
    waiting = [root]
    while waiting:
        top = waiting[-1]
        missing = [] if known(top) else [a for a in (*top.args, *top.limits) if not known(a)]
        if missing:
            waiting.extend(reversed(missing))
            continue
        waiting.pop()
        if not known(top):
            yield top


def broadcast_shapes(*shapes: Shape) -> Shape | None:
    """The shape of an elementwise result, as numpy has it; None where the shapes do not agree."""
    rank = max(map(len, shapes), default=0)
    found: list[Axis] = []
    for axes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        wide = [a for a in dict.fromkeys(axes) if a != 1]
        if len(wide) > 1:
            return None
        found.append(wide[0] if wide else 1)
    return tuple(found)


def result_dtype(kind: str, dtype: DType) -> DType:
    """The dtype of a binary operation on operands of `dtype`."""
    return boolean if kind in COMPARISONS else dtype


def shape_text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
