"""What the products of the linear family share in Triton: arguments, which tile a program has, one step of a sum.

Products accumulate in float32; float32 operands are multiplied as IEEE float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.core.call import Call
from tilewright.core.launch import Argument
from tilewright.ops.triton_rows import row_places


@triton.jit
def place_of(tile, down, across, GROUP: tl.constexpr):
    """Row and column of a tile among tiles. They go down GROUP rows of tiles, then right: what runs at a time shares
    both operands in the L2."""
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    place = tile % (GROUP * across)
    return group * GROUP + place % height, place // height


@triton.jit
def tile_of(rows, columns, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The first row and column, in int64, of this program's tile."""
    down = tl.cdiv(rows, M).to(tl.int32)
    across = tl.cdiv(columns, N).to(tl.int32)
    row, column = place_of(tl.program_id(0), down, across, GROUP)
    return row.to(tl.int64) * M, column.to(tl.int64) * N


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


def forward_arguments(call: Call) -> dict[str, Argument]:
    """Tensors and sizes of y = act(x W^T + b) + residual."""
    tensors: dict[str, Argument] = {name: call.tensors[name] for name in ("x", "weight", "bias", "residual", "y", "z")}
    sizes = {"total_rows": call.x.rows, "total_columns": call.weight.rows, "depth": call.x.columns}
    return {**tensors, "weight_stride": call.weight.row_levels[0][1], **row_places("residual", call.residual), **sizes}
