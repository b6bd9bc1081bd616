"""Memory: addresses, loads and stores of views and scratch.

An address is a sum of scalars plus a multiple of the lane: a unit multiple makes one vector access, another a strided
one, and what is no such sum a scattered one. Each term is emitted in the outermost block that knows it.
"""

from __future__ import annotations

import math as integers
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.tile import numbers
from tilewright.tile.dtypes import DType, boolean, int64
from tilewright.tile.ir.thread_ir import Array, Load, Operand, Print, Store, Type
from tilewright.tile.ir.tile_ir import Node, Shape, static_size
from tilewright.tile.lower.elementwise import Emitter, Place, Value, counts_lanes
from tilewright.tile.lower.phases import folds

Term = tuple[Operand, int]
"""A scalar and the block that knows it."""


@dataclass(frozen=True)
class Affine:
    """The sum of `terms`, plus `lane` for each lane."""

    terms: tuple[Term, ...]
    lane: Operand = 0


class Memory(Emitter):
    """An emitter that reads and writes."""

    # Addresses ------------------------------------------------------------------------------------------------------

    def affine(self, node: Node, place: Place) -> Affine | None:
        """An index as a sum of scalars and a multiple of the lane; None where it is no such thing."""
        mine = self.place_of(node, place)
        if not counts_lanes(mine):
            value = self.emit(node, place)
            return Affine(((value.operand, value.depth),))
        if node.op == "arange":
            return Affine(((mine[0].base, mine[0].depth),), 1)
        if node.op == "broadcast":
            return self.affine(node.args[0], self.through(node, mine))
        if node.op == "binary" and node.attrs["kind"] in ("add", "sub", "mul"):
            left, right = (self.affine(a, mine) for a in node.args)
            if left is None or right is None:
                return None
            if node.attrs["kind"] == "mul":
                one, other = (left, right) if right.lane == 0 else (right, left)
                return None if other.lane != 0 else self._scaled(one, self._sum(other.terms))
            if node.attrs["kind"] == "sub":
                right = self._scaled(right, (-1, 0))
            if left.lane != 0 and right.lane != 0:
                return None
            return Affine((*left.terms, *right.terms), right.lane if left.lane == 0 else left.lane)
        return None

    def _scaled(self, x: Affine, by: Term) -> Affine:
        if by[0] == 1:
            return x
        terms = tuple(self._times(t, by) for t in x.terms)
        return Affine(terms, 0 if x.lane == 0 else self._times((x.lane, 0), by)[0])

    def _times(self, a: Term, b: Term) -> Term:
        if isinstance(a[0], int) and isinstance(b[0], int):
            return a[0] * b[0], 0
        if 1 in (a[0], b[0]):
            return b if a[0] == 1 else a
        depth = max(a[1], b[1])
        return self.let(depth, Type(int64), "mul", a[0], b[0]), depth

    def _sum(self, terms: tuple[Term, ...]) -> Term:
        """One scalar: terms of outer blocks are added there."""
        constant = sum(t[0] for t in terms if isinstance(t[0], int))
        named = sorted((t for t in terms if isinstance(t[0], str)), key=lambda t: t[1])
        if not named:
            return constant, 0
        total, depth = named[0]
        if constant:
            total = self.let(depth, Type(int64), "add", total, constant)
        for operand, inner in named[1:]:
            depth = inner
            total = self.let(depth, Type(int64), "add", total, operand)
        return total, depth

    def _address(self, node: Node, place: Place) -> Affine | None:
        """The element offset of an access to a view."""
        name, view = node.attrs["view"], self.program.views[node.attrs["view"]]
        terms: list[Term] = []
        lane: Operand = 0
        for axis, index in enumerate(node.args[: view.rank]):
            found, leveled = self.affine(index, place), axis == 0 and view.levels > 1
            if found is None or (leveled and found.lane != 0):
                return None
            if leveled:
                part = self._leveled(name, view.levels, found)
            else:
                part = self._scaled(found, (self._stride(name, axis), 0))
            if part.lane != 0 and lane != 0:
                return None
            terms += part.terms
            lane = part.lane if lane == 0 else lane
        return Affine(tuple(terms), lane)

    def _stride(self, name: str, axis: int) -> Operand:
        view = self.program.views[name]
        storage = axis + view.levels - 1
        if axis == view.rank - 1 and view.unit and (axis > 0 or view.levels == 1):
            return 1
        return self.parameter(f"s{storage}_{name}", "stride", name, storage)

    def _leveled(self, name: str, levels: int, row: Affine) -> Affine:
        """The offset of a row whose axis is stored with several strides."""
        total, depth = self._sum(row.terms)
        steps = self._levels(name, levels, total, Type(int64), depth)
        return Affine(tuple(self._times((rest, depth), (stride, 0)) for rest, stride in steps))

    def _levels(
        self, name: str, levels: int, row: Operand, type: Type, depth: int
    ) -> Iterator[tuple[Operand, Operand]]:  # fmt: skip
        """(count, stride) of a row along each of its strides. A row is not negative: C's division does."""
        for axis in reversed(range(levels)):
            stride = self.parameter(f"s{axis}_{name}", "stride", name, axis)
            if axis == 0:
                yield row, stride
                return
            extent: Operand = self.parameter(f"e{axis}_{name}", "extent", name, axis)
            if type.lanes > 1:
                extent = self.as_vector(Value(extent, Type(int64), 0))
            yield self.let(depth, type, "rem", row, extent), stride
            row = self.let(depth, type, "quot", row, extent)

    def _reached(self, node: Node, place: Place, spread: bool) -> tuple[Operand, Operand, bool]:
        """(index, stride, scattered) of an access. The stride is 0 where all lanes have one element, unless they must
        be `spread`: then each has an address of its own."""
        address = self._address(node, place)
        if address is None or (spread and address.lane == 0):
            return self._scattered(node, place), 1, True
        return self._sum(address.terms)[0], address.lane, False

    def _scattered(self, node: Node, place: Place) -> Operand:
        """An offset for each lane."""
        name, view = node.attrs["view"], self.program.views[node.attrs["view"]]
        type = Type(int64, self.lanes)
        total: Operand = 0
        deepest = 0
        for axis, index in enumerate(node.args[: view.rank]):
            value = self.emit(index, place)
            part, depth = self.as_vector(value), value.depth
            steps = [(part, self._stride(name, axis))]
            if axis == 0 and view.levels > 1:
                steps = list(self._levels(name, view.levels, part, type, depth))
            deepest = max(deepest, depth)
            for one, stride in steps:
                by = self.as_vector(Value(stride, Type(int64), 0))
                scaled = one if stride == 1 else self.let(deepest, type, "mul", one, by)
                total = scaled if total == 0 else self.let(deepest, type, "add", total, scaled)
        if not isinstance(total, str):
            total = self.let(deepest, type, "splat", total, operands=Type(int64))
        return total

    # Reading --------------------------------------------------------------------------------------------------------

    def read(self, node: Node, place: Place, depth: int) -> Value:
        if self._waits(node):
            return self._array(self.array_of(node), node, place, depth)
        source = node.args[0] if node.op == "reshape" else node
        if folds(source):
            result = self.results[source]
            return result if isinstance(result, Value) else self._array(result, node, place, depth)
        if node.op == "reshape":
            return self._array(self.array_of(source), node, place, depth)
        if node.op == "get":
            return self._array(self.cell(node.attrs["var"]), node, place, depth)
        return self.load(node, place, depth)

    def load(self, node: Node, place: Place, depth: int) -> Value:
        """A load of a view, at a place."""
        view = self.program.views[node.attrs["view"]]
        memory = self.parameter(f"p_{node.attrs['view']}", "pointer", node.attrs["view"], 0, view.dtype)
        mask = self.emit(node.args[view.rank], place) if node.attrs["masked"] else None
        index, stride, scattered = self._reached(node, place, mask is not None and mask.vector)
        type = Type(node.dtype, self.lanes if stride != 0 else 1)
        count, test = self._limits(type, stride, scattered, mask)
        name, other = self.fresh(), node.attrs["other"]
        self.put(depth, Load(name, type, memory, index, stride or 1, count, test, other, scattered, node.line))
        return Value(name, type, depth)

    def _limits(
        self, type: Type, stride: Operand, scattered: bool, mask: Value | None
    ) -> tuple[Operand | None, Operand | None]:
        """(count, mask) of an access: contiguous ones of a last chunk have a count, others a mask."""
        if type.lanes == 1:
            return None, None if mask is None else mask.operand
        if mask is None and stride == 1 and not scattered:
            return self.tail, None
        found = None if mask is None else self.as_vector(mask)
        if self.tail is None:
            return None, found
        below, both = self.elements(), Type(boolean, self.lanes)
        return None, below if found is None else self.let(self.depth, both, "and", below, found, operands=both)

    def elements(self) -> str:
        """Which lanes of a last chunk are elements."""
        assert self.tail is not None
        return self.let(self.depth, Type(boolean, self.lanes), "below", self.tail, operands=Type(int64))

    # Scratch --------------------------------------------------------------------------------------------------------

    def array(self, name: str, dtype: DType, shape: Shape) -> str:
        """A scratch array, with room for a whole chunk beyond its last row."""
        elements = integers.prod(static_size(a) for a in shape) + 4 * self.lanes
        self.function.arrays.append(Array(name, dtype, elements))
        return name

    def room(self, key: object, prefix: str, dtype: DType, shape: Shape) -> str:
        """Where a tile of the plan (a cell, or one that waits) lives: a scratch array."""
        return self.array(self.fresh(prefix), dtype, shape)

    def array_of(self, node: Node) -> str:
        """The scratch array of a tile that waits."""
        key = ("array", node)
        if key not in self.arrays:
            self.arrays[key] = self.room(key, "s", node.dtype, node.shape)
        return self.arrays[key]

    def cell(self, var: int) -> str:
        return self.arrays[("cell", var)]

    def offset(self, shape: Shape, place: Place) -> tuple[Operand, int]:
        """(offset, stride of the lanes) in a dense array of this shape."""
        terms: list[Term] = []
        lane, step = 0, 1
        for axis in reversed(range(len(shape))):
            index = place[axis]
            terms.append(self._times((index.base, index.depth), (step, 0)))
            lane = step if index.vector else lane
            step *= static_size(shape[axis])
        return self._sum(tuple(terms))[0], lane

    def spread(self, dtype: DType, shape: Shape, place: Place) -> Type:
        """The type of what an array of this shape has at a place."""
        return Type(dtype, self.lanes if self.offset(shape, place)[1] else 1)

    def _array(self, name: str, node: Node, place: Place, depth: int) -> Value:
        type = self.spread(node.dtype, node.shape, place)
        return Value(self.load_array(name, type, node.shape, place, depth), type, depth)

    def load_array(self, name: str, type: Type, shape: Shape, place: Place, depth: int) -> str:
        index, lane = self.offset(shape, place)
        made = self.fresh()
        self.put(depth, Load(made, type, name, index, lane or 1, mask=self.across_rows(lane)))
        return made

    def store_array(self, name: str, type: Type, shape: Shape, place: Place, value: Operand) -> None:
        index, lane = self.offset(shape, place)
        several = lane == 1 and type.lanes > 1 and any(a != 1 for a in shape[:-1])
        count = self.tail if several else None  # what is beyond is the next row, which may hold a sum already
        self.put(self.depth, Store(name, type, index, value, lane or 1, count, self.across_rows(lane)))

    def across_rows(self, lane: int) -> str | None:
        """The mask of an access whose lanes go from row to row of an array: there may be none behind the last."""
        return self.elements() if self.tail is not None and lane > 1 and self.lanes > 1 else None

    # Writing --------------------------------------------------------------------------------------------------------

    def store(self, node: Node, place: Place) -> None:
        """A store to a view, or to the screen, in the innermost block."""
        if node.op == "print":
            self._print(node, place)
            return
        view = self.program.views[node.attrs["view"]]
        value = self.emit(node.args[-1], place)
        mask = self.emit(node.args[view.rank], place) if node.attrs["masked"] else None
        memory = self.parameter(f"p_{node.attrs['view']}", "pointer", node.attrs["view"], 0, view.dtype)
        vector, inner = counts_lanes(place), self.depth
        index, stride, scattered = self._reached(node, place, vector)
        type = Type(view.dtype, self.lanes if vector else 1)
        count, test = self._limits(type, stride, scattered, mask)
        operand = self.as_vector(value) if vector else value.operand
        self.put(inner, Store(memory, type, index, operand, stride or 1, count, test, scattered, node.line))

    def _print(self, node: Node, place: Place) -> None:
        value, vector = self.emit(node.args[0], place), counts_lanes(place)
        instance = [self.parameter(f"pid{axis}", "builtin", "pid", axis) for axis in range(3)]
        lanes = self.lanes if vector else 1
        made = Print(numbers.printed(node.attrs["text"], len(place), node.dtype), Type(node.dtype, lanes),
                     self.as_vector(value) if vector else value.operand, (*instance, *(i.base for i in place)),
                     next((3 + k for k, i in enumerate(place) if i.vector), -1), self.tail if lanes > 1 else None,
                     node.line)  # fmt: skip
        self.put(self.depth, made)

    def keep(self, name: str, dtype: DType, shape: Shape, value: Value, place: Place) -> None:
        """Write a value to a scratch array."""
        type = self.spread(dtype, shape, place)
        operand = self.as_vector(value) if counts_lanes(place) else value.operand
        self.store_array(name, type, shape, place, operand)
