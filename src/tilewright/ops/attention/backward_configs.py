"""How the gradients of attention are cut into tiles for Triton, best guess first. Needs no compiler.

Keys: `k_m` queries and `k_n` keys a tile where a program owns keys (dk, dv), with its warps and stages; `q_m` and `q_n`
where it owns queries (dq); `k_joint` 1 where both products of keys are issued together; `k_ahead` and `q_ahead` 1 where
those that P waits for are a tile ahead; `tma` 1 where what is walked comes through descriptors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewright.core.call import Call
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.attention.configs import Shape, by_descriptor, width_of
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.shared_memory import shared_bytes

Pair = tuple[Shape, Shape]
"""Queries, keys, warps and stages of a program that owns keys, and of one that owns queries."""

FUSED: dict[int, tuple[Shape, ...]] = {
    64: ((64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 3), (64, 128, 4, 2)),
    128: ((64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 128, 8, 1)),
    256: ((64, 64, 8, 1), (64, 32, 8, 2), (64, 64, 8, 2)),
}
"""Of one program that owns keys and adds to dq, by the width of a head."""
DELTA_ROWS = 32
"""Rows a program of the first launch."""
GROUPS: dict[int, tuple[Pair, ...]] = {
    64: (((64, 128, 8, 2), (128, 128, 8, 2)), ((128, 128, 8, 2), (128, 64, 4, 3)), ((64, 128, 4, 2), (128, 64, 8, 3))),
    128: (((64, 128, 8, 2), (128, 64, 8, 2)), ((64, 64, 4, 2), (128, 128, 8, 2)), ((128, 64, 8, 2), (64, 64, 4, 2))),
    256: (((32, 64, 8, 2), (64, 32, 4, 2)), ((64, 64, 8, 1), (64, 64, 8, 1)), ((32, 64, 8, 1), (128, 32, 8, 2))),
}
"""By the width of a head, where products are of whole warp groups (Hopper and later)."""
TENSOR_MEMORY: dict[int, tuple[Pair, ...]] = {
    64: (),
    128: (((64, 64, 8, 2), (128, 64, 8, 2)),),
    256: (((64, 64, 8, 1), (64, 32, 4, 2)),),
}
"""Tried first where accumulators are in a memory of their own (sm_100): the others spill there."""
AHEAD: dict[int, tuple[Pair, ...]] = {
    64: (((64, 128, 8, 2), (128, 64, 8, 2)), ((64, 128, 8, 3), (128, 64, 8, 3))),
    128: (((64, 128, 8, 2), (128, 64, 8, 2)), ((32, 128, 8, 2), (64, 64, 4, 2))),
    256: (),
}
"""Of the same devices, where tiles are walked a product ahead."""
OTHERS: dict[int, tuple[Pair, ...]] = {
    64: (((32, 64, 8, 2), (64, 64, 4, 2)), ((64, 64, 4, 2), (64, 64, 4, 2)), ((64, 128, 8, 2), (128, 64, 8, 2))),
    128: (((32, 64, 8, 2), (64, 32, 8, 2)), ((64, 64, 8, 1), (64, 64, 8, 1))),
    256: (((16, 32, 8, 1), (16, 32, 8, 1)), ((32, 32, 8, 1), (32, 32, 8, 1))),
}
"""Of other devices."""
FUSED_OTHERS: dict[int, tuple[Shape, ...]] = {
    64: ((32, 64, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)),
    128: ((32, 32, 8, 2), (32, 64, 8, 2), (64, 64, 8, 1)),
    256: ((16, 16, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
}
SINGLE: dict[int, tuple[Pair, ...]] = {
    64: (((32, 32, 8, 1), (32, 32, 8, 1)), ((16, 32, 4, 1), (32, 16, 4, 1))),
    128: (((16, 16, 8, 1), (16, 16, 8, 1)), ((16, 32, 8, 1), (32, 16, 8, 1)), ((16, 16, 4, 1), (16, 16, 4, 1))),
    256: (((16, 16, 8, 1), (16, 16, 8, 1)),),
}
"""Of float32."""
FUSED_SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((16, 32, 8, 1), (32, 32, 8, 1), (16, 32, 4, 1)),
    128: ((16, 16, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    256: ((16, 16, 8, 1),),
}
DESCRIPTORS = False
"""Not yet: the copy of a row's two numbers by a descriptor of one dimension is an illegal instruction on an H100."""
SMALLEST: Pair = ((16, 16, 4, 1), (16, 16, 4, 1))


