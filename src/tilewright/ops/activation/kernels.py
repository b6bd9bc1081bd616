"""The kernels of the activation family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.activation import affine_configs, configs
from tilewright.ops.tile_configs import tile_kernel

_HERE = "tilewright.ops.activation"
READ = ("gate", "up", "x")
"""Read as dense in the last dimension; an upstream gradient may be strided in any way."""
FORWARD = ("swiglu", "swiglu_packed", "geglu", "geglu_packed", "silu", "gelu")
IN_PLACE = ("silu", "gelu", "scale_bias_add", "bias_act")
"""A tile is read whole before any of it is written, and no two programs share an element."""
PASSES = [*((op, "forward") for op in FORWARD), *((f"{op}_backward", "backward") for op in FORWARD)]

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton:{function}",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride(*READ), row_levels(*READ, "dy")),
            in_place=op in IN_PLACE,
        ),
        configs.triton_configs,
    )
    for op, function in PASSES
]

# Parameters by column are read as dense too.
AFFINE_READ = (*READ, "residual", "scale", "bias")
AFFINE = [
    ("scale_bias_add", "forward"),
    ("scale_bias_add_backward", "backward"),
    ("bias_act", "forward"),
    ("bias_act_backward", "backward"),
]
AFFINE_LIMITS = (unit_stride(*AFFINE_READ), row_levels("x", "residual", "bias", "dy"))

TRITON_KERNELS += [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton_affine:{function}",
        Capability((cuda(80), hip("gfx942")), limits=AFFINE_LIMITS, in_place=op in IN_PLACE),
        affine_configs.triton_configs,
    )
    for op, function in AFFINE
]

# On a CPU aten's GELU is an approximation 3.5 ulp off in float32, and makes NaN of infinity in bfloat16.
VENDOR_KERNELS = [
    Kernel(op, "vendor", f"{_HERE}.vendor:{op}", Capability(devices, in_place=op in IN_PLACE), label="aten")
    for op, devices in (
        ("silu", ()),
        ("silu_backward", ()),
        ("gelu", (cuda(50), hip("gfx942"))),
        ("gelu_backward", (cuda(50), hip("gfx942"))),
    )
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability(
            (cuda(80),),
            limits=(unit_stride(*READ), row_levels(*READ, "dy"), configs.few_enough),
            in_place=op in IN_PLACE,
        ),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function in PASSES
]

TILELANG_KERNELS += [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang_affine:{function}",
        Capability((cuda(80),), limits=(*AFFINE_LIMITS, configs.few_enough), in_place=op in IN_PLACE),
        affine_configs.tilelang_configs,
        files=("tilelang_affine_programs.py", "tilelang_programs.py"),
    )
    for op, function in AFFINE
]

TILE_KERNELS = [tile_kernel(op, f"{_HERE}.tile:{function}", in_place=op in IN_PLACE) for op, function in PASSES]

TILE_KERNELS += [
    tile_kernel(op, f"{_HERE}.tile_affine:{function}", in_place=op in IN_PLACE)
    for op, function in (
        ("scale_bias_add", "affine_forward"),
        ("scale_bias_add_backward", "affine_backward"),
        ("bias_act", "bias_forward"),
        ("bias_act_backward", "bias_backward"),
    )
]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
