"""How TileLang programs read the tensors of a call: layouts and strides, worked out from facts.

What they stand for is in `tilelang_rows`, which imports TileLang; nothing here does.
"""

from __future__ import annotations

import torch

from tilewright.core.call import TensorFacts
from tilewright.core.launch import Argument

NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
}
FULL_RANGE_DIVISION = ("--prec-div=false",)
"""For the CUDA compiler: quotients within 2 ulp, of any operands, as Triton's are; a correct rounding costs as much as
the rest of an activation."""


def layout_of(facts: TensorFacts | None, vec: int, flat: bool) -> str | None:
    """The digit and the letter by which a tensor is read; None where it is absent."""
    if facts is None:
        return None
    step = min(16, vec * facts.dtype.itemsize)
    vectors = facts.column_stride == 1 and facts.vector_bytes() % step == 0
    return f"{1 if flat else len(facts.row_levels)}{'v' if vectors else 's'}"


def strides_of(name: str, facts: TensorFacts | None, layout: str | None, vec: int) -> dict[str, Argument]:
    """Where rows start: inner count, outer and inner stride (in vectors where the layout says so), column stride. A
    vector [C] serves every row."""
    if facts is None or layout is None:
        return {}
    found = row_places(name, facts, vec if layout.endswith("v") else 1)
    if len(facts.shape) == 1:
        found |= {f"{name}_inner": 1, f"{name}_outer": 0, f"{name}_stride": 0}
    return found


def row_places(name: str, facts: TensorFacts, unit: int) -> dict[str, Argument]:
    """Inner count, outer and inner stride of the rows in `unit` elements, and the column stride in elements."""
    levels = facts.row_levels
    inner, stride = levels[-1]
    return {
        f"{name}_inner": inner,
        f"{name}_outer": (levels[0][1] if len(levels) == 2 else 0) // unit,
        f"{name}_stride": stride // unit,
        f"{name}_step": facts.column_stride,
    }


def vector(columns: int, itemsize: int) -> int:
    """Elements of one access: the widest up to 16 bytes that divides the row."""
    width = 16 // itemsize
    while columns % width:
        width //= 2
    return width
