"""Calling a kernel by hand: `kernel[grid](x, w, 1e-6)` on numpy arrays or torch tensors.

A library that calls often packs its arguments once and calls `runtime.cpu.Compiled` itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tilewright.tile import dtypes
from tilewright.tile.errors import TileError
from tilewright.tile.lang.kernel import Argument, Kernel
from tilewright.tile.runtime import cpu
from tilewright.tile.runtime.arguments import Memory, memory_of, pack, type_of

SERIAL_BYTES = 1 << 16


def launch(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Compile for these arguments where that is new, and run on the CPU.

    Args:
        grid: up to three counts of instances.
        args, named: the kernel's own arguments; those of its fragments came with `bind`. Ints and floats are run-time
            scalars; None, bools and strings are constants.

    Raises:
        TypeError: a missing or unknown argument. TraceError, CompilerError: see there.
    """
    names = list(kernel.parameters)
    if len(args) > len(names):
        raise TypeError(f"{kernel.name} takes {len(names)} arguments, not {len(args)}")
    values = {**dict(zip(names, args, strict=False)), **named, **kernel.bound()}
    memories = {n: v if isinstance(v, Memory) else memory_of(v) for n, v in values.items() if _is_tensor(v)}
    types: dict[str, Argument] = {}
    for name, value in values.items():
        types[name] = type_of(memories[name]) if name in memories else _scalar(value)
    compiled = cpu.compile(kernel.trace(types))
    scalars = {n: v for n, v in values.items() if n not in memories}
    moved = sum(_bytes(m) for m in memories.values())
    threads = 1 if moved <= SERIAL_BYTES else len(os.sched_getaffinity(0))
    counts = (*grid, 1, 1, 1)[:3]
    compiled(pack(compiled.parameters, memories, scalars), (counts[0], counts[1], counts[2]), threads)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Memory) or hasattr(value, "dtype")


def _scalar(value: Any) -> Argument:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return dtypes.float32
    if isinstance(value, int):
        return dtypes.int64
    raise TileError(f"{value!r} is neither a tensor nor a number")


def _bytes(memory: Memory) -> int:
    count = memory.dtype.itemsize
    for n in memory.shape:
        count *= n
    return count


class Grid:
    """`kernel[grid]`, waiting for its arguments."""

    def __init__(self, kernel: Kernel, grid: tuple[int, ...]) -> None:
        self.kernel, self.grid = kernel, grid

    def __call__(self, *args: Any, **named: Any) -> None:
        launch(self.kernel, self.grid, args, named)
