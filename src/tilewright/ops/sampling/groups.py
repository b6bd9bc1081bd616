"""How rows are cut for the search by groups, best guess first, and which calls it takes. Needs no Triton.

Keys of its configs: `block` columns a program of the pass over the row, and `num_warps`; `group` tokens of which the
largest key is kept; `choosing` warps of the program that has a row's keys; `pdl` as of the search by bins. Apart from
`configs`, so that an edit of one leaves the evidence of the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import power_of_2_at_least
from tilewright.ops.sampling.configs import FEW_ROWS

MOST_KEPT = 1024
"""Of as many as k tokens and as many again one program holds the keys."""
MOST_GROUPS = 8192
"""Of a row: one program holds the largest keys of all of them."""


def known_k(call: Call) -> Iterable[Reason]:
    """A number bounds how many tokens are kept; `row_k` may lower it."""
    if call.top_k is None:
        told = "on the device alone, where nobody knows how large it is" if call.has("row_k") else "None"
        yield Reason("row_k" if call.has("row_k") else "top_k", f"{told}; takes a number up to {MOST_KEPT}")
    elif call.top_k > MOST_KEPT:
        yield Reason("top_k", f"{call.top_k}; takes up to {MOST_KEPT}")


def room_of(call: Call) -> int:
    """Keys that the program of a row holds: twice as many as are kept at most, so that a bound on them need not be
    exact. Not part of a config: one that was tuned for another k has to be right."""
    return max(512, 2 * power_of_2_at_least(call.top_k))


def group_configs(call: Call) -> tuple[Config, ...]:
    """Small blocks for a few rows, of which there would be too few programs; with many rows, fewer of them."""
    probs: TensorFacts = call.probs
    width = max(128, power_of_2_at_least(probs.columns))
    least = max(8, width // MOST_GROUPS)
    few = ((1024, 4, 1, 16, 1), (2048, 4, 1, 16, 1), (1024, 4, 2, 8, 1), (2048, 8, 1, 8, 0))
    many = ((4096, 4, 1, 16, 1), (2048, 4, 1, 16, 1), (4096, 8, 2, 8, 1), (8192, 8, 1, 16, 0))
    found = []
    for block, warps, groups, choosing, pdl in few if power_of_2_at_least(probs.rows) <= FEW_ROWS else many:
        group = least * groups
        block = min(width, max(block, group))
        pdl = pdl if call.device.kind == "cuda" and call.device.sm >= 90 else 0
        warps, choosing = max(1, min(warps, block // 128)), max(8, min(choosing, width // group // 256))
        found.append(Config(block=block, num_warps=warps, group=group, choosing=choosing, pdl=pdl))
    return tuple(dict.fromkeys(found))
