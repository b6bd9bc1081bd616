"""What `tile_fusion.py` measures beside cases: copies by width and stride, launches, arithmetic, shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tile_fusion_cases import BF16, F32, FP8, INT8, Spec
from tilewright import tile
from tilewright.tile.ir.thread_ir import Load, Store
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.runtime import cuda
from tilewright.tile.schedule import Schedule

ROWS, COLUMNS = 16384, 4096
TURNED = 32
"""Rows of a tile that goes through shared memory."""


@tile.kernel(static={"x": (1,)})
def copy(t: Any, x: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    t.store(y[at], t.load(x[at]))


@tile.kernel(static={"x": (1,)})
def read(t: Any, x: Any, y: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col])
    t.store(y[row], t.max(v.f32() if v.dtype.floating else v.i32().f32()))


@tile.kernel(static={"y": (1,)})
def fill(t: Any, y: Any) -> None:
    row, col = t.program_id(0), t.arange(y.shape[1])
    t.store(y[row, col], (col + row).i32().f32().to(y.dtype))


@tile.kernel(static={"x": (1,)})
def again(t: Any, x: Any, y: Any, times: int) -> None:
    """The row is read so many times."""
    row, total = t.program_id(0), t.var(0.0)
    for k in t.range(times):
        total.set(total.get() + t.sum(t.load(x[row, (t.arange(x.shape[1]) + k * 8) % x.shape[1]]).f32()))
    t.store(y[row], total.get())


@tile.kernel(static={"x": (1,)})
def turns(t: Any, x: Any, y: Any, times: int) -> None:
    """A tile goes through shared memory so many times, by columns and by rows in turn."""
    at = t.program_id(0) * TURNED + t.arange(TURNED)[:, None], t.arange(x.shape[1])[None, :]
    v = t.load(x[at])
    for k in range(times):
        v = t.stage(v, "shared", order=(k % 2, 1 - k % 2))
    t.store(y[at], v)


CHAINS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "add": (lambda t, v: v + 1.0, 64), "mul": (lambda t, v: v * 1.5, 64), "max": (lambda t, v: t.maximum(-v, 0.5), 32),
    "fma": (lambda t, v: t.fma(v, 1.5, 0.25), 64), "div": (lambda t, v: 3.0 / v, 8),
    "exp": (lambda t, v: t.exp(v), 4), "log": (lambda t, v: t.log(v), 4), "sqrt": (lambda t, v: t.sqrt(v), 8),
    "exp fast": (lambda t, v: t.exp(v, "fast"), 16), "log fast": (lambda t, v: t.log(v, "fast"), 16),
    "sigmoid": (lambda t, v: t.sigmoid(v), 4), "sigmoid fast": (lambda t, v: t.sigmoid(v, "fast"), 8),
    "rsqrt fast": (lambda t, v: t.rsqrt(v, "fast"), 16), "where": (lambda t, v: t.where(v < 0.5, v + 1.0, v * 1.5), 32),
    "bfloat16 and back": (lambda t, v: (v + 1.0).to(BF16).f32(), 16),
    "float8 and back": (lambda t, v: (v + 1.0).to(FP8, saturate=True).f32(), 8),
    "int8 and back": (lambda t, v: (v + 1.0).to(INT8, round="nearest_even", saturate=True).i32().f32(), 8),
    "random": (lambda t, v: (t.random(1, 7, v.to(tile.int32, "toward_zero", True).i64(), 0) >> 8).i32().f32(), 2),
}  # fmt: skip


@tile.kernel(static={"x": (1,)})
def chain(t: Any, x: Any, y: Any, what: str, times: int) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at])
    for _ in range(times):
        v = CHAINS[what][0](t, v)
    t.store(y[at], v)


@dataclass(frozen=True)
class Probe:
    """A measurement of one kernel. `wants`: bytes that its accesses to a view must move at once, by view."""

    name: dict[str, Any]
    kernel: Any
    specs: dict[str, Spec]
    schedule: Schedule
    rows: int = ROWS
    columns: int = COLUMNS
    wants: dict[str, int] | None = None
    constants: dict[str, Any] | None = None
    block: int = 1
    """Rows of an instance."""

    @property
    def program(self) -> Program:
        types = {n: s.type(self.rows, self.columns) for n, s in self.specs.items()}
        if self.wants:
            types = {n: replace(v, align=self.wants.get(n, v.align)) for n, v in types.items()}
        return self.kernel.trace({**types, **(self.constants or {})})

    def proven(self, made: cuda.Compiled) -> None:
        """That the text moves as many bytes at once as is said."""
        for view, width in (self.wants or {}).items():
            found = [s for s in made.function.statements() if isinstance(s, (Load, Store)) and s.memory == f"p_{view}"]
            item = self.specs[view].dtype.itemsize
            moved = {s.align if s.type.lanes > 1 else item for s in found}
            written = f", {width}>(" in made.source.text or width == item
            if moved != {width} or not written:
                raise ValueError(f"{self.name}: {view} moves {moved} bytes at once")


def probes() -> Iterator[Probe]:
    spread = Schedule(256, 1, 8)
    for dtype, width, side in itertools.product((INT8, BF16, F32), (1, 2, 4, 8, 16), ("load", "store", "both")):
        narrow = dict.fromkeys({"load": "x", "store": "y", "both": "xy"}[side], width)
        item = dtype.itemsize
        if width < item:
            continue
        specs = {"x": Spec(dtype), "y": Spec(dtype, output=True)}
        facts = {"probe": "width", "dtype": str(dtype), "side": side, "width": width}
        if side == "both" and (dtype is BF16 or width == 1):  # lanes beside one another
            vector = width // item
            threads = min(1024, COLUMNS // vector // 2)
            yield Probe({**facts, "vector": vector}, copy, specs, Schedule(threads, 1, vector), wants=narrow)
        if width < 16 or side == "both":  # vectors of 16 bytes, in parts
            vector = 16 // item
            made = {n: narrow.get(n, 16) for n in "xy"}
            yield Probe({**facts, "vector": vector}, copy, specs, Schedule(min(256, COLUMNS // vector // 2), 1, vector),
                        wants=made)  # fmt: skip
    for dtype, step, side, vector in itertools.product((BF16, F32), (2, 4, 8, 16), ("load", "store", "both"), (1, 0)):
        if dtype is F32 and step > 8:
            continue
        lanes = vector or 16 // dtype.itemsize
        strided = {"load": "x", "store": "y", "both": "xy"}[side]
        specs = {n: Spec(dtype, layout=step if n in strided else "dense", output=n == "y") for n in "xy"}
        facts = {"probe": "stride", "dtype": str(dtype), "side": side, "step": step, "vector": lanes}
        yield Probe(facts, copy, specs, Schedule(min(1024, COLUMNS // lanes // 2), 1, lanes), ROWS // 4)
    for side, vector in itertools.product(("load", "store", "both"), (1, 8)):
        strided = {"load": "x", "store": "y", "both": "xy"}[side]
        specs = {n: Spec(layout="turned" if n in strided else "dense", output=n == "y") for n in "xy"}
        facts = {"probe": "turned", "side": side, "vector": vector}
        yield Probe(facts, copy, specs, Schedule(min(1024, COLUMNS // vector // 2), 1, vector), ROWS // 4)
    one = Spec(F32, "m", output=True)
    for dtype in (INT8, BF16, F32):
        schedule = Schedule(min(256, COLUMNS * dtype.itemsize // 32), 1, 16 // dtype.itemsize)
        yield Probe({"probe": "read", "dtype": str(dtype)}, read, {"x": Spec(dtype), "y": one}, schedule)
    for dtype in (BF16, F32):
        yield Probe({"probe": "fill", "dtype": str(dtype)}, fill, {"y": Spec(dtype, output=True)}, spread)
    for rows, columns in itertools.product((1, 32, 132, 264, 1024, 4096), (256, 4096)):
        schedule = Schedule(max(32, columns // 16), 1, 8)
        yield Probe({"probe": "launch", "rows": rows, "columns": columns}, copy, {"x": Spec(), "y": Spec(output=True)},
                    schedule, rows, columns)  # fmt: skip
    for columns, times in itertools.product((4096, 32768), (1, 2, 4)):
        yield Probe({"probe": "again", "columns": columns, "times": times}, again, {"x": Spec(), "y": one},
                    Schedule(512, 1, 8), 2**26 // columns, columns, constants={"times": times})  # fmt: skip
    for what, (_, times) in CHAINS.items():
        for some in (times, 2 * times):
            specs = {"x": Spec(F32), "y": Spec(F32, output=True)}
            yield Probe({"probe": "chain", "what": what, "times": some}, chain, specs, Schedule(256, 1, 4), 4096, 4096,
                        constants={"what": what, "times": some})  # fmt: skip
    for times in (2, 6):
        yield Probe({"probe": "turns", "times": times}, turns, {"x": Spec(F32), "y": Spec(F32, output=True)},
                    Schedule(256, 1, 4), 2**17, 128, constants={"times": times}, block=TURNED)  # fmt: skip
