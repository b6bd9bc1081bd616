"""Values: from nodes over tiles to scalars and vectors of one chunk of a loop nest.

A node is emitted at an index (a count for each of its axes, one of which may stand for a whole vector), in the
outermost block where that index is known: what does not vary in a loop stands before it. Memory is in `memory`, loops
in `loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.tile import dtypes, numbers
from tilewright.tile.analysis.intervals import Facts
from tilewright.tile.dtypes import DType, boolean, float32, int32, int64
from tilewright.tile.errors import Line, LowerError
from tilewright.tile.ir.thread_ir import For, Function, If, Let, Operand, Parameter, Statement, Type
from tilewright.tile.ir.tile_ir import Node, Program, Region
from tilewright.tile.lower import math
from tilewright.tile.lower.phases import Phase, Plan, folds


@dataclass(frozen=True)
class Index:
    """Where one axis stands: at `base`, or from there on one element a lane. `depth` is the block that knows it."""

    base: Operand
    depth: int
    vector: bool = False


ZERO = Index(0, 0)
DOWNWARD = {"floordiv": "quot", "mod": "rem"}
Place = tuple[Index, ...]


def counts_lanes(place: Place) -> bool:
    """Whether an axis of a place stands for a vector."""
    return any(i.vector for i in place)


@dataclass(frozen=True)
class Value:
    operand: Operand
    type: Type
    depth: int

    @property
    def vector(self) -> bool:
        return self.type.lanes > 1


@dataclass
class Block:
    """Statements under construction, and what they have computed so far."""

    statements: list[Statement] = field(default_factory=list)
    known: dict[Any, Any] = field(default_factory=dict)


class Emitter:
    """Emits values into a stack of blocks. `tail`: in the last chunk of a loop, how many lanes are elements."""

    def __init__(self, program: Program, plan: Plan, lanes: int) -> None:
        self.program, self.plan, self.lanes = program, plan, lanes
        self.function = Function(program.name, lanes)
        self.blocks: list[Block] = [Block(self.function.body)]
        self.homes: dict[Region, int] = {program.body: 0}
        self.parameters: dict[str, Parameter] = {}
        self.results: dict[Any, Any] = {}
        self.arrays: dict[tuple[str, object], str] = {}
        """Where each cell lives, and each tile that waits."""
        self.facts = Facts(program)
        self.phase: Phase | None = None
        self.tail: Operand | None = None
        self._count = 0

    @contextmanager
    def block(self) -> Iterator[Block]:
        """Statements of a body of their own."""
        self.blocks.append(Block())
        try:
            yield self.blocks[-1]
        finally:
            self.blocks.pop()

    @property
    def depth(self) -> int:
        """Of the innermost block."""
        return len(self.blocks) - 1

    @contextmanager
    def under(self, compound: Callable[..., For | If], *given: Operand, **flags: bool) -> Iterator[Block]:
        """The body of a loop or of a condition."""
        with self.block() as made:
            yield made
        self.put(self.depth, compound(*given, made.statements, **flags))

    # Statements -----------------------------------------------------------------------------------------------------

    def fresh(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def put(self, depth: int, statement: Statement) -> None:
        self.blocks[depth].statements.append(statement)

    def let(
        self, depth: int, type: Type, op: str, *args: Operand, operands: Type | None = None, mode: str = "",
        line: Line | None = None,
    ) -> str:  # fmt: skip
        """The result of an operation, computed once a block."""
        key = (type, op, args, operands, mode)
        known = self.blocks[depth].known
        if key not in known:
            known[key] = self.fresh()
            self.put(depth, Let(known[key], type, op, args, operands, mode, line))
        return str(known[key])

    def parameter(self, name: str, kind: str, of: str, axis: int = 0, dtype: DType = int64) -> str:
        """A parameter's name. What the author named comes last, so that no two kinds ever share one."""
        self.parameters.setdefault(name, Parameter(name, kind, of, axis, dtype))
        return name

    def as_vector(self, value: Value) -> Operand:
        """A vector operand: constants stay, for they are printed in place."""
        if value.vector or not isinstance(value.operand, str):
            return value.operand
        return self.let(value.depth, Type(value.type.dtype, self.lanes), "splat", value.operand, operands=value.type)

    # Values ---------------------------------------------------------------------------------------------------------

    def place_of(self, node: Node, place: Place) -> Place:
        """The part of a place that is an operand's own, axes of size 1 at 0."""
        mine = place[len(place) - len(node.shape) :]
        return tuple(ZERO if a == 1 else i for a, i in zip(node.shape, mine, strict=True))

    def emit(self, node: Node, place: Place = ()) -> Value:
        """The value of a node where its axes stand at `place`."""
        mine = self.place_of(node, place)
        depth = max((self.homes[node.region], *(i.depth for i in mine)))
        known = self.blocks[depth].known
        key = (node, mine)
        if key not in known:
            known[key] = self._compute(node, mine, depth)
        found: Value = known[key]
        return found

    def _compute(self, node: Node, place: Place, depth: int) -> Value:
        if node.op in ("load", "get", "reshape") or folds(node) or self._waits(node):
            return self.read(node, place, depth)
        if node.op == "stage":
            return self.emit(node.args[0], place)
        a, scalar = node.attrs, Type(node.dtype)
        if node.op == "const":
            return Value(a["value"], scalar, depth)
        if node.op in ("program_id", "num_programs"):
            kind = "pid" if node.op == "program_id" else "grid"
            return Value(self.parameter(f"{kind}{a['axis']}", "builtin", kind, a["axis"]), scalar, depth)
        if node.op == "size":
            return Value(self.parameter(f"n{a['axis']}_{a['view']}", "size", a["view"], a["axis"]), scalar, depth)
        if node.op == "argument":
            return Value(self.parameter(f"a_{a['name']}", "scalar", a["name"], 0, node.dtype), scalar, depth)
        if node.op == "arange":
            if not place[0].vector:
                return Value(place[0].base, scalar, depth)
            type = Type(int64, self.lanes)
            return Value(self.let(depth, type, "iota", place[0].base, operands=scalar), type, depth)
        if node.op == "broadcast":
            return self.emit(node.args[0], self.through(node, place))
        if node.op == "reduce":  # of an axis of size 1
            axis = a["axis"]
            inner = place if a["keep"] else (*place[:axis], ZERO, *place[axis:])
            one = self.emit(node.args[0], inner)
            if a["combine"] != "sum" or not node.dtype.floating:
                return one
            total = self.let(depth, one.type, "add", one.operand, 0.0, operands=one.type, line=node.line)
            return Value(total, one.type, depth)  # a sum begins at 0, so of -0 alone it is 0, as in a longer row
        args = [self.emit(x, place) for x in node.args]
        lanes = self.lanes if any(v.vector for v in args) else 1
        operands = [self.as_vector(v) if lanes > 1 else v.operand for v in args]
        type = Type(node.dtype, lanes)
        return Value(self._operation(node, operands, type, depth), type, depth)

    def read(self, node: Node, place: Place, depth: int) -> Value:
        raise NotImplementedError  # in `memory`, which derives from this

    def _waits(self, node: Node) -> bool:
        return self.phase is not None and bool(node.shape) and self.plan.waits(node, self.phase)

    def through(self, node: Node, place: Place) -> Place:
        """The place of a broadcast's operand."""
        axes = node.attrs["axes"]
        return tuple(place[axes.index(k)] if k in axes else ZERO for k in range(len(node.args[0].shape)))

    def _operation(self, node: Node, args: list[Operand], type: Type, depth: int) -> Operand:
        a, source = node.attrs, Type(node.args[0].dtype, type.lanes)
        line = node.line
        if node.op == "binary":
            folded = fold_constants(a["kind"], args) if node.dtype == int64 else None
            if folded is not None:
                return folded
            kind = a["kind"]
            if kind in DOWNWARD and self.facts.of(node.args[0])[0] >= 0 and self.facts.of(node.args[1])[0] > 0:
                kind = DOWNWARD[kind]  # of what is not negative C's own division rounds down
            return self.let(depth, type, kind, *args, operands=source, mode=a.get("nan", ""), line=line)
        if node.op == "unary":
            if "accuracy" in a and self.function.threads > 1:  # a CPU has nothing that is faster
                return self.let(depth, type, a["kind"], args[0], mode=a["accuracy"], line=line)
            if a["kind"] in math.FUNCTIONS:
                made: Operand = math.FUNCTIONS[a["kind"]](ThreadBuilder(self, depth, type.lanes, line), args[0])
                return made
            return self.let(depth, type, a["kind"], args[0], operands=source, line=line)
        if node.op == "fma":
            return self.let(depth, type, "fma", *args, line=line)
        if node.op == "where":
            return self.let(depth, type, "select", *args, operands=type, line=line)
        if node.op == "bitcast":
            return self.let(depth, type, "bits", args[0], operands=source, line=line)
        if node.op == "cast":
            if not isinstance(args[0], str):
                return cast_constant(args[0], node, depth)
            mode = f"{a['round']} saturate" if a["saturate"] else str(a["round"])
            return self.let(depth, type, "cast", args[0], operands=source, mode=mode, line=line)
        if node.op == "random":
            return self.let(depth, type, "philox", *args, operands=Type(int64, type.lanes), line=line)
        raise LowerError(f"{node.op} has no lowering for a CPU", node.line)


