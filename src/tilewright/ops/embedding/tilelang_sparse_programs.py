"""Device code of embedding_bag_mean_sparse_backward in TileLang: `across` threads share a row, a block has several.

Only `tilelang_sparse.py` beside this file calls it, when a launch is compiled. The columns are compiled in, every other
size is not. (No postponed annotations here: they are values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.embedding.tilelang_programs import wide
from tilewright.ops.tilelang_rows import F32, row_start


def bag_entries(
    *, dtype: str, ids_dtype: str, columns: int, vec: int, across: int, threads: int, ahead: int, dout_levels: int,
    levels: int,
) -> Any:  # fmt: skip
    """ids = the id at each place; values = dout / count of its bag."""
    n = T.dynamic("n", "int64")
    rows = threads // across
    steps = -(-columns // (across * vec))

    @T.prim_func
    def embedding_bag_entries(
        dout: T.Tensor((n,), dtype), indices: T.Tensor((n,), ids_dtype), count: T.Tensor((n,), F32),
        places: T.Tensor((n,), "int64"), ids: T.Tensor((n,), "int64"), values: T.Tensor((n,), dtype),
        dout_inner: T.int64, dout_outer: T.int64, dout_stride: T.int64, dout_step: T.int64, indices_inner: T.int64,
        indices_outer: T.int64, indices_stride: T.int64, indices_step: T.int64, per_bag: T.int64, total: T.int64,
        programs: T.int32,
    ):  # fmt: skip
        with T.Kernel(programs, threads=threads) as block:
            thread = T.get_thread_binding()
            row = T.truncdiv(thread, across)
            lane = T.truncmod(thread, across)
            taken = T.alloc_local((vec,), dtype)
            made = T.alloc_local((vec,), dtype)
            bag = T.alloc_local((1,), "int64")
            many = T.alloc_local((1,), F32)
            for a in T.unroll(ahead):
                entry = wide(block) * (rows * ahead) + (a * rows + row)
                if entry < total:
                    bag[0] = T.truncdiv(places[entry], per_bag)
                    many[0] = T.max(count[bag[0]], T.float32(1.0))
                    if lane == 0:
                        first = row_start(levels, 1, bag[0], (indices_inner, indices_outer, indices_stride))
                        ids[entry] = wide(indices[first + (places[entry] - bag[0] * per_bag) * indices_step])
                    for step in T.unroll(steps):
                        column = (step * across + lane) * vec
                        if column < columns:
                            # written out at each access: the compiler sees that a row starts at a multiple of `vec`
                            row_at = (dout_inner, dout_outer, dout_stride)
                            if vec > 1:
                                for v in T.vectorized(vec):
                                    taken[v] = dout[row_start(dout_levels, vec, bag[0], row_at) + (column + v)]
                            else:
                                taken[0] = dout[row_start(dout_levels, 1, bag[0], row_at) + column * dout_step]
                            for v in T.unroll(vec):
                                made[v] = T.Cast(dtype, T.Cast(F32, taken[v]) / many[0])
                            for v in T.vectorized(vec):
                                values[entry * columns + column + v] = made[v]

    return embedding_bag_entries
