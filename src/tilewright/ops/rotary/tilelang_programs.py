"""Device code of rope and its gradient in TileLang: a block has a token, a thread a pair of columns at a time.

Only `tilelang.py` beside this file calls it, when a launch is compiled. (No postponed annotations here: they are
values.)
"""

from typing import Any

import tilelang.language as T

from tilewright.ops.tilelang_rows import f32


def turn(
    *, dtype: str, table_dtype: str, half: int, width: int, ids_dtype: str, has_ids: bool, interleaved: bool,
    back: bool, threads: int, dense: bool,
) -> Any:  # fmt: skip
    """y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, the sines negated on the way `back`; the rest is copied. A token
    without a row in the tables is NaN, and 0 on the way back. (In C `cos` and `sin` are functions.)"""
    n = T.dynamic("n", "int64")
    rest = width - 2 * half
    sign = -1.0 if back else 1.0

    def column(place: Any, step: Any) -> Any:
        return place if dense else place * step

    @T.prim_func
    def turn(
        x: T.Tensor((n,), dtype), cosines: T.Tensor((n,), table_dtype), sines: T.Tensor((n,), table_dtype),
        position_ids: T.Tensor((n,), ids_dtype), y: T.Tensor((n,), dtype),
        x_batch: T.int64, x_token: T.int64, x_head: T.int64, x_step: T.int64, cos_row: T.int64, cos_step: T.int64,
        sin_row: T.int64, sin_step: T.int64, ids_batch: T.int64, ids_token: T.int64, seq: T.int64, table_rows: T.int64,
        heads: T.int64, tokens: T.int32,
    ):  # fmt: skip
        with T.Kernel(tokens, threads=threads) as block:
            batch = T.Cast("int64", T.truncdiv(block, T.Cast("int32", seq)))
            token = T.Cast("int64", T.truncmod(block, T.Cast("int32", seq)))
            start = batch * x_batch + token * x_token
            out = T.Cast("int64", block) * (heads * width)
            row = T.alloc_local((1,), "int64")
            row[0] = token
            if has_ids:
                row[0] = T.Cast("int64", position_ids[batch * ids_batch + token * ids_token])
            known = (row[0] >= 0) & (row[0] < table_rows)
            place = T.if_then_else(known, row[0], T.int64(0))
            outside = T.if_then_else(known, T.float32(0.0), T.float32(0.0 if back else float("nan")))
            for turn_ in T.serial(T.ceildiv(heads * half, T.int64(threads))):
                for j in T.Parallel(threads):
                    pair = turn_ * threads + j
                    if pair < heads * half:
                        head, i = T.truncdiv(pair, T.int64(half)), T.truncmod(pair, T.int64(half))
                        first = i * 2 if interleaved else i
                        second = first + (1 if interleaved else half)
                        c = f32(cosines[place * cos_row + i * cos_step])
                        s = f32(sines[place * sin_row + i * sin_step]) * T.float32(sign)
                        a = f32(x[start + head * x_head + column(first, x_step)])
                        b = f32(x[start + head * x_head + column(second, x_step)])
                        y[out + head * width + first] = T.Cast(dtype, T.if_then_else(known, a * c - b * s, outside))
                        y[out + head * width + second] = T.Cast(dtype, T.if_then_else(known, b * c + a * s, outside))
            if rest > 0:
                for turn_ in T.serial(T.ceildiv(heads * rest, T.int64(threads))):
                    for j in T.Parallel(threads):
                        one = turn_ * threads + j
                        if one < heads * rest:
                            head, i = T.truncdiv(one, T.int64(rest)), T.truncmod(one, T.int64(rest)) + 2 * half
                            a = f32(x[start + head * x_head + column(i, x_step)])
                            y[out + head * width + i] = T.Cast(dtype, T.if_then_else(known, a, outside))

    return turn
