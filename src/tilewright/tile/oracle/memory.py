"""Memory as the emulator sees it: tensors and arrays by element, with what was ever written and who touched it when.

A race is found by epochs: two accesses of different threads to one place, of which one writes, need a barrier of the
block between them, or one of the warp where both are in it. Of the readers since the last barrier of the block a place
remembers as many as decide whether any later write races. What runs is in `emulator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.tile.dtypes import Array, DType
from tilewright.tile.errors import Line, RaceError, RunError
from tilewright.tile.ir.thread_uniform import WARP


@dataclass
class Clock:
    """What orders the threads of an instance: a count of barriers of the block, and of each warp."""

    threads: int
    block: int = 0
    warp: Array = field(init=False)

    def __post_init__(self) -> None:
        self.warp = np.zeros(-(-self.threads // WARP), np.int64)


class Touched:
    """One kind of access (reads, or writes) to each place: the last one, and what of the others still matters."""

    def __init__(self, places: int) -> None:
        self.block, self.warp = np.full(places, -1, np.int64), np.zeros(places, np.int64)
        self.thread, self.same, self.other = (np.full(places, -1, np.int32) for _ in range(3))
        """A thread; another one of its warp since the warp's last barrier; one of another warp. -1: none."""
        self.line = np.zeros(places, np.int32)


