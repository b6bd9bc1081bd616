"""Tile kernels by the values that a GPU's threads would compute: the conformance suite on what is lowered for sm_90
with the first schedule of each call, run in numpy, thread by thread, where a race or a stray access is an error.

All but the largest cases; those of a few ops, the rest is slow. That it compiles is `test_tile_targets`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright  # noqa: F401  declares the ops
from tilewright.backends.tile import TileBackend, _planned, memory
from tilewright.core import registry
from tilewright.core.backend import Buffers, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import target_device
from tilewright.core.launch import Launch, Scratch, scratches
from tilewright.tile.oracle import emulator
from tilewright.tile.runtime.cuda import lowered
from tilewright.verify import suite
from tilewright.verify.cases import Case, build, cases

GPU = target_device("sm_90")
OPS = [op.name for op in registry.ops() if "tile" in {k.backend for k in registry.kernels_of(op.name)}]
QUICK = {"add_rms_norm": "float32", "gelu_backward": "bfloat16", "swiglu": "float16"}
MOST, MOST_SLOWLY = 4000, 12000
"""Elements of a case's inputs: each thread's step costs a microsecond."""
PAIRS = [
    pytest.param(op, dtype, marks=() if QUICK.get(op) == dtype else pytest.mark.slow)
    for op in OPS
    for dtype in ("float32", "bfloat16", "float16")
]
BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


class Emulated(Runner):
    """The launches of a call as threads of a GPU would do them, on CPU tensors."""

    def __init__(self, launches: Sequence[Launch], call: Call) -> None:
        self.places = {n: i for i, n in enumerate([*call.tensors, *(s.name for s in scratches(launches))])}
        self.work = [(launch, *lowered(*_planned(launch, GPU, call.aliased))) for launch in launches]

    def __call__(self, buffers: Buffers) -> None:
        for launch, function, arena in self.work:
            arguments: dict[str, Any] = {}
            levels = {}
            for name, value in launch.args.items():
                if isinstance(value, (TensorFacts, Scratch)):
                    facts = value.facts if isinstance(value, Scratch) else value
                    where, buffer = (
                        memory(facts, name in launch.options.get("flat", ())),
                        buffers[self.places[facts.name]],
                    )
                    assert buffer is not None
                    view = torch.as_strided(buffer, where.shape, where.strides, buffer.storage_offset())
                    arguments[name] = view.view(BITS.get(view.dtype, view.dtype)).numpy()
                    levels[name] = where.levels
                elif value is not None:
                    arguments[name] = value
            emulator.run(function, arguments, launch.grid, levels=levels, arena=arena.offsets)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_threads_of_a_gpu_conform(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    op = registry.op(name)
    kernel = next(k for k in registry.kernels_of(name) if k.backend == "tile")
    most = MOST if QUICK.get(name) == dtype else MOST_SLOWLY

    def few(*given: Any, **more: Any) -> Iterator[Case]:
        for case in cases(*given, **more):
            if sum(t.numel() for t in build(case, op).values() if t is not None) <= most:
                yield case

    monkeypatch.setattr(suite, "cases", few)
    monkeypatch.setattr(TileBackend, "prepare", lambda _, launches, call: Emulated(launches, call))
    monkeypatch.setattr(TileBackend, "missing", lambda _, kind="": None)
    there = replace(kernel, configs=lambda call: kernel.configs_for(replace(call, device=GPU))[:1])
    result = suite.verify_kernel(op, there, getattr(torch, dtype), torch.device("cpu"), size="tiny")
    assert not result.failed, result.failures
    assert result.passed >= 10
