"""Placing barriers: forward dataflow of the accesses that no barrier has yet parted from what comes.

A barrier stands as late as it can: right before an access that needs it, but before a loop that the other access is
not in, and before whatever not all threads enter. The innermost loops come first, since their barriers serve what is
around them too; in the end those that others make needless go.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.tile.errors import LowerError
from tilewright.tile.ir.thread_ir import Barrier, For, Function, If, Statement, Wait
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.sync.effects import Access, Effects, apart

Pending = dict[tuple[Access, frozenset[str]], bool]
"""Accesses since the last barrier of the block, each with the loops around it, by counter, that have gone on since; and
whether a barrier of the warp came after."""


@dataclass(frozen=True)
class Conflict:
    """Two accesses with no barrier of this scope between them."""

    before: Access
    after: Access
    scope: str


def insert(function: Function) -> Function:
    """The function with the barriers that it needs, and no other.

    Raises:
        LowerError: one is needed where not all threads come.
    """
    made = apart(function)
    if made.threads == 1:
        return made
    effects = Effects(made)
    order = {id(s): i for i, s in enumerate(made.statements())}
    while found := conflicts(made, effects):
        places = [(*_place(made, effects, c), c) for c in found]
        _, body, at, conflict = min(places, key=lambda p: (-p[0], order[id(p[1][p[2]])]))
        before = body[at - 1] if at else None
        access, other = conflict.after, conflict.before
        if isinstance(before, Barrier) and conflict.scope in (before.scope, "warp"):
            raise LowerError(f"{access.statement.memory}: a barrier is needed between a {other} and a {access}, where "
                             "not all threads come", access.statement.line)  # fmt: skip
        why = f"{access.statement.memory}: {other}, then {access}"
        body.insert(at, Barrier(conflict.scope, why))
    _thin(made, effects, made.body)
    verify(made)
    return made


def conflicts(function: Function, effects: Effects | None = None) -> list[Conflict]:
    """The pairs of accesses that lack a barrier."""
    flow = _Flow(effects or Effects(function))
    flow.body(function.body, {})
    return list(flow.found.values())


class _Flow:
    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.found: dict[tuple[Access, Access], Conflict] = {}

    def body(self, body: list[Statement], pending: Pending) -> Pending:
        """What is pending after a body that begins with `pending`."""
        for s in body:
            if isinstance(s, Barrier):
                pending = {} if s.scope == "block" else dict.fromkeys(pending, True)
            elif isinstance(s, If):
                pending = _joined(pending, self.body(s.body, pending))
            elif isinstance(s, For):
                pending = self.loop(s, pending)
            elif isinstance(s, Wait):  # what was copied is written now
                pending = {**pending, **{(a, frozenset[str]()): False for a in self.effects.copies}}
            elif (access := self.effects.of.get(id(s))) is not None:
                for (other, gone_on), parted in pending.items():
                    scope = self.effects.needs(other, access, bool(gone_on))
                    if scope == "block" or (scope == "warp" and not parted):
                        self.found[other, access] = Conflict(other, access, scope)
                pending = {**pending, (access, frozenset()): False}
        return pending

    def loop(self, s: For, pending: Pending) -> Pending:
        """An iteration meets the one before it: round until nothing is added."""
        head = pending
        while True:
            after = self.body(s.body, head)
            around = {(a, on | {s.var} if any(c is s for c in a.path) else on): p for (a, on), p in after.items()}
            more = _joined(head, around)
            if more == head:
                break
            head = more
        surely = isinstance(s.lo, int) and isinstance(s.hi, int) and s.lo < s.hi and s.step != 0 and not s.any_step
        left: Pending = {}
        for (access, loops), parted in (after if surely else head).items():
            left = _joined(left, {(access, loops - {s.var}): parted})
        return left


def _joined(a: Pending, b: Pending) -> Pending:
    return {k: a.get(k, True) and b.get(k, True) for k in {**a, **b}}


def _place(function: Function, effects: Effects, conflict: Conflict) -> tuple[int, list[Statement], int]:
    """(loops around it, body, index) of where a barrier for this conflict stands."""
    path, scope = conflict.after.path, conflict.scope
    depth = 0
    for mine, other in zip(path, conflict.before.path, strict=False):
        if mine is not other:
            break
        depth += 1
    while depth < len(path) and isinstance(path[depth], If):
        depth += 1
    closed = next((i for i, c in enumerate(path) if effects.differs(c, scope)), len(path))
    depth = min(depth, closed)
    body = path[depth - 1].body if depth else function.body
    statement = path[depth] if depth < len(path) else conflict.after.statement
    return sum(isinstance(c, For) for c in path[:depth]), body, _index(body, statement)


def _index(body: list[Statement], statement: Statement) -> int:
    return next(i for i, s in enumerate(body) if s is statement)


def _thin(function: Function, effects: Effects, body: list[Statement]) -> None:
    """Take out the barriers without which nothing is amiss."""
    for s in list(body):
        if isinstance(s, (For, If)):
            _thin(function, effects, s.body)
        elif isinstance(s, Barrier):
            at = _index(body, s)
            del body[at]
            if conflicts(function, effects):
                body.insert(at, s)
