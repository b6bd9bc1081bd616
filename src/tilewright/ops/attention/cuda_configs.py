"""How the hand-written CUDA kernel of attention is spread, best guess first, and which calls it refuses.

Config keys: `n` keys a tile; `slots` tiles of keys or values in shared memory at a time; `cluster`, blocks that share
each copy; `resident`, blocks a multiprocessor; `registers` of a multiplying thread where a warp of its own brings tiles
(0: there is a slot for every tile, and the first warp asks for all at once).
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.attention.masks import Rules
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least

ROWS = 64
"""Of a block: queries times the heads that are packed."""
REST = 16
"""Columns of the panel for what panels of 64 leave, where that is so little."""
MULTIPROCESSOR_BYTES, SYSTEM_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor, and what the system takes for each block."""


def rest_of(facts: TensorFacts) -> bool:
    return 0 < facts.columns % 64 <= REST


def pack_of(call: Call) -> int:
    """How many query heads share a block's rows: all that read the same keys, where they fill whole queries."""
    group: int = call.q.shape[2] // call.k.shape[2]
    return group if ROWS % group == 0 else 1


def shared_of(call: Call, n: int, slots: int) -> int:
    """Bytes of a block: queries, slots, barriers, and two numbers a row of each warpgroup."""
    size = call.q.dtype.itemsize
    wide, v_wide = (size * (f.columns // 64 * 64 + _left(f)) for f in (call.q, call.v))
    return int(ROWS * wide + slots * n * max(wide, v_wide) + 8 * (1 + 2 * slots) + 4 * 4 * ROWS)


def _left(facts: TensorFacts) -> int:
    return REST if rest_of(facts) else 64 * (facts.columns % 64 > 0)


def full_configs(call: Call) -> tuple[Config, ...]:
    """For so many keys by the power of two above, as in a call class."""
    keys, room = power_of_2_at_least(call.k.shape[1]), MULTIPROCESSOR_BYTES - SYSTEM_BYTES
    tiles = -(-power_of_2_at_least(call.q.shape[1]) * pack_of(call) // ROWS)
    found: list[Config] = []
    for n in (64, 128):
        needed = 2 * -(-keys // n)
        fit = [slots for slots in range(3, 9) if shared_of(call, n, slots) <= room]
        for cluster in (2, 4, 1):
            if cluster > tiles or not fit:
                continue
            if needed <= max(fit):
                both = 2 * (shared_of(call, n, max(needed, 3)) + SYSTEM_BYTES) <= MULTIPROCESSOR_BYTES
                for resident in (2, 1) if both and n == 64 else (1,):
                    found.append(Config(n=n, slots=max(needed, 3), cluster=cluster, resident=resident, registers=0))
            else:
                found.append(Config(n=n, slots=max(fit), cluster=cluster, resident=1, registers=240))
    return tuple(found)


def every_key(call: Call) -> Iterable[Reason]:
    """What differs by query is left to others, and what hardware cannot copy."""
    rules = Rules.of(call.options)
    if rules.causal or rules.window_left >= 0 or rules.window_right >= 0:
        yield Reason("causal" if rules.causal else "window", "queries that see different keys", "use another backend")
    if rules.prefix_rows > 0:
        yield Reason("prefix_rows", f"{rules.prefix_rows}; takes none", "use another backend")
    if call.k.shape[1] == 0:
        yield Reason("k", "no keys")
    for facts in (call.q, call.k, call.v):
        if any(s == 0 for n, s in zip(facts.shape, facts.stride, strict=True) if n > 1):
            yield Reason(facts.name, "expanded: an axis whose elements lie at one place")
    if call.o.align < 16:
        yield Reason("o", "does not begin at a multiple of 16 bytes")
    if call.q.shape[0] * call.q.shape[2] * (call.q.shape[1] + 1) > MOST_BLOCKS:
        yield Reason("q", f"more than {MOST_BLOCKS} blocks", "split the batch")