class Places:
    """The places of a stretch of memory, each as large as the smallest element that is kept there."""

    def __init__(self, count: int, *, written: bool, clock: Clock) -> None:
        self.written, self.clock = np.full(count, written), clock
        self.lines: list[tuple[str, Line | None]] = [("", None)]
        self.numbers: dict[tuple[str, Line | None], int] = {}
        self.reads, self.writes = Touched(count), Touched(count)
        self.busy = np.zeros(count, bool)
        """Where a copy is on its way to."""

    def touch(self, name: str, line: Line | None, at: Array, thread: Array, *, writing: bool) -> None:
        """Threads touch places, all at once.

        Raises:
            RaceError: with each other, or with an earlier access.
        """
        if self.busy[at].any():
            raise RaceError(f"{name}: a copy is on its way to where thread {thread[self.busy[at]][0]} comes", line)
        key = (name, line)
        number = self.numbers.setdefault(key, len(self.lines))
        if number == len(self.lines):
            self.lines.append(key)
        order = np.argsort(at, kind="stable")
        at, thread = at[order], thread[order]
        first = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
        place = at[first]
        low, high = np.minimum.reduceat(thread, first), np.maximum.reduceat(thread, first)
        if writing:
            self._refuse(low != high, place, low, high, np.full(len(place), number), "writes", number, "writes")
            self._check(self.reads, "read", place, low, "writes", number)
        for one in (low, high) if not writing else (low,):
            self._check(self.writes, "wrote", place, one, "writes" if writing else "reads", number)
        self._note(self.writes if writing else self.reads, place, low, high, number)

    def _check(self, past: Touched, did: str, place: Array, now: Array, does: str, number: int) -> None:
        """Whether a thread at each place meets what an earlier access left there."""
        recent, before = past.block[place] == self.clock.block, past.thread[place]
        for who in (before, past.same[place], past.other[place]):
            parted = (who // WARP == now // WARP) & (past.warp[place] < self.clock.warp[now // WARP])
            self._refuse(recent & (who >= 0) & (who != now) & ~parted, place, who, now, past.line[place], did, number,
                         does)  # fmt: skip

    def _refuse(
        self, wrong: Array, place: Array, who: Array, now: Array, line: Array, did: str, number: int, does: str
    ) -> None:
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            (name, mine), (_, other) = self.lines[number], self.lines[line[i]]
            there, here = (f" at {found}" if found is not None else "" for found in (other, mine))
            raise RaceError(f"{name}, place {place[i]}: thread {who[i]} {did}{there}, and thread {now[i]} "
                            f"{does}{here}, with no barrier between", mine)  # fmt: skip

    def _note(self, past: Touched, place: Array, low: Array, high: Array, number: int) -> None:
        """Remember an access by the threads from `low` to `high`, as far as it adds to what may race later."""
        none, warp, now = np.int32(-1), low // WARP, self.clock.warp[low // WARP]
        thread, same, other = past.thread[place], past.same[place], past.other[place]
        fresh = past.block[place] != self.clock.block
        again = ~fresh & (other < 0) & (thread // WARP == warp) & (past.warp[place] < now)
        over = (fresh | again) if past is self.reads else np.full(len(place), True)
        near = high // WARP == warp
        beyond = np.where(thread // WARP != warp, low, np.where(near, none, high))
        second = np.where(low != thread, low, np.where(high != thread, high, none))
        mine = ~over & (thread // WARP == warp)
        past.same[place] = np.where(over, np.where(near & (high != low), high, none),
                                    np.where(mine & (same < 0) & near, second, same))  # fmt: skip
        past.other[place] = np.where(over, np.where(near, none, high), np.where(other < 0, beyond, other))
        past.warp[place] = np.where(over, now, past.warp[place])
        past.line[place] = np.where(over, number, past.line[place])
        past.thread[place] = np.where(over, low, thread)
        past.block[place] = self.clock.block


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
        found = index + self.start
        beyond = mask & ((found < 0) | (found >= len(self.raw)))
        found = np.where(mask & ~beyond, found, 0)
        if self.inside is not None:
            beyond = beyond | (mask & ~self.inside[found])
        if beyond.any():
            raise RunError(f"{doing} of {self.name}: element {int(index[beyond].flat[0])} is none of its", line)
        places = self.first + found[mask] * self.size
        return found, np.asarray((places[:, None] + np.arange(self.size)).reshape(-1))

    def load(self, index: Array, mask: Array, thread: Array, line: Line | None) -> tuple[Array, Array | None]:
        """(values, which of them nobody ever wrote, or None for none of them)."""
        if not mask.any():
            return np.zeros(index.shape, self.dtype.values), None
        found, places = self.at(index, mask, "load", line)
        if self.places.clock.threads > 1:
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
        found, places = self.at(index, mask, "store", line)
        unknown = None if undefined is None else np.broadcast_to(undefined, index.shape)[mask]
        if unknown is not None and unknown.any() and not self.array:
            raise RunError(f"store to {self.name} of what comes from memory that nobody has written", line)
        if self.places.clock.threads > 1:
            self.places.touch(self.name, line, places, np.repeat(thread[mask], self.size), writing=True)
        self.raw[found[mask]] = self.dtype.encode(np.broadcast_to(value, index.shape)[mask])
        self.places.written[places] = True if unknown is None else np.repeat(~unknown, self.size)


def tensors(arguments: Mapping[str, tuple[Array, DType]], outputs: tuple[str, ...], clock: Clock) -> dict[str, Memory]:
    """The memory of arguments; those that share bytes share their places. Outputs are poisoned."""
    flat: dict[str, tuple[int, Array, int, Array]] = {}
    for name, (raw, _) in arguments.items():
        if name in outputs:
            raw[...] = poison(raw.dtype)
        upward = raw[tuple(slice(None, None, -1 if s < 0 else 1) for s in raw.strides)]
        steps = [abs(s) // raw.itemsize for s in raw.strides]
        count = sum((n - 1) * s for n, s in zip(raw.shape, steps, strict=True)) + 1 if raw.size else 0
        whole = np.lib.stride_tricks.as_strided(upward, (count,), (raw.itemsize,))
        inside = np.zeros(count, bool)
        if raw.size:
            np.lib.stride_tricks.as_strided(inside, raw.shape, steps)[...] = True
        start = (raw.ctypes.data - upward.ctypes.data) // raw.itemsize
        flat[name] = upward.ctypes.data, whole, start, inside
    made: dict[str, Memory] = {}
    for group in _sharing({n: (low, low + w.nbytes) for n, (low, w, _, _) in flat.items()}):
        least, most = min(flat[n][0] for n in group), max(flat[n][0] + flat[n][1].nbytes for n in group)
        unit = math.gcd(*(x for n in group for x in (flat[n][1].itemsize, flat[n][0] - least)))
        places = Places((most - least) // unit, written=True, clock=clock)
        for n in group:
            low, whole, start, inside = flat[n]
            dense = bool(inside.all())
            m = made[n] = Memory(n, arguments[n][1], whole, places, start, (low - least) // unit,
                                 whole.itemsize // unit, None if dense else inside)  # fmt: skip
            if n in outputs:
                own = np.flatnonzero(inside)
                places.written[(m.first + own[:, None] * m.size + np.arange(m.size)).reshape(-1)] = False
    return made


def sizes_of(raw: Array, levels: int) -> tuple[int, ...]:
    """The sizes of a view's axes, of which an array stores the first as so many."""
    return (math.prod(raw.shape[:levels]), *raw.shape[levels:])


def _sharing(extents: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Names whose bytes overlap, together."""
    groups: list[list[str]] = []
    end = -1
    for name in sorted(extents, key=lambda n: extents[n]):
        low, high = extents[name]
        if groups and low < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, high)
    return groups


def poison(dtype: Any) -> Any:
    """A value that shows: NaN, or -1."""
    return True if dtype == np.bool_ else np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
