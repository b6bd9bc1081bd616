"""What a launch costs a GPU, by estimate: bytes over bandwidth, or operations over their rate, whichever takes longer,
and the launch. Bytes, accesses and operations are those of an instance's threads, counted by running its addresses.

Memory itself moves whole sectors, each once; to write a part of one reads it first. On the way to a multiprocessor
every access counts, of each pass over a row too: how fast these go depends on how much a warp's access wants of the
lines that it touches, which is where narrow, strided and scattered ones lose. Shared memory gives a warp a word of each
bank at once. How long a chain of steps takes in a launch too small to hide it is not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.tile.dtypes import Array, boolean, int64
from tilewright.tile.errors import Line, LowerError
from tilewright.tile.ir.thread_ir import Function, Let, Load, Operand, Parameter, Print, Store
from tilewright.tile.ir.thread_uniform import WARP
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.oracle.emulator import Machine
from tilewright.tile.runtime.cuda import check
from tilewright.tile.schedule import Schedule

LINE, SECTOR, BANKS = 128, 32, 32
FAR = 1 << 20
"""Elements from row to row, of a size that is not known, or between neighbours of an axis of an unknown stride."""
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Gpu:
    """What it does in a microsecond: bytes from and to `memory`; bytes of accesses of which a warp wants such a part of
    the lines it touches (`loads`, `stores`: rising pairs); times that a warp gets a word of each bank of `shared`
    memory; `operations`, of which one of each kind `costs` so many."""

    name: str
    multiprocessors: int
    launch_us: float
    memory: float
    loads: list[tuple[float, float]]
    stores: list[tuple[float, float]]
    shared: float
    operations: float
    costs: Mapping[str, float]

    def bandwidth(self, part: float, writes: bool) -> float:
        table = self.stores if writes else self.loads
        parts, speeds = ([math.log(x) for x in column] for column in zip(*table, strict=True))
        return math.exp(np.interp(math.log(part), parts, speeds))

    def cost(self, s: Let) -> float:
        """What one lane costs. The integers of addresses are few, and shared among lanes."""
        source, mode = (s.operands or s.type).dtype, s.mode.split()[0] if s.mode else ""
        names = [f"{s.op} {mode}", mode]
        if s.op == "cast":
            names = [f"cast {d}" for d in (source, s.type.dtype)]
        elif int64 in (source, s.type.dtype) and s.op != "philox":
            names = ["int64"]
        return next((self.costs[n] for n in (*names, s.op) if n in self.costs), 1.0)


H200 = Gpu(**json.loads(Path(__file__).with_name("h200.json").read_text("utf-8")))
"""Measured by scripts/tile_fusion.py; see docs/notes/tile-on-h200.md."""


class _Counter(Machine):
    """Runs the addresses of one instance and counts. What is loaded is the number of the instance; a condition of what
    is loaded holds. `places`: the bytes where the elements begin that it touches, by view and whether it writes."""

    def __init__(self, program: Program, function: Function, gpu: Gpu, grid: Grid, place: Grid) -> None:
        super().__init__(function, grid)
        self.program, self.gpu, self.place = program, gpu, place
        self.operations = self.busy_us = 0.0
        self.narrowest = 16
        self.touched: dict[tuple[str, bool], list[Array]] = {}
        self.instance(place)
        self.places = {key: np.unique(np.concatenate(found)) for key, found in self.touched.items()}

    def parameter(self, p: Parameter, place: tuple[int, ...]) -> Array:
        if p.kind == "builtin":
            return super().parameter(p, place)
        view, value = self.program.views.get(p.of), FAR
        if view is not None and p.kind == "stride" and not view.unit:  # what divides it is what is known of it
            step, last = view.align // view.dtype.itemsize, p.axis == view.rank + view.levels - 2
            value = step if last and step > 1 else FAR if last or step > 1 else 1  # by columns, rows are near
        size = view.most(p.axis) if view is not None and p.kind == "size" else None
        if size is not None:
            value = size
        elif p.kind != "stride":
            self.undefined[p.name] = np.ones((1, 1), bool)
        return np.full((1, 1), value, np.int64)

    def passes(self, index: Array, mask: Array, item: int, width: int) -> int:
        """How often shared memory is asked for an access of each warp: the most words that one wants of a bank."""
        found = 0
        for lane in range(0, index.shape[1], width // item):
            first, inside = index[:, lane] * item, np.flatnonzero(mask[:, lane])
            words = first[inside, None] // 4 + np.arange(max(1, width // 4))
            warps = np.broadcast_to(inside[:, None] // WARP, words.shape)
            warp, word = np.unique(np.stack([warps.ravel(), words.ravel()]), axis=1)
            counts = np.bincount(warp * BANKS + word % BANKS, minlength=-(-len(index) // WARP) * BANKS)
            found += int(counts.reshape(-1, BANKS).max(1).sum())
        return found

    def known(self, operand: Operand | None, active: Array, what: str, line: Line | None) -> None:
        if what == "a loop's bound" and self.unknown(operand) is not None:
            raise LowerError(f"{self.program.name}: an estimate needs loops of a known length")

    def let(self, s: Let, active: Array) -> None:
        source = (s.operands or s.type).dtype
        self.operations += self.gpu.cost(s) * s.type.lanes * float(active.sum())
        if s.type.dtype != int64 and not (s.type.dtype == boolean and source == int64):
            self.values[s.name] = np.full((1, 1), s.type.dtype == boolean, s.type.dtype.values)
            return
        super().let(s, active)
        if s.op == "min":  # of something and what is large
            self.undefined.pop(s.name, None)

    def print(self, s: Print, active: Array) -> None:
        """Nothing."""

    def access(self, s: Load | Store, active: Array) -> None:
        if isinstance(s, Load):
            self.values[s.name] = np.full((1, 1), self.place[0] if s.type.dtype.integer else 0, s.type.dtype.values)
        index, mask = self.reached(s, active)
        item, key = s.type.dtype.itemsize, (s.memory, isinstance(s, Store))
        whole = s.stride == 1 and not s.scattered and bool((mask.all(1) == mask.any(1)).all())
        width = max(s.align, item) if whole else item
        if s.memory in self.memories:
            if any(a.name == s.memory and a.shared for a in self.function.arrays):
                self.busy_us += self.passes(index, mask, item, width) / self.gpu.shared
            if isinstance(s, Store) and s.source:
                self.access(Load("copied", s.type, s.source, s.value, 1, s.count, align=s.align), active)
            return
        self.narrowest = min(self.narrowest, width if s.type.lanes > 1 else 16)
        self.touched.setdefault(key, []).append(index[mask] * item)
        for lane in range(0, s.type.lanes, width // item):
            here, inside = (x[:, lane].reshape(-1, min(WARP, len(active))) for x in (index * item, mask))
            ends = np.concatenate([here // LINE, (here + width - 1) // LINE], 1)
            lines = sum(len(np.unique(row[np.tile(m, 2)])) for row, m in zip(ends, inside, strict=True))
            wanted = len(np.unique(here[inside])) * width
            if lines:
                self.busy_us += wanted / self.gpu.bandwidth(min(1.0, wanted / (lines * LINE)), key[1])


@dataclass(frozen=True)
class Cost:
    """Of a launch, in microseconds: the time in all and what takes it, "bytes" or "operations"; and how many bytes the
    narrowest access to a row moves at once."""

    us: float
    limit: str
    narrowest: int


def estimate(program: Program, schedule: Schedule, grid: Grid, gpu: Gpu = H200) -> Cost:
    """What a launch of a grid costs. Sizes that the program does not know are large ones.

    Raises:
        LowerError: a loop whose length is only known at run time; a schedule that cannot express the program.
    """
    function = check(program, schedule, "")
    axes = [axis for axis in range(3) if grid[axis] > 1]
    places = [(0, 0, 0), *((int(a == 0), int(a == 1), int(a == 2)) for a in axes)]
    one, *others = (_Counter(program, function, gpu, grid, place) for place in places)
    moved = 0.0
    for (view, writes), mine in one.places.items():
        item, sectors = program.views[view.removeprefix("p_")].dtype.itemsize, len(np.unique(mine // SECTOR))
        size = sectors * SECTOR * (2 if writes and len(mine) * item < sectors * SECTOR else 1)
        same = [np.array_equal(mine, other.places.get((view, writes), ())) for other in others]
        moved += size * math.prod(grid[axis] for axis, shared in zip(axes, same, strict=True) if not shared)
    filled = -(-math.prod(grid) // gpu.multiprocessors) * gpu.multiprocessors
    bytes_us = max(moved / gpu.memory, one.busy_us * filled)
    operations_us = one.operations * filled / gpu.operations
    limit = "operations" if operations_us > bytes_us else "bytes"
    return Cost(gpu.launch_us + max(bytes_us, operations_us), limit, one.narrowest)
