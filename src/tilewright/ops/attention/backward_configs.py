"""How the gradients of attention are cut into tiles for Triton, best guess first. Needs no compiler.

Keys: `k_m` queries and `k_n` keys a tile where a program owns keys (dk, dv), with its warps and stages; `q_m` and `q_n`
where it owns queries (dq); `tma` 1 where what is walked comes through descriptors.
"""

from __future__ import annotations

import torch

from tilewright.core.call import Call
from tilewright.core.launch import Config
from tilewright.ops.attention.configs import Shape, by_descriptor, width_of
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.shared_memory import shared_bytes

Pair = tuple[Shape, Shape]
"""Queries, keys, warps and stages of a program that owns keys, and of one that owns queries."""

DELTA_ROWS = 32
"""Rows a program of the first launch."""
GROUPS: dict[int, tuple[Pair, ...]] = {
    64: (((128, 128, 8, 2), (128, 64, 4, 3)), ((64, 128, 8, 2), (128, 128, 8, 2)), ((64, 64, 4, 2), (128, 64, 4, 3))),
    128: (((64, 64, 4, 2), (64, 64, 4, 2)), ((64, 128, 8, 2), (128, 64, 8, 3)), ((64, 64, 4, 2), (128, 128, 8, 2))),
    256: (((32, 64, 8, 2), (64, 32, 4, 2)), ((64, 64, 8, 1), (64, 64, 8, 1)), ((32, 64, 8, 1), (128, 32, 8, 2))),
}
"""By the width of a head, where products are of whole warp groups."""
TENSOR_MEMORY: dict[int, tuple[Pair, ...]] = {
    64: (),
    128: (((64, 64, 8, 2), (128, 64, 8, 2)),),
    256: (((64, 64, 8, 1), (64, 32, 4, 2)),),
}
"""Tried first where accumulators are in a memory of their own (sm_100): the others spill there."""
OTHERS: dict[int, tuple[Pair, ...]] = {
    64: (((32, 64, 8, 2), (64, 64, 4, 2)), ((64, 64, 4, 2), (64, 64, 4, 2)), ((64, 128, 8, 2), (128, 64, 8, 2))),
    128: (((32, 64, 8, 2), (64, 32, 8, 2)), ((64, 64, 8, 1), (64, 64, 8, 1))),
    256: (((16, 32, 8, 1), (16, 32, 8, 1)), ((32, 32, 8, 1), (32, 32, 8, 1))),
}
"""Of others."""
SINGLE: dict[int, tuple[Pair, ...]] = {
    64: (((32, 32, 8, 1), (32, 32, 8, 1)), ((16, 32, 4, 1), (32, 16, 4, 1))),
    128: (((16, 16, 8, 1), (16, 16, 8, 1)), ((16, 32, 8, 1), (32, 16, 8, 1)), ((16, 16, 4, 1), (16, 16, 4, 1))),
    256: (((16, 16, 8, 1), (16, 16, 8, 1)),),
}
"""Of float32."""
SMALLEST: Pair = ((16, 16, 4, 1), (16, 16, 4, 1))


def backward_configs(call: Call) -> tuple[Config, ...]:
    wide = max(64, width_of(call.q), width_of(call.v))
    if call.q.dtype == torch.float32 and call.device.is_gpu:
        wanted = SINGLE[wide]
    else:
        groups = _groups(call)
        wanted = (GROUPS if groups else OTHERS)[wide]
        if groups and call.device.is_gpu and call.device.sm >= 100:
            wanted = (*TENSOR_MEMORY[wide], *wanted)
    found: dict[Config, None] = {}
    for pair in (*wanted, SMALLEST):
        if pair != SMALLEST or not found:
            found |= dict.fromkeys(_paired(call, pair))
    return tuple(found)


def _groups(call: Call) -> bool:
    """Whether products are of whole warp groups, and accumulators leave registers for large tiles: not beside the
    pointers of what is walked, nor beside random numbers."""
    return not call.device.is_gpu or (call.dropout_p == 0.0 and _by_descriptor(call))


def _paired(call: Call, pair: Pair) -> tuple[Config, ...]:
    """Both programs in what fits, with and without descriptors; none where either does not."""
    rows, keys = power_of_2_at_least(call.q.shape[-3]), power_of_2_at_least(call.k.shape[-3])
    k_m, k_n, k_warps, k_stages = _fitted(call, pair[0], 1)
    q_m, q_n, q_warps, q_stages = _fitted(call, pair[1], 0)
    if not k_stages or not q_stages:
        return ()
    k_m, q_m = (min(m, max(16, rows)) for m in (k_m, q_m))
    k_n, q_n = (min(n, max(16, keys)) for n in (k_n, q_n))
    return tuple(
        Config(
            k_m=k_m, k_n=k_n, k_warps=k_warps, k_stages=k_stages,
            q_m=q_m, q_n=q_n, q_warps=q_warps, q_stages=q_stages, tma=tma,
        )
        for tma in ((1, 0) if _by_descriptor(call) else (0,))
    )  # fmt: skip


def _fitted(call: Call, shape: Shape, owned: int) -> Shape:
    """With as many stages as fit in shared memory beside what a program owns, of which 0 says that none does."""
    m, n, warps, stages = shape
    size = call.q.dtype.itemsize * (width_of(call.q) + width_of(call.v))
    mine, walked = (n, m) if owned else (m, n)
    room = shared_bytes(call.device) - (mine * size if call.device.kind != "hip" else 0)
    return m, n, warps, max(0, min(stages, room // (walked * size)))


def _by_descriptor(call: Call) -> bool:
    """Whether hardware can copy tiles of everything that is walked."""
    if not call.device.is_gpu or not by_descriptor(call):
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
