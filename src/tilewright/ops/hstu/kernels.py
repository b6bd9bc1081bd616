"""The kernels of the family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, cuda, hip, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.hstu import configs

_HERE = "tilewright.ops.hstu"
_LIMITS = (unit_stride("q", "k", "v"), configs.head_dims, configs.countable)

TRITON_KERNELS = [
    Kernel(
        op, "triton", f"{_HERE}.triton:forward", Capability((cuda(80), hip("gfx942")), limits=_LIMITS),
        configs.forward_configs,
    )
    for op in ("silu_attention", "hstu_attention")
]  # fmt: skip

KERNELS = [*TRITON_KERNELS]
