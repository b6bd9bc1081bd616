"""How TileLang runs the loss family: the launches of either pass, worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.loss.configs import divisor, inputs_of, is_flat, reduces, scales, tilelang_tiles, tilelang_vector
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES, layout_of, strides_of

FORWARD = Program("tilewright.ops.loss.tilelang_programs:forward")
TOTAL = Program("tilewright.ops.loss.tilelang_programs:total")
BACKWARD = Program("tilewright.ops.loss.tilelang_programs:backward", FULL_RANGE_DIVISION)
FORWARD_KEEPING = Program("tilewright.ops.loss.tilelang_programs:forward", FULL_RANGE_DIVISION)
SCALE = Program("tilewright.ops.loss.tilelang_programs:scale")
TOTAL_THREADS = 256


def forward(call: Call, config: Config) -> tuple[Launch, ...]:
    """bce_with_logits."""
    tiles, args, constants = _shared(call, config)
    constants |= {"reduce": reduces(call), "keep": call.has("unit"), "loss_dtype": NAMES[call.loss.dtype]}
    args |= {"unit": call.unit, "divisor": divisor(call)}
    program = FORWARD_KEEPING if call.has("unit") else FORWARD
    if not reduces(call):
        own: dict[str, Argument] = {**args, "loss": call.loss, "partials": None, "tiles": tiles, "programs": tiles}
        return (Launch(program, (tiles, 1, 1), own, constants),)
    programs = min(tiles, call.device.multiprocessors * config.per_sm)
    partials = Scratch("partials", (programs,))
    own = {**args, "loss": None, "partials": partials, "tiles": tiles, "programs": programs}
    rest: dict[str, Argument] = {"partials": partials, "loss": call.loss, "groups": programs}
    return (
        Launch(program, (programs, 1, 1), own, constants),
        Launch(
            TOTAL,
            (1, 1, 1),
            {**rest, "divisor": divisor(call)},
            {"dtype": NAMES[call.loss.dtype], "threads": TOTAL_THREADS},
        ),
    )


def backward(call: Call, config: Config) -> Launch:
    """bce_with_logits_backward."""
    if scales(call):
        return _scale(call, config)
    tiles, args, constants = _shared(call, config)
    vec, flat = constants["vec"], constants["flat"]
    dy: TensorFacts | None = call.dy if "dy" in inputs_of(call) else None
    constants |= {"dy_layout": layout_of(dy, vec, flat), "dy_dtype": NAMES[call.dy.dtype]}
    args |= {"dy": call.dy, **strides_of("dy", dy, constants["dy_layout"], vec)}
    args |= {"dlogits": call.dlogits, "divisor": divisor(call), "programs": tiles}
    return Launch(BACKWARD, (tiles, 1, 1), args, constants)


def _scale(call: Call, config: Config) -> Launch:
    unit: TensorFacts = call.unit
    vec = tilelang_vector(call)
    tiles = tilelang_tiles(call, config.threads * config.depth)
    programs = min(tiles, call.device.multiprocessors * config.per_sm)
    layout = layout_of(unit, vec, True)
    args: dict[str, Argument] = {"dy": call.dy, "unit": unit, "dlogits": call.dlogits}
    args |= {**strides_of("unit", unit, layout, vec), "row_vectors": unit.numel // vec}
    constants = {"dy_dtype": NAMES[call.dy.dtype], "in_place": "dlogits" in call.aliased, "unit_layout": layout}
    constants |= {"vec": vec, "threads": config.threads, "depth": config.depth}
    return Launch(SCALE, (programs, 1, 1), {**args, "tiles": tiles, "programs": programs}, constants)


def _shared(call: Call, config: Config) -> tuple[int, dict[str, Argument], dict[str, Any]]:
    """Tiles, and the arguments and constants that both passes have."""
    logits: TensorFacts = call.logits
    flat, vec = is_flat(call), tilelang_vector(call)
    columns = logits.numel if flat else logits.columns
    args: dict[str, Argument] = {"row_vectors": columns // vec}
    constants: dict[str, Any] = {"dtype": NAMES[logits.dtype], "flat": flat, "vec": vec}
    constants |= {"threads": config.threads, "depth": config.depth}
    for name in ("logits", "targets", "weight", "pos_weight"):
        facts: TensorFacts | None = call.tensors[name]
        layout = constants[f"{name}_layout"] = layout_of(facts, vec, flat)
        args |= {name: facts, **strides_of(name, facts, layout, vec)}
        if name in ("weight", "pos_weight"):  # the dtype of an absent one is never used
            constants[f"{name}_dtype"] = NAMES[logits.dtype if facts is None else facts.dtype]
    return tilelang_tiles(call, config.threads * config.depth), args, constants
