"""From a program to a thread's function: regions, loops, and the loop nest of each phase.

A nest counts the outer axes one by one and the last axis in chunks of a vector; the last chunk, which is not full, is
a copy of the body in which each access has a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewright.tile.analysis.places import is_scalar
from tilewright.tile.dtypes import boolean, int64
from tilewright.tile.errors import LowerError
from tilewright.tile.ir.thread_ir import Assign, Declare, For, Function, If, Let, Operand, Type
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.ir.tile_ir import Axis, Dim, Node, Program, Region, Shape, operands_first, static_size
from tilewright.tile.lower.elementwise import ZERO, Index, Place, Value
from tilewright.tile.lower.phases import Phase, Plan, folds, phases_in_order
from tilewright.tile.lower.reduce import BLOCK, Reductions
from tilewright.tile.numbers import identity
from tilewright.tile.schedule import Schedule

COUNT, TEST = Type(int64), Type(boolean)
Body = Callable[[Place, Operand], None]
"""What is done at a place, by the vectors of a chunk; the operand is the register of an accumulator."""


@dataclass
class Row:
    """The innermost axis of a nest: `along` in chunks, at a place of the others."""

    along: int
    place: list[Index]
    body: Body


def lower(program: Program, lanes: int, schedule: Schedule | None = None) -> Function:
    """The program as what one CPU thread does for one instance, in vectors of `lanes` float32; with a schedule, as what
    each of its threads does, in the schedule's own vectors."""
    if schedule is not None:
        from tilewright.tile.lower.threads import lower_threads  # it derives from this

        made: Lowering = lower_threads(program, schedule)
    else:
        made = Lowering(program, Plan(program), lanes)
        made.region(program.body)
    function = made.function
    function.parameters = sorted(made.parameters.values(), key=lambda p: (p.kind != "pointer", p.kind == "builtin"))
    written = program.written()
    function.read_only = frozenset(n for n in program.views if not any(program.may_meet(n, w) for w in written))
    function.inplace = program.inplace
    verify(function)
    return function


