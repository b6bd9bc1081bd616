"""Compiled code against the interpreter, bit for bit, and against what other compilers get wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import tile
from tilewright.tile import LowerError, ViewType
from tilewright.tile.dtypes import DType
from tilewright.tile.instr.record import choose
from tilewright.tile.ir import thread_verify
from tilewright.tile.ir.thread_ir import For, Load, Store
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import generate
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.render import cpu as render
from tilewright.tile.runtime import cpu, target
from tilewright.tile.runtime.arguments import memory_of, pack
from tilewright.tile.runtime.target import Cpu

pytestmark = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")
F32 = tile.float32
QUICK, QUICKEST = (tuple(o if f == "-O3" else f for f in cpu.FLAGS) for o in ("-O1", "-O0"))
"""Bits do not depend on it."""


def order(which: Cpu | None = None) -> Order:
    return Order(render.lanes_of((which or target.this_cpu()).features), 4, 16)


def same(mine: np.ndarray, other: np.ndarray, dtype: DType) -> bool:
    """Whether all elements are equal in their bits, or both NaN."""
    a, b = dtype.decode(np.ascontiguousarray(mine)), dtype.decode(np.ascontiguousarray(other))
    if not dtype.floating:
        return np.array_equal(a, b)
    return bool(((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))).all())


def copy_of(array: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(array, np.ndarray):
        return array
    if array.strides[-1] == array.itemsize:
        return array.copy()
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def compiled_run(
    made: cpu.Compiled, arguments: dict[str, Any], types: dict[str, DType], grid: Any, threads: int = 1
) -> None:
    memories = {n: memory_of(v, types[n]) for n, v in arguments.items() if isinstance(v, np.ndarray)}
    scalars = {n: v for n, v in arguments.items() if n not in memories}
    made(pack(made.parameters, memories, scalars), grid, threads)


def compare(samples: list[generate.Sample], which: Cpu | None = None, flags: tuple[str, ...] = QUICK) -> list[str]:
    """What differs between interpreter and compiled code."""
    wrong = []
    compiled = cpu.compile_all([s.program for s in samples], which, flags)
    for sample, made in zip(samples, compiled, strict=True):
        mine, other = ({n: copy_of(v) for n, v in sample.arguments.items()} for _ in range(2))
        run(sample.program, mine, sample.grid, outputs=sample.outputs, order=order(which))
        compiled_run(made, other, sample.types, sample.grid)
        wrong += [f"{sample.program.name}: {n}" for n in ("y", "z") if not same(mine[n], other[n], sample.types[n])]
    return wrong


@pytest.mark.parametrize("batch", range(20))
def test_random_programs_agree_bit_for_bit(batch: int) -> None:
    """25 programs a run of the compiler, 500 in all; most of them without its optimiser, which takes two thirds of the
    time."""
    samples = [generate.sample(25 * batch + i, 8) for i in range(25)]
    assert compare(samples, flags=QUICKEST if batch % 4 else QUICK) == []


@settings(max_examples=3, deadline=None)
@given(st.lists(st.integers(1 << 20, 1 << 40), min_size=5, max_size=5, unique=True))
def test_programs_of_any_seed_agree(seeds: list[int]) -> None:
    assert compare([generate.sample(seed) for seed in seeds]) == []


FEATURES = (("avx", "avx2", "f16c", "fma"), ("avx", "avx2"), ())


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "+".join(f) or "plain")
def test_other_features_agree_with_the_interpreter(features: tuple[str, ...]) -> None:
    here = target.this_cpu()
    if not set(features) <= set(here.features):
        pytest.skip(f"this CPU lacks {set(features) - set(here.features)}")
    samples = [generate.sample(9000 + i, 10) for i in range(20)]
    assert compare(samples, Cpu(here.machine, features)) == []


def one_row(function: Callable[..., None], x: np.ndarray, n: int | None = None, **constants: Any) -> np.ndarray:
    """y of one instance over a row, compiled; checked against the interpreter."""
    count = n or x.shape[-1]
    kernel = tile.kernel(function, static={"x": (1,)})
    view = ViewType(F32, (None, Most(256)))
    program = kernel.trace({"x": view, "y": view, **constants})
    mine, other = np.full((1, count), 7.0, np.float32), np.full((1, count), 7.0, np.float32)
    run(program, {"x": x, "y": mine}, (1,), order=order())
    compiled_run(cpu.compile(program), {"x": x, "y": other}, {"x": F32, "y": F32}, (1, 1, 1))
    assert same(mine, other, F32)
    return other


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


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


def test_a_tile_stored_then_loaded_in_another_order() -> None:
    def flip(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        t.store(y[0, col], t.load(x[0, col]) + 1.0)
        t.store(y[0, col], t.load(y[0, x.shape[1] - 1 - col]) * 2.0)

    x = np.arange(37, dtype=np.float32)[None]
    assert np.array_equal(one_row(flip, x), (x[:, ::-1] + 1) * 2)


def test_a_load_keeps_its_place_before_a_store() -> None:
    def swap(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        t.store(y[0, col], t.load(x[0, col]))
        old = t.load(y[0, col])
        t.store(y[0, col], 0.0)
        t.store(y[0, col], old + t.sum(old))

    x = np.arange(5, dtype=np.float32)[None]
    assert np.array_equal(one_row(swap, x), x + 10)


def test_a_tile_kept_in_a_loop_that_never_ran_is_computed_again() -> None:
    def kernel(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        heavy = t.exp(t.load(x[0, col])) + t.log(t.load(x[0, col]) + 2.0)
        total = t.var(0.0)
        for _ in t.range(x.shape[0] - 1):
            total.set(total.get() + t.sum(heavy))
        t.store(y[0, col], heavy + total.get())

    x = np.linspace(0, 1, 40, dtype=np.float32)[None]
    assert np.isfinite(one_row(kernel, x)).all()


def test_a_cell_is_read_before_a_region_that_sets_it() -> None:
    def kernel(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        total, part = t.var(t.zeros(*col.shape)), t.var(t.zeros(*col.shape))
        for start in t.range(0, 5, 2):
            with t.when(start > 0):
                total.set(total.get() * 2.0 + part.get())
            for _ in t.range(start, 5):
                part.set(part.get() + t.load(x[0, col]))
        t.store(y[0, col], total.get() + part.get())

    x = np.arange(40, dtype=np.float32)[None]
    assert np.array_equal(one_row(kernel, x), 27 * x)


def test_rows_of_more_than_two_to_the_31_elements() -> None:
    """The offset of a row is 64 bits: row 5 of stride 2^30 lies beyond 2^31 elements."""

    def kernel(t: Any, x: Any, y: Any) -> None:
        t.store(y[0, 0], t.load(x[5, 0]))

    made = tile.kernel(kernel).trace({"x": ViewType(tile.uint8, (None, None)), "y": ViewType(tile.uint8, (None, None))})
    text, _ = render.source(lower(made, 16), ())
    assert re.search(r"const i64 \w+ = 5 \* s0_x|const i64 \w+ = s0_x \* 5", text)


@pytest.mark.parametrize("offset", range(16))
def test_any_alignment(offset: int) -> None:
    """bf16 rows at every storage offset and at odd strides."""

    def copy(t: Any, x: Any, y: Any) -> None:
        at = t.program_id(0), t.arange(x.shape[1])
        t.store(y[at], (t.load(x[at]).f32() * 2.0).to(y.dtype))

    kernel = tile.kernel(copy, static={"x": (1,)})
    view = ViewType(tile.bfloat16, (None, Most(256)))
    made = cpu.compile(kernel.trace({"x": view, "y": view}))
    base = tile.bfloat16.encode(np.random.default_rng(0).normal(size=4000).astype(np.float32))
    x = np.lib.stride_tricks.as_strided(base[offset:], (5, 101), (2 * (101 + offset), 2))
    y = np.zeros((5, 101), np.uint16)
    compiled_run(made, {"x": x, "y": y}, {"x": tile.bfloat16, "y": tile.bfloat16}, (5, 1, 1), threads=2)
    assert same(y, tile.bfloat16.encode(tile.bfloat16.decode(x) * 2), tile.bfloat16)


@tile.fragment
def add_residual(t: Any, v: Any, at: Any, residual: Any, total: Any) -> Any:
    s = (v + t.load(residual[at]).f32()).to(total.dtype)
    t.store(total[at], s)
    return s.f32()


@tile.fragment
def quantize_row(t: Any, y: Any, at: Any, q: Any, scale: Any, qmax: float) -> None:
    s = t.maximum(t.max(t.abs(y), axis=-1) / qmax, 1e-10)
    t.store(scale[at[0]], s)
    t.store(q[at], (y / s).to(q.dtype, round="nearest_even" if q.dtype.integer else "", saturate=True))


@tile.kernel(static={"x": (1,)})
def rms_norm(t: Any, x: Any, w: Any, eps: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    at = row, col
    v = t.load(x[at]).f32()
    if prologue:
        v = prologue(t, v, at)
    rstd = t.rsqrt(t.mean(v * v, axis=-1) + eps)
    epilogue(t, v * rstd * t.load(w[col]).f32(), at)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("columns", [1, 100, 1001])
def test_a_norm_with_residual_and_quantisation(codes: str, columns: int) -> None:
    """The example of the documentation, in one kernel; a row with NaN has the codes that its contract says."""
    dtype, bf16 = getattr(tile, codes), tile.bfloat16
    given = np.random.default_rng(0).normal(size=(2, 4, columns)).astype(np.float32)
    given[0, 2, columns // 2] = np.nan
    x, r = bf16.encode(given[0]), bf16.encode(given[1])
    w = np.linspace(0.5, 2, columns, dtype=np.float32)
    outs = [np.zeros_like(x), np.zeros((4, columns), dtype.storage), np.zeros(4, np.float32)]
    memories = [memory_of(r, bf16), memory_of(outs[0], bf16), memory_of(outs[1], dtype), memory_of(outs[2])]
    qmax = 127.0 if dtype.integer else 448.0
    kernel = rms_norm.bind(
        prologue=add_residual(memories[0], memories[1]), epilogue=quantize_row(memories[2], memories[3], qmax=qmax)
    )
    kernel[(4,)](memory_of(x, bf16), w, 1e-6)
    h = bf16.rounded(bf16.decode(x) + bf16.decode(r))
    assert same(outs[0], bf16.encode(h), bf16)
    y = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * w
    finite = [0, 1, 3]
    assert np.allclose(outs[2][finite], np.abs(y[finite]).max(-1) / qmax, rtol=1e-5)
    found = dtype.decode(outs[1]).astype(np.float64)
    assert np.abs(found - np.clip(y / outs[2][:, None], -qmax, qmax))[finite].max() <= (0.51 if dtype.integer else 16.1)
    assert np.isnan(outs[2][2])
    assert (found[2] == 0).all() if dtype.integer else np.isnan(found[2]).all()


def test_the_source_is_short_and_names_lines() -> None:
    import inspect

    view, wide = ViewType(tile.bfloat16, (None, Most(8192))), ViewType(tile.bfloat16, (None, None))
    kernel = rms_norm.bind(epilogue=tile.store_as(wide))
    program = kernel.trace({"x": view, "w": ViewType(F32, (None,)), "eps": F32, "epilogue_y": wide})
    text, symbol = render.source(lower(program, 16), target.KNOWN)
    body = text[text.index("pid2++") :].splitlines()
    first = inspect.getsourcelines(rms_norm.function)[1]
    assert f"// test_tile_cpu.py:{first + 4}" in text and f"// test_tile_cpu.py:{first + 7}" in text
    assert len(inspect.getsource(rms_norm.function).splitlines()) < 15 and len(body) <= 90
    assert symbol in text and "#include" not in text


def test_instances_follow_each_other_along_memory() -> None:
    """Axis 0 counts rows, axis 1 blocks of one: with axis 0 the fastest, each block came from another page."""

    def block(t: Any, x: Any, y: Any) -> None:
        at = t.program_id(0), t.program_id(1) * 64 + t.arange(64)
        t.store(y[at], t.load(x[at]))

    view = ViewType(F32, (None, None))
    text, _ = render.source(lower(tile.kernel(block).trace({"x": view, "y": view}), 16), ())
    assert text.index("pid0++") < text.index("pid1++") < text.index("pid2++")


def test_explain_lists_what_was_decided() -> None:
    wide, narrow = ViewType(tile.bfloat16, (None, None)), ViewType(tile.bfloat16, (None, None), unit=False)
    kernel = rms_norm.bind(prologue=add_residual(wide, wide), epilogue=tile.store_as(narrow))
    row = ViewType(tile.bfloat16, (None, Most(8192)))
    arguments = {"x": row, "w": ViewType(F32, (None,)), "eps": F32, "prologue_residual": wide, "prologue_total": wide}
    said = tile.explain(kernel, {**arguments, "epilogue_y": narrow}, Cpu("x86_64", ("avx", "avx2", "f16c", "fma")))
    assert "x.shape[1] at most 8192" in said and "8 lanes" in said
    assert re.search(r"loop +over \[<=8192\]: store prologue_total .*, sum ", said)
    assert re.search(r"scratch +cast bfloat16\[<=8192\] .*kept by a loop over", said), said
    assert "strided       p_epilogue_y" in said and "narrow16" in said


@pytest.mark.parametrize("fault", ["identity", "last chunk", "order of effects", "division"])
def test_a_fault_in_the_compiler_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites: without one of its rules the compiler makes code that differs."""
    from tilewright.tile.lower import elementwise, kernel, phases, reduce

    if fault == "identity":
        monkeypatch.setattr(reduce, "identity", lambda combine, dtype: 0.0 if dtype.floating else 0)
    elif fault == "last chunk":
        accumulate = reduce.Reductions.accumulate

        def unmasked(self: Any, *args: Any) -> None:
            tail, self.tail = self.tail, None
            accumulate(self, *args)
            self.tail = tail

        monkeypatch.setattr(kernel._Lowering, "accumulate", unmasked)
    elif fault == "order of effects":
        monkeypatch.setattr(phases.Plan, "conflict", lambda self, a, b: False)
    else:
        monkeypatch.setattr(
            elementwise.Facts, "of", lambda self, node: elementwise.Facts._one.__globals__["constant"](1)
        )
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setattr(cpu, "compiler_digest", lambda: f"fault {fault}")
    samples = [generate.sample(seed, 10) for seed in range(24)]
    assert compare(samples)


