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
from tilewright.ops.attention.cuda_configs import REST, ROWS, pack_of, rest_of, shared_of

FULL = Source(Path(__file__).with_name("attention_full.cu"), "attention_full")
TYPES = {torch.float16: '"f16"', torch.bfloat16: '"bf16"'}


def forward(call: Call, config: Config) -> Launch:
    """o and lse."""
    q, k, v, pack, share = call.q, call.k, call.v, pack_of(call), config.n // config.cluster
    tiles = -(-q.shape[1] * pack // ROWS)
    tiles += -tiles % config.cluster
    boxes = ((q, (1, ROWS // pack, pack)), (k, (1, share, 1)), (v, (1, share, 1)))
    args: dict[str, Argument] = {
        **{f"{facts.name}_map": _panels(facts, box, 64) for facts, box in boxes},
        **{f"{facts.name}_rest": _panels(facts, box, REST) for facts, box in boxes if rest_of(facts)},
        "kv_len": call.tensors.get("kv_len"), "o": call.o, "lse": call.lse,
        "rows": q.shape[1], "keys": k.shape[1], "tiles": tiles, **arguments.heads_of(call),
        "factor": arguments.number_arguments(call)["factor"],
    }  # fmt: skip
    constants = {
        "TYPE": TYPES[q.dtype], "WIDTH": q.columns, "V_WIDTH": v.columns, "PACK": pack, "N": config.n,
        "SLOTS": config.slots, "CLUSTER": config.cluster, "LENGTHS": call.has("kv_len"),
        "SIGN": arguments.sign_of(call), "RESIDENT": config.resident, "REGISTERS": config.registers,
    }  # fmt: skip
    return Launch(
        FULL,
        (tiles * (q.shape[2] // pack) * q.shape[0], 1, 1),
        args,
        constants,
        {
            "block": 384 if config.registers else 256,
            "shared": shared_of(call, config.n, config.slots),
            "cluster": (config.cluster, 1, 1),
        },
    )


def _panels(facts: TensorFacts, box: tuple[int, int, int], columns: int) -> TensorMap:
    return TensorMap(facts, (*box, columns), columns * facts.dtype.itemsize)
