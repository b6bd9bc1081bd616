"""What compiled code makes of hostile values: padding, NaN, rounding, long sums, integers and loops of any bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tile_runs import F32, FEATURES, QUICK, QUICKEST, compiled_run, one_row, order, row, same

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.dtypes import DType
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import run
from tilewright.tile.runtime import cpu, cuda, target
from tilewright.tile.runtime.target import Cpu
from tilewright.tile.schedule import Schedule

pytestmark = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")


def test_padding_counts_for_nothing() -> None:
    def variance(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        d = v - t.mean(v)
        t.store(y[0, 0], t.mean(d * d))

    def largest(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        t.store(y[0, t.arange(x.shape[1])], tile.softmax(t, v))

    assert one_row(variance, row(1, 1, 1, 1, 1))[0, 0] == 0.0
    assert np.allclose(one_row(largest, row(-1e4, -1e4, -1e4)), 1 / 3)


def test_the_largest_of_a_nan_is_nan() -> None:
    def largest(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.max(t.load(x[0, t.arange(x.shape[1])])))

    assert np.isnan(one_row(largest, row(3, np.nan, 2))[0, 0])


def _sums(t: Any, x: Any, y: Any) -> None:
    """Two sums and a maximum of one loop, over a tile of one axis and of two."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col])
    for k, found in enumerate((t.sum(v), t.mean(v * v), t.max(v), t.sum(t.sum((v + 0.5)[None, :], axis=1)))):
        t.store(y[row, k], found)


@pytest.mark.parametrize("features", [None, *FEATURES[1:]], ids=("here", "avx+avx2", "plain"))
def test_sums_of_wide_rows_are_exact_to_a_few_ulp(features: tuple[str, ...] | None) -> None:
    """Equal terms are rounded the same way each time: one accumulator a lane was 216 ulp off in the widest row."""
    here = target.this_cpu()
    if not set(features or ()) <= set(here.features):
        pytest.skip(f"this CPU lacks {set(features or ()) - set(here.features)}")
    which = None if features is None else Cpu(here.machine, features)
    view, lanes = ViewType(F32, (None, Most(131072))), order(which).lanes
    program = tile.kernel(_sums, static={"x": (1,)}).trace({"x": view, "y": ViewType(F32, (None, None))})
    made = cpu.compile_all([program], which, QUICK)[0]
    noise = np.random.default_rng(0).normal(size=131072)
    kinds = np.stack([np.full(131072, 0.1), 300 + noise, noise**2]).astype(np.float32)
    for n in (1, 4 * lanes, 64 * lanes + 1, 1024 * lanes - 1, 1025 * lanes, 16385, 131072):
        x, mine, other = np.ascontiguousarray(kinds[:, :n]), np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
        compiled_run(made, {"x": x, "y": other}, {"x": F32, "y": F32}, (3, 1, 1))
        if n != 131072:
            run(program, {"x": x, "y": mine}, (3,), order=order(which))
            assert same(mine, other, F32), n
        wide = x.astype(np.float64)
        exact = np.stack([wide.sum(1), (wide**2).mean(1), wide.max(1), (wide + 0.5).sum(1)], 1)
        assert np.abs((other - exact) / np.spacing(exact.astype(np.float32))).max() <= 4, n


