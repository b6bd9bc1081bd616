"""Barriers around every store that other threads may read, and shared arrays one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.tile.ir.thread_ir import Barrier, For, Function, If, Load, Statement, Store


def placed(function: Function) -> Function:
    """The function with a barrier before and after each store to memory that is also read."""
    read = {s.memory for s in function.statements() if isinstance(s, Load)}
    wrote = {s.memory for s in function.statements() if isinstance(s, Store)}
    scope = "warp" if function.threads == 32 else "block"

    def body(statements: list[Statement]) -> list[Statement]:
        out: list[Statement] = []
        for s in statements:
            if isinstance(s, For) or (isinstance(s, If) and not _divides(s)):
                out.append(replace(s, body=body(s.body)))
                continue
            inside = list(_within(s))
            if any(isinstance(i, (Store, Load)) and i.memory in read & wrote for i in inside):
                out += [Barrier(scope, "before"), s, Barrier(scope, "after")]
            else:
                out.append(s)
        return out

    return replace(function, body=body(function.body))


def _within(s: Statement) -> Iterator[Statement]:
    yield s
    if isinstance(s, (For, If)):
        for i in s.body:
            yield from _within(i)


def _divides(s: If) -> bool:
    """Whether it may hold for some threads only: no thread waits for another inside."""
    return not any(isinstance(i, For) or getattr(i, "op", "") == "shuffle_xor" for i in _within(s))


def offsets(function: Function) -> tuple[dict[str, int], int]:
    found, total = {}, 0
    for a in function.arrays:
        if a.shared:
            found[a.name] = total
            total += -(-a.elements * a.dtype.itemsize // 16) * 16
    return found, total
