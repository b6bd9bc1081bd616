"""The kernels of the norm family, as data: one declaration each. Nothing of Triton or TileLang is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call
from tilewright.core.capability import (
    Capability,
    Limit,
    Target,
    aligned,
    columns,
    cuda,
    hip,
    row_levels,
    rows,
    unit_stride,
)
from tilewright.core.kernel import Configs, Kernel
from tilewright.core.reason import Reason
from tilewright.ops.norm import cuda_configs as wide
from tilewright.ops.norm import tilelang_configs, triton_configs, vendor
from tilewright.ops.tile_configs import tile_kernel

_HERE = "tilewright.ops.norm"
WIDEST = 131072
PARAMETERS = ("weight", "bias", "pre_bias")
"""Read as dense by every kernel. Backward reads the weight alone; of the biases it needs the dtype."""

FORWARD = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "l2_norm")
IN_PLACE = ("rms_norm", "add_rms_norm", "add_layer_norm")
"""Programs keep to rows of their own. Those that hold a row have read it before they write; those that walk one read
the residual once, before h is written there and read back behind a barrier, and x for the last time just before y."""
BACKWARD = {"rms_norm_backward": "rms", "layer_norm_backward": "layer", "l2_norm_backward": "l2"}


def _inputs(op: str) -> tuple[str, ...]:
    """The row tensors of an op that its kernels read as rows: gradients may be strided in any way."""
    return ("y",) if op == "l2_norm_backward" else ("x",) if op in BACKWARD else ("x", "residual")


def _kernel(
    op: str, backend: str, function: str, devices: tuple[Target, ...], configs: Configs, *limits: Limit, **more: object
) -> Kernel:
    return Kernel(
        op,
        backend,
        f"{_HERE}.{function}",
        Capability(devices, limits=limits, in_place=op in IN_PLACE),
        configs,
        **more,  # type: ignore[arg-type]
    )


TRITON = (cuda(80), hip("gfx942"))
TRITON_KERNELS = [
    *(
        _kernel(op, "triton", "triton:forward", TRITON, triton_configs.forward_configs,
                columns("x", most=WIDEST), unit_stride("x", "residual", *PARAMETERS), row_levels("x", "residual"))
        for op in FORWARD
    ),
    *(
        _kernel(op, "triton", f"triton_backward:{name}_backward", TRITON, triton_configs.backward_configs,
                columns(*_inputs(op), most=WIDEST), unit_stride(*_inputs(op), "weight"),
                row_levels(*_inputs(op), "dy", "dh"))
        for op, name in BACKWARD.items()
    ),
]  # fmt: skip

# Its row indices are int32. A power of two, so that a call class, which knows rows by the power of two, has one answer.
TILELANG_ROWS = 1 << 30
TILELANG_HELD = 32 * tilelang_configs.MAX_LANES
"""Wider rows are walked."""


def read_back(call: Call) -> Iterable[Reason]:
    """TileLang says `__restrict__` of everything, so what is only read comes by the read-only cache, which need not see
    writes: where rows are walked, h is read back from where the residual was."""
    if call.aliased and call.has("residual") and call.x.columns > TILELANG_HELD:
        yield Reason("in place", f"rows above {TILELANG_HELD} columns are read back", f"{call.op} would do")


TILELANG_FILES = ("tilelang_programs.py", "tilelang_gradients.py")
TILELANG_KERNELS = [
    *(
        _kernel(op, "tilelang", "tilelang:forward", (cuda(80),), tilelang_configs.forward_configs,
                rows("x", most=TILELANG_ROWS), columns("x", most=WIDEST), unit_stride("x", "residual", *PARAMETERS),
                row_levels("x", "residual"), read_back, files=TILELANG_FILES)
        for op in FORWARD
    ),
    *(
        _kernel(op, "tilelang", f"tilelang:{name}_backward", (cuda(80),), tilelang_configs.backward_configs,
                rows(*_inputs(op), most=TILELANG_ROWS), columns(*_inputs(op), most=WIDEST),
                unit_stride(*_inputs(op), "weight"), row_levels(*_inputs(op), "dy", "dh"), files=TILELANG_FILES)
        for op, name in BACKWARD.items()
    ),
]  # fmt: skip

PAYS = "where it starts to pay"
CUDA_KERNELS = [
    *(
        _kernel(op, "cuda", "cuda:forward", (cuda(90),), wide.forward_configs,
                columns("x", least=16384, most=WIDEST, why=PAYS), unit_stride("x", "residual", *PARAMETERS),
                row_levels("x", "residual", most=1), wide.fits_forward, files=("norm_wide.cu", "norm_wide.cuh"))
        for op in FORWARD if op != "l2_norm"
    ),
    *(
        _kernel(op, "cuda", f"cuda:{name}_backward", (cuda(90),), wide.backward_configs,
                columns("x", least=16384, most=WIDEST, why=PAYS), unit_stride("x", "dy", "dh", "weight"),
                row_levels("x", "dy", "dh", most=1), aligned("x", "dy", "dh", "weight"), wide.fits_backward,
                files=("norm_wide_backward.cu", "norm_wide.cuh"))
        for op, name in BACKWARD.items() if name != "l2"
    ),
]  # fmt: skip

VENDOR_KERNELS = [
    Kernel(
        op,
        "vendor",
        f"{_HERE}.vendor:{op}",
        Capability(devices, limits=(limit,), in_place=op in IN_PLACE),
        label="aten",
    )
    for op, devices, limit in (
        ("rms_norm", (), vendor.plain_rms),
        ("layer_norm", (), vendor.plain_layer),
        ("rms_norm_backward", (cuda(50), hip("gfx942")), vendor.plain_backward),
        ("layer_norm_backward", (), vendor.plain_backward),
    )
]

TILE_KERNELS = [
    *(
        tile_kernel(op, f"{_HERE}.tile:forward", columns("x", most=WIDEST), in_place=op in IN_PLACE) for op in FORWARD
    ),
    *(
        tile_kernel(op, f"{_HERE}.tile:{name}_backward", columns(*_inputs(op), most=WIDEST))
        for op, name in BACKWARD.items()
    ),
]  # fmt: skip

KERNELS = [*CUDA_KERNELS, *TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
