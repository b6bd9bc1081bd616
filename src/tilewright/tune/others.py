"""How much of the CPUs others than the tuner took meanwhile: on Linux, from /proc; elsewhere nothing is known.

A kernel of several threads waits for the last of them, so one CPU that is shared makes its times absurd, and those of a
kernel of one thread next to right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT = 0.1
"""Of the CPUs that this process may use. Times taken while others had more are kept, and measured again next time."""

_PROC = Path("/proc")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat that are work: user, nice, system, interrupts; and what a hypervisor gave to others."""


class Others:
    """Watches from when it is made. `session`: the id of the worker's session, asked at the end."""

    def __init__(self, session: Callable[[], int | None]) -> None:
        self._session = session
        self._begun, self._busy, self._own = time.monotonic(), _busy(), _own(session())

    def share(self) -> float:
        """Of all that these CPUs could do since then, what others took: 0 to 1; 0 where it is not known."""
        busy, own = _busy(), _own(self._session())
        seconds = time.monotonic() - self._begun
        if not (busy and self._busy and seconds):
            return 0.0
        taken = (busy - self._busy - max(own - self._own, 0)) / os.sysconf("SC_CLK_TCK")
        return min(1.0, max(0.0, taken / (seconds * len(os.sched_getaffinity(0)))))


def _busy() -> int:
    """Ticks that the CPUs which this process may use have worked."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        counts = [line.split()[1:] for line in lines if line.split()[0] in mine]
        return sum(int(count[column]) for count in counts for column in _BUSY)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0


def _own(session: int | None) -> int:
    """Ticks of this process and of the worker's session, what they started included."""
    return sum(ticks for pid, sid, ticks in _processes() if pid == os.getpid() or sid == session)


def _processes() -> Iterator[tuple[int, int, int]]:
    """(id, session, ticks) of each, with those of children that it has waited for."""
    for folder in _PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            yield int(folder.name), int(fields[3]), sum(map(int, fields[11:15]))
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
