"""Gated and plain activations in the library's own tile language: one kernel a pass, for two tensors, one that holds
both, or one alone. The functions are in `tile_functions`."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch
from tilewright.ops.activation.functions import APPROXIMATIONS
from tilewright.ops.activation.tile_functions import act, act_and_slope
from tilewright.ops.tile_rows import accuracy, grid, one_row, place


@tile.kernel
def forward_block(t: Any, x: Any, up: Any, y: Any, kind: str, apart: int, step: int, first: bool) -> None:
    """y = act(gate) * up. Without `apart` the gate is x, and `up` may be None; with it both lie in x, `apart` columns
    from each other, or alternating where `step` is 2."""
    row, col = place(t, y.shape[1])
    gate, value = _halves(t, x, up, row, col, y.shape[1], apart, step, first)
    found = act(t, kind, t.load(gate).f32(), accuracy(y))
    if value is not None:
        found = found * t.load(value).f32()
    t.store(y[row, col], found.to(y.dtype))


@tile.kernel
def backward_block(
    t: Any, dy: Any, x: Any, up: Any, dx: Any, dup: Any, kind: str, apart: int, step: int, first: bool
) -> None:
    """dx = dy * up * act'(gate), dup = dy * act(gate); both into dx where x holds both."""
    row, col = place(t, dy.shape[1])
    gate, value = _halves(t, x, up, row, col, dy.shape[1], apart, step, first)
    g, d = t.load(gate).f32(), t.load(dy[row, col]).f32()
    found, slope = act_and_slope(t, kind, g, accuracy(dx, dup))
    of_gate = d * slope if value is None else d * t.load(value).f32() * slope
    if apart:
        gate_place, up_place = _halves(t, dx, None, row, col, dy.shape[1], apart, step, first)
        t.store(gate_place, of_gate.to(dx.dtype))
        t.store(up_place, (d * found).to(dx.dtype))
        return
    if dx is not None:
        t.store(dx[row, col], of_gate.to(dx.dtype))
    if dup is not None:
        t.store(dup[row, col], (d * found).to(dup.dtype))


def _halves(
    t: Any, x: Any, up: Any, row: Any, col: Any, half: Any, apart: int, step: int, first: bool
) -> tuple[Any, Any]:
    """The places of gate and up."""
    if not apart:
        return x[row, col], None if up is None else up[row, col]
    parts = (x[row, col * step], x[row, col * step + (1 if step == 2 else half)])
    return parts if first else parts[::-1]


def _kind(call: Call) -> str:
    return APPROXIMATIONS[call.options["approximate"]] if "approximate" in call.options else "silu"


def _packing(call: Call) -> dict[str, Any]:
    packed = "interleaved" in call.options
    step = 2 if packed and call.interleaved else 1
    return {"kind": _kind(call), "apart": int(packed), "step": step, "first": not packed or call.gate == "first"}


def forward(call: Call, config: Config) -> Launch:
    """swiglu, geglu, silu, gelu, and those on one tensor."""
    constants = _packing(call)
    gated = "up" in call.tensors
    tensors: dict[str, TensorFacts | None] = {"x": call.tensors["gate" if gated else "x"], "y": call.y}
    tensors["up"] = call.tensors.get("up")
    if not constants["apart"]:
        tensors = one_row(tensors)
    y = tensors["y"]
    assert y is not None
    return Launch(forward_block, grid(y), tensors, constants, {"config": config})


def backward(call: Call, config: Config) -> Launch:
    """The gradients of all of them."""
    constants = _packing(call)
    gated = "gate" in call.tensors
    tensors: dict[str, TensorFacts | None] = {
        "dy": call.dy,
        "x": call.gate if gated else call.x,
        "up": call.tensors.get("up"),
        "dx": call.tensors.get("dgate" if gated else "dx"),
        "dup": call.tensors.get("dup"),
    }
    if not constants["apart"]:
        tensors = one_row(tensors)
    dy = tensors["dy"]
    assert dy is not None
    return Launch(backward_block, grid(dy), tensors, constants, {"config": config})
