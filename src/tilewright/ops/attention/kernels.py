"""The kernels of the attention family, as data: one declaration each. Nothing here imports Triton or TileLang."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.capability import Capability, cpu, cuda, hip, unit_stride
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.attention import backward_configs, configs, configs_dense, configs_packed, cuda_configs, vendor

_HERE = "tilewright.ops.attention"
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
_DENSE = unit_stride("q", "k", "v", "o")
_READ = unit_stride("q", "k", "v", "kv_len", "prefix_kv_len", "cu_seqlens_q", "cu_seqlens_k", "state")
"""What kernels of ours read as it lies."""
TILE = 128


def _long_sequences(call: Call) -> Iterable[Reason]:
    """Tiles of many queries are of one sequence each, and mostly empty where sequences are short."""
    least = 2 * TILE
    if "cu_seqlens_q" in call.tensors and call.q.shape[0] < least * (call.cu_seqlens_q.shape[0] - 1):
        yield Reason("cu_seqlens_q", f"sequences of fewer than {least} tokens on average", "use the one without label")


def _many_queries(call: Call) -> Iterable[Reason]:
    """The other packs the few queries of several heads into a tile; this one leaves most of a tile empty."""
    queries = call.q.shape[-3]
    if "cu_seqlens_q" not in call.tensors and queries < TILE // 2:
        yield Reason("q", f"{queries} queries; takes {TILE // 2} and more", "use the one without label")


def _pairs(call: Call) -> Iterable[Reason]:
    """cuDNN's own words: s_q = s_kv = 1 is not supported."""
    if call.q.shape[1] == call.k.shape[1] == 1:
        yield Reason("q", "1 query and 1 key; cuDNN has no gradient of that", "use another backend")


def _few_keys(call: Call) -> Iterable[Reason]:
    """A program holds all keys and values, and the scores of its queries in registers."""
    keys, widest = call.k.shape[-3], max(call.q.columns, call.v.columns)
    if keys > configs_dense.FEW_KEYS or widest > configs_dense.NARROW_HEADS:
        yield Reason(
            "k",
            f"{keys} keys, heads of {widest}; takes up to {configs_dense.FEW_KEYS} and {configs_dense.NARROW_HEADS}",
        )
    if call.window_left >= 0:
        yield Reason("window_left", f"{call.window_left}; takes none")
    if call.prefix_rows > 0:
        yield Reason("prefix_rows", f"{call.prefix_rows}; takes none")


def _narrow_lengths(call: Call) -> Iterable[Reason]:
    """The source reads lengths as C's int."""
    if call.has("kv_len") and call.kv_len.dtype != torch.int32:
        yield Reason("kv_len", f"dtype {DTYPE_NAMES[call.kv_len.dtype]}; takes int32", "kv_len.int() would do")


def _no_float16(call: Call) -> Iterable[Reason]:
    """With inputs near 2000, 16 or 32 elements of dk, on an H200 at four of the ten sizes tried."""
    if call.q.dtype == torch.float16:
        yield Reason("q", "dtype fp16, in which scores' gradients beyond 65504 overflow: NaN and Inf change places")


_CUDNN = (vendor.no_window, vendor.no_mask, vendor.top_left)
_TRAINED = (vendor.half, _no_float16)
_FLASH = (vendor.head_dims(256), vendor.no_mask, vendor.flash_causal)
_EFFICIENT = (vendor.head_dims(1024), vendor.no_window, vendor.keys_to_see, vendor.top_left, vendor.heads_alike)
_CPU = (vendor.no_window, vendor.keys_to_see, vendor.top_left, vendor.enough_keys)

