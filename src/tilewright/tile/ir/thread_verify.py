"""The rules that every L1 function keeps. A broken one is the compiler's mistake, so each lowering is checked."""

from __future__ import annotations

from tilewright.tile.dtypes import int64
from tilewright.tile.errors import Line, VerifyError
from tilewright.tile.ir.thread_ir import (
    Assign,
    Barrier,
    Declare,
    Function,
    If,
    Let,
    Load,
    Operand,
    Statement,
    Store,
    Type,
)

SCRATCH_BYTES = 8 << 20
"""The most scratch that a thread may have."""


def verify(function: Function) -> None:
    """Raises `VerifyError` at the first rule that is broken."""
    total = sum(a.elements * a.dtype.itemsize for a in function.arrays)
    if total > SCRATCH_BYTES:
        raise VerifyError(f"{function.name}: {total} bytes of scratch a thread; at most {SCRATCH_BYTES}")
    names = [p.name for p in function.parameters] + [a.name for a in function.arrays]
    if len(set(names)) != len(names):
        raise VerifyError(f"{function.name}: a parameter is named twice")
    memories = {p.name for p in function.parameters if p.kind == "pointer"} | {a.name for a in function.arrays}
    scope = {p.name: Type(p.dtype) for p in function.parameters if p.kind != "pointer" and p.dtype is not None}
    _Scope(scope, memories, frozenset(), set(names)).block(function.body)


class _Scope:
    def __init__(
        self, known: dict[str, Type], memories: set[str], counters: frozenset[str], used: set[str],
        registers: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.known, self.memories, self.counters, self.used = dict(known), memories, counters, used
        self.registers = dict(registers or {})
        self.mutable = {n for n in known if n in self.registers}

    def block(self, body: list[Statement]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, s: Statement) -> None:
        if isinstance(s, Let):
            wanted = s.operands or s.type
            for i, arg in enumerate(s.args):
                self.use(arg, self.expected(s, i, wanted), s.line)
            self.define(s.name, s.type, s.line)
        elif isinstance(s, Declare):
            self.use(s.value, Type(s.type.dtype) if s.count else s.type, None)
            self.define(s.name, s.type, None)
            self.registers[s.name] = s.count
        elif isinstance(s, Assign):
            if s.name not in self.registers or self.known[s.name] != s.type:
                raise VerifyError(f"assignment to {s.name}, which is no variable of {s.type}")
            if (s.index is not None) != bool(self.registers[s.name]):
                raise VerifyError(f"{s.name} is assigned as what it is not")
            self.constant_index(s.index)
            self.use(s.value, s.type, None)
        elif isinstance(s, (Load, Store)):
            self.access(s)
        elif isinstance(s, If):
            self.use(s.condition, None, None)
            self.inner(self.counters).block(s.body)
        elif isinstance(s, Barrier):
            if s.scope not in ("warp", "block"):
                raise VerifyError(f"a barrier of {s.scope}: a warp's or a block's")
        else:
            for bound in (s.lo, s.hi, s.step):
                self.use(bound, None, None)
            if s.unroll and not all(isinstance(b, int) for b in (s.lo, s.hi, s.step)):
                raise VerifyError(f"the unrolled loop over {s.var} has bounds that are not constant")
            counters = self.counters | {s.var} if s.unroll else self.counters
            inside = self.inner(counters)
            inside.define(s.var, None, None)
            inside.block(s.body)

    def expected(self, s: Let, i: int, wanted: Type) -> Type | None:
        if s.op == "element":
            if i == 1:
                self.constant_index(s.args[1])
            return None
        if s.op == "select" and i == 0:
            return None  # a mask, or one bool
        if s.op in ("splat", "iota", "below", "fold", "cast", "bits"):
            return None
        return wanted

    def inner(self, counters: frozenset[str]) -> _Scope:
        return _Scope(self.known, self.memories, counters, self.used, self.registers)

    def define(self, name: str, type: Type | None, line: Line | None) -> None:
        if name in self.known:
            raise VerifyError(f"{name} is defined twice", line)
        self.used.add(name)
        self.known[name] = type if type is not None else _COUNTER

    def use(self, operand: Operand, type: Type | None, line: Line | None) -> None:
        if not isinstance(operand, str):
            return
        if operand not in self.known:
            raise VerifyError(f"{operand} is used before it is defined", line)
        found = self.known[operand]
        if type is not None and found != type:
            raise VerifyError(f"{operand} is {found}, where {type} is wanted", line)

    def constant_index(self, index: Operand | None) -> None:
        if isinstance(index, str) and index not in self.counters:
            raise VerifyError(f"a register array is indexed by {index}, which is not known when compiling")

    def access(self, s: Load | Store) -> None:
        if s.memory not in self.memories:
            raise VerifyError(f"no memory {s.memory}", s.line)
        self.use(s.index, None, s.line)
        for operand in (s.stride, s.count, s.mask):
            if operand is not None:
                self.use(operand, None, s.line)
        if s.count is not None and (s.type.lanes == 1 or s.mask is not None):
            raise VerifyError(f"an access to {s.memory} has a count and is a scalar or has a mask", s.line)
        if isinstance(s, Load):
            self.define(s.name, s.type, s.line)
        else:
            self.use(s.value, s.type, s.line)


_COUNTER = Type(int64)
