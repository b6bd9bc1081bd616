"""What a kernel function returns: launches as data. Backends compile and run them; nothing here touches a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.core.call import TensorFacts


class Config(Mapping[str, int]):
    """One way to run a kernel, as named integers: `Config(rows=4, num_warps=8)`. Hashable, ordered, printable."""

    __slots__ = ("_items",)

    def __init__(self, **items: int) -> None:
        self._items = items

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __getattr__(self, name: str) -> int:
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._items == other._items

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v}' for k, v in self._items.items())})"

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._items.items())

    def __reduce__(self) -> Any:
        return _config, (self._items,)


def _config(items: dict[str, int]) -> Config:
    return Config(**items)


@dataclass(frozen=True)
class Scratch:
    """Memory that lives for one call: allocated after the outputs, in the order in which launches first name it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def facts(self) -> TensorFacts:
        return TensorFacts.dense(self.name, self.shape, self.dtype)


@dataclass(frozen=True)
class TensorMap:
    """A descriptor by which hardware copies boxes of a tensor into shared memory (TMA, from Hopper on). The host makes
    it, the kernel takes it by value.

    `shape` and `stride`, in elements: how the tensor is seen, outermost axis first, the last one contiguous. `box`: its
    elements an axis. `swizzle`: the bytes of a row of the box, among which its units of 16 are exchanged (32, 64 or
    128). What a box has outside of the shape arrives as 0.
    """

    facts: TensorFacts
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


Argument = TensorFacts | Scratch | TensorMap | int | float | bool | None


@dataclass(frozen=True, eq=False, repr=False)
class Launch:
    """One kernel launch.

    `function` is what the backend compiles: a `@triton.jit` function, a TileLang program, a CUDA source. `args` are its
    run-time arguments by name and in order: a tensor's facts stand for its address, an int is passed as int64, a float
    as float32, None as a null pointer that the kernel never follows. `constants` are fixed at compile time.
    `options` are the backend's own (`num_warps`, `num_stages`, `block`, `shared`, `cluster`).
    """

    function: Any
    grid: tuple[int, int, int]
    args: Mapping[str, Argument]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    pdl: bool = False
    """Programmatic dependent launch, on Hopper and later: it may start while the launch before it still runs, and its
    kernel says itself where it waits (`griddepcontrol.wait`), before it touches memory."""
    workspace: Scratch | None = None
    """Memory that compiled code uses for itself (Triton: descriptors of tensors, 128 bytes each in every program)."""


@dataclass(frozen=True, eq=False, repr=False)
class TorchStep:
    """What torch does between two launches, where it does it best (a sort): `function(**args)` writes into the buffers
    that stand for facts and scratch. It must not wait for the device."""

    function: Callable[..., None]
    args: Mapping[str, Argument]


Stage = Launch | TorchStep


def stages_of(made: Stage | Sequence[Stage]) -> tuple[Stage, ...]:
    """What a kernel function returned, as a sequence."""
    return (made,) if isinstance(made, (Launch, TorchStep)) else tuple(made)


def launches_of(made: Stage | Sequence[Stage]) -> tuple[Launch, ...]:
    """What of it is compiled."""
    return tuple(stage for stage in stages_of(made) if isinstance(stage, Launch))


def scratches(launches: Sequence[Stage]) -> list[Scratch]:
    """The scratch that `launches` share, in the order in which they first name it: buffers follow `call.tensors`."""
    found: dict[str, Scratch] = {}
    for launch in launches:
        for value in (*launch.args.values(), getattr(launch, "workspace", None)):
            if isinstance(value, Scratch) and found.setdefault(value.name, value) != value:
                raise ValueError(f"scratch {value.name!r} is named twice, as {found[value.name]} and {value}")
    return list(found.values())
