"""How hand-written CUDA C++ does attention without masks on Hopper: the launch of `attention_full.cu`. Configs and
limits are in `cuda_configs.py`, the algorithm in the source.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tilewright.backends.cuda import Source
from tilewright.core.call import Call
from tilewright.core.launch import Argument, Config, Launch, TensorMap
from tilewright.ops.attention import arguments
from tilewright.ops.attention.cuda_configs import PANEL, ROWS, pack_of, shared_of

FULL = Source(Path(__file__).with_name("attention_full.cu"), "attention_full")
TYPES = {torch.float16: '"f16"', torch.bfloat16: '"bf16"'}


def forward(call: Call, config: Config) -> Launch:
    """o and lse."""
    q, k, v, pack, rest = call.q, call.k, call.v, pack_of(call), bool(config.rest)
    tiles = -(-q.shape[1] * pack // ROWS)
    keys = (1, config.n, 1, PANEL)
    args: dict[str, Argument] = {
        "q_map": TensorMap(q, (1, ROWS // pack, pack, PANEL), PANEL * q.dtype.itemsize),
        "k_map": TensorMap(k, keys, PANEL * k.dtype.itemsize),
        "v_map": TensorMap(v, keys, PANEL * v.dtype.itemsize),
    }
    if rest:
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
        "REGISTERS": config.registers, "REST": rest,
    }  # fmt: skip
    return Launch(
        FULL,
        (tiles * (q.shape[2] // pack) * q.shape[0] * config.parts, 1, 1),
        args,
        constants,
        {
            "block": 384 if config.registers else 256,
            "shared": shared_of(call, config),
            "cluster": (config.parts, 1, 1),
        },
    )
