"""How a call is cut into programs and threads, for Triton and TileLang, best guess first. Needs neither.

A loss reads its inputs once. What is reduced is summed by few long-lived programs, each of which leaves one number; few
also multiply what forward saved by one number, so that little is launched where that is 1 and there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.capability import Limit
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import MOST_BLOCKS, power_of_2_at_least
from tilewright.ops.tilelang_places import vector

INPUTS = ("dy", "logits", "targets", "weight", "pos_weight")


def inputs_of(call: Call) -> dict[str, TensorFacts]:
    """The tensors that kernels read element by element, by name."""
    given = {n: f for n in INPUTS if (f := call.tensors.get(n)) is not None}
    return {n: f for n, f in given.items() if f.shape}


def is_flat(call: Call) -> bool:
    """Whether everything lies in memory as one dense run, so that rows do not matter."""
    shape = call.logits.shape
    return scales(call) or all(facts.contiguous and facts.shape == shape for facts in inputs_of(call).values())


def reduces(call: Call) -> bool:
    """Whether the call is a forward that sums its elements."""
    return call.has("loss") and call.reduction != "none"


def scales(call: Call) -> bool:
    """Whether the call is a backward that multiplies what forward saved, and reads nothing else."""
    return call.has("unit") and not call.has("loss")


def formula(*limits: Limit) -> tuple[Limit, ...]:
    """`limits` where they matter: a backward that has what forward saved does not look at the inputs."""
    return tuple(lambda call, limit=limit: () if scales(call) else limit(call) for limit in limits)


def as_saved(call: Call) -> Iterable[Reason]:
    """What forward saved is read as it lies there."""
    if scales(call) and not call.unit.contiguous:
        yield Reason("unit", f"strides {list(call.unit.stride)} are not contiguous", "unit.contiguous() would do")


def keeps_nothing(call: Call) -> Iterable[Reason]:
    """What forward saves is its own gradient, which torch's function does not give."""
    if call.has("unit"):
        yield Reason("gradient", "does not form the gradient beside the loss", "use torch.no_grad()")


def divisor(call: Call) -> float:
    """What the sum, or its upstream gradient, is divided by."""
    return float(call.logits.numel) if call.reduction == "mean" else 1.0


def triton_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `block` columns and `rows` rows a tile; `num_warps`; `per_sm` programs a multiprocessor where few run."""
    logits: TensorFacts = call.logits
    vector = 16 // logits.dtype.itemsize
    width = logits.numel if is_flat(call) else logits.columns
    width = power_of_2_at_least(width)
    found = []
    for warps, depth, per_sm in ((8, 1, 8), (4, 1, 16), (8, 2, 16), (4, 2, 16), (4, 4, 8)):
        elements = 32 * warps * vector * depth
        block = min(width, elements) if not is_flat(call) else elements
        rows = 1 if is_flat(call) else max(1, elements // block)
        more = {"per_sm": per_sm} if reduces(call) or scales(call) else {}
        found.append(Config(rows=rows, block=block, num_warps=warps, **more))
    return tuple(dict.fromkeys(found))


def tilelang_vector(call: Call) -> int:
    return vector(call.logits.columns, call.logits.dtype.itemsize)


def tilelang_tiles(call: Call, chunk: int) -> int:
    """Blocks of `chunk` vectors that the call has."""
    logits: TensorFacts = call.logits
    rows, columns = (1, logits.numel) if is_flat(call) else (logits.rows, logits.columns)
    return rows * -(-columns // (chunk * tilelang_vector(call)))


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang program counts its blocks in int32."""
    tiles = tilelang_tiles(call, 128)
    if tiles > MOST_BLOCKS:
        yield Reason(
            "logits", f"{call.logits.numel} elements are {tiles} tiles; takes {MOST_BLOCKS}", "split the batch"
        )


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block; `depth` accesses of a thread to each tensor; `per_sm` blocks where few run."""
    more = {"per_sm": 8} if reduces(call) or scales(call) else {}
    vectors = call.logits.columns // tilelang_vector(call)
    wanted: tuple[tuple[int, int], ...] = ((128, 2), (256, 2), (256, 1), (128, 4))
    if not is_flat(call) and vectors <= 64:
        wanted = ((max(32, power_of_2_at_least(vectors)), 1), (128, 1))
    return tuple(Config(threads=threads, depth=depth, **more) for threads, depth in wanted)
