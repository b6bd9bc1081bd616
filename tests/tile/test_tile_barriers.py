"""Barriers, held against the emulator: with them there is no race, and without any one of them there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import random_programs as generate
from tile_threads import B, F, N, T, at, barriers, function, go, without_each

from tilewright import tile
from tilewright.ops.norm.tile import norm
from tilewright.tile import LowerError, ViewType
from tilewright.tile.dtypes import float32
from tilewright.tile.errors import RaceError
from tilewright.tile.ir.thread_ir import (
    Array,
    Assign,
    Barrier,
    Declare,
    For,
    Function,
    If,
    Let,
    Load,
    Statement,
    Store,
)
from tilewright.tile.ir.thread_uniform import Uniform
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.lang.library import softmax
from tilewright.tile.layout.linear import blocked
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.schedule import Schedule
from tilewright.tile.sync.barriers import insert
from tilewright.tile.sync.shared import arrange


def check(bare: Function, scopes: str) -> Function:
    """The barriers of a function, in order; each is needed."""
    made = insert(bare)
    verify(made)
    assert " ".join(b.scope for b in barriers(made)) == scopes
    arena = arrange(made).offsets
    go(made, arena)
    for mutant in without_each(made):
        with pytest.raises(RaceError):
            go(mutant, arena)
    return made


def summed(array: str, v: str) -> list[Statement]:
    """`v` summed over both warps, as `{v}t` in each thread."""
    body: list[Statement] = []
    total = v
    for mask in (1, 2, 4, 8, 16):
        body += [
            Let(f"{v}o{mask}", F, "shuffle_xor", (total, mask)),
            Let(f"{v}s{mask}", F, "add", (total, f"{v}o{mask}")),
        ]
        total = f"{v}s{mask}"
    body += [Let(f"{v}l", N, "and", ("tid", 31)), Let(f"{v}f", B, "eq", (f"{v}l", 0), operands=N),
             Let(f"{v}w", N, "shr", ("tid", 5)), Let(f"{v}m", N, "and", ("tid", 1)),
             If(f"{v}f", [Store(array, F, f"{v}w", total, line=at(1))]),
             Load(f"{v}p", F, array, f"{v}m", line=at(2)),
             Let(f"{v}po", F, "shuffle_xor", (f"{v}p", 1)), Let(f"{v}t", F, "add", (f"{v}p", f"{v}po"))]  # fmt: skip
    return body


def test_a_reduction_across_warps_has_one_barrier_and_one_result() -> None:
    body = [Load("v", F, "p_x", "tid"), *summed("s", "v"), Store("p_y", F, "tid", "vt")]
    made = check(function(body), "block")
    assert (go(made)[:T] == sum(range(T))).all()
    assert barriers(made)[0].why == "s: store at k.py:1, then load at k.py:2"
    found = Uniform(made)
    assert (found.bits("vs16"), found.bits("vp"), found.bits("vt")) == (32, 1, 0)


def test_a_second_reduction_uses_another_array_without_a_barrier_between() -> None:
    more = [Let("u", F, "mul", ("vt", 2.0)), *summed("r", "u"), Store("p_y", F, "tid", "ut")]
    body = [Load("v", F, "p_x", "tid"), *summed("s", "v"), *more]
    two = (Array("s", float32, 2, shared=True), Array("r", float32, 2, shared=True))
    check(function(body, arrays=two), "block block")


def test_a_loop_of_reductions_parts_each_from_the_next() -> None:
    body = [For("k", 0, "a_n", 1, [Load("v", F, "p_x", "tid"), *summed("s", "v")])]
    check(function(body), "block block")


def test_a_transpose_through_shared_memory() -> None:
    rows, columns = Let("a", N, "shr", ("tid", 3)), Let("b", N, "and", ("tid", 7))
    back = [Let("c", N, "mul", ("b", 8)), Let("d", N, "add", ("a", "c"))]
    body = [Load("v", F, "p_x", "tid"), Store("s", F, "tid", "v"), rows, columns, *back, Load("u", F, "s", "d"),
            Store("p_y", F, "tid", "u")]  # fmt: skip
    made = check(function(body), "block")
    assert np.array_equal(go(made)[:T].reshape(8, 8), np.arange(T, dtype=np.float32).reshape(8, 8).T)
    check(
        function([Store("s", F, "tid", 1.0), Let("o", N, "xor", ("tid", 5)), Load("u", F, "s", "o")], threads=32),
        "warp",
    )


def test_a_loop_that_reads_and_then_overwrites() -> None:
    """Iteration i meets i + 1; the first store is parted before the loop's own barrier serves."""
    turn = [Let("o", N, "add", ("tid", 1)), Let("i", N, "and", ("o", T - 1))]
    loop = For("k", 0, "a_n", 1, [*turn, Load("v", F, "s", "i"), Store("s", F, "tid", "v")])
    body = [Load("x", F, "p_x", "tid"), Store("s", F, "tid", "x"), loop, Load("u", F, "s", "tid"),
            Store("p_y", F, "tid", "u")]  # fmt: skip
    made = check(function(body), "block block")
    assert all(isinstance(s, (Barrier, For, Load, Store)) for s in made.body)
    assert go(made)[:T].tolist() == [(t + 3) % T for t in range(T)]


