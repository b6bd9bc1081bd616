"""Memory as the emulator sees it: tensors and arrays by element, with what was ever written and who touched it when.

A race is found by epochs: two accesses of different threads to one place, of which one writes, need a barrier of the
block between them, or one of the warp where both are in it. What runs is in `emulator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.tile.dtypes import Array, DType
from tilewright.tile.errors import Line, RaceError, RunError
from tilewright.tile.ir.thread_uniform import WARP

LINES = 1 << 32
"""An access is kept as thread * LINES + the number of its line, so that the least one is the first thread's."""


class Clock:
    """What orders the threads of an instance: a count of barriers of the block, from 1 on, and of each warp."""

    def __init__(self, threads: int) -> None:
        self.threads, self.block, self.warp = threads, 1, np.zeros(-(-threads // WARP), np.int64)


class Touched:
    """One kind of access (reads, or writes) by place and warp: the barriers before the last one (of the block 0: there
    was none), and the first and the last of the warp's threads since those. So every race is seen."""

    def __init__(self, places: int, warps: int) -> None:
        self.block, self.warp, self.low, self.high = (np.zeros((places, warps), np.int64) for _ in range(4))

    def note(self, cell: tuple[Array, Array], who: Array, clock: Clock) -> None:
        """`who`: see `LINES`. Cells may be named more than once."""
        old = (self.block[cell] != clock.block) | (self.warp[cell] != clock.warp[cell[1]])
        fresh = cell[0][old], cell[1][old]
        self.low[fresh] = self.high[fresh] = who[old]
        np.minimum.at(self.low, cell, who)
        np.maximum.at(self.high, cell, who)
        self.block[cell], self.warp[cell] = clock.block, clock.warp[cell[1]]


class Places:
    """The places of a stretch of memory, each as large as the smallest element that is kept there."""

    def __init__(self, count: int, *, written: bool, clock: Clock) -> None:
        self.written, self.clock = np.full(count, written), clock
        self.lines: dict[tuple[str, Line | None], int] = {}
        self.reads, self.writes = Touched(count, len(clock.warp)), Touched(count, len(clock.warp))
        self.busy = np.zeros(count, bool)
        """Where a copy is on its way to."""

    def touch(self, name: str, line: Line | None, at: Array, thread: Array, *, writing: bool) -> None:
        """Threads touch places, all at once.

        Raises:
            RaceError: with each other, or with an earlier access.
        """
        if self.busy[at].any():
            raise RaceError(f"{name}: a copy is on its way to where thread {thread[self.busy[at]][0]} comes", line)
        if self.clock.threads == 1:
            return
        who = thread.astype(np.int64) * LINES + self.lines.setdefault((name, line), len(self.lines))
        does = "writes" if writing else "reads"
        if writing:
            self._check(self.reads, "read", at, who, does)
        self._check(self.writes, "wrote", at, who, does)
        (self.writes if writing else self.reads).note((at, thread // WARP), who, self.clock)
        if writing:
            self._check(self.writes, "writes", at, who, does)

    def _check(self, past: Touched, did: str, at: Array, now: Array, does: str) -> None:
        """Whether a thread meets at its place what another one did there, with no barrier in between."""
        thread = now[:, None] // LINES
        own = np.arange(len(self.clock.warp)) == thread // WARP
        near = (past.block[at] == self.clock.block) & (~own | (past.warp[at] == self.clock.warp))
        for who in (past.low[at], past.high[at]):
            wrong = near & (who // LINES != thread)
            if wrong.any():
                i = max(np.flatnonzero(wrong.any(1)), key=lambda i: (-at[i], thread[i, 0]))
                other, lines = who[i][wrong[i]][0], list(self.lines)
                (name, mine), (_, its) = lines[now[i] % LINES], lines[other % LINES]
                there, here = (f" at {found}" if found is not None else "" for found in (its, mine))
                raise RaceError(f"{name}, place {at[i]}: thread {other // LINES} {did}{there}, and thread "
                                f"{thread[i, 0]} {does}{here}, with no barrier between", mine)  # fmt: skip


@dataclass
class Memory:
    """One tensor or array. `raw`: its elements' bits, flat; the tensor's own is at `start`."""

    name: str
    dtype: DType
    raw: Array
    places: Places
    start: int = 0
    first: int = 0
    """The place of `raw[0]`."""
    size: int = 1
    """Places an element."""
    inside: Array | None = None
    """Of each element of `raw` whether it is the tensor's; None: all are."""
    array: bool = False
    """Whether it may be read before it is written, if nothing comes of it."""

    def at(self, index: Array, mask: Array, doing: str, line: Line | None) -> tuple[Array, Array]:
        """(elements of `raw`, their places) that are touched; masked-off ones at the first element.

        Raises:
            RunError: beyond the tensor or the array.
        """
        found = np.where(mask, index + self.start, 0)
        beyond = mask & ((found < 0) | (found >= len(self.raw)))
        if self.inside is not None and not beyond.any():
            beyond = mask & ~self.inside[found]
        if beyond.any():
            raise RunError(f"{doing} of {self.name}: element {int(index[beyond].flat[0])} is none of its", line)
        return found, ((self.first + found[mask] * self.size)[:, None] + np.arange(self.size)).reshape(-1)

    def load(self, index: Array, mask: Array, thread: Array, line: Line | None) -> tuple[Array, Array | None]:
        """(values, which of them nobody ever wrote, or None for none of them)."""
        if not mask.any():
            return np.zeros(index.shape, self.dtype.values), None
        found, places = self.at(index, mask, "load", line)
        self.places.touch(self.name, line, places, np.repeat(thread[mask], self.size), writing=False)
        values = self.dtype.decode(self.raw[found])
        written = self.places.written[places]
        if written.all():
            return values, None
        if not self.array:
            raise RunError(f"load of {self.name}: nobody has written there", line)
        undefined = np.zeros(index.shape, bool)
        undefined[mask] = ~written.reshape(-1, self.size).all(1)
        return values, undefined

    def store(
        self, index: Array, mask: Array, thread: Array, value: Array, undefined: Array | None, line: Line | None
    ) -> None:
        if not mask.any():
            return
        unknown = np.broadcast_to(False if undefined is None else undefined, index.shape)[mask]
        if unknown.any() and not self.array:
            raise RunError(f"store to {self.name} of what comes from memory that nobody has written", line)
        found, places = self.at(index, mask, "store", line)
        self.places.touch(self.name, line, places, np.repeat(thread[mask], self.size), writing=True)
        self.raw[found[mask]] = self.dtype.encode(np.broadcast_to(value, index.shape)[mask])
        self.places.written[places] = np.repeat(~unknown, self.size)


def tensors(arguments: Mapping[str, tuple[Array, DType]], outputs: tuple[str, ...], clock: Clock) -> dict[str, Memory]:
    """The memory of arguments; those that share bytes share their places. Outputs are poisoned."""
    flat: dict[str, tuple[Array, Array, int]] = {}
    extents: dict[str, tuple[int, int]] = {}
    for name, (raw, _) in arguments.items():
        if name in outputs:
            raw[...] = poison(raw.dtype)
        upward = raw[tuple(slice(None, None, -1 if s < 0 else 1) for s in raw.strides)]
        steps = [s // raw.itemsize for s in upward.strides]
        count = sum((n - 1) * s for n, s in zip(raw.shape, steps, strict=True)) + 1 if raw.size else 0
        whole, inside = np.lib.stride_tricks.as_strided(upward, (count,), (raw.itemsize,)), np.zeros(count, bool)
        if raw.size:
            np.lib.stride_tricks.as_strided(inside, raw.shape, steps)[...] = True
        low = whole.ctypes.data
        flat[name], extents[name] = (whole, inside, (raw.ctypes.data - low) // raw.itemsize), (low, low + whole.nbytes)
    made: dict[str, Memory] = {}
    for group in _sharing(extents):
        least, most = extents[group[0]][0], max(extents[n][1] for n in group)
        unit = math.gcd(*(x for n in group for x in (flat[n][0].itemsize, extents[n][0] - least)))
        places = Places((most - least) // unit, written=True, clock=clock)
        for n in group:
            whole, inside, start = flat[n]
            first, size = (extents[n][0] - least) // unit, whole.itemsize // unit
            made[n] = Memory(n, arguments[n][1], whole, places, start, first, size, inside)
            if n in outputs:
                own = first + np.flatnonzero(inside) * size
                places.written[own[:, None] + np.arange(size)] = False
    return made


def sizes_of(raw: Array, levels: int) -> tuple[int, ...]:
    """The sizes of a view's axes, of which an array stores the first as so many."""
    return (math.prod(raw.shape[:levels]), *raw.shape[levels:])


def _sharing(extents: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Names whose bytes overlap, together."""
    groups: list[list[str]] = []
    end = -1
    for name, (low, high) in sorted(extents.items(), key=lambda item: item[1]):
        if low >= end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, high)
    return groups


def poison(dtype: Any) -> Any:
    """A value that shows: NaN, or -1."""
    return True if dtype == np.bool_ else np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
