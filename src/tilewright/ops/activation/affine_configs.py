"""How calls of the ops with parameters by column are read and cut, for Triton and TileLang. Needs neither.

Keys of a backward with sums over rows, beside those of `configs`: `per_sm` programs a multiprocessor, which share the
rows; `stages` of Triton's pipeline.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.ops.activation.configs import inputs_of, rows_and_columns, tilelang_vector, tiles
from tilewright.ops.configs import power_of_2_at_least

SUMS = ("dscale", "dbias")


def act_of(call: Call) -> str:
    """The activation after the sum, "" for none."""
    return str(call.options.get("act", ""))


def by_column(call: Call, name: str) -> TensorFacts | None:
    """A parameter that has one number a column, where it is given."""
    facts = call.tensors.get(name)
    return facts if facts is not None and len(facts.shape) == 1 else None


def residual_of(call: Call) -> TensorFacts | None:
    """What is added element by element, where it is given: a residual, or a bias of the shape of x."""
    bias: TensorFacts | None = call.tensors.get("bias")
    return bias if bias is not None and len(bias.shape) > 1 else call.tensors.get("residual")


def row_inputs(call: Call) -> list[TensorFacts]:
    """The tensors of rows that kernels read."""
    found = list(inputs_of(call).values())
    residual = residual_of(call)
    return found if residual is None or residual in found else [*found, residual]


def summed(call: Call) -> dict[str, TensorFacts]:
    """The outputs that are sums over rows, in order."""
    return {name: facts for name in SUMS if name in call.outputs and (facts := call.tensors[name]) is not None}


def by_rows(call: Call) -> bool:
    """Whether rows matter: something is by column, or strides are not dense."""
    apart = by_column(call, "scale") or by_column(call, "bias") or summed(call)
    return bool(apart) or not all(facts.contiguous for facts in row_inputs(call))


def triton_configs(call: Call) -> tuple[Config, ...]:
    shape = rows_and_columns(call)
    if not summed(call):
        return tiles(shape, not by_rows(call))
    access, width = 16 // shape.dtype.itemsize, power_of_2_at_least(shape.columns)
    found = []
    for warps, per_sm, stages in ((4, 4, 3), (2, 16, 2), (8, 4, 2), (4, 8, 1), (4, 8, 3)):
        elements = 32 * warps * access
        block = min(width, elements)
        found.append(Config(rows=elements // block, block=block, num_warps=warps, per_sm=per_sm, stages=stages))
    return tuple(dict.fromkeys(found))


def tilelang_configs(call: Call) -> tuple[Config, ...]:
    """Keys: `threads` a block, `depth` accesses of a thread to each tensor in a row; `per_sm` blocks share the rows."""
    shape = rows_and_columns(call)
    vectors = shape.columns // tilelang_vector(call)
    few = max(32, power_of_2_at_least(vectors))
    wanted: tuple[tuple[int, int], ...] = ((128, 1), (256, 1), (128, 2), (64, 1))
    if vectors <= 64 and by_rows(call):
        wanted = ((few, 1), (128, 1))
    if not summed(call):
        return tuple(Config(threads=threads, depth=depth) for threads, depth in wanted)
    return tuple(
        Config(threads=threads, depth=depth, per_sm=per_sm * 128 // threads or 1)
        for (threads, depth), per_sm in zip(wanted, (8, 8, 8, 12), strict=False)
    )
