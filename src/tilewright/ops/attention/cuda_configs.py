"""How the hand-written CUDA kernel of attention is spread, best guess first, and which calls it refuses.

Config keys: `n` keys a tile; `slots` tiles of keys or values in shared memory at a time; `parts`, blocks of a cluster
that share the keys; `at_once` 1 where at most two tiles of keys are all that there is.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.attention.masks import Rules
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least

ROWS = 128
"""Of a block: queries times the heads that are packed."""
PANEL = 64
"""Columns that lie together in shared memory."""
REST = 16
"""Columns that panels leave and threads bring, at most, where all is asked for at once."""
ROOM = 227 << 10
"""Bytes of shared memory that a block may have."""
MOST_SLOTS = 8


def pack_of(call: Call) -> int:
    """How many query heads share a block's rows: all that read the same keys, where they fill whole queries of each
    half."""
    group: int = call.q.shape[2] // call.k.shape[2]
    return group if ROWS // 2 % group == 0 else 1


def shared_of(call: Call, config: Config) -> int:
    """Bytes of a block: queries, or what the other part gives of its sums; slots; barriers; two numbers a row."""
    wide, v_wide = (-(-facts.columns // PANEL) * PANEL * facts.dtype.itemsize for facts in (call.q, call.v))
    given = ROWS * v_wide if config.parts > 1 else 0
    slots = int(config.slots)
    return int(max(ROWS * wide, given) + slots * config.n * max(wide, v_wide) + 8 * (2 + 2 * slots) + 8 * ROWS)


def full_configs(call: Call) -> tuple[Config, ...]:
    """For so many keys by the power of two above, as in a call class."""
    keys, wide = power_of_2_at_least(call.k.shape[1]), max(call.q.columns, call.v.columns)
    tiles = power_of_2_at_least(call.q.shape[1]) * pack_of(call) // ROWS
    blocks = max(1, tiles) * (call.q.shape[2] // pack_of(call)) * power_of_2_at_least(call.q.shape[0])
    found: list[Config] = []
    for parts in (2, 1) if keys >= 128 and 2 * blocks <= call.device.multiprocessors else (1,):
        for n in (128, 256, 64):
            if n > 64 and n * parts > keys:
                continue
            count = -(-keys // (n * parts))
            at_once = Config(n=n, slots=2 * count, parts=parts, at_once=1)
            if count <= 2 and count * n <= 256 and wide <= 128 and shared_of(call, at_once) <= ROOM:
                found.append(at_once)
            elif n == 64 or (n == 128 and wide <= 128):
                ways = (Config(n=n, slots=slots, parts=parts, at_once=0) for slots in range(MOST_SLOTS, 2, -1))
                found += [config for config in ways if shared_of(call, config) <= ROOM][:1]
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
