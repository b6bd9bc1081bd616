"""Which keys a tile of queries walks, and which of them without a mask, against the definition of every mask.

`span` says it from the first and the last row of a tile alone. A key that it leaves out is lost in silence, so it is
asked for rules and sizes at random, row by row; whole kernels have the conformance suite.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.attention.masks import FAR, Rules, visible
from tilewright.ops.attention.triton import span
from tilewright.ops.attention.triton_tiles import seen_by


@triton.jit
def spans(
    found, bounds, queries, keys, left, right, prefix_rows, prefix, prefix_kv_len, tiles,
    M: tl.constexpr, WIDE: tl.constexpr, PACK: tl.constexpr,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(start, whole, edge, end) of every tile, (low, high) of every row."""
    queries, keys = queries.to(tl.int32), keys.to(tl.int32)
    for tile in range(tiles):
        start, whole, edge, end = span(tile * M + queries * 0, M, queries, keys, 0, left, right, prefix_rows, prefix,
                                       prefix_kv_len, PACK, BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
        tl.store(found + tile * 4, start)
        tl.store(found + tile * 4 + 1, whole)
        tl.store(found + tile * 4 + 2, edge)
        tl.store(found + tile * 4 + 3, end)
        line = tl.arange(0, WIDE)
        row = tile * M + line
        low, high = seen_by(row // PACK, queries, keys, 0, left, right, prefix_rows, prefix, prefix_kv_len,
                            BOTTOM, LEFT, RIGHT, PREFIX)  # fmt: skip
        tl.store(bounds + row * 2, low, mask=line < M)
        tl.store(bounds + row * 2 + 1, high, mask=line < M)


def drawn(rng: random.Random) -> tuple[Rules, Tensor | None, int, int, int, int]:
    """(rules, a length of the prefix that a tensor tells, queries, keys, rows a tile, heads that share it)."""
    side = lambda: rng.choice((-1, 0, 1, rng.randrange(60), 1 << 40))  # noqa: E731
    rows = rng.choice((0, 0, 1, rng.randrange(60), 1 << 40))
    told = torch.tensor([rng.choice((-3, 0, 1, rng.randrange(70), 1 << 40))]) if rng.random() < 0.5 else None
    prefix = -1 if told is not None else rng.choice((0, 1, rng.randrange(70), 1 << 40))
    align = rng.choice(("top_left", "bottom_right"))
    rules = Rules(rng.random() < 0.5, align, side(), side(), rows, prefix)
    sizes = (rng.choice((1, 2, rng.randrange(1, 40))), rng.choice((0, 1, rng.randrange(50))))
    return rules, told, *sizes, rng.choice((1, 2, 12, 16, 32)), rng.choice((1, 1, 2, 3))


@pytest.mark.parametrize("seed", range(4))
def test_no_key_is_lost_and_none_is_seen_that_is_hidden(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        rules, told, queries, keys, m, pack = case = drawn(rng)
        tiles = -(-queries * pack // m) + 1  # and one without queries
        found, bounds = torch.zeros(tiles, 4, dtype=torch.int64), torch.zeros(tiles * m, 2, dtype=torch.int64)
        right = min(side for side in (0 if rules.causal else FAR, rules.window_right, FAR) if side >= 0)
        masked: dict[str, Any] = {
            "BOTTOM": rules.align == "bottom_right",
            "LEFT": rules.window_left >= 0,
            "RIGHT": rules.causal or rules.window_right >= 0,
            "PREFIX": rules.prefix_rows > 0,
        }
        spans[(1,)](
            found, bounds, queries, keys, min(rules.window_left, FAR), right, min(rules.prefix_rows, FAR),
            min(max(rules.prefix_kv, 0), FAR), told if rules.prefix_kv < 0 else None, tiles,
            M=m, WIDE=triton.next_power_of_2(m), PACK=pack, **masked,
        )  # fmt: skip
        i, j = torch.arange(queries).repeat_interleave(pack)[:, None], torch.arange(keys)[None]
        prefix = told if rules.prefix_kv < 0 else rules.prefix_kv
        seen = visible(i, j, queries, keys, prefix, rules).expand(queries * pack, keys)
        low, high = bounds[: queries * pack].T[:, :, None]
        assert torch.equal((j >= low) & (j < high), seen), case
        for tile, (start, whole, edge, end) in enumerate(found.tolist()):
            mine = seen[tile * m : (tile + 1) * m]
            assert 0 <= start <= keys and end <= keys, case
            assert mine[:, max(whole, start) : max(edge, whole, start)].all(), case
            assert not mine[:, :start].any() and not mine[:, max(end, 0) :].any(), case
            if not len(mine):
                assert end <= start and edge <= max(whole, start), case
            if not masked["LEFT"] and start < end:
                assert whole <= start == 0, case
