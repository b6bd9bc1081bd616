"""Reductions in a loop nest: accumulators in registers along the vector axis, in scratch arrays along the others.

The order is `oracle.interpreter.Order(lanes, unroll, BLOCK)`: element i goes to accumulator i % (lanes * unroll), the
accumulators are folded by halves, then the lanes. Floating sums are taken in blocks: see `BLOCK`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.tile.analysis.places import is_scalar
from tilewright.tile.dtypes import boolean, int64
from tilewright.tile.ir.thread_ir import Assign, Declare, For, If, Let, Operand, Type
from tilewright.tile.ir.tile_ir import Node, Program, static_size
from tilewright.tile.lower.elementwise import ZERO, Place, Value, counts_lanes
from tilewright.tile.lower.memory import Memory
from tilewright.tile.lower.phases import Plan
from tilewright.tile.numbers import identity

UNROLL = 4
"""Accumulators of a reduction: as many as hide the latency of an addition."""
BLOCK = 16
"""A floating sum adds so many rounds of vectors one after the other, then so many sums of such blocks, and so on: its
error grows with the logarithm of the row. Equal terms, all rounded one way, lost 200 ulp in 131072 without."""


def blocked(node: Node) -> bool:
    """Whether a reduction is taken in blocks: the others round nothing, or lose no more in a long row."""
    return bool(node.attrs["combine"] == "sum" and node.dtype.floating)


def operation(combine: str) -> str:
    return {"sum": "add", "prod": "mul"}.get(combine, combine)


class Reductions(Memory):
    """An emitter that folds. `accumulators`: the registers of each reduction of the loop nest that is open."""

    unroll = UNROLL

    def __init__(self, program: Program, plan: Plan, lanes: int) -> None:
        super().__init__(program, plan, lanes)
        self.accumulators: dict[Node, str] = {}

    def accumulator(self, node: Node, unroll: int) -> str:
        """Registers for a reduction along the vector axis, declared in the open block."""
        name, type = self.fresh("acc"), Type(node.dtype, self.lanes)
        self.put(self.depth, Declare(name, type, identity(node.attrs["combine"], node.dtype), unroll))
        return name

    def accumulate(self, node: Node, place: Place, register: Operand) -> None:
        """Fold one chunk in; lanes that are no elements count as the identity."""
        inner, type = self.depth, Type(node.dtype, self.lanes)
        name, combine = self.accumulators[node], node.attrs["combine"]
        found = self.as_vector(self.emit(node.args[0], place))
        if self.tail is not None:
            none = identity(combine, node.dtype)
            found = self.let(inner, type, "select", self.elements(), found, none, operands=type)
        old = self.register(inner, type, name, register)
        made = self.let(inner, type, operation(combine), old, found, operands=type, line=node.line)
        self.put(inner, Assign(name, type, made, register))

    def levels(self, rounds: int) -> int:
        """In how many levels of blocks a loop of so many rounds sums."""
        levels = 0
        while any(map(blocked, self.accumulators)) and rounds > BLOCK:
            rounds, levels = -(-rounds // BLOCK), levels + 1
        return levels

    @contextmanager
    def block_of_sums(self, unroll: int) -> Iterator[None]:
        """Registers of their own for what is summed inside, added to the outer ones at the end."""
        outer = self.accumulators
        self.accumulators = {n: self.accumulator(n, unroll) if blocked(n) else name for n, name in outer.items()}
        yield
        register = self.fresh("q")
        with self.under(For, register, 0, unroll, 1, unroll=True):
            for node, total in outer.items():
                if blocked(node):
                    inner, type = self.depth, Type(node.dtype, self.lanes)
                    old, part = (self.register(inner, type, n, register) for n in (total, self.accumulators[node]))
                    both = self.let(inner, type, "add", old, part, operands=type, line=node.line)
                    self.put(inner, Assign(total, type, both, register))
        self.accumulators = outer

    def register(self, depth: int, type: Type, array: str, number: Operand) -> str:
        """What a register of an array holds."""
        name = self.fresh()
        self.put(depth, Let(name, type, "element", (array, number)))
        return name

    def folded(self, node: Node, unroll: int, place: Place) -> None:
        """The result of a reduction along the vector axis: a scalar, or one element of a scratch array."""
        inner, type = self.depth, Type(node.dtype, self.lanes)
        op = operation(node.attrs["combine"])
        parts = [self.register(inner, type, self.accumulators[node], i) for i in range(unroll)]
        while len(parts) > 1:
            halves = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
            parts = [self.let(inner, type, op, a, b, operands=type) for a, b in halves]
        scalar = Type(node.dtype)
        total = self.let(inner, scalar, "fold", parts[0], operands=type, mode=node.attrs["combine"], line=node.line)
        total = self.across_threads(node, total)
        if is_scalar(node.shape):
            self.results[node] = Value(total, scalar, inner)
        else:
            self.keep(self.results[node], node.dtype, node.shape, Value(total, scalar, inner), self.rest(node, place))

    def across_threads(self, node: Node, total: str) -> str:
        """The fold of what each thread has: here there is one thread."""
        return total

    def rest(self, node: Node, place: Place) -> Place:
        """The place in a reduction's result."""
        axis, kept = node.attrs["axis"], (ZERO,) if node.attrs["keep"] else ()
        return (*place[:axis], *kept, *place[axis + 1 :])

    def sums_across(self, node: Node) -> list[str]:
        """The scratch arrays of a reduction along an outer axis: of a block, of a block of blocks, .., its result."""
        key = ("sums", node)
        if key not in self.results:
            most, arrays = static_size(node.args[0].shape[node.attrs["axis"]]), []
            while blocked(node) and most > BLOCK:
                arrays.append(self.array(self.fresh("r"), node.dtype, node.shape))
                most = -(-most // BLOCK)
            self.results[key] = [*arrays, self.results[node]]
        found: list[str] = self.results[key]
        return found

    def across(self, node: Node, place: Place) -> None:
        """Fold one chunk of a reduction along an outer axis into its scratch array; a full block goes to the next."""
        where, arrays = self.rest(node, place), self.sums_across(node)
        self._fold_into(node, arrays[0], self.emit(node.args[0], place), where)
        count = place[node.attrs["axis"]]
        for level in range(1, len(arrays)):
            depth, last = count.depth, BLOCK**level - 1
            inside = self.let(depth, Type(int64), "and", count.base, last)
            full = self.let(depth, Type(boolean), "eq", inside, last, operands=Type(int64))
            with self.under(If, full):
                self.add_across(node, arrays[level - 1 : level + 1], where)

    def add_across(self, node: Node, arrays: list[str], where: Place) -> None:
        """Add each array to the next, and start it again."""
        for part, total in itertools.pairwise(arrays):
            type, inner = self.spread(node.dtype, node.shape, where), self.depth
            name = self.load_array(part, type, node.shape, where, inner)
            self._fold_into(node, total, Value(name, type, inner), where)
            self.store_array(part, type, node.shape, where, identity(node.attrs["combine"], node.dtype))

    def _fold_into(self, node: Node, name: str, value: Value, where: Place) -> None:
        type, inner = self.spread(node.dtype, node.shape, where), self.depth
        old = self.load_array(name, type, node.shape, where, inner)
        operand = self.as_vector(value) if counts_lanes(where) else value.operand
        made = self.let(inner, type, operation(node.attrs["combine"]), old, operand, operands=type, line=node.line)
        self.keep(name, node.dtype, node.shape, Value(made, type, inner), where)
