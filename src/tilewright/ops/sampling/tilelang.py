"""How TileLang runs softmax and its gradient: the launches, worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.sampling.configs import main_of, tilelang_vector
from tilewright.ops.tilelang_places import NAMES, layout_of, strides_of

FORWARD = Program("tilewright.ops.sampling.tilelang_programs:softmax_forward")
BACKWARD = Program("tilewright.ops.sampling.tilelang_programs:softmax_backward")


def forward(call: Call, config: Config) -> Launch:
    """softmax."""
    return _launch(FORWARD, call, config, {"x": call.x}, {"y": call.y})


def backward(call: Call, config: Config) -> Launch:
    """softmax_backward."""
    return _launch(BACKWARD, call, config, {"dy": call.dy, "y": call.y}, {"dx": call.dx})


def _launch(
    program: Program, call: Call, config: Config, read: dict[str, TensorFacts], written: dict[str, Argument]
) -> Launch:
    shape, vec = main_of(call), tilelang_vector(call)
    row_vectors = shape.columns // vec
    args: dict[str, Argument] = {**written, "scale": call.scale, "row_vectors": row_vectors, "rows": shape.rows}
    constants: dict[str, Any] = {"dtype": NAMES[shape.dtype], "vec": vec, "threads": config.threads}
    constants |= {"depth": config.depth, "whole": row_vectors <= config.threads * config.depth}
    for name, facts in read.items():
        layout = layout_of(facts, vec, False) or ""
        constants[f"{name}_layout"] = layout
        args |= {name: facts, **strides_of(name, facts, layout, vec)}
        if len(facts.shape) == 1:  # a lone row
            args |= {f"{name}_inner": 1, f"{name}_outer": 0, f"{name}_stride": 0}
    return Launch(program, (shape.rows, 1, 1), args, constants)
