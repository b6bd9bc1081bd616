"""What the products of the linear family share in Triton: which tile a program has, where rows lie, one step of a sum.

Products accumulate in float32; float32 operands are multiplied as IEEE float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import TensorFacts
from tilewright.core.launch import Argument


@triton.jit
def tile_of(rows, columns, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The first row and column, in int64, of this program's tile. Tiles go down GROUP rows of tiles, then right: what
    runs at a time shares both operands in the L2."""
    program = tl.program_id(0)
    down = tl.cdiv(rows, M).to(tl.int32)
    across = tl.cdiv(columns, N).to(tl.int32)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    place = program % (GROUP * across)
    return (group * GROUP + place % height).to(tl.int64) * M, (place // height).to(tl.int64) * N


@triton.jit
def row_starts(rows, stride, outer, count, INNER: tl.constexpr):
    """Where rows begin. They lie in one level of strides or in two (`count` rows to a block, `outer` apart)."""
    if INNER:
        return (rows // count) * outer + (rows % count) * stride
    else:
        return rows * stride


@triton.jit
def operand(place, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(place, mask=mask, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def product(a, b, total):
    """total + a b."""
    return tl.dot(a, b, total, input_precision="ieee")


def places(**tensors: TensorFacts | None) -> tuple[dict[str, Argument], dict[str, bool]]:
    """Run-time strides of the rows of each tensor, and which of them lie in two levels: see `row_starts`."""
    args: dict[str, Argument] = {}
    inner: dict[str, bool] = {}
    for name, facts in tensors.items():
        levels = facts.row_levels if facts is not None else ()
        two = len(levels) == 2
        args |= {
            f"{name}_stride": levels[-1][1] if levels else None,
            f"{name}_outer": levels[0][1] if two else None,
            f"{name}_count": levels[-1][0] if two else None,
        }
        inner[f"{name.upper()}_INNER"] = two
    return args, inner
