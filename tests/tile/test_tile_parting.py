"""What forbids to take a kernel apart at a fragment, and that what is not forbidden gives the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright import tile
from tilewright.tile import TileError, ViewType
from tilewright.tile.fuse import decide
from tilewright.tile.lang.apart import apart

KINDS = {np.dtype(np.float32): tile.float32}
ROWS, COLUMNS = 3, 64


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def types(kernel: tile.Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a kernel's arguments and those that came with its fragments."""
    return {n: ViewType(KINDS[a.dtype], a.shape, align=4) for n, a in {**arguments, **kernel.bound()}.items()}


def same(
    kernel: tile.Kernel, place: str, arguments: dict[str, Any], grid: Any, shape: tuple[int, ...], first: str = "own"
) -> None:
    """That both forms write the same, whichever is chosen, run on the CPU."""
    found = decide(kernel, place, types(kernel, arguments), grid)
    memory = [*arguments.values(), *kernel.bound().values()]
    before = [a.copy() for a in memory]
    kernel[grid if isinstance(grid, tuple) else (grid,)](**arguments)
    wanted = [a.copy() for a in memory]
    between = np.full(shape, np.nan, np.float32).astype(found.between.storage)
    for a, was in zip(memory, before, strict=True):
        a[...] = was
    for form in (first, "rest" if first == "own" else "own"):
        apart(kernel, place, form, between)[grid if isinstance(grid, tuple) else (grid,)](**arguments)
    for a, right in zip(memory, wanted, strict=True):
        np.testing.assert_array_equal(a, right)


def forbidden(kernel: tile.Kernel, place: str, arguments: dict[str, Any], why: str, grid: Any = ROWS) -> None:
    with pytest.raises(TileError, match=why):
        decide(kernel, place, types(kernel, arguments), grid)


@tile.fragment
def square(t: Any, v: Any, at: Any) -> Any:
    return v * v + 1.0


@tile.fragment
def tripled(t: Any, v: Any, at: Any, z: Any) -> None:
    t.store(z[at], v * 3.0)


@tile.fragment
def kept(t: Any, v: Any, at: Any, h: Any) -> Any:
    t.store(h[at], v * 2.0)
    return v * 3.0


@tile.kernel(static={"x": (1,)})
def plain(t: Any, x: Any, y: Any, piece: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at])
    t.store(y[at], piece(t, v, at) + t.max(v))


def two() -> dict[str, Any]:
    return {"x": numbers(ROWS, COLUMNS), "y": numbers(ROWS, COLUMNS)}