def test_a_barrier_stands_before_a_loop_that_only_reads() -> None:
    loop = For("k", 0, 3, 1, [Let("o", N, "xor", ("tid", "k")), Load("v", F, "s", "o")])
    made = check(function([Store("s", F, "tid", 1.0), loop]), "block")
    assert isinstance(made.body[1], Barrier)


def test_a_barrier_stands_before_what_not_all_threads_enter() -> None:
    some = Let("c", B, "lt", ("tid", 40), operands=N)
    read = [Let("o", N, "xor", ("tid", 7)), Load("v", F, "s", "o")]
    made = check(function([Store("s", F, "tid", 1.0), some, If("c", read)]), "block")
    assert isinstance(made.body[2], Barrier)
    inside = [*read, Store("s", F, "tid", "v")]
    with pytest.raises(LowerError, match="s: a barrier is needed between a load and a store, where not all threads"):
        insert(function([some, If("c", inside)]))


def test_a_barrier_is_within_a_condition_that_all_threads_share() -> None:
    all_or_none = Let("c", B, "gt", ("a_n", 2), operands=N)
    read = [Let("o", N, "xor", ("tid", 7)), Load("v", F, "s", "o")]
    made = check(function([Store("s", F, "tid", 1.0), all_or_none, If("c", read)]), "block")
    assert not any(isinstance(s, Barrier) for s in made.body)


def test_a_store_to_a_view_is_read_by_other_threads() -> None:
    turn = Let("o", N, "sub", (T - 1, "tid"))
    body = [Store("p_y", F, "tid", 2.0), turn, Load("v", F, "p_y", "o"), Let("h", N, "add", ("tid", T)),
            Store("p_y", F, "h", "v")]  # fmt: skip
    check(function(body[:3]), "block")
    found = function([Load("v", F, "p_x", "o") if s is body[2] else s for s in body])
    assert not barriers(insert(found))  # each thread's own, as far as all threads together go
    found.inplace = frozenset({frozenset("xy")})
    assert [b.scope for b in barriers(insert(found))] == ["block", "block"]


def test_an_owner_sees_what_it_wrote() -> None:
    first = Let("f", B, "eq", ("tid", 0), operands=N)
    mine = [If("f", [Store("s", F, 0, 1.0)]), If("f", [Load("v", F, "s", 0), Store("p_y", F, 0, "v")])]
    assert go(check(function([first, *mine]), ""))[0] == 1.0
    check(function([first, mine[0], Load("u", F, "s", 0)]), "block")
    other = Let("g", B, "eq", ("tid", 1), operands=N)
    check(function([first, other, mine[0], If("g", [Load("u", F, "s", 0)])]), "block")


