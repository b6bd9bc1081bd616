"""How the hand-written CUDA norm kernels spread a row over blocks, best guess first, and which rows they refuse.

Config keys: `threads` a block; `cluster`, blocks a row; `ctas`, blocks a multiprocessor, which sets the registers a
thread may have; `stages`, rows that the copy engine keeps in flight for a block (forward only: 0 loads straight into
registers, one row a cluster); `reread`, the row stays in shared memory and leaves the registers free. The order was
measured on an H100. The launches themselves are in `cuda.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config
from tilewright.core.reason import Reason

MAX_CLUSTER = 8
"""What every part grants; 16 must be asked for and leaves multiprocessors idle."""
SHARED_BYTES, STATIC_BYTES = 228 << 10, 4 << 10
"""Shared memory of a multiprocessor, and what a block takes of it beside its stages (1 KiB is the system's)."""
REGISTERS = 65536
SUMS = ("dweight", "dbias", "dpre_bias")
"""The gradients that are sums over rows, in the order of the partial sums."""


def fits_forward(call: Call) -> Iterable[Reason]:
    """Refuses rows that no cluster can hold."""
    if not forward_configs(call):
        yield Reason("x", f"rows of {row_bytes(call.x)} bytes do not fit the registers of {MAX_CLUSTER} blocks")


def fits_backward(call: Call) -> Iterable[Reason]:
    """Refuses a missing dy, and rows whose column sums no cluster can hold."""
    if not call.has("dy"):
        yield Reason("dy", "is missing")
    if not backward_configs(call):
        yield Reason("x", f"rows of {row_bytes(call.x)} bytes do not fit the registers of {MAX_CLUSTER} blocks")


FORWARD_SPREADS = (
    (512, 4, 0, 2), (256, 4, 1, 8, 1), (512, 8, 1, 3, 1), (1024, 8, 0, 1), (256, 8, 0, 2), (1024, 4, 0, 1),
    (512, 2, 2, 3), (512, 2, 0, 3), (512, 4, 1, 3),
)  # fmt: skip
"""Threads a block, most packets of 16 bytes a thread, stages, blocks a multiprocessor, whether it is read again."""
LONG = 4096
"""Packets of a row from which on rows left in shared memory win, however many blocks they are spread over."""


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Ways to spread a row, over few blocks first: an exchange costs more than it overlaps, unless more blocks then
    share a multiprocessor and there is but one exchange (a centred norm has two). Empty where none fits."""
    found = [config for spread in FORWARD_SPREADS if (config := forward_config(call, *spread))]
    long, centred = packets(call.x) > LONG, call.op in ("layer_norm", "add_layer_norm")

    def order(config: Config) -> tuple[int, int]:
        first = long and "reread" in config
        return (0 if first else config.cluster, config.cluster if centred else 0)

    return tuple(sorted(dict.fromkeys(found), key=order))[:4]


def forward_config(call: Call, threads: int, per_thread: int, stages: int, ctas: int, reread: int = 0) -> Config | None:
    """A row over as few blocks as hold it with `per_thread` packets a thread; None where that does not fit."""
    x: TensorFacts = call.x
    inputs = 2 if call.has("residual") else 1
    cluster = cluster_of(x, threads * per_thread)
    share = math.ceil(packets(x) / cluster)
    registers = 24 + 4 * math.ceil(share / threads) * (1 if stages else inputs)  # 4 a packet
    if reread:  # one packet at a time, and the parameters of two
        registers = 16 + 8 * sum(math.ceil(t.dtype.itemsize / x.dtype.itemsize) for t in affine_of(call))
    fits = (
        cluster <= MAX_CLUSTER
        and registers <= registers_of(threads, ctas)
        and ctas * (stages * inputs * share * 16 + STATIC_BYTES) <= SHARED_BYTES
        and (stages == 0 or vector_of(call) == per_packet(x))
    )
    if not fits:
        return None
    return Config(threads=threads, cluster=cluster, stages=stages, ctas=ctas, **({"reread": 1} if reread else {}))


BACKWARD_SPREADS = ((512, 16, 3, 1), (512, 32, 3, 1), (512, 16, 2, 2), (256, 32, 4, 1), (1024, 16, 3, 1))
"""Threads a block, most columns a thread, most stages, blocks a multiprocessor."""


def backward_configs(call: Call) -> tuple[Config, ...]:
    """Ways to spread a row and its column sums, best guess first; empty where none fits."""
    found = [config for spread in BACKWARD_SPREADS if (config := backward_config(call, *spread))]
    # in pairs of blocks, a second pair on the two multiprocessors hides the first one's exchange
    return tuple(sorted(dict.fromkeys(found), key=lambda config: (config.cluster, config.ctas) != (2, 2)))[:4]


def backward_config(call: Call, threads: int, columns: int, stages: int, ctas: int) -> Config | None:
    """A row over as few blocks as hold it with `columns` a thread; None where registers or shared memory do not do."""
    x: TensorFacts = call.x
    cluster = cluster_of(x, threads * columns // per_packet(x))
    share = math.ceil(packets(x) / cluster)
    kept = math.ceil(share / threads) * per_packet(x) * sum(call.has(name) for name in SUMS)
    stages = min(stages, (SHARED_BYTES // ctas - STATIC_BYTES) // ((3 if call.has("dh") else 2) * share * 16))
    fits = cluster <= MAX_CLUSTER and stages > 0 and kept + 30 <= registers_of(threads, ctas)
    return Config(threads=threads, cluster=cluster, stages=stages, ctas=ctas) if fits else None


def per_packet(x: TensorFacts) -> int:
    return 16 // x.dtype.itemsize


def packets(x: TensorFacts) -> int:
    return math.ceil(x.columns / per_packet(x))


def row_bytes(x: TensorFacts) -> int:
    return x.columns * x.dtype.itemsize


def cluster_of(x: TensorFacts, most: int) -> int:
    """Blocks a row when each takes at most `most` packets: a power of two."""
    blocks = math.ceil(packets(x) / most)
    return 1 << (blocks - 1).bit_length()


def affine_of(call: Call) -> Iterable[TensorFacts]:
    return [facts for name in ("weight", "bias") if (facts := call.tensors.get(name)) is not None]


def registers_of(threads: int, ctas: int) -> int:
    """Registers a thread may have when `ctas` blocks share a multiprocessor."""
    return min(255, REGISTERS // (threads * ctas) // 8 * 8)


def vector_of(call: Call) -> int:
    """Elements that one access may take, in every tensor of the call: a power of two."""
    x: TensorFacts = call.x
    vector = math.gcd(per_packet(x), x.columns)
    for facts in call.tensors.values():
        if facts is not None and facts.shape and facts.columns == x.columns:
            # a type of twice the width takes two accesses of 16 bytes
            widest = min(16, per_packet(x) * facts.dtype.itemsize)
            if facts.vector_bytes() < widest:
                vector = math.gcd(vector, max(1, facts.vector_bytes() // facts.dtype.itemsize))
    return vector
