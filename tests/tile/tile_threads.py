"""Functions of the thread IR, written by hand for the threads of one instance, and how tests run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.tile.dtypes import boolean, float32, int64
from tilewright.tile.errors import Line
from tilewright.tile.ir.thread_ir import Array, Barrier, For, Function, If, Parameter, Statement, Type
from tilewright.tile.oracle import emulator
from tilewright.tile.sync.effects import apart

F, N, B = Type(float32), Type(int64), Type(boolean)
TID = Parameter("tid", "builtin", "thread", 0, int64)
SHARED = (Array("s", float32, 64, shared=True),)


def at(number: int) -> Line:
    return Line("k.py", number)


T = 64


def function(body: list[Statement], threads: int = T, arrays: tuple[Array, ...] = SHARED) -> Function:
    views = [Parameter(f"p_{v}", "pointer", v, 0, float32) for v in "xy"]
    trips = Parameter("a_n", "scalar", "n", 0, N.dtype)
    return Function("k", 1, threads, 1, [*views, trips, TID], list(arrays), body, frozenset("x"))


def go(made: Function, arena: Any = None, n: int = 3) -> np.ndarray:
    y = np.zeros(4 * T, np.float32)
    emulator.run(made, {"x": np.arange(4 * T, dtype=np.float32), "y": y, "n": n}, (1,), arena=arena)
    return y


def barriers(made: Function) -> list[Barrier]:
    return [s for s in made.statements() if isinstance(s, Barrier)]


def bodies(body: list[Statement]) -> Iterator[list[Statement]]:
    yield body
    for s in body:
        if isinstance(s, (For, If)):
            yield from bodies(s.body)


def without_each(made: Function) -> Iterator[Function]:
    for number in range(len(barriers(made))):
        copy = apart(made)
        found = [(body, i) for body in bodies(copy.body) for i, s in enumerate(body) if isinstance(s, Barrier)]
        body, i = found[number]
        del body[i]
        yield copy