def test_what_changes_is_no_proof_that_one_thread_is_meant() -> None:
    """An owner that a loop moves on, and an index that is a variable."""
    each = Let("f", B, "eq", ("tid", "k"), operands=N)
    check(function([For("k", 0, 3, 1, [each, If("f", [Store("s", F, 0, 1.0)])])]), "block")
    index = [Declare("v", N, 0), Let("i", N, "add", ("v", "tid")), Store("s", F, "i", 1.0), Assign("v", N, 1)]
    body = [*index, Let("j", N, "add", ("v", "tid")), Load("u", F, "s", "j")]
    check(function(body, arrays=(Array("s", float32, T + 1, shared=True),)), "block")


def test_layouts_say_who_meets_whom() -> None:
    """Equal layouts need nothing, a shuffle's distance a barrier of the warp, another warp one of the block."""

    def scopes(target: Any) -> list[str]:
        plain = blocked({"x": T}, 1, 32, 2)
        return [b.scope for b in barriers(insert(function([
            Store("s", F, "tid", 1.0, layout=plain), Load("v", F, "s", "tid", layout=target)])))]  # fmt: skip

    plain = blocked({"x": T}, 1, 32, 2)
    swapped = type(plain)(plain.reg, plain.lane[::-1], plain.warp, plain.axes)
    crossed = type(plain)(plain.reg, (*plain.lane[:4], plain.warp[0]), (plain.lane[4],), plain.axes)
    assert [scopes(t) for t in (plain, swapped, crossed, None)] == [[], ["warp"], ["block"], []]


def test_a_warp_barrier_does_for_later_ones_too() -> None:
    a, b = (Array(n, float32, 32, shared=True) for n in "ab")
    turn = Let("o", N, "xor", ("tid", 3))
    body = [Store("a", F, "tid", 1.0), Store("b", F, "tid", 1.0), turn, Load("v", F, "a", "o"), Load("u", F, "b", "o")]
    check(function(body, threads=32, arrays=(a, b)), "warp")


def test_rows_that_do_not_reach_into_the_next_need_no_barrier() -> None:
    """Row k of 24 elements, of which each of the first 24 threads has one; rows of 20 would overlap."""

    def rows(width: int) -> Function:
        inside = [Let("r", N, "mul", ("k", width)), Let("i", N, "add", ("r", "tid")), Store("s", F, "i", 1.0)]
        return function([Let("c", B, "lt", ("tid", 24), operands=N), For("k", 0, 2, 1, [If("c", inside)])])

    check(rows(24), "")
    check(rows(20), "block")


def test_a_whole_round_further_is_still_the_threads_own() -> None:
    step = [Let("i", N, "add", ("c", "tid"))]
    loop = For("c", 0, 2 * T, T, [*step, Store("p_y", F, "i", 1.0)])
    again = For("d", 0, 2 * T, T, [Let("j", N, "add", ("d", "tid")), Load("v", F, "p_y", "j")])
    check(function([loop, again]), "")
    shifted = For("d", 0, 2 * T, T, [Let("h", N, "add", ("d", 1)), Let("j", N, "add", ("h", "tid")),
                                     Load("v", F, "p_y", "j")])  # fmt: skip
    check(function([loop, shifted]), "block")


# Whole kernels --------------------------------------------------------------------------------------------------------


