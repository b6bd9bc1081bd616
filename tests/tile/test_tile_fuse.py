"""Estimates against the times that an H200 took, and the decisions that follow from them."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilewright import tile
from tilewright.tile import LowerError, ViewType
from tilewright.tile.fuse import H200, Work, decide, work
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lang.library import softmax

RECORD = Path(__file__).parent.parent.parent / "benchmarks/results/nvidia-h200/tile.jsonl"
BIG = ((8192, 4096), (32768, 1024), (4096, 8192), (2048, 16384))
SPILLS = "norm_int8 [2048, 16384]"
"""Its rows do not fit the registers, which the estimate does not know."""


def at_of(t: Any, x: Any) -> Any:
    return t.program_id(0), t.arange(x.shape[1])


def norm(t: Any, x: Any, w: Any, y: Any) -> None:
    at = at_of(t, x)
    v = t.load(x[at]).f32()
    t.store(y[at], (v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[at[1]]).f32()).to(y.dtype))


def add(t: Any, x: Any, r: Any, h: Any) -> None:
    at = at_of(t, x)
    t.store(h[at], (t.load(x[at]).f32() + t.load(r[at]).f32()).to(h.dtype))


def norm_residual(t: Any, x: Any, r: Any, w: Any, h: Any, y: Any) -> None:
    at = at_of(t, x)
    total = (t.load(x[at]).f32() + t.load(r[at]).f32()).to(h.dtype)
    t.store(h[at], total)
    v = total.f32()
    t.store(y[at], (v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[at[1]]).f32()).to(y.dtype))


def quantize(t: Any, y: Any, q: Any, s: Any) -> None:
    at = at_of(t, y)
    n = t.load(y[at]).f32()
    scale = t.maximum(t.max(t.abs(n)) / 127.0, 1e-10)
    t.store(s[at[0]], scale)
    t.store(q[at], (n / scale).to(q.dtype, round="nearest_even", saturate=True))


def norm_int8(t: Any, x: Any, r: Any, w: Any, h: Any, q: Any, s: Any) -> None:
    at = at_of(t, x)
    total = (t.load(x[at]).f32() + t.load(r[at]).f32()).to(h.dtype)
    t.store(h[at], total)
    v = total.f32()
    n = v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[at[1]]).f32()
    scale = t.maximum(t.max(t.abs(n)) / 127.0, 1e-10)
    t.store(s[at[0]], scale)
    t.store(q[at], (n / scale).to(q.dtype, round="nearest_even", saturate=True))


def swiglu(t: Any, x: Any, up: Any, y: Any) -> None:
    at = at_of(t, x)
    g = t.load(x[at]).f32()
    t.store(y[at], (g * t.sigmoid(g) * t.load(up[at]).f32()).to(y.dtype))


def gelu(t: Any, x: Any, y: Any) -> None:
    at = at_of(t, x)
    g = t.load(x[at]).f32()
    t.store(y[at], (g * t.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))).to(y.dtype))


def row_softmax(t: Any, x: Any, y: Any) -> None:
    at = at_of(t, x)
    t.store(y[at], softmax(t, t.load(x[at]).f32()).to(y.dtype))


MEASURED = {"norm": norm, "norm_residual": norm_residual, "norm_int8": norm_int8, "swiglu": swiglu, "gelu": gelu,
            "softmax": row_softmax}  # fmt: skip


@cache
def program(function: Any, columns: int, dtype: str = "bfloat16") -> Program:
    element, names = getattr(tile, dtype), function.__code__.co_varnames[1 : function.__code__.co_argcount]
    row = ViewType(element, (None, columns), align=16)
    own = {"w": ViewType(element, (columns,), align=16), "s": ViewType(tile.float32, (None,)),
           "q": ViewType(tile.int8, (None, columns), align=16)}  # fmt: skip
    return tile.kernel(function, static={"x": (1,), "y": (1,)}).trace({n: own.get(n, row) for n in names})


def best() -> dict[str, float]:
    """The best schedule's time of each case."""
    found: dict[str, float] = {}
    for row in map(json.loads, RECORD.read_text("utf-8").splitlines()):
        if "schedule" in row:
            found[row["case"]] = min(row["us"], found.get(row["case"], row["us"]))
    return found


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("rows, columns", BIG)
def test_estimates_are_near_what_was_measured_and_in_its_order(rows: int, columns: int, dtype: str) -> None:
    measured = best()
    pairs = {}
    for name, function in MEASURED.items():
        case = f"{name} [{rows}, {columns}] {dtype}"
        if not case.startswith(SPILLS):
            pairs[case] = work(program(function, columns, dtype)).us(rows, H200), measured[case]
    assert all(0.8 < mine / other < 1.2 for mine, other in pairs.values()), pairs
    for (one, a), (other, b) in itertools.combinations(pairs.items(), 2):
        if abs(a[1] - b[1]) > 0.2 * max(a[1], b[1]):  # what is nearer an estimate does not tell apart
            assert (a[0] < b[0]) == (a[1] < b[1]), (one, other)


