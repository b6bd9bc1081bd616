"""The meaning of programs: effects in order, masks, bounds, cells, and what the interpreter refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewright import tile
from tilewright.tile import RunError, ViewType
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.oracle.interpreter import run

F32 = tile.float32
ROWS = ViewType(F32, (None, Most(64)))


def interpret(
    function: Callable[..., None], x: np.ndarray, y: np.ndarray, grid: tuple[int, ...] = (1,), outputs: Any = ()
) -> None:
    program = tile.kernel(function, static={"x": (1,)}).trace({"x": ROWS, "y": ROWS})
    run(program, {"x": x, "y": y}, grid, outputs=outputs)


def table(rows: int = 2, columns: int = 5) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def test_effects_are_sequential_global_memory_included() -> None:
    """A tile stored and loaded in another order in one instance is what was stored."""

    def flip(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        t.store(y[0, col], t.load(x[0, col]) * 2.0)
        t.store(y[1, col], t.load(y[0, x.shape[1] - 1 - col]))

    y = np.zeros((2, 5), np.float32)
    interpret(flip, table(), y, outputs=("y",))
    assert np.array_equal(y[1], (table()[0] * 2)[::-1])


def test_a_loop_reads_what_its_last_iteration_wrote() -> None:
    def shift(t: Any, x: Any, y: Any) -> None:
        col = t.arange(4)
        t.store(y[0, col], t.load(x[0, col]))
        for k in t.range(3):
            v = t.load(y[0, col])
            t.store(y[0, col], v + t.load(y[0, k]))

    y = np.zeros((1, 5), np.float32)
    interpret(shift, table(1), y)
    wanted = table(1)[0, :4].copy()
    for k in range(3):
        wanted = wanted + wanted[k]
    assert np.array_equal(y[0, :4], wanted)


def test_a_cell_read_before_it_is_set_keeps_its_value() -> None:
    def swap(t: Any, x: Any, y: Any) -> None:
        a, b = t.var(1.0), t.var(2.0)
        for _ in t.range(3):
            old = a.get()
            a.set(b.get())
            b.set(old)
        t.store(y[0, 0], a.get())
        t.store(y[0, 1], b.get())

    y = np.zeros((1, 5), np.float32)
    interpret(swap, table(1), y)
    assert y[0, :2].tolist() == [2.0, 1.0]


def test_masked_off_addresses_are_not_touched() -> None:
    def masked(t: Any, x: Any, y: Any) -> None:
        col = t.arange(64)
        v = t.load(x[0, col], mask=col < x.shape[1], other=-1.0)
        t.store(y[0, col], v + 1.0, mask=(col < 5) & (v > 1.0))

    y = np.full((1, 5), 9.0, np.float32)
    interpret(masked, table(1), y)
    assert y.tolist() == [[9.0, 9.0, 3.0, 4.0, 5.0]]


def test_the_true_size_divides_a_mean() -> None:
    def mean(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.mean(t.load(x[0, t.arange(x.shape[1])])))

    y = np.zeros((1, 5), np.float32)
    interpret(mean, table(1), y)
    assert y[0, 0] == 2.0


def test_integers_divide_downwards() -> None:
    def divide(t: Any, x: Any, y: Any) -> None:
        i = t.arange(5) - 3
        t.store(y[0, t.arange(5)], (i // 2 * 10 + i % 2).f32())
        t.store(y[1, t.arange(5)], (i // 3 * 10 + i % 3).f32())

    y = np.zeros((2, 5), np.float32)
    interpret(divide, table(), y)
    assert y[0].tolist() == [k // 2 * 10 + k % 2 for k in range(-3, 2)]
    assert y[1].tolist() == [k // 3 * 10 + k % 3 for k in range(-3, 2)]


def test_an_access_beyond_a_tensor_is_refused_with_its_line() -> None:
    def beyond(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.load(x[t.program_id(0), 5]))

    with pytest.raises(RunError, match=r"test_tile_interpreter.py:\d+: load of x: index 5 on axis 1 of size 5"):
        interpret(beyond, table(), np.zeros((1, 5), np.float32))


def test_reading_what_nobody_wrote_is_refused() -> None:
    def unwritten(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, t.arange(4)], 1.0)
        t.store(y[0, 4], t.load(y[0, 3]))
        t.store(y[1, 0], t.load(y[1, 1]))

    with pytest.raises(RunError, match="nobody has written there"):
        interpret(unwritten, table(), np.zeros((2, 5), np.float32), outputs=("y",))


def test_what_is_not_written_stays_poisoned() -> None:
    def some(t: Any, x: Any, y: Any) -> None:
        t.store(y[t.program_id(0), 0], 1.0)

    y = np.zeros((2, 5), np.float32)
    interpret(some, table(), y, grid=(2,), outputs=("y",))
    assert np.array_equal(np.isnan(y).sum(1), [4, 4])


def test_checks_fail_in_an_interpreted_run() -> None:
    def checked(t: Any, x: Any, y: Any) -> None:
        t.check(x.shape[1] > 5, "too narrow")

    with pytest.raises(RunError, match="too narrow"):
        interpret(checked, table(), table())


def test_rows_may_lie_at_several_strides() -> None:
    def copy(t: Any, x: Any, y: Any) -> None:
        row, col = t.program_id(0), t.arange(x.shape[1])
        t.store(y[row, col], t.load(x[row, col]))

    kernel = tile.kernel(copy, static={"x": (1,)})
    program = kernel.trace({"x": ViewType(F32, (None, Most(64)), levels=2), "y": ROWS})
    x = np.arange(2 * 3 * 5, dtype=np.float32).reshape(3, 2, 5).transpose(1, 0, 2)
    y = np.zeros((6, 5), np.float32)
    run(program, {"x": x, "y": y}, (6,))
    assert np.array_equal(y, x.reshape(6, 5))


def test_an_exact_run_separates_the_algorithm_from_its_rounding() -> None:
    """Two passes over a far row are right in both; mean(x^2) - mean(x)^2 is right in float64 alone."""

    def two_passes(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        d = v - t.mean(v)
        t.store(y[0, 0], t.mean(d * d))

    def one_pass(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        m = t.mean(v)
        t.store(y[0, 0], t.mean(v * v) - m * m)

    x = np.array([[40000, 40001, 40002, 40003]], np.float32)
    found = {}
    for function in (two_passes, one_pass):
        program = tile.kernel(function, static={"x": (1,)}).trace({"x": ROWS, "y": ROWS})
        for exact in (False, True):
            y = np.zeros((1, 4), np.float32)
            run(program, {"x": x, "y": y}, (1,), exact=exact)
            found[function.__name__, exact] = y[0, 0]
    assert found["two_passes", False] == found["two_passes", True] == found["one_pass", True] == 1.25
    assert found["one_pass", False] != 1.25


def test_an_exact_run_still_rounds_where_the_program_does() -> None:
    def rounded(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.exp(t.load(x[0, 0])).to(tile.bfloat16).f32())

    program = tile.kernel(rounded, static={"x": (1,)}).trace({"x": ROWS, "y": ROWS})
    x, y = np.array([[1.0]], np.float32), np.zeros((1, 4), np.float32)
    run(program, {"x": x, "y": y}, (1,), exact=True)
    assert y[0, 0] == tile.bfloat16.rounded(np.exp(x))[0, 0]
