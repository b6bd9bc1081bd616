"""The kernels of the embedding family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, columns, cuda, hip, row_levels, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.embedding import configs, sparse_configs, vendor
from tilewright.ops.tile_configs import WIDEST, tile_kernel

_HERE = "tilewright.ops.embedding"
_GPUS = (cuda(80), hip("gfx942"))

TRITON_KERNELS = [
    Kernel(
        "embedding_bag_mean",
        "triton",
        f"{_HERE}.triton:forward",
        Capability(_GPUS, limits=(unit_stride("weight"), row_levels("indices"))),
        configs.forward_configs,
    ),
    Kernel(
        "embedding_bag_mean_backward",
        "triton",
        f"{_HERE}.triton_backward:by_sorting",
        Capability(_GPUS, limits=(row_levels("indices", "dout"),)),
        configs.sorted_configs,
    ),
    Kernel(
        "embedding_bag_mean_backward",
        "triton",
        f"{_HERE}.triton_backward:by_atomics",
        Capability(_GPUS, limits=(row_levels("indices", "dout"),), deterministic=False),
        configs.atomic_configs,
        label="atomic",
    ),
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=limits),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op, function, limits in (
        ("embedding_bag_mean", "forward", (unit_stride("weight"), row_levels("indices"), configs.few_enough)),
        ("embedding_bag_mean_backward", "backward", (row_levels("dout"), configs.few_enough)),
    )
]

SPARSE_KERNELS = [
    Kernel(
        "embedding_bag_mean_sparse_backward",
        "triton",
        f"{_HERE}.triton_sparse:backward",
        Capability(_GPUS, limits=(row_levels("indices", "dout"),)),
        sparse_configs.triton_configs,
    ),
    Kernel(
        "embedding_bag_mean_sparse_backward",
        "tilelang",
        f"{_HERE}.tilelang_sparse:backward",
        Capability((cuda(80),), limits=(row_levels("indices", "dout"), sparse_configs.few_enough)),
        sparse_configs.tilelang_configs,
        files=("tilelang_sparse_programs.py", "tilelang_programs.py"),
    ),
]

VENDOR_KERNELS = [
    Kernel(op, "vendor", f"{_HERE}.vendor:{op}", Capability(limits=limits), label="aten")
    for op, limits in (
        ("embedding_bag_mean", (vendor.one_rounding, vendor.a_row_to_leave_out)),
        ("embedding_bag_mean_backward", (vendor.on_a_cpu, vendor.one_rounding)),
    )
]

TILE_KERNELS = [tile_kernel("embedding_bag_mean", f"{_HERE}.tile:forward", columns("weight", most=WIDEST))]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *SPARSE_KERNELS, *VENDOR_KERNELS, *TILE_KERNELS]
