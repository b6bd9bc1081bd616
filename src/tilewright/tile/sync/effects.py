"""What the statements of an L1 function do to memory that threads share, and which two of them need a barrier between.

Two accesses need none where every element that both touch is touched by one thread: by their layouts, by their owner,
or because their addresses deal elements to threads alike. Where barriers go is in `barriers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilewright.tile.errors import TileError
from tilewright.tile.ir.thread_ir import Declare, For, Function, If, Let, Load, Operand, Statement, Store
from tilewright.tile.ir.thread_uniform import WARP, Uniform
from tilewright.tile.layout.convert import scope


@dataclass(frozen=True, eq=False)
class Access:
    """A load or store of memory that some thread writes. `path`: the loops and conditions around it, outermost first.
    `owner`: the only thread that comes here."""

    statement: Load | Store
    path: tuple[For | If, ...]
    owner: int | None

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
        self._needs: dict[tuple[int, int, bool], str] = {}
        self._collect(function.body, (), None)
        self.copies = [a for a in self.of.values() if isinstance(a.statement, Store) and a.statement.source]

    def _collect(self, body: Iterable[Statement], path: tuple[For | If, ...], owner: int | None) -> None:
        for s in body:
            if isinstance(s, (Load, Store)) and s.memory in self.memories:
                self.of[id(s)] = Access(s, path, owner)
            elif isinstance(s, (If, For)):
                mine = self._owner(s.condition) if isinstance(s, If) else None
                self._collect(s.body, (*path, s), owner if mine is None else mine)

    def _owner(self, condition: Operand) -> int | None:
        test = self.uniform.lets.get(condition) if isinstance(condition, str) else None
        one = test.args[1] if test is not None and test.op == "eq" and test.args[0] in self.uniform.tid else None
        return one if isinstance(one, int) else None

    def needs(self, a: Access, b: Access, again: bool) -> str:
        """The scope of the barrier between an access and a later one: "" for none, "warp" or "block".

        Args:
            again: a loop around both has gone on to another iteration in between.
        """
        if not (a.writes or b.writes) or self.memories[a.statement.memory] != self.memories[b.statement.memory]:
            return ""
        key = (id(a), id(b), again)
        if key not in self._needs:
            self._needs[key] = self._scope(a, b, again)
        return self._needs[key]

    def _scope(self, a: Access, b: Access, again: bool) -> str:
        most = "warp" if self.function.threads <= WARP else "block"
        one, other = a.statement, b.statement
        if a.owner is not None and a.owner == b.owner:
            return ""
        places = [(s.memory, s.index, s.stride, s.type.lanes) for s in (one, other)]
        if places[0] == places[1] and any(isinstance(s, Store) and s.own for s in (one, other)):
            return ""
        if one.layout is not None and other.layout is not None:
            try:
                found = scope(one.layout, other.layout)
            except TileError:  # of periods that differ
                return most
            return most if found == "block" else found
        return "" if one.memory == other.memory and self._residues.alike(a, b, again) else most

    def differs(self, compound: For | If, scope: str) -> bool:
        """Whether a barrier of this scope may not stand inside, since some threads might not come there."""
        bits = self.uniform.bits(*compound.decides)
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


Terms = dict[tuple[str, str], int]
"""A sum: multiples of names, or of 1 (""), each perhaps times a unit, which is another name that never changes."""


class _Residues:
    """Addresses as sums, modulo what all threads together move in one access."""

    def __init__(self, function: Function, uniform: Uniform) -> None:
        self.threads, self.uniform = function.threads, uniform
        self.units = {p.name for p in function.parameters if p.kind == "stride"}
        self.loops = {s.var: s for s in function.statements() if isinstance(s, For)}
        within = (s for loop in self.loops.values() for s in replace(function, body=loop.body).statements())
        moving = {*self.loops, *(s.name for s in within if isinstance(s, (Let, Load)))}
        varying = {s.name for s in function.statements() if isinstance(s, Declare)}
        varying |= {name for name, bits in uniform.names.items() if bits} - uniform.tid
        self.varying = {False: varying, True: varying | moving}
        """Names that differ from thread to thread, and those too that do in another iteration of a loop."""

    def alike(self, a: Access, b: Access, again: bool) -> bool:
        """Whether an element that both touch is touched by one thread: thread t has those at base + t * step, the
        bases differ by multiples of what all threads have, and no thread has others'. Loops that count rows may move
        the base, if no row reaches into the next. See `Effects.needs`."""
        one, other = a.statement, b.statement
        lanes, stride = one.type.lanes, one.stride
        if one.scattered or other.scattered or other.type.lanes != lanes or (lanes > 1 and other.stride != stride):
            return False
        terms = [self._terms(s.index, 1) for s in (one, other)]
        own = {key: times for key, times in terms[0].items() if key[1] in self.uniform.tid}
        if len(own) != 1:
            return False
        ((unit, _), step) = next(iter(own.items()))
        dense = step == lanes * stride if isinstance(stride, int) and not unit else (step, unit) == (lanes, stride)
        if step < 1 or not (dense or lanes == 1):
            return False
        common = {c.var for c in a.path if isinstance(c, For) and any(c is d for d in b.path)}
        dealt = _Dealt(unit, self.threads * step, set() if again else common, self.varying[again])
        rows = [{k: n for k, n in t.items() if self._counts_rows(k, n, dealt)} for t in terms]
        inner = [{k: n for k, n in t.items() if k not in r} for t, r in zip(terms, rows, strict=True)]
        left = [self._modulo(t, dealt) for t in inner]
        if left[0] != left[1] or any(name in dealt.varying for _, name in left[0]):
            return False
        digits = [self._digits(x, r, t, dealt) for x, r, t in zip((a, b), rows, inner, strict=True)]
        return not any(rows) or (digits[0] is not None and digits[0] == digits[1])

    def _counts_rows(self, key: tuple[str, str], times: int, dealt: _Dealt) -> bool:
        loop = self.loops.get(key[1])
        if loop is None or key[1] in dealt.steady:
            return False
        return bool(key[0] != dealt.unit or loop.any_step or _plain(loop.step) * times % dealt.period)

    def _digits(self, access: Access, rows: Terms, inner: Terms, dealt: _Dealt) -> tuple[list[int], Terms] | None:
        """What each row counter is worth, if what it counts is too small to reach the next; and what never changes."""
        other = {"", *self.uniform.tid, *self.loops, *dealt.varying}
        fixed = {key: times for key, times in inner.items() if key[1] not in other}
        reach = self._reach(access, {k: n for k, n in inner.items() if k not in fixed})
        worth = []
        for (unit, name), times in sorted(rows.items(), key=lambda row: row[1]):
            loop = self.loops[name]
            lo, hi, step = _plain(loop.lo), _plain(loop.hi), _plain(loop.step)
            if unit or lo != 0 or times * step < max(reach, 1) or loop.any_step:
                return None
            reach += (hi - 1) // step * step * times if hi > 0 else math.inf
            worth.append(times * step)
        return worth, fixed

    def _reach(self, access: Access, local: Terms) -> float:
        """How many elements from its base on an access may touch at most; what is added to the base is `local`.
        Infinitely many where that may be negative."""
        s = access.statement
        most: float = 0
        for (unit, name), times in local.items():
            loop = self.loops.get(name)
            if not name or name in self.uniform.tid:
                most += times * (self.threads - 1 if name else 1)
            elif loop is not None and _plain(loop.lo) >= 0:
                most += times * (loop.hi - 1 if isinstance(loop.hi, int) else math.inf)
            else:
                return math.inf
            if unit or times < 0:
                return math.inf
        for compound in access.path:
            test = self.uniform.lets.get(str(compound.condition)) if isinstance(compound, If) else None
            if test is not None and test.op == "lt" and self._terms(test.args[0], 1) == local:
                size, grain = test.args[1], math.gcd(*local.values())
                if isinstance(size, int) and size > 0:
                    most = (size - 1) // grain * grain
        return most + (s.type.lanes - 1) * s.stride + 1 if isinstance(s.stride, int) and s.stride > 0 else math.inf

    def _terms(self, operand: Operand, times: int, unit: str = "") -> Terms:
        """`times` an integer."""
        if not isinstance(operand, str):
            return {(unit, ""): int(operand) * times} if operand else {}
        made = self.uniform.lets.get(operand)
        if made is not None and made.op in ("add", "sub"):
            minus = times if made.op == "add" else -times
            return _added(self._terms(made.args[0], times, unit), self._terms(made.args[1], minus, unit))
        if made is not None and made.op == "mul":
            for one, by in (made.args, made.args[::-1]):
                if isinstance(by, int):
                    return self._terms(one, times * by, unit)
                if by in self.units and not unit:
                    return self._terms(one, times, str(by))
        return {(unit, operand): times}

    def _modulo(self, terms: Terms, dealt: _Dealt) -> Terms:
        """What is left of those with this unit: not what a loop's steps are multiples of, nor where low bits are 0."""
        found: Terms = {}
        waiting, unit, period = list(terms.items()), dealt.unit, dealt.period
        while waiting:
            (mine, name), times = waiting.pop()
            loop, made = self.loops.get(name), self.uniform.lets.get(name)
            if mine != unit or name in dealt.steady:
                found = _added(found, {(mine, name): times})
                continue
            if loop is not None and isinstance(loop.step, int) and not loop.step * times % period and not loop.any_step:
                waiting += self._terms(loop.lo, times, unit).items()
                continue
            last = made.args[1] if made is not None and made.op == "and" else 0
            if not (isinstance(last, int) and last and not (last & -last) * times % period):
                found = _added(found, {(mine, name): times})
        return {key: rest for key, n in found.items() if (rest := n % period if key[0] == unit else n)}


@dataclass(frozen=True)
class _Dealt:
    """How an access deals memory to threads: in periods of a unit. `steady`: loop counters that are what they were;
    `varying`: names that may be something else."""

    unit: str
    period: int
    steady: set[str]
    varying: set[str]


def _plain(operand: Operand) -> int:
    """A constant; of a name -1, as if it were one that fits nowhere."""
    return -1 if isinstance(operand, str) else int(operand)


def _added(a: Terms, b: Terms) -> Terms:
    found = {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    return {key: times for key, times in found.items() if times}


def apart(function: Function) -> Function:
    """A copy in which each statement is one of its own, with bodies that may be changed."""

    def copied(body: list[Statement]) -> list[Statement]:
        return [replace(s, body=copied(s.body)) if isinstance(s, (For, If)) else replace(s) for s in body]

    return replace(function, body=copied(function.body))
