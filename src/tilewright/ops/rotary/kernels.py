"""The kernels of the rotary family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from tilewright.core.capability import Capability, Limit, columns, cuda, hip, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.rotary import configs
from tilewright.ops.rotary.places import sequences
from tilewright.ops.tile_configs import tile_kernel

_HERE = "tilewright.ops.rotary"
IN_PLACE = "qkv_split_rope_append"
"""It writes rows of the caches, and reads none."""
PASSES: tuple[tuple[str, str, tuple[Limit, ...]], ...] = (
    ("rope", "triton:turned", (unit_stride("x"), sequences("x"), sequences("position_ids", inner=1))),
    ("rope_backward", "triton:turned", (sequences("dy"), sequences("position_ids", inner=1))),
    ("qkv_split_rope", "triton:split", (unit_stride("qkv", "q_norm", "k_norm"), sequences("qkv", inner=2),
                                        sequences("position_ids", inner=1))),
    ("qkv_split_rope_backward", "triton_backward:backward", (
        unit_stride("qkv", "q_norm", "k_norm"), sequences("dq", "dk", "dv"), sequences("qkv", inner=2),
        sequences("position_ids", inner=1))),
    ("qkv_split_rope_append", "triton:append", (
        unit_stride("qkv", "k_cache", "v_cache", "q_norm", "k_norm"), sequences("qkv", inner=2),
        sequences("k_cache", "v_cache"), sequences("pos", "rope_pos", inner=0))),
)  # fmt: skip

TRITON_KERNELS = [
    Kernel(op, "triton", f"{_HERE}.{source}",
           Capability((cuda(80), hip("gfx942")), limits=limits, in_place=op == IN_PLACE),
           configs.split_backward_configs if op == "qkv_split_rope_backward" else configs.triton_configs)
    for op, source, limits in PASSES
]  # fmt: skip

TILELANG_KERNELS = [
    Kernel(op, "tilelang", f"{_HERE}.tilelang:turned", Capability((cuda(80),), limits=limits), configs.tilelang_configs,
           files=("tilelang_programs.py",))
    for op, _, limits in PASSES[:2]
]  # fmt: skip

TILE_KERNELS = [tile_kernel(op, f"{_HERE}.tile:rotate", columns("cos")) for op in ("rope", "rope_backward")]

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS, *TILE_KERNELS]
