"""How hand-written CUDA C++ does attention without masks on Hopper: the launch of `attention_full.cu`. Configs and
limits are in `cuda_configs.py`, the algorithm in the source.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tilewright.backends.cuda import Source
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, TensorMap
from tilewright.ops.attention import arguments
from tilewright.ops.attention.cuda_configs import PANEL, REST, ROWS, pack_of, shared_of

FULL = Source(Path(__file__).with_name("attention_full.cu"), "attention_full")
TYPES = {torch.float16: '"f16"', torch.bfloat16: '"bf16"'}


def forward(call: Call, config: Config) -> Launch:
    """o and lse."""
    q, k, v, pack = call.q, call.k, call.v, pack_of(call)
    tiles = -(-q.shape[1] * pack // ROWS)
    at_once = bool(config.at_once)
    args: dict[str, Argument] = {
        "q_map": _tiles(q, ROWS // 2 // pack, pack, at_once),
        "k_map": _tiles(k, config.n, 1, at_once),
        "v_map": _tiles(v, config.n, 1, at_once),
    }
    if at_once:
        args |= {"q": q, "k": k, "v": v}
        args |= {**arguments.strides(q, 1), **arguments.strides(k, 1), **arguments.strides(v, 1)}
    args |= {
        "kv_len": call.tensors.get("kv_len"), "o": call.o, "lse": call.lse,
        "rows": q.shape[1], "keys": k.shape[1], "tiles": tiles, **arguments.heads_of(call),
        "factor": arguments.number_arguments(call)["factor"],
    }  # fmt: skip
    constants = {
        "TYPE": TYPES[q.dtype], "WIDTH": q.columns, "V_WIDTH": v.columns, "PACK": pack, "N": config.n,
        "SLOTS": config.slots, "PARTS": config.parts, "LENGTHS": call.has("kv_len"), "SIGN": arguments.sign_of(call),
        "AT_ONCE": at_once,
    }  # fmt: skip
    return Launch(
        FULL,
        (tiles * (q.shape[2] // pack) * q.shape[0] * config.parts, 1, 1),
        args,
        constants,
        {
            "block": 256 if at_once else 384,
            "shared": shared_of(call, config),
            "cluster": (config.parts, 1, 1),
        },
        pdl=True,
    )


def _tiles(facts: TensorFacts, rows: int, heads: int, at_once: bool) -> TensorMap:
    """[B, S, H, D] as tiles of rows of some heads, in panels: an axis of their own where a tile is one box, that is
    where columns are whole panels, or where threads bring what whole panels leave."""
    (batch, length, count, columns), (batch_step, row_step, head_step, _) = facts.shape, facts.stride
    whole, left = divmod(columns, PANEL)
    boxed = whole > 0 and (left == 0 or (at_once and left <= REST))
    shape = (batch, whole if boxed else 1, length, count, PANEL if boxed else columns)
    stride = (batch_step, PANEL, row_step, head_step, 1)
    return TensorMap(facts, shape, stride, (1, shape[1], rows, heads, PANEL), PANEL * facts.dtype.itemsize)
