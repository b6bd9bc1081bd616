"""Calling a kernel by hand: `kernel[grid](x, w, 1e-6)` on numpy arrays, or on torch tensors of one device.

A library that calls often packs its arguments once and calls `Compiled` of `runtime.cpu` or `runtime.cuda` itself.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.tile import dtypes
from tilewright.tile.errors import TileError
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lang.kernel import Argument, Kernel
from tilewright.tile.lang.trace import short
from tilewright.tile.runtime import cpu, cuda
from tilewright.tile.runtime.arguments import Memory, alignment, memory_of, pack, type_of
from tilewright.tile.runtime.overlap import check_overlap

SERIAL_BYTES = 1 << 16


def launch(kernel: Kernel, grid: tuple[int, ...], /, *args: Any, **named: Any) -> None:
    """Compile for these arguments where that is new, and run where the tensors are: on the CPU, or on a GPU, on torch's
    current stream.

    Args:
        grid: a count of instances, or up to three.
        args, named: the kernel's own arguments; those of its fragments came with `bind`. Ints and floats, numpy's too,
            are run-time scalars; None, bools and strings are constants.

    Raises:
        TypeError: a missing or unknown argument.
        TileError: an argument that no kernel can read, or whose memory is another's; the message names it.
        TraceError, CompilerError: see there.
    """
    counts = grid_of(kernel.name, grid)
    names = list(kernel.parameters)
    if len(args) > len(names):
        raise TypeError(f"{kernel.name} takes {len(names)} arguments, not {len(args)}")
    values = {**dict(zip(names, args, strict=False)), **named, **kernel.bound()}
    memories: dict[str, Memory] = {}
    scalars: dict[str, Any] = {}
    types: dict[str, Argument] = {}
    for name, value in values.items():
        try:
            if isinstance(value, Memory) or (hasattr(value, "dtype") and not isinstance(value, np.generic)):
                memories[name] = memory_of(value)
            else:
                scalars[name] = value.item() if isinstance(value, np.generic) else value
                types[name] = _scalar(scalars[name])
        except TileError as error:
            raise TileError(f"{kernel.name}: {name}: {error}") from None
    device = _device(kernel, memories)
    types |= {n: replace(type_of(m), align=0 if device == "cpu" else alignment(m)) for n, m in memories.items()}
    program = kernel.trace(types)
    _check(program, memories, scalars)
    if device != "cpu":
        index = int(device.partition(":")[2] or 0)
        there = cuda.compile(program, arch=cuda.Driver.get().arch(index))
        if 0 not in counts:
            with sys.modules["torch"].cuda.device(index):  # whose tensors these are
                there(pack(there.parameters, memories, scalars), counts)
        return
    compiled = cpu.compile(program)
    moved = sum(m.dtype.itemsize * math.prod(m.shape) for m in memories.values())
    threads = 1 if moved <= SERIAL_BYTES else len(os.sched_getaffinity(0))
    if 0 not in counts:
        compiled(pack(compiled.parameters, memories, scalars), counts, threads)


def _device(kernel: Kernel, memories: Mapping[str, Memory]) -> str:
    """The device that all tensors are on."""
    found = {m.device: n for n, m in memories.items()}
    if len(found) > 1:
        raise TileError(f"{kernel.name}: " + ", ".join(f"{n} is on {d}" for d, n in found.items()))
    return next(iter(found), "cpu")


def grid_of(kernel: str, grid: Any) -> tuple[int, int, int]:
    """The counts of instances along three axes, of a kernel of this name."""
    counts = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not 1 <= len(counts) <= 3:
        raise TileError(f"{kernel}: the grid is {grid!r}; takes a count of instances, or a tuple of one to three")
    for n in counts:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 <= n < 1 << 62:
            raise TileError(f"{kernel}: the grid is {grid!r}; {n!r} is no count of instances")
    first, second, third = (*map(int, counts), 1, 1)[:3]
    if first * second * third >= 1 << 62:
        raise TileError(f"{kernel}: the grid is {grid!r}: more instances than can be counted")
    return first, second, third


def _check(program: Program, memories: Mapping[str, Memory], scalars: Mapping[str, Any]) -> None:
    """What the host can tell of a call before it is made."""
    written = program.written()
    for name in sorted(written):
        if memories[name].read_only:
            raise TileError(f"{program.name}: {name} is written, and the array is read-only")
    for effect in program.effects():
        if effect.op == "loop" and effect.args[2].op == "argument":
            name = effect.args[2].attrs["name"]
            if scalars[name] < 1:
                raise TileError(f"{program.name}: {name} is {scalars[name]}, the step of a loop: needs 1 or more",
                                effect.line)  # fmt: skip
    try:
        check_overlap(memories, written, program.inplace)
    except TileError as error:
        raise TileError(f"{program.name}: {error}") from None


def _scalar(value: Any) -> Argument:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return dtypes.float32
    if isinstance(value, int):
        low, high = dtypes.int64.bounds
        if not low <= value <= high:
            raise TileError(f"{short(value)} does not fit int64")
        return dtypes.int64
    raise TileError(f"{value!r} is neither a tensor nor a number")
