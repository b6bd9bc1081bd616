"""How hand-written CUDA C++ does norms of wide rows on Hopper and later: launches of `norm_wide.cu` (forward) and
`norm_wide_backward.cu`.

A row is spread over a cluster of up to 8 blocks, so it is read once and written once at any width up to 131072. Here
are the choice of configs, the limits of the kernels and their launches; the mathematics is in the sources.

Config keys: `threads` a block; `cluster`, blocks a row; `ctas`, blocks a multiprocessor, which sets the registers a
thread may have; `stages`, rows that the copy engine keeps in flight for a block (forward only: 0 loads straight into
registers, one row a cluster).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from tilewright.backends.cuda import Source
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.core.reason import Reason

FORWARD = Source(Path(__file__).with_name("norm_wide.cu"), "norm_wide")
BACKWARD = Source(Path(__file__).with_name("norm_wide_backward.cu"), "norm_wide_backward")
WEIGHTS = Source(Path(__file__).with_name("norm_wide_backward.cu"), "norm_wide_weights")

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MAX_CLUSTER = 8
"""What every part grants; 16 must be asked for and leaves multiprocessors idle."""
SHARED_BYTES, STATIC_BYTES = 228 << 10, 4 << 10
"""Shared memory of a multiprocessor, and what a block takes of it beside its stages (1 KiB is the system's)."""
REGISTERS = 65536
WEIGHT_COLUMNS = 32
"""Columns a block of `norm_wide_weights`."""


# Limits -----------------------------------------------------------------------------------------------------------


def fits_forward(call: Call) -> Iterable[Reason]:
    """Refuses rows that no cluster can hold."""
    if not forward_configs(call):
        yield Reason("x", f"rows of {_row_bytes(call.x)} bytes do not fit the registers of {MAX_CLUSTER} blocks")


def fits_backward(call: Call) -> Iterable[Reason]:
    """Refuses a missing dy, and rows whose column sums no cluster can hold."""
    if not call.has("dy"):
        yield Reason("dy", "is missing")
    if not backward_configs(call):
        yield Reason("x", f"rows of {_row_bytes(call.x)} bytes do not fit the registers of {MAX_CLUSTER} blocks")


# Forward ----------------------------------------------------------------------------------------------------------


FORWARD_SPREADS = ((512, 4, 0, 3), (512, 4, 1, 3), (512, 4, 2, 2), (256, 4, 0, 6), (512, 8, 0, 1), (1024, 4, 0, 1))
"""Threads a block, most packets of 16 bytes a thread, stages, blocks a multiprocessor."""


def forward_configs(call: Call) -> tuple[Config, ...]:
    """Ways to spread a row, best guess first; empty where none fits."""
    found = [config for spread in FORWARD_SPREADS if (config := forward_config(call, *spread))]
    return tuple(dict.fromkeys(found))[:4]


def forward_config(call: Call, threads: int, per_thread: int, stages: int, ctas: int) -> Config | None:
    """A row over as few blocks as hold it with `per_thread` packets a thread; None where that does not fit."""
    x: TensorFacts = call.x
    inputs = 2 if call.has("residual") else 1
    cluster = _cluster(x, threads * per_thread)
    share = math.ceil(_packets(x) / cluster)
    held = math.ceil(share / threads) * (1 if stages else inputs)  # packets of 4 registers
    fits = (
        cluster <= MAX_CLUSTER
        and 4 * held + 24 <= _registers(threads, ctas)
        and ctas * (stages * inputs * share * 16 + STATIC_BYTES) <= SHARED_BYTES
        and (stages == 0 or _vector(call) == _per_packet(x))
    )
    return Config(threads=threads, cluster=cluster, stages=stages, ctas=ctas) if fits else None


def forward(call: Call, config: Config) -> Launch:
    """rms_norm, add_rms_norm, layer_norm and add_layer_norm."""
    x: TensorFacts = call.x
    centered = call.op in ("layer_norm", "add_layer_norm")
    residual, pre_bias = call.tensors.get("residual"), call.tensors.get("pre_bias")
    weight, bias = call.tensors.get("weight"), call.tensors.get("bias")
    clusters = _clusters(call, config) if config.stages else x.rows
    share = math.ceil(_packets(x) / config.cluster)
    inputs = 1 if residual is None else 2
    args: dict[str, Argument] = {
        "x": x,
        "residual": residual,
        "pre_bias": pre_bias,
        "weight": weight,
        "bias": bias,
        "y": call.y,
        "h": call.tensors.get("h"),
        "mean": call.tensors.get("mean"),
        "rstd": call.tensors.get("rstd"),
        "rows": x.rows,
        "x_stride": _row_stride(x),
        "residual_stride": _row_stride(residual),
        "eps": float(call.eps),
        "weight_offset": float(call.options.get("weight_offset", 0.0)),
    }
    return Launch(
        FORWARD,
        (clusters * config.cluster, 1, 1),
        args,
        {
            "ELEMENT": TYPES[x.dtype],
            "WEIGHT": _type(weight, x),
            "BIAS": _type(bias, x),
            "PRE_BIAS": _type(pre_bias, x),
            "COLUMNS": x.columns,
            "VECTOR": _vector(call),
            "THREADS": config.threads,
            "CLUSTER": config.cluster,
            "STAGES": config.stages,
            "CTAS": config.ctas,
            "CENTER": centered,
            "HAS_RESIDUAL": residual is not None,
            "HAS_PRE_BIAS": pre_bias is not None,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "CAST_BEFORE_WEIGHT": bool(call.options.get("cast_before_weight", False)),
            "SAVE": call.has("rstd"),
        },
        {
            "block": config.threads,
            "shared": config.stages * inputs * share * 16,
            "cluster": (config.cluster, 1, 1),
        },
    )


# Backward ---------------------------------------------------------------------------------------------------------

SUMS = ("dweight", "dbias", "dpre_bias")
"""The gradients that are sums over rows, in the order of the partial sums."""


BACKWARD_SPREADS = ((512, 16, 4, 2), (1024, 16, 4, 1), (512, 32, 4, 1), (256, 16, 4, 4), (256, 32, 4, 2))
"""Threads a block, most columns a thread, most stages, blocks a multiprocessor."""


def backward_configs(call: Call) -> tuple[Config, ...]:
    """Ways to spread a row and its column sums, best guess first; empty where none fits."""
    found = [config for spread in BACKWARD_SPREADS if (config := backward_config(call, *spread))]
    return tuple(dict.fromkeys(found))[:4]


def backward_config(call: Call, threads: int, columns: int, stages: int, ctas: int) -> Config | None:
    """A row over as few blocks as hold it with `columns` a thread; None where registers or shared memory do not do."""
    x: TensorFacts = call.x
    cluster = _cluster(x, threads * columns // _per_packet(x))
    share = math.ceil(_packets(x) / cluster)
    kept = math.ceil(share / threads) * _per_packet(x) * sum(call.has(name) for name in SUMS)
    stages = min(stages, (SHARED_BYTES // ctas - STATIC_BYTES) // ((3 if call.has("dh") else 2) * share * 16))
    fits = cluster <= MAX_CLUSTER and stages > 0 and kept + 30 <= _registers(threads, ctas)
    return Config(threads=threads, cluster=cluster, stages=stages, ctas=ctas) if fits else None


def rms_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """rms_norm_backward: the gradient of rms_norm and, with dh, of add_rms_norm."""
    return _backward(call, config, centered=False)


def layer_backward(call: Call, config: Config) -> tuple[Launch, ...]:
    """layer_norm_backward: the gradient of layer_norm and, with dh and pre_bias, of add_layer_norm."""
    return _backward(call, config, centered=True)


def _backward(call: Call, config: Config, *, centered: bool) -> tuple[Launch, ...]:
    x: TensorFacts = call.x
    weight, dh = call.tensors.get("weight"), call.tensors.get("dh")
    sums: list[TensorFacts] = [call[name] for name in SUMS if call.has(name)]
    clusters = _clusters(call, config)
    share = math.ceil(_packets(x) / config.cluster)
    partial = Scratch("partial_sums", (len(sums), clusters, x.columns)) if sums else None
    args: dict[str, Argument] = {
        "dy": call.dy,
        "x": x,
        "weight": weight,
        "mean": call.mean if centered else None,
        "rstd": call.rstd,
        "dh": dh,
        "dx": call.tensors.get("dx"),
        "partial": partial,
        "rows": x.rows,
        "dy_stride": _row_stride(call.dy),
        "x_stride": _row_stride(x),
        "dh_stride": _row_stride(dh),
        "weight_offset": float(call.options.get("weight_offset", 0.0)),
    }
    main = Launch(
        BACKWARD,
        (clusters * config.cluster, 1, 1),
        args,
        {
            "ELEMENT": TYPES[x.dtype],
            "WEIGHT": _type(weight, x),
            "COLUMNS": x.columns,
            "THREADS": config.threads,
            "CLUSTER": config.cluster,
            "STAGES": config.stages,
            "CTAS": config.ctas,
            "CENTER": centered,
            "HAS_WEIGHT": weight is not None,
            "HAS_DH": dh is not None,
            "CAST_BEFORE_WEIGHT": bool(call.options.get("cast_before_weight", False)),
            "NEEDS_DX": call.has("dx"),
            "NEEDS_DWEIGHT": call.has("dweight"),
            "NEEDS_DBIAS": call.has("dbias"),
            "NEEDS_DPRE_BIAS": call.has("dpre_bias"),
        },
        {
            "block": config.threads,
            "shared": config.stages * (2 if dh is None else 3) * share * 16,
            "cluster": (config.cluster, 1, 1),
        },
    )
    if partial is None:
        return (main,)
    outputs = [sums[min(i, len(sums) - 1)] for i in range(len(SUMS))]  # beyond the last: never written
    last = Launch(
        WEIGHTS,
        (math.ceil(x.columns / WEIGHT_COLUMNS), len(sums), 1),
        {"partial": partial, **{f"output{i}": facts for i, facts in enumerate(outputs)}, "parts": clusters},
        {"COLUMNS": x.columns, **{f"OUTPUT{i}": TYPES[facts.dtype] for i, facts in enumerate(outputs)}},
        {"block": 512},
    )
    return main, last


# Facts ------------------------------------------------------------------------------------------------------------


def _per_packet(x: TensorFacts) -> int:
    return 16 // x.dtype.itemsize


def _packets(x: TensorFacts) -> int:
    return math.ceil(x.columns / _per_packet(x))


def _row_bytes(x: TensorFacts) -> int:
    return x.columns * x.dtype.itemsize


def _row_stride(facts: TensorFacts | None) -> int:
    return facts.row_levels[-1][1] if facts is not None else 0


def _type(facts: TensorFacts | None, x: TensorFacts) -> str:
    return TYPES[x.dtype if facts is None else facts.dtype]


def _cluster(x: TensorFacts, packets: int) -> int:
    """Blocks a row when each takes at most `packets`: a power of two."""
    blocks = math.ceil(_packets(x) / packets)
    return 1 << (blocks - 1).bit_length()


def _registers(threads: int, ctas: int) -> int:
    return min(255, REGISTERS // (threads * ctas) // 8 * 8)


def _vector(call: Call) -> int:
    """Elements that one access may take, in every tensor of the call: a power of two."""
    x: TensorFacts = call.x
    vector = math.gcd(_per_packet(x), x.columns)
    for facts in call.tensors.values():
        if facts is not None and facts.shape and facts.columns == x.columns:
            # a type of twice the width takes two accesses of 16 bytes
            widest = min(16, _per_packet(x) * facts.dtype.itemsize)
            if facts.vector_bytes() < widest:
                vector = math.gcd(vector, max(1, facts.vector_bytes() // facts.dtype.itemsize))
    return vector


def _clusters(call: Call, config: Config) -> int:
    """Clusters that walk over the rows: as many as run at once, less those that would only shorten the last round.

    Multiprocessors come in groups of 14 to 18, and a cluster lies within one group: what is left over of each stays
    idle. A cluster too many would run alone after all others.
    """
    blocks, rows = call.device.multiprocessors * config.ctas, int(call.x.rows)
    groups = math.ceil(call.device.multiprocessors / 18)
    idle = groups * (config.cluster // 2) if config.cluster > 2 else 0
    resident = max(1, (blocks - idle) // config.cluster)
    return math.ceil(rows / math.ceil(rows / resident))
