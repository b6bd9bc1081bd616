"""A program as what the threads of one instance do: the lowering of `kernel`, but for how chunks are dealt to threads,
how a fold crosses them, who stores a scalar, and where tiles wait.

A tile waits in registers where every access to it has the same layout and its rounds are written out. That is found by
trying: the access that does not fit sends the tile to shared memory, and the lowering starts over. Barriers come later.
"""

from __future__ import annotations

import math as integers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tilewright.tile.analysis.parting import needed
from tilewright.tile.analysis.places import counting, injective
from tilewright.tile.dtypes import DType, boolean
from tilewright.tile.errors import LowerError
from tilewright.tile.ir import thread_ir
from tilewright.tile.ir.thread_ir import Array, Assign, Declare, For, If, Let, Load, Operand, Statement, Store, Type
from tilewright.tile.ir.thread_uniform import WARP
from tilewright.tile.ir.tile_ir import Axis, Node, Program, Region, Shape, static_size
from tilewright.tile.layout.linear import Layout, blocked
from tilewright.tile.lower.elementwise import Index, Place, counts_lanes
from tilewright.tile.lower.kernel import COUNT, TEST, Body, Lowering, Row
from tilewright.tile.lower.phases import Phase, Plan, folds
from tilewright.tile.lower.reduce import operation
from tilewright.tile.schedule import WIDEST, Schedule

