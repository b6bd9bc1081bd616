"""rope and its gradient in the library's own tile language: one head of a token a program."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch
from tilewright.ops.tile_configs import WIDEST


@tile.kernel(static={"x": (1,), "cos": (1,)})
def turned(
    t: Any, x: Any, cos: Any, sin: Any, ids: Any, y: Any, heads: Any, length: Any, interleaved: bool, back: bool,
    whole: bool,
) -> None:  # fmt: skip
    """y = x, each pair of its first columns turned by the angle of its token's position, or back by it. Of a position
    without a row of the tables, NaN or, back, 0."""
    row, half = t.program_id(0), cos.shape[1]
    token = row // heads
    position = token % length if ids is None else t.load(ids[token // length, token % length]).i64()
    inside = (position >= 0) & (position < cos.shape[0])
    lost = 0.0 if back else float("nan")
    col = t.arange(half)
    one, other = (col * 2, col * 2 + 1) if interleaved else (col, col + half)
    first, second = t.load(x[row, one]).f32(), t.load(x[row, other]).f32()
    c, s = (t.load(table[position, col], mask=inside).f32() for table in (cos, sin))
    s = -s if back else s
    t.store(y[row, one], t.where(inside, first * c - second * s, lost).to(y.dtype))
    t.store(y[row, other], t.where(inside, second * c + first * s, lost).to(y.dtype))
    if not whole:
        col = t.arange(WIDEST, limit=x.shape[1] - 2 * half) + 2 * half
        t.store(y[row, col], t.where(inside, t.load(x[row, col]).f32(), lost).to(y.dtype))


def rotate(call: Call, config: Config) -> Launch:
    """rope and rope_backward."""
    back = "dy" in call.tensors
    x: TensorFacts = call.dy if back else call.x
    args = {
        "x": x,
        "cos": call.cos,
        "sin": call.sin,
        "ids": call.position_ids,
        "y": call.dx if back else call.y,
        "heads": x.shape[-2],
        "length": x.shape[-3],
    }
    whole = x.columns == 2 * call.cos.columns
    constants = {"interleaved": call.style == "interleaved", "back": back, "whole": whole}
    return Launch(turned, (x.rows, 1, 1), args, constants, {"config": config})
