"""What `tile_gpu.py` runs: the kernels with what torch does in their place, the cases, and how a result is judged."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright import tile
from tilewright.ops.tile_rows import accuracy
from tilewright.tile import ViewType
from tilewright.tile.dtypes import DType
from tilewright.tile.lang.library import softmax
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.runtime import cuda
from tilewright.tile.runtime.arguments import Memory, memory_of, pack
from tilewright.tile.schedule import Schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tile"))
import random_programs as generate

Tensor = torch.Tensor
SHAPES = ((8192, 4096), (32768, 1024), (4096, 8192), (2048, 16384), (64, 1000))
TYPES = {
    "bfloat16": (tile.bfloat16, torch.bfloat16), "float32": (tile.float32, torch.float32),
    "int8": (tile.int8, torch.int8),
}  # fmt: skip
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-20, 88.0, -88.0, 104.0, -104.0)


# Kernels ---------------------------------------------------------------------------------------------------------


@tile.kernel(static={"x": (1,)})
def norm(t: Any, x: Any, w: Any, y: Any, eps: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col]).f32()
    t.store(y[row, col], (v * t.rsqrt(t.mean(v * v) + eps) * t.load(w[col]).f32()).to(y.dtype))


@tile.kernel(static={"x": (1,)})
def norm_residual(t: Any, x: Any, r: Any, w: Any, h: Any, y: Any, eps: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    total = (t.load(x[row, col]).f32() + t.load(r[row, col]).f32()).to(h.dtype)
    t.store(h[row, col], total)
    v = total.f32()
    t.store(y[row, col], (v * t.rsqrt(t.mean(v * v) + eps) * t.load(w[col]).f32()).to(y.dtype))


@tile.kernel(static={"x": (1,)})
def norm_int8(t: Any, x: Any, r: Any, w: Any, h: Any, q: Any, s: Any, eps: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    total = (t.load(x[row, col]).f32() + t.load(r[row, col]).f32()).to(h.dtype)
    t.store(h[row, col], total)
    v = total.f32()
    n = v * t.rsqrt(t.mean(v * v) + eps) * t.load(w[col]).f32()
    scale = t.maximum(t.max(t.abs(n)) / 127.0, 1e-10)
    t.store(s[row], scale)
    t.store(q[row, col], (n / scale).to(q.dtype, round="nearest_even", saturate=True))


@tile.kernel(static={"x": (1,)})
def norm_int8_once(t: Any, x: Any, r: Any, w: Any, h: Any, q: Any, s: Any, eps: Any) -> None:
    """The largest is looked for before the row is normed, in the pass that sums its squares: one pass and one barrier
    less, and a division a row."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    total = (t.load(x[row, col]).f32() + t.load(r[row, col]).f32()).to(h.dtype)
    t.store(h[row, col], total)
    v = total.f32()
    n = v * t.load(w[col]).f32()
    squares, most = t.mean(v * v), t.max(t.abs(n))
    rate = t.rsqrt(squares + eps)
    scale = t.maximum(most * rate / 127.0, 1e-10)
    t.store(s[row], scale)
    t.store(q[row, col], (n * (rate / scale)).to(q.dtype, round="nearest_even", saturate=True))


