"""The kernels of the family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call
from tilewright.core.capability import Capability, cuda, hip, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.core.reason import Reason
from tilewright.ops.attention.configs import tilelang_configs
from tilewright.ops.hstu import configs

_HERE = "tilewright.ops.hstu"
_LIMITS = (
    unit_stride("q", "k", "v", "seq_offsets", "num_targets", "state"),
    configs.head_dims,
    configs.countable,
)

TRITON_KERNELS = [
    Kernel(
        f"{op}{suffix}", "triton", f"{_HERE}.{source}", Capability((cuda(80), hip("gfx942")), limits=_LIMITS), found,
    )
    for op in ("silu_attention", "hstu_attention")
    for suffix, source, found in (
        ("", "triton:forward", configs.forward_configs),
        ("_backward", "triton_backward:backward", configs.backward_configs),
    )
]  # fmt: skip


def _compiled(call: Call) -> Iterable[Reason]:
    """What TileLang 0.1.15 does not compile: random numbers at a constant offset."""
    if call.options.get("dropout_p") and "offset" in call.tensors and not call.has("offset"):
        yield Reason("offset", "None, with dropout", "pass a tensor of 0")


TILELANG_KERNELS = [
    Kernel(
        f"{op}{suffix}", "tilelang", f"{_HERE}.tilelang:{function}",
        Capability((cuda(80),), limits=(*_LIMITS, _compiled)), found,
        files=("tilelang_programs.py", "tilelang_gradients.py"),
    )
    for op in ("silu_attention", "hstu_attention")
    for suffix, function, found in (
        ("", "forward", tilelang_configs),
        ("_backward", "backward", configs.tilelang_backward_configs),
    )
]  # fmt: skip

KERNELS = [*TRITON_KERNELS, *TILELANG_KERNELS]
