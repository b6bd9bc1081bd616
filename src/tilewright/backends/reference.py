"""The reference backend: every op's definition in plain torch. It takes every valid call, on every device."""

from __future__ import annotations

import torch

from tilewright.core.backend import Backend
from tilewright.core.reason import Reason


class ReferenceBackend(Backend):
    """Always here. Needs no evidence: the other kernels are compared with it."""

    name = "reference"
    launches = False

    def missing(self, kind: str = "") -> Reason | None:
        return None

    def version(self, kind: str = "") -> str:
        return torch.__version__

    def serial(self) -> bool:
        """In a forked child, whenever it was forked: torch's threads stay with the parent."""
        from tilewright.tile.runtime.forked import is_child  # only where a kernel is checked: the compiler comes along

        return is_child()
