"""How TileLang runs what has parameters by column: the launches of either pass, worked out from a call's facts.

The programs are in `tilelang_affine_programs`, which imports TileLang and is loaded when a launch is compiled; configs
are in `affine_configs`. Nothing here imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.activation.affine_configs import act_of, by_column, by_rows, residual_of, summed
from tilewright.ops.activation.configs import rows_and_columns, tilelang_vector
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES, layout_of, strides_of
from tilewright.ops.tilelang_sums import sum_groups

FORWARD = Program("tilewright.ops.activation.tilelang_affine_programs:forward", FULL_RANGE_DIVISION)
BACKWARD = Program("tilewright.ops.activation.tilelang_affine_programs:backward", FULL_RANGE_DIVISION)


def forward(call: Call, config: Config) -> Launch:
    """scale_bias_add and bias_act."""
    rows, columns, vec = _sizes(call)
    args, constants = _shared(call, config, {"x": call.x, "residual": residual_of(call)})
    programs = rows * -(-columns // (config.threads * config.depth * vec))
    args |= {"y": call.y, "groups": rows, "programs": programs}
    return Launch(FORWARD, (programs, 1, 1), args, constants)


def backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """Their gradients: dx and partial sums over rows, then the sums."""
    rows, columns, vec = _sizes(call)
    sums, act = summed(call), act_of(call)
    reads_x = act != "" or "dscale" in sums
    tensors = {
        "dy": call.dy,
        "x": call.tensors.get("x") if reads_x else None,
        "residual": residual_of(call) if act else None,
    }
    args, constants = _shared(call, config, tensors)
    cuts, groups = -(-columns // (config.threads * config.depth * vec)), rows
    if sums:
        groups = min(rows, max(1, call.device.multiprocessors * config.per_sm // cuts))
    partials = Scratch("partials", (len(sums), groups, columns)) if sums else None
    args |= {"dx": call.tensors.get("dx"), "partials": partials, "groups": groups, "programs": cuts * groups}
    constants |= {"needs_dx": call.has("dx"), "sums": tuple(sums)}
    launches = [Launch(BACKWARD, (cuts * groups, 1, 1), args, constants)]
    if partials is not None:
        launches.append(sum_groups(partials, *sums.values()))
    return tuple(launches)


def _sizes(call: Call) -> tuple[int, int, int]:
    """Rows, columns and the elements of one access. Where rows do not matter there is one."""
    shape = rows_and_columns(call)
    rows, columns = (shape.rows, shape.columns) if by_rows(call) else (1, shape.numel)
    return rows, columns, tilelang_vector(call)


def _shared(
    call: Call, config: Config, tensors: Mapping[str, TensorFacts | None]
) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Arguments and constants of both passes: what there is, how it is read, and where its rows lie."""
    rows, columns, vec = _sizes(call)
    flat, dtype = not by_rows(call), NAMES[rows_and_columns(call).dtype]
    constants: dict[str, Any] = {
        "dtype": dtype, "kind": act_of(call), "vec": vec, "threads": config.threads, "depth": config.depth,
    }  # fmt: skip
    args: dict[str, Argument] = dict(tensors)
    for name, facts in tensors.items():
        layout = constants[f"{name}_layout"] = layout_of(facts, vec, flat)
        args |= strides_of(name, facts, layout, vec)
    for name in ("scale", "bias"):
        facts = by_column(call, name)
        layout = layout_of(facts, vec, False)
        constants |= {f"{name}_layout": layout, f"{name}_dtype": dtype if facts is None else NAMES[facts.dtype]}
        args |= {name: facts, f"{name}_step": 1}
    return args | {"rows": rows, "row_vectors": columns // vec}, constants
