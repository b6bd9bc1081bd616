"""Whether this is a forked child: OpenMP's threads stay with the parent, and a parallel region would wait for them."""

from __future__ import annotations

import os
from pathlib import Path

FORKED_FLAG = 0x40
"""PF_FORKNOEXEC, among the flags in /proc/self/stat: the process was forked and has not become another program."""


def _is_child() -> bool:
    """Of a fork made before this was imported: nobody could tell us then."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        return bool(int(text.rpartition(")")[2].split()[6]) & FORKED_FLAG)
    except (OSError, ValueError, IndexError):
        return False


_process = {"forked": _is_child()}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _process.update(forked=True))


def is_child() -> bool:
    """Whether the process was forked; what would run in parallel runs serially then."""
    return _process["forked"]
