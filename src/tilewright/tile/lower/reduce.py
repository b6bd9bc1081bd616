"""Reductions in a loop nest: accumulators in registers along the vector axis, in scratch arrays along the others.

The order is `oracle.interpreter.Order(lanes, unroll)`: element i goes to accumulator i % (lanes * unroll), the
accumulators are folded by halves, then the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.tile.dtypes import boolean, int64
from tilewright.tile.ir.thread_ir import Assign, Declare, Let, Load, Operand, Type
from tilewright.tile.ir.tile_ir import Node
from tilewright.tile.lower.elementwise import ZERO, Place, Value
from tilewright.tile.lower.memory import Memory
from tilewright.tile.lower.phases import is_scalar
from tilewright.tile.numbers import identity

UNROLL = 4
"""Accumulators of a reduction: as many as hide the latency of an addition."""


@dataclass(frozen=True)
class Accumulator:
    """The registers that one reduction of a phase uses."""

    node: Node
    name: str
    type: Type


def operation(combine: str) -> str:
    return {"sum": "add", "prod": "mul"}.get(combine, combine)


class Reductions(Memory):
    """An emitter that folds."""

    def accumulator(self, node: Node, unroll: int) -> Accumulator:
        """Registers for a reduction along the vector axis, declared in the open block."""
        dtype = node.dtype
        made = Accumulator(node, self.fresh("acc"), Type(dtype, self.lanes))
        start = identity(node.attrs["combine"], dtype)
        self.put(len(self.blocks) - 1, Declare(made.name, made.type, start, unroll))
        return made

    def accumulate(self, acc: Accumulator, place: Place, register: Operand) -> None:
        """Fold one chunk in; lanes that are no elements count as the identity."""
        inner = len(self.blocks) - 1
        node, type = acc.node, acc.type
        combine = node.attrs["combine"]
        found = self.as_vector(self.emit(node.args[0], place))
        if self.tail is not None:
            below = self.let(inner, Type(boolean, self.lanes), "below", self.tail, operands=Type(int64))
            found = self.let(inner, type, "select", below, found, identity(combine, node.dtype), operands=type)
        old = self.fresh()
        self.put(inner, self._register(old, type, acc.name, register))
        made = self.let(inner, type, operation(combine), old, found, operands=type, line=node.line)
        self.put(inner, Assign(acc.name, type, made, register))

    @staticmethod
    def _register(name: str, type: Type, array: str, register: Operand) -> Any:
        return Let(name, type, "element", (array, register))

    def folded(self, acc: Accumulator, unroll: int, place: Place) -> None:
        """The result of a reduction along the vector axis: a scalar, or one element of a scratch array."""
        inner = len(self.blocks) - 1
        node, type = acc.node, acc.type
        op = operation(node.attrs["combine"])
        parts: list[Operand] = []
        for i in range(unroll):
            name = self.fresh()
            self.put(inner, self._register(name, type, acc.name, i))
            parts.append(name)
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [
                self.let(inner, type, op, a, b, operands=type) for a, b in zip(parts[:half], parts[half:], strict=True)
            ]
        scalar = Type(node.dtype)
        total = self.let(inner, scalar, "fold", parts[0], operands=type, mode=node.attrs["combine"], line=node.line)
        if is_scalar(node.shape):
            self.results[node] = Value(total, scalar, inner)
        else:
            self.keep(self.results[node], node.dtype, node.shape, Value(total, scalar, inner), self.rest(node, place))

    def rest(self, node: Node, place: Place) -> Place:
        """The place in a reduction's result."""
        axis, keep = node.attrs["axis"], node.attrs["keep"]
        inner = [ZERO if i == axis else p for i, p in enumerate(place)]
        return tuple(p for i, p in enumerate(inner) if keep or i != axis)

    def across(self, node: Node, place: Place) -> None:
        """Fold one chunk of a reduction along an outer axis into its scratch array."""
        inner = len(self.blocks) - 1
        where = self.rest(node, place)
        value = self.emit(node.args[0], place)
        name = self.results[node]
        index, _, lane = self.offset(node.shape, where)
        type = Type(node.dtype, self.lanes if lane != 0 else 1)
        old = self.fresh()
        self.put(inner, Load(old, type, name, index))
        operand = self.as_vector(value) if lane != 0 else value.operand
        made = self.let(inner, type, operation(node.attrs["combine"]), old, operand, operands=type, line=node.line)
        self.keep(name, node.dtype, node.shape, Value(made, type, inner), where)
