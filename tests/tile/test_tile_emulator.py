"""The emulator of the thread IR means what the interpreter means, and refuses what compiled code would do silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import random_programs as generate
from tile_runs import copy_of, same
from tile_threads import SHARED, TID, B, F, N, at

from tilewright.tile import RunError
from tilewright.tile.dtypes import boolean, float32
from tilewright.tile.errors import RaceError
from tilewright.tile.ir.thread_ir import (
    Array,
    Barrier,
    For,
    Function,
    If,
    Let,
    Load,
    Parameter,
    Statement,
    Store,
    Type,
)
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle.emulator import run
from tilewright.tile.oracle.interpreter import Order
from tilewright.tile.oracle.interpreter import run as interpret


def function(body: list[Statement], threads: int = 64, arrays: tuple[Array, ...] = (), lanes: int = 1) -> Function:
    views = [Parameter(f"p_{v}", "pointer", v, 0, float32) for v in "xy"]
    return Function("k", lanes, threads, 1, [*views, TID], list(arrays), body, frozenset("x"))


def go(body: list[Statement], x: Any = 64, outputs: tuple[str, ...] = (), **how: Any) -> np.ndarray:
    x = np.arange(x, dtype=np.float32) if isinstance(x, int) else x
    y = np.zeros(256, np.float32)
    run(function(body, **how), {"x": x, "y": y}, (1,), outputs=outputs)
    return y


@pytest.mark.parametrize("seed", range(100))
def test_random_programs_mean_what_the_interpreter_says(seed: int) -> None:
    found, lanes = generate.sample(seed), (4, 8, 16)[seed % 3]
    wanted, mine = ({n: copy_of(v) for n, v in found.arguments.items()} for _ in range(2))
    interpret(found.program, wanted, found.grid, outputs=found.outputs, order=Order(lanes, 4, 16))
    run(lower(found.program, lanes), mine, found.grid, outputs=found.outputs)
    for name, dtype in found.types.items():
        assert same(mine[name], wanted[name], dtype), name


def test_an_fma_is_rounded_once() -> None:
    x = np.array([1 - 2**-23, 1 + 2**-23, 16777218], np.float32)
    body = [Load(f"v{i}", F, "p_x", i) for i in range(3)]
    y = go([*body, Let("r", F, "fma", ("v0", "v1", "v2")), Store("p_y", F, 0, "r")], x, threads=1)
    assert y[0] == 16777218.0


def test_shuffles_reach_the_thread_that_the_mask_leads_to() -> None:
    y = go([Load("v", F, "p_x", "tid"), Let("o", F, "shuffle_xor", ("v", 5)), Store("p_y", F, "tid", "o")])
    assert y[:64].tolist() == [t ^ 5 for t in range(64)]


def test_threads_count_as_far_as_each_one_goes() -> None:
    count = Let("n", N, "and", ("tid", 3))
    y = go([count, For("k", 0, "n", 1, [Let("a", N, "mul", ("tid", 4)), Let("b", N, "add", ("a", "k")),
                                        Store("p_y", F, "b", 1.0)])])  # fmt: skip
    assert y.reshape(64, 4).sum(1).tolist() == [t % 4 for t in range(64)]


def test_padding_may_be_read_while_nothing_comes_of_it() -> None:
    """Lanes that a `select` or a count leaves out; what a store or an address would take is refused."""
    wide, arrays = Type(float32, 4), (Array("s", float32, 8),)
    start: list[Statement] = [Store("s", F, 0, 2.0), Load("v", wide, "s", 0)]
    below = Let("m", Type(boolean, 4), "below", (1,), operands=N)
    chosen = Let("c", wide, "select", ("m", "v", 0.0), operands=wide)
    y = go([*start, below, chosen, Store("p_y", wide, 0, "c"), Store("p_y", wide, 8, "v", count=1)], threads=1,
           arrays=arrays, lanes=4)  # fmt: skip
    assert y[:9].tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 2]
    with pytest.raises(RunError, match=r"k.py:3: store to y of what comes from memory that nobody has written"):
        go([*start, Let("d", wide, "add", ("v", 1.0)), Store("p_y", wide, 0, "d", line=at(3))], threads=1,
           arrays=arrays, lanes=4)  # fmt: skip
    address = Let("i", N, "cast", ("f",), operands=F, mode="toward_zero saturate")
    with pytest.raises(RunError, match="an address comes from memory"):
        go([Load("f", F, "s", 0), address, Store("p_y", F, "i", 1.0)], threads=1, arrays=arrays)
    with pytest.raises(RunError, match="a condition comes from memory"):
        go([Load("f", F, "s", 0), Let("b", B, "gt", ("f", 0.0), operands=F), If("b", [])], threads=1, arrays=arrays)


def test_unwritten_memory_is_followed_through_memory_and_variables() -> None:
    arrays = (Array("s", float32, 64, shared=True), Array("r", float32, 64, shared=True))
    body = [Load("v", F, "s", "tid"), Store("r", F, "tid", "v"), Load("u", F, "r", "tid"), Store("p_y", F, "tid", "u")]
    with pytest.raises(RunError, match="that nobody has written"):
        go(body, arrays=arrays)


def test_an_output_is_poisoned_and_not_read_before_it_is_written() -> None:
    with pytest.raises(RunError, match=r"k.py:7: load of y: nobody has written there"):
        go([Load("v", F, "p_y", 3, line=at(7))], outputs=("y",), threads=1)
    assert np.isnan(go([Store("p_y", F, 3, 1.0)], outputs=("y",), threads=1)).sum() == 255


def test_no_access_leaves_its_tensor() -> None:
    with pytest.raises(RunError, match=r"k.py:7: load of x: element 64 is none of its"):
        go([Let("i", N, "add", ("tid", 1)), Load("v", F, "p_x", "i", line=at(7))])
    with pytest.raises(RunError, match="element 1 is none of its"):  # between two elements
        go([Load("v", F, "p_x", 1)], np.zeros((4, 8), np.float32)[:, ::2], threads=1)
    back = np.arange(8, dtype=np.float32)[::-1]
    assert go([Load("v", F, "p_x", -7), Store("p_y", F, 0, "v")], back, threads=1)[0] == 0.0


def test_an_address_is_aligned_as_it_says() -> None:
    wide = Type(float32, 4)
    go([Load("v", wide, "p_x", 4, align=16)], threads=1, lanes=4)
    with pytest.raises(RunError, match="no multiple of 16 bytes"):
        go([Load("v", wide, "p_x", 2, align=16)], threads=1, lanes=4)


def test_a_race_names_memory_threads_and_lines() -> None:
    other = Let("o", N, "xor", ("tid", 33))
    body = [Store("s", F, "tid", 1.0, line=at(3)), other, Load("v", F, "s", "o", line=at(4))]
    message = r"k.py:4: s, place 0: thread 0 wrote at k.py:3, and thread 33 reads at k.py:4, with no barrier between"
    with pytest.raises(RaceError, match=message):
        go(body, arrays=SHARED)
    with pytest.raises(RaceError, match="thread 0 wrote"):  # a warp's barrier is not enough
        go([body[0], Barrier("warp"), *body[1:]], arrays=SHARED)
    go([body[0], Barrier("block"), *body[1:]], arrays=SHARED)


def test_a_warp_is_ordered_by_its_own_barriers() -> None:
    other = Let("o", N, "xor", ("tid", 1))
    body = [Store("p_y", F, "tid", 1.0), other, Load("v", F, "p_y", "o")]
    with pytest.raises(RaceError):
        go(body)
    go([body[0], Barrier("warp"), *body[1:]])


@pytest.mark.parametrize("readers", ((3,), (3, 5), (3, 40), (3, 5, 40), (40, 3)))
@pytest.mark.parametrize("writer", (3, 5, 40, 7))
@pytest.mark.parametrize("barrier", ("", "warp"))
def test_a_write_races_with_whoever_has_read(readers: tuple[int, ...], writer: int, barrier: str) -> None:
    """Of many readers only some are remembered: enough to see any race."""

    def alone(thread: int, statement: Statement) -> list[Statement]:
        name = f"b{thread}{'w' if isinstance(statement, Store) else ''}"
        return [Let(name, B, "eq", ("tid", thread), operands=N), If(name, [statement])]

    body = [s for r in readers for s in alone(r, Load(f"v{r}", F, "p_y", 0))]
    body += [Barrier("warp")] if barrier else []
    body += alone(writer, Store("p_y", F, 0, 1.0))
    meets = [r for r in readers if r != writer and not (barrier and r // 32 == writer // 32)]
    if not meets:
        go(body)
        return
    with pytest.raises(RaceError, match=f"and thread {writer} writes") as raised:
        go(body)
    assert any(f"thread {r} read" in str(raised.value) for r in meets)


def test_two_threads_do_not_write_one_place() -> None:
    with pytest.raises(RaceError, match="thread 0 writes, and thread 63 writes"):
        go([Store("p_y", F, 0, 1.0)])


def test_arguments_that_share_memory_share_their_races() -> None:
    y = np.zeros(65, np.float32)
    body = [Load("v", F, "p_x", "tid"), Store("p_y", F, "tid", "v")]
    run(function(body), {"x": y, "y": y}, (1,))
    with pytest.raises(RaceError):
        run(function(body), {"x": y[:-1], "y": y[1:]}, (1,))


def test_all_threads_come_to_a_barrier_and_to_a_shuffle() -> None:
    some = Let("b", B, "lt", ("tid", 40), operands=N)
    with pytest.raises(RaceError, match="a barrier of the block that thread 40 does not reach"):
        go([some, If("b", [Barrier("block")])])
    with pytest.raises(RaceError, match="does not reach"):
        go([some, If("b", [Barrier("warp")])])
    with pytest.raises(RaceError, match="a shuffle that not all threads"):
        go([some, If("b", [Let("v", F, "shuffle_xor", (1.0, 1))])])
    whole = Let("b", B, "lt", ("tid", 32), operands=N)
    go([whole, If("b", [Barrier("warp")])])


def test_instances_are_unordered_but_not_racing_here() -> None:
    """What two instances do is not looked at: each has its own epoch."""
    y = np.zeros(256, np.float32)
    run(function([Store("p_y", F, "tid", 1.0)]), {"x": y.copy(), "y": y}, (3,))
    assert y.sum() == 64
