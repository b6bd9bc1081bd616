"""How TileLang runs embedding_bag_mean_sparse_backward: the launch, worked out from a call's facts.

The program is in `tilelang_sparse_programs`, which imports TileLang and is loaded when a launch is compiled.
"""

from __future__ import annotations

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.embedding.sparse_configs import across
from tilewright.ops.embedding.tilelang import NAMES

ENTRIES = Program("tilewright.ops.embedding.tilelang_sparse_programs:bag_entries")


def backward(call: Call, config: Config) -> Launch:
    """embedding_bag_mean_sparse_backward."""
    dout: TensorFacts = call.dout
    indices: TensorFacts = call.indices
    share, vec = across(call)
    total = call.places.numel
    programs = -(-total // (config.threads // share * config.ahead))
    args: dict[str, Argument] = {
        **{name: call[name] for name in ("dout", "indices", "count", "places", "ids", "values")},
        **_strides("dout", dout, vec),
        **_strides("indices", indices, 1),
        "per_bag": indices.columns,
        "total": total,
        "programs": programs,
    }
    constants = {
        "dtype": NAMES[dout.dtype],
        "ids_dtype": NAMES[indices.dtype],
        "columns": dout.columns,
        "vec": vec,
        "across": share,
        "threads": config.threads,
        "ahead": config.ahead,
        "dout_levels": len(dout.row_levels),
        "levels": len(indices.row_levels),
    }
    return Launch(ENTRIES, (programs, 1, 1), args, constants)


def _strides(name: str, facts: TensorFacts, unit: int) -> dict[str, Argument]:
    levels = facts.row_levels
    inner, stride = levels[-1]
    return {
        f"{name}_inner": inner,
        f"{name}_outer": (levels[0][1] if len(levels) == 2 else 0) // unit,
        f"{name}_stride": stride // unit,
        f"{name}_step": facts.column_stride,
    }
