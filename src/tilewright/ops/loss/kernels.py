"""The kernels of the loss family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

import torch

from tilewright.core.capability import Capability, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.loss import configs
from tilewright.ops.tile_configs import tile_kernel

_HERE = "tilewright.ops.loss"
READ = ("logits", "targets", "weight", "pos_weight")
"""Read as dense in the last dimension; an upstream gradient may be strided in any way."""
STRIDES = (unit_stride(*READ), row_levels(*READ, "dy"))
PASSES = (
    ("bce_with_logits", "forward", STRIDES),
    ("bce_with_logits_backward", "backward", (*configs.formula(*STRIDES), configs.as_saved)),
)

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton:{function}",
        Capability((cuda(80), hip("gfx942")), limits=limits, in_place=True),
        configs.triton_configs,
    )
    for op, function, limits in PASSES
]

# In half precision aten rounds after each step.
VENDOR_KERNELS = [
    Kernel(
        "bce_with_logits",
        "vendor",
        f"{_HERE}.vendor:bce_with_logits",
        Capability(dtypes=(torch.float32,), limits=(configs.keeps_nothing,)),
        label="aten",
    )
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=(*limits, configs.few_enough), in_place=True),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function, limits in PASSES
]


TILE_KERNELS = [
    tile_kernel(op, f"{_HERE}.tile:{function}", *limits, in_place=True)
    for op, function, limits in (
        ("bce_with_logits", "forward", ()),
        ("bce_with_logits_backward", "backward", (configs.as_saved,)),
    )
]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