ROUNDS = 8
"""A loop of so many rounds is written out: the loads of all stand before the arithmetic that waits for them."""
COPIED = 4
"""Bytes that an asynchronous copy moves at least."""


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
        self.beside: tuple[int, int, str] | None = None
        """Where threads lie along two axes: the second one, how many, and which one this is."""
        self.ordered = any("order" in e.attrs for e in program.effects())
        self.pending: set[Node] = set()
        """Staged tiles that are on their way."""
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
        if isinstance(statement, Store) and self._own(statement):
            statement = replace(statement, own=True)
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
        layout, item = access.layout, access.type.dtype.itemsize
        if access.memory.startswith("p_"):
            layout = self.layout if self._one_place(access.memory.removeprefix("p_")) else None
        if access.stride != 1:
            return replace(access, layout=layout)
        found = self._divides(access.memory, access.index, item)
        if isinstance(access, Store) and access.source:
            found = integers.gcd(found, self._divides(access.source, access.value, item))
        return replace(access, layout=layout, align=max(found, item))

    def _divides(self, memory: str, index: Operand, item: int) -> int:
        """Bytes that the address of a vector is a multiple of."""
        view = self.program.views.get(memory.removeprefix("p_"))
        begin = WIDEST if view is None or not memory.startswith("p_") else view.align or item
        return integers.gcd(begin, self.divisor(index) * item, WIDEST, self.lanes * item)

    def _one_place(self, name: str) -> bool:
        """Whether all that may touch this memory does so at one index, each element by one thread."""
        found = [
            e for e in self.program.effects()
            if e.op in ("load", "store") and self.program.may_meet(name, e.attrs["view"])
        ]  # fmt: skip
        rank, first = self.program.views[name].rank, found[0]
        together = all(e.args[:rank] == first.args[:rank] and e.shape == first.shape for e in found)
        order = self.phase.order if self.phase is not None else ()
        return together and all(e.attrs.get("order", ()) == order for e in found) and self._dealt_once(first)

    def _dealt_once(self, e: Node) -> bool:
        """Whether an element is always one thread's. What counts along the threads must not move in a loop, where it
        would go from one thread to another."""
        index = e.args[: self.program.views[e.attrs["view"]].rank]
        return all(a.region is self.program.body for a in counting(index, e.shape)) and injective(index, e.shape)

    def _own(self, store: Store) -> bool:
        """See `Store`: arrays are stored to at the place of an element."""
        phase, view = self.phase, store.memory.removeprefix("p_")
        if phase is None or self.beside is None:
            return False
        return all(self._dealt_once(e) for e in phase.items if store.memory != view == e.attrs.get("view"))

    # Asynchronous copies ------------------------------------------------------------------------------------------

    def region(self, region: Region) -> None:
        super().region(region)
        self._settle()

    def control(self, effect: Node) -> None:
        self._settle()
        super().control(effect)

    def nest(self, phase: Phase) -> None:
        if self.pending and not self.pending.isdisjoint(needed([*phase.items, *phase.keep])):
            self._settle()
        super().nest(phase)

    def _settle(self) -> None:
        """Before what is on its way is used, and before what not every thread may enter."""
        if self.pending:
            self.put(self.depth, thread_ir.Wait())
        self.pending.clear()

    def item(self, item: Node, place: Place, register: Operand) -> None:
        if item.op != "stage" or not self._copied(item, self.place_of(item, place)):
            super().item(item, place, register)

    def _copied(self, item: Node, place: Place) -> bool:
        """What is only loaded comes to shared memory by itself, if an instruction copies so many bytes."""
        load = item.args[0]
        if load.op != "load" or load.attrs["masked"] or item.attrs["scope"] != "shared":
            return False
        view, array = load.attrs["view"], self.array_of(item)
        index, stride, scattered = self._reached(load, place, False)
        at, lane = self.offset(self.padded.get(array, item.shape), place)
        if any(self.program.may_meet(view, w) for w in self.program.written()) or scattered or (stride, lane) != (1, 1):
            return False
        memory = self.parameter(f"p_{view}", "pointer", view, 0, load.dtype)
        made = Store(array, Type(load.dtype, self.lanes), at, index, 1, self.tail, None, False, load.line,
                     self._dealt(array, item.shape, place), source=memory)  # fmt: skip
        if made.type.lanes == 1 or self._proven(made).align < COPIED:
            return False
        self.put(self.depth, made)
        self.pending.add(item)
        return True

    # Chunks ---------------------------------------------------------------------------------------------------------

    def loops(
        self, space: Shape, along: int, unroll: int, body: Body,
        around: Callable[[Place, Callable[[], None]], None],
    ) -> None:  # fmt: skip
        """Where the author gave an order, and all around it, threads that the first axis leaves over take the next."""
        order = self.phase.order if self.phase is not None else ()
        if self.ordered and not order and self.phase is not None and not any(map(folds, self.phase.items)):
            order = tuple(reversed(range(len(space))))
        second = next((k for k in order if space[k] != 1 and k != along), None)
        columns = min(1 << (-(-static_size(space[along]) // self.lanes) - 1).bit_length(), self.schedule.threads)
        if second is None or columns == self.schedule.threads:
            super().loops(space, along, unroll, body, around)
            return
        usual = self.start, self.width, self.layout
        column = self.let(0, COUNT, "and", self.tid, columns - 1)
        row = self.let(0, COUNT, "shr", self.tid, columns.bit_length() - 1)
        rows, self.width = self.schedule.threads // columns, columns * self.lanes
        self.start, self.beside = self.let(0, COUNT, "mul", column, self.lanes), (second, rows, row)
        axes = {f"axis {second}": rows, f"axis {along}": self.width}
        self.layout = blocked(axes, self.lanes, WARP, self.schedule.threads // WARP)
        super().loops(space, along, unroll, body, around)
        (self.start, self.width, self.layout), self.beside = usual, None

    @contextmanager
    def each(self, number: int, axis: Axis) -> Iterator[Index]:
        if self.beside is None or self.beside[0] != number:
            with super().each(number, axis) as found:
                yield found
            return
        var, size, (_, rows, row) = self.fresh("o"), self.size(axis), self.beside
        with self.under(For, var, 0, size, rows):
            at = self.let(self.depth, COUNT, "add", var, row)
            if isinstance(size, int) and size % rows == 0:
                yield Index(at, self.depth)
                return
            with self.under(If, self.let(self.depth, TEST, "lt", at, size, operands=COUNT)):
                yield Index(at, self.depth)

    def chunks(self, space: Shape, unroll: int, row: Row) -> None:
        """The loop over one axis: full rounds of a vector a thread, then what is left."""
        if self.beside is not None:  # one round has the whole axis
            whole = self.size(space[row.along])
            self._deal(0, None, row, None if whole == self.width else whole)
            self.round = None
            return
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

    def first(self, of: str | None = None) -> str:
        """Whether this is the first thread, or the first `of` a row or a column."""
        return self.let(0, TEST, "eq", of or self.tid, 0, operands=COUNT)

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
        node = key[1] if isinstance(key, tuple) else None
        asked = node.attrs.get("scope", "") if isinstance(node, Node) else ""
        why = "" if flat else "it has several rows, or a length that only run time knows"
        why = why or (f"it needs {count} registers, and {self.left} are left" if count > self.left else "")
        why = why or ("it is read where another thread would have to have it" if key in self.shared else "")
        if isinstance(node, Node) and asked == "register" and why:
            raise LowerError(f"{self.program.name}: a tile cannot wait in registers: {why}", node.line)
        if why or asked:
            return self.array(self.fresh(prefix), dtype, shape, staged=bool(asked))
        self.left -= count
        name = self.fresh(prefix)
        self.registers[name] = key
        super().put(0, Declare(name, Type(dtype, self.lanes), False if dtype == boolean else 0, rounds))
        return name

    def array(self, name: str, dtype: DType, shape: Shape, staged: bool = False) -> str:
        """A shared array. Rows are apart by whole rounds, unless they are regrouped: a thread keeps its columns. Those
        of a `staged` tile are an odd number of 16 bytes apart: a column is in many banks."""
        if len(shape) > 1 and not any(n.op == "reshape" and n.args[0].shape == shape for n in self.program.nodes):
            width = self.lanes if staged else self.width
            last = -(-static_size(shape[-1]) // width) * width
            if staged:
                last = (-(-last * dtype.itemsize // WIDEST) | 1) * WIDEST // dtype.itemsize
            shape = self.padded[name] = (*shape[:-1], last)
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
        mask, layout = self.across_rows(lane), self._dealt(name, shape, place)
        beyond = lane == 1 and type.lanes > 1 and name not in self.padded and any(a != 1 for a in shape[:-1])
        count = self.tail if beyond else None  # what is behind a row that is not padded may be another thread's
        self.put(depth, Load(made, type, name, at, lane or 1, count, mask, layout=layout))
        return made

    def store_array(self, name: str, type: Type, shape: Shape, place: Place, value: Operand) -> None:
        inner, index = self.depth, self._in_register(name, shape, place)
        if index is not None:
            self.put(inner, Assign(name, type, value, index))
            return
        at, lane = self.offset(self.padded.get(name, shape), place)
        count = self.tail if lane == 1 and type.lanes > 1 else None
        mask, layout = self.across_rows(lane), self._dealt(name, shape, place)
        made = Store(name, type, at, value, lane or 1, count, mask, layout=layout)
        one, again = lane == 0, self._repeated(shape)
        if one or again:  # one writes for all
            who = self.tid if self.beside is None or (one and again) else self.start if one else self.beside[2]
            super().put(inner, If(self.first(who), [made]))
        else:
            self.put(inner, made)

    def _repeated(self, shape: Shape) -> bool:
        """Whether threads that differ along the second axis have the same elements."""
        axis = self.beside[0] - len(self.phase.space) if self.beside is not None and self.phase is not None else 0
        return axis < 0 and (axis < -len(shape) or shape[axis] == 1)

    def _dealt(self, name: str, shape: Shape, place: Place) -> Layout | None:
        rows = self.beside is None and static_size(shape[-1]) % self.width == 0  # regrouped, a column stays one
        fits = name in self.padded or rows or all(a == 1 for a in shape[:-1])
        return self.layout if place[-1].vector and fits and not self._repeated(shape) else None


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
