"""How a call is cut into programs and threads, for Triton and TileLang, best guess first. Needs neither.

What the configs of one call class have in common is their keys: one that was found for many rows serves a single one.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import few_blocks, power_of_2_at_least
from tilewright.ops.tilelang_places import vector

INPUTS = ("dy", "x", "gate", "residual")


def inputs_of(call: Call) -> dict[str, TensorFacts]:
    """The tensors that kernels read element by element, by name."""
    return {n: f for n in INPUTS if n not in call.outputs and (f := call.tensors.get(n)) is not None}


def shape_of(call: Call) -> TensorFacts:
    """The facts whose rows and columns the kernels walk."""
    found: TensorFacts = call.x if call.has("x") else call.dy
    return found


def is_flat(call: Call) -> bool:
    """Whether everything lies in memory as one dense run, so that rows do not matter: to a mask, drawn by row and
    column, they do."""
    shape = shape_of(call).shape
    dense = all(facts.contiguous and facts.shape == shape for facts in inputs_of(call).values())
    return dense and "p" not in call.options


def gate_of(call: Call) -> str:
    """How the gate is broadcast: "none" (it has the shape of x), "rows" (it is [C]) or "columns" ([..., 1])."""
    gate: TensorFacts = call.gate
    if gate.shape == call.x.shape:
        return "none"
    return "rows" if len(gate.shape) == 1 else "columns"


def sum_of(call: Call) -> str:
    """Over what the gate's gradient is summed: "rows", "columns" or "none"."""
    return gate_of(call) if call.has("dgate") else "none"


def triton_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `block` columns and `rows` rows a tile; `num_warps`; `per_sm` programs a multiprocessor where rows are
    summed."""
    shape, flat = shape_of(call), is_flat(call)
    lanes = 16 // shape.dtype.itemsize
    found = []
    # a mask is drawn four columns at once; two rows a tile, by which its counters serve twice, were the fastest
    # on Hopper (docs/notes), so they come first
    draws = "p" in call.options
    drawing = ((4, 2, 8), (8, 2, 4), (2, 2, 16), (4, 4, 8), (4, 1, 8))
    for warps, depth, per_sm in drawing if draws else ((4, 1, 8), (4, 2, 8), (8, 1, 4), (8, 2, 4), (2, 1, 16)):
        elements = 32 * warps * lanes * depth
        widest = elements // 2 if draws else elements
        block = elements if flat else min(max(4, power_of_2_at_least(shape.columns)), widest)
        if shape.columns % block and block > 32 * lanes:  # a block that divides the row leaves no thread idle
            block = next((b for b in (block, block // 2, block // 4) if shape.columns % b == 0), block)
        found.append(Config(rows=max(1, elements // block), block=block, num_warps=warps, per_sm=per_sm))
    return tuple(dict.fromkeys(found))


def tilelang_vector(call: Call) -> int:
    return vector(shape_of(call).columns, shape_of(call).dtype.itemsize)


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang program counts its blocks in int32."""
    shape = shape_of(call)
    blocks = -(-shape.columns // (128 * tilelang_vector(call)))
    return few_blocks(shape.name, shape.rows, blocks)


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block; `depth` accesses of a thread to each tensor."""
    wanted: tuple[tuple[int, int], ...] = ((128, 1), (256, 1), (256, 2), (128, 4))
    vectors = shape_of(call).columns // tilelang_vector(call)
    if not is_flat(call) and vectors <= 64:
        wanted = ((max(32, power_of_2_at_least(vectors)), 1), (128, 1))
    return tuple(Config(threads=threads, depth=depth) for threads, depth in wanted)
