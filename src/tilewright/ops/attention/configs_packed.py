"""Tiles for packed sequences, beside those of `configs`: short ones would leave most of a tall tile empty.

What a kernel learns of lengths before it runs is how many tokens there are in how many sequences.
"""

from __future__ import annotations

import torch

from tilewright.core.call import Call
from tilewright.core.launch import Config
from tilewright.ops.attention.backward_configs import backward_configs
from tilewright.ops.attention.configs import Shape, forward_configs
from tilewright.ops.configs import power_of_2_at_least

SHORT = 128
"""Tokens of a sequence, on average, up to which tiles are small."""
SMALL: tuple[Shape, ...] = ((32, 32, 2, 2), (16, 32, 1, 2), (64, 64, 4, 2), (64, 32, 4, 2))
"""Without descriptors, which are made once a program and pay when it reads many tiles."""
SMALL_BACKWARD: tuple[Shape, ...] = ((32, 32, 2, 2), (64, 64, 4, 2), (32, 32, 4, 2))
"""Both of programs that own keys and of those that own queries."""


def packed_configs(call: Call) -> tuple[Config, ...]:
    """Of the forward pass over packed sequences."""
    usual = forward_configs(call)
    if not _short(call):
        return usual
    small = (Config(m=m, n=n, parts=1, tma=0, num_warps=w, num_stages=s) for m, n, w, s in _ordered(call, SMALL))
    return tuple(dict.fromkeys((*small, *usual)))


def packed_backward_configs(call: Call) -> tuple[Config, ...]:
    """Of the gradient: small tiles before large ones, which would leave no register for where sequences end."""
    usual = backward_configs(call)
    if call.q.dtype != torch.float32:
        usual = tuple(sorted(usual, key=lambda config: config.k_m * config.k_n))
    if not _short(call) or max(call.q.columns, call.v.columns) > 128:
        return usual
    small = (
        Config(k_m=m, k_n=n, k_warps=w, k_stages=s, q_m=m, q_n=n, q_warps=w, q_stages=s, tma=0)
        for m, n, w, s in _ordered(call, SMALL_BACKWARD)
    )
    return tuple(dict.fromkeys((*small, *usual)))


def _short(call: Call) -> bool:
    return _average(call) <= SHORT and call.q.dtype != torch.float32


def _average(call: Call) -> int:
    """Tokens of a sequence, by the powers of two that a call class knows."""
    sequences = max(1, call.cu_seqlens_q.shape[0] - 1)
    return power_of_2_at_least(call.q.shape[0]) // power_of_2_at_least(sequences)


def _ordered(call: Call, shapes: tuple[Shape, ...]) -> list[Shape]:
    """Those of 64 rows first where sequences fill them."""
    return sorted(shapes, key=lambda shape: shape[0] < 64) if _average(call) >= 64 else list(shapes)
