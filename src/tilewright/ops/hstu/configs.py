"""How the family is cut into tiles for Triton and TileLang, best guess first, and which fit the shared memory of a
device. Needs no compiler.

Keys: `m` queries and `n` keys a tile; `tma` 1 where what is walked may come through descriptors; warps and pipeline
stages. A config serves the whole class of a call, which does not tell every stride: launches ask `by_descriptor` again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.attention.configs import Shape, width_of
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least
from tilewright.ops.shared_memory import shared_bytes

GROUPS: dict[int, tuple[Shape, ...]] = {
    64: ((128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
    128: ((128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2), (64, 64, 4, 3)),
    256: ((128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
}
"""m, n, warps, stages by the width of a head, where products are of whole warp groups (Hopper and later)."""
OTHERS: dict[int, tuple[Shape, ...]] = {
    64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3)),
    128: ((64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2)),
    256: ((64, 32, 8, 2), (64, 64, 8, 1)),
}
SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 4, 2)),
    128: ((32, 32, 8, 2), (16, 32, 4, 1), (32, 16, 8, 1)),
    256: ((16, 16, 4, 1), (16, 16, 8, 1)),
}
"""Of float32."""
SMALLEST: Shape = (16, 16, 4, 1)


def forward_configs(call: Call) -> tuple[Config, ...]:
    wanted = chosen(call, SINGLE, GROUPS, OTHERS)
    rows, keys = (power_of_2_at_least(f.shape[-3]) for f in (call.q, call.k))
    found: dict[Config, None] = {}
    for shape in (*wanted, SMALLEST):
        m, n, warps, stages = fitted(call, shape, 0)
        if not stages or (shape == SMALLEST and found):
            continue
        m, n = min(m, max(16, rows)), min(n, max(16, keys))
        for tma in (1, 0) if by_descriptor(call, "k", "v") else (0,):
            found[Config(m=m, n=n, tma=tma, num_warps=warps, num_stages=stages)] = None
    return tuple(found)


def chosen(call: Call, single: dict[int, Any], groups: dict[int, Any], others: dict[int, Any]) -> tuple[Any, ...]:
    """By dtype and device, of the width of a head."""
    wide = max(64, width_of(call.q), width_of(call.v))
    if call.q.dtype == torch.float32 and call.device.is_gpu:
        return tuple(single[wide])
    whole = not call.device.is_gpu or (90 <= call.device.sm < 120 and not call.options.get("dropout_p"))
    found: tuple[Any, ...] = (groups if whole else others)[wide]
    return found


def fitted(call: Call, shape: Shape, owned: int) -> Shape:
    """With as many stages as fit in shared memory beside what a program owns, of which 0 says that none does. A program
    owns `owned` times as much as its queries alone."""
    m, n, warps, stages = shape
    size, wide, v_wide = call.q.dtype.itemsize, width_of(call.q), width_of(call.v)
    mine, walked = (n * (wide + v_wide), m) if owned == 1 else (m * (wide + v_wide * (owned == 2)), n)
    room = shared_bytes(call.device) - (mine * size if call.device.kind != "hip" else 0)
    return m, n, warps, max(0, min(stages, room // (walked * (wide + v_wide) * size)))


def head_dims(call: Call) -> Iterable[Reason]:
    """What a tile holds whole."""
    for facts in (call.q, call.v):
        if facts.columns > 256:
            yield Reason(facts.name, f"head dimension {facts.columns}; takes up to 256")


def countable(call: Call) -> Iterable[Reason]:
    """Sequences, and tiles of them, are counted in 32 bits."""
    for facts in (call.q, call.k):
        if facts.shape[-3] >= 1 << 30:
            yield Reason(facts.name, f"{facts.shape[-3]} tokens; takes fewer than 2^30")
    sequences = call.seq_offsets.shape[0] if "seq_offsets" in call.tensors else call.q.shape[0]
    tiles = (call.q.shape[-3] // 16 + sequences) * call.q.shape[-2]
    if tiles > MOST_BLOCKS:
        yield Reason("q", f"up to {tiles} tiles of 16 rows; takes {MOST_BLOCKS}", "split the batch")


Pair = tuple[Shape, Shape]
"""Queries, keys, warps and stages of a program that owns keys, and of one that owns queries."""
GROUPS_BACKWARD: dict[int, tuple[Pair, ...]] = {
    64: (((64, 128, 8, 2), (128, 64, 8, 2)), ((64, 128, 4, 2), (128, 64, 4, 2)), ((64, 64, 4, 2), (64, 64, 4, 2))),
    128: (((32, 128, 8, 2), (128, 64, 8, 2)), ((64, 128, 8, 2), (128, 64, 8, 2)), ((64, 64, 8, 2), (64, 64, 4, 2))),
    256: (((16, 64, 8, 2), (64, 32, 8, 2)), ((32, 64, 8, 2), (64, 32, 4, 2)), ((32, 64, 8, 1), (64, 64, 8, 1))),
}
OTHERS_BACKWARD: dict[int, tuple[Pair, ...]] = {
    64: (((32, 64, 8, 2), (64, 64, 8, 2)), ((64, 64, 4, 2), (64, 64, 4, 2))),
    128: (((32, 64, 8, 2), (64, 32, 4, 2)), ((32, 64, 8, 2), (64, 32, 8, 2)), ((64, 64, 8, 1), (64, 64, 8, 1))),
    256: (((16, 32, 8, 1), (16, 32, 4, 1)), ((32, 32, 8, 1), (32, 32, 8, 1))),
}
PADDED: dict[bool, Pair] = {True: ((32, 64, 8, 2), (128, 32, 8, 2)), False: ((32, 64, 8, 1), (64, 32, 8, 2))}
"""Tried first for heads between 64 and 128 columns: which columns there are takes registers too. True: of GROUPS."""
LIFTED: Pair = ((32, 128, 8, 2), (128, 32, 8, 2))
"""The same of float16, whose rows have a power of two each, in GROUPS."""
SINGLE_BACKWARD: dict[int, tuple[Pair, ...]] = {
    64: (((32, 32, 8, 1), (32, 32, 8, 1)), ((16, 32, 4, 1), (32, 16, 4, 1))),
    128: (((16, 16, 8, 1), (16, 16, 8, 1)), ((16, 32, 8, 1), (32, 16, 8, 1))),
    256: (((16, 16, 8, 1), (16, 16, 8, 1)),),
}


def backward_configs(call: Call) -> tuple[Config, ...]:
    wanted = chosen(call, SINGLE_BACKWARD, GROUPS_BACKWARD, OTHERS_BACKWARD)
    if wanted in (GROUPS_BACKWARD[128], OTHERS_BACKWARD[128]):
        groups = wanted == GROUPS_BACKWARD[128]
        if any(f.columns != width_of(f) for f in (call.q, call.v)):
            wanted = (PADDED[groups], *wanted)
        elif groups and call.q.dtype == torch.float16:
            wanted = (LIFTED, *wanted)
    rows, keys = (power_of_2_at_least(f.shape[-3]) for f in (call.q, call.k))
    found: dict[Config, None] = {}
    smallest: Pair = (SMALLEST, SMALLEST)
    for pair in (*wanted, smallest):
        k_m, k_n, k_warps, k_stages = fitted(call, pair[0], 1)
        q_m, q_n, q_warps, q_stages = fitted(call, pair[1], 2)
        if not k_stages or not q_stages or (pair == smallest and found):
            continue
        k_m, q_m = (min(m, max(16, rows)) for m in (k_m, q_m))
        k_n, q_n = (min(n, max(16, keys)) for n in (k_n, q_n))
        for tma in (1, 0) if by_descriptor(call, "q", "do", "k", "v") else (0,):
            found[Config(
                k_m=k_m, k_n=k_n, k_warps=k_warps, k_stages=k_stages, q_m=q_m, q_n=q_n, q_warps=q_warps,
                q_stages=q_stages, tma=tma,
            )] = None  # fmt: skip
    return tuple(found)


TILELANG_BACKWARD: dict[int, tuple[tuple[Shape, Shape], ...]] = {
    64: (((64, 64, 128, 0), (64, 64, 128, 0)), ((64, 128, 256, 0), (128, 64, 256, 0))),
    128: (((64, 64, 128, 0), (64, 64, 128, 0)), ((32, 128, 256, 0), (128, 64, 256, 0))),
    256: (((32, 64, 128, 1), (64, 32, 128, 0)),),
}
"""Queries, keys and threads of a program that owns keys, then of one that owns queries: 16 rows of what is owned a
warp. The first ones find dk and dv apart where the last number is 1: registers do not hold both."""
TILELANG_BACKWARD_SINGLE: dict[int, tuple[tuple[Shape, Shape], ...]] = {
    64: (((32, 32, 128, 0), (32, 32, 128, 0)),),
    128: (((16, 32, 128, 0), (32, 16, 128, 0)), ((16, 16, 128, 0), (16, 16, 128, 0))),
    256: (((16, 16, 128, 0), (16, 16, 128, 0)),),
}


def tilelang_backward_configs(call: Call) -> tuple[Config, ...]:
    wide, v_wide, size = width_of(call.q), width_of(call.v), call.q.dtype.itemsize
    single = call.q.dtype == torch.float32
    found = []
    for keys, queries in (TILELANG_BACKWARD_SINGLE if single else TILELANG_BACKWARD)[max(64, wide, v_wide)]:
        bytes_ = max((m + n) * (wide + v_wide) * size + m * n * (5 if single else 1) for m, n, _, _ in (keys, queries))
        if bytes_ + 16 * max(keys[0], queries[0]) <= shared_bytes(call.device):
            found.append(Config(
                k_m=keys[0], k_n=keys[1], k_threads=keys[2], k_apart=keys[3],
                q_m=queries[0], q_n=queries[1], q_threads=queries[2],
            ))  # fmt: skip
    return tuple(found)


def by_descriptor(call: Call, *names: str) -> bool:
    """Whether hardware can copy tiles of these: in half precision, rows that begin at multiples of 16 bytes and lie
    some apart, of a dimension of size 1 too, whose stride may be anything and still stands in the descriptor."""
    if not call.device.is_gpu or not 90 <= call.device.sm < 120:
        return False
    for name in names:
        facts: TensorFacts = call.tensors[name]  # type: ignore[assignment]
        size = facts.dtype.itemsize
        if size != 2 or not facts.numel or facts.column_stride != 1 or facts.align < 16 or facts.columns * size % 16:
            return False
        steps = [s * size for n, s in zip(facts.shape[:-1], facts.stride[:-1], strict=True) if n > 1]
        row = facts.stride[-3] * size
        if any(step % 16 for step in (*steps, row)) or not 16 <= row < 2**40:
            return False
    return True
