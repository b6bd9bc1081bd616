"""Every tile kernel of the registry, compiled for a GPU that nobody here needs to have."""

from __future__ import annotations

import pytest
import torch

import tilewright  # noqa: F401  declares the ops
from tilewright.backends.tile import for_gpu
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.launch import Launch, launches_of
from tilewright.tile.runtime import nvrtc
from tilewright.tune.classes import call_of

OPS = [op.name for op in registry.ops() if "tile" in {k.backend for k in registry.kernels_of(op.name)}]
QUICK = ("add_rms_norm", "swiglu", "bce_with_logits", "gated_residual_backward")
SPILLS = {"layer_norm_backward": 128}
"""Bytes: its sums of a whole row wait in registers."""
SLOW = pytest.mark.slow


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=SLOW), pytest.param("sm_120", marks=SLOW)])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in OPS])
def test_every_tile_kernel_compiles(name: str, arch: str) -> None:
    op = registry.op(name)
    call = call_of(
        op,
        (8192, 4096),
        torch.bfloat16,
        target_device(arch),
        absent=op.probes.absent[0],
        saving=op.gradient is not None,
    )
    kernel = next(k for k in registry.kernels_of(name) if k.backend == "tile")
    for launch in launches_of(kernel.load()(call, kernel.configs_for(call)[0])):
        assert isinstance(launch, Launch)
        artifact, given = for_gpu(launch, call.device, call.aliased)
        assert [p.name for p in artifact.parameters] == list(given.args)
        assert artifact.registers and (artifact.spills or 0) <= SPILLS.get(name, 0)
        assert given.grid[1:] == (1, 1) and 0 < given.grid[0] <= 8192
