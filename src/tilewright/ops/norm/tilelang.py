"""How TileLang runs the norm family: the launches of every pass, worked out from a call's facts.

The programs themselves are in `tilelang_programs` and `tilelang_gradients`, which import TileLang and are loaded when a
launch is compiled; configs are in `tilelang_configs`. Nothing here imports TileLang. What the ops mean is said by their
references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.norm.tilelang_configs import vector

FORWARD = Program("tilewright.ops.norm.tilelang_programs:forward")
BACKWARD = Program("tilewright.ops.norm.tilelang_gradients:backward")
PARTIAL_COLUMNS = Program("tilewright.ops.norm.tilelang_gradients:partial_columns")
REDUCE_COLUMNS = Program("tilewright.ops.norm.tilelang_gradients:reduce_columns")
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
REDUCE_LANES, REDUCE_DEPTH = 32, 32


def forward(call: Call, config: Config) -> Launch:
    """rms_norm, add_rms_norm, layer_norm, add_layer_norm and l2_norm."""
    x: TensorFacts = call.x
    residual, centred = call.tensors.get("residual"), call.op in ("layer_norm", "add_layer_norm")
    vec = vector(x)
    weights = {name: call.tensors.get(name) for name in ("weight", "bias", "pre_bias")}
    constants = {
        "columns": x.columns, "dtype": NAMES[x.dtype], "x_layout": _rows(x, vec),
        "residual_layout": _rows(residual, vec), **_lines(weights, vec, x), "centred": centred,
        "divisor": 1.0 if call.op == "l2_norm" else float(x.columns),
        "cast_before_weight": bool(call.options.get("cast_before_weight", False)), "saving": call.has("rstd"),
        "vec": vec, "lanes": config.lanes, "block_rows": config.rows, "tiles": config.tiles,
    }  # fmt: skip
    args: dict[str, Argument] = {
        "x": x, "residual": residual, **weights, "y": call.y, "h": call.tensors.get("h"),
        "mean": call.tensors.get("mean"), "rstd": call.tensors.get("rstd"), "rows": x.rows, "eps": float(call.eps),
        "weight_offset": float(call.options.get("weight_offset", 0.0)),
        **_strides("x", x, vec), **_strides("residual", residual, vec), **_steps(weights),
    }  # fmt: skip
    return Launch(FORWARD, (-(-x.rows // config.rows), 1, 1), args, constants)


def rms_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    return _backward(call, config, "rms", call.x, {"weight": call.tensors.get("dweight")})


def layer_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    sums = {name: call.tensors.get(f"d{name}") for name in ("weight", "bias", "pre_bias")}
    return _backward(call, config, "layer", call.x, sums)


def l2_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    return _backward(call, config, "l2", call.y, {})


def _backward(
    call: Call, config: Config, kind: str, x: TensorFacts, gradients: Mapping[str, TensorFacts | None]
) -> tuple[Launch, ...]:
    """dx with partial sums in one launch, or in two where rows are too wide for registers; then the sums."""
    vec, columns, rows = vector(x), x.columns, x.rows
    dy, dh, dx, weight = (call.tensors.get(name) for name in ("dy", "dh", "dx", "weight"))
    needed = {name: facts for name, facts in gradients.items() if facts is not None}
    apart = bool(needed) and config.tiles > 1
    persistent = min(-(-rows // config.rows), call.device.multiprocessors * config.per_sm)
    shared: dict[str, Any] = {
        "columns": columns, "dtype": NAMES[x.dtype], "dy_layout": _rows(dy, vec), "x_layout": _rows(x, vec),
        **_lines({"weight": weight}, vec, x), "dh_layout": _rows(dh, vec), "kind": kind,
        "cast_before_weight": bool(call.options.get("cast_before_weight", False)), "vec": vec,
    }  # fmt: skip
    args: dict[str, Argument] = {
        "dy": dy, "x": x, "weight": weight, "mean": call.tensors.get("mean"), "rstd": call.rstd, "dh": dh, "dx": dx,
        "rows": rows, "weight_offset": float(call.options.get("weight_offset", 0.0)),
        **_strides("dy", dy, vec), **_strides("x", x, vec), **_strides("dh", dh, vec), **_steps({"weight": weight}),
    }  # fmt: skip
    launches = []
    keep = apart and dy is not None and "pre_bias" in needed
    row_means = Scratch("row_means", (2, rows)) if keep else None
    fused = tuple(needed) if not apart else ()
    if dx is not None or fused or keep:
        programs = persistent if fused else -(-rows // config.rows)
        partial = Scratch("partial", (len(fused), programs, columns)) if fused else None
        constants = {**shared, "dx_needed": dx is not None, "sums": fused, "keep": keep, "lanes": config.lanes,
                     "block_rows": config.rows, "tiles": config.tiles, "ahead": bool(config.get("ahead", 0)),
                     "blocks": config.get("blocks", 0)}  # fmt: skip
        own = {**args, "partial": partial, "row_means": row_means, "programs": programs}
        launches.append(Launch(BACKWARD, (programs, 1, 1), own, constants))
    if apart:
        lanes, block_rows = 64, 4
        blocks = -(-columns // (lanes * vec))
        programs = max(1, min(-(-rows // block_rows), 65535, -(-call.device.multiprocessors * 8 // blocks)))
        partial = Scratch("partial", (len(needed), programs, columns))
        constants = {**shared, "sums": tuple(needed), "lanes": lanes, "block_rows": block_rows}
        own = {**args, "partial": partial, "row_means": row_means, "programs": programs}
        launches.append(Launch(PARTIAL_COLUMNS, (blocks, programs, 1), own, constants))
    if needed:
        outputs = list(needed.values())
        named = {f"out{i}": outputs[i] if i < len(outputs) else None for i in range(3)}
        constants = {"columns": columns, "dtypes": tuple(NAMES[facts.dtype] for facts in outputs),
                     "lanes": REDUCE_LANES, "depth": REDUCE_DEPTH}  # fmt: skip
        grid = (-(-columns // REDUCE_LANES), len(outputs), 1)
        launches.append(Launch(REDUCE_COLUMNS, grid, {"partial": partial, **named, "count": programs}, constants))
    return tuple(launches)


def _rows(facts: TensorFacts | None, vec: int) -> str | None:
    """The layout of a tensor of rows, as `tilelang_programs` defines it."""
    if facts is None:
        return None
    step = min(16, vec * facts.dtype.itemsize)
    vectors = facts.column_stride == 1 and facts.vector_bytes() % step == 0
    return f"{len(facts.row_levels)}{'v' if vectors else 's'}"


def _lines(weights: Mapping[str, TensorFacts | None], vec: int, x: TensorFacts) -> dict[str, str | None]:
    """Layout and dtype of each weight; the dtype of an absent one is never used."""
    found: dict[str, str | None] = {}
    for name, facts in weights.items():
        layout = None if facts is None else (_rows(facts, vec) or "")[1:]
        found |= {f"{name}_layout": layout, f"{name}_dtype": NAMES[x.dtype if facts is None else facts.dtype]}
    return found


def _strides(name: str, facts: TensorFacts | None, vec: int) -> dict[str, Argument]:
    """Where rows start: inner count, outer and inner stride (in vectors where the layout says so), column stride."""
    if facts is None:
        return {}
    unit = vec if (_rows(facts, vec) or "").endswith("v") else 1
    levels = facts.row_levels
    inner, stride = levels[-1]
    outer = levels[0][1] if len(levels) == 2 else 0
    return {
        f"{name}_inner": inner,
        f"{name}_outer": outer // unit,
        f"{name}_stride": stride // unit,
        f"{name}_step": facts.column_stride,
    }


def _steps(weights: Mapping[str, TensorFacts | None]) -> dict[str, Argument]:
    return {f"{name}_step": facts.column_stride for name, facts in weights.items() if facts is not None}