# In half precision the forward for CPUs takes a coarse exponential: lse is off by 17 ulps of float32, and gradients
# read it. A gradient reads lse, which is in float32 whatever q is in.
VENDOR_KERNELS = [
    Kernel(
        f"attention{suffix}",
        "vendor",
        f"{_HERE}.vendor:{label}{suffix}",
        Capability((device,), dtypes, limits=(vendor.common, _DENSE, *limits), deterministic=deterministic),
        label=label,
        preference=place,
    )
    for place, label, suffix, device, dtypes, deterministic, limits in (
        (10, "cudnn", "", cuda(90), HALVES, True, (vendor.head_dims(256), *_CUDNN)),
        (10, "cudnn", "_backward", cuda(90), FLOATS, False, (vendor.head_dims(128), *_CUDNN, *_TRAINED, _pairs)),
        (11, "flash", "", cuda(80), HALVES, True, _FLASH),
        (11, "flash", "_backward", cuda(80), FLOATS, False, (*_FLASH, *_TRAINED)),
        (12, "efficient", "", cuda(80), FLOATS, True, _EFFICIENT),
        (13, "cpu", "", cpu(), (torch.float32,), True, _CPU),
        (13, "cpu", "_backward", cpu(), FLOATS, True, _CPU),
    )
]

TRITON_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton:forward",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(_READ, configs.head_dims, configs.countable),
        ),
        found,
    )
    for op, found in (
        ("attention", configs_dense.forward_configs),
        ("varlen_attention", configs_packed.packed_configs),
    )
] + [
    Kernel(
        op,
        "triton",
        f"{_HERE}.triton_backward:backward",
        Capability(
            (cuda(80), hip("gfx942")),
            limits=(_READ, configs.head_dims, configs.countable),
        ),
        found,
    )
    for op, found in (
        ("attention_backward", backward_configs.backward_configs),
        ("varlen_attention_backward", configs_packed.packed_backward_configs),
    )
]

HOPPER_KERNELS = [
    Kernel(
        op,
        "triton",
        f"{_HERE}.hopper:forward",
        Capability(
            (cuda(90, 90),),
            HALVES,
            limits=(_READ, configs.head_dims, configs.countable, configs.for_hopper, _long_sequences, _many_queries),
            emulated=False,
        ),
        configs_dense.hopper_configs,
        label="hopper",
        preference=14,  # behind those of aten, before all others of ours
    )
    for op in ("attention", "varlen_attention")
]

SHORT_KERNELS = [
    Kernel(
        "attention",
        "triton",
        f"{_HERE}.short:forward",
        Capability(
            (cuda(90, 90),),
            HALVES,
            limits=(_READ, configs.head_dims, configs.countable, configs.for_hopper, _few_keys),
            emulated=False,
        ),
        configs_dense.short_configs,
        label="short",
    )
]


def _by_hand(call: Call) -> tuple[Config, ...]:
    """Threads bring the last columns of such queries without being waited for where a part has no keys, and the other
    part may then write in their place: these have one part."""
    apart = call.q.columns > cuda_configs.PANEL and 0 < call.q.columns % cuda_configs.PANEL <= cuda_configs.REST
    found = cuda_configs.full_configs(call)
    return tuple(c for c in found if not (apart and c.at_once and c.parts > 1))


CUDA_KERNELS = [
    Kernel(
        "attention",
        "cuda",
        f"{_HERE}.cuda:forward",
        Capability(
            (cuda(90, 90),),
            HALVES,
            limits=(
                _READ,
                configs.head_dims,
                configs.countable,
                configs.for_hopper,
                cuda_configs.every_key,
                _narrow_lengths,
            ),
            emulated=False,
        ),
        _by_hand,
        preference=15,
        files=("attention_full.cu", "attention_full.cuh"),
    )
]

TILELANG_KERNELS = [
    Kernel(
        op,
        "tilelang",
        f"{_HERE}.tilelang:forward",
        Capability(
            (cuda(80),),
            limits=(_READ, configs.head_dims, configs.countable, configs.few_tiles),
        ),
        configs.tilelang_configs,
        files=("tilelang_programs.py",),
    )
    for op in ("attention", "varlen_attention")
]

KERNELS = [*VENDOR_KERNELS, *TRITON_KERNELS, *HOPPER_KERNELS, *SHORT_KERNELS, *CUDA_KERNELS, *TILELANG_KERNELS]
