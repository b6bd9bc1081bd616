"""The rules that every L1 function keeps. A broken one is the compiler's mistake, so each lowering is checked."""

from __future__ import annotations

from collections import ChainMap

from tilewright.tile.dtypes import int64
from tilewright.tile.errors import VerifyError
from tilewright.tile.ir import thread_ir as ir
from tilewright.tile.ir.thread_uniform import WARP, Uniform

SCRATCH_BYTES = 8 << 20
"""The most scratch that a thread may have."""
Known = ir.Parameter | ir.Let | ir.Load | ir.Declare | ir.For
"""What gives a name its meaning."""
OF_ANY_TYPE = frozenset(("splat", "iota", "below", "fold", "cast", "bits", "element"))
"""Operations whose operands are not of the result's type."""


def verify(function: ir.Function) -> None:
    """Raises `VerifyError` at the first rule that is broken."""
    total = sum(a.elements * a.dtype.itemsize for a in function.arrays if not a.shared)
    if total > SCRATCH_BYTES:
        raise VerifyError(f"{function.name}: {total} bytes of scratch a thread; at most {SCRATCH_BYTES}")
    names = [p.name for p in function.parameters] + [a.name for a in function.arrays]
    if len(set(names)) != len(names):
        raise VerifyError(f"{function.name}: a parameter is named twice")
    memories = {p.name for p in function.parameters if p.kind == "pointer"} | {a.name for a in function.arrays}
    scope = ChainMap[str, Known]({p.name: p for p in function.parameters if p.kind != "pointer"})
    _body(function.body, scope, memories)
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


def _uses(s: ir.Statement) -> list[tuple[ir.Operand | None, ir.Type | None]]:
    """What a statement takes, and of which type each must be; None: of any."""
    if isinstance(s, ir.Let):
        wanted = None if s.op in OF_ANY_TYPE else s.operands or s.type
        other = {"select": 0, "shuffle_xor": 1}.get(s.op)  # a mask or one bool, and a number
        return [(a, None if i == other else wanted) for i, a in enumerate(s.args)]
    if isinstance(s, (ir.Load, ir.Store)):
        value = [(s.value, None if s.source else s.type)] if isinstance(s, ir.Store) else []
        return [*((o, None) for o in (s.index, s.stride, s.count, s.mask)), *value]
    if isinstance(s, ir.Print):
        return [(s.value, s.type), *((o, None) for o in (*s.place, s.count))]
    if isinstance(s, (ir.If, ir.For)):
        return [(o, None) for o in s.decides]
    if isinstance(s, (ir.Declare, ir.Assign)):
        return [(s.value, ir.Type(s.type.dtype) if isinstance(s, ir.Declare) and s.count else s.type)]
    return []


def _type(known: Known) -> ir.Type:
    if isinstance(known, ir.For):
        return ir.Type(int64)
    return ir.Type(known.dtype) if isinstance(known, ir.Parameter) else known.type


def _body(body: list[ir.Statement], known: ChainMap[str, Known], memories: set[str]) -> None:
    """The rules of a body that may use these names and memories."""
    for s in body:
        _rules(s, known, memories)
        line = getattr(s, "line", None)
        for operand, wanted in _uses(s):
            if not isinstance(operand, str):
                continue
            if operand not in known:
                raise VerifyError(f"{operand} is used before it is defined", line)
            if wanted is not None and wanted != (mine := _type(known[operand])):
                raise VerifyError(f"{operand} is {mine}, where {wanted} is wanted", line)
        scope = known.new_child() if isinstance(s, (ir.If, ir.For)) else known
        if isinstance(s, (ir.Let, ir.Load, ir.Declare, ir.For)):
            name = s.var if isinstance(s, ir.For) else s.name
            if name in known:
                raise VerifyError(f"{name} is defined twice", line)
            scope[name] = s
        if isinstance(s, (ir.If, ir.For)):
            _body(s.body, scope, memories)


def _rules(s: ir.Statement, known: ChainMap[str, Known], memories: set[str]) -> None:
    """Those of one statement, beside what it uses and defines."""
    if isinstance(s, ir.Assign):
        made = known.get(s.name)
        if not isinstance(made, ir.Declare) or made.type != s.type:
            raise VerifyError(f"assignment to {s.name}, which is no variable of {s.type}")
        if (s.index is not None) != bool(made.count):
            raise VerifyError(f"{s.name} is assigned as what it is not")
    elif isinstance(s, (ir.Load, ir.Store)):
        size, item = s.type.lanes * s.type.dtype.itemsize, s.type.dtype.itemsize
        if s.memory not in memories:
            raise VerifyError(f"no memory {s.memory}", s.line)
        if s.count is not None and (s.type.lanes == 1 or s.mask is not None):
            raise VerifyError(f"an access to {s.memory} has a count and is a scalar or has a mask", s.line)
        if s.align and (size % s.align or s.align % item):
            raise VerifyError(f"an access to {s.memory} of {size} bytes is aligned to {s.align}", s.line)
        plain = s.stride == 1 and s.mask is None and not s.scattered
        if isinstance(s, ir.Store) and s.source and (s.source not in memories or s.align < 4 or not plain):
            raise VerifyError(f"a copy from {s.source} to {s.memory} that no instruction does", s.line)
    elif isinstance(s, ir.Barrier) and s.scope not in ("warp", "block"):
        raise VerifyError(f"a barrier of {s.scope}: a warp's or a block's")
    elif isinstance(s, ir.For) and s.unroll and not all(isinstance(b, int) for b in s.decides):
        raise VerifyError(f"the unrolled loop over {s.var} has bounds that are not constant")
    register = s.index if isinstance(s, ir.Assign) else s.args[1] if isinstance(s, ir.Let) and s.op == "element" else 0
    counter = known.get(register) if isinstance(register, str) else None
    if isinstance(register, str) and not (isinstance(counter, ir.For) and counter.unroll):
        raise VerifyError(f"a register array is indexed by {register}, which is not known when compiling")
