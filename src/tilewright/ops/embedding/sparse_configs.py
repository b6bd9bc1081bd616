"""How a call of embedding_bag_mean_sparse_backward is cut, best guess first. Needs no Triton or TileLang.

Nothing here was measured yet: a guess is about 16 bytes a thread and store, and a few stores a thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least
from tilewright.ops.embedding.configs import WIDEST, vector


def triton_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `rows` entries and `block` columns a program; `num_warps`."""
    dout: TensorFacts = call.dout
    block = min(power_of_2_at_least(dout.columns), WIDEST)
    wide = 16 // dout.dtype.itemsize
    found = []
    for warps, stores in ((4, 4), (4, 2), (8, 4), (4, 8), (2, 4), (8, 2)):
        rows = min(max(1, 32 * warps * stores * wide // block), 128)
        found.append(Config(rows=rows, block=block, num_warps=warps))
    return tuple(dict.fromkeys(found))


def across(call: Call) -> tuple[int, int]:
    """Of a TileLang block: threads that share a row, and elements of one access of each."""
    dout: TensorFacts = call.dout
    vec = vector(dout)
    return min(32, power_of_2_at_least(-(-dout.columns // vec))), vec


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block; `ahead` entries of a thread."""
    return tuple(Config(threads=t, ahead=a) for t, a in ((128, 4), (256, 4), (128, 2), (256, 2), (128, 8)))


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang launch has a grid of int32, in which every id may count."""
    if power_of_2_at_least(call.indices.numel) > MOST_BLOCKS:
        yield Reason("indices", f"{call.indices.numel} ids; takes {MOST_BLOCKS}", "split the batch")