def test_the_last_axis_that_counts_is_the_one_in_vectors() -> None:
    def column(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        t.store(y[0, 0], t.sum(t.sum(v[:, None], axis=0)))

    one_row(column, np.random.default_rng(0).normal(size=(1, 200)).astype(np.float32))


@pytest.mark.parametrize("rows", [3, 16, 17, 100, 256, 1000])
def test_sums_over_an_outer_axis_are_exact_to_a_few_ulp(rows: int) -> None:
    """In blocks too. The axis may end anywhere, and the first of three may be the one."""

    def sums(t: Any, x: Any, y: Any, rows: int) -> None:
        down, col = t.arange(rows, limit=x.shape[0] + (rows - 1)), t.arange(37)
        v = t.load(x[0, 0]) + (down[:, None] * 0 + col[None, :]).f32() * 0.0
        t.store(y[0, col], t.sum(v, axis=0))
        t.store(y[0, 37 + col], t.sum(t.sum(v[:, None, :], axis=1), axis=0))

    found = one_row(sums, row(*[0.1] * 80), rows=rows)[0, :74].astype(np.float64)
    exact = np.float64(np.float32(0.1)) * rows
    assert np.abs(found - exact).max() / np.spacing(np.float32(exact)) <= 4


def test_nothing_is_contracted() -> None:
    """0x1.de01dap-1 * 0x1.f50a04p-1 * 30.1, then rounded by adding: 27 where the compiler fuses, else 28."""

    def chain(t: Any, x: Any, y: Any) -> None:
        a, b, c = (t.load(x[0, i]) for i in range(3))
        t.store(y[0, 0], (a * b * c + 12582912.0) - 12582912.0)
        t.store(y[0, 1], t.fma(a * b, c, 12582912.0) - 12582912.0)

    found = one_row(chain, row(float.fromhex("0x1.de01dap-1"), float.fromhex("0x1.f50a04p-1"), 30.1), 3)
    assert found[0, :2].tolist() == [28.0, 27.0]


def test_division_is_not_a_product_with_the_reciprocal() -> None:
    def divide(t: Any, x: Any, y: Any) -> None:
        col = t.arange(2)
        t.store(y[0, col], t.rint(t.load(x[0, 0]) / t.load(x[0, 1]) + col.f32() * 0.0))

    def multiply(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.rint(t.load(x[0, 0]) * (1.0 / t.load(x[0, 1]))))

    given = row(float.fromhex("0x1.52a54ap-4"), float.fromhex("0x1.c3870ep-5"))
    assert one_row(divide, given)[0, 0] == 2.0
    assert one_row(multiply, given)[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [tile.int32, tile.uint32, tile.int64], ids=str)
def test_integers_of_any_value_divide_and_shift(dtype: DType) -> None:
    """By 0: 0, as numpy has it; the least by -1 wraps; a shift of no such bits leaves 0 or the sign. C traps."""

    def each(t: Any, x: Any, y: Any, kind: str, vector: bool) -> None:
        row = t.program_id(0)
        at = (row, t.arange(16)) if vector else (row, 0)
        a, b = t.load(x[at]), t.load(x[(row + 1, *at[1:])])
        t.store(y[at], {"//": lambda: a // b, "%": lambda: a % b, "<<": lambda: a << b, ">>": lambda: a >> b}[kind]())

    low, high = dtype.bounds
    ends = np.array([low, low + 1, high, high - 1, 0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 100])
    pairs = np.stack([np.repeat(ends, 16), np.tile(ends, 16)]).astype(dtype.storage)
    if dtype != tile.uint32:
        pairs = np.concatenate([pairs, -pairs], 1)
    x = np.concatenate([np.stack([a, b]) for a, b in zip(*(p.reshape(-1, 16) for p in pairs), strict=True)])
    view = ViewType(dtype, (None, None))
    programs = [
        tile.kernel(each).trace({"x": view, "y": view, "kind": kind, "vector": vector})
        for kind in ("//", "%", "<<", ">>")
        for vector in (True, False)
    ]
    grid = (len(x) - 1, 1, 1)
    for program, made in zip(programs, cpu.compile_all(programs, None, QUICKEST), strict=True):
        mine, other = np.zeros_like(x), np.zeros_like(x)
        run(program, {"x": x, "y": mine}, grid)
        compiled_run(made, {"x": x, "y": other}, {"x": dtype, "y": dtype}, grid)
        assert np.array_equal(mine, other), program.name


END = (1 << 63) - 1
BOUNDS = ((0, 5, 0), (0, 5, -1), (0, 5, 2), (5, 0, 1), (END - 9, END - 2, 3), (0, END, 1 << 62), (~END, END, 1 << 62))


@pytest.mark.parametrize(("lo", "hi", "step"), BOUNDS)
def test_a_loop_with_any_bounds_ends(lo: int, hi: int, step: int) -> None:
    def count(t: Any, bounds: Any, y: Any) -> None:
        total = t.var(0)
        for _ in t.range(*(t.load(bounds[i]) for i in range(3))):
            total.set(total.get() + 1)
        t.store(y[0], total.get())

    view = ViewType(tile.int64, (None,))
    program = tile.kernel(count).trace({"bounds": view, "y": view})
    mine, other, bounds = np.full(1, 7), np.full(1, 7), np.array([lo, hi, step])
    run(program, {"bounds": bounds, "y": mine}, (1,))
    compiled_run(
        cpu.compile(program), {"bounds": bounds, "y": other}, dict.fromkeys(("bounds", "y"), tile.int64), (1, 1, 1)
    )
    assert mine[0] == other[0] == len(range(lo, hi, step) if step > 0 else ())


def everywhere(body: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What an instance stores: the interpreter's, which a CPU and a GPU's threads must give, too."""
    made = tile.kernel(body).trace({n: ViewType(F32, (None,) * a.ndim) for n, a in (("x", x), ("y", y))})
    runs = [y.copy() for _ in range(5)]
    run(made, {"x": x, "y": runs[0]}, (1,))
    compiled_run(cpu.compile_all([made], flags=QUICKEST)[0], {"x": x, "y": runs[1]}, {"x": F32, "y": F32}, (1, 1, 1))
    for found, schedule in zip(runs[2:], (Schedule(32, 1, 8), Schedule(64, 1, 2), Schedule(128, 1, 1)), strict=True):
        function, arena = cuda.lowered(made, schedule)
        emulator.run(function, {"x": x, "y": found}, (1,), arena=arena.offsets)
    assert all(same(found, runs[0], F32) for found in runs)
    return runs[0]


def test_a_sum_along_a_middle_axis_keeps_to_its_row() -> None:
    """What lies behind a row of sums, when its last vector is stored, is the next row of sums."""

    def middle(t: Any, x: Any, y: Any) -> None:
        at = t.arange(3)[:, None, None], t.arange(2)[None, :, None], t.arange(21)[None, None, :]
        v = t.load(x[at])
        t.store(y[at], t.sum(t.maximum(v, 1.0), axis=1, keep=True) + v)

    x = np.arange(126, dtype=np.float32).reshape(3, 2, 21) - 60
    assert np.array_equal(everywhere(middle, x, np.zeros_like(x)), np.maximum(x, 1).sum(1, keepdims=True) + x)


def test_what_a_fold_leaves_can_be_regrouped() -> None:
    def regrouped(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[t.arange(6)[:, None], t.arange(20)[None, :]])
        t.store(y[0, t.arange(10)], t.max(t.sum(v, axis=0).reshape(10, 2), axis=1))
        t.store(y[1, t.arange(3)], t.sum(t.sum(v, axis=1).reshape(3, 2), axis=1))
        t.store(y[2, t.arange(1)], t.sum(t.sum(v, axis=1, keep=True), axis=0, keep=True).reshape(1))

    x = np.arange(120, dtype=np.float32).reshape(6, 20)
    y = everywhere(regrouped, x, np.zeros((3, 10), np.float32))
    assert np.array_equal(y[0], x.sum(0).reshape(10, 2).max(1)) and y[2, 0] == x.sum()
    assert np.array_equal(y[1, :3], x.sum(1).reshape(3, 2).sum(1))
