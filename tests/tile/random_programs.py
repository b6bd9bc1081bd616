"""Random L0 programs with inputs, for comparing the interpreter with compiled code.

Each is a kernel over the same arguments, made from a seed: rows of run-time width, tiles of one and two axes, every
element type, masks, reductions, cells in loops, effects under `when`, and memory that is written and read again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.tile import dtypes
from tilewright.tile.dtypes import Array, DType
from tilewright.tile.ir.tile_ir import Most, Program, ViewType, static_size
from tilewright.tile.lang.kernel import kernel

ROWS = 3
MOST = 256
STORAGE = (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.float8_e4m3fn, dtypes.int8, dtypes.int32)


@dataclass(frozen=True)
class Sample:
    """A program, its arguments as the interpreter takes them, the grid, and the views that it writes first."""

    program: Program
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    outputs: tuple[str, ...]
    types: dict[str, DType]


def sample(seed: int, size: int = 12) -> Sample:
    """The program of a seed. `size`: about how many operations it has."""
    chance = random.Random(seed)
    width = chance.choice((1, 2, 7, 16, 31, 64, 100, 129, 200))
    types = {"x": dtypes.float32, "w": chance.choice(STORAGE), "y": chance.choice(STORAGE), "z": dtypes.float32,
             "counts": dtypes.int32}  # fmt: skip
    shapes = {n: (ROWS, width) if n != "counts" else (ROWS,) for n in types}
    sizes = (None, Most(MOST) if chance.random() < 0.7 else width)
    views = {n: ViewType(d, sizes[: len(shapes[n])], chance.random() < 0.85) for n, d in types.items()}
    second = random.Random(seed + 1)

    def body(t: Any, x: Any, w: Any, y: Any, z: Any, counts: Any, a: Any, k: Any) -> None:
        _Maker(random.Random(second.random()), t, (x, w, y, z, counts), a, k).run(size)

    made = kernel(body, static=dict.fromkeys(("x", "w", "y", "z"), (1,)))
    program = made.trace({**views, "a": dtypes.float32, "k": dtypes.int64})
    numbers, calm = np.random.default_rng(seed), chance.random() < 0.6  # one NaN in a row hides what a sum does
    arguments: dict[str, Any] = {n: _array(numbers, d, shapes[n], views[n].unit, calm) for n, d in types.items()}
    arguments |= {"a": float(np.float32(numbers.normal())), "k": int(numbers.integers(0, 5))}
    return Sample(program, arguments, (ROWS, 1, 1), ("y",), types)


def _array(numbers: np.random.Generator, dtype: DType, shape: tuple[int, ...], unit: bool, calm: bool) -> Array:
    """Values of every kind, or finite ones, in an array whose last axis may be strided."""
    values = (numbers.normal(size=shape) * 10.0 ** numbers.integers(-2, 3, size=shape)).astype(np.float32)
    special = numbers.random(shape) + calm
    if dtype.floating:
        for level, value in ((0.02, np.nan), (0.04, np.inf), (0.06, -np.inf), (0.1, 0.0), (0.12, 1e-40)):
            values = np.where((special < level) & (special > level - 0.02), np.float32(value), values)
        raw = dtype.encode(values)
    else:
        raw = np.clip(np.rint(np.nan_to_num(values)), -100, 100).astype(dtype.storage)
        raw = np.abs(raw) % 5 if len(shape) == 1 else raw
    if unit:
        return np.ascontiguousarray(raw)
    return np.stack([raw, np.zeros_like(raw)], -1).reshape(*shape[:-1], -1)[..., ::2]


class _Maker:
    """Grows a pool of values and records effects on them."""

    def __init__(self, chance: random.Random, t: Any, views: Any, a: Any, k: Any) -> None:
        self.chance, self.t, self.k = chance, t, k
        self.x, self.w, self.y, self.z, self.counts = views
        self.row = t.program_id(0)
        self.col = t.arange(self.x.shape[1])
        self.at = (self.row, self.col)
        self.pool: list[Any] = [a, t.load(self.x[self.at])]
        self.folds: list[Any] = []

    def run(self, size: int) -> None:
        t, chance = self.t, self.chance
        self.pool.append(t.load(self.w[self.at]).f32())
        if chance.random() < 0.4:
            self.pool.append(t.load(self.x[self.at], mask=self.col < self.k + 3, other=chance.choice((0, 2.5, -1))))
        rare = [self.loop, self.conditional, self.memory, self.square, self.stage, self.turn]
        steps = [self.arithmetic] * 8 + [self.fold] * 3 + rare
        for _ in range(size):
            chance.choice(steps)()
        t.store(self.y[self.at], self.narrow(self.pick(), self.y.dtype))
        if chance.random() < 0.5:
            t.store(self.z[self.at], self.pick() + 0.0, mask=self.pick() > 0.0)
        for i, folded in enumerate(self.folds):  # few would come through to what is stored above
            t.store(self.z[self.row, i], folded, mask=self.x.shape[1] > i)

    def pick(self) -> Any:
        return self.chance.choice(self.pool[-8:])

    def narrow(self, v: Any, dtype: DType) -> Any:
        if dtype.integer:
            return v.to(dtype, round=self.chance.choice(("nearest_even", "toward_zero")), saturate=True)
        return v.to(dtype, saturate=dtype == dtypes.float8_e4m3fn or self.chance.random() < 0.3)

    def arithmetic(self) -> None:
        t, a, b = self.t, self.pick(), self.pick()
        made: Callable[[], Any] = self.chance.choice((
            lambda: a + b, lambda: a - b, lambda: a * b, lambda: a / b,
            lambda: t.maximum(a, b), lambda: t.minimum(a, b),
            lambda: t.maximum(a, b, nan="ignore"), lambda: t.where(a < b, a, b * 0.5), lambda: t.fma(a, b, 0.25),
            lambda: t.exp(a), lambda: t.exp2(b), lambda: t.log(t.abs(a)), lambda: t.sqrt(t.abs(a)), lambda: t.rint(a),
            lambda: t.rsqrt(t.abs(b) + 1.0), lambda: -a, lambda: self.narrow(a, self.chance.choice(STORAGE)).f32(),
            lambda: t.where((a == a) & (b != 0.0), 1.0, -0.0), lambda: self.integers(a),
            lambda: (self.col // 3 + self.row).f32() * a, lambda: ((self.col - 5) % 7).f32(),
        ))  # fmt: skip
        self.pool.append(made())

    def integers(self, a: Any) -> Any:
        t = self.t
        i = a.to(dtypes.int32, round="toward_zero", saturate=True)
        u = (i.bits(dtypes.uint32) >> 3) ^ 0x55
        j = t.maximum(i & 0xFF, (i << 2) | 1) + t.abs(i % 100 + 1) // 7
        return (j.f32() + (u & 0xFFFF).f32()) * 0.001

    def fold(self) -> None:
        v = self.pick()
        combine = self.chance.choice(("sum", "max", "min", "prod"))
        if v.shape:
            self.folds.append(self.t.reduce(v, combine))
            self.pool.append(self.folds[-1])
        if self.chance.random() < 0.2 and v.shape:
            self.pool.append(self.t.where(self.t.reduce(v > 0.5, self.chance.choice(("and", "or"))), v, 0.5))

    def loop(self) -> None:
        t, v = self.t, self.pick()
        total = t.var(v * 0.5)
        for i in t.range(self.k):
            new = total.get() * 0.75 + (i.f32() + (v if self.chance.random() < 2 else 0))
            if new.shape == total.node.shape:
                total.set(t.minimum(new, 1e6, nan="ignore"))
            if v.shape:
                total.set(total.get() + t.sum(v) * 0.125)
        self.pool.append(total.get())

    def conditional(self) -> None:
        t, v = self.t, self.pick()
        cell = t.var(v)
        scale = self.pick()
        with t.when(t.load(self.counts[self.row]) > 2):
            cell.set(cell.get() - 1.0 if scale.shape else cell.get() * scale)
        self.pool.append(cell.get())

    def memory(self) -> None:
        t = self.t
        t.store(self.z[self.at], self.pick() + 0.0)
        back = self.chance.random() >= 0.5  # in another order: what was stored must be there
        self.pool.append(t.load(self.z[self.row, self.x.shape[1] - 1 - self.col if back else self.col]))

    def square(self) -> None:
        """Two axes or three: a table of 5 x 24, or three of them, folded along one axis."""
        t, deep = self.t, self.chance.random() < 0.5
        i, j = t.arange(5)[:, None], t.arange(24)[None, :]
        v = (i * 24 + j).f32() * 0.01 + self.t.load(self.x[self.row, 0])
        if deep:
            tables = t.exp(v[None, :, :] - t.arange(3)[:, None, None].f32())
            folded = t.reduce(tables, self.chance.choice(("sum", "max")), axis=self.chance.choice((0, 1, 2)), keep=True)
            v = t.sum(tables * folded, axis=0)
        axis = self.chance.choice((0, 1))
        keep = self.chance.random() < 0.5
        f = t.reduce(v, self.chance.choice(("sum", "max")), axis=axis, keep=keep)
        g = t.max(t.max(v * f, axis=1)) if keep else t.sum(f * 0.5)
        if self.chance.random() < 0.5:
            g = g + t.sum(t.max(v.reshape(12, 10), axis=1))
        self.pool.append(g)

    def stage(self) -> None:
        """Where a tile waits changes nothing."""
        v = self.pick()
        raw = self.t.load(self.w[self.at])
        self.pool.append(self.t.stage(v, "shared") if v.shape else v)
        self.pool.append(self.t.stage(raw, "shared").f32() * 0.5)

    def turn(self) -> None:
        """Nor does how two axes are dealt to threads: three rows of x, and a table that is stored either way."""
        t = self.t
        orders = (None, (0, 1), (1, 0))
        rows = t.stage(t.load(self.x[t.arange(ROWS)[:, None], self.col[None, :]]), "shared", self.chance.choice(orders))
        if self.chance.random() < 0.5:
            rows = t.stage(rows * 0.5, "shared", self.chance.choice(orders))
        axis = self.chance.choice((0, 1))
        folded = t.reduce(rows, self.chance.choice(("sum", "max")), axis=axis)
        self.pool.append(folded if axis == 0 else t.max(folded))
        i, j = t.arange(self.chance.choice((2, 5)))[:, None], t.arange(24)[None, :]
        v = t.stage((i * 24 + j).f32() * 0.01 + t.load(self.x[self.row, 0]), "shared", self.chance.choice(orders))
        if self.chance.random() < 0.3:
            self.pool.append(t.sum(t.max(v.reshape(6, static_size(v.shape[0]) * 4), axis=1)))
        if self.chance.random() < 0.3:
            place = self.z[self.row, i * 24 + j]
            t.store(place, v, mask=i * 24 + j < self.x.shape[1], order=self.chance.choice(orders))
        else:
            self.pool.append(t.max(t.sum(v, axis=0)))
