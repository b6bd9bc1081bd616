"""The kernels of the sampling family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, columns, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.rotary.places import sequences
from tilewright.ops.sampling import configs, groups
from tilewright.ops.tile_configs import WIDEST, tile_kernel

_HERE = "tilewright.ops.sampling"
SOFTMAX = (("softmax", "forward"), ("softmax_backward", "backward"))

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton_softmax:{function}",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(
                row_levels("x", "y", "dy"),
                columns("x", most=configs.MOST_COLUMNS),
                columns("dy", most=configs.MOST_COLUMNS),
            ),
        ),
        configs.softmax_configs,
    )
    for op, function in SOFTMAX
]

MOST_VOCABULARY = 1 << 23
_TOP = (
    unit_stride("probs"),
    row_levels("probs"),
    columns("probs", most=MOST_VOCABULARY),
    sequences("row_k", "row_p", inner=0),
)
TRITON_KERNELS += [
    Kernel(
        f"top_k_top_p_{function}",
        "triton",
        f"{_HERE}.triton_{file}:{function}",
        Capability((cuda(80), hip("gfx942")), limits=(*_TOP, *limits)),
        configs_,
        label=label,
        preference=place,
    )
    for file, configs_, label, place, limits in (
        ("draw", configs.top_configs, "", None, ()),
        # Before the search that any call of k and p can have.
        ("bins", configs.bins_configs, "bins", 14, (configs.one_filter,)),
        # Before both: one pass over a row, where a number tells how few tokens are kept.
        ("groups", groups.group_configs, "groups", 13, (groups.known_k,)),
    )
    for function in ("renorm", "sample")
]

VENDOR_KERNELS = [Kernel(op, "vendor", f"{_HERE}.vendor:{op}", label="aten") for op, _ in SOFTMAX]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=(row_levels("x", "y", "dy"), configs.few_enough)),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function in SOFTMAX
]

TILE_KERNELS = [
    tile_kernel(op, f"{_HERE}.tile:{function}", columns("x", most=WIDEST), columns("dy", most=WIDEST))
    for op, function in SOFTMAX
]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
