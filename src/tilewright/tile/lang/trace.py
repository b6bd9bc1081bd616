"""The recorder behind a kernel's `t`: it makes nodes, opens and closes regions, and traces each loop body twice.

Pure nodes are hash-consed and belong to the innermost region that they depend on, so what a loop does not change is
already outside it. What authors see of this is in `tiles` and `library`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright.tile.dtypes import DType, boolean, int64
from tilewright.tile.errors import Line, TraceError, author_line
from tilewright.tile.ir.tile_ir import EFFECTS, Dim, Node, Program, Region, Shape, ViewType

AFTER = "belongs to a loop or `when` that has ended: carry it in a t.var"
EARLIER = (
    "was computed in an earlier iteration: a Python variable keeps the first one only. Carry it in a t.var, with "
    ".get() and .set()"
)


def short(value: object) -> str:
    """A value for a message. Python refuses to print the longest ints."""
    long = isinstance(value, int) and value.bit_length() > 256
    return f"an int of {int(value).bit_length()} bits" if long else repr(value)  # type: ignore[call-overload]


class Recorder:
    """The program under construction."""

    def __init__(self, name: str, views: Mapping[str, ViewType], scalars: Mapping[str, DType]) -> None:
        self.name, self.views, self.scalars = name, views, scalars
        self.body = Region(None, "kernel")
        self.region = self.body
        self.nodes: list[Node] = []
        self.known: dict[tuple[Any, ...], Node] = {}
        self.broken: Line | None = None
        self.only: list[range] = []
        """Nodes whose effects the program is reduced to, where there are any."""

    def add(
        self, op: str, args: tuple[Node, ...] = (), *, shape: Shape = (), dtype: DType | None = None, **attrs: Any
    ) -> Node:
        """An effect, at the end of the open region; or a pure node (or the same one again) where what it needs is."""
        effect = op in EFFECTS
        dtype = dtype or (boolean if effect else int64)
        needs = [*args, *(a.limit for a in shape if isinstance(a, Dim))]
        for node in needs:
            if node.region.closed or not self.region.within(node.region):
                line = author_line()
                made = f" (it was made at {node.line})" if str(node.line) != str(line) else ""
                raise TraceError(f"a value is used that {node.region.closed or AFTER}{made}", line)
        key = (op, args, tuple(attrs.items()), shape, dtype)
        if not effect and key in self.known:
            return self.known[key]
        inner = max((self.body, *(n.region for n in needs)), key=lambda region: region.depth)
        node = Node(op, args, attrs, shape, dtype, self.region if effect else inner, author_line(), len(self.nodes))
        self.nodes.append(node)
        if effect:
            self.region.effects.append(node)
        else:
            self.known[key] = node
        return node

    effect = add  # where a reader should see that it is one

    def const(self, value: float | int | bool, dtype: DType) -> Node:
        """A scalar constant, rounded to the dtype."""
        try:
            if dtype.integer and not dtype.bounds[0] <= value <= dtype.bounds[1]:
                raise OverflowError
            with np.errstate(over="ignore"):
                exact = dtype.rounded(value).item()
        except OverflowError:
            raise TraceError(f"{short(value)} does not fit {dtype}") from None
        sign: dict[str, Any] = {"sign": str(exact)} if dtype.floating else {}  # -0.0 == 0.0, and is not the same
        return self.add("const", dtype=dtype, value=exact, **sign)

    @contextmanager
    def inside(self, kind: str) -> Iterator[Region]:
        """Record into a new region, which is closed at the end: its values may then not be used any more."""
        region = Region(self.region, kind)
        outer, self.region = self.region, region
        try:
            yield region
        finally:
            self.region = outer
            region.closed = AFTER  # no later trace may find its nodes again
            self.known = {k: n for k, n in self.known.items() if not n.region.closed}

    def loop(self, lo: Node, hi: Node, step: Node) -> Iterator[Node]:
        """The index of a loop, twice: the first trace shows what would be carried by a Python variable."""
        line = author_line()
        for last in (False, True):
            with self.inside("loop") as region:
                index = self.effect("index", dtype=int64)
                try:
                    yield index
                except GeneratorExit:
                    self.broken = line
                    raise
            if not last:
                region.closed = EARLIER
        self.effect("loop", (lo, hi, step), index=index, body=region)

    def finish(self, inplace: frozenset[frozenset[str]]) -> Program:
        if self.broken is not None:
            raise TraceError("`break` or `return` leaves a loop before its end; use t.when", self.broken)
        if self.only:
            self._reduce()
        return Program(self.name, self.views, self.scalars, self.body, self.nodes, inplace)

    def _reduce(self) -> None:
        """Leave out each effect that no store (or print) of `only` needs."""
        effects = list(self.body.all_effects())
        around = {e.attrs["body"]: e for e in effects if "body" in e.attrs}
        waiting = [e for e in effects if e.op in ("store", "print") and any(e.id in r for r in self.only)]
        needed: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += [*node.args, *node.limits, *(around[r] for r in (node.region,) if r in around)]
                if node.op == "get":
                    cell = self.nodes[node.attrs["var"]]
                    waiting += [cell, *(e for e in effects if e.op == "set" and e.attrs["var"] == cell.id)]
        for region in (self.body, *around):
            region.effects = [e for e in region.effects if e in needed]
