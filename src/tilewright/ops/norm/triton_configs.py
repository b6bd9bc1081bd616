"""How many rows and warps a program of the Triton norm kernels gets, best guess first. Needs no Triton.

Keys: `rows` a tile; `num_warps`; `per_sm` persistent programs a multiprocessor (0: one tile a program); `stages` of the
loop's pipeline; `late` loads weights after the sums; `block` makes the kernel walk the row that many columns at a time;
`few` is for so few rows that the time of one counts: weights are fetched with the row, and the caches get no hints.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config


def power_of_2_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Measured on an H100 at 1024 to 65536 columns of bf16; other sizes follow the row's bytes."""
    x: TensorFacts = call.x
    block = power_of_2_at_least(x.columns)
    size = block * x.dtype.itemsize
    centred = call.op in ("layer_norm", "add_layer_norm")
    residual = "residual" in call.tensors
    bucket = power_of_2_at_least(x.rows)  # classes of calls tell no more
    few = bucket <= call.device.multiprocessors
    walking = Config(block=32768 // x.dtype.itemsize, num_warps=16)
    if size > 131072:
        return (walking, Config(block=16384 // x.dtype.itemsize, num_warps=32))
    if size > 65536:
        whole = (_row(16, late=1), _row(32, late=1))
        return (walking, *whole) if residual else (*whole, walking)
    if size > 16384:
        found: tuple[Config, ...] = (_row(16, late=1), _row(8, late=1), _row(32, late=1), _row(32))
        return (found[1], found[0], *found[2:]) if centred else found
    if size > 8192:
        found = (_row(4, late=1), _row(16), _row(8), _row(8, late=1))
        return (_row(8, few=1), _row(16, few=1), *found) if few else found
    if size > 1024 and bucket <= 8 * call.device.multiprocessors:
        found = (_row(1), _row(2), _row(4), _row(8)) if residual else (_row(4), _row(8), _row(2), _row(1))
        return (_row(4, few=1), _row(8, few=1), _row(1, few=1), *found) if few else (*found, _row(4, few=1))
    if size > 2048:
        found = (_row(4), _row(8), _row(2), _row(1), _row(4, late=1), _row(16))
        return found if centred or size <= 4096 else (found[1], found[0], *found[2:])
    if size > 1024:
        found = (
            Config(rows=8, num_warps=8),
            Config(rows=4, num_warps=4),
            _row(4),
            _row(1),
            Config(rows=2, num_warps=2),
        )
        return (found[3], found[4], *found[:3]) if centred else found
    # Narrow rows: a warp each, several warps a program, several rows a warp until a thread has 16 bytes.
    rows = max(4, min(512, 8192 // size))
    found = (
        Config(rows=rows, num_warps=4),
        Config(rows=rows * 2, num_warps=4),
        Config(rows=rows * 2, num_warps=8),
        Config(rows=4, num_warps=4),
    )
    return (Config(rows=4, num_warps=4, few=1), Config(rows=1, num_warps=1, few=1), *found) if few else found


def _row(num_warps: int, **more: int) -> Config:
    return Config(rows=1, num_warps=num_warps, **more)


def backward_configs(call: Call) -> tuple[Config, ...]:
    """As `forward_configs`. Few rows leave nothing to pipeline."""
    x: TensorFacts = call.y if call.op == "l2_norm_backward" else call.x
    block = power_of_2_at_least(x.columns)
    size = block * x.dtype.itemsize
    wide = (
        Config(block=8192, dot_warps=8, columns=512, rows=4, num_warps=4, per_sm=4),
        Config(block=4096, dot_warps=8, columns=2048, rows=1, num_warps=8, per_sm=4),
    )
    few = x.rows < 16 * call.device.multiprocessors
    if size > 32768:
        return wide
    if size > 16384:
        return (_row(8, per_sm=1, stages=1), _row(16, per_sm=1, stages=1), _row(32, per_sm=1, stages=1), wide[0])
    if size > 8192:
        found: tuple[Config, ...] = (
            _row(8, per_sm=1, stages=4),
            _row(32, per_sm=1, stages=3),
            _row(16, per_sm=1, stages=3),
        )
        return (_row(16, per_sm=1, stages=1), *found) if few else found
    if size > 4096:
        found = (
            _row(4, per_sm=2, stages=3), _row(16, per_sm=2, stages=3),
            _row(8, per_sm=2, stages=3), _row(8, per_sm=1, stages=3),
        )  # fmt: skip
        return (_row(8, per_sm=2, stages=1), *found) if few else found
    if size > 1024:
        if few:
            return (
                _row(8, per_sm=3, stages=1),
                _row(8, per_sm=2, stages=1),
                _row(4, per_sm=4, stages=1),
                _row(2, per_sm=8, stages=1),
            )
        return (
            _row(4, per_sm=6, stages=3),
            _row(2, per_sm=8, stages=3),
            _row(1, per_sm=8, stages=3),
            _row(4, per_sm=4, stages=2),
        )
    rows = max(4, min(512, 8192 // size))
    return (
        Config(rows=rows, num_warps=4, per_sm=4, stages=1),
        Config(rows=rows, num_warps=4, per_sm=2, stages=2),
        Config(rows=4, num_warps=4, per_sm=8, stages=2),
        Config(rows=rows * 2, num_warps=8, per_sm=2, stages=1),
    )