def fold_constants(kind: str, args: list[Operand]) -> Operand | None:
    """An int64 operation that need not be done, for addresses: both constant, or one of them neutral."""
    left, right = args
    if isinstance(left, int) and isinstance(right, int):
        known = {"add": left + right, "sub": left - right, "mul": left * right}
        return known.get(kind)
    if (kind in ("add", "sub") and right == 0) or (kind == "mul" and right == 1):
        return left
    if (kind == "add" and left == 0) or (kind == "mul" and left == 1):
        return right
    return None


def cast_constant(value: Operand, node: Node, depth: int) -> Operand:
    """A constant as another dtype."""
    source, target = node.args[0].dtype, node.dtype
    array = np.asarray(value, source.values)
    made = numbers.cast(array, source, target, node.attrs["round"], node.attrs["saturate"]).item()
    return float(made) if target.floating else bool(made) if target == boolean else int(made)


def _floats(op: str, mode: str = "") -> Callable[..., Operand]:
    """An operation on float32, as a method of the builder."""
    return lambda builder, *args: builder.let(builder.f, op, *args, mode=mode)


def _tests(op: str) -> Callable[..., Operand]:
    return lambda builder, *args: builder.let(builder.m, op, *args, operands=builder.f)


def _wholes(op: str) -> Callable[..., Operand]:
    return lambda builder, *args: builder.integer(op, *args)


