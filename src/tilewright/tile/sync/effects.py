"""What the statements of an L1 function do to memory that threads share, and which two of them need a barrier between.

Two accesses need none where every element that both touch is touched by one thread: by their layouts, by their owner,
or because their addresses deal elements to threads alike. Where barriers go is in `barriers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilewright.tile.errors import TileError
from tilewright.tile.ir.thread_ir import For, Function, If, Let, Load, Operand, Statement, Store
from tilewright.tile.ir.thread_uniform import WARP, Uniform
from tilewright.tile.layout.convert import Conversion, classify


@dataclass(frozen=True, eq=False)
class Access:
    """A load or store of memory that some thread writes. `path`: the loops and conditions around it, outermost first.
    `owner`: the only thread that comes here."""

    statement: Load | Store
    path: tuple[For | If, ...]
    owner: Operand | None

    @property
    def writes(self) -> bool:
        return isinstance(self.statement, Store)

    def __str__(self) -> str:
        at = f" at {self.statement.line}" if self.statement.line is not None else ""
        return ("store" if self.writes else "load") + at


class Effects:
    """The accesses of a function by statement, and what they need of each other."""

    def __init__(self, function: Function) -> None:
        self.function, self.uniform = function, Uniform(function)
        self.of: dict[int, Access] = {}
        self.memories = _memories(function)
        self._residues = _Residues(function, self.uniform)
        self._needs: dict[tuple[int, int], str] = {}
        self._collect(function.body, (), None)

    def _collect(self, body: Iterable[Statement], path: tuple[For | If, ...], owner: Operand | None) -> None:
        for s in body:
            if isinstance(s, (Load, Store)) and s.memory in self.memories:
                self.of[id(s)] = Access(s, path, owner)
            elif isinstance(s, (If, For)):
                mine = self._owner(s.condition) if isinstance(s, If) else None
                self._collect(s.body, (*path, s), owner if mine is None else mine)

    def _owner(self, condition: Operand) -> Operand | None:
        test = self.uniform.lets.get(condition) if isinstance(condition, str) else None
        is_one = test is not None and test.op == "eq" and test.args[0] in self.uniform.tid
        return test.args[1] if test is not None and is_one and self.uniform.bits(test.args[1]) == 0 else None

    def needs(self, a: Access, b: Access) -> str:
        """The scope of the barrier between an access and a later one: "" for none, "warp" or "block"."""
        if not (a.writes or b.writes) or self.memories[a.statement.memory] != self.memories[b.statement.memory]:
            return ""
        key = (id(a), id(b))
        if key not in self._needs:
            self._needs[key] = self._scope(a, b)
        return self._needs[key]

    def _scope(self, a: Access, b: Access) -> str:
        most = "warp" if self.function.threads <= WARP else "block"
        if a.owner is not None and a.owner == b.owner:
            return ""
        one, other = a.statement, b.statement
        if one.layout is not None and other.layout is not None:
            try:
                found = classify(one.layout, other.layout)
            except TileError:  # of periods that differ
                return most
            return "" if found <= Conversion.SELECT else "warp" if found == Conversion.SHUFFLE else most
        return "" if one.memory == other.memory and self._residues.alike(one, other) else most

    def differs(self, compound: For | If, scope: str) -> bool:
        """Whether a barrier of this scope may not stand inside, since some threads might not come there."""
        bounds = (compound.condition,) if isinstance(compound, If) else (compound.lo, compound.hi, compound.step)
        bits = self.uniform.bits(*bounds)
        return bool(bits if scope == "block" else bits & WARP - 1)


def _memories(function: Function) -> dict[str, int]:
    """The memory that threads share and that is written, by name; what may be the same memory has one number."""
    views = {p.name: p.of for p in function.parameters if p.kind == "pointer"}
    numbers = {name: i for i, name in enumerate([*views, *(a.name for a in function.arrays if a.shared)])}
    for pair in function.inplace:
        same = [name for name, view in views.items() if view in pair]
        old = {numbers[name] for name in same}
        numbers |= {name: min(old) for name, number in numbers.items() if number in old}
    written = {numbers[s.memory] for s in function.statements() if isinstance(s, Store) and s.memory in numbers}
    return {name: number for name, number in numbers.items() if number in written}


Residue = tuple[int, dict[str, int]]
"""A constant and multiples of names."""


class _Residues:
    """Addresses as sums, modulo what all threads together move in one access."""

    def __init__(self, function: Function, uniform: Uniform) -> None:
        self.threads, self.uniform = function.threads, uniform
        self.loops: dict[str, For] = {}
        self.moving: set[str] = set()
        """Names that may have another value when they are met again."""
        self._scan(function.body, within=False)

    def _scan(self, body: Iterable[Statement], *, within: bool) -> None:
        for s in body:
            name = s.var if isinstance(s, For) else getattr(s, "name", None)
            if name is not None and (within or isinstance(s, For) or not isinstance(s, (Let, Load))):
                self.moving.add(name)
            if isinstance(s, For):
                self.loops[s.var] = s
            if isinstance(s, (For, If)):
                self._scan(s.body, within=within or isinstance(s, For))

    def alike(self, a: Load | Store, b: Load | Store) -> bool:
        """Whether an element that both touch is touched by one thread, whenever each of them is done."""
        if a.scattered or b.scattered or a.type.lanes != b.type.lanes or a.stride != b.stride:
            return False
        if not isinstance(a.stride, int) or a.stride < 1:
            return False
        step = a.type.lanes * (a.stride if a.type.lanes > 1 else 1)
        period = self.threads * step
        found = [self._sum(s.index, 1, period) for s in (a, b)]
        for _, names in found:
            if sum(names.pop(t, 0) for t in self.uniform.tid) != step % period:
                return False
        return found[0] == found[1] and not any(n in self.moving or self.uniform.bits(n) for n in found[0][1])

    def _sum(self, operand: Operand, times: int, period: int) -> Residue:
        """`times` an integer, modulo `period`."""
        if times % period == 0:
            return 0, {}
        if not isinstance(operand, str):
            return int(operand) * times % period, {}
        made, loop = self.uniform.lets.get(operand), self.loops.get(operand)
        if loop is not None and isinstance(loop.step, int) and loop.step * times % period == 0 and not loop.any_step:
            return self._sum(loop.lo, times, period)
        if made is not None and made.op in ("add", "sub"):
            first = self._sum(made.args[0], times, period)
            second = self._sum(made.args[1], times if made.op == "add" else -times, period)
            names = {n: (first[1].get(n, 0) + second[1].get(n, 0)) % period for n in {**first[1], **second[1]}}
            return (first[0] + second[0]) % period, {n: c for n, c in names.items() if c}
        if made is not None and made.op in ("mul", "shl", "and"):
            for one, by in (made.args, made.args[::-1]):
                if isinstance(by, int) and made.op == "mul":
                    return self._sum(one, times * by, period)
            last = made.args[1]
            if isinstance(last, int) and made.op == "shl" and last >= 0:
                return self._sum(made.args[0], times << last, period)
            if isinstance(last, int) and made.op == "and" and (last & -last) * times % period == 0:
                return 0, {}  # the low bits are cleared
        return 0, {operand: times % period}


def apart(function: Function) -> Function:
    """A copy in which each statement is one of its own, with bodies that may be changed."""

    def copied(body: list[Statement]) -> list[Statement]:
        return [replace(s, body=copied(s.body)) if isinstance(s, (For, If)) else replace(s) for s in body]

    return replace(function, body=copied(function.body))