class Lowering(Reductions):
    # Regions --------------------------------------------------------------------------------------------------------

    def region(self, region: Region) -> None:
        for segment in self.plan.segments[region]:
            for scalars, phases in phases_in_order(segment):
                for item in scalars:
                    self.scalar(item)
                for phase in phases:
                    self.phase = phase
                    self.nest(phase)
                    self.phase = None
            if segment.control is not None:
                self.control(segment.control)

    def control(self, effect: Node) -> None:
        body = effect.attrs["body"]
        self.homes[body] = self.depth + 1
        given = [self.emit(a).operand for a in effect.args]
        if effect.op == "when":
            with self.under(If, *given):
                self.region(body)
            return
        var = self.fresh("k")
        with self.under(For, var, *given, any_step=given[2] != 1) as made:
            made.known[(effect.attrs["index"], ())] = Value(var, COUNT, self.depth)
            self.region(body)

    def scalar(self, item: Node) -> None:
        """An effect without a loop."""
        depth, place, type = self.depth, (ZERO,) * len(item.shape), Type(item.dtype)
        if item.op == "load":
            self.emit(item, place)
        elif item.op in ("store", "print"):
            self.store(item, place)
        elif item.op == "var":
            name = self.arrays[("cell", item.id)] = self.fresh("cell")
            self.put(depth, Declare(name, type, self.emit(item.args[0], place).operand))
        elif item.op == "set":
            self.put(depth, Assign(self.cell(item.attrs["var"]), type, self.emit(item.args[0], place).operand))
        elif item.op == "get":
            name = self.fresh()
            self.put(depth, Let(name, type, "copy", (self.cell(item.attrs["var"]),)))
            self.blocks[depth].known[(item, place)] = Value(name, type, depth)
        else:
            raise LowerError(f"{item.op} has no lowering for a CPU", item.line)

    # Loop nests -----------------------------------------------------------------------------------------------------

    def size(self, axis: Axis) -> Operand:
        return self.emit(axis.limit).operand if isinstance(axis, Dim) else axis

    def nest(self, phase: Phase) -> None:
        """Everything that a phase does, over its space."""
        space = phase.space
        along = next(k for k in (*phase.order, *reversed(range(len(space)))) if space[k] != 1)
        folding = [n for n in phase.items if folds(n)]
        inner = [n for n in folding if n.attrs["axis"] == along]
        for node in folding:
            if not is_scalar(node.shape):
                self.results[node] = self.array(self.fresh("r"), node.dtype, node.shape)
            if node not in inner:
                for array in self.sums_across(node):
                    self.fill(node, array)
        for item in phase.items:
            if item.op == "var":
                key = ("cell", item.id)
                self.arrays[key] = self.room(key, "cell", item.dtype, item.shape)
        work = sorted([*phase.items, *phase.keep, *self._first_loads(phase)], key=lambda n: n.id)
        unroll = self.unroll if inner else 1

        def body(place: Place, register: Operand) -> None:
            for item in dict.fromkeys(work):
                self.item(item, place, register)

        def around(place: Place, chunks: Callable[[], None]) -> None:
            self.accumulators = {n: self.accumulator(n, unroll) for n in inner}
            chunks()
            for node in self.accumulators:
                self.folded(node, unroll, place)
            self.accumulators = {}

        self.loops(space, along, unroll, body, around)
        for node in folding:
            if node not in inner:
                self.merge(node)

    def _first_loads(self, phase: Phase) -> list[Node]:
        """Loads of what is also written: they keep their place among the effects."""

        def known(node: Node) -> bool:  # what the phase does not compute itself
            return node in found or self.plan.waits(node, phase) or folds(node) or node.op == "reshape"

        found: set[Node] = set()
        for root in (*phase.keep, *(a for item in (*phase.items, *phase.keep) for a in item.args)):
            for node in operands_first(root, known):
                found.add(node)
        mine = [n for n in found if n.op in ("load", "get") and n.shape == phase.space]
        mine = [n for n in mine if n.region is phase.segment.region]
        return [n for n in mine if any(self.plan.conflict(n, s) for s in self.plan.stores)]

    def item(self, item: Node, place: Place, register: Operand) -> None:
        """One effect, or one tile to keep, of a chunk."""
        if item.op in ("store", "print"):
            self.store(item, self.place_of(item, place))
        elif folds(item):
            if item in self.accumulators:
                self.accumulate(item, place, register)
            else:
                self.across(item, place)
        elif item.op in ("var", "set"):
            key = item.id if item.op == "var" else item.attrs["var"]
            value = self.emit(item.args[0], place)
            self.keep(self.cell(key), value.type.dtype, self.program.nodes[key].shape, value, place)
        else:
            value = self.emit(item, place)
            if self.phase is not None and item in self.phase.keep:
                self.keep(self.array_of(item), item.dtype, item.shape, value, self.place_of(item, place))

    def fill(self, node: Node, array: str) -> None:
        """Write the identity of a reduction along an outer axis to a scratch array."""
        start, shape = identity(node.attrs["combine"], node.dtype), node.shape
        if is_scalar(shape):
            raise LowerError("a reduction along an axis that is not the last leaves one number", node.line)

        def body(place: Place) -> None:
            self.store_array(array, self.spread(node.dtype, shape, place), shape, place, start)

        self.over(shape, body)

    def merge(self, node: Node) -> None:
        """Add up what the blocks of a sum along an outer axis have left."""
        arrays = self.sums_across(node)
        if len(arrays) > 1:
            self.over(node.shape, lambda place: self.add_across(node, arrays, place))

    def over(self, shape: Shape, body: Callable[[Place], None]) -> None:
        """A nest over the elements of a scratch array."""
        along = max(i for i, a in enumerate(shape) if a != 1)
        self.loops(shape, along, 1, lambda place, register: body(place), lambda place, chunks: chunks())

    def loops(
        self, space: Shape, along: int, unroll: int, body: Body,
        around: Callable[[Place, Callable[[], None]], None],
    ) -> None:  # fmt: skip
        """A nest over a space: the outer axes one by one, `along` in chunks. `around` wraps the loop over chunks."""
        outer = [i for i, a in enumerate(space) if a != 1 and i != along]
        place = [ZERO] * len(space)

        def level(axes: list[int]) -> None:
            if not axes:
                around(tuple(place), lambda: self.chunks(space, unroll, Row(along, place, body)))
                return
            with self.each(axes[0], space[axes[0]]) as place[axes[0]]:
                level(axes[1:])

        level(outer)

    @contextmanager
    def each(self, number: int, axis: Axis) -> Iterator[Index]:
        """The body of a loop over an outer axis."""
        var, size = self.fresh("o"), self.size(axis)
        with self.under(For, var, 0, size, 1):
            yield Index(var, self.depth)

    def chunks(self, space: Shape, unroll: int, row: Row) -> None:
        """The loop over one axis: full rounds of `unroll` vectors, then what is left."""
        width = self.lanes * unroll
        size, full = self.extent(space[row.along], width)
        if full != 0:
            levels = self.levels(static_size(space[row.along]) // width)
            self._rounds(0, full, width, levels, lambda var: self._round(var, unroll, unroll, row))
        if size != full and unroll == 1:
            self._last(full, 0, row, size, short=True)
        elif size != full:
            rounds = unroll
            if isinstance(size, int) and isinstance(full, int):
                rounds = -(-(size - full) // self.lanes)
            self._round(full, unroll, rounds, row, size)

    def extent(self, axis: Axis, width: int) -> tuple[Operand, Operand]:
        """The size of an axis, and the part of it that is in full rounds of a width."""
        size = self.size(axis)
        if isinstance(size, int):
            return size, size // width * width
        return size, self.let(self.depth, COUNT, "and", size, -width, operands=COUNT)

    def _rounds(self, lo: Operand, hi: Operand, width: int, levels: int, body: Callable[[str], None]) -> None:
        """A loop over full rounds, in `levels` of blocks whose sums are taken on their own."""
        step, var = width * BLOCK**levels, self.fresh("b" if levels else "c")
        with self.under(For, var, lo, hi, step):
            if not levels:
                body(var)
                return
            with self.block_of_sums(self.unroll):
                beyond = self.let(self.depth, COUNT, "add", var, step)
                end = self.let(self.depth, COUNT, "min", beyond, hi)
                self._rounds(var, end, width, levels - 1, body)

    def _round(self, start: Operand, unroll: int, rounds: int, row: Row, size: Operand | None = None) -> None:
        """`rounds` vectors from `start` on; with a `size`, those that it leaves."""
        if unroll == 1:
            self._chunk(start, 0, row)
            return
        register = self.fresh("q")
        with self.under(For, register, 0, rounds, 1, unroll=True):
            step = self.let(self.depth, COUNT, "mul", register, self.lanes)
            at = self.let(self.depth, COUNT, "add", start, step)
            if size is None:
                self._chunk(at, register, row)
            else:
                self._last(at, register, row, size)

    def _last(self, at: Operand, register: Operand, row: Row, size: Operand, whole: bool = False,
              short: bool = False) -> None:  # fmt: skip
        """What lies below a size of the vector at `at`: of a `whole` one all or nothing, of a `short` one never all."""
        with self.under(If, self.let(self.depth, TEST, "lt", at, size, operands=COUNT)):
            tail = None if whole else self.let(self.depth, COUNT, "sub", size, at)
            if tail is not None and not short:
                tail = self.let(self.depth, COUNT, "min", tail, self.lanes)
            self._chunk(at, register, row, tail)

    def _chunk(self, at: Operand, register: Operand, row: Row, tail: Operand | None = None) -> None:
        row.place[row.along] = Index(at, self.depth, vector=True)
        self.tail = tail
        row.body(tuple(row.place), register)
        self.tail = None
        row.place[row.along] = ZERO
