"""Calls of the family as recommenders make them."""

from __future__ import annotations

from tilewright.core.probes import Workload

DENSE = (
    Workload("unirec, 64 users of 512 events", 64, 512, sizes=(512, 4, 64, 64)),
    Workload("unirec, 8 users of 2048 events", 8, 2048, sizes=(2048, 8, 128, 128)),
)
"""Batch, keys, then queries, heads, D, Dv."""

JAGGED = (
    Workload("hstu, 32 users of up to 8192 in 100000 events", 4, 100_000, sizes=(128, 128, 33, 32)),
    Workload("hstu, 128 users of up to 1024 in 65536 events", 4, 65_536, sizes=(64, 64, 129, 128)),
    Workload(
        "hstu with context and a window, 32 users in 100000 events", 4, 100_000, sizes=(128, 128, 33, 32),
        options={"window": 1024, "contextual_len": 4, "full_tail": 64},
    ),
)  # fmt: skip
"""Heads, tokens, then D, Dv, offsets, sequences. Lengths go as 3, 0, 1, 4, 2."""