def test_kernels_of_one_name_are_two_symbols() -> None:
    def make(value: float) -> Any:
        def body(t: Any, y: Any) -> None:
            t.store(y[0], value)

        return tile.kernel(body).trace({"y": ViewType(F32, (None,))})

    y = np.zeros(1, np.float32)
    symbols = set()
    for value in (1.0, 2.0):
        made = cpu.compile(make(value))
        compiled_run(made, {"y": y}, {"y": F32}, (1, 1, 1))
        symbols.add(made.symbol)
        assert y[0] == value
    assert len(symbols) == 2


def test_the_thread_verifier_sees_broken_functions() -> None:
    def body(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        t.store(y[0, col], t.load(x[0, col]) * t.sum(t.load(x[0, col])))

    view = ViewType(F32, (None, Most(256)))

    def fresh() -> Any:
        return lower(tile.kernel(body, static={"x": (1,)}).trace({"x": view, "y": view}), 16)

    def drop_first(f: Any) -> None:
        del f.body[1]

    def twice(f: Any) -> None:
        f.body.append(f.body[1])

    def rolled(f: Any) -> None:
        """An unrolled loop that is not: its register array would be indexed at run time."""
        for s in f.statements():
            if isinstance(s, For):
                for i, inner in enumerate(s.body):
                    if isinstance(inner, For) and inner.unroll:
                        s.body[i] = For(inner.var, inner.lo, inner.hi, inner.step, inner.body)

    def other_memory(f: Any) -> None:
        f.body.insert(0, Load("q", next(s.type for s in f.statements() if isinstance(s, Load)), "p_z", 0))

    def unknown_value(f: Any) -> None:
        store = next(s for s in f.statements() if isinstance(s, Store))
        f.body.append(Store(store.memory, store.type, 0, "nothing"))

    thread_verify.verify(fresh())
    for change in (drop_first, twice, rolled, other_memory, unknown_value):
        function = fresh()
        change(function)
        with pytest.raises(tile.VerifyError):
            thread_verify.verify(function)


def test_too_much_scratch_is_said_before_compiling() -> None:
    def body(t: Any, x: Any, y: Any) -> None:
        v = t.exp(t.load(x[0, t.arange(x.shape[1])]))
        t.store(y[0, t.arange(x.shape[1])], v / t.sum(v))

    view = ViewType(F32, (None, Most(1 << 24)))
    with pytest.raises(tile.VerifyError, match="bytes of scratch"):
        lower(tile.kernel(body, static={"x": (1,)}).trace({"x": view, "y": view}), 16)


def test_a_record_that_is_not_there_is_said() -> None:
    with pytest.raises(LowerError, match="no instruction record for gather"):
        choose(render.RECORDS, "gather", (), 16)
