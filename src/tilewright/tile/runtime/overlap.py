"""Which arguments of a call are the same memory: a written view may meet another only where the kernel says so.

Compiled code takes loads and stores of different views to be independent, and instances run in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.tile.errors import TileError
from tilewright.tile.runtime.arguments import Memory

WORK = 100_000
"""Steps after which two views that may share an element count as sharing one."""


def check_overlap(memories: Mapping[str, Memory], written: Collection[str],
                  inplace: Collection[frozenset[str]]) -> None:  # fmt: skip
    """Raises `TileError` where a written view has two indices of one element, or shares memory with another argument
    that is no declared pair, or shares it otherwise than element for element."""
    for name in sorted(written):
        if _meets_itself(memories[name]):
            raise TileError(f"{name} is written, and several of its indices are the same element (shape "
                            f"{memories[name].shape}, strides {memories[name].strides})")  # fmt: skip
    places = {name: _stand_in(m) for name, m in memories.items() if 0 not in m.shape}
    for name, other in itertools.permutations(places, 2):
        if name not in written or (other in written and other < name) or not _share(places[name], places[other]):
            continue
        if frozenset((name, other)) not in inplace:
            raise TileError(f"{name} is written and shares memory with {other}: give it memory of its own, or declare "
                            f"inplace=[({name!r}, {other!r})] if their elements are the same")  # fmt: skip
        if not _same_elements(memories[name], memories[other]):
            raise TileError(f"{name} is written and shares memory with {other}, but not element for element")


def _share(a: Any, b: Any) -> bool:
    """Whether some element of one is, in part, an element of the other."""
    try:
        return bool(np.shares_memory(a, b, max_work=WORK))
    except np.exceptions.TooHardError:
        return True


def _stand_in(memory: Memory) -> Any:
    """Memory that numpy may reason about, and does not read."""
    size = memory.dtype.itemsize
    return np.asarray(SimpleNamespace(__array_interface__={
        "version": 3, "typestr": f"|V{size}", "shape": memory.shape, "data": (memory.address, True),
        "strides": tuple(size * s for s in memory.strides),
    }))  # fmt: skip


def _same_elements(a: Memory, b: Memory) -> bool:
    """Whether equal indices are equal elements."""
    if (a.address, a.dtype.itemsize, len(a.shape)) != (b.address, b.dtype.itemsize, len(b.shape)):
        return False
    axes = zip(a.shape, b.shape, a.strides, b.strides, strict=True)
    return all(s == r or (n <= 1 and m <= 1) for n, m, s, r in axes)


def _meets_itself(memory: Memory) -> bool:
    """Whether an axis steps over less than the axes below it span: what no slicing or transposing makes."""
    reach = 1
    for stride, n in sorted((abs(s), n) for s, n in zip(memory.strides, memory.shape, strict=True) if n > 1):
        if stride < reach:
            return 0 not in memory.shape
        reach = stride * (n - 1) + reach
    return False
