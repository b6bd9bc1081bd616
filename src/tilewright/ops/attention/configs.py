"""How attention is cut into tiles for Triton and TileLang, best guess first, and which fit the shared memory of a
device. Needs no compiler.

Keys: `m` packed queries and `n` keys a tile; `parts` programs that share the keys of a tile; `tma` 1 where keys and
values come through descriptors; `apart` 1 where warps specialise; warps and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least
from tilewright.ops.shared_memory import shared_bytes

Shape = tuple[int, int, int, int]
"""m, n, warps, stages."""

NARROW: tuple[Shape, ...] = ((128, 128, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 4), (64, 64, 4, 3))
"""Of heads up to 64, where products are of whole warp groups (Hopper and later): accumulators then leave room."""
MIDDLE: tuple[Shape, ...] = ((128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2))
"""Up to 128."""
BROAD: tuple[Shape, ...] = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 2))
"""Up to 256."""
OTHERS: dict[int, tuple[Shape, ...]] = {
    64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2)),
    128: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 3), (128, 128, 8, 2)),
    256: ((64, 32, 8, 2), (64, 64, 8, 1), (128, 32, 8, 1)),
}
"""Of other devices, by the width of a head."""
FEW: tuple[Shape, ...] = ((16, 64, 4, 4), (16, 128, 4, 3), (16, 64, 2, 4), (16, 32, 4, 4), (16, 32, 4, 2))
"""Of so few queries that keys are read once and waited for."""
SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 4, 2)),
    128: ((32, 32, 8, 2), (16, 32, 4, 1), (32, 16, 8, 1)),
    256: ((16, 16, 4, 1), (16, 16, 8, 1)),
}
"""Of float32, by the width of a head."""
SMALLEST: Shape = (16, 16, 4, 1)
LEAST_KEYS = 256
"""Of a part."""
MOST_PARTS = 64


def packed_heads(call: Call) -> int:
    """How many query heads, of those that read the same keys, share a tile: all, where queries are too few to fill one
    (packed sequences aside)."""
    group: int = call.q.shape[-2] // call.k.shape[-2]
    return group if "cu_seqlens_q" not in call.tensors and power_of_2_at_least(call.q.shape[-3]) <= 64 else 1


def width_of(facts: TensorFacts) -> int:
    """Columns of a head as tiles hold them."""
    return max(16, power_of_2_at_least(facts.columns))


def by_descriptor(call: Call) -> bool:
    """Whether hardware can copy tiles of keys and values: rows at multiples of 16 bytes, in half precision."""
    if call.device.is_gpu and not 90 <= call.device.sm < 120:
        return False
    for facts in (call.k, call.v):
        size = facts.dtype.itemsize
        if size != 2 or facts.align < 16 or facts.columns * size % 16:
            return False
        if any(s * size % 16 for n, s in zip(facts.shape[:-1], facts.stride[:-1], strict=True) if n > 1):
            return False
        if not 16 <= facts.stride[-3] * size < 2**40:
            return False
    return True


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Of the forward pass, for so many queries and keys by the power of two above, as in a call class."""
    q, wide = call.q, max(64, width_of(call.q), width_of(call.v))
    rows = power_of_2_at_least(q.shape[-3]) * packed_heads(call)
    if q.dtype == torch.float32 and call.device.is_gpu:
        wanted = SINGLE[wide]
    elif rows <= 16:
        wanted = FEW
    else:
        groups = not call.device.is_gpu or (90 <= call.device.sm < 120 and call.dropout_p == 0.0)
        wanted = {64: NARROW, 128: MIDDLE, 256: BROAD}[wide] if groups else OTHERS[wide]
        if rows <= 64:
            wanted = tuple((min(m, 64), n, 4 if m > 64 else warps, stages) for m, n, warps, stages in wanted)
    fitting = _fitting(call, wanted) or _fitting(call, (SMALLEST,))
    found: list[Config] = []
    for m, n, warps, stages in fitting:
        for parts in _parts(call, m):
            for tma in (1, 0) if call.device.is_gpu and rows > 16 and by_descriptor(call) else (0,):
                found.append(
                    Config(m=m, n=n, parts=parts, tma=tma, apart=0, num_warps=warps, num_stages=stages)
                )  # fmt: skip
    return tuple(dict.fromkeys(found))


