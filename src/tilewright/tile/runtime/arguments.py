"""Arguments: from arrays and numbers to a kernel's types, and to the packed bytes that a compiled kernel reads.

Arrays are numpy's, or anything with `data_ptr()`, `shape`, `stride()` and a `dtype` whose name ends in one of ours.
"""

from __future__ import annotations

import math
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
    are the first axis of the view. `read_only`: its owner lets nobody write there."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    levels: int = 1
    read_only: bool = False
    device: str = "cpu"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the view's axes."""
        return (math.prod(self.shape[: self.levels]), *self.shape[self.levels :])


def memory_of(array: Any, dtype: DType | None = None) -> Memory:
    """Where an array lies.

    Args:
        dtype: of the elements, where the array's own does not tell (bfloat16 as uint16 in numpy).

    Raises:
        TileError: its memory is not what its shape, strides and dtype alone say, or no kernel can reach it.
    """
    if isinstance(array, Memory):
        return array
    of_numpy = isinstance(array, np.ndarray)
    if not of_numpy and not all(hasattr(array, name) for name in ("data_ptr", "stride", "shape", "dtype")):
        raise TileError(f"{type(array).__name__} is no array: takes numpy's, or tensors as torch's")
    if not array.shape:
        kind = "an array" if of_numpy else "a tensor"
        raise TileError(f"{kind} of no axis: pass .item() as a number, or .reshape(1) as a view")
    return _numpy(array, dtype) if of_numpy else _tensor(array, dtype)


def _numpy(array: np.ndarray[Any, Any], dtype: DType | None) -> Memory:
    if isinstance(array, np.ma.MaskedArray):
        raise TileError("a masked array: its mask would be lost; pass .data, and the mask as a view of its own")
    if not array.dtype.isnative:
        raise TileError(f"the byte order of {array.dtype} is not this machine's: .astype({array.dtype.name!r}) has it")
    element = _element(array.dtype.name, array.itemsize, dtype)
    if any(s % array.itemsize for s in array.strides):
        raise TileError(f"strides of {array.strides} bytes are no multiple of the element's {array.itemsize} (a field "
                        "of a structured array?): copy it")  # fmt: skip
    strides = tuple(s // array.itemsize for s in array.strides)
    return Memory(array.ctypes.data, array.shape, strides, element, read_only=not array.flags.writeable)


def _tensor(array: Any, dtype: DType | None) -> Memory:
    device, layout = str(getattr(array, "device", "cpu")), str(getattr(array, "layout", "torch.strided"))
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise TileError(f"a tensor on {device}: kernels run on the CPU and on NVIDIA GPUs")
    if layout.rpartition(".")[2] != "strided":
        raise TileError(f"a tensor of layout {layout.rpartition('.')[2]}: .to_dense() has strides")
    for bit, lazy in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
        if getattr(array, bit, bool)():
            raise TileError(f"the memory of a tensor whose {bit}() is set does not hold its values: .{lazy}() does")
    element = _element(str(array.dtype).rpartition(".")[2], array.element_size(), dtype)
    try:  # a tensor that torch traces with is on the CPU by name, and its storage nowhere
        nowhere = hasattr(array, "untyped_storage") and array.untyped_storage().device.type == "meta"
        address = 0 if nowhere else array.data_ptr()
    except RuntimeError as error:
        raise TileError(f"a {type(array).__name__} has no memory of its own ({error})") from None
    if 0 not in array.shape and not address:
        raise TileError(f"a {type(array).__name__} of shape {tuple(array.shape)} that has no memory")
    return Memory(address, tuple(array.shape), tuple(array.stride()), element, device=device)


def _element(name: str, itemsize: int, asked: DType | None) -> DType:
    """The element type: as asked for, where its bits fit, or by name."""
    if asked is not None:
        if asked.itemsize != itemsize:
            raise TileError(f"elements of {name} are {itemsize} bytes: not {asked}, which is {asked.itemsize}")
        return asked
    if name not in dtypes.ALL:
        raise TileError(f"no element type is called {name}; there are {', '.join(dtypes.ALL)}")
    return dtypes.ALL[name]


def type_of(memory: Memory, *, most: Mapping[int, int] | None = None) -> ViewType:
    """The type of a tensor as an argument: exact sizes, or at most so many for the axes in `most`."""
    sizes = tuple(Most(most[i]) if most and i in most else n for i, n in enumerate(memory.sizes))
    return ViewType(memory.dtype, sizes, memory.strides[-1] == 1 or memory.shape[-1] == 1, memory.levels)


def pack(parameters: list[Parameter], memories: Mapping[str, Memory], scalars: Mapping[str, float]) -> bytes:
    """The fields of a compiled kernel's `Args`, 8 bytes each."""
    found = all_values(memories, scalars) | {f"p_{name}": m.address for name, m in memories.items()}
    with np.errstate(over="ignore"):
        values = [float(np.float32(found[p.name])) if is_real(p) else int(found[p.name]) for p in parameters]
    return struct.pack(f"={''.join('d' if is_real(p) else 'q' for p in parameters)}", *values)


def is_real(p: Parameter) -> bool:
    """Whether it is a float32; all others are integers of 8 bytes."""
    return p.kind == "scalar" and p.dtype == dtypes.float32


def all_values(memories: Mapping[str, Memory], scalars: Mapping[str, float]) -> dict[str, int | float]:
    """What a call passes for any parameter but a pointer that a kernel of these arguments can have, by its name."""
    found = dict[str, int | float]()
    for name, m in memories.items():
        found |= {f"n{i}_{name}": n for i, n in enumerate(m.sizes)}
        found |= {f"s{i}_{name}": s for i, s in enumerate(m.strides)}
        found |= {f"e{i}_{name}": max(n, 1) for i, n in enumerate(m.shape)}  # only ever divided by
    return found | {f"a_{name}": value for name, value in scalars.items()}


def alignment(memory: Memory) -> int:
    """The bytes, at most 16, that the address and the strides of all axes but a dense last one are multiples of."""
    steps = memory.strides if memory.strides and memory.strides[-1] != 1 else memory.strides[:-1]
    apart = [s for s, n in zip(steps, memory.shape, strict=False) if n > 1]
    return math.gcd(16, memory.address, *(s * memory.dtype.itemsize for s in apart))
