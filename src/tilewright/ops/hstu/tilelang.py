"""How TileLang runs the family's forward passes: launches worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.tilelang import unit_of
from tilewright.ops.hstu import arguments
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES

FORWARD = Program("tilewright.ops.hstu.tilelang_programs:forward", FULL_RANGE_DIVISION)


def forward(call: Call, config: Config) -> Launch:
    """o, and the random state where it is saved."""
    q, k, v = call.q, call.k, call.v
    unit, packed, drops = unit_of(q, k, v), arguments.jagged(call), arguments.dropping(call)
    sequences = call.seq_offsets.shape[0] if packed else 0
    tiles = q.shape[-3] // config.m + sequences if packed else -(-q.shape[-3] // config.m)
    programs = tiles * q.shape[-2] * (1 if packed else q.shape[0])
    args: dict[str, Argument] = {
        "q": q, "k": k, "v": v, **arguments.tensors(call),
        **{name: call.tensors.get(name) if drops else None for name in ("seed", "offset")},
        "o": call.o, "state": call.tensors.get("state") if drops else None,
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.numbers(call, config.m), "tiles": tiles, "turns": sequences.bit_length(),
        "vectors": q.columns // unit, "v_vectors": v.columns // unit, "programs": programs,
    }  # fmt: skip
    rules = arguments.constants(call)
    constants: dict[str, Any] = {
        "dtype": NAMES[q.dtype], "starts_dtype": _kind(args["seq_offsets"], "int32"),
        "targets_dtype": _kind(args["num_targets"], "int32"), "mask_dtype": _kind(args["mask"], "float32"),
        "m": config.m, "n": config.n, "threads": config.threads, "d": width_of(q), "dv": width_of(v), "unit": unit,
        "packed": packed, "targeted": args["num_targets"] is not None, "scaled": args["attn_scale"] is not None,
        "has_mask": args["mask"] is not None, "causal": rules["CAUSAL"], "context": rules["CONTEXT"],
        "windowed": rules["WINDOW"], "drops": drops, "lifts": rules["LIFTS"], "started": args["offset"] is not None,
        "saving": args["state"] is not None,
    }  # fmt: skip
    return Launch(FORWARD, (programs, 1, 1), args, constants)


def _kind(argument: Argument, otherwise: str) -> str:
    return NAMES[argument.dtype] if isinstance(argument, TensorFacts) else otherwise
