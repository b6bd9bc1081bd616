"""softmax and its gradient in the library's own tile language: one row a program."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call
from tilewright.core.launch import Config, Launch
from tilewright.ops.tile_rows import accuracy


@tile.kernel(static={"x": (1,)})
def softmax_row(t: Any, x: Any, y: Any, scale: Any) -> None:
    """y = exp(scale * x - m) over its sum. A row whose largest is infinite is NaN, as the difference is."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col]).f32()
    v = v if scale is None else v * scale
    found = t.exp(v - t.max(v), accuracy=accuracy(y))
    t.store(y[row, col], (found * (1.0 / t.sum(found))).to(y.dtype))


@tile.kernel(static={"dy": (1,)})
def softmax_row_backward(t: Any, dy: Any, y: Any, dx: Any, scale: Any) -> None:
    """dx = scale * y * (dy - sum(dy * y))."""
    row, col = t.program_id(0), t.arange(dy.shape[1])
    grad, p = t.load(dy[row, col]).f32(), t.load(y[row, col]).f32()
    t.store(dx[row, col], (scale * p * (grad - t.sum(grad * p))).to(dx.dtype))


def forward(call: Call, config: Config) -> Launch:
    """softmax."""
    scale = None if call.scale == 1.0 else float(call.scale)
    args = {"x": call.x, "y": call.y, "scale": scale}
    return Launch(softmax_row, (call.x.rows, 1, 1), args, {}, {"config": config})


def backward(call: Call, config: Config) -> Launch:
    """softmax_backward."""
    args = {"dy": call.dy, "y": call.y, "dx": call.dx, "scale": float(call.scale)}
    return Launch(softmax_row_backward, (call.dy.rows, 1, 1), args, {}, {"config": config})