def backward_configs(call: Call) -> tuple[Config, ...]:
    wide = max(64, width_of(call.q), width_of(call.v))
    if call.q.dtype == torch.float32 and call.device.is_gpu:
        wanted = SINGLE[wide]
    else:
        groups = not call.device.is_gpu or (90 <= call.device.sm < 120 and call.dropout_p == 0.0)
        wanted = (GROUPS if groups else OTHERS)[wide]
        if groups and call.device.is_gpu and call.device.sm >= 100:
            wanted = (*TENSOR_MEMORY[wide], *wanted)
        if groups and call.device.is_gpu and not DESCRIPTORS:  # pointers take registers that the large tiles have not
            wanted = (*OTHERS[wide], *wanted)
    found: dict[Config, None] = {}
    for pair in (*wanted, SMALLEST):
        if pair != SMALLEST or not found:
            found |= dict.fromkeys(c for joint in _joint(call) for c in _paired(call, pair, joint, 0, 0))
    plain = call.tensors.get("mask") is None and call.dropout_p == 0.0 and call.has("do")
    if plain and wanted is GROUPS[wide] and _by_descriptor(call):
        for pair in AHEAD[wide]:
            found |= dict.fromkeys((*_paired(call, pair, 1, 0, 1), *_paired(call, pair, 1, 1, 1)))
    return tuple(found)


def _joint(call: Call) -> tuple[int, ...]:
    """Whether both products that a program of keys sums are issued together, best guess first: where products are of
    warp groups and read registers. A loop over heads leaves no registers for it."""
    if not call.device.is_gpu or not 90 <= call.device.sm < 100 or call.q.dtype == torch.float32:
        return (0,)
    return (1, 0) if call.q.shape[-2] == call.k.shape[-2] and call.q.dtype != torch.float16 else (0, 1)


def _paired(call: Call, pair: Pair, k_joint: int, k_ahead: int, q_ahead: int) -> tuple[Config, ...]:
    """Both programs in what fits, with and without descriptors; none where either does not."""
    rows, keys = power_of_2_at_least(call.q.shape[-3]), power_of_2_at_least(call.k.shape[-3])
    k_m, k_n, k_warps, k_stages = _fitted(call, pair[0], 1, ahead=k_ahead)
    q_m, q_n, q_warps, q_stages = _fitted(call, pair[1], 0, ahead=q_ahead)
    if not k_stages or not q_stages:
        return ()
    k_m, q_m = (min(m, max(16, rows)) for m in (k_m, q_m))
    k_n, q_n = (min(n, max(16, keys)) for n in (k_n, q_n))
    return tuple(
        Config(
            k_m=k_m, k_n=k_n, k_warps=k_warps, k_stages=k_stages, k_joint=k_joint, k_ahead=k_ahead,
            q_m=q_m, q_n=q_n, q_warps=q_warps, q_stages=q_stages, q_ahead=q_ahead, tma=tma,
        )
        for tma in ((1,) if k_ahead or q_ahead else (1, 0) if _by_descriptor(call) else (0,))
    )  # fmt: skip


