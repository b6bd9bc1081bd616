"""Compiled code against the interpreter, bit for bit, and against what other compilers get wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import random_programs as generate
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_runs import F32, FEATURES, QUICK, QUICKEST, compiled_run, copy_of, one_row, order, row, same

from tilewright import tile
from tilewright.tile import LowerError, ViewType
from tilewright.tile.instr.record import choose
from tilewright.tile.ir import thread_verify
from tilewright.tile.ir.thread_ir import For, Load, Store
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle.interpreter import run
from tilewright.tile.render import cpu as render
from tilewright.tile.runtime import cpu, target
from tilewright.tile.runtime.arguments import memory_of
from tilewright.tile.runtime.target import Cpu

pytestmark = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")


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


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "+".join(f) or "plain")
def test_other_features_agree_with_the_interpreter(features: tuple[str, ...]) -> None:
    here = target.this_cpu()
    if not set(features) <= set(here.features):
        pytest.skip(f"this CPU lacks {set(features) - set(here.features)}")
    samples = [generate.sample(9000 + i, 10) for i in range(20)]
    assert compare(samples, Cpu(here.machine, features)) == []


@pytest.mark.parametrize("features", (*FEATURES, target.this_cpu().features), ids=lambda f: "+".join(f) or "plain")
def test_extremes_of_zeros_and_nan_whatever_the_features(features: tuple[str, ...]) -> None:
    """Which zero of two is taken, and where NaN goes, has one answer for every pair."""

    def extremes(t: Any, x: Any, z: Any, y: Any) -> None:
        at = 0, t.arange(x.shape[1])
        a, b = t.load(x[at]), t.load(z[at])
        for i, nan in enumerate(("propagate", "ignore")):
            t.store(y[2 * i, at[1]], t.maximum(a, b, nan))
            t.store(y[2 * i + 1, at[1]], t.minimum(a, b, nan))

    here = target.this_cpu()
    if not set(features) <= set(here.features):
        pytest.skip(f"this CPU lacks {set(features) - set(here.features)}")
    special = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, np.inf, -np.inf, np.nan], np.float32)
    x, z = (np.ascontiguousarray(side.reshape(1, -1)) for side in np.meshgrid(special, special))
    view = ViewType(F32, (None, Most(64)))
    program = tile.kernel(extremes, static={"x": (1,)}).trace({"x": view, "z": view, "y": view})
    mine, other = (np.full((4, 64), 7.0, np.float32) for _ in range(2))
    which = Cpu(here.machine, features)
    run(program, {"x": x, "z": z, "y": mine}, (1,), order=order(which))
    compiled_run(cpu.compile(program, which), {"x": x, "z": z, "y": other}, dict.fromkeys("xzy", F32), (1, 1, 1))
    assert same(mine, other, F32)


def test_a_sum_of_minus_zero_is_zero_however_long_the_row() -> None:
    """An axis that is known to have one element is folded by no loop."""

    def total(t: Any, x: Any, y: Any) -> None:
        v = t.load(x[0, t.arange(x.shape[1])])
        t.store(y[0, 0], t.sum(v))
        t.store(y[0, 1], t.max(t.sum(v[:, None], axis=1)))

    for size in (1, Most(256)):
        view, wide = ViewType(F32, (None, size)), ViewType(F32, (None, None))
        program = tile.kernel(total, static={"x": (1,)}).trace({"x": view, "y": wide})
        mine, other = (np.full((1, 2), 7.0, np.float32) for _ in range(2))
        run(program, {"x": row(-0.0), "y": mine}, (1,), order=order())
        compiled_run(cpu.compile(program), {"x": row(-0.0), "y": other}, {"x": F32, "y": F32}, (1, 1, 1))
        assert same(mine, other, F32) and not np.signbit(other).any()


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
    assert "strided       epilogue_y" in said and "narrow16" in said


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

        monkeypatch.setattr(kernel.Lowering, "accumulate", unmasked)
    elif fault == "order of effects":
        monkeypatch.setattr(phases.Plan, "conflict", lambda self, a, b: False)
    else:
        monkeypatch.setattr(elementwise.Facts, "of", lambda self, node: (1, 1))
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
