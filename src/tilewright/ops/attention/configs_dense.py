"""Tiles on Hopper: of few queries, of warps that specialise, and of so few keys that a program holds all of them."""

from __future__ import annotations

from tilewright.core.call import Call
from tilewright.core.launch import Config
from tilewright.ops.attention.configs import forward_configs as usual_configs
from tilewright.ops.attention.configs import hopper_configs as two_groups
from tilewright.ops.attention.configs import packed_heads, width_of
from tilewright.ops.configs import power_of_2_at_least

FEW_KEYS, NARROW_HEADS = 256, 128


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Of the plain kernel: of few queries first what an H200 ran fastest, long tiles and a program a multiprocessor."""
    found = usual_configs(call)
    if call.device.sm != 90 or power_of_2_at_least(call.q.shape[-3]) * packed_heads(call) > 16:
        return found
    parts = max(config.parts for config in found)
    return tuple(sorted(found, key=lambda config: (config.n != 128, config.parts != max(1, parts // 2))))


def hopper_configs(call: Call) -> tuple[Config, ...]:
    """Three warpgroups where heads are narrow: while two are at their exponentials the third multiplies."""
    usual = two_groups(call)
    if max(width_of(call.q), width_of(call.v)) > 64 or power_of_2_at_least(call.q.shape[-3]) < 512:
        return usual
    three = (Config(m=192, n=128, parts=1, stages=stages, registers=160) for stages in (2, 3))
    return (*three, *usual)


def short_configs(call: Call) -> tuple[Config, ...]:
    """Of 64 queries, of 128."""
    return (Config(m=64), Config(m=128)) if power_of_2_at_least(call.q.shape[-3]) > 64 else (Config(m=64),)
