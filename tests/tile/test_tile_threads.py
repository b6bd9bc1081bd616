"""Programs lowered for the threads of a GPU give the interpreter's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import random_programs as generate
from tile_runs import copy_of, same

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.ir.thread_ir import Function, Load, Store
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.schedule import Schedule
from tilewright.tile.sync import barriers
from tilewright.tile.sync.shared import arrange


def emulate(function: Function, arguments: dict[str, Any], grid: tuple[int, ...], outputs: Any = ()) -> None:
    """With barriers, and shared arrays in each other's place."""
    made = barriers.insert(function)
    verify(made)
    emulator.run(made, arguments, grid, outputs=outputs, arena=arrange(made).offsets)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_agree_bit_for_bit(seed: int) -> None:
    found = generate.sample(seed)
    schedule = Schedule(*((32, 1, 4), (64, 1, 2), (128, 1, 1), (32, 4, 8))[seed % 4])
    wanted = {n: copy_of(v) for n, v in found.arguments.items()}
    mine = {n: copy_of(v) for n, v in found.arguments.items()}
    order = Order(schedule.vector, 1, 16, schedule.threads)
    run(found.program, wanted, found.grid, outputs=found.outputs, order=order)
    emulate(lower(found.program, schedule.vector, schedule), mine, found.grid, found.outputs)
    for name in found.types:
        assert same(mine[name], wanted[name], found.types[name]), name


def _norm(t: Any, x: Any, r: Any, w: Any, h: Any, y: Any, s: Any) -> None:
    """rms_norm of a sum, rounded to int8 by the row's largest."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = (t.load(x[row, col]).f32() + t.load(r[row, col]).f32()).to(h.dtype)
    t.store(h[row, col], v)
    v = v.f32()
    n = v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[col]).f32()
    scale = t.max(t.abs(n)) / 127.0
    t.store(s[row], scale)
    t.store(y[row, col], (n / scale).to(y.dtype, round="nearest_even", saturate=True))


def _program(width: int | Most) -> Any:
    half, align = tile.bfloat16, 16
    row = {"sizes": (None, width), "align": align}
    views = {n: ViewType(half, **row) for n in ("x", "r", "h")}
    views |= {"w": ViewType(half, (width,), align=align), "y": ViewType(tile.int8, **row)}
    return tile.kernel(_norm, static=dict.fromkeys(("x", "r", "h", "y"), (1,))).trace(
        {**views, "s": ViewType(tile.float32, (None,))}
    )


@pytest.mark.parametrize("threads", (32, 256))
@pytest.mark.parametrize("width, known", ((1000, 1000), (4096, 4096), (16384, 16384), (3000, Most(4096))))
def test_a_fused_norm_agrees_bit_for_bit(threads: int, width: int, known: int | Most) -> None:
    numbers, half = np.random.default_rng(width), tile.bfloat16
    given = {n: half.encode(numbers.normal(size=(2, width)).astype(np.float32)) for n in ("x", "r", "h")}
    given |= {"w": half.encode(numbers.normal(size=width).astype(np.float32)), "y": np.zeros((2, width), np.int8)}
    given["s"] = np.zeros(2, np.float32)
    program, schedule = _program(known), Schedule(threads, 1, 8)
    wanted, mine, other = ({n: v.copy() for n, v in given.items()} for _ in range(3))
    run(program, wanted, (2,), order=Order(8, 1, 16, threads))
    run(program, other, (2,), order=Order(8, 1, 16, 2 * threads))
    function = lower(program, 8, schedule)
    emulate(function, mine, (2,))
    for name in ("h", "y", "s"):
        assert np.array_equal(mine[name].view(np.uint8), wanted[name].view(np.uint8)), name
    if width == 3000:
        assert not np.array_equal(other["s"], wanted["s"])  # else the order is not seen
    arrays = {a.elements > 32 for a in function.arrays}
    assert (True in arrays) == (width == 3000 or (threads == 32 and width > 2048) or width == 16384)


def test_where_a_tile_waits_and_what_is_aligned() -> None:
    function = lower(_program(4096), 8, Schedule(256, 1, 8))
    assert [a.elements for a in function.arrays] == [8, 8]  # one a fold: tiles are in registers
    wide = [s for s in function.statements() if isinstance(s, (Load, Store)) and s.type.lanes > 1]
    assert wide and all(s.align == 8 * s.type.dtype.itemsize and s.count is None for s in wide)


def test_nothing_is_aligned_that_nobody_promised() -> None:
    program = _program(4096)
    program.views = {n: replace(v, align=0) for n, v in program.views.items()}  # type: ignore[attr-defined]
    function = lower(program, 8, Schedule(256, 1, 8))
    wide = [s for s in function.statements() if isinstance(s, (Load, Store)) and s.type.lanes > 1]
    assert wide and all(s.align == s.type.dtype.itemsize for s in wide)


def test_an_index_that_is_loaded_and_then_overwritten_leads_where_it_led() -> None:
    @tile.kernel(static={"x": (0,)})
    def taken(t: Any, i: Any, x: Any, y: Any) -> None:
        c = t.arange(x.shape[0])
        at = t.load(i[c])
        t.store(i[c], 0)
        t.store(y[c], t.load(x[at]))

    f32 = tile.float32
    program = taken.trace({"i": ViewType(tile.int64, (50,)), "x": ViewType(f32, (50,)), "y": ViewType(f32, (50,))})
    x = np.arange(50, dtype=np.float32)
    given = {"i": np.arange(50)[::-1].copy(), "x": x, "y": np.zeros(50, np.float32)}
    schedule = Schedule(64, 1, 1)
    emulate(lower(program, schedule.vector, schedule), given, (1,), ("y",))
    assert np.array_equal(given["y"], x[::-1]) and not given["i"].any()
