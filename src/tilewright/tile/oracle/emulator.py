"""The meaning of L1: a function run in numpy, instance by instance, all threads of an instance at each statement.

Values are arrays of threads x lanes (or one row, where all threads have the same). A thread that a condition or a
loop's bound leaves out is masked. Threads in step show no race by what they compute, so `memory` looks for races; it
refuses what `interpreter` refuses, too. What was never written may be read from an array, as padding is, while nothing
comes of it: no store to a tensor, no address, no condition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from tilewright.tile import numbers
from tilewright.tile.dtypes import Array, DType, boolean, int64
from tilewright.tile.errors import Line, RaceError, RunError
from tilewright.tile.ir import thread_ir as ir
from tilewright.tile.ir.thread_uniform import WARP
from tilewright.tile.oracle.memory import Clock, Memory, Places, poison, sizes_of, tensors


def run(
    function: ir.Function,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    *,
    outputs: tuple[str, ...] = (),
    levels: Mapping[str, int] | None = None,
    arena: Mapping[str, int] | None = None,
) -> None:
    """Run every instance.

    Args:
        arguments, outputs: as `interpreter.run` takes them.
        levels: of views with more than one; see `ViewType`.
        arena: where each shared array begins in the memory that they share, in bytes. Without it none meets another.

    Raises:
        RunError: an access outside a tensor, a use of what was not written, an address that is not aligned as it says.
        RaceError: accesses that no barrier orders, a barrier or a shuffle that some threads do not reach.
    """
    machine = Machine(function, grid)
    machine.arguments, machine.levels, machine.arena = arguments, levels or {}, arena
    pointers = [p for p in function.parameters if p.kind == "pointer"]
    found = tensors({p.of: (arguments[p.of], p.dtype) for p in pointers}, outputs, machine.clock)
    machine.views = {p.name: found[p.of] for p in pointers}
    with np.errstate(all="ignore"):
        for place in itertools.product(*(range(n) for n in machine.grid)):
            machine.instance(place)


def _toward_zero(a: Array, b: Array) -> Array:
    down = np.floor_divide(a, b)
    return np.asarray(down + ((down < 0) & (down * b != a)).astype(down.dtype))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **numbers.BINARY,
    **numbers.UNARY,  # fast is exact
    "copy": np.asarray,
    "splat": np.asarray,
    "fma": numbers.fma,
    "ldexp": numbers.NumpyBuilder().ldexp,
    "philox": numbers.philox,
    "select": np.where,
    "quot": _toward_zero,
    "rem": lambda a, b: a - _toward_zero(a, b) * b,
}


class Machine:
    """Runs a function."""

    def __init__(self, function: ir.Function, grid: tuple[int, ...]) -> None:
        self.function, self.grid = function, (*grid, 1, 1, 1)[:3]
        self.arguments: Mapping[str, Any] = {}
        self.levels: Mapping[str, int] = {}
        self.arena: Mapping[str, int] | None = None
        self.clock = Clock(function.threads)
        self.thread = np.arange(function.threads, dtype=np.int32)[:, None]
        self.views: dict[str, Memory] = {}
        self.memories: dict[str, Memory] = {}
        self.values: dict[str, Any] = {}
        self.copies: list[tuple[Any, ...]] = []
        """What is on its way: a memory, its places, and what is stored there once it is waited for."""
        self.undefined: dict[str, Array] = {}
        """Of a value with lanes that come from memory that nobody wrote: which. A register is `name[number]`."""

    def instance(self, place: tuple[int, ...]) -> None:
        self.clock.block += 1
        self.undefined, self.copies = {}, []
        self.values = {p.name: self.parameter(p, place) for p in self.function.parameters if p.kind != "pointer"}
        self.memories = {**self.views, **self.arrays()}
        self.block(self.function.body, np.ones((self.function.threads, 1), bool))

    def parameter(self, p: Any, place: tuple[int, ...]) -> Array:
        if p.kind == "builtin":
            kinds = {"pid": place, "grid": self.grid}
            return self.thread.astype(np.int64) if p.of == "thread" else np.full((1, 1), kinds[p.of][p.axis], np.int64)
        raw, levels = self.arguments[p.of], self.levels.get(p.of, 1)
        if p.kind == "size":
            value = sizes_of(raw, levels)[p.axis]
        else:
            value = {"stride": lambda: raw.strides[p.axis] // raw.itemsize, "extent": lambda: max(raw.shape[p.axis], 1),
                     "scalar": lambda: raw}[p.kind]()  # fmt: skip
        return np.full((1, 1), value, p.dtype.values)

    def arrays(self) -> dict[str, Memory]:
        """The arrays of an instance, which nobody has written yet."""
        if self.arena is not None:
            ends = [self.arena[a.name] + a.elements * a.dtype.itemsize for a in self.function.arrays if a.shared]
            whole = Places(max(ends, default=0), written=False, clock=self.clock)
            together = np.full(max(ends, default=0), 0xFF, np.uint8)
        made = {}
        for a in self.function.arrays:
            kind = np.dtype(a.dtype.storage)
            if a.shared and self.arena is not None:
                at, size = self.arena[a.name], a.elements * kind.itemsize
                raw = together[at : at + size].view(kind)
                made[a.name] = Memory(a.name, a.dtype, raw, whole, 0, at, kind.itemsize, array=True)
            else:
                places = Places(a.elements, written=False, clock=self.clock)
                made[a.name] = Memory(a.name, a.dtype, np.full(a.elements, poison(kind), kind), places, array=True)
        return made

    # Statements -----------------------------------------------------------------------------------------------------

    def block(self, body: list[ir.Statement], active: Array) -> None:
        for s in body:
            if isinstance(s, ir.Let):
                self.let(s, active)
            elif isinstance(s, (ir.Load, ir.Store)):
                self.access(s, active)
            elif isinstance(s, ir.Assign):
                self.assign(s, active)
            elif isinstance(s, ir.Declare):
                start = self.value(s.value, s.type.dtype)
                self.values[s.name] = [start] * s.count if s.count else start
                for key in [f"{s.name}[{i}]" for i in range(s.count)] if s.count else [s.name]:
                    self.define(key, self.unknown(s.value))
            elif isinstance(s, ir.If):
                self.known(s.condition, active, "a condition", None)
                inside = active & self.value(s.condition, boolean)
                if inside.any():
                    self.block(s.body, inside)
            elif isinstance(s, ir.For):
                self.loop(s, active)
            elif isinstance(s, ir.Print):
                self.print(s, active)
            elif isinstance(s, ir.Wait):
                for memory, at, *given in self.copies:
                    memory.places.busy[at] = False
                    memory.store(*given)
                self.copies.clear()
            else:
                self.barrier(s, active)

    def loop(self, s: ir.For, active: Array) -> None:
        for bound in s.decides:
            self.known(bound, active, "a loop's bound", None)
        at, hi, step = (self.value(b, int64) for b in s.decides)
        active = active & (step > 0)
        while (inside := active & (at < hi)).any():
            self.values[s.var] = at
            self.block(s.body, inside)
            at = np.where(hi - at > step, at + step, hi) if s.any_step else at + step

    def print(self, s: ir.Print, active: Array) -> None:
        lanes, shape = np.arange(s.type.lanes), (len(active), s.type.lanes)
        mask = active & (lanes < (s.type.lanes if s.count is None else self.value(s.count, int64)))
        self.known(s.value, mask, "what is printed", s.line)
        place = [self.value(p, int64) + (lanes if i == s.along else 0) for i, p in enumerate(s.place)]
        given = [np.broadcast_to(v, shape)[mask].tolist() for v in (*place, self.value(s.value, s.type.dtype))]
        for line in zip(*given, strict=True):
            print(s.format % line)

    def barrier(self, s: ir.Barrier, active: Array) -> None:
        together = active.reshape(1 if s.scope == "block" else -1, min(WARP, len(active)) if s.scope == "warp" else -1)
        if (together.any(1) != together.all(1)).any():
            missing = int(np.flatnonzero(~active)[0])
            raise RaceError(f"a barrier of the {s.scope} that thread {missing} does not reach ({s.why})")
        if s.scope == "block":
            self.clock.block += 1
        else:
            self.clock.warp[together.all(1)] += 1

    def assign(self, s: ir.Assign, active: Array) -> None:
        new, unknown, key = self.value(s.value, s.type.dtype), self.unknown(s.value), s.name
        held: Any = self.values
        at: Any = s.name
        if s.index is not None:
            held, at = self.values[s.name], self.number(s.index)
            key = f"{s.name}[{at}]"
        before = self.undefined.get(key)
        if not active.all():
            new = np.where(active, new, held[at])
            if unknown is not None or before is not None:
                unknown = np.where(active, False if unknown is None else unknown, False if before is None else before)
        held[at] = new
        self.define(key, unknown)

    # Memory ---------------------------------------------------------------------------------------------------------

    def reached(self, s: ir.Load | ir.Store, active: Array) -> tuple[Array, Array]:
        """(elements, which of them are touched) of threads x lanes."""
        lanes, shape = np.arange(s.type.lanes), (len(active), s.type.lanes)
        index, mask = self.value(s.index, int64), active
        for operand in (s.stride, s.count):
            self.known(operand, active, "an address", s.line)
        if not s.scattered:
            index = index + lanes * self.value(s.stride, int64)
        if s.count is not None:
            mask = mask & (lanes < self.value(s.count, int64))
        if s.mask is not None:
            self.known(s.mask, mask, "a mask", s.line)
            mask = mask & self.value(s.mask, boolean)
        self.known(s.index, mask, "an address", s.line)
        return np.broadcast_to(index, shape), np.broadcast_to(mask, shape)

    def access(self, s: ir.Load | ir.Store, active: Array) -> None:
        memory, (index, mask) = self.memories[s.memory], self.reached(s, active)
        thread = np.broadcast_to(self.thread, index.shape)
        self.aligned(s, memory, index, active & mask.any(1, keepdims=True))
        if isinstance(s, ir.Store) and s.source:
            source, where = self.memories[s.source], self.value(s.value, int64) + np.arange(s.type.lanes)
            where = np.broadcast_to(where, index.shape)
            self.known(s.value, mask, "an address", s.line)
            self.aligned(s, source, where, active & mask.any(1, keepdims=True))
            found, _ = source.load(where, mask, thread, s.line)
            memory.store(index, mask, thread, found, np.ones_like(mask), s.line)  # nothing is there yet
            _, at = memory.at(index, mask, "copy", s.line)
            memory.places.busy[at] = True
            self.copies.append((memory, at, index, mask, thread, found, None, s.line))
            return
        if isinstance(s, ir.Store):
            value = self.value(s.value, s.type.dtype)
            memory.store(index, mask, thread, value, self.unknown(s.value), s.line)
            return
        found, unknown = memory.load(index, mask, thread, s.line)
        kind = s.type.dtype.values
        if not mask.all():
            other = np.asarray(0 if s.count is not None else s.other, kind)
            found = np.where(mask, found, s.type.dtype.rounded(other))
        self.values[s.name] = found.astype(kind, copy=False)
        self.define(s.name, unknown)

    def aligned(self, s: ir.Load | ir.Store, memory: Memory, index: Array, active: Array) -> None:
        if not s.align or s.scattered:
            return
        item = memory.dtype.itemsize
        base = memory.first // memory.size * item if memory.array else memory.raw.ctypes.data
        first = (index[:, :1] + memory.start) * item + base
        if (active & (first % s.align != 0)).any():
            raise RunError(f"{s.memory}: an address is no multiple of {s.align} bytes", s.line)

    # Values ---------------------------------------------------------------------------------------------------------

    def value(self, operand: ir.Operand, dtype: DType) -> Array:
        if isinstance(operand, str):
            return np.asarray(self.values[operand])
        return np.full((1, 1), operand, dtype.values)

    def number(self, operand: ir.Operand) -> int:
        """An index that is known when compiling."""
        return int(self.values[operand].flat[0]) if isinstance(operand, str) else int(operand)

    def unknown(self, operand: ir.Operand | None) -> Array | None:
        return self.undefined.get(operand) if isinstance(operand, str) else None

    def define(self, name: str, unknown: Array | None) -> None:
        self.undefined.pop(name, None)
        if unknown is not None and unknown.any():
            self.undefined[name] = unknown

    def known(self, operand: ir.Operand | None, active: Array, what: str, line: Line | None) -> None:
        found = self.unknown(operand)
        if found is not None and (found & active).any():
            raise RunError(f"{what} comes from memory that nobody has written", line)

    def let(self, s: ir.Let, active: Array) -> None:
        source = s.operands or s.type
        if s.op == "element":
            name, i = str(s.args[0]), self.number(s.args[1])
            self.values[s.name] = self.values[name][i]
            self.define(s.name, self.undefined.get(f"{name}[{i}]"))
            return
        args = [self.value(a, boolean if s.op == "select" and i == 0 else source.dtype) for i, a in enumerate(s.args)]
        unknown = self._unknown_of(s, args) if self.undefined else None
        self.values[s.name] = np.asarray(self.operation(s, args, active)).astype(s.type.dtype.values, copy=False)
        if self.undefined:
            self.define(s.name, unknown)

    def _unknown_of(self, s: ir.Let, args: list[Array]) -> Array | None:
        """Which lanes of a result come from memory that nobody wrote."""
        parts = [self.unknown(a) for a in s.args]
        if all(p is None for p in parts):
            return None
        found = [np.zeros((1, 1), bool) if p is None else p for p in parts]
        if s.op == "select":
            return np.asarray(found[0] | np.where(args[0], found[1], found[2]))
        if s.op == "and" and s.type.dtype == boolean:  # with False it is False
            return np.asarray((found[0] | found[1]) & (found[0] | args[0]) & (found[1] | args[1]))
        if s.op == "fold":
            return np.asarray(found[0].any(1, keepdims=True))
        if s.op == "shuffle_xor":
            return self.exchanged(found[0], s.args[1])
        return np.asarray(reduce(np.logical_or, found))

    def exchanged(self, value: Array, mask: ir.Operand) -> Array:
        return value if len(value) == 1 else value[self.thread[:, 0] ^ self.number(mask)]

    def operation(self, s: ir.Let, args: list[Array], active: Array) -> Any:
        op, source = s.op, s.operands or s.type
        if op in ("max", "min") and s.mode:
            return OPERATIONS[op](*args, s.mode)
        if op in OPERATIONS:
            return OPERATIONS[op](*args)
        if op == "iota":
            return args[0] + np.arange(s.type.lanes)
        if op == "below":
            return np.arange(s.type.lanes) < args[0]
        if op == "cast":
            words = s.mode.split()
            return numbers.cast(args[0], source.dtype, s.type.dtype, words[0], "saturate" in words)
        if op == "bits":
            return np.ascontiguousarray(args[0]).view(s.type.dtype.values)
        if op == "fold":
            lanes = np.broadcast_to(args[0], (len(args[0]), source.lanes)).T
            return numbers.by_halves(s.mode, lanes)[:, None]
        if op == "shuffle_xor":
            warps = active.reshape(-1, min(WARP, len(active)))
            if (warps.any(1) != warps.all(1)).any():
                raise RaceError("a shuffle that not all threads of a warp reach", s.line)
            return self.exchanged(args[0], s.args[1])
        raise RunError(f"the emulator has no {op}", s.line)
