"""How a call is cut into programs and threads, for Triton and TileLang, best guess first. Needs neither.

A loss reads its inputs once. What is reduced is summed by few long-lived programs, each of which leaves one number.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config

INPUTS = ("dy", "logits", "targets", "weight", "pos_weight")


def inputs_of(call: Call) -> dict[str, TensorFacts]:
    """The tensors that kernels read element by element, by name."""
    given = {n: f for n in INPUTS if (f := call.tensors.get(n)) is not None}
    return {n: f for n, f in given.items() if f.shape}


def is_flat(call: Call) -> bool:
    """Whether everything lies in memory as one dense run, so that rows do not matter."""
    return all(facts.contiguous and facts.numel == call.logits.numel for facts in inputs_of(call).values())


def reduces(call: Call) -> bool:
    """Whether the call is a forward that sums its elements."""
    return call.has("loss") and call.reduction != "none"


def triton_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `block` columns and `rows` rows a tile; `num_warps`; `per_sm` programs a multiprocessor where summed."""
    logits: TensorFacts = call.logits
    vector = 16 // logits.dtype.itemsize
    width = logits.numel if is_flat(call) else logits.columns
    width = 1 << max(width - 1, 0).bit_length()
    found = []
    for warps, depth, per_sm in ((4, 2, 8), (8, 2, 4), (4, 2, 16), (4, 1, 16), (8, 1, 8), (4, 4, 8)):
        elements = 32 * warps * vector * depth
        block = min(width, elements) if not is_flat(call) else elements
        rows = 1 if is_flat(call) else max(1, elements // block)
        more = {"per_sm": per_sm} if reduces(call) else {}
        found.append(Config(rows=rows, block=block, num_warps=warps, **more))
    return tuple(dict.fromkeys(found))
