"""What families share in working out configs: powers of two, shared memory, how many blocks a TileLang launch has."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.device import Device
from tilewright.core.reason import Reason

MOST_BLOCKS = 1 << 30
"""Of a TileLang launch: its grid is int32. A power of two, so that a call class has one answer."""


MOST_SHARED = {80: 160, 86: 96, 87: 160, 89: 96, 90: 224, 100: 224, 103: 224, 110: 224, 120: 96, 121: 96}
"""KiB a program may have, by compute capability; other devices (AMD) have 64."""


def shared_bytes(device: Device) -> int:
    """What tiles of one program may take; of an interpreter as much as any."""
    return (MOST_SHARED.get(device.sm, 64) if device.is_gpu else 224) * 1024


def power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def few_blocks(name: str, rows: int, blocks: int) -> Iterable[Reason]:
    """Whether so many rows of so many blocks each can be counted."""
    if rows * blocks > MOST_BLOCKS:
        yield Reason(name, f"{rows} rows; takes {MOST_BLOCKS // blocks}", "split the batch")
