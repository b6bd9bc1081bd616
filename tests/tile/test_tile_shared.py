"""Where shared arrays lie, and the verifier's rules for functions that several threads run."""

from __future__ import annotations

import pytest
from tile_threads import TID, B, F, N, function, go

from tilewright.tile import LowerError, VerifyError
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
    Type,
)
from tilewright.tile.ir.thread_verify import verify
from tilewright.tile.layout.linear import blocked
from tilewright.tile.sync.barriers import insert
from tilewright.tile.sync.shared import Arena, arrange


def turned(array: str, to: str) -> list[Statement]:
    """Through an array, each thread to another."""
    index = Let(f"o{array}", N, "xor", ("tid", 33))
    return [Store(array, F, "tid", 1.0), index, Load(to, F, array, f"o{array}")]


def test_arrays_share_bytes_across_a_barrier_that_is_there_anyway() -> None:
    a, b, c = (Array(n, float32, e, shared=True) for n, e in (("a", 64), ("b", 64), ("c", 70)))
    body = [*turned("a", "u"), *turned("b", "v"), *turned("c", "w")]
    made = insert(function(body, arrays=(a, b, c)))
    assert arrange(made) == Arena({"c": 0, "a": 0, "b": 288}, 544)  # c waits for b's barrier, which parts it from a
    go(made, arrange(made).offsets)
    with pytest.raises(RaceError):
        go(made, {"c": 0, "a": 0, "b": 0})


def test_a_loop_keeps_what_it_uses_and_a_branch_parts_nothing_around_it() -> None:
    a, b = (Array(n, float32, 64, shared=True) for n in "ab")
    loop = For("k", 0, "a_n", 1, [*turned("a", "u"), *turned("b", "v")])
    assert arrange(insert(function([loop], arrays=(a, b)))).size == 512
    some = Let("c", B, "gt", ("a_n", 5), operands=N)
    before, inside, after = turned("a", "u"), Barrier("block"), turned("b", "v")
    assert arrange(function([*before, inside, *after], arrays=(a, b))).size == 256
    assert arrange(function([*before, some, If("c", [inside]), *after], arrays=(a, b))).size == 512


def test_what_does_not_fit_is_named_before_compiling() -> None:
    a, b = Array("a", float32, 40000, shared=True), Array("b", float32, 30000, shared=True)
    body = [Store("a", F, "tid", 1.0), Store("b", F, "tid", 1.0)]
    with pytest.raises(
        LowerError, match=r"needs 280000 bytes of shared memory; there are 232448 \(a 160000, b 120000\)"
    ):
        arrange(function(body, arrays=(a, b)))
    few = Function("k", 1, 32, 4, [TID], [Array("a", float32, 4000, shared=True)], [Store("a", F, "tid", 1.0)])
    with pytest.raises(LowerError, match="of 4 instances needs 64000 bytes of shared memory; there are 49152"):
        arrange(few, 49152)


def test_the_verifier_knows_what_threads_must_do_together() -> None:
    some, warps = Let("c", B, "lt", ("tid", 40), operands=N), Let("w", N, "shr", ("tid", 5))
    half = Let("h", B, "eq", ("w", 0), operands=N)
    with pytest.raises(VerifyError, match="a barrier of the block is under a condition that differs"):
        verify(function([some, If("c", [Barrier("block")])]))
    with pytest.raises(VerifyError, match="the shuffle v is under a condition"):
        verify(function([some, If("c", [Let("v", F, "shuffle_xor", (1.0, 1))])]))
    with pytest.raises(VerifyError, match="a barrier of the block"):
        verify(function([For("k", 0, "tid", 1, [Barrier("block")])]))
    verify(function([warps, half, If("h", [Barrier("warp"), Let("v", F, "shuffle_xor", (1.0, 1))])]))
    with pytest.raises(VerifyError, match="a barrier of the block"):
        verify(function([warps, half, If("h", [Barrier("block")])]))
    with pytest.raises(VerifyError, match="goes by 32, which leads out of the warp"):
        verify(function([Let("v", F, "shuffle_xor", (1.0, 32))]))


def test_a_variable_that_some_threads_assign_differs() -> None:
    some = Let("c", B, "lt", ("tid", 40), operands=N)
    body = [some, Declare("v", N, 0), If("c", [Assign("v", N, 1)]), For("k", 0, "v", 1, [Barrier("block")])]
    with pytest.raises(VerifyError, match="a barrier of the block"):
        verify(function(body))


def test_the_verifier_knows_alignment_and_layouts() -> None:
    wide = Type(float32, 4)
    for align in (2, 12, 32):
        with pytest.raises(VerifyError, match=f"of 16 bytes is aligned to {align}"):
            verify(function([Load("v", wide, "p_x", 0, align=align)]))
    with pytest.raises(VerifyError, match="by 64 threads of 1 lanes has a layout of 32 of 1"):
        verify(function([Load("v", F, "p_x", "tid", layout=blocked({"x": 32}, 1, 32, 1))]))
