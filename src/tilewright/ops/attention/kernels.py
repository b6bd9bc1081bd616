"""The kernels of the attention family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

import torch

from tilewright.core.capability import Capability, cpu, cuda, hip, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.ops.attention import backward_configs, configs, vendor

_HERE = "tilewright.ops.attention"
HALVES = (torch.float16, torch.bfloat16)
_DENSE = unit_stride("q", "k", "v", "o")

# In half precision the forward for CPUs takes a coarse exponential: lse is off by 17 ulps of float32, and gradients
# read it.
VENDOR_KERNELS = [
    Kernel(
        f"attention{suffix}",
        "vendor",
        f"{_HERE}.vendor:{label}{suffix}",
        Capability(devices, dtypes, limits=(vendor.common, _DENSE, *limits), deterministic=deterministic),
        label=name,
        preference=place,
    )
    for place, label, name, suffix, devices, dtypes, deterministic, limits in (
        (10, "cudnn", "cudnn", "", (cuda(90),), HALVES, True,
         (vendor.head_dims(128), vendor.no_window, vendor.no_mask, vendor.top_left, vendor.heads_alike)),
        (10, "cudnn", "cudnn", "_backward", (cuda(90),), HALVES, False,
         (vendor.head_dims(128), vendor.no_window, vendor.no_mask, vendor.top_left, vendor.heads_alike)),
        (11, "flash", "flash", "", (cuda(80),), HALVES, True,
         (vendor.head_dims(256), vendor.no_mask, vendor.flash_causal)),
        (11, "flash", "flash", "_backward", (cuda(80),), HALVES, False,
         (vendor.head_dims(256), vendor.no_mask, vendor.flash_causal)),
        (12, "efficient", "efficient", "", (cuda(80),), (torch.float32, *HALVES), True,
         (vendor.head_dims(1024), vendor.no_window, vendor.keys_to_see, vendor.top_left, vendor.heads_alike)),
        (13, "cpu", "cpu", "", (cpu(),), (torch.float32,), True,
         (vendor.no_window, vendor.keys_to_see, vendor.top_left)),
        (13, "cpu", "cpu", "_backward", (cpu(),), (torch.float32, *HALVES), True,
         (vendor.no_window, vendor.keys_to_see, vendor.top_left)),
    )
]  # fmt: skip

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton:forward",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride("q", "k", "v"), configs.head_dims, configs.countable),
        ),
        configs.forward_configs,
    )
    for op in ("attention", "varlen_attention")
] + [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton_backward:{function}",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(unit_stride("q", "k", "v"), configs.head_dims, configs.countable, *limits),
            deterministic=deterministic,
        ),
        found,
        label=label,
    )
    for op in ("attention_backward", "varlen_attention_backward")
    for function, found, label, deterministic, limits in (
        ("backward", backward_configs.backward_configs, "", True, ()),
        (
            "fused",
            backward_configs.fused_configs,
            "fused",
            False,
            (backward_configs.all_needed, backward_configs.contiguous_keys, backward_configs.no_tensor_memory),
        ),
    )
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:forward",
        Capability(
            (cuda(80),),
            limits=(unit_stride("q", "k", "v"), configs.head_dims, configs.countable, configs.few_tiles),
        ),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op in ("attention", "varlen_attention")
]

KERNELS = [*VENDOR_KERNELS, *TRITON_KERNELS, *TILELANG_KERNELS]
