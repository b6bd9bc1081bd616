"""embedding_bag_mean in the library's own tile language: one bag a program, its rows added one after the other."""

from __future__ import annotations

from typing import Any

from tilewright import tile
from tilewright.core.call import Call
from tilewright.core.launch import Config, Launch
from tilewright.ops.tile_rows import Sums, levels_for


@tile.kernel(static={"weight": (1,)})
def bag_mean(t: Any, weight: Any, indices: Any, out: Any, count: Any, padding: Any, strict: bool, levels: int) -> None:
    """out = sum of the rows that count / max(their number, 1). An id that is no row of the table counts for nothing or,
    where that is an error, makes the bag NaN."""
    bag, col = t.program_id(0), t.arange(weight.shape[1])
    sums, number = Sums(t, col.shape, {"rows": out}, levels), t.var(0.0)
    spoilt = t.var(0.0)
    for k in sums.over(0, indices.shape[1]):
        row = t.load(indices[bag, k]).i64()
        inside = (row >= 0) & (row < weight.shape[0])
        counts = inside if padding is None else inside & (row != padding)
        if strict:
            bad = (row < 0) | (row >= weight.shape[0])
            with t.when(bad if padding is None else bad & (row != padding)):
                spoilt.set(float("nan"))
        with t.when(counts):
            sums.add("rows", t.load(weight[row, col]).f32())
            number.set(number.get() + 1.0)
    if count is not None:
        t.store(count[bag], number.get())
    t.store(out[bag, col], (sums["rows"] / t.maximum(number.get(), 1.0) + spoilt.get()).to(out.dtype))


def forward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean."""
    args = {
        "weight": call.weight,
        "indices": call.indices,
        "out": call.out,
        "count": call.tensors.get("count"),
        "padding": call.padding_idx,
    }
    constants = {"strict": call.out_of_range == "error", "levels": levels_for(call.indices.columns)}
    return Launch(bag_mean, (call.indices.rows, 1, 1), args, constants, {"flat": ("count",), "config": config})