class ThreadBuilder:
    """`lower.math.Builder` that emits L1."""

    def __init__(self, emitter: Emitter, depth: int, lanes: int, line: Line) -> None:
        self.emitter, self.depth, self.line = emitter, depth, line
        self.f, self.i, self.m = Type(float32, lanes), Type(int32, lanes), Type(boolean, lanes)
        self._integers: set[str] = emitter.blocks[depth].known.setdefault("integers", set())

    add, sub, mul, div = _floats("add"), _floats("sub"), _floats("mul"), _floats("div")
    fma, sqrt, ldexp = _floats("fma"), _floats("sqrt"), _floats("ldexp")
    least, greatest = _floats("min", "second"), _floats("max", "second")
    less, equal = _tests("lt"), _tests("eq")
    iadd, isub, iand, ior = _wholes("add"), _wholes("sub"), _wholes("and"), _wholes("or")
    shl, shr = _wholes("shl"), _wholes("shr")

    def let(self, type: Type, op: str, *args: Operand, operands: Type | None = None, mode: str = "") -> Operand:
        return self.emitter.let(self.depth, type, op, *args, operands=operands, mode=mode, line=self.line)

    def integer(self, op: str, *args: Operand, operands: Type | None = None) -> Operand:
        made = self.let(self.i, op, *args, operands=operands)
        self._integers.add(str(made))
        return made

    def real(self, value: float) -> Operand:
        return float(dtypes.float32.rounded(np.asarray(value, np.float32)))

    def whole(self, value: int) -> Operand:
        return value

    def select(self, condition: Operand, a: Operand, b: Operand) -> Operand:
        whole = all(isinstance(x, int) or (isinstance(x, str) and x in self._integers) for x in (a, b))
        type = self.i if whole else self.f
        return self.let(type, "select", condition, a, b, operands=type)

    def bits(self, a: Operand) -> Operand:
        return self.integer("bits", a, operands=self.f)

    def from_bits(self, a: Operand) -> Operand:
        return self.let(self.f, "bits", a, operands=self.i)
