"""The residual family in the library's own tile language: dropout_add and its gradient, and gated_residual."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch
from tilewright.ops.residual.dropout import drops
from tilewright.ops.residual.philox import scale, threshold
from tilewright.ops.tile_rows import grid, one_row, place


@tile.kernel
def dropout_block(
    t: Any, x: Any, residual: Any, state: Any, seed: Any, offset: Any, y: Any, saved: Any, least: Any, factor: Any
) -> None:
    """y = residual + keep * x * factor. What is dropped counts as 0, also where it is not finite. `least` is None where
    nothing is dropped; seed and offset come from tensors of their own, or from the `state` of forward."""
    row, col = place(t, y.shape[1])
    value = t.load(x[row, col]).f32()
    if saved is not None:
        first = (row == 0) & (t.program_id(1) == 0)
        with t.when(first):
            t.store(saved[0], t.load(seed[0]) if seed is not None else 0)
            t.store(saved[1], t.load(offset[0]) if offset is not None else 0)
    if least is not None:
        if state is not None:
            key, start = t.load(state[0]), t.load(state[1])
        else:
            key, start = t.load(seed[0]), 0 if offset is None else t.load(offset[0])
        word = t.random(key, start + col // 4, row, col % 4)
        keep = (word >> 8).bits(tile.int32) >= least.i32()
        value = t.where(keep, value * factor, 0.0)
    if residual is not None:
        value = t.load(residual[row, col]).f32() + value
    t.store(y[row, col], value.to(y.dtype))


@tile.kernel
def gated_block(t: Any, x: Any, residual: Any, y: Any, gate: Any, form: str) -> None:
    """y = residual + x * gate, the gate by column, by row or by element."""
    row, col = place(t, y.shape[1])
    at = {"column": (col,), "row": (row, 0), "element": (row, col)}[form]
    g = t.load(gate[at]).f32()
    total = t.load(residual[row, col]).f32() + t.load(x[row, col]).f32() * g
    t.store(y[row, col], total.to(y.dtype))


def dropout_forward(call: Call, config: Config) -> Launch:
    """dropout_add."""
    tensors: dict[str, TensorFacts | None] = {"x": call.x, "residual": call.residual, "y": call.y}
    given = {"seed": call.tensors["seed"], "offset": call.tensors["offset"], "saved": call.tensors["state"]}
    return _dropout(call, tensors, {**given, "state": None})


def dropout_backward(call: Call, config: Config) -> Launch:
    """dropout_add_backward: the mask made again, from what forward saved."""
    tensors: dict[str, TensorFacts | None] = {"x": call.dy, "residual": None, "y": call.dx}
    return _dropout(call, tensors, {"seed": None, "offset": None, "saved": None, "state": call.state})


def _dropout(call: Call, tensors: dict[str, TensorFacts | None], given: dict[str, TensorFacts | None]) -> Launch:
    dropping = drops(call.training, call.p)
    if not dropping and given["saved"] is None:
        tensors = one_row(tensors)  # with a mask the rows count
    y = tensors["y"]
    assert y is not None
    numbers = {"least": threshold(call.p) if dropping else None, "factor": float(scale(call.p))}
    return Launch(dropout_block, grid(y), {**tensors, **given, **numbers}, {}, {"flat": tuple(given)})


def gated_forward(call: Call, config: Config) -> Launch:
    """gated_residual."""
    gate, x = call.gate, call.x
    form = "element" if gate.shape == x.shape else "column" if gate.shape == (x.columns,) else "row"
    args: dict[str, TensorFacts | None] = {"x": x, "residual": call.residual, "y": call.y, "gate": gate}
    if form == "element":
        args = one_row(args)
    y = args["y"]
    assert y is not None
    return Launch(gated_block, grid(y), args, {"form": form}, {"flat": ("gate",) if form == "column" else ()})
