"""The kernels of the linear family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright.core.call import Call
from tilewright.core.capability import Capability, cpu, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.core.reason import Reason
from tilewright.ops.linear import configs
from tilewright.ops.linear.onednn import by_onednn, one_run
from tilewright.ops.linear.vendor import dense_rows, one_kernel, plain_gradient

_HERE = "tilewright.ops.linear"


def _wide_residual(call: Call) -> Iterable[Reason]:
    """One that is read in pieces goes through more shared memory than stages leave."""
    if call.has("residual") and (call.weight.rows % 16 or call.residual.vector_bytes() < 16):
        yield Reason("residual", f"{call.residual}; takes multiples of 16 columns, rows at multiples of 16 bytes")


TRITON_KERNELS = [
    Kernel(
        "linear",
        "triton",
        f"{_HERE}.triton_descriptors:forward",
        Capability(
            (cuda(90, 110),),
            limits=(
                unit_stride("x", "weight", "bias", "residual"),
                row_levels("residual"),
                configs.by_descriptor,
                _wide_residual,
            ),
        ),
        configs.staying_configs,
        label="descriptors",
    ),
    Kernel(
        "linear",
        "triton",
        f"{_HERE}.triton:forward",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride("x", "weight", "bias", "residual"), row_levels("x", "residual")),
        ),
        configs.forward_configs,
    ),
    Kernel(
        "linear_backward",
        "triton",
        f"{_HERE}.triton_backward:backward",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride("x", "weight", "z"), row_levels("dy", "x", "z")),
        ),
        configs.backward_configs,
    ),
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=(unit_stride(*dense), row_levels(*rows))),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function, dense, rows in (
        ("linear", "forward", ("x", "weight", "bias", "residual"), ("x", "residual")),
        ("linear_backward", "backward", ("x", "weight", "z"), ("dy", "x", "z")),
    )
]

VENDOR_KERNELS = [
    Kernel(
        "linear",
        "vendor",
        f"{_HERE}.vendor:linear",
        Capability(limits=(dense_rows("x", "weight", "residual"), unit_stride("bias"), one_kernel)),
        label="aten",
    ),
    Kernel(
        "linear",
        "vendor",
        f"{_HERE}.onednn:linear",
        Capability(
            (cpu(),),
            dtypes=(torch.float32,),  # aten itself takes oneDNN for the others
            limits=(one_run("x", "weight", "residual"), unit_stride("bias"), by_onednn),
        ),
        label="onednn",
    ),
    Kernel(
        "linear_backward",
        "vendor",
        f"{_HERE}.vendor:linear_backward",
        Capability(limits=(dense_rows("dy", "x", "weight"), row_levels("z", most=1), plain_gradient)),
        label="aten",
    ),
]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS]