def test_several_values_at_one_place() -> None:
    @tile.kernel(static={"x": (1,)})
    def both(t: Any, x: Any, w: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        t.store(y[at], piece(t, t.load(x[at]), at) - piece(t, t.load(w[at]), at))

    @tile.kernel(static={"x": (1,)})
    def after(t: Any, x: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        v = t.load(x[at])
        piece(t, v, at)
        piece(t, v + 1.0, at)
        t.store(y[at], v)

    forbidden(both.bind(piece=square), "piece", {**two(), "w": numbers(ROWS, COLUMNS)}, "several values at one place")
    forbidden(after.bind(piece=tripled(numbers(ROWS, COLUMNS))), "piece", two(), "several values at one place")


def test_a_value_that_changes_where_its_place_does_not() -> None:
    """From row to row, and from one iteration to the next."""

    @tile.kernel(static={"x": (1,)})
    def columns(t: Any, x: Any, y: Any, piece: Any) -> None:
        row, column = t.program_id(0), t.arange(x.shape[1])
        t.store(y[row, column], piece(t, t.load(x[row, column]), (column,)))

    @tile.kernel(static={"x": (1,)})
    def again(t: Any, x: Any, y: Any, piece: Any) -> None:
        at, total = (t.program_id(0), t.arange(x.shape[1])), t.var(0.0)
        for _ in t.range(0, 4, 1):
            total.set(total.get() + t.sum(piece(t, t.load(x[at]) * total.get(), at)))
        t.store(y[at], total.get())

    for kernel in (columns, again):
        forbidden(kernel.bind(piece=square), "piece", two(), "changes where its place does not")


def test_a_place_that_may_not_be_there() -> None:
    @tile.kernel(static={"x": (1,)})
    def masked(t: Any, x: Any, y: Any, piece: Any) -> None:
        row, total = t.program_id(0), t.var(0.0)
        for k in t.range(0, x.shape[1], 48):
            column = k + t.arange(48)
            inside = column < x.shape[1]
            v = piece(t, t.load(x[row, column], mask=inside), (row, column))
            total.set(total.get() + t.sum(t.where(inside, v, 0.0)))
        t.store(y[row, 0], total.get())

    forbidden(masked.bind(piece=square), "piece", two(), "a mask depends on its place")


def test_a_value_of_another_shape_than_its_place() -> None:
    @tile.fragment
    def summed(t: Any, v: Any, at: Any) -> Any:
        return t.sum(v)

    @tile.kernel(static={"x": (1,)})
    def row(t: Any, x: Any, y: Any, piece: Any) -> None:
        row = t.program_id(0)
        t.store(y[row, 0], piece(t, t.load(x[row, t.arange(x.shape[1])]), row))

    forbidden(plain.bind(piece=summed), "piece", two(), "not of its place's shape")
    same(row.bind(piece=summed), "piece", two(), ROWS, (ROWS,))


def test_what_is_no_tile_and_its_place() -> None:
    @tile.fragment
    def gated(t: Any, a: Any, b: Any, at: Any) -> Any:
        return a * b.f32()

    @tile.kernel(static={"x": (1,)})
    def gates(t: Any, x: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        v = t.load(x[at])
        t.store(y[at], piece(t, v, v, at))

    @tile.kernel(static={"x": (1,)})
    def counts(t: Any, x: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        t.store(y[at], piece(t, t.load(x[at]), at[1], at))

    for kernel in (gates, counts):
        forbidden(kernel.bind(piece=gated), "piece", two(), "not called with a tile and its place")


def test_memory_that_both_would_touch() -> None:
    """As one kernel reads it, after it was written; by another name; or of a fragment, behind the kernel's end."""

    @tile.kernel(static={"x": (1,)})
    def stored_first(t: Any, x: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        t.store(y[at], t.load(x[at]) * 2.0)
        t.store(y[at], piece(t, t.load(y[at]), at))

    forbidden(stored_first.bind(piece=square), "piece", two(), "y would be written by one")
    made = plain.bind(piece=kept(numbers(ROWS, COLUMNS)))
    same(made, "piece", two(), ROWS, (ROWS, COLUMNS))
    forbidden(made.aliased(("x", "piece_h")), "piece", two(), "piece_h would be written by one")
    same(plain.bind(piece=square).aliased(("x", "y")), "piece", two(), ROWS, (ROWS, COLUMNS))


def test_what_may_be_taken_apart_gives_the_same() -> None:
    @tile.kernel(static={"x": (1,)})
    def carried(t: Any, x: Any, y: Any, piece: Any) -> None:
        row, most = t.program_id(0), t.var(0.0)
        for k in t.range(0, 64, 16):
            at = row, k + t.arange(16)
            most.set(t.maximum(most.get(), t.max(piece(t, t.load(x[at]) - most.get(), at))))
        t.store(y[row, 0], most.get())

    @tile.kernel(static={"x": (1,)})
    def some(t: Any, x: Any, y: Any, piece: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        with t.when(t.program_id(0) < 2):
            t.store(y[at], piece(t, t.load(x[at]), at))

    @tile.kernel(static={"x": (1,)})
    def heads(t: Any, x: Any, y: Any, piece: Any) -> None:
        row, head, column = t.program_id(0), t.program_id(1), t.arange(x.shape[1])
        v = t.load(x[row, column])
        piece(t, v + head.f32(), (row, head, column))
        t.store(y[row, head], t.sum(v))

    for kernel in (plain, carried, some):
        same(kernel.bind(piece=square), "piece", two(), ROWS, (ROWS, COLUMNS))
    z = numbers(ROWS, 2, COLUMNS)
    same(heads.bind(piece=tripled(z)), "piece", two(), (ROWS, 2), z.shape, first="rest")


def test_the_narrowest_type_in_between_may_be_one_without_infinity() -> None:
    @tile.fragment
    def coded(t: Any, v: Any, at: Any) -> Any:
        return v.to(tile.float8_e4m3fn, saturate=True).f32()

    made = plain.bind(piece=coded)
    assert decide(made, "piece", types(made, two()), ROWS).between is tile.float8_e4m3fn


def test_a_fragment_that_asks_how_many_there_are_is_told_of_the_same_grid() -> None:
    """Fused, two tiles of a row of 200 KB would wait in shared memory together, so the choice is to materialise."""

    @tile.fragment
    def shared(t: Any, v: Any, at: Any) -> Any:
        e = t.exp(v)
        return e / t.sum(e) / t.num_programs(1).f32()

    @tile.kernel(static={"x": (1,)})
    def copies(t: Any, x: Any, y: Any, piece: Any) -> None:
        row, column = t.program_id(0), t.arange(x.shape[1])
        v = piece(t, t.load(x[row, column]), (row, column))
        t.store(y[row, t.program_id(1), column], v - t.max(v))

    made, x = copies.bind(piece=shared), numbers(2, 50000)
    y, fused = np.zeros((2, 4, 50000), np.float32), np.zeros((2, 4, 50000), np.float32)
    found = decide(made, "piece", types(made, {"x": x, "y": y}), (2, 4))
    assert found.choice == "materialise" and found.forms[0] == ("own", (2, 4, 1))
    for kernel, grid in found.launches(np.zeros_like(x)):
        kernel[grid](x, y)
    made[(2, 4)](x, fused)
    np.testing.assert_array_equal(y, fused)
