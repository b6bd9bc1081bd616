"""How many threads share a row in the TileLang norm kernels, best guess first. Needs no TileLang.

Keys: `lanes` threads a row; `rows` rows a block at a time; `tiles` walks a row in that many tiles (1: registers hold
it). Backward: `per_sm` persistent blocks a multiprocessor; `blocks` bounds the registers so that as many fit; `ahead`
loads a block's next rows while it works on these.
"""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config

MAX_LANES = 1024


def vector(facts: TensorFacts) -> int:
    """Elements of one access: the widest up to 16 bytes that divides the row."""
    width = 16 // facts.dtype.itemsize
    while facts.columns % width:
        width //= 2
    return width


def _lanes(columns: int, vec: int, held: int) -> int:
    """Threads a row, a power of 2, so that each holds about `held` elements."""
    wanted = -(-columns // max(held, vec))
    return min(MAX_LANES, 1 << max(wanted - 1, 0).bit_length())


def _unique(configs: list[Config]) -> tuple[Config, ...]:
    return tuple(dict.fromkeys(configs))


def forward_configs(call: Call) -> tuple[Config, ...]:
    x: TensorFacts = call.x
    vec, columns = vector(x), x.columns
    if columns > 32 * MAX_LANES:
        return tuple(
            Config(lanes=lanes, rows=1, tiles=-(-columns // (lanes * held)))
            for lanes, held in ((512, 32), (1024, 16), (1024, 32))
        )
    found = []
    for held, threads in ((32, 128), (16, 256), (16, 128), (8, 256), (32, 256)):
        # As many bytes in float32, so half the elements: what a thread adds up by itself is where a row sum errs most.
        lanes = _lanes(columns, vec, held * 2 // x.dtype.itemsize)
        found.append(Config(lanes=lanes, rows=max(1, threads // lanes), tiles=1))
    return _unique(found)


def backward_configs(call: Call) -> tuple[Config, ...]:
    x: TensorFacts = call.y if call.op == "l2_norm_backward" else call.x
    vec, columns = vector(x), x.columns
    sums = sum(call.has(name) for name in ("dweight", "dbias", "dpre_bias"))
    size = x.dtype.itemsize / 4
    # Registers for each element that a thread holds: the inputs in their own dtype, the sums in float32.
    words = 3 * size + 1 + sums + (size if call.tensors.get("dh") is not None else 0)
    found = []
    for held, threads, busy, ahead in (
        (8, 256, 1024, 1), (8, 256, 1024, 0), (16, 256, 512, 1), (8, 256, 512, 1), (16, 256, 512, 0), (8, 128, 1024, 1),
    ):  # fmt: skip
        lanes = _lanes(columns, vec, held)
        elements = -(-columns // (lanes * vec)) * vec
        block = max(threads, lanes)
        blocks = max(1, busy // block)
        needed = 28 + elements * (words + ahead * 2 * size)
        if needed > min(255, 1.15 * 65536 / (block * blocks)):
            continue
        found.append(
            Config(lanes=lanes, rows=max(1, threads // lanes), tiles=1, per_sm=blocks, blocks=blocks, ahead=ahead)
        )
    wide = [
        Config(lanes=lanes, rows=1, tiles=-(-columns // (lanes * 16)), per_sm=8)
        for lanes in (512, 1024, 256)
        if columns > lanes * 16
    ]
    return _unique(found + wide[: 1 if found else 3])
