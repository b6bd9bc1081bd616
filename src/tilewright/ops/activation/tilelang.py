"""How TileLang runs the activation family: the launch of either pass, worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.activation.configs import is_flat, kind_of, packing, rows_and_columns, tilelang_vector
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES, layout_of, strides_of

FORWARD = Program("tilewright.ops.activation.tilelang_programs:forward", FULL_RANGE_DIVISION)
BACKWARD = Program("tilewright.ops.activation.tilelang_programs:backward", FULL_RANGE_DIVISION)


def forward(call: Call, config: Config) -> Launch:
    """swiglu, geglu and their packed forms, silu and gelu."""
    return _launch(FORWARD, call, config, _gate_and_up(call), {"y": call.y}, {})


def backward(call: Call, config: Config) -> Launch:
    """The gradients of the same."""
    dx = call.tensors.get("dx")
    outputs = {
        "dgate": call.tensors.get("dgate", dx),
        "dup": call.tensors.get("dup", dx if packing(call) else None),
    }
    needs = {f"needs_{name}": facts is not None for name, facts in outputs.items()}
    return _launch(BACKWARD, call, config, {"dy": call.dy, **_gate_and_up(call)}, outputs, needs)


def _gate_and_up(call: Call) -> dict[str, TensorFacts | None]:
    """Tensors of their own, or one that holds both; or x alone."""
    x = call.tensors.get("x")
    if x is None:
        return {"gate": call.gate, "up": call.up}
    return {"gate": x, "up": x if packing(call) else None}


def _launch(
    program: Program,
    call: Call,
    config: Config,
    inputs: dict[str, TensorFacts | None],
    outputs: dict[str, TensorFacts | None],
    constants: dict[str, Any],
) -> Launch:
    shape, flat, vec, pack = rows_and_columns(call), is_flat(call), tilelang_vector(call), packing(call)
    rows, columns = (1, shape.numel) if flat else (shape.rows, shape.columns)
    programs = rows * -(-columns // (config.threads * config.depth * vec))
    # of pairs an access to x reads both parts
    steps = {name: 2 * vec if pack == "pairs" and name != "dy" else vec for name in inputs}
    layouts = {f"{name}_layout": layout_of(facts, steps[name], flat) for name, facts in inputs.items()}
    constants |= {"dtype": NAMES[shape.dtype], "kind": kind_of(call), "flat": flat, "vec": vec, **config, **layouts}
    constants |= {"pack": pack, "gate_second": call.options.get("gate") == "second"}
    args: dict[str, Argument] = {**inputs, **outputs}
    for name, facts in inputs.items():
        args |= strides_of(name, facts, layouts[f"{name}_layout"], steps[name])
    args |= {"row_vectors": columns // vec, "programs": programs}
    return Launch(program, (programs, 1, 1), args, constants)