@tile.kernel(static={"x": (1,)})
def row_softmax(t: Any, x: Any, y: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    t.store(y[row, col], softmax(t, t.load(x[row, col]).f32(), accuracy=accuracy(y)).to(y.dtype))


@tile.kernel(static={"x": (1,)})
def swiglu(t: Any, x: Any, up: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    g = t.load(x[at]).f32()
    t.store(y[at], (g * t.sigmoid(g, accuracy(y)) * t.load(up[at]).f32()).to(y.dtype))


@tile.kernel(static={"x": (1,)})
def gelu(t: Any, x: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    g = t.load(x[at]).f32()
    z = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
    t.store(y[at], (g * t.sigmoid(z, accuracy(y))).to(y.dtype))


@tile.kernel
def swiglu_flat(t: Any, x: Any, up: Any, y: Any, block: int) -> None:
    """As a row of any length, `block` elements a program."""
    start = t.program_id(0) * block
    at = start + t.arange(block, limit=x.shape[0] - start)
    g = t.load(x[at]).f32()
    t.store(y[at], (g * t.sigmoid(g, accuracy(y)) * t.load(up[at]).f32()).to(y.dtype))


# What torch does -------------------------------------------------------------------------------------------------


def t_norm(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    v = x.float()
    return ((v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype),)


def t_norm_residual(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x + r
    return h, *t_norm(h, w)


def t_norm_int8(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x + r
    v = h.float()
    n = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()
    s = (n.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-10)
    return h, (n / s).round().clamp(-128, 127).to(torch.int8), s[:, 0]


def t_softmax(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.softmax(x.float(), -1).to(x.dtype),)


def t_swiglu(x: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    g = x.float()
    return ((g * torch.sigmoid(g) * up.float()).to(x.dtype),)


def t_gelu(x: Tensor) -> tuple[Tensor, ...]:
    g = x.float()
    return ((g * torch.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))).to(x.dtype),)


@dataclass(frozen=True)
class Kind:
    """A kernel, its views in order with their element types ("" the case's, a vector starts with "w", one a row with
    "s"), how many of them are inputs, and what torch does with those."""

    kernel: Any
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    torch: Callable[..., tuple[Tensor, ...]]
    eps: bool = False
    flat: bool = False


KINDS = {
    "norm": Kind(norm, ("x", "w"), (("y", ""),), t_norm, True),
    "norm_residual": Kind(norm_residual, ("x", "r", "w"), (("h", ""), ("y", "")), t_norm_residual, True),
    "norm_int8": Kind(norm_int8, ("x", "r", "w"), (("h", ""), ("q", "int8"), ("s", "float32")), t_norm_int8, True),
    "norm_int8_once": Kind(
        norm_int8_once, ("x", "r", "w"), (("h", ""), ("q", "int8"), ("s", "float32")), t_norm_int8, True
    ),
    "swiglu": Kind(swiglu, ("x", "up"), (("y", ""),), t_swiglu),
    "gelu": Kind(gelu, ("x",), (("y", ""),), t_gelu),
    "softmax": Kind(row_softmax, ("x",), (("y", ""),), t_softmax),
    "swiglu_flat": Kind(swiglu_flat, ("x", "up"), (("y", ""),), t_swiglu, flat=True),
}


@dataclass(frozen=True)
class Case:
    kind: str
    rows: int
    columns: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.kind} [{self.rows}, {self.columns}] {self.dtype}"

    def schedules(self) -> list[Schedule]:
        vector = 16 // TYPES[self.dtype][0].itemsize
        if KINDS[self.kind].flat:
            return [Schedule(n, 1, vector) for n in (128, 256)]
        found = []
        for rounds in (1, 2, 4):
            threads = 1 << max(5, min(10, (self.columns - 1).bit_length() - (vector * rounds).bit_length() + 1))
            found.append(Schedule(threads, 4 if threads == 32 else 1, vector))
        return list(dict.fromkeys(found))

    def program(self, schedule: Schedule) -> Any:
        kind = KINDS[self.kind]
        types: dict[str, Any] = {}
        for name, dtype in (*((n, "") for n in kind.inputs), *kind.outputs):
            element = TYPES[dtype or self.dtype][0]
            sizes: tuple[int | None, ...] = (None, self.columns)
            sizes = (None,) if kind.flat or name == "s" else (self.columns,) if name == "w" else sizes
            types[name] = ViewType(element, sizes, align=0 if name == "s" else 16)
        if kind.eps:
            types["eps"] = tile.float32
        if kind.flat:
            types["block"] = self.block(schedule)
        return kind.kernel.trace(types)

    @staticmethod
    def block(schedule: Schedule) -> int:
        return schedule.threads * schedule.vector * 2

    def grid(self, schedule: Schedule) -> tuple[int, int, int]:
        flat = KINDS[self.kind].flat
        return (-(-self.rows * self.columns // self.block(schedule)) if flat else self.rows), 1, 1

    def tensors(self, seed: int) -> dict[str, Tensor]:
        kind, generator = KINDS[self.kind], torch.Generator("cuda").manual_seed(seed)
        made = {}
        for name in kind.inputs:
            shape = (self.columns,) if name == "w" else (self.rows, self.columns)
            made[name] = torch.randn(shape, device="cuda", generator=generator).to(TYPES[self.dtype][1])
        if self.kind in ("swiglu", "gelu", "swiglu_flat"):
            made["x"][0, : len(SPECIAL)] = torch.tensor(SPECIAL, device="cuda").to(made["x"].dtype)
        for name, dtype in kind.outputs:
            shape = (self.rows,) if name == "s" else (self.rows, self.columns)
            made[name] = torch.empty(shape, device="cuda", dtype=TYPES[dtype or self.dtype][1])
            made[name].view(torch.uint8).fill_(0xFF)
        return made

    def memory(self, tensors: dict[str, Tensor]) -> dict[str, Memory]:
        flat = KINDS[self.kind].flat
        return {n: _memory(t.view(-1) if flat else t) for n, t in tensors.items()}


def _memory(t: Tensor) -> Memory:
    element = next(d for d, other in TYPES.values() if other == t.dtype)
    return Memory(t.data_ptr(), tuple(t.shape), tuple(t.stride()), element)


# Right -----------------------------------------------------------------------------------------------------------


def bits(t: Tensor) -> np.ndarray[Any, Any]:
    """The elements as the interpreter takes them."""
    if t.dtype == torch.bfloat16:
        return np.ascontiguousarray(t.contiguous().view(torch.int16).cpu().numpy().view(np.uint16))
    return np.ascontiguousarray(t.cpu().numpy())


def same(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], dtype: DType, fast: bool = False) -> int:
    """How many elements differ: neither of equal bits nor both NaN. `fast`: nor, in bfloat16, neighbours."""
    a, b = dtype.decode(np.ascontiguousarray(mine)), dtype.decode(np.ascontiguousarray(other))
    if not dtype.floating:
        return int((a != b).sum())
    near = fast & (np.abs(a - b) <= 2.0**-7 * np.abs(b) + 2.0**-133)
    return int((~((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32)) | near)).sum())


def check(case: Case, schedule: Schedule, made: cuda.Compiled, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind, rows = KINDS[case.kind], min(case.rows, 3)
    made(pack(made.parameters, case.memory(tensors), {"eps": 1e-6}), case.grid(schedule))
    torch.cuda.synchronize()
    few = {n: bits(t if n == "w" else t[:rows]).copy() for n, t in tensors.items()}
    got = {n: few[n].copy() for n, _ in kind.outputs}
    for name in got:
        few[name].view(np.uint8)[...] = 0xFF
    few = {n: a.reshape(-1) if kind.flat else a for n, a in few.items()}
    grid = (-(-rows * case.columns // case.block(schedule)) if kind.flat else rows,)
    program = case.program(schedule)
    types = {n: v.dtype for n, v in program.views.items()}
    order = Order(schedule.vector, 1, 16, schedule.threads)
    run(program, {**few, "eps": 1e-6} if kind.eps else few, grid, outputs=tuple(got), order=order)
    fast = any("accuracy" in node.attrs for node in program.nodes)
    wrong = {n: same(got[n].reshape(-1), few[n].reshape(-1), types[n], fast) for n in got}
    far = {}
    wanted = kind.torch(*(tensors[n] for n in kind.inputs))
    for (name, _), value in zip(kind.outputs, wanted, strict=True):
        a, b = tensors[name].float(), value.float()
        loose = 2.0**-7 if value.dtype == torch.bfloat16 else 1e-5
        gap = (a - b).abs() - (1.0 if value.dtype == torch.int8 else loose * b.abs() + 1e-5)
        far[name] = int((~((gap <= 0) | (a == b) | (a.isnan() & b.isnan()))).sum())
    return {"bits": {n: k for n, k in wrong.items() if k}, "values": {n: k for n, k in far.items() if k}}


def random_case(seed: int, made: cuda.Compiled | None = None) -> dict[str, Any]:
    """A random program, in bits."""
    found, schedule = generate.sample(seed), random_schedule(seed)
    wanted, mine = ({n: _copy(v) for n, v in found.arguments.items()} for _ in range(2))
    for given in (wanted, mine):
        for name in found.outputs:
            given[name][...] = np.frombuffer(b"\xff" * given[name].itemsize, given[name].dtype)[0]
    run(found.program, wanted, found.grid, outputs=found.outputs,
        order=Order(schedule.vector, 1, 16, schedule.threads))  # fmt: skip
    made = made or cuda.compile(found.program, schedule)
    memories, held = {}, {}
    for name, value in mine.items():
        if isinstance(value, np.ndarray):
            here = memory_of(value, found.types[name])
            low, high = np.lib.array_utils.byte_bounds(value)
            held[name] = (torch.frombuffer(bytearray(ctypes.string_at(low, high - low)), dtype=torch.uint8).cuda(), low)
            memories[name] = replace(here, address=held[name][0].data_ptr() + here.address - low)
    grid = (*found.grid, 1, 1)[:3]
    made(pack(made.parameters, memories, {n: v for n, v in mine.items() if n not in memories}), grid)
    torch.cuda.synchronize()
    for buffer, low in held.values():
        back = buffer.cpu().numpy()
        ctypes.memmove(low, back.ctypes.data, back.nbytes)
    wrong = {n: same(mine[n], wanted[n], found.types[n]) for n in found.types if isinstance(mine[n], np.ndarray)}
    return {"bits": {n: k for n, k in wrong.items() if k}, "values": {}}


def random_schedule(seed: int) -> Schedule:
    return Schedule(*((32, 1, 4), (64, 1, 2), (128, 1, 1), (32, 4, 8), (256, 1, 4))[seed % 5])


def _copy(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or array.strides[-1] == array.itemsize:
        return array.copy() if isinstance(array, np.ndarray) else array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]
