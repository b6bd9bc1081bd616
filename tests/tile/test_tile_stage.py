"""Where a tile waits and how its axes are dealt, as authors ask: values stay, copies arrive, errors name lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tile_runs import compiled_run
from tile_threads import without_each

from tilewright import tile
from tilewright.tile import LowerError, RaceError, RunError, TileError, TraceError, VerifyError, ViewType
from tilewright.tile.dtypes import DType
from tilewright.tile.fuse import decide
from tilewright.tile.ir.thread_ir import For, Function, If, Load, Store, Wait
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.ir.tile_ir import Most, Program
from tilewright.tile.lang.kernel import Kernel
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import run
from tilewright.tile.runtime import cpu, cuda, target
from tilewright.tile.schedule import Schedule, default
from tilewright.tile.sync.effects import apart

ROWS = 16
SCHEDULES = tuple(Schedule(*s) for s in ((32, 1, 8), (64, 1, 4), (128, 1, 2), (256, 1, 1), (64, 1, 16)))
needs_compiler = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")


@tile.kernel(static={"x": (0,)})
def turned_in(t: Any, x: Any, y: Any) -> None:
    """y is x turned: read along x's rows, stored along y's."""
    r, c = t.program_id(0) * ROWS + t.arange(ROWS)[:, None], t.arange(x.shape[0])[None, :]
    t.store(y[r, c], t.stage(t.load(x[c, r]), "shared", order=(0, 1)))


@tile.kernel(static={"x": (1,)})
def turned_out(t: Any, x: Any, y: Any) -> None:
    r, c = t.program_id(0) * ROWS + t.arange(ROWS)[:, None], t.arange(x.shape[1])[None, :]
    t.store(y[c, r], t.stage(t.load(x[r, c]), "shared"), order=(0, 1))


def types(kernel: Kernel, dtype: DType, count: Any, align: int) -> dict[str, ViewType]:
    by_columns = kernel is turned_in
    x = ViewType(dtype, (count, None) if by_columns else (None, count), align=align)
    return {"x": x, "y": ViewType(dtype, (None, None), align=align)}


def emulated(program: Program, schedule: Schedule, arguments: dict[str, Any], grid: tuple[int, ...]) -> Function:
    made, arena = cuda.lowered(program, schedule)
    emulator.run(made, arguments, grid, outputs=tuple(program.written()), arena=arena.offsets)
    return made


@pytest.mark.parametrize("kernel", (turned_in, turned_out), ids=lambda k: k.name)
@pytest.mark.parametrize("count", (1, 7, 32, 100))
@pytest.mark.parametrize("dtype", (tile.float32, tile.bfloat16, tile.int8), ids=str)
def test_turning_a_tensor_keeps_its_values(kernel: Kernel, count: int, dtype: DType) -> None:
    rows = 2 * ROWS
    x = np.random.default_rng(count).integers(0, 100, (rows, count)).astype(dtype.storage)
    x = np.ascontiguousarray(x.T) if kernel is turned_in else x
    for sizes in (count, Most(128)):
        program = kernel.trace(types(kernel, dtype, sizes, 0))
        for schedule in SCHEDULES:
            y = np.zeros(x.T.shape, x.dtype)
            emulated(program, schedule, {"x": x, "y": y}, (2, 1, 1))
            assert np.array_equal(y, x.T), schedule
    y = np.zeros(x.T.shape, x.dtype)
    run(program, {"x": x, "y": y}, (2, 1, 1), outputs=("y",))
    assert np.array_equal(y, x.T)


@needs_compiler
@pytest.mark.parametrize("kernel", (turned_in, turned_out), ids=lambda k: k.name)
def test_a_cpu_turns_by_the_axis_that_was_asked_for(kernel: Kernel) -> None:
    program = kernel.trace(types(kernel, tile.float32, 100, 0))
    x = np.random.default_rng(0).standard_normal((32, 100), np.float32)
    x = np.ascontiguousarray(x.T) if kernel is turned_in else x
    y = np.zeros(x.T.shape, np.float32)
    compiled_run(cpu.compile(program), {"x": x, "y": y}, dict.fromkeys("xy", tile.float32), (2, 1, 1))
    assert np.array_equal(y, x.T)
    assert f"loop          over [{ROWS}, 100] by axes 0, 1" in tile.explain(kernel, types(kernel, tile.float32, 100, 0))


def accesses(program: Program, schedule: Schedule) -> dict[str, set[int]]:
    """Bytes at once, by what moves: a view, or `copy` and a view."""
    found: dict[str, set[int]] = {}
    for s in cuda.lowered(program, schedule)[0].statements():
        if isinstance(s, (Load, Store)):
            copied = isinstance(s, Store) and s.source
            name = f"copy {s.source}" if isinstance(s, Store) and s.source else s.memory
            if copied or s.memory.startswith("p_"):
                found.setdefault(name, set()).add(s.align if s.type.lanes > 1 else s.type.dtype.itemsize)
    return found


def test_both_sides_move_16_bytes_at_once() -> None:
    schedule = Schedule(128, 1, 8)
    for kernel in (turned_in, turned_out):
        found = accesses(kernel.trace(types(kernel, tile.bfloat16, 128, 16)), schedule)
        copied = {"copy p_x": {16}} if kernel is turned_out else {"p_x": {16}}
        assert found == {**copied, "p_y": {16}}, kernel.name


@pytest.mark.parametrize(("dtype", "align", "width"), [
    (tile.float32, 16, 16), (tile.float32, 8, 8), (tile.float32, 4, 4), (tile.bfloat16, 16, 16), (tile.bfloat16, 4, 4),
    (tile.bfloat16, 2, 0), (tile.int8, 8, 8), (tile.int8, 2, 0), (tile.float32, 0, 4),
], ids=str)  # fmt: skip
def test_a_copy_is_as_wide_as_is_known_and_at_least_four_bytes(dtype: DType, align: int, width: int) -> None:
    program = turned_out.trace(types(turned_out, dtype, 128, align))
    schedule = Schedule(64, 1, 16 // dtype.itemsize)
    found = accesses(program, schedule)
    assert found.get("copy p_x", {0}) == {width}
    text = cuda.text_of(program, schedule)[1].text
    assert (f"copy_async<{width}>(" in text) == ("copies_wait();" in text) == (width > 0)


def kernels_without_copies() -> dict[str, Any]:
    def masked(t: Any, x: Any, y: Any) -> None:
        c = t.arange(64)
        t.store(y[0, c], t.stage(t.load(x[0, c], mask=c > 3), "shared"))

    def written(t: Any, x: Any, y: Any) -> None:
        c = t.arange(64)
        t.store(y[0, c], t.load(x[0, c]))
        t.store(y[1, c], t.stage(t.load(y[0, c]), "shared"))

    def computed(t: Any, x: Any, y: Any) -> None:
        c = t.arange(64)
        t.store(y[0, c], t.stage(t.load(x[0, c]) * 2.0, "shared"))

    def strided(t: Any, x: Any, y: Any) -> None:
        c = t.arange(16)
        t.store(y[0, c], t.stage(t.load(x[0, c * 2]), "shared"))

    return {f.__name__: f for f in (masked, written, computed, strided)}


@pytest.mark.parametrize("name", kernels_without_copies())
def test_what_no_instruction_copies_goes_through_the_thread(name: str) -> None:
    view = ViewType(tile.float32, (None, 64), align=16)
    program = tile.kernel(kernels_without_copies()[name]).trace({"x": view, "y": view})
    assert not any(k.startswith("copy") for k in accesses(program, Schedule(32, 1, 4)))
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    mine, wanted = np.zeros_like(x), np.zeros_like(x)
    run(program, {"x": x, "y": wanted}, (1, 1, 1))
    made, arena = cuda.lowered(program, Schedule(32, 1, 4))
    emulator.run(made, {"x": x, "y": mine}, (1,), arena=arena.offsets)
    assert np.array_equal(mine, wanted)


# What must not be left out --------------------------------------------------------------------------------------------


def in_bodies(function: Function, kind: type) -> list[tuple[list[Any], int]]:
    found: list[tuple[list[Any], int]] = []

    def walk(body: list[Any]) -> None:
        for i, s in enumerate(body):
            if isinstance(s, kind):
                found.append((body, i))
            if isinstance(s, (For, If)):
                walk(s.body)

    walk(function.body)
    return found


def test_without_the_wait_or_the_barrier_the_emulator_sees_it() -> None:
    program = turned_out.trace(types(turned_out, tile.float32, 64, 16))
    made, arena = cuda.lowered(program, Schedule(64, 1, 4))
    x = np.zeros((ROWS, 64), np.float32)

    def go(function: Function) -> None:
        emulator.run(function, {"x": x, "y": np.zeros((64, ROWS), np.float32)}, (1,), arena=arena.offsets)

    go(made)
    for mutant in without_each(made):
        with pytest.raises(RaceError):
            go(mutant)
    late = apart(made)
    ((body, at),) = in_bodies(late, Wait)
    wait = body.pop(at)
    with pytest.raises((RunError, RaceError)):
        go(late)
    barrier = next(i for i, s in enumerate(body) if type(s).__name__ == "Barrier")
    body.insert(barrier + 1, wait)  # behind the barrier: what others copied need not be there
    with pytest.raises((RunError, RaceError)):
        go(late)


def test_nothing_else_lies_where_a_copy_is_on_its_way() -> None:
    @tile.kernel(static={"x": (1,)})
    def both(t: Any, x: Any, y: Any, z: Any) -> None:
        """A fold, whose array another one may share, is folded while x is on its way."""
        c = t.arange(x.shape[1])
        first = t.sum(t.load(z[0, c]) * 2.0)
        v = t.stage(t.load(x[0, c]), "shared")
        second = t.max(t.load(z[1, c]) * first)
        t.store(y[0, c], v * second + t.sum(t.load(z[0, c]) * second))

    view = ViewType(tile.float32, (None, 256), align=16)
    program = both.trace({"x": view, "y": view, "z": view})
    made, arena = cuda.lowered(program, Schedule(64, 1, 4))
    arguments = {n: np.ones((2, 256), np.float32) for n in "xyz"}
    emulator.run(made, arguments, (1,), arena=arena.offsets)
    copied = next(s.memory for s in made.statements() if isinstance(s, Store) and s.source)
    others = [a.name for a in made.arrays if a.name != copied]
    seen = 0
    for name in others:
        together = {**arena.offsets, name: arena.offsets[copied]}
        try:
            emulator.run(made, arguments, (1,), arena=together)
        except (RaceError, RunError):
            seen += 1
    assert others and seen == len(others)


def test_a_copy_that_no_instruction_does_is_refused() -> None:
    made = cuda.lowered(turned_out.trace(types(turned_out, tile.float32, 64, 16)), Schedule(64, 1, 4))[0]
    (body, at), *_ = [(b, i) for b, i in in_bodies(made, Store) if b[i].source]
    good = body[at]
    for bad in ({"align": 2}, {"stride": 2}, {"source": "p_nothing"}):
        body[at] = replace(good, **bad)
        with pytest.raises(VerifyError, match=r"copy from|aligned"):
            verify(made)
    body[at] = good
    verify(made)


def test_effects_stay_in_their_order() -> None:
    """What was staged is what was there, though the memory is written before it is read from where it waits."""

    @tile.kernel(static={"z": (0, 1)})
    def order(t: Any, z: Any, y: Any) -> None:
        r, c = t.arange(z.shape[0])[:, None], t.arange(z.shape[1])[None, :]
        old = t.stage(t.load(z[r, c]), "shared", order=(0, 1))
        t.store(z[r, c], old + 1.0, order=(1, 0))
        new = t.stage(t.load(z[r, c]), "shared")
        t.store(z[r, c], new * 10.0, order=(0, 1))
        t.store(y[r, c], old + new)

    view = ViewType(tile.float32, (6, 40))
    program = order.trace({"z": view, "y": view})
    start = np.arange(240, dtype=np.float32).reshape(6, 40)
    for schedule in SCHEDULES:
        z, y = start.copy(), np.zeros_like(start)
        made, arena = cuda.lowered(program, schedule)
        emulator.run(made, {"z": z, "y": y}, (1,), arena=arena.offsets)
        assert np.array_equal(z, (start + 1) * 10) and np.array_equal(y, 2 * start + 1), schedule


# Registers, and what is refused ---------------------------------------------------------------------------------------


def test_a_tile_waits_in_registers_where_it_would_be_loaded_again() -> None:
    def kernel(scope: str) -> Any:
        def twice(t: Any, x: Any, y: Any) -> None:
            c = t.arange(1024)
            v = t.load(x[0, c])
            v = t.stage(v, scope) if scope else v
            t.store(y[0, c], v * t.sum(v * v))

        return tile.kernel(twice).trace({"x": view, "y": view})

    view = ViewType(tile.float32, (None, 1024), align=16)
    loads = {s: [x for x in cuda.lowered(kernel(s), Schedule(128, 1, 4))[0].statements()
                 if isinstance(x, Load) and x.memory == "p_x"] for s in ("", "register", "shared")}  # fmt: skip
    assert [len(loads[s]) for s in ("", "register", "shared")] == [2, 1, 0]


@pytest.mark.parametrize(("rows", "columns", "registers", "why"), [
    (1, 4096, 64, "128 registers, and 64 are left"), (2, 128, 64, "several rows"), (1, Most(4096), 64, "only run time"),
])  # fmt: skip
def test_a_tile_that_does_not_fit_registers_is_refused_with_its_line(
    rows: int, columns: Any, registers: int, why: str
) -> None:
    @tile.kernel(static={"x": (1,)})
    def kept(t: Any, x: Any, y: Any) -> None:
        at = t.arange(rows)[:, None], t.arange(x.shape[1])[None, :]
        t.store(y[at], t.stage(t.load(x[at]), "register") * 2.0)

    view = ViewType(tile.float32, (None, columns), align=16)
    with pytest.raises(LowerError, match=rf"{why}.*\n?.*test_tile_stage.py|test_tile_stage.py.*{why}") as error:
        cuda.lowered(kept.trace({"x": view, "y": view}), Schedule(32, 1, 4, registers))
    assert "cannot wait in registers" in str(error.value)


def test_requests_that_are_none_are_refused_with_their_line() -> None:
    def asked(**how: Any) -> None:
        def kernel(t: Any, x: Any, y: Any) -> None:
            at = t.arange(4)[:, None], t.arange(8)[None, :]
            t.store(y[at], t.stage(t.load(x[at]), **how))

        tile.kernel(kernel).trace(dict.fromkeys("xy", ViewType(tile.float32, (None, 8))))

    for how, said in (({"scope": "global"}, "register or shared"), ({"scope": "shared", "order": (0,)}, "each axis"),
                      ({"scope": "shared", "order": (0, 0)}, "each axis"),
                      ({"scope": "shared", "order": (0, 2)}, "each axis"),
                      ({"scope": "shared", "order": ("a", 1)}, "each axis"),
                      ({"scope": "shared", "order": 1}, "each axis"),
                      ({"scope": "shared", "order": ([], 1)}, "each axis"),
                      ({"scope": "shared", "order": 0}, "each axis"),
                      ({"scope": "shared", "order": (0.0, 1.0)}, "each axis"),
                      ({"scope": "shared", "order": (False, True)}, "each axis")):  # fmt: skip
        with pytest.raises(TraceError, match=said) as error:
            asked(**how)
        assert "test_tile_stage.py" in str(error.value)
    asked(scope="shared", order=(-2, -1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("along", [0, 1])
def test_what_waits_along_one_axis_is_written_once(order: tuple[int, int], along: int) -> None:
    @tile.kernel
    def kernel(t: Any, x: Any, u: Any, y: Any) -> None:
        at = t.arange(8)[:, None], t.arange(32)[None, :]
        c = t.load(u[0, at[along]])
        c = c * t.exp(c) + t.exp(c + 1.0)  # dearer than to wait
        s = t.stage(t.load(x[at]) * c, "shared", order)
        t.store(y[at], s - c, order=order)

    program = kernel.trace(dict.fromkeys("xuy", ViewType(tile.float32, (None, None))))
    rng = np.random.default_rng(0)
    base = {n: rng.random((8, 32), np.float32) for n in "xuy"}
    for schedule in (Schedule(32, 1, 4), Schedule(128, 1, 2)):
        want, mine = ({n: v.copy() for n, v in base.items()} for _ in range(2))
        run(program, want, (1,))
        function, arena = cuda.lowered(program, schedule)
        emulator.run(function, mine, (1,), arena=arena.offsets)
        assert np.array_equal(mine["y"], want["y"])


def test_what_is_staged_is_lifted_or_refused() -> None:
    def staged(what: Any) -> Any:
        def kernel(t: Any, x: Any, y: Any) -> None:
            t.store(y[0, t.arange(8)], t.stage(what(t, x), "shared"))

        return tile.kernel(kernel, static={"x": (0,)}).trace(dict.fromkeys("xy", ViewType(tile.float32, (4, 8))))

    staged(lambda t, x: 1.0)
    for what in (lambda t, x: None, lambda t, x: t.var(0.0), lambda t, x: x):
        with pytest.raises(TraceError, match=r"test_tile_stage\.py"):
            staged(what)


# The decision ---------------------------------------------------------------------------------------------------------


@tile.fragment
def add_turned(t: Any, v: Any, at: Any, other: Any) -> Any:
    return v + t.load(other[at[1], at[0]])


@tile.kernel(static={"x": (1,)})
def doubled(t: Any, x: Any, y: Any, prologue: Any) -> None:
    at = t.program_id(0) * ROWS + t.arange(ROWS)[:, None], t.arange(x.shape[1])[None, :]
    t.store(y[at], prologue(t, t.load(x[at]), at) * 2.0)


def test_what_lies_the_other_way_round_is_staged_and_runs() -> None:
    view = ViewType(tile.float32, (None, 256), align=16)
    made = doubled.bind(prologue=add_turned(object()))
    given = {"x": view, "y": view, "prologue_other": ViewType(tile.float32, (256, None), align=16)}
    found = decide(made, "prologue", given, 4096)
    assert found.choice == "stage" and found.staged_us < found.fused_us / 2
    ((staged, grid),) = found.launches()
    assert grid == (4096, 1, 1)
    x = np.random.default_rng(0).standard_normal((2 * ROWS, 256), np.float32)
    other, y = np.random.default_rng(1).standard_normal((256, 2 * ROWS), np.float32), np.zeros_like(x)
    program = staged.trace(given)
    emulated(program, default(program), {"x": x, "y": y, "prologue_other": other}, (2, 1, 1))
    assert np.array_equal(y, (x + other.T) * np.float32(2))
    line = tile.explain(made, given, gpu="sm_90", instances=4096).splitlines()[-1]
    assert line.startswith("fusion        add_turned: stage ") and "fuse " in line and "materialise " in line


def test_1_and_minus_0_are_chosen_by_their_bits() -> None:
    """ptxas takes `selp.f32 1, -0` for 1 and 0 (13.0: FSET.BF)."""

    def sign(t: Any, x: Any, y: Any) -> None:
        c = t.arange(64)
        v = t.load(x[0, c])
        t.store(y[0, c], t.where(v < 0.5, 1.0, -0.0))
        t.store(y[1, 0], t.where(t.sum(v) < 0.5, -0.0, 1.0))

    program = tile.kernel(sign).trace(dict.fromkeys("xy", ViewType(tile.float32, (None, 64))))
    text = cuda.text_of(program, Schedule(32, 1, 2))[1].text
    assert text.count("select_bits<") == 2 and "selp.b32" in text


def test_a_scalar_needs_no_place() -> None:
    def one(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.stage(t.load(x[0, 0]), "shared"))

    program = tile.kernel(one).trace(dict.fromkeys("xy", ViewType(tile.float32, (None, 4))))
    assert not any(e.op == "stage" for e in program.effects())
    with pytest.raises(TileError):
        tile.kernel(lambda t, x: t.stage(x, "shared")).trace({"x": ViewType(tile.float32, (4,))})


@pytest.mark.parametrize("along", (0, 1))
@pytest.mark.parametrize("order", ((0, 1), (1, 0)))
def test_what_waits_without_an_axis_is_stored_by_one_thread_of_it(along: int, order: tuple[int, int]) -> None:
    """Threads lie along both axes of the first loop, and the tile that it keeps for the second has one of them."""

    @tile.kernel(static={"x": (0, 1)})
    def outer(t: Any, a: Any, x: Any, y: Any, z: Any) -> None:
        r, c = t.arange(x.shape[0])[:, None], t.arange(x.shape[1])[None, :]
        v = t.exp(t.load(a[c if along else r]))
        t.store(y[r, c], t.load(x[r, c]) + v, order=order)
        other = t.arange(40)[:, None] if along else t.arange(40)[None, :]
        t.store(z[(other, c) if along else (r, other)], v)

    shape, row = (24, 8), ViewType(tile.float32, (None, None))
    of = {"a": ViewType(tile.float32, shape[along : along + 1]), "x": ViewType(tile.float32, shape), "y": row, "z": row}
    program = outer.trace(of)
    inputs = np.random.default_rng(0).random(shape, np.float32)
    many = (40, 8) if along else (24, 40)
    mine, other = (
        {"a": np.arange(shape[along], dtype=np.float32) / 9, "x": inputs, "y": np.zeros(shape, np.float32),
         "z": np.zeros(many, np.float32)} for _ in range(2)
    )  # fmt: skip
    run(program, mine, (1,), outputs=("y", "z"))
    for schedule in SCHEDULES:
        emulated(program, schedule, other, (1,))
        assert all(np.array_equal(mine[name], other[name]) for name in ("y", "z")), schedule