def test_an_explanation_has_the_estimate() -> None:
    row = ViewType(tile.bfloat16, (None, 4096), align=16)
    made, types = tile.kernel(gelu, static={"x": (1,)}), {"x": row, "y": row}
    said = tile.explain(made, types, gpu="sm_90", instances=8192)
    assert said.splitlines()[-1].endswith("62 us for 8192 instances on an NVIDIA H200, limited by operations")
    assert "estimate" not in tile.explain(made, types, gpu="sm_90")


def test_what_limits_a_kernel() -> None:
    limits = {n: work(program(f, 4096)).limit(8192, H200) for n, f in MEASURED.items()}
    assert {n for n, limit in limits.items() if limit == "operations"} == {"swiglu", "gelu", "softmax"}


def test_bytes_are_counted_once_and_shared_ones_apart() -> None:
    found = work(program(norm_residual, 4096))
    assert found == Work(4 * 2 * 4096, 2 * 4096, found.operations) and found.operations > 8 * 4096


def test_a_residual_and_int8_rows_are_fused() -> None:
    """As measured: in float32, where a kernel that reads two tensors and writes one is limited by bytes, fused 131.5 us
    at [8192, 4096], and apart 68.4 of the norm and 94.5 of those bytes."""
    measured = best()
    rows, columns = 8192, 4096
    found = decide((program(norm_residual, columns, "float32"), rows),
                   [(program(f, columns, "float32"), rows) for f in (add, norm)])  # fmt: skip
    apart = sum(measured[f"{n} [8192, 4096] float32"] for n in ("swiglu", "norm"))
    fused = measured["norm_residual [8192, 4096] float32"]
    assert found.fuse and fused < apart
    assert found.fused_us == pytest.approx(fused, rel=0.1) and found.apart_us == pytest.approx(apart, rel=0.1)
    assert decide(
        (program(norm_int8, columns), rows), [(program(f, columns), rows) for f in (norm_residual, quantize)]
    ).fuse


def test_what_every_block_of_a_row_would_compute_again_is_a_kernel_of_its_own() -> None:
    def root(t: Any, x: Any, s: Any) -> None:
        v = t.load(x[at_of(t, x)]).f32()
        t.store(s[t.program_id(0)], t.rsqrt(t.mean(v * v)))

    def scaled(t: Any, x: Any, s: Any, y: Any) -> None:
        row, col = t.program_id(0), t.program_id(1) * 256 + t.arange(256)
        t.store(y[row, col], (t.load(x[row, col]).f32() * t.load(s[row])).to(y.dtype))

    def both(t: Any, x: Any, y: Any) -> None:
        row, col = t.program_id(0), t.program_id(1) * 256 + t.arange(256)
        v = t.load(x[at_of(t, x)]).f32()
        t.store(y[row, col], (t.load(x[row, col]).f32() * t.rsqrt(t.mean(v * v))).to(y.dtype))

    rows, columns = 8192, 16384
    blocks = rows * columns // 256
    apart = [(program(root, columns), rows), (program(scaled, columns), blocks)]
    assert not decide((program(both, columns), blocks), apart).fuse
    assert decide(
        (program(both, 256), 64), [(program(root, 256), 64), (program(scaled, 256), 64)]
    ).fuse  # one launch less


def test_a_loop_of_unknown_length_has_no_estimate() -> None:
    def known(t: Any, x: Any, y: Any) -> None:
        for k in t.range(0, 8, 2):
            t.store(y[t.program_id(0), k * 64 + t.arange(64)], t.load(x[t.program_id(0), k * 64 + t.arange(64)]))

    def unknown(t: Any, x: Any, y: Any) -> None:
        for k in t.range(t.num_programs(0)):
            t.store(y[k, t.arange(64)], t.load(x[k, t.arange(64)]))

    assert work(program(known, 512)).bytes == 2 * 2 * 4 * 64
    with pytest.raises(LowerError, match=r"test_tile_fuse.py:\d+: an estimate needs loops of a known length"):
        work(program(unknown, 64))
