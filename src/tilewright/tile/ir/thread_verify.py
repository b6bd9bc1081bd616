"""The rules that every L1 function keeps. A broken one is the compiler's mistake, so each lowering is checked."""

from __future__ import annotations

from tilewright.tile.dtypes import int64
from tilewright.tile.errors import Line, VerifyError
from tilewright.tile.ir import thread_ir as ir
from tilewright.tile.ir.thread_uniform import WARP, Uniform

SCRATCH_BYTES = 8 << 20
"""The most scratch that a thread may have."""


def verify(function: ir.Function) -> None:
    """Raises `VerifyError` at the first rule that is broken."""
    total = sum(a.elements * a.dtype.itemsize for a in function.arrays if not a.shared)
    if total > SCRATCH_BYTES:
        raise VerifyError(f"{function.name}: {total} bytes of scratch a thread; at most {SCRATCH_BYTES}")
    names = [p.name for p in function.parameters] + [a.name for a in function.arrays]
    if len(set(names)) != len(names):
        raise VerifyError(f"{function.name}: a parameter is named twice")
    memories = {p.name for p in function.parameters if p.kind == "pointer"} | {a.name for a in function.arrays}
    scope = {p.name: ir.Type(p.dtype) for p in function.parameters if p.kind != "pointer"}
    _Scope(scope, memories, frozenset(), {}).block(function.body)
    if function.threads > 1:
        _threads(function)


def _threads(function: ir.Function) -> None:
    """The rules of functions that several threads run."""
    if function.threads & (function.threads - 1) or (function.instances > 1 and function.threads != WARP):
        raise VerifyError(f"{function.name}: {function.threads} threads an instance, {function.instances} a block")
    _together(function, function.body, Uniform(function), 0)
    for s in function.statements():
        if isinstance(s, (ir.Load, ir.Store)) and s.layout is not None:
            reg, threads = 1 << len(s.layout.reg), 1 << len(s.layout.lane) + len(s.layout.warp)
            if (reg, threads) != (s.type.lanes, function.threads):
                raise VerifyError(f"an access to {s.memory} by {function.threads} threads of {s.type.lanes} lanes has "
                                  f"a layout of {threads} of {reg}", s.line)  # fmt: skip


def _together(function: ir.Function, body: list[ir.Statement], uniform: Uniform, under: int) -> None:
    """A barrier or a shuffle is reached by all threads that take part in it, or by none. `under`: what bits of the
    thread's number decide whether one comes here."""
    for s in body:
        if isinstance(s, (ir.If, ir.For)):
            _together(function, s.body, uniform, under | uniform.bits(*s.decides))
        elif isinstance(s, ir.Barrier) or (isinstance(s, ir.Let) and s.op == "shuffle_xor"):
            name = f"a barrier of the {s.scope}" if isinstance(s, ir.Barrier) else f"the shuffle {s.name}"
            block = isinstance(s, ir.Barrier) and s.scope == "block"
            if under if block else under & WARP - 1:
                raise VerifyError(f"{function.name}: {name} is under a condition that differs from thread to thread")
            if block and function.instances > 1:
                raise VerifyError(f"{function.name}: a barrier of the block, which has {function.instances} instances")
            if isinstance(s, ir.Let) and not (isinstance(s.args[1], int) and 0 < s.args[1] < WARP):
                raise VerifyError(f"{function.name}: {name} goes by {s.args[1]}, which leads out of the warp", s.line)


