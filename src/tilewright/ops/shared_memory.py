"""How much shared memory the tiles of one program may take."""

from __future__ import annotations

from tilewright.core.device import Device

MOST_SHARED = {80: 160, 86: 96, 87: 160, 89: 96, 90: 224, 100: 224, 103: 224, 110: 224, 120: 96, 121: 96}
"""KiB a program may have, by compute capability; other devices (AMD) have 64."""


def shared_bytes(device: Device) -> int:
    """What tiles of one program may take; of an interpreter as much as any."""
    return (MOST_SHARED.get(device.sm, 64) if device.is_gpu else 224) * 1024
