"""How hand-written CUDA C++ does norms of wide rows on Hopper and later: launches of `norm_wide.cu` (forward) and
`norm_wide_backward.cu`.

A row is spread over a cluster of up to 8 blocks, so it is read once and written once at any width up to 131072. Configs
and limits are in `cuda_configs.py`, the mathematics in the sources.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tilewright.backends.cuda import Source
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.norm.cuda_configs import SUMS, packets, vector_of

FORWARD = Source(Path(__file__).with_name("norm_wide.cu"), "norm_wide")
BACKWARD = Source(Path(__file__).with_name("norm_wide_backward.cu"), "norm_wide_backward")
WEIGHTS = Source(Path(__file__).with_name("norm_wide_backward.cu"), "norm_wide_weights")

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
WEIGHT_COLUMNS = 32
"""Columns a block of `norm_wide_weights`."""


# Forward ----------------------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> Launch:
    """rms_norm, add_rms_norm, layer_norm and add_layer_norm."""
    x: TensorFacts = call.x
    centered = call.op in ("layer_norm", "add_layer_norm")
    residual, pre_bias = call.tensors.get("residual"), call.tensors.get("pre_bias")
    weight, bias = call.tensors.get("weight"), call.tensors.get("bias")
    reread = bool(config.get("reread", 0))
    clusters = _clusters(call, config) if config.stages and not reread else x.rows
    share = math.ceil(packets(x) / config.cluster)
    inputs = 1 if residual is None else 2
    args: dict[str, Argument] = {
        "x": x,
        "residual": residual,
        "pre_bias": pre_bias,
        "weight": weight,
        "bias": bias,
        "y": call.y,
        "h": call.tensors.get("h"),
        "mean": call.tensors.get("mean"),
        "rstd": call.tensors.get("rstd"),
        "rows": x.rows,
        "x_stride": _row_stride(x),
        "residual_stride": _row_stride(residual),
        "eps": float(call.eps),
        "weight_offset": float(call.options.get("weight_offset", 0.0)),
    }
    return Launch(
        FORWARD,
        (clusters * config.cluster, 1, 1),
        args,
        {
            "ELEMENT": TYPES[x.dtype],
            "WEIGHT": _type(weight, x),
            "BIAS": _type(bias, x),
            "PRE_BIAS": _type(pre_bias, x),
            "COLUMNS": x.columns,
            "VECTOR": vector_of(call),
            "THREADS": config.threads,
            "CLUSTER": config.cluster,
            "STAGES": config.stages,
            "REREAD": reread,
            "CTAS": config.ctas,
            "CENTER": centered,
            "HAS_RESIDUAL": residual is not None,
            "HAS_PRE_BIAS": pre_bias is not None,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "CAST_BEFORE_WEIGHT": bool(call.options.get("cast_before_weight", False)),
            "SAVE": call.has("rstd"),
        },
        {
            "block": config.threads,
            "shared": config.stages * inputs * share * 16,
            "cluster": (config.cluster, 1, 1),
        },
    )


# Backward ---------------------------------------------------------------------------------------------------------


def rms_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """rms_norm_backward: the gradient of rms_norm and, with dh, of add_rms_norm."""
    return _backward(call, config, centered=False)


def layer_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """layer_norm_backward: the gradient of layer_norm and, with dh and pre_bias, of add_layer_norm."""
    return _backward(call, config, centered=True)


def _backward(call: Call, config: Config, *, centered: bool) -> tuple[Launch, ...]:
    x: TensorFacts = call.x
    weight, dh = call.tensors.get("weight"), call.tensors.get("dh")
    sums: list[TensorFacts] = [call[name] for name in SUMS if call.has(name)]
    clusters = _clusters(call, config)
    share = math.ceil(packets(x) / config.cluster)
    partial = Scratch("partial_sums", (len(sums), clusters, x.columns)) if sums else None
    args: dict[str, Argument] = {
        "dy": call.dy,
        "x": x,
        "weight": weight,
        "mean": call.mean if centered else None,
        "rstd": call.rstd,
        "dh": dh,
        "dx": call.tensors.get("dx"),
        "partial": partial,
        "rows": x.rows,
        "dy_stride": _row_stride(call.dy),
        "x_stride": _row_stride(x),
        "dh_stride": _row_stride(dh),
        "weight_offset": float(call.options.get("weight_offset", 0.0)),
    }
    main = Launch(
        BACKWARD,
        (clusters * config.cluster, 1, 1),
        args,
        {
            "ELEMENT": TYPES[x.dtype],
            "WEIGHT": _type(weight, x),
            "COLUMNS": x.columns,
            "THREADS": config.threads,
            "CLUSTER": config.cluster,
            "STAGES": config.stages,
            "CTAS": config.ctas,
            "CENTER": centered,
            "HAS_WEIGHT": weight is not None,
            "HAS_DH": dh is not None,
            "CAST_BEFORE_WEIGHT": bool(call.options.get("cast_before_weight", False)),
            "NEEDS_DX": call.has("dx"),
            "NEEDS_DWEIGHT": call.has("dweight"),
            "NEEDS_DBIAS": call.has("dbias"),
            "NEEDS_DPRE_BIAS": call.has("dpre_bias"),
        },
        {
            "block": config.threads,
            "shared": config.stages * (2 if dh is None else 3) * share * 16,
            "cluster": (config.cluster, 1, 1),
        },
    )
    if partial is None:
        return (main,)
    outputs = [sums[min(i, len(sums) - 1)] for i in range(len(SUMS))]  # beyond the last: never written
    last = Launch(
        WEIGHTS,
        (math.ceil(x.columns / WEIGHT_COLUMNS), len(sums), 1),
        {"partial": partial, **{f"output{i}": facts for i, facts in enumerate(outputs)}, "parts": clusters},
        {"COLUMNS": x.columns, **{f"OUTPUT{i}": TYPES[facts.dtype] for i, facts in enumerate(outputs)}},
        {"block": 512},
        pdl=True,
    )
    return main, last


# Facts ------------------------------------------------------------------------------------------------------------


def _row_stride(facts: TensorFacts | None) -> int:
    return facts.row_levels[-1][1] if facts is not None else 0


def _type(facts: TensorFacts | None, x: TensorFacts) -> str:
    return TYPES[x.dtype if facts is None else facts.dtype]


def _clusters(call: Call, config: Config) -> int:
    """Clusters that walk over the rows: as many as run at once, less those that would only shorten the last round.

    Multiprocessors come in groups of 14 to 18, and a cluster lies within one group: what is left over of each stays
    idle. A cluster too many would run alone after all others.
    """
    blocks, rows = call.device.multiprocessors * config.ctas, int(call.x.rows)
    groups = math.ceil(call.device.multiprocessors / 18)
    idle = groups * (config.cluster // 2) if config.cluster > 2 else 0
    resident = max(1, (blocks - idle) // config.cluster)
    return math.ceil(rows / math.ceil(rows / resident))
