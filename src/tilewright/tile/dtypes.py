"""The element types: their names, storage and exact rounding in numpy.

Arithmetic is in float32, int32, uint32 and int64; the narrower types are storage, which a kernel widens with
`.f32()` or `.i32()` and narrows with `.to()`. In numpy, values of every floating type are float32 arrays that the type
can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DType:
    """An element type. `kind` is "f" (floating), "i" (signed), "u" (unsigned) or "b" (bool)."""

    name: str
    kind: str
    itemsize: int
    storage: str
    """The numpy type of its bits."""
    computes: bool = True
    """Whether arithmetic is defined on it."""
    largest: float = 0.0

    @property
    def floating(self) -> bool:
        return self.kind == "f"

    @property
    def integer(self) -> bool:
        return self.kind in "iu"

    @property
    def values(self) -> np.dtype[Any]:
        """The numpy type of its values."""
        return np.dtype(np.float32 if self.floating else self.storage)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value of an integer type."""
        info = np.iinfo(self.storage)
        return int(info.min), int(info.max)

    def __repr__(self) -> str:
        return self.name

    def decode(self, raw: Array) -> Array:
        """Bits to values."""
        if self.name == "bfloat16":
            return np.asarray((raw.astype(np.uint32) << np.uint32(16)).view(np.float32))
        if self.name == "float8_e4m3fn":
            return _from_e4m3(raw)
        return np.asarray(raw.astype(self.values))

    def encode(self, values: Array) -> Array:
        """Values to bits, rounding to nearest even; what is not representable becomes infinity (float8: saturates)."""
        if self.name == "bfloat16":
            return _to_bfloat16(values)
        if self.name == "float8_e4m3fn":
            return _to_e4m3(values)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(values.astype(self.storage))

    def rounded(self, values: Any) -> Array:
        """The nearest values of this type; of a floating one as float32."""
        return self.decode(self.encode(np.asarray(values, self.values)))


def _to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    rounded = np.where(np.isnan(values), bits | np.uint32(0x400000), rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16).reshape(np.shape(values))


def _to_e4m3(values: Array) -> Array:
    size = np.minimum(np.abs(np.where(np.isnan(values), 0.0, values)), 448.0)
    exponent = np.frexp(np.maximum(size, 2.0**-6))[1] - 1
    code = (exponent + 6) * 8 + np.rint(size * 2.0 ** (3 - exponent))  # in eighths: what rounds up to 16 is the next 8
    code = np.where(np.isnan(values), 0x7F, code) + np.signbit(values) * 0x80
    return np.asarray(code.astype(np.uint8))


def _from_e4m3(raw: Array) -> Array:
    code = raw.astype(np.int64)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code & 128, -size, size).astype(np.float32)


boolean = DType("bool", "b", 1, "bool", False)
int8 = DType("int8", "i", 1, "int8", False)
uint8 = DType("uint8", "u", 1, "uint8", False)
int32 = DType("int32", "i", 4, "int32")
uint32 = DType("uint32", "u", 4, "uint32")
int64 = DType("int64", "i", 8, "int64")
float32 = DType("float32", "f", 4, "float32", largest=3.4028234663852886e38)
float16 = DType("float16", "f", 2, "float16", False, 65504.0)
bfloat16 = DType("bfloat16", "f", 2, "uint16", False, 3.3895313892515355e38)
float8_e4m3fn = DType("float8_e4m3fn", "f", 1, "uint8", False, 448.0)

ALL = {d.name: d for d in (boolean, int8, uint8, int32, uint32, int64, float32, float16, bfloat16, float8_e4m3fn)}
