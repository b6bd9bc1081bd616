"""How a call is cut into programs and threads, for Triton and TileLang, best guess first. Needs neither.

An activation only moves bytes, so a guess is about them: 16 bytes a thread and access, and enough accesses in flight.
An H100 needs some 30 KiB a multiprocessor under way to hide its memory's latency.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.ops.configs import few_blocks, power_of_2_at_least
from tilewright.ops.tilelang_places import vector

ROW_TENSORS = ("dy", "gate", "up", "x", "residual")


def inputs_of(call: Call) -> dict[str, TensorFacts]:
    """The tensors that kernels read, by name."""
    return {n: f for n in ROW_TENSORS if n not in call.outputs and (f := call.tensors.get(n)) is not None}


def kind_of(call: Call) -> str:
    """The activation, as `functions` names it."""
    if "approximate" not in call.options:
        return "silu"
    return "gelu_tanh" if call.approximate == "tanh" else "gelu"


def rows_and_columns(call: Call) -> TensorFacts:
    """The facts whose rows and columns the kernels walk: those of y."""
    found: TensorFacts = call.y if call.has("y") else call.dy
    return found


def packing(call: Call) -> str:
    """How gate and up lie in one tensor: "halves", "pairs" (interleaved), or "" where each is its own."""
    if "interleaved" not in call.options:
        return ""
    return "pairs" if call.interleaved else "halves"


def is_flat(call: Call) -> bool:
    """Whether everything lies in memory as one dense run, so that rows do not matter. Halves alternate row by row."""
    return packing(call) != "halves" and all(facts.contiguous for facts in inputs_of(call).values())


def triton_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `block` columns and `rows` rows a program; `num_warps`."""
    return tiles(rows_and_columns(call), is_flat(call))


def tiles(shape: TensorFacts, flat: bool) -> tuple[Config, ...]:
    """The same for rows of this shape. `flat`: all elements as one row."""
    vector = 16 // shape.dtype.itemsize
    if flat:
        # one, two and four accesses a thread for each tensor
        return tuple(
            Config(rows=1, block=32 * warps * vector * depth, num_warps=warps)
            for warps, depth in ((4, 1), (4, 2), (8, 1), (8, 2), (4, 4))
        )
    width = power_of_2_at_least(shape.columns)
    found = []
    for warps, depth in ((4, 1), (4, 2), (8, 1), (8, 2)):
        elements = 32 * warps * vector * depth
        block = min(width, elements)
        if shape.columns % block and block > 32 * vector:  # a block that divides the row leaves no thread idle
            block = next((b for b in (block, block // 2, block // 4) if shape.columns % b == 0), block)
        found.append(Config(rows=max(1, elements // block), block=block, num_warps=warps))
    return tuple(dict.fromkeys(found))


def tilelang_vector(call: Call) -> int:
    """Elements of one access; of pairs as many are read at once."""
    shape = rows_and_columns(call)
    return vector(shape.columns, shape.dtype.itemsize * (2 if packing(call) == "pairs" else 1))


def few_enough(call: Call) -> Iterable[Reason]:
    """A TileLang program counts its blocks in int32."""
    shape = rows_and_columns(call)
    blocks = -(-shape.columns // (128 * tilelang_vector(call)))
    return few_blocks(next(iter(inputs_of(call))), shape.rows, blocks)


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block; `depth` accesses of a thread to each tensor."""
    wanted: tuple[tuple[int, int], ...] = ((128, 1), (256, 2), (256, 1), (128, 4))
    vectors = rows_and_columns(call).columns // tilelang_vector(call)
    if not is_flat(call) and vectors <= 64:
        wanted = ((max(32, power_of_2_at_least(vectors)), 1), *wanted[:1])
    return tuple(Config(threads=threads, depth=depth) for threads, depth in wanted)
