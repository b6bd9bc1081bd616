"""The sparse gradient of embedding_bag_mean: what each id that counts adds to its row, and nothing else.

How many count is known from values alone, so where they are is found ahead of the op, by torch (`Gradient.finds`): the
op itself has shapes like any other. Its results become a COO tensor (`Gradient.coo`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, wide_rows
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.embedding import workloads
from tilewright.ops.embedding.bag import SIZES, check_count, check_ids, share_of, some_ids


def _check(call: Call) -> None:
    dout, places = call.dout, call.places
    wide_rows(call, "dout")
    floating(call, "dout")
    check_ids(call)
    bags = call.indices.shape[:-1]
    if dout.shape[:-1] != bags:
        raise InvalidArgument(call.op, "dout", f"shape {list(dout.shape)}", f"needs {[*bags, dout.columns]}")
    check_count(call)
    if len(places.shape) != 1 or places.dtype != torch.int64 or not places.contiguous:
        raise InvalidArgument(call.op, "places", str(places), "needs contiguous int64[N]")


def _shares(dout: Tensor, indices: Tensor, count: Tensor, places: Tensor) -> Tensor:
    """dout / count of the bag at each place."""
    bags = places // max(indices.shape[-1], 1)
    return share_of(dout.reshape(-1, dout.shape[-1])[bags], count.reshape(-1)[bags])


def _all_places(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    return torch.arange(math.prod(shape), device=device)


def _derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    counted = found["indices"] != 0
    found["count"] = counted.sum(-1).float()
    found["places"] = counted.reshape(-1).nonzero().reshape(-1)


@op(
    family="embedding",
    out={
        "ids": lambda t, o: (tuple(t["places"].shape), torch.int64),
        "values": lambda t, o: ((*t["places"].shape, t["dout"].shape[-1]), t["dout"].dtype),
    },
    check=_check,
    cost=lambda call: (
        bytes_of(call, "dout", "count", "places", "ids", "values") + call.places.numel * call.indices.dtype.itemsize,
        call.places.numel * call.dout.columns,
    ),
    error_scale=lambda t, o: {"values": _shares(t["dout"].abs(), t["indices"], t["count"], t["places"])},
    probes=Probes(
        dims={"dout": "M C", "indices": "M L", "count": "M", "places": "M*L"},
        sizes=SIZES,
        values={"indices": some_ids, "places": _all_places},
        dtypes={"indices": (torch.int32,)},
        derive=_derive,
    ),
    workloads=workloads.SPARSE_BACKWARD,
)
def embedding_bag_mean_sparse_backward(
    dout: Tensor, indices: Tensor, count: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of `embedding_bag_mean` under `sparse_grad=True`, an entry for each id that counts:
    the id itself, and dout_b / count_b of its bag b.

    Args:
        dout: [..., D], upstream gradient of out, in the dtype of weight. Any strides.
        indices: [..., L], as in forward.
        count: [...] float32, the ids of each bag that count, as forward saves it.
        places: [N] int64: where the ids that count are in `indices.flatten()`, in order.

    Returns:
        ids: [N] int64, the row of each entry.
        values: [N, D] in the dtype of dout, rounded once.
    """
    values = _shares(upcast(dout), indices, count, places).to(dout.dtype)
    return indices.reshape(-1)[places].long(), values
