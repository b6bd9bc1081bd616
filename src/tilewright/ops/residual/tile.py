"""The residual family in the library's own tile language: dropout_add, gated_residual, and their gradients."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.residual.dropout import drops
from tilewright.ops.residual.philox import scale, threshold
from tilewright.ops.tile_rows import Sums, grid, one_row, place, sharing, sum_launch


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


@tile.kernel(static={"dy": (1,)})
def gated_rows(t: Any, dy: Any, x: Any, gate: Any, dx: Any, dgate: Any, form: str) -> None:
    """dx = dy * gate and dgate = dy * x of every so many-th row; along columns the gate's is this program's sum."""
    first, col = t.program_id(0), t.arange(dy.shape[1])
    sums = Sums(t, col.shape, {"gate": dgate if form == "column" else None})
    for row in sums.over(first, dy.shape[0], t.num_programs(0)):
        d = t.load(dy[row, col]).f32()
        at = {"column": (col,), "row": (row, 0), "element": (row, col)}[form]
        if dx is not None:
            t.store(dx[row, col], (d * t.load(gate[at]).f32()).to(dx.dtype))
        if dgate is None:
            continue
        terms = d * t.load(x[row, col]).f32()
        if "gate" in sums:
            sums.add("gate", terms)
        else:
            t.store(dgate[at], (t.sum(terms) if form == "row" else terms).to(dgate.dtype))
    if "gate" in sums:
        t.store(dgate[first, col], sums["gate"])


def dropout_forward(call: Call, config: Config) -> Launch:
    """dropout_add."""
    tensors: dict[str, TensorFacts | None] = {"x": call.x, "residual": call.residual, "y": call.y}
    given = {"seed": call.tensors["seed"], "offset": call.tensors["offset"], "saved": call.tensors["state"]}
    return _dropout(call, config, tensors, {**given, "state": None})


def dropout_backward(call: Call, config: Config) -> Launch:
    """dropout_add_backward: the mask made again, from what forward saved."""
    tensors: dict[str, TensorFacts | None] = {"x": call.dy, "residual": None, "y": call.dx}
    return _dropout(call, config, tensors, {"seed": None, "offset": None, "saved": None, "state": call.state})


def _dropout(
    call: Call, config: Config, tensors: dict[str, TensorFacts | None], given: dict[str, TensorFacts | None]
) -> Launch:
    dropping = drops(call.training, call.p)
    if not dropping and given["saved"] is None:
        tensors = one_row(tensors)  # with a mask the rows count
    y = tensors["y"]
    assert y is not None
    numbers = {"least": threshold(call.p) if dropping else None, "factor": float(scale(call.p))}
    how = {"flat": tuple(given), "config": config}
    return Launch(dropout_block, grid(y), {**tensors, **given, **numbers}, {}, how)


def gated_forward(call: Call, config: Config) -> Launch:
    """gated_residual."""
    gate, x, form = call.gate, call.x, _form(call)
    args: dict[str, TensorFacts | None] = {"x": x, "residual": call.residual, "y": call.y, "gate": gate}
    if form == "element":
        args = one_row(args)
    y = args["y"]
    assert y is not None
    flat = ("gate",) if form == "column" else ()
    return Launch(gated_block, grid(y), args, {"form": form}, {"flat": flat, "config": config})


def _form(call: Call) -> str:
    """Along what the gate varies."""
    gate, x = call.gate, call.x
    return "element" if gate.shape == x.shape else "column" if gate.shape == (x.columns,) else "row"


def gated_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """gated_residual_backward."""
    form, dy, dgate = _form(call), call.dy, call.tensors.get("dgate")
    summed = form == "column" and dgate is not None
    programs = sharing(dy.rows) if summed else dy.rows
    partials = Scratch("dgate_partials", (programs, dy.columns)) if summed else None
    args: dict[str, Argument] = {"dy": dy, "x": call.x, "gate": call.gate, "dx": call.tensors.get("dx")}
    args["dgate"] = partials or dgate
    flat = ("gate",) if form == "column" else ()
    rows = Launch(gated_rows, (programs, 1, 1), args, {"form": form}, {"flat": flat, "config": config})
    return (rows,) if partials is None else (rows, sum_launch(partials, dgate))
