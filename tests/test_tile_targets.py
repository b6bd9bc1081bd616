"""Every tile kernel of the registry on GPUs that nobody here needs to have: lowered, compiled, refused, ranked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright  # noqa: F401  declares the ops
from tilewright.backends.enqueue import bind
from tilewright.backends.tile import for_gpu
from tilewright.core import artifacts, policy, registry, selection
from tilewright.core.call import Call
from tilewright.core.device import target_device
from tilewright.core.errors import NotWarm
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, Launch, launches_of, scratches
from tilewright.tile.runtime import nvrtc
from tilewright.tile.runtime.cuda import lowered
from tilewright.tile.schedule import Schedule
from tilewright.tune.classes import call_of, variants

OPS = [op.name for op in registry.ops() if "tile" in {k.backend for k in registry.kernels_of(op.name)}]
QUICK = ("add_rms_norm", "swiglu", "bce_with_logits", "gated_residual_backward")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPILLS = {("bias_act_backward", "sm_80"): 28, ("scale_bias_add_backward", "sm_120"): 8}
"""Bytes that ptxas spills at 80 and 48 registers, far below what a thread may have."""
SLOW = pytest.mark.slow
need_compiler = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())


def kernel_of(op: str) -> Kernel:
    return next(k for k in registry.kernels_of(op) if k.backend == "tile")


def calls_of(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90") -> list[Call]:
    """The call as it usually comes, in each of its variants."""
    op = registry.op(name)
    return [call_of(op, shape, dtype, target_device(arch), options=options, absent=absent, saving=saving)
            for options, absent, saving in variants(op)]  # fmt: skip


def launches(call: Call, config: Config | None = None) -> tuple[Launch, ...]:
    kernel = kernel_of(call.op)
    return launches_of(kernel.load()(call, config or kernel.configs_for(call)[0]))


def compiled(call: Call) -> list[tuple[artifacts.Artifact, Launch]]:
    return [for_gpu(launch, call.device, call.aliased) for launch in launches(call)]


@need_compiler
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=SLOW), pytest.param("sm_120", marks=SLOW)])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in OPS])
def test_every_tile_kernel_compiles(name: str, arch: str) -> None:
    """The first config of each spills nothing, but for what is named; the launcher finds every argument of a kernel."""
    for dtype in DTYPES[: 1 if name in QUICK else None]:
        for call in calls_of(name, (8192, 4096), dtype, arch):
            stages = launches(call)
            places = {n: i for i, n in enumerate([*call.tensors, *(s.name for s in scratches(stages))])}
            for launch in stages:
                artifact, given = for_gpu(launch, call.device, call.aliased)
                step = bind(artifact, given, places)
                assert len(step.slots) == len(artifact.parameters)
                assert artifact.registers and (artifact.spills or 0) <= SPILLS.get((name, arch), 0)
                assert given.grid[1:] == (1, 1) and 0 < given.grid[0] <= math.prod(launch.grid)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_every_config_fits_where_it_is_offered(name: str, dtype: torch.dtype) -> None:
    """Where blocks have least shared memory, the narrowest rows included; all but the longest rows are taken."""
    for columns in (40, 1000, 16384):
        for call in calls_of(name, (64, columns), dtype, "sm_120"):
            configs = kernel_of(name).configs_for(call)
            assert bool(configs) is not bool(kernel_of(name).capability.reasons(call))
            assert configs or columns == 16384
            for schedule in [Schedule(**config) for config in configs]:
                function, arena = lowered(_program(call), schedule, "sm_120")
                assert arena.size * function.instances <= 101376 and function.threads == schedule.threads


def _program(call: Call) -> Any:
    from tilewright.backends.tile import _traced

    return _traced(launches(call)[0], call.aliased, exact=True)[0]


def test_short_rows_are_a_warp_each_and_long_ones_a_block() -> None:
    (short, _), (long, _) = (calls_of("rms_norm", (64, columns)) for columns in (256, 8192))
    assert kernel_of("rms_norm").configs_for(short)[0] == Config(threads=32, instances=4, vector=8)
    assert kernel_of("rms_norm").configs_for(long)[0] == Config(threads=512, instances=1, vector=8)


def test_a_row_that_fits_nowhere_is_refused_in_the_compilers_words() -> None:
    wide, narrow = (calls_of("add_rms_norm", (64, columns))[0] for columns in (131072, 4096))
    (reason,) = kernel_of("add_rms_norm").capability.reasons(wide)
    assert "a block needs 262288 bytes of shared memory; there are 232448" in str(reason)
    assert not kernel_of("add_rms_norm").capability.reasons(narrow)
    older = call_of(registry.op("gelu"), (64, 4096), torch.bfloat16, target_device("sm_75"))
    assert "needs cpu or sm_80 or later" in str(kernel_of("gelu").capability.reasons(older)[0])


def test_more_instances_than_a_grid_has_are_refused() -> None:
    call = calls_of("rms_norm", (1 << 31, 16))[0]
    assert "a grid of 2147483648 instances" in str(kernel_of("rms_norm").capability.reasons(call)[0])


@need_compiler
def test_a_batch_size_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: [compiled(call) for call in calls_of(name, (8192, 1024))] for name in ("rms_norm", "gelu")}
    monkeypatch.setattr(nvrtc, "compile", _refuse)
    for name, before in made.items():
        for call, whole in zip(calls_of(name, (77, 1024)), before, strict=True):
            assert [a for a, _ in compiled(call)] == [a for a, _ in whole]


@need_compiler
@pytest.mark.parametrize("name", ["rms_norm", "gelu"])
def test_a_kernel_for_aligned_rows_serves_no_others(name: str) -> None:
    """Equal shapes whose strides or address allow fewer bytes at a time have another kernel, of narrower accesses."""
    for call in calls_of(name, (64, 1000)):
        whole = compiled(call)[0][0]
        x = call.x
        for stride, align in (((1003, 1), 2), (x.stride, 2), ((1008, 1), 8)):
            bent = replace(call, tensors={**call.tensors, "x": replace(x, stride=stride, align=align)})
            assert compiled(bent)[0][0].image != whole.image


def _refuse(*_: Any) -> Any:
    raise AssertionError("compiled again")


@need_compiler
def test_cubins_are_kept_and_never_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls_of("l2_norm", (64, 1024))[0]
    artifacts.forget()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotWarm, match="while a CUDA graph is captured"):
        compiled(call)
    monkeypatch.undo()
    ((first, _),) = compiled(call)
    artifacts.forget()
    monkeypatch.setattr(nvrtc, "compile", _refuse)
    ((again, _),) = compiled(call)  # from the disk, without the lowering
    assert again == first
    other = registry.backend("tile").compile(launches(call)[0], target_device("sm_90"))
    assert other is again


@need_compiler
def test_another_config_is_another_kernel() -> None:
    call = calls_of("l2_norm", (64, 1024))[0]
    blocks = {for_gpu(launches(call, config)[0], call.device, {})[0].block
              for config in kernel_of("l2_norm").configs_for(call)}  # fmt: skip
    assert blocks == {(64, 1, 1), (32, 4, 1), (128, 1, 1), (32, 8, 1)}


@pytest.mark.parametrize("name", OPS)
def test_what_is_not_measured_is_ranked_below_triton(name: str) -> None:
    found = selection.weigh(calls_of(name, (8192, 2048))[0], policy.current())
    order = [c.backend for c in found.candidates]
    assert order.index("triton") < order.index("tile") and "tile" in [c.backend for c in found.candidates if c.fits]
    assert found.chosen is not None and found.chosen.backend != "tile"


def test_an_explanation_says_whether_what_is_bound_is_worth_fusing() -> None:
    """For every op whose kernel has a fragment in it; where it is the family's only form, the model agrees with it."""
    said = {}
    for name in OPS:
        call = calls_of(name, (8192, 4096))[0]
        if any(piece for launch in launches(call) for piece in launch.function.pieces().values()):
            kernel = kernel_of(name)
            text = registry.backend("tile").explain(kernel, kernel.configs_for(call)[0], call)
            said[name] = [line for line in text.splitlines() if line.startswith("fusion")]
    assert {"add_rms_norm", "add_layer_norm"} <= said.keys()
    assert all(len(lines) == 1 and "add_residual: fuse_vector" in lines[0] for lines in said.values()), said
