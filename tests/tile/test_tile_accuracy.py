"""accuracy="fast": bounded on a GPU, equal to exact elsewhere, and without the instructions that it does without."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tile_runs import F32, one_row

from tilewright import tile
from tilewright.ops import tile_rows
from tilewright.tile import TraceError, ViewType
from tilewright.tile.cost import H200, estimate
from tilewright.tile.ir.tile_ir import ROUNDED
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import emulator
from tilewright.tile.runtime import cuda
from tilewright.tile.schedule import Schedule

BLOCK = 256
TRUE = {
    "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "sqrt": np.sqrt,
}  # fmt: skip
BOUNDS = {"exp": (2, 1.3), "exp2": (2, 0), "log": (5, 0), "sqrt": (2, 0), "rsqrt": (3, 0), "reciprocal": (1, 0),
          "sigmoid": (25, 1.3)}  # fmt: skip
"""Ulp of float32, and so many for each unit of |x|, as `lang.functions` states them."""


@tile.kernel
def applied(t: Any, x: Any, y: Any, kind: str, accuracy: str) -> None:
    at = t.program_id(0) * BLOCK + t.arange(BLOCK, limit=x.shape[0] - t.program_id(0) * BLOCK)
    t.store(y[at], getattr(t, kind)(t.load(x[at]), accuracy))


def _every_kind() -> np.ndarray[Any, Any]:
    """All bfloat16 numbers, and others of every size."""
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    chance = np.random.default_rng(0)
    return np.concatenate([halves, chance.normal(size=1 << 15).astype(np.float32) * 30,
                           chance.uniform(-110, 110, 1 << 15).astype(np.float32)])  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ROUNDED))
def test_fast_functions_stay_within_their_bounds(kind: str, device: str) -> None:
    x = _every_kind()
    y = torch.empty(len(x), device=device)
    applied[(-(-len(x) // BLOCK),)](torch.from_numpy(x).to(device), y, kind, "fast")
    with np.errstate(all="ignore"):
        mine = y.cpu().numpy().astype(np.float64)
        true = TRUE[kind](x.astype(np.float64))
        ulp = np.spacing(np.abs(true).astype(np.float32)).astype(np.float64)
        first, more = BOUNDS[kind]
        off = np.abs(mine - true)
        near = off <= (first + 0.5 + more * np.minimum(np.abs(x), 200)) * ulp
    if kind == "log":
        near |= (x > 0.5) & (x < 2) & (off <= 2.0**-22)
    if kind == "sigmoid" and device == "cpu":  # as exact
        near |= (x < -88) & (mine == 0)
    if kind == "reciprocal":  # its ends, on a GPU
        near |= (np.abs(x) > 2.0**126) & (mine == 0) | (np.abs(x) < 2.0**-126) & np.isinf(mine)
    largest = float(np.finfo(np.float32).max)
    beyond = (np.abs(true) > largest * (1 - 2.0**-15)) & (np.abs(mine) > largest * (1 - 2.0**-15))
    wrong = ~(near | (np.isnan(mine) & np.isnan(true)) | (beyond & (np.sign(mine) == np.sign(true))))
    assert not wrong.any(), [(x[i], mine[i], true[i], off[i] / ulp[i]) for i in np.flatnonzero(wrong)[:5]]


@pytest.mark.parametrize("kind", sorted(ROUNDED))
def test_on_a_cpu_fast_is_exact(kind: str) -> None:
    def row(accuracy: str) -> Any:
        def body(t: Any, x: Any, y: Any) -> None:
            at = 0, t.arange(x.shape[1])
            t.store(y[at], getattr(t, kind)(t.load(x[at]), accuracy))

        return body

    x = np.array([[0.0, -0.0, 1e-40, 0.3, 1.7, -2.5, 88.0, -95.0, 1e30, np.inf, -np.inf, np.nan]], np.float32)
    with np.errstate(all="ignore"):
        fast, exact = (one_row(row(a), x) for a in ("fast", "exact"))
    assert np.array_equal(fast.view(np.uint32), exact.view(np.uint32))


def test_the_emulator_takes_fast_for_exact() -> None:
    x = np.linspace(0.01, 40, 64, dtype=np.float32)
    found = []
    for kind in sorted(ROUNDED):
        for accuracy in ("fast", "exact"):
            view = ViewType(F32, (None,))
            function = lower(applied.trace({"x": view, "y": view, "kind": kind, "accuracy": accuracy}), 0,
                             Schedule(32, 1, 2))  # fmt: skip
            assert any(getattr(s, "mode", "") == "fast" for s in function.statements()) == (accuracy == "fast")
            y = np.empty_like(x)
            emulator.run(function, {"x": x, "y": y}, (1,), outputs=("y",))
            found.append(y)
    assert all(np.array_equal(a, b) for a, b in zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("kind", sorted(ROUNDED))
def test_the_text_has_the_approximate_instruction_where_it_is_asked_for(kind: str) -> None:
    view = ViewType(F32, (None,))
    for accuracy, count in (("fast", 2 if kind == "sigmoid" else 1), ("exact", 0)):
        program = applied.trace({"x": view, "y": view, "kind": kind, "accuracy": accuracy})
        text = cuda.text_of(program, Schedule(32, 1, 4))[1].text
        assert len(re.findall(r"\.approx\.(?:ftz\.)?f32", text)) == count


def test_an_estimate_counts_fast_functions_as_what_they_are() -> None:
    view = ViewType(F32, (None,))
    programs = [applied.trace({"x": view, "y": view, "kind": "exp", "accuracy": a}) for a in ("fast", "exact")]
    slow = replace(H200, operations=1e6)
    fast, exact = (estimate(p, Schedule(32, 1, 4), (1 << 16, 1, 1), slow) for p in programs)
    assert fast.limit == exact.limit == "operations" and 2 * fast.us < exact.us


def test_an_accuracy_is_one_of_two() -> None:
    view = ViewType(F32, (None,))
    with pytest.raises(TraceError, match="accuracy='quick'; takes 'exact', 'fast'"):
        applied.trace({"x": view, "y": view, "kind": "exp", "accuracy": "quick"})


@pytest.mark.parametrize(("dtypes", "wanted"), [
    ((tile.bfloat16, None), "fast"), ((tile.float16, tile.bfloat16), "fast"), ((tile.bfloat16, tile.float32), "exact"),
    ((tile.float32,), "exact"), ((torch.bfloat16,), "fast"), ((torch.float32,), "exact"),
])  # fmt: skip
def test_only_half_precision_is_computed_fast(dtypes: tuple[Any, ...], wanted: str) -> None:
    assert tile_rows.accuracy(*(d and ViewType(d, (None,)) for d in dtypes)) == wanted