def fused_configs(call: Call) -> tuple[Config, ...]:
    """Where dq is summed in memory."""
    wide = max(64, width_of(call.q), width_of(call.v))
    rows, keys = power_of_2_at_least(call.q.shape[-3]), power_of_2_at_least(call.k.shape[-3])
    if call.q.dtype == torch.float32 and call.device.is_gpu:
        wanted = FUSED_SINGLE[wide]
    else:
        groups = not call.device.is_gpu or (90 <= call.device.sm < 120 and call.dropout_p == 0.0)
        wanted = (FUSED if groups else FUSED_OTHERS)[wide]
        # A loop over heads, or fp16's power of 2, is a number too many for the registers of the first.
        grouped = call.q.shape[-2] != call.k.shape[-2]
        if groups and ((wide > 64 and grouped) or (wide == 256 and call.q.dtype == torch.float16)):
            wanted = (*wanted[1:], wanted[0])
        if groups and call.device.is_gpu and not DESCRIPTORS:
            wanted = (*FUSED_OTHERS[wide], *wanted)
    found: dict[Config, None] = {}
    for shape in (*wanted, SMALLEST[0]):
        m, n, warps, stages = _fitted(call, shape, 1, m_n=call.q.dtype.itemsize, m_wide=4)
        if not stages or (shape == SMALLEST[0] and found):
            continue
        m, n = min(m, max(16, rows)), min(n, max(16, keys))
        for tma in (1, 0) if _by_descriptor(call) else (0,):
            for joint in _joint(call):
                found[Config(k_m=m, k_n=n, k_warps=warps, k_stages=stages, k_joint=joint, tma=tma)] = None
    return tuple(found)


def all_needed(call: Call) -> Iterable[Reason]:
    """What finds dq on the way to dk and dv has nothing to gain without."""
    if not (call.has("dq") and (call.has("dk") or call.has("dv"))):
        yield Reason(
            "needs", "not both dq and one of dk and dv; this kernel finds them together", "use the one without label"
        )


def contiguous_keys(call: Call) -> Iterable[Reason]:
    """dq is a sum over tiles of keys that lie in registers: each key of one is seen by some query, or by none for a
    reason that the tile's place tells."""
    if call.tensors.get("mask") is not None:
        yield Reason("mask", "given; this kernel takes masks by position alone", "use the one without label")
    if call.options["prefix_rows"]:
        yield Reason("prefix_rows", f"{call.prefix_rows}; this kernel takes 0", "use the one without label")


def no_tensor_memory(call: Call) -> Iterable[Reason]:
    """Accumulators of all five products are more tensor memory than Triton 3.6 finds: it compiles them to a trap."""
    if call.device.kind == "cuda" and 100 <= call.device.sm < 120:
        yield Reason(
            "device", f"{call.device}; this kernel holds more than its tensor memory", "use the one without label"
        )


def _fitted(call: Call, shape: Shape, owned: int, m_n: int = 0, m_wide: int = 0, ahead: int = 0) -> Shape:
    """With as many stages as fit in shared memory beside what a program owns, of which 0 says that none does. What else
    it holds: `m_n` bytes of each pair, `m_wide` of each number of a row. What is walked `ahead` comes twice."""
    m, n, warps, stages = shape
    size = call.q.dtype.itemsize * (width_of(call.q) + width_of(call.v))
    mine, walked = (n, m) if owned else (m, n)
    room = shared_bytes(call.device) - (mine * size if call.device.kind != "hip" else 0)
    room -= m * n * m_n + m * width_of(call.q) * m_wide
    size += call.q.dtype.itemsize * width_of(call.q) * ahead
    return m, n, warps, max(0, min(stages, room // (walked * size)))


def _by_descriptor(call: Call) -> bool:
    """Whether hardware can copy tiles of everything that is walked."""
    if not DESCRIPTORS or not call.device.is_gpu or not by_descriptor(call):
        return False
    if 2 * math.prod(call.q.shape[:-1]) >= 1 << 31:  # two numbers a row are one tensor of a descriptor
        return False
    for facts in (call.q, call.do):
        if facts is None:
            continue
        size = facts.dtype.itemsize
        if facts.column_stride != 1 or facts.align < 16 or facts.columns * size % 16:
            return False
        steps = [s * size for n, s in zip(facts.shape[:-1], facts.stride[:-1], strict=True) if n > 1]
        if any(s % 16 or not 16 <= s < 2**40 for s in (*steps, facts.stride[-3] * size)):
            return False
    return True
