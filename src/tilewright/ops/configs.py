"""What families share in working out configs: powers of two, and how many blocks a TileLang launch may have."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.reason import Reason

MOST_BLOCKS = 1 << 30
"""Of a TileLang launch: its grid is int32. A power of two, so that a call class has one answer."""


def power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def few_blocks(name: str, rows: int, blocks: int) -> Iterable[Reason]:
    """Whether so many rows of so many blocks each can be counted."""
    if rows * blocks > MOST_BLOCKS:
        yield Reason(name, f"{rows} rows; takes {MOST_BLOCKS // blocks}", "split the batch")
