"""The kernels of the loss family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

import torch

from tilewright.core.capability import Capability, cpu, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.loss import configs

_HERE = "tilewright.ops.loss"
READ = ("logits", "targets", "weight", "pos_weight")
"""Read as dense in the last dimension; an upstream gradient may be strided in any way."""
PASSES = (("bce_with_logits", "forward"), ("bce_with_logits_backward", "backward"))

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton:{function}",
        Capability((cuda(80), hip("gfx942")), limits=(unit_stride(*READ), row_levels(*READ, "dy"))),
        configs.triton_configs,
    )
    for op, function in PASSES
]

# In half precision aten rounds after each step.
VENDOR_KERNELS = [
    Kernel(
        "bce_with_logits",
        "vendor",
        f"{_HERE}.vendor:bce_with_logits",
        Capability(dtypes=(torch.float32,)),
        label="aten",
    )
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=(unit_stride(*READ), row_levels(*READ, "dy"), configs.few_enough)),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function in PASSES
]

TILE_KERNELS = [Kernel(op, "tile", f"{_HERE}.tile:{function}", Capability((cpu(),))) for op, function in PASSES]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
