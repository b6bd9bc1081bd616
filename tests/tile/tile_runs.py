"""How the tests of compiled code run it, and compare it with the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.dtypes import DType
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.render import cpu as render
from tilewright.tile.runtime import cpu, target
from tilewright.tile.runtime.arguments import memory_of, pack
from tilewright.tile.runtime.target import Cpu

F32 = tile.float32
QUICK, QUICKEST = (tuple(o if f == "-O3" else f for f in cpu.FLAGS) for o in ("-O1", "-O0"))
"""Bits do not depend on it."""
FEATURES = (("avx", "avx2", "f16c", "fma"), ("avx", "avx2"), ())


def order(which: Cpu | None = None) -> Order:
    return Order(render.lanes_of((which or target.this_cpu()).features), 4, 16)


def same(mine: np.ndarray, other: np.ndarray, dtype: DType) -> bool:
    """Whether all elements are equal in their bits, or both NaN."""
    a, b = dtype.decode(np.ascontiguousarray(mine)), dtype.decode(np.ascontiguousarray(other))
    if not dtype.floating:
        return np.array_equal(a, b)
    return bool(((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))).all())


def copy_of(array: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(array, np.ndarray):
        return array
    if array.strides[-1] == array.itemsize:
        return array.copy()
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def compiled_run(
    made: cpu.Compiled, arguments: dict[str, Any], types: dict[str, DType], grid: Any, threads: int = 1
) -> None:
    memories = {n: memory_of(v, types[n]) for n, v in arguments.items() if isinstance(v, np.ndarray)}
    scalars = {n: v for n, v in arguments.items() if n not in memories}
    made(pack(made.parameters, memories, scalars), grid, threads)


def one_row(function: Callable[..., None], x: np.ndarray, n: int | None = None, **constants: Any) -> np.ndarray:
    """y of one instance over a row, compiled; checked against the interpreter."""
    count = n or x.shape[-1]
    kernel = tile.kernel(function, static={"x": (1,)})
    view = ViewType(F32, (None, Most(256)))
    program = kernel.trace({"x": view, "y": view, **constants})
    mine, other = np.full((1, count), 7.0, np.float32), np.full((1, count), 7.0, np.float32)
    run(program, {"x": x, "y": mine}, (1,), order=order())
    compiled_run(cpu.compile(program), {"x": x, "y": other}, {"x": F32, "y": F32}, (1, 1, 1))
    assert same(mine, other, F32)
    return other


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)
