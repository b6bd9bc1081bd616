"""How Triton runs the gradients of silu_attention and hstu_attention: which launches, with which arguments.

`hstu_keys` has a tile of keys a program, which walks the queries that see it, for dk and dv; it works on X^T, so that
P^T and dX^T are left operands as they come out of a product. `hstu_queries` has a tile of queries, which walks keys as
the forward does, for dq. No sum depends on timing. The programs are in `triton_backward_tiles`.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.attention.configs import width_of
from tilewright.ops.hstu import arguments
from tilewright.ops.hstu.configs import by_descriptor
from tilewright.ops.hstu.triton import ordered
from tilewright.ops.hstu.triton_backward_tiles import hstu_keys, hstu_queries
from tilewright.ops.triton_scores import DESCRIPTOR, precision


def backward(call: Call, config: Config) -> list[Launch]:
    """dq, dk, dv, as far as they are needed."""
    stages: list[Launch] = []
    if call.has("dk") or call.has("dv"):
        stages += _launch(call, config, "k_", hstu_keys, "k", config.k_n, dk=call.dk, dv=call.dv)
    if call.has("dq"):
        stages += _launch(call, config, "q_", hstu_queries, "q", config.q_m, dq=call.dq)
    return stages


def _launch(
    call: Call, config: Config, prefix: str, function: Any, main: str, rows: int, **outputs: Argument
) -> list[Launch]:
    do, q, k, v = call.do, call.q, call.k, call.v
    unit = arguments.unit_of(q, k, v, do)
    stages, order = ordered(call, rows, f"{prefix}order")
    descriptors = bool(config.tma) and by_descriptor(call, *(("q", "do") if main == "k" else ("k", "v")))
    args: dict[str, Argument] = {
        "do": do, "q": q, "k": k, "v": v, "order": order, **arguments.tensors(call),
        "state": call.state if arguments.dropping(call) else None, **outputs,
        **arguments.strides(do, unit), "do_step": None if do.column_stride == 1 else do.column_stride,
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.numbers(call, rows, main),
    }  # fmt: skip
    constants = {
        **arguments.constants(call), "TMA": descriptors, "UNIT": unit, "M": config[f"{prefix}m"],
        "N": config[f"{prefix}n"], "D": width_of(q), "DV": width_of(v), "WIDTH": q.columns, "V_WIDTH": v.columns,
        "PRECISION": precision(call),
    }  # fmt: skip
    programs = arguments.programs(call, call[main], rows)
    workspace = Scratch(f"{prefix}descriptors", (programs * 2 * DESCRIPTOR,), torch.uint8) if descriptors else None
    options = {name: config[f"{prefix}{name.removeprefix('num_')}"] for name in ("num_warps", "num_stages")}
    return [*stages, Launch(function, (programs, 1, 1), args, constants, options, workspace=workspace)]
