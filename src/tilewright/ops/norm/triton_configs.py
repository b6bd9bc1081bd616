"""How many rows and warps a program of the Triton norm kernels gets, best guess first. Needs no Triton.

Keys: `rows` a tile; `num_warps`; `per_sm` persistent programs a multiprocessor (0: one tile a program); `stages` of the
loop's pipeline; `late` loads weights after the sums; `block` makes the kernel walk the row that many columns at a time.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config


def power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def forward_configs(call: Call) -> tuple[Config, ...]:
    return tuple(dict.fromkeys(_forward_configs(call)))


def _forward_configs(call: Call) -> tuple[Config, ...]:
    x: TensorFacts = call.x
    block = power_of_2_at_least(x.columns)
    size = block * x.dtype.itemsize
    walking = Config(block=4096 if x.dtype.itemsize == 2 else 2048, num_warps=16)
    if size > 131072:
        return (walking, Config(block=8192 if x.dtype.itemsize == 2 else 4096, num_warps=32))
    if size > 65536:
        return (Config(rows=1, num_warps=32, late=1), walking)
    if size > 16384:
        warps = min(32, size // 1024)
        return (
            Config(rows=1, num_warps=warps),
            Config(rows=1, num_warps=warps, late=1),
            Config(rows=1, num_warps=warps // 2, late=1),
            Config(rows=1, num_warps=warps // 2, per_sm=1, stages=3),
        )
    if size > 2048:
        warps = max(2, size // 1024)
        return (
            Config(rows=1, num_warps=warps),
            Config(rows=1, num_warps=max(1, warps // 2)),
            Config(rows=1, num_warps=min(16, warps * 2)),
            Config(rows=2, num_warps=warps),
            Config(rows=1, num_warps=warps, per_sm=4, stages=2),
        )
    one = Config(rows=1, num_warps=max(1, size // 512))
    rows = max(4, min(512, 8192 // max(size, 1)))
    many = (
        Config(rows=rows, num_warps=4),
        Config(rows=rows * 2, num_warps=8),
        Config(rows=rows * 2, num_warps=4),
        Config(rows=max(1, rows // 2), num_warps=4),
    )
    # A warp a row pays once every multiprocessor has several programs; before that one row a program spreads wider.
    return (*many, one) if x.rows > 8 * rows * call.device.multiprocessors else (one, *many)


def backward_configs(call: Call) -> tuple[Config, ...]:
    x: TensorFacts = call.y if call.op == "l2_norm_backward" else call.x
    block = power_of_2_at_least(x.columns)
    size = block * x.dtype.itemsize
    wide = Config(block=4096, dot_warps=8, columns=1024, rows=4, num_warps=4, per_sm=4)
    if size > 32768:
        return (wide, Config(block=8192, dot_warps=16, columns=2048, rows=4, num_warps=8, per_sm=2))
    if size > 16384:
        return (
            Config(rows=1, num_warps=32, per_sm=1, stages=2),
            Config(rows=1, num_warps=16, per_sm=1, stages=2),
            wide,
        )
    if size > 4096:
        warps = size // 1024
        return (
            Config(rows=1, num_warps=warps, per_sm=2, stages=2),
            Config(rows=1, num_warps=warps, per_sm=2, stages=1),
            Config(rows=1, num_warps=warps * 2, per_sm=1, stages=3),
            Config(rows=1, num_warps=warps, per_sm=3, stages=2),
        )
    rows = max(4, min(512, 4096 // size))
    return (
        Config(rows=rows, num_warps=4, per_sm=2, stages=2),
        Config(rows=rows, num_warps=4, per_sm=4, stages=1),
        Config(rows=rows * 2, num_warps=8, per_sm=1, stages=2),
        Config(rows=rows * 2, num_warps=8, per_sm=2, stages=1),
    )
