"""One call of an op as facts: shapes, strides, dtypes, alignment, options; no tensor and no memory.

Capabilities, configs and kernels read a `Call`; so a kernel's launch can be worked out, compiled and explained without
a GPU and before any tensor exists. What a kernel *does* with these facts lives in `ops/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tilewright.core.device import Device


@dataclass(frozen=True)
class TensorFacts:
    """What a kernel may know of a tensor ahead of the call. `align` is the largest power of two up to 16 that divides
    its address."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    align: int = 16
    needs_grad: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorFacts:
        address = tensor.data_ptr() if not isinstance(tensor, torch._subclasses.FakeTensor) else 0
        return cls(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, alignment(address), tensor.requires_grad)

    @classmethod
    def dense(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorFacts:
        """A fresh, contiguous, aligned tensor: what the library itself allocates."""
        return cls(name, shape, contiguous_strides(shape), dtype)

    @property
    def columns(self) -> int:
        """C, the size of the last dimension."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def rows(self) -> int:
        """M, the product of the leading dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def column_stride(self) -> int:
        return self.stride[-1] if self.shape and self.columns != 1 else 1

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        return (
            all(
                n == 1 or s == d
                for n, s, d in zip(self.shape, self.stride, contiguous_strides(self.shape), strict=True)
            )
            or self.numel == 0
        )

    @cached_property
    def row_levels(self) -> tuple[tuple[int, int], ...]:
        """The leading dimensions merged as far as strides allow: ((size, stride), ...), outermost
        first, one at least.

        [8, 16, 64] contiguous gives ((128, 64),); heads of a fused projection give ((tokens, wide), (heads, 64)).
        """
        levels: list[tuple[int, int]] = []
        for size, stride in zip(self.shape[:-1], self.stride[:-1], strict=True):
            if size == 1:
                continue
            if levels and levels[-1][1] == size * stride:
                levels[-1] = (levels[-1][0] * size, stride)
            else:
                levels.append((size, stride))
        return tuple(levels) or ((self.rows, self.columns),)

    def vector_bytes(self) -> int:
        """The widest access, in bytes up to 16, that every row's start allows."""
        step = math.gcd(16, self.align)
        for size, stride in self.row_levels:
            if size > 1:
                step = math.gcd(step, stride * self.dtype.itemsize)
        return step if self.column_stride == 1 else self.dtype.itemsize

    def __str__(self) -> str:
        layout = "" if self.contiguous else f" strides {list(self.stride)}"
        return f"{self.name} {DTYPE_NAMES.get(self.dtype, str(self.dtype))}{list(self.shape)}{layout}"


@dataclass(frozen=True)
class Call:
    """A call of `op`: its tensors by name (inputs, outputs, saved statistics; None where absent) and its options.

    `call["x"]` or `call.x` reads a tensor; options read the same way: `call.eps`.
    """

    op: str
    device: Device
    tensors: Mapping[str, TensorFacts | None]
    options: Mapping[str, Any]
    saving: bool = False
    deterministic: bool = False
    outputs: tuple[str, ...] = field(default=())
    """Names of the tensors that the kernel writes, in order; the saved statistics of the forward come last."""
    into: Mapping[str, str] = field(default_factory=dict)
    """Of an in-place form: by output, the input that it overwrites."""
    anywhere: bool = False
    """Of an in-place form: its kernels write inputs where they lie, by the strides that these have."""

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else self.options[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{self.op} has no tensor or option {name!r}") from None

    def has(self, name: str) -> bool:
        return self.tensors.get(name) is not None

    @property
    def form(self) -> str:
        """The op as the caller named it."""
        return f"{self.op}_" if self.into else self.op

    @property
    def aliased(self) -> dict[str, str]:
        """`into`, where the kernel itself writes where the inputs are. Kernels write dense, aligned outputs: inputs
        that lie otherwise get copies of what the kernel wrote elsewhere."""
        return {} if self.misplaced else dict(self.into)

    @property
    def misplaced(self) -> list[str]:
        """What is overwritten and does not lie as kernels write."""
        if self.anywhere:
            return []
        facts = [self.tensors[name] for name in self.into.values()]
        return [f.name for f in facts if f is not None and not (f.contiguous and f.align == 16)]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def alignment(address: int) -> int:
    return 16 if address % 16 == 0 else address & -address


DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
