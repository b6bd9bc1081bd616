"""How many tokens and heads a program of the rotary kernels takes, best guess first. Needs no Triton.

Keys: `elements` of a tile, over tokens and heads; `heads` at the most, which share what is read of the tables;
`num_warps`; `per_sm` programs a multiprocessor where weight gradients are summed.
"""

from __future__ import annotations

import torch

from tilewright.core.call import Call
from tilewright.core.launch import Config


def triton_configs(call: Call) -> tuple[Config, ...]:
    found = (
        Config(elements=4096, heads=16, num_warps=4, per_sm=4),
        Config(elements=2048, heads=8, num_warps=8, per_sm=8),
        Config(elements=8192, heads=32, num_warps=8, per_sm=2),
        Config(elements=2048, heads=4, num_warps=2, per_sm=8),
        Config(elements=1024, heads=8, num_warps=2, per_sm=16),
    )
    return found


def split_backward_configs(call: Call) -> tuple[Config, ...]:
    """The same, with at most 16 elements a thread where gradients are fp32: of 32 their registers spill."""
    given = [facts for name in ("dq", "dk", "dv") if (facts := call.tensors[name]) is not None]
    most = 512 if given[0].dtype == torch.float32 else 1024  # a warp
    return tuple(
        Config(**{**config, "elements": min(config.elements, most * config.num_warps)})
        for config in triton_configs(call)
    )


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Key: `threads` of a block, which has a token."""
    return tuple(Config(threads=threads) for threads in (256, 128, 512))
