"""What the front end refuses, each with the author's line, and what it makes of loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tilewright import tile
from tilewright.tile import TraceError, VerifyError, ViewType
from tilewright.tile.ir import tile_verify
from tilewright.tile.ir.text import program_text
from tilewright.tile.ir.tile_ir import Most, Node
from tilewright.tile.lang.kernel import Kernel

F32 = tile.float32
ROWS = ViewType(F32, (None, Most(64)))


def trace(function: Callable[..., None], static: dict[str, tuple[int, ...]] | None = None, **types: Any) -> Any:
    made: Kernel = tile.kernel(function, static={"x": (1,)} if static is None else static)
    return made.trace({"x": ROWS, "y": ROWS, **types})


def truth(t: Any, x: Any, y: Any) -> None:
    if t.load(x[0, 0]) > 0.0:
        t.store(y[0, 0], 1.0)


def chained(t: Any, x: Any, y: Any) -> None:
    t.where(0 <= t.arange(4) < 3, 1.0, 0.0)


def carried(t: Any, x: Any, y: Any) -> None:
    m = t.load(x[0, 0])
    for k in t.range(3):
        m = t.maximum(m, t.load(x[0, k]))
    t.store(y[0, 0], m)


def after_its_loop(t: Any, x: Any, y: Any) -> None:
    for k in t.range(3):
        v = t.load(x[0, k])
    t.store(y[0, 0], v)


def after_its_when(t: Any, x: Any, y: Any) -> None:
    with t.when(t.program_id(0) > 1):
        v = t.load(x[0, 0])
    t.store(y[0, 0], v)


def broken(t: Any, x: Any, y: Any) -> None:
    for k in t.range(3):
        t.store(y[0, k], 0.0)
        break


def returned(t: Any, x: Any, y: Any) -> None:
    for k in t.range(3):
        t.store(y[0, k], 0.0)
        return


def rows_as_int(t: Any, x: Any, y: Any) -> None:
    if x.shape[0] == 1:
        t.store(y[0, 0], 1.0)


def rows_as_count(t: Any, x: Any, y: Any) -> None:
    t.arange(x.shape[0])


def python_range(t: Any, x: Any, y: Any) -> None:
    for _ in range(x.shape[0]):
        pass


def iterated(t: Any, x: Any, y: Any) -> None:
    for _ in t.arange(4):
        pass


def mixed(t: Any, x: Any, y: Any) -> None:
    t.load(x[0, 0]) + t.arange(4)


def divided(t: Any, x: Any, y: Any) -> None:
    t.arange(4) / 2


def shapes(t: Any, x: Any, y: Any) -> None:
    t.arange(4) + t.arange(5)


def reshaped(t: Any, x: Any, y: Any) -> None:
    t.load(x[0, t.arange(x.shape[1])]).reshape(8, 8)


def regrouped(t: Any, x: Any, y: Any) -> None:
    t.arange(12).reshape(5, 2)


def rank(t: Any, x: Any, y: Any) -> None:
    t.load(x[0])


def real_index(t: Any, x: Any, y: Any) -> None:
    t.load(x[0, 1.5])


def wrong_dtype(t: Any, x: Any, y: Any) -> None:
    t.store(y[0, 0], t.program_id(0))


def unrounded(t: Any, x: Any, y: Any) -> None:
    t.load(x[0, 0]).to(tile.int8)


def unsaturated(t: Any, x: Any, y: Any) -> None:
    t.load(x[0, 0]).to(tile.float8_e4m3fn)


def other_combine(t: Any, x: Any, y: Any) -> None:
    t.reduce(t.arange(4), "median")


def other_axis(t: Any, x: Any, y: Any) -> None:
    t.sum(t.arange(4), axis=1)


def wide_store(t: Any, x: Any, y: Any) -> None:
    t.store(y[0, 0], t.load(x[0, t.arange(4)]))


def no_step(t: Any, x: Any, y: Any) -> None:
    for _ in t.range(0, 4, 0):
        pass


def numbers(t: Any, x: Any, y: Any) -> None:
    t.maximum(1.0, 2.0)


def set_wider(t: Any, x: Any, y: Any) -> None:
    t.var(0.0).set(t.load(x[0, t.arange(4)]))


def not_a_place(t: Any, x: Any, y: Any) -> None:
    t.load(x)


def beyond_grid(t: Any, x: Any, y: Any) -> None:
    t.program_id(3)


def root_of_a_number(t: Any, x: Any, y: Any) -> None:
    t.sqrt(2.0)


def fold_of_a_place(t: Any, x: Any, y: Any) -> None:
    t.sum(x[0, t.arange(8)])


def stage_of_a_place(t: Any, x: Any, y: Any) -> None:
    t.stage(x[0, t.arange(8)], "shared")


@pytest.mark.parametrize(
    ("function", "says", "line"),
    [
        (truth, "t.where for values, t.when for effects", 1),
        (chained, "chained", 1),
        (carried, "carry it in a t.var", 3),
        (after_its_loop, "has ended", 3),
        (after_its_when, "has ended", 3),
        (broken, "t.when", 1),
        (returned, "t.when", 1),
        (rows_as_int, "no truth value", 1),
        (rows_as_count, "static={'x': (0,)}", 1),
        (python_range, "list the size in `static`", 1),
        (iterated, "t.range", 1),
        (mixed, "cast one with .f32()", 1),
        (divided, "integers divide with //", 1),
        (shapes, "do not broadcast", 1),
        (reshaped, "load the tile in its final shape", 1),
        (regrouped, "does not reshape", 1),
        (rank, "2 axes; 1 indices", 1),
        (real_index, "needs a tile or an int", 1),
        (wrong_dtype, "round it with .to()", 1),
        (unrounded, "say round=", 1),
        (unsaturated, "no infinity", 1),
        (other_combine, "takes and, max", 1),
        (other_axis, "axis 1", 1),
        (wide_store, "for a place of shape []", 1),
        (no_step, "needs 1 or more", 1),
        (numbers, "neither 1.0 nor 2.0", 1),
        (set_wider, "the variable holds float32[]", 1),
        (not_a_place, "takes a place", 1),
        (beyond_grid, "axes 0, 1, 2", 1),
        (root_of_a_number, "takes a tile", 1),
        (fold_of_a_place, "neither a tile nor", 1),
        (stage_of_a_place, "neither a tile nor", 1),
    ],
    ids=lambda v: v.__name__ if callable(v) else None,
)
def test_what_is_refused_names_the_line(function: Callable[..., None], says: str, line: int) -> None:
    with pytest.raises(TraceError) as caught:
        trace(function)
    assert says.lower() in str(caught.value).lower()
    assert caught.value.line is not None
    assert caught.value.line.number == inspect.getsourcelines(function)[1] + line, caught.value
    assert caught.value.line.file == __file__


def test_storage_types_have_no_arithmetic() -> None:
    def half(t: Any, x: Any, y: Any, h: Any) -> None:
        t.load(h[0]) * 2.0

    with pytest.raises(TraceError, match=r"widen it first, \.f32"):
        trace(half, h=ViewType(tile.bfloat16, (None,)))


def test_a_loop_keeps_its_second_trace_alone() -> None:
    calls = []

    def body(t: Any, x: Any, y: Any) -> None:
        total = t.var(0.0)
        for k in t.range(x.shape[0]):
            calls.append(k)
            total.set(total.get() + t.load(x[k, 0]))
        t.store(y[0, 0], total.get())

    program = trace(body)
    assert len(calls) == 2
    assert [e.op for e in program.body.effects] == ["var", "loop", "get", "store"]
    loop = program.body.effects[1]
    assert [e.op for e in loop.attrs["body"].effects] == ["index", "get", "load", "set"]


def test_what_a_loop_does_not_change_is_outside_it() -> None:
    def body(t: Any, x: Any, y: Any) -> None:
        for k in t.range(4):
            scale = t.exp(t.program_id(0).f32())
            t.store(y[0, k], t.load(x[0, k]) * scale)
        t.store(y[1, 0], scale)  # depends on nothing in the loop

    program = trace(body)
    exp = next(n for n in program.nodes if n.attrs.get("kind") == "exp")
    assert exp.region is program.body


def test_equal_kernels_have_equal_text_and_closures_count() -> None:
    def make(factor: float) -> Any:
        def body(t: Any, x: Any, y: Any) -> None:
            t.store(y[0, 0], t.load(x[0, 0]) * factor)

        return trace(body)

    assert program_text(make(2.0)) == program_text(make(2.0)) != program_text(make(3.0))
    assert program_text(make(0.0)) != program_text(make(-0.0))


def test_fragments_bring_arguments_and_constants() -> None:
    @tile.fragment
    def scaled(t: Any, v: Any, at: Any, by: Any, out: Any, shift: float) -> None:
        t.store(out[at], v * t.load(by[0]) + shift)

    @tile.kernel(static={"x": (1,)})
    def kernel(t: Any, x: Any, epilogue: Any = tile.store_as) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        epilogue(t, t.load(x[at]), at)

    bound = kernel.bind(epilogue=scaled("by", "out", shift=0.5))
    with pytest.raises(TypeError, match="bind it"):
        kernel.trace({"x": ROWS})
    assert list(bound.parameters) == ["x"]
    with pytest.raises(TypeError, match="no parameter"):
        kernel.bind(prologue=scaled)
    bound = kernel.bind(epilogue=scaled(ROWS, ROWS, shift=0.5))
    assert set(bound.bound()) == {"epilogue_by", "epilogue_out"}


def _program() -> Any:
    def body(t: Any, x: Any, y: Any) -> None:
        total = t.var(0.0)
        for k in t.range(3):
            total.set(total.get() + t.load(x[0, k]))
        t.store(y[0, 0], t.sum(t.load(x[0, t.arange(x.shape[1])])) + total.get())

    return trace(body)


def _break(program: Any, op: str, change: Callable[[Node], None]) -> None:
    """Change the first node of an op and expect the verifier to say so."""
    node = next(n for n in tile_verify.reachable(program) if n.op == op)
    change(node)
    with pytest.raises(VerifyError) as caught:
        tile_verify.verify(program)
    assert __file__.rpartition("/")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("binary", lambda n: setattr(n, "shape", (7,))),
        ("binary", lambda n: setattr(n, "dtype", tile.int64)),
        ("binary", lambda n: setattr(n, "attrs", {"kind": "pow"})),
        ("reduce", lambda n: setattr(n, "attrs", {**n.attrs, "combine": "mean"})),
        ("reduce", lambda n: setattr(n, "attrs", {**n.attrs, "axis": 3})),
        ("load", lambda n: setattr(n, "args", n.args[:1])),
        ("load", lambda n: setattr(n, "attrs", {**n.attrs, "view": "z"})),
        ("store", lambda n: setattr(n, "args", (*n.args[:-1], n.args[0]))),
        ("set", lambda n: setattr(n, "attrs", {"var": 0})),
        ("loop", lambda n: setattr(n, "args", (n.args[0],) * 2 + (n.attrs["index"],))),
        ("const", lambda n: setattr(n, "op", "constant")),
        ("binary", lambda n: setattr(n, "attrs", {**n.attrs, "accuracy": "fast"})),
    ],
)
def test_the_verifier_sees_each_broken_rule(op: str, change: Callable[[Node], None]) -> None:
    tile_verify.verify(_program())
    _break(_program(), op, change)
