"""How TileLang runs the attention family: launches worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang. What the ops mean is said by their definitions.
"""

from __future__ import annotations

import math
from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.softmax import scale_of
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES

FORWARD = Program("tilewright.ops.attention.tilelang_programs:forward", FULL_RANGE_DIVISION)


def forward(call: Call, config: Config) -> Launch:
    """o, lse, and the random state where it is saved."""
    q, k, v = call.q, call.k, call.v
    unit = unit_of(q, k, v)
    batch = q.shape[0] if len(q.shape) == 4 else 1
    tiles = arguments.tiles_of(call, config.m, 1)
    programs = tiles * batch * q.shape[-2]
    drops = call.dropout_p > 0.0
    args: dict[str, Argument] = {
        **{name: call.tensors[name] for name in ("q", "k", "v", "o", "lse")},
        **{name: call.tensors[name] if drops else None for name in ("seed", "offset", "state")},
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.mask_arguments(call), **arguments.heads_of(call), **arguments.number_arguments(call),
        "tiles": tiles, "programs": programs, "vectors": q.columns // unit, "v_vectors": v.columns // unit,
    }  # fmt: skip
    sequences = call.cu_seqlens_q.shape[0] if "cu_seqlens_q" in call.tensors else 0
    args |= {"factor": scale_of(call.scale, q.columns) * arguments.LOG2E, "turns": sequences.bit_length()}
    if args["mask_step"] is None:
        args["mask_step"] = 1
    rules = arguments.mask_constants(call)
    constants: dict[str, Any] = {
        "dtype": NAMES[q.dtype],
        **{name: _kind(args[n]) for name, n in DTYPES.items()},
        "m": config.m, "n": config.n, "threads": config.threads, "d": width_of(q), "dv": width_of(v), "unit": unit,
        "has_kv_len": args["kv_len"] is not None, "packed": args["cu_seqlens_q"] is not None,
        "has_mask": args["mask"] is not None, "bottom": rules["BOTTOM"], "left_": rules["LEFT"],
        "right_": rules["RIGHT"], "prefix_": rules["PREFIX"], "prefix_given": args["prefix_kv_len"] is not None,
        "drops": drops, "started": args["offset"] is not None, "saving": args["state"] is not None,
    }  # fmt: skip
    return Launch(FORWARD, (programs, 1, 1), args, constants)


def unit_of(*tensors: TensorFacts) -> int:
    """Elements of one access: every row of these starts at a multiple of it, and is as long as one."""
    size = tensors[0].dtype.itemsize
    starts = (max(1, facts.align // size) for facts in tensors)
    return math.gcd(arguments.unit_of(*tensors), *starts, *(facts.columns for facts in tensors))


DTYPES = {
    "kv_len_dtype": "kv_len",
    "prefix_dtype": "prefix_kv_len",
    "starts_q_dtype": "cu_seqlens_q",
    "starts_k_dtype": "cu_seqlens_k",
}


def _kind(argument: Argument) -> str:
    return NAMES[argument.dtype] if isinstance(argument, TensorFacts) else "int32"
