"""Tiles that two loops need: each has the value of its place in the program, whatever the loops' shapes and orders."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
from tile_runs import QUICKEST, compiled_run, copy_of, order

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.runtime import cpu, cuda, target
from tilewright.tile.schedule import Schedule

R, C = 4, 300
SCHEDULES = tuple(Schedule(*s) for s in ((32, 1, 4), (128, 1, 1), (64, 1, 2), (32, 4, 4)))
VIEW = ViewType(tile.float32, (None, None), align=16)
CUBE = ViewType(tile.float32, (None, None, None), align=16)
COUNTS = ViewType(tile.int64, (C,), align=16)


def agree(function: Callable[..., None]) -> None:
    """Threads, a CPU and the interpreter, in all that is written."""
    views = {"x": VIEW, "y": VIEW, "z": VIEW, "i": COUNTS, "u": CUBE, "v": CUBE}
    program = tile.kernel(function).trace({n: views[n] for n in list(signature(function).parameters)[1:]})
    numbers = np.random.default_rng(0)
    shapes = {1: (C,), 2: (R, C), 3: (6, 12, 32)}
    given: dict[str, Any] = {
        n: numbers.integers(0, C, shapes[v.rank]).astype(v.dtype.storage) for n, v in program.views.items()
    }
    ways: list[tuple[Order, Callable[[dict[str, Any]], None]]] = []
    for schedule in SCHEDULES:
        made, arena = cuda.lowered(program, schedule)
        lanes = Order(schedule.vector, 1, 16, schedule.threads)
        ways.append((lanes, lambda a, f=made, o=arena.offsets: emulator.run(f, a, (1,), arena=o)))
    if not target.missing():
        types = {n: v.dtype for n, v in program.views.items()}
        (compiled,) = cpu.compile_all([program], flags=QUICKEST)
        ways.append((order(), lambda a: compiled_run(compiled, a, types, (1, 1, 1))))
    for lanes, way in ways:
        wanted, mine = ({n: copy_of(a) for n, a in given.items()} for _ in range(2))
        run(program, wanted, (1,), order=lanes)
        way(mine)
        for name in program.written():
            np.testing.assert_array_equal(mine[name], wanted[name], f"{name} {lanes}")


def rows_of(t: Any) -> tuple[Any, Any]:
    return t.arange(R)[:, None], t.arange(C)[None, :]


def staged(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    v = t.load(z[rows_of(t)])
    t.store(z[rows_of(t)], v + 1.0)
    t.store(y[rows_of(t)], t.stage(v, "shared", order=(0, 1)))


def stored(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    v = t.load(z[rows_of(t)])
    t.store(z[rows_of(t)], v + 1.0)
    t.store(y[rows_of(t)], v, order=(0, 1))


def broadcast(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    r, c = rows_of(t)
    v = t.load(z[0, t.arange(C)])
    t.store(z[0, t.arange(C)], v + 1.0)
    t.store(y[r, c], v[None, :] + t.load(x[r, c]))


def cell(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    total = t.var(t.load(x[rows_of(t)]))
    v = total.get()
    total.set(v + 1.0)
    t.store(y[rows_of(t)], v, order=(0, 1))


@pytest.mark.parametrize("function", (staged, stored, broadcast, cell), ids=lambda f: f.__name__)
def test_what_was_read_before_a_store_is_not_read_again_after_it(function: Callable[..., None]) -> None:
    agree(function)


def of_rows(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    e = t.exp(t.load(x[t.arange(R), 0]))
    t.store(y[rows_of(t)], e[:, None] + t.load(x[rows_of(t)]))
    t.store(z[t.arange(R), 0], e)


def of_rows_and_a_fold(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    e = t.exp(t.load(x[t.arange(R), 0]))
    t.store(z[t.arange(R), 0], e * t.max(e[:, None] + t.load(x[rows_of(t)]), axis=1))


def of_rows_in_an_order(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    e = t.exp(t.load(x[t.arange(R), 0]))
    t.store(y[rows_of(t)], t.stage(e[:, None] + t.load(x[rows_of(t)]), "shared", order=(0, 1)), order=(1, 0))
    t.store(z[t.arange(R), 0], e)


def of_columns_in_an_order(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    r, c = t.arange(R)[:, None], t.arange(32)[None, :]  # so few columns leave threads over for rows
    e = t.exp(t.load(x[0, t.arange(32)]))
    t.store(y[r, c], e[None, :] + t.load(x[r, c]), order=(1, 0))
    t.store(z[0, t.arange(32)], e)


def of_rows_in_a_cell(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    total = t.var(t.load(x[t.arange(R), 0]))
    for _ in t.range(2):
        t.store(y[rows_of(t)], total.get()[:, None] + t.load(x[rows_of(t)]))
        total.set(total.get() * 0.5)


@pytest.mark.parametrize(
    "function",
    (of_rows, of_rows_in_a_cell, of_rows_and_a_fold, of_rows_in_an_order, of_columns_in_an_order),
    ids=lambda f: f.__name__,
)
def test_a_tile_waits_where_its_own_elements_are_counted(function: Callable[..., None]) -> None:
    agree(function)


def as_index(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    c = t.arange(C)
    t.store(y[0, c], t.load(x[0, t.stage(t.load(i[c]), "shared")]))


def as_index_of_what_is_folded(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    t.store(y[0, 0], t.max(t.load(x[0, t.stage(t.load(i[t.arange(C)]), "shared")])))


def as_mask(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
    c = t.arange(C)
    t.store(y[0, c], t.load(x[0, c], mask=t.stage(t.load(i[c]), "shared") > 5))


def staged_beside(t: Any, x: Any, y: Any, z: Any) -> None:
    first = t.stage(t.load(x[rows_of(t)]), "shared", order=(0, 1))
    t.store(z[rows_of(t)], t.load(x[rows_of(t)]) + 1.0)
    t.store(y[rows_of(t)], first + t.stage(t.load(z[rows_of(t)]), "shared", order=(0, 1)))


def stored_beside(t: Any, x: Any, y: Any, z: Any) -> None:
    c = t.arange(C)
    t.store(y[rows_of(t)], t.load(x[rows_of(t)]))
    t.store(z[0, c], t.load(x[0, c]) + 1.0)
    t.store(y[rows_of(t)], t.load(z[0, c])[None, :] + 1.0)


def folded_beside(t: Any, x: Any, y: Any, z: Any) -> None:
    c = t.arange(C)
    most = t.max(t.load(x[rows_of(t)]), axis=0)
    t.store(z[0, c], t.load(x[0, c]) + 1.0)
    t.store(y[0, c], most + t.max(t.load(x[rows_of(t)]) * t.load(z[0, c])[None, :], axis=0))


@pytest.mark.parametrize("function", (staged_beside, stored_beside, folded_beside), ids=lambda f: f.__name__)
def test_what_was_stored_before_a_load_is_there(function: Callable[..., None]) -> None:
    agree(function)


@pytest.mark.parametrize("function", (as_index, as_index_of_what_is_folded, as_mask), ids=lambda f: f.__name__)
def test_a_copy_has_arrived_where_it_says_what_is_loaded(function: Callable[..., None]) -> None:
    agree(function)


def test_rows_that_are_regrouped_become_other_threads() -> None:
    """Six rows twice, and three rows four times: row 4 is dealt to the first threads, and then to others."""

    def regrouped(t: Any, u: Any, v: Any) -> None:
        a, b, c = t.arange(2)[:, None, None], t.arange(6)[None, :, None], t.arange(32)[None, None, :]
        s = t.stage(t.load(u[a, b, c]), "shared", order=(2, 1, 0))
        a, b = t.arange(4)[:, None, None], t.arange(3)[None, :, None]
        t.store(v[a, b, c], s.reshape(4, 3, 32), order=(2, 1, 0))

    agree(regrouped)


def test_the_end_of_a_row_is_no_part_of_the_next() -> None:
    """What is regrouped has no padding: with its last vector a thread would read what another one writes."""

    def changed(t: Any, u: Any, v: Any) -> None:
        a, b, c = t.arange(2)[:, None, None], t.arange(6)[None, :, None], t.arange(3)[None, None, :]
        total = t.var(t.load(u[a, b, c]))
        total.set(total.get() * 0.5)
        t.store(v[a, b, c], total.get(), order=(2, 1, 0))
        t.store(v[a, t.arange(9)[None, :, None], t.arange(2)], total.get().reshape(2, 9, 2))

    agree(changed)


def test_what_a_later_loop_keeps_is_not_there_in_an_earlier_condition() -> None:
    def twice(t: Any, x: Any, y: Any, z: Any, i: Any) -> None:
        c = t.arange(C)
        v = t.exp(t.load(x[0, c]))
        with t.when(t.load(i[0]) >= 0):
            t.store(y[0, c], v * 2.0)
        t.store(y[1, c], v / t.sum(v))

    agree(twice)


def test_what_is_regrouped_is_not_kept_where_a_condition_may_not_hold() -> None:
    def kept(t: Any, x: Any, y: Any, i: Any) -> None:
        v = t.load(x[0, t.arange(24)]) * 2.0
        with t.when(t.load(i[0]) < 0):
            t.store(y[1, t.arange(24)], v)
        t.store(y[t.arange(R)[:, None], t.arange(6)[None, :]], v.reshape(R, 6))

    agree(kept)
