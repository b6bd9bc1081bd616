"""The kernels of the norm family, as data: one declaration a kernel. Nothing of Triton or TileLang is imported here."""

from __future__ import annotations

from tilewright.core.capability import Capability, cuda, hip
from tilewright.core.kernel import Kernel
from tilewright.ops.norm import vendor

_HERE = "tilewright.ops.norm"

KERNELS = [
    *(
        Kernel(op, "vendor", f"{_HERE}.vendor:{op}", Capability(devices, limits=(limit,)), label="aten")
        for op, devices, limit in (
            ("rms_norm", (), vendor.plain_rms),
            ("layer_norm", (), vendor.plain_layer),
            ("rms_norm_backward", (cuda(50), hip("gfx942")), vendor.plain_backward),
            ("layer_norm_backward", (), vendor.plain_backward),
        )
    ),
]