def _parts(call: Call, m: int) -> tuple[int, ...]:
    """Into how many parts keys are cut, where tiles are too few to fill the device."""
    q, pack = call.q, packed_heads(call)
    keys = power_of_2_at_least(call.k.shape[-3])
    if "cu_seqlens_q" in call.tensors or keys < 2 * LEAST_KEYS:
        return (1,)
    batch = power_of_2_at_least(q.shape[0])
    tiles = max(1, power_of_2_at_least(q.shape[-3]) * pack // m) * (q.shape[-2] // pack) * batch
    wanted = power_of_2_at_least(max(1, call.device.multiprocessors * 2 // tiles))
    parts = min(wanted, keys // LEAST_KEYS, MOST_PARTS)
    return (1,) if parts < 2 else (parts, max(1, parts // 2), 1) if parts > 2 else (1, 2)


def _fitting(call: Call, wanted: tuple[Shape, ...]) -> list[Shape]:
    """The tiles with as many stages as fit beside the queries; what fits with none is left out."""
    room, size = shared_bytes(call.device), call.q.dtype.itemsize
    wide, v_wide = width_of(call.q), width_of(call.v)
    found: dict[Shape, None] = {}
    for m, n, warps, stages in wanted:
        least = m * wide * size if call.device.kind != "hip" else 0
        stages = min(stages, (room - least) // (n * (wide + v_wide) * size))
        if stages >= 1:
            found[m, n, warps, stages] = None
    return list(found)


def head_dims(call: Call) -> Iterable[Reason]:
    """What a tile holds whole."""
    for facts in (call.q, call.v):
        if facts.columns > 256:
            yield Reason(facts.name, f"head dimension {facts.columns}; takes up to 256")


def countable(call: Call) -> Iterable[Reason]:
    """Sequences are counted in 32 bits."""
    for facts in (call.q, call.k):
        if facts.shape[-3] >= 1 << 30:
            yield Reason(facts.name, f"{facts.shape[-3]} tokens; takes fewer than 2^30")


HOPPER: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 3, 240), (128, 2, 240), (128, 2, 232)),
    128: ((128, 2, 232), (128, 2, 240), (64, 3, 240)),
    256: ((64, 2, 240),),
}
"""Keys a tile, stages and registers a thread of the kernel whose warps specialise, by the width of a head."""


def hopper_configs(call: Call) -> tuple[Config, ...]:
    """Of that kernel: two warpgroups of 64 queries each."""
    wide = max(64, width_of(call.q), width_of(call.v))
    return tuple(Config(m=128, n=n, stages=stages, registers=registers) for n, stages, registers in HOPPER[wide])


def for_hopper(call: Call) -> Iterable[Reason]:
    """What the kernel whose warps specialise leaves to the other."""
    if call.has("mask"):
        yield Reason("mask", "a tensor; takes causal masks, windows, lengths and prefixes")
    if call.dropout_p > 0.0:
        yield Reason("dropout_p", f"{call.dropout_p}; takes 0")
    for facts in (call.q, call.k, call.v):
        size = facts.dtype.itemsize
        steps = [s * size for n, s in zip(facts.shape[:-1], facts.stride[:-1], strict=True) if n > 1]
        if facts.align < 16 or any(step % 16 for step in [facts.columns * size, *steps]):
            yield Reason(facts.name, "rows that do not begin at multiples of 16 bytes")
        elif not 16 <= facts.stride[-3] * size < 2**40:
            yield Reason(facts.name, f"rows that lie {facts.stride[-3]} elements apart")


TILELANG: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 128, 256), (64, 64, 128), (128, 64, 256)),
    128: ((128, 64, 256), (64, 64, 128)),
    256: ((64, 64, 128), (128, 32, 256), (64, 32, 128)),
}
"""m, n, threads in half precision, by the width of a head."""
TILELANG_SINGLE = {64: ((32, 32, 128),), 128: ((32, 32, 128), (16, 32, 128)), 256: ((16, 16, 128),)}


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """The same for TileLang, whose tiles are of one head and have at least 16 queries a warp in half precision."""
    wide, size = max(64, width_of(call.q), width_of(call.v)), call.q.dtype.itemsize
    wanted = (TILELANG_SINGLE if call.q.dtype == torch.float32 else TILELANG)[wide]
    if power_of_2_at_least(call.q.shape[-3]) <= 64:
        wanted = tuple(dict.fromkeys((min(m, 64), n, 128) for m, n, _ in wanted))
    found = []
    for m, n, threads in wanted:
        tiles = (m + n) * width_of(call.q) * size + n * width_of(call.v) * size
        if tiles + m * n * (4 if size == 4 else 1) <= shared_bytes(call.device):
            found.append(Config(m=m, n=n, threads=threads))
    return tuple(found)


def few_tiles(call: Call) -> Iterable[Reason]:
    """The blocks of a TileLang launch are counted in 32 bits."""
    batch = call.q.shape[0] if len(call.q.shape) == 4 else 1
    tiles = batch * call.q.shape[-2] * (call.q.shape[-3] // 16 + 1)
    if "cu_seqlens_q" in call.tensors:
        tiles += call.q.shape[-2] * call.cu_seqlens_q.shape[0]
    if tiles > MOST_BLOCKS:
        yield Reason("q", f"{tiles} tiles of 16 rows; takes {MOST_BLOCKS}", "split the batch")
