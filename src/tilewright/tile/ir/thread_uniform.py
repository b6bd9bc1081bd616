"""What differs from thread to thread: for each name of an L1 function, the bits of `tid` that its value depends on.

A value that depends on none is the same in all threads of an instance; one that depends on no bit below a warp's is the
same within each warp. So a butterfly of shuffles is known to leave one result in all. Barriers and the verifier ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from tilewright.tile.ir.thread_ir import Assign, Declare, For, Function, If, Let, Load, Operand, Statement

WARP = 32
SYMMETRIC = frozenset(("add", "mul", "max", "min", "and", "or", "xor"))
"""f(a, b) is f(b, a)."""


class Uniform:
    """The analysis of one function; variables make it go round until nothing changes."""

    def __init__(self, function: Function) -> None:
        self.all = function.threads - 1
        self.tid = {p.name for p in function.parameters if p.kind == "builtin" and p.of == "thread"}
        self.names: dict[str, int] = {p.name: self.all if p.name in self.tid else 0 for p in function.parameters}
        self.lets: dict[str, Let] = {}
        before: dict[str, int] | None = None
        while before != self.names:
            before = dict(self.names)
            self._body(function.body, 0)

    def bits(self, *operands: Operand | None) -> int:
        """The bits of `tid` that these depend on."""
        return reduce(or_, (self.names.get(o, 0) for o in operands if isinstance(o, str)), 0)

    def _body(self, body: Iterable[Statement], under: int) -> None:
        for s in body:
            if isinstance(s, Let):
                self.lets[s.name] = s
                self._join(s.name, self._of(s))
            elif isinstance(s, Declare):
                self._join(s.name, self.bits(s.value))
            elif isinstance(s, Assign):  # only some threads come here: then it differs
                self._join(s.name, self.bits(s.value) | under)
            elif isinstance(s, Load):
                self._join(s.name, self.bits(s.index, s.stride, s.count, s.mask))
            elif isinstance(s, (If, For)):
                own = self.bits(*s.decides)
                if isinstance(s, For):
                    self._join(s.var, own)
                self._body(s.body, under | own)

    def _join(self, name: str, bits: int) -> None:
        self.names[name] = self.names.get(name, 0) | bits

    def _of(self, s: Let) -> int:
        bits = self.bits(*s.args)
        if s.op in ("and", "shr") and s.args[0] in self.tid and isinstance(s.args[1], int):
            return bits & s.args[1] if s.op == "and" else bits >> s.args[1] << s.args[1]
        if s.op in SYMMETRIC and not (s.op in ("max", "min") and s.type.dtype.floating):  # the second of 0 and -0
            return bits & ~self._exchanged(*s.args)
        if s.op == "select":
            mask = self._exchanged(*s.args[1:])
            return bits & ~mask if mask and self._tests(s.args[0], mask) else bits
        return bits

    def _exchanged(self, a: Operand, b: Operand) -> int:
        """The mask where one of two values is the other one of the thread that a mask leads to."""
        for one, other in ((a, b), (b, a)):
            made = self.lets.get(str(other))
            if made is not None and made.op == "shuffle_xor" and made.args[0] == one:
                mask = made.args[1]
                return mask if isinstance(mask, int) and mask & (mask - 1) == 0 else 0
        return 0

    def _tests(self, condition: Operand, mask: int) -> bool:
        """Whether a condition is that this bit of `tid` is not set, so that it is another one in the other thread."""
        test = self.lets.get(str(condition))
        bit = self.lets.get(str(test.args[0])) if test is not None and (test.op, test.args[-1]) == ("eq", 0) else None
        return bit is not None and bit.op == "and" and bit.args[0] in self.tid and bit.args[1] == mask