class _Scope:
    """What a body may use: names with their types (and what its loops and outer bodies define), memories, `counters` of
    unrolled loops, and `registers`, the variables with how many registers they are, 0 for a plain one."""

    def __init__(
        self, known: dict[str, ir.Type], memories: set[str], counters: frozenset[str], registers: dict[str, int]
    ) -> None:
        self.known, self.memories, self.counters, self.registers = dict(known), memories, counters, dict(registers)

    def block(self, body: list[ir.Statement]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, s: ir.Statement) -> None:
        if isinstance(s, ir.Let):
            wanted = s.operands or s.type
            for i, arg in enumerate(s.args):
                self.use(arg, self.expected(s, i, wanted), s.line)
            self.define(s.name, s.type, s.line)
        elif isinstance(s, ir.Declare):
            self.use(s.value, ir.Type(s.type.dtype) if s.count else s.type)
            self.define(s.name, s.type)
            self.registers[s.name] = s.count
        elif isinstance(s, ir.Assign):
            if s.name not in self.registers or self.known[s.name] != s.type:
                raise VerifyError(f"assignment to {s.name}, which is no variable of {s.type}")
            if (s.index is not None) != bool(self.registers[s.name]):
                raise VerifyError(f"{s.name} is assigned as what it is not")
            self.constant_index(s.index)
            self.use(s.value, s.type)
        elif isinstance(s, (ir.Load, ir.Store)):
            self.access(s)
        elif isinstance(s, ir.If):
            self.use(s.condition)
            self.inner(self.counters).block(s.body)
        elif isinstance(s, ir.Print):
            self.use(s.value, s.type, s.line)
            for operand in (*s.place, s.count):
                self.use(operand, None, s.line)
        elif isinstance(s, ir.Barrier):
            if s.scope not in ("warp", "block"):
                raise VerifyError(f"a barrier of {s.scope}: a warp's or a block's")
        elif isinstance(s, ir.For):
            for bound in s.decides:
                self.use(bound)
            if s.unroll and not all(isinstance(b, int) for b in s.decides):
                raise VerifyError(f"the unrolled loop over {s.var} has bounds that are not constant")
            inside = self.inner(self.counters | {s.var} if s.unroll else self.counters)
            inside.define(s.var, ir.Type(int64))
            inside.block(s.body)

    def expected(self, s: ir.Let, i: int, wanted: ir.Type) -> ir.Type | None:
        if s.op == "element":
            if i == 1:
                self.constant_index(s.args[1])
            return None
        if (s.op, i) in (("select", 0), ("shuffle_xor", 1)):  # a mask, or one bool
            return None
        return None if s.op in ("splat", "iota", "below", "fold", "cast", "bits") else wanted

    def inner(self, counters: frozenset[str]) -> _Scope:
        return _Scope(self.known, self.memories, counters, self.registers)

    def define(self, name: str, type: ir.Type, line: Line | None = None) -> None:
        if name in self.known:
            raise VerifyError(f"{name} is defined twice", line)
        self.known[name] = type

    def use(self, operand: ir.Operand | None, type: ir.Type | None = None, line: Line | None = None) -> None:
        if not isinstance(operand, str):
            return
        if operand not in self.known:
            raise VerifyError(f"{operand} is used before it is defined", line)
        if type is not None and self.known[operand] != type:
            raise VerifyError(f"{operand} is {self.known[operand]}, where {type} is wanted", line)

    def constant_index(self, index: ir.Operand | None) -> None:
        if isinstance(index, str) and index not in self.counters:
            raise VerifyError(f"a register array is indexed by {index}, which is not known when compiling")

    def access(self, s: ir.Load | ir.Store) -> None:
        if s.memory not in self.memories:
            raise VerifyError(f"no memory {s.memory}", s.line)
        for operand in (s.index, s.stride, s.count, s.mask):
            self.use(operand, None, s.line)
        if s.count is not None and (s.type.lanes == 1 or s.mask is not None):
            raise VerifyError(f"an access to {s.memory} has a count and is a scalar or has a mask", s.line)
        size = s.type.lanes * s.type.dtype.itemsize
        if s.align and (size % s.align or s.align % s.type.dtype.itemsize):
            raise VerifyError(f"an access to {s.memory} of {size} bytes is aligned to {s.align}", s.line)
        if isinstance(s, ir.Load):
            self.define(s.name, s.type, s.line)
        elif s.source and (s.source not in self.memories or s.align < 4 or s.stride != 1 or s.mask is not None):
            raise VerifyError(f"a copy from {s.source} to {s.memory} that no instruction does", s.line)
        else:
            self.use(s.value, None if s.source else s.type, s.line)
