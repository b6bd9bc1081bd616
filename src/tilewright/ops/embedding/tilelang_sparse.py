"""How TileLang runs embedding_bag_mean_sparse_backward: the launch, worked out from a call's facts.

The program is in `tilelang_sparse_programs`, which imports TileLang and is loaded when a launch is compiled.
"""

from __future__ import annotations

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.embedding.sparse_configs import across
from tilewright.ops.tilelang_places import NAMES, row_places

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
        **row_places("dout", dout, vec),
        **row_places("indices", indices, 1),
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
