"""What the products of the linear family share in Triton: which tile a program has, one step of a sum.

Products accumulate in float32; float32 operands are multiplied as IEEE float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def operand(place, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(place, mask=mask, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def product(a, b, total):
    """total + a b."""
    return tl.dot(a, b, total, input_precision="ieee")
