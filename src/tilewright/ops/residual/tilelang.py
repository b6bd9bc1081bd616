"""How TileLang runs the residual family: the launches of each pass, worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.residual.configs import gate_of, is_flat, shape_of, sum_of, tilelang_vector
from tilewright.ops.residual.dropout import drops
from tilewright.ops.residual.philox import limit, scale
from tilewright.ops.tilelang_places import NAMES, layout_of, strides_of
from tilewright.ops.tilelang_sums import sum_groups

_PROGRAMS = "tilewright.ops.residual.tilelang_programs"
GATED_FORWARD = Program(f"{_PROGRAMS}:gated_forward")
GATED_BACKWARD = Program(f"{_PROGRAMS}:gated_backward")
DROPOUT_FORWARD = Program("tilewright.ops.residual.tilelang_dropout:dropout_forward")
DROPOUT_BACKWARD = Program("tilewright.ops.residual.tilelang_dropout:dropout_backward")
MOST_GROUPS = 1024


def gated_forward(call: Call, config: Config) -> Launch:
    """gated_residual."""
    args, constants = _shared(call, config, x=call.x, gate=call.gate, residual=call.residual)
    rows, wide = _tiles(call, config, constants)
    args |= {"y": call.y, "tiles": rows * wide}
    constants |= {"broadcast": gate_of(call), "gate_dtype": NAMES[call.gate.dtype]}
    return Launch(GATED_FORWARD, (rows * wide, 1, 1), args, constants)


def gated_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """gated_residual_backward."""
    args, constants = _shared(call, config, dy=call.dy, x=call.x, gate=call.gate)
    rows, wide = _tiles(call, config, constants)
    summed = sum_of(call)
    groups = max(1, min(rows, MOST_GROUPS, -(-call.device.multiprocessors * 8 // wide))) if summed == "rows" else 1
    partials = Scratch("partials", (groups, call.x.columns)) if summed == "rows" else None
    blocks = {"rows": wide, "columns": rows, "none": rows * wide}[summed]
    args |= {"dx": call.tensors.get("dx"), "partials": partials, "rows": rows, "blocks": blocks, "groups": groups}
    args["dgate"] = None if partials is not None else call.tensors.get("dgate")
    constants |= {"broadcast": gate_of(call), "summed": summed, "gate_dtype": NAMES[call.gate.dtype]}
    constants |= {"needs_dx": call.has("dx"), "needs_dgate": call.has("dgate")}
    first = Launch(GATED_BACKWARD, (blocks, groups, 1), args, constants)
    if partials is None:
        return (first,)
    return first, sum_groups(partials, call.dgate)


def dropout_forward(call: Call, config: Config) -> Launch:
    """dropout_add."""
    args, constants = _shared(call, config, x=call.x, residual=call.residual)
    args |= {"seed": call.seed, "offset": call.offset, "y": call.y, "state": call.state}
    constants |= {"saving": call.has("state"), "seeded": call.has("seed"), "started": call.has("offset")}
    return _dropout(DROPOUT_FORWARD, call, config, args, constants)


def dropout_backward(call: Call, config: Config) -> Launch:
    """dropout_add_backward."""
    args, constants = _shared(call, config, dy=call.dy)
    args |= {"state": call.state, "dx": call.dx}
    return _dropout(DROPOUT_BACKWARD, call, config, args, constants)


def _dropout(
    program: Program, call: Call, config: Config, args: dict[str, Argument], constants: dict[str, Any]
) -> Launch:
    rows, wide = _tiles(call, config, constants)
    args |= {"tiles": rows * wide, "limit": limit(call.p), "scale": scale(call.p)}
    return Launch(program, (rows * wide, 1, 1), args, {**constants, "drops": drops(call.training, call.p)})


def _shared(call: Call, config: Config, **tensors: TensorFacts) -> tuple[dict[str, Argument], dict[str, Any]]:
    """The arguments and constants by which the tensors are read."""
    shape, flat, vec = shape_of(call), is_flat(call), tilelang_vector(call)
    columns = shape.numel if flat else shape.columns
    args: dict[str, Argument] = {"row_vectors": columns // vec}
    constants: dict[str, Any] = {"dtype": NAMES[shape.dtype], "flat": flat, "vec": vec}
    constants |= {"threads": config.threads, "depth": config.depth}
    for name, facts in tensors.items():
        layout = layout_of(facts, vec, flat) or ""
        if facts.columns != shape.columns:  # one number a row
            layout = layout.replace("v", "s")
        constants[f"{name}_layout"] = layout
        args |= {name: facts, **strides_of(name, facts, layout, vec)}
    return args, constants


def _tiles(call: Call, config: Config, constants: dict[str, Any]) -> tuple[int, int]:
    """Rows, and tiles of each."""
    shape = shape_of(call)
    rows, columns = (1, shape.numel) if constants["flat"] else (shape.rows, shape.columns)
    return rows, -(-columns // (config.threads * config.depth * constants["vec"]))
