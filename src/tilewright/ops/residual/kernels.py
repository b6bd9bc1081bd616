"""The kernels of the residual family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, columns, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.residual import configs
from tilewright.ops.tile_configs import WIDEST, tile_kernel

_HERE = "tilewright.ops.residual"
READ = ("x", "gate", "residual")
"""Read as dense in the last dimension; an upstream gradient may be strided in any way."""
PASSES = (
    ("gated_residual", "gated", "forward"),
    ("gated_residual_backward", "gated", "backward"),
    ("dropout_add", "dropout", "forward"),
    ("dropout_add_backward", "dropout", "backward"),
)

IN_PLACE = ("gated_residual",)
"""A tile is read whole before any of it is written, and no two programs share an element."""

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton_{module}:{function}",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride(*READ), row_levels(*READ, "dy")),
            in_place=op in IN_PLACE,
        ),
        configs.triton_configs,
    )
    for op, module, function in PASSES
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{module}_{function}",
        Capability(
            (cuda(80),),
            limits=(unit_stride(*READ), row_levels(*READ, "dy"), configs.few_enough),
            in_place=op in IN_PLACE,
        ),
        configs.tilelang_configs,
        files=("tilelang_programs.py", "tilelang_dropout.py"),
    )
    for op, module, function in PASSES
]

TILE_KERNELS = [
    tile_kernel(op, f"{_HERE}.tile:{function}", columns("dy", most=WIDEST), in_place=op in IN_PLACE)
    for op, function in (
        ("gated_residual", "gated_forward"),
        ("gated_residual_backward", "gated_backward"),
        ("dropout_add", "dropout_forward"),
        ("dropout_add_backward", "dropout_backward"),
    )
]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *TILE_KERNELS]
