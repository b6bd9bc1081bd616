"""A program as what the threads of one instance do: the lowering of `kernel`, but for how chunks are dealt to threads,
how a fold crosses them, who stores a scalar, and where tiles wait.

A tile waits in registers where every access to it has the same layout and its rounds are written out. That is found by
trying: the access that does not fit sends the tile to shared memory, and the lowering starts over. Barriers come later.
"""

from __future__ import annotations

import math as integers
from dataclasses import replace

from tilewright.tile.dtypes import DType, boolean
from tilewright.tile.ir.thread_ir import Array, Assign, Declare, For, If, Let, Load, Operand, Statement, Store, Type
from tilewright.tile.ir.thread_uniform import WARP
from tilewright.tile.ir.tile_ir import Node, Program, Shape, static_size
from tilewright.tile.layout.linear import Layout, blocked
from tilewright.tile.lower.elementwise import Place, counts_lanes
from tilewright.tile.lower.kernel import COUNT, TEST, Lowering, Row
from tilewright.tile.lower.phases import Plan, counting, injective
from tilewright.tile.lower.reduce import operation
from tilewright.tile.schedule import WIDEST, Schedule

ROUNDS = 8
"""A loop of so many rounds is written out: the loads of all stand before the arithmetic that waits for them."""


def dealt(schedule: Schedule) -> Layout:
    """Which thread has which element of a row, in one period: a vector a thread."""
    width = schedule.threads * schedule.vector
    return blocked({"row": width}, schedule.vector, WARP, schedule.threads // WARP)


class Elsewhere(Exception):
    """A tile that cannot wait in registers."""

    def __init__(self, key: object) -> None:
        self.key = key


class Threads(Lowering):
    """`shared`: the tiles that are known not to fit into registers."""

    unroll = 1  # the lanes of a vector are chains enough

    def __init__(self, program: Program, plan: Plan, schedule: Schedule, shared: frozenset[object]) -> None:
        super().__init__(program, plan, schedule.vector)
        self.schedule, self.shared = schedule, shared
        self.function.threads, self.function.instances = schedule.threads, schedule.instances
        self.width = schedule.threads * schedule.vector
        self.layout = dealt(schedule)
        self.divisors: dict[str, int] = {}
        self.registers: dict[str, object] = {}
        self.left = schedule.registers
        self.round: Operand | None = None
        self.row: object = None
        self.padded: dict[str, Shape] = {}
        self.tid = self.parameter("tid", "builtin", "thread")
        self.start = self.let(0, COUNT, "mul", self.tid, self.lanes)

    # What is known of addresses -------------------------------------------------------------------------------------

    def put(self, depth: int, statement: Statement) -> None:
        """A statement; of the integers it names, by what they can be divided."""
        if isinstance(statement, Let) and statement.type == COUNT and statement.op in ("add", "sub", "mul"):
            found = [self.divisor(a) for a in statement.args]
            self.divisors[statement.name] = found[0] * found[1] if statement.op == "mul" else integers.gcd(*found)
        elif isinstance(statement, (Load, Store)) and statement.type.lanes > 1 and not statement.scattered:
            statement = self._proven(statement)
        super().put(depth, statement)

    def divisor(self, operand: Operand) -> int:
        if isinstance(operand, int):
            return operand
        found = self.parameters.get(str(operand))
        if found is not None and found.kind == "stride":
            view = self.program.views[found.of]
            return max(1, view.align // view.dtype.itemsize)
        return self.divisors.get(str(operand), 1)

    def _proven(self, access: Load | Store) -> Load | Store:
        """An access of a vector, with what is known of its address: shared arrays begin at multiples of 16 bytes."""
        layout, begin, item = access.layout, WIDEST, access.type.dtype.itemsize
        if access.memory.startswith("p_"):
            name = access.memory.removeprefix("p_")
            layout, begin = self.layout if self._one_place(name) else None, self.program.views[name].align or item
        if access.stride != 1:
            return replace(access, layout=layout)
        found = integers.gcd(begin, self.divisor(access.index) * item, WIDEST, self.lanes * item)
        return replace(access, layout=layout, align=max(found, item))

    def _one_place(self, name: str) -> bool:
        """Whether all that may touch this memory does so at one index, each element by one thread. What counts along
        the threads must not move in a loop, where an element would go from one thread to another."""
        found = [
            e for e in self.program.effects()
            if e.op in ("load", "store") and self.program.may_meet(name, e.attrs["view"])
        ]  # fmt: skip
        rank, first = self.program.views[name].rank, found[0]
        index = first.args[:rank]
        together = all(e.args[:rank] == index and e.shape == first.shape for e in found)
        steady = all(a.region is self.program.body for a in counting(index, first.shape))
        return together and steady and injective(index, first.shape)

    # Chunks ---------------------------------------------------------------------------------------------------------

    def chunks(self, space: Shape, unroll: int, row: Row) -> None:
        """The loop over one axis: full rounds of a vector a thread, then what is left."""
        rounds = static_size(space[row.along]) // self.width
        size, full = self.extent(space[row.along], self.width)
        one_row = all(a == 1 for i, a in enumerate(space) if i != row.along)
        self.row = size if isinstance(size, int) and one_row and rounds <= ROUNDS else None
        if self.row is not None and full != 0:
            var = self.fresh("q")
            with self.under(For, var, 0, rounds, 1, unroll=True):
                self._deal(self.let(self.depth, COUNT, "mul", var, self.width), var, row)
        elif full != 0:
            self._rounds(0, full, self.width, self.levels(rounds), lambda var: self._deal(var, None, row))
        if size != full:
            self._deal(full, rounds if self.row is not None else None, row, size)
        self.row = self.round = None

    def _deal(self, base: Operand, round: Operand | None, row: Row, size: Operand | None = None) -> None:
        """Each thread's vector of the round at `base`; with a `size`, of what lies below it."""
        self.round = round
        if isinstance(base, str):
            self.divisors.setdefault(base, self.width)
        at = self.start if base == 0 else self.let(self.depth, COUNT, "add", base, self.start)
        if size is None:
            self._chunk(at, 0, row)
        else:
            self._last(at, 0, row, size, whole=isinstance(size, int) and size % self.lanes == 0)

    # Folds ----------------------------------------------------------------------------------------------------------

    def across_threads(self, node: Node, total: str) -> str:
        """Fold over the lanes of a warp, then over warps by a shared array. Every thread has the result."""
        depth, type = self.depth, Type(node.dtype)
        total = self._butterfly(node, total, WARP)
        warps = self.schedule.threads // WARP
        if warps == 1:
            return total
        array = self.fresh("w")
        self.function.arrays.append(Array(array, node.dtype, warps, shared=True))
        lane = self.let(0, COUNT, "and", self.tid, WARP - 1)
        first = self.let(0, TEST, "eq", lane, 0, operands=COUNT)
        warp = self.let(0, COUNT, "shr", self.tid, WARP.bit_length() - 1)
        self.put(depth, If(first, [Store(array, type, warp, total)]))
        mine, part = self.let(0, COUNT, "and", self.tid, warps - 1), self.fresh()
        self.put(depth, Load(part, type, array, mine))
        return self._butterfly(node, part, warps)

    def _butterfly(self, node: Node, total: str, count: int) -> str:
        depth, type = self.depth, Type(node.dtype)
        op = operation(node.attrs["combine"])
        mask = 1
        while mask < count:
            pair = [total, self.let(depth, type, "shuffle_xor", total, mask)]
            if op in ("max", "min") and type.dtype.floating:  # of 0 and -0 the second: it must be the same for both
                bit = self.let(0, COUNT, "and", self.tid, mask)
                lower = self.let(0, TEST, "eq", bit, 0, operands=COUNT)
                pair = [self.let(depth, type, "select", lower, *p, operands=type) for p in (pair, pair[::-1])]
            total = self.let(depth, type, op, *pair, operands=type, line=node.line)
            mask *= 2
        return total

    # Owners ---------------------------------------------------------------------------------------------------------

    def first(self) -> str:
        """Whether this is the first thread."""
        return self.let(0, TEST, "eq", self.tid, 0, operands=COUNT)

    def store(self, node: Node, place: Place) -> None:
        if counts_lanes(place):
            super().store(node, place)
            return
        owner = self.first()
        self.emit(node.args[-1], place)  # where every thread needs it, outside
        with self.under(If, owner):
            super().store(node, place)

    # Where tiles wait -----------------------------------------------------------------------------------------------

    def room(self, key: object, prefix: str, dtype: DType, shape: Shape) -> str:
        rounds = -(-static_size(shape[-1]) // self.width) if shape else 0
        count = rounds * self.lanes * max(4, dtype.itemsize) // 4
        flat = bool(shape) and all(a == 1 for a in shape[:-1]) and isinstance(shape[-1], int)
        if key in self.shared or not flat or count > self.left:
            return super().room(key, prefix, dtype, shape)
        self.left -= count
        name = self.fresh(prefix)
        self.registers[name] = key
        super().put(0, Declare(name, Type(dtype, self.lanes), False if dtype == boolean else 0, rounds))
        return name

    def array(self, name: str, dtype: DType, shape: Shape) -> str:
        """A shared array. Rows are apart by whole rounds, unless they are regrouped: a thread keeps its columns."""
        if len(shape) > 1 and not any(n.op == "reshape" and n.args[0].shape == shape for n in self.program.nodes):
            shape = self.padded[name] = (*shape[:-1], -(-static_size(shape[-1]) // self.width) * self.width)
        elements = integers.prod(map(static_size, shape)) + self.lanes
        self.function.arrays.append(Array(name, dtype, elements, shared=True))
        return name

    def _in_register(self, name: str, shape: Shape, place: Place) -> Operand | None:
        if name not in self.registers:
            return None
        if self.round is None or not place[-1].vector or shape[-1] != self.row:
            raise Elsewhere(self.registers[name])
        return self.round

    def load_array(self, name: str, type: Type, shape: Shape, place: Place, depth: int) -> str:
        index = self._in_register(name, shape, place)
        if index is not None:
            return self.register(depth, type, name, index)
        made = self.fresh()
        at, lane = self.offset(self.padded.get(name, shape), place)
        self.put(depth, Load(made, type, name, at, lane or 1, layout=self._dealt(name, shape, place)))
        return made

    def store_array(self, name: str, type: Type, shape: Shape, place: Place, value: Operand) -> None:
        inner, index = self.depth, self._in_register(name, shape, place)
        if index is not None:
            self.put(inner, Assign(name, type, value, index))
            return
        at, lane = self.offset(self.padded.get(name, shape), place)
        count = self.tail if lane == 1 and type.lanes > 1 else None
        made = Store(name, type, at, value, lane or 1, count, layout=self._dealt(name, shape, place))
        if lane == 0:
            super().put(inner, If(self.first(), [made]))
        else:
            self.put(inner, made)

    def _dealt(self, name: str, shape: Shape, place: Place) -> Layout | None:
        last = self.padded.get(name, shape)[-1]
        alone = all(a == 1 for a in shape[:-1])
        fits = alone or static_size(last) % self.width == 0
        return self.layout if place[-1].vector and fits else None


def lower_threads(program: Program, schedule: Schedule) -> Threads:
    """The lowering, once every tile has a place where it fits."""
    shared: frozenset[object] = frozenset()
    while True:
        made = Threads(program, Plan(program), schedule, shared)
        try:
            made.region(program.body)
        except Elsewhere as found:
            shared |= {found.key}
        else:
            return made
