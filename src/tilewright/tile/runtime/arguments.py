"""Arguments: from arrays and numbers to a kernel's types, and to the packed bytes that a compiled kernel reads.

Arrays are numpy's, or anything with `data_ptr()`, `shape`, `stride()` and a `dtype` whose name ends in one of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.tile import dtypes
from tilewright.tile.dtypes import DType
from tilewright.tile.errors import TileError
from tilewright.tile.ir.thread_ir import Parameter
from tilewright.tile.ir.tile_ir import Most, ViewType


@dataclass(frozen=True)
class Memory:
    """Where a tensor lies: address, sizes and strides (in elements) of its storage axes. `levels`: how many of them
    are the first axis of the view."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    levels: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the view's axes."""
        first = 1
        for n in self.shape[: self.levels]:
            first *= n
        return (first, *self.shape[self.levels :])


def memory_of(array: Any, dtype: DType | None = None, levels: int = 1) -> Memory:
    """Where an array lies.

    Args:
        dtype: of the elements, where the array's own does not tell (bfloat16 as uint16 in numpy).
    """
    if isinstance(array, np.ndarray):
        strides = tuple(s // array.itemsize for s in array.strides)
        return Memory(array.ctypes.data, array.shape, strides, dtype or _named(array.dtype.name), levels)
    name = str(array.dtype).rpartition(".")[2]
    return Memory(array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype or _named(name), levels)


def _named(name: str) -> DType:
    if name not in dtypes.ALL:
        raise TileError(f"no element type is called {name}; there are {', '.join(dtypes.ALL)}")
    return dtypes.ALL[name]


def type_of(memory: Memory, *, most: Mapping[int, int] | None = None) -> ViewType:
    """The type of a tensor as an argument: exact sizes, or at most so many for the axes in `most`."""
    bounded = most or {}
    sizes = tuple(Most(bounded[i]) if i in bounded else n for i, n in enumerate(memory.sizes))
    return ViewType(memory.dtype, sizes, memory.strides[-1] == 1 or memory.shape[-1] == 1, memory.levels)


def pack(parameters: list[Parameter], memories: Mapping[str, Memory], scalars: Mapping[str, float]) -> bytes:
    """The fields of a compiled kernel's `Args`, 8 bytes each."""
    values: list[int | float] = []
    kinds = []
    for p in parameters:
        real = p.kind == "scalar" and p.dtype == dtypes.float32
        kinds.append("d" if real else "q")
        if p.kind == "scalar":
            values.append(float(np.float32(scalars[p.of])) if real else int(scalars[p.of]))
            continue
        m = memories[p.of]
        found = {"pointer": m.address, "size": 0, "stride": 0, "extent": 0}[p.kind]
        if p.kind == "size":
            found = m.sizes[p.axis]
        elif p.kind == "stride":
            found = m.strides[p.axis]
        elif p.kind == "extent":
            found = m.shape[p.axis]
        values.append(found)
    return struct.pack(f"={''.join(kinds)}", *values)
