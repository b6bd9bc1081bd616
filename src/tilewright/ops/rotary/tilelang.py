"""How TileLang runs rope and its gradient: the launches, worked out from a call's facts.

The program is in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. Nothing here
imports TileLang.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.rotary.places import head_places, merged, tokens_of
from tilewright.ops.tilelang_places import NAMES

TURN = Program("tilewright.ops.rotary.tilelang_programs:turn")


def turned(call: Call, config: Config) -> Launch:
    """rope, and its gradient."""
    back = call.op == "rope_backward"
    x: TensorFacts = call.dy if back else call.x
    cos, sin, ids = call.cos, call.sin, call.position_ids
    tokens, seq = tokens_of(x)
    batch, token, head = head_places(x)
    lead = None if ids is None else merged(ids, 1)
    args: dict[str, Argument] = {
        "x": x,
        "cosines": cos,
        "sines": sin,
        "position_ids": ids,
        "y": call.dx if back else call.y,
    }
    args |= {"x_batch": batch, "x_token": token, "x_head": head, "x_step": x.column_stride}
    args |= {"cos_row": cos.stride[0], "cos_step": cos.column_stride}
    args |= {"sin_row": sin.stride[0], "sin_step": sin.column_stride}
    args |= {"ids_batch": lead[1] if lead else 0, "ids_token": 0 if ids is None else ids.stride[-1]}
    args |= {"seq": seq, "table_rows": cos.shape[0], "heads": x.shape[-2], "tokens": tokens}
    constants: dict[str, Any] = {
        "dtype": NAMES[x.dtype], "table_dtype": NAMES[cos.dtype], "half": cos.shape[1], "width": x.columns,
        "ids_dtype": "int64" if ids is None else NAMES[ids.dtype], "has_ids": ids is not None,
        "interleaved": call.style == "interleaved", "back": back,
        "threads": config.threads, "dense": x.column_stride == 1,
    }  # fmt: skip
    return Launch(TURN, (tokens, 1, 1), args, constants)