def row_softmax(t: Any, x: Any, y: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    t.store(y[row, col], softmax(t, t.load(x[row, col]).f32()).to(y.dtype))


def programs(width: int) -> dict[str, Any]:
    row, flat = ViewType(tile.bfloat16, (None, width), align=16), ViewType(float32, (width,), align=16)
    one = ViewType(float32, (None,))
    named = {"x": row, "y": row, "weight": flat, "bias": None, "mean": one, "rstd": one, "eps": float32, "offset": None,
             "center": True, "divide": True, "cast": False}  # fmt: skip
    return {"norm": norm.trace(named),
            "softmax": tile.kernel(row_softmax, static={"x": (1,)}).trace({"x": row, "y": row})}  # fmt: skip


@pytest.mark.parametrize("kernel", ("norm", "softmax"))
@pytest.mark.parametrize("schedule", (Schedule(128, 1, 8), Schedule(32, 4, 8), Schedule(64, 1, 8, registers=0)))
@pytest.mark.parametrize("width", (1000, 1024))
def test_kernels_agree_and_need_each_barrier(kernel: str, schedule: Schedule, width: int) -> None:
    numbers, program = np.random.default_rng(width), programs(width)[kernel]
    given = {n: numbers.normal(size=(2, width)).astype(np.float32) for n in ("x", "y")}
    given = {n: tile.bfloat16.encode(v) for n, v in given.items()}
    given |= {"weight": numbers.normal(size=width).astype(np.float32)}
    given |= {n: np.zeros(2, np.float32) for n in ("mean", "rstd")}
    wanted, mine = ({n: v.copy() for n, v in given.items()} | {"eps": 1e-6} for _ in range(2))
    outputs = ("y", "mean", "rstd") if kernel == "norm" else ("y",)
    run(program, wanted, (2,), outputs=outputs, order=Order(schedule.vector, 1, 16, schedule.threads))
    made = insert(lower(program, schedule.vector, schedule))
    arena = arrange(made).offsets
    emulator.run(made, mine, (2,), outputs=outputs, arena=arena)
    assert all(np.array_equal(mine[n], wanted[n]) for n in outputs)
    assert len(barriers(made)) == (2 if schedule.threads > 32 else 0)
    for mutant in without_each(made):
        with pytest.raises(RaceError):
            emulator.run(mutant, mine, (2,), outputs=outputs, arena=arena)


def test_what_moves_along_the_threads_in_a_loop_goes_from_thread_to_thread() -> None:
    """An element is another thread's in the next iteration: no layout may say that it stays."""

    def shift(t: Any, z: Any) -> None:
        col = t.arange(60)
        for i in t.range(3):
            t.store(z[0, col + i], t.load(z[0, col + i]) * 2.0 + 1.0)

    view = ViewType(float32, (None, 64), align=16)
    program = tile.kernel(shift, static={"z": (1,)}).trace({"z": view})
    wanted, mine = (np.arange(64, dtype=np.float32).reshape(1, 64) for _ in range(2))
    run(program, {"z": wanted}, (1,))
    made = insert(lower(program, 4, Schedule(32, 1, 4)))
    emulator.run(made, {"z": mine}, (1,))
    assert np.array_equal(mine, wanted) and len(barriers(made)) == 1


def test_all_threads_have_the_same_zero() -> None:
    """Of 0 and -0 a maximum is the second, whichever thread asks."""

    def inverse(t: Any, x: Any, y: Any) -> None:
        col = t.arange(64)
        t.store(y[0, col], 1.0 / t.max(t.load(x[0, col])))

    view = ViewType(float32, (None, 64))
    program = tile.kernel(inverse).trace({"x": view, "y": view})
    x = np.where(np.arange(64) % 3 == 0, -0.0, 0.0).astype(np.float32).reshape(1, 64)
    for threads in (32, 64):
        y = np.zeros_like(x)
        emulator.run(insert(lower(program, 1, Schedule(threads, 1, 1))), {"x": x, "y": y}, (1,))
        assert len(np.unique(y)) == 1


def test_random_programs_do_not_race_and_few_barriers_are_idle() -> None:
    """Some are idle by the data: one element that its own thread reads again."""
    idle = total = 0
    for seed in range(24):
        found, schedule = generate.sample(seed), Schedule(*((32, 1, 4), (64, 1, 2), (128, 1, 1))[seed % 3])
        made = insert(lower(found.program, schedule.vector, schedule))
        emulator.run(made, {n: np.copy(v) for n, v in found.arguments.items()}, found.grid, outputs=found.outputs)
        for mutant in without_each(made):
            total += 1
            try:
                arguments = {n: np.copy(v) for n, v in found.arguments.items()}
                emulator.run(mutant, arguments, found.grid, outputs=found.outputs)
                idle += 1
            except RaceError:
                pass
    assert total > 30 and idle <= total // 4
