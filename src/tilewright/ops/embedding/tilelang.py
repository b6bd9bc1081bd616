"""How TileLang runs the embedding family: the launches of either pass, worked out from a call's facts.

The programs are in `tilelang_programs`, which imports TileLang and is loaded when a launch is compiled. The gradient is
the sorted one of `triton_backward`; here torch also makes the keys and the starts of the segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch, Stage, TorchStep
from tilewright.ops.embedding.bag import masks
from tilewright.ops.embedding.configs import position_dtype, vector
from tilewright.ops.tilelang_places import NAMES, row_places

_HERE = "tilewright.ops.embedding.tilelang_programs"
MEAN = Program(f"{_HERE}:bag_mean")
CHUNKS = Program(f"{_HERE}:chunk_sums")
SEGMENTS = Program(f"{_HERE}:segment_sums")


def forward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean."""
    weight, indices = call.weight, call.indices
    cut, blocks = _cut(weight, config)
    programs = indices.rows * blocks
    constants = {
        **cut,
        "ids_dtype": NAMES[indices.dtype],
        "levels": len(indices.row_levels),
        "has_padding": call.padding_idx is not None,
        "nan": call.out_of_range == "error",
        "save": call.saving,
    }
    args: dict[str, Argument] = {
        "weight": weight,
        "indices": indices,
        "out": call.out,
        "count": call["count"],
        "weight_stride": weight.row_levels[-1][1] // cut["unit"],
        **row_places("indices", indices, 1),
        "ids": indices.columns,
        "table_rows": weight.rows,
        "padding": 0 if call.padding_idx is None else call.padding_idx,
        "programs": programs,
    }
    return Launch(MEAN, (programs, 1, 1), args, constants)


def segments(
    indices: Tensor, in_order: Tensor, order: Tensor, starts: Tensor, padding_idx: int | None, rows: int
) -> None:
    """Occurrences sorted by their id, those that do not count last, and where each row's segment starts."""
    counted, _ = masks(indices, rows, padding_idx)
    keys = torch.where(counted, indices, rows).to(in_order.dtype).reshape(-1)
    torch.sort(keys, stable=True, out=(in_order, order))
    every = torch.arange(rows + 1, dtype=in_order.dtype, device=in_order.device)
    torch.searchsorted(in_order, every, out_int32=starts.dtype == torch.int32, out=starts)


def backward(call: Call, config: Config) -> tuple[Stage, ...]:
    """embedding_bag_mean_backward, sorted and deterministic."""
    indices, dout, dweight = call.indices, call.dout, call.dweight
    total = indices.numel
    in_order = Scratch("in_order", (total,), position_dtype(dweight.rows))
    order = Scratch("order", (total,), torch.int64)
    starts = Scratch("starts", (dweight.rows + 1,), position_dtype(total))
    whole = total // config.chunk
    partials = Scratch("partials", (max(whole, 1), dweight.columns))
    cut, blocks = _cut(dout, config)
    cut |= {"levels": len(dout.row_levels), "chunk": config.chunk}
    args: dict[str, Argument] = {
        "dout": dout,
        "count": call["count"],
        "order": order,
        "partials": partials,
        **row_places("dout", dout, cut["unit"]),
        "ids": indices.columns,
    }
    sort = {"indices": indices, "in_order": in_order, "order": order, "starts": starts}
    stages: list[Stage] = [
        TorchStep(segments, {**sort, "padding_idx": call.padding_idx, "rows": dweight.rows}),
    ]
    if whole:
        grid = whole * blocks
        more: dict[str, Argument] = {"keys": in_order, "table_rows": dweight.rows, "programs": grid}
        stages.append(Launch(CHUNKS, (grid, 1, 1), args | more, {**cut, "key_dtype": NAMES[in_order.dtype]}))
    grid = dweight.rows * blocks
    more = {"starts": starts, "dweight": dweight, "programs": grid}
    constants = {**cut, "start_dtype": NAMES[starts.dtype], "chunked": whole > 0}
    stages.append(Launch(SEGMENTS, (grid, 1, 1), args | more, constants))
    return tuple(stages)


def _cut(facts: TensorFacts, config: Config) -> tuple[dict[str, Any], int]:
    """The constants by which a block takes its columns of `facts`, and the blocks of a row. `unit` is what strides are
    counted in: the vector, so that the compiler sees that every row starts at a multiple of it."""
    vec = vector(facts)
    while vec > 1 and facts.columns // vec < config.threads:  # a thread less would wait
        vec //= 2
    span = config.threads * vec
    width = span * min(config.depth, -(-facts.columns // span))
    constants = {
        "dtype": NAMES[facts.dtype],
        "columns": facts.columns,
        "width": width,
        "vec": vec,
        "threads": config.threads,
        "ahead": config.ahead,
        "unit": vec,
    }
    return constants, -(-facts.columns // width)
