"""embedding_bag_mean and its gradient: definitions, and what else is declared of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.contract import floating, one_of, wide_rows
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument, OutOfRange
from tilewright.core.op import Gradient, Saved, like, op, rows_of, upcast
from tilewright.core.probes import Probes
from tilewright.ops.embedding import workloads


def masks(indices: Tensor, rows: int, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Which ids count, and which are bad: neither a row of the table nor padding."""
    ids = indices.long()
    inside = (ids >= 0) & (ids < rows)
    real = torch.ones_like(inside) if padding_idx is None else ids != padding_idx
    return inside & real, ~inside & real


def _mean(weight: Tensor, indices: Tensor, padding_idx: int | None, out_of_range: str) -> Tensor:
    """The means, not rounded."""
    counted, bad = masks(indices, weight.shape[0], padding_idx)
    rows = upcast(weight[torch.where(counted, indices.long(), 0)])
    total = torch.where(counted.unsqueeze(-1), rows, 0.0).sum(-2)
    mean = total / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(bad.any(-1, keepdim=True), math.nan, mean) if out_of_range == "error" else mean


def _add_at(indices: Tensor, terms: Tensor, rows: int, padding_idx: int | None) -> Tensor:
    """Bag by bag, `terms` [..., D] added to the row of each id that counts."""
    counted, _ = masks(indices, rows, padding_idx)
    each = torch.where(counted.unsqueeze(-1), terms.unsqueeze(-2), 0.0)
    places = torch.where(counted, indices.long(), 0).flatten()
    return terms.new_zeros(rows, terms.shape[-1]).index_add(0, places, each.reshape(-1, terms.shape[-1]))


def _count(weight: Tensor, indices: Tensor, padding_idx: int | None) -> Tensor:
    return masks(indices, weight.shape[0], padding_idx)[0].sum(-1).float()


def _places(weight: Tensor, indices: Tensor, padding_idx: int | None) -> Tensor:
    """Where among all ids, in order, are those that count."""
    return masks(indices, weight.shape[0], padding_idx)[0].reshape(-1).nonzero().reshape(-1)


def _check(call: Call) -> None:
    weight: TensorFacts = call.weight
    if len(weight.shape) != 2 or not weight.shape[0]:
        raise InvalidArgument(call.op, "weight", f"shape {list(weight.shape)}", "needs [V, D] with a row at least")
    wide_rows(call, "weight")
    floating(call, "weight")
    check_ids(call)
    if "out_of_range" in call.options:
        one_of(call, "out_of_range", "error", "skip")


def check_ids(call: Call) -> None:
    indices: TensorFacts = call.indices
    if indices.dtype not in (torch.int64, torch.int32):
        dtype = DTYPE_NAMES.get(indices.dtype, str(indices.dtype).removeprefix("torch."))
        raise InvalidArgument(call.op, "indices", f"dtype {dtype}", "takes int64, int32")
    if not indices.shape:
        raise InvalidArgument(call.op, "indices", "a scalar", "needs [..., L], a bag in the last dimension")


def check_count(call: Call) -> None:
    """As forward saves it."""
    bags, count = call.indices.shape[:-1], call["count"]
    if count.shape != bags or count.dtype != torch.float32 or not count.contiguous:
        raise InvalidArgument(call.op, "count", str(count), f"needs contiguous fp32{list(bags)}, as forward saves it")


def _check_backward(call: Call) -> None:
    _check(call)
    floating(call, "weight", "dout")
    bags = call.indices.shape[:-1]
    if call.dout.shape != (*bags, call.weight.columns):
        wanted = [*bags, call.weight.columns]
        raise InvalidArgument(call.op, "dout", f"shape {list(call.dout.shape)}", f"needs {wanted}")
    check_count(call)


def _check_values(tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
    if options["out_of_range"] != "error":
        return
    weight, indices = tensors["weight"], tensors["indices"]
    assert weight is not None and indices is not None
    bad = masks(indices, weight.shape[0], options["padding_idx"])[1]
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise OutOfRange(
            f"embedding_bag_mean: indices: {int(indices[place])} at {list(place)} is outside 0 to "
            f'{weight.shape[0] - 1}; out_of_range="skip" leaves such ids out'
        )


def some_ids(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    """Ids with repeats: some rows are hot, some ids are the usual padding, the last of several bags is all padding."""
    uniform, kind = torch.rand((2, *shape), generator=generator, device=device)
    ids = (uniform * sizes["V"]).long()
    ids = torch.where(kind < 0.25, ids % min(sizes["V"], 4), ids)
    ids = torch.where(kind > 0.85, 0, ids).clamp(0, sizes["V"] - 1)
    if math.prod(shape[:-1]) > 1:
        ids.view(-1, shape[-1])[-1] = 0
    return ids


def _spoil(indices: Tensor, rows: int) -> Tensor:
    """Some ids outside the table: just outside, and as far as their dtype goes."""
    spoilt = indices.clone().contiguous()
    flat = spoilt.view(-1)
    if flat.numel():
        edges = torch.iinfo(indices.dtype)
        for place, bad in zip((1, 4, 9, 16), (-1, rows, edges.max, edges.min), strict=True):
            flat[place % flat.numel()] = bad
    return spoilt


def _derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    if options["out_of_range"] == "skip":
        found["indices"] = _spoil(found["indices"], found["weight"].shape[0])


def _derive_backward(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    found["indices"] = _spoil(found["indices"], found["weight"].shape[0])
    found["count"] = _count(found["weight"], found["indices"], options["padding_idx"])


def _table_bytes(call: Call) -> int:
    """The rows that must be read: no more than there are ids, and than there are rows."""
    weight: TensorFacts = call.weight
    rows: int = min(call.indices.numel, weight.rows)
    return rows * weight.columns * weight.dtype.itemsize


SIZES = {"V": 61, "L": 13}
_OTHERS = ({"padding_idx": None}, {"padding_idx": 3})


@op(
    family="embedding",
    out={"out": lambda t, o: ((*t["indices"].shape[:-1], t["weight"].shape[-1]), t["weight"].dtype)},
    saved={"count": Saved(rows_of("indices"), _count)},
    gradient=Gradient(
        "embedding_bag_mean_backward",
        grads={"out": "dout"},
        takes={"indices": "indices", "count": "count", "weight": "weight"},
        gives={"weight": "dweight"},
    ),
    gradient_if={
        "sparse_grad": Gradient(
            "embedding_bag_mean_sparse_backward",
            grads={"out": "dout"},
            takes={"indices": "indices", "count": "count"},
            finds={"places": Saved(lambda t, o: ((math.prod(t["indices"].shape),), torch.int64), _places)},
            gives={"weight": "values"},
            coo={"values": "ids"},
        )
    },
    check=_check,
    check_values=_check_values,
    cost=lambda call: (
        _table_bytes(call) + bytes_of(call, "indices", "out", "count"),
        call.indices.numel * call.weight.columns,
    ),
    error_scale=lambda t, o: {"out": _mean(t["weight"].abs(), t["indices"], o["padding_idx"], "skip")},
    probes=Probes(
        dims={"weight": "V C", "indices": "M L"},
        options=({}, *_OTHERS, {"out_of_range": "skip"}, {"padding_idx": None, "out_of_range": "skip"}),
        sizes=SIZES,
        values={"indices": some_ids},
        dtypes={"indices": (torch.int32,)},
        tables=("weight",),
        long=("V",),
        derive=_derive,
    ),
    workloads=(*workloads.BAGS, *workloads.SPARSE),
)
def embedding_bag_mean(
    weight: Tensor,
    indices: Tensor,
    *,
    padding_idx: int | None = 0,
    out_of_range: str = "error",
    sparse_grad: bool = False,
) -> Tensor:
    """The mean of each bag's rows of a table: `torch.nn.functional.embedding_bag(mode="mean")` on bags of one size.

    With S_b the ids of bag b that are rows of the table and not padding, repeats included:
    out_b = sum of weight[id] over S_b / max(|S_b|, 1). A bag without such ids gives 0.

    Args:
        weight: [V, D], fp32, fp16 or bf16, the table. Any stride between its rows.
        indices: [..., L] int64 or int32, a bag in the last dimension. L may be 0.
        padding_idx: the id that counts for nothing; None for none. It need not be a row of the table, so -1 may pad; it
            does not count from the end, as it does in torch.
        out_of_range: what an id is that is neither a row of the table nor padding. "error": `OutOfRange` (an
            IndexError) on a CPU; elsewhere, where nothing may wait for the device, the bag's row is NaN. "skip": it
            counts for nothing. Either way it gets no gradient.
        sparse_grad: whether the gradient of weight is a sparse COO tensor, one entry for each id that counts,
            uncoalesced, as `torch.optim.SGD` and `SparseAdam` take it. Its size depends on values, for which the host
            waits: there is none in the capture of a CUDA graph or under torch.compile.

    Returns:
        out: [..., D] in the dtype of weight, contiguous. Summed in float32, rounded once.

    Raises:
        InvalidArgument: wrong dtype, a table without rows or columns, or another `out_of_range`.
        OutOfRange: see there.
        Unsupported: `sparse_grad` and a gradient asked for where nothing may wait.
    """
    return _mean(weight, indices, padding_idx, out_of_range).to(weight.dtype)


@op(
    family="embedding",
    out={"dweight": like("weight")},
    check=_check_backward,
    scatters=True,
    cost=lambda call: (
        bytes_of(call, "dout", "indices", "count", "dweight"),
        2 * call.indices.numel * call.weight.columns,
    ),
    error_scale=lambda t, o: {
        "dweight": _add_at(t["indices"], share_of(t["dout"].abs(), t["count"]), t["weight"].shape[0], o["padding_idx"])
    },
    probes=Probes(
        dims={"dout": "M C", "indices": "M L", "count": "M", "weight": "V C"},
        options=({}, *_OTHERS),
        sizes=SIZES,
        values={"indices": some_ids},
        dtypes={"indices": (torch.int32,)},
        long=("V",),
        derive=_derive_backward,
    ),
    workloads=workloads.BAGS,
)
def embedding_bag_mean_backward(
    dout: Tensor, indices: Tensor, count: Tensor, weight: Tensor, *, padding_idx: int | None = 0
) -> Tensor:
    """The gradient of `embedding_bag_mean`: dweight[r] = sum of dout_b / count_b over the occurrences of r that count.

    Args:
        dout: [..., D], upstream gradient of out. Any strides.
        indices: [..., L], as in forward. Ids that are padding or no rows of the table get nothing.
        count: [...] float32, the ids of each bag that count, as forward saves it.
        weight: [V, D]: its shape and dtype alone are read.
        padding_idx: as in forward.

    Returns:
        dweight: shape and dtype of weight, every row of it, 0 where no id points. Summed in float32, rounded once.
    """
    share = share_of(upcast(dout), count)
    return _add_at(indices, share, weight.shape[0], padding_idx).to(weight.dtype)


def share_of(dout: Tensor, count: Tensor) -> Tensor:
    """What each id of a bag gets."""
    return dout / count.clamp(min=1.0).unsqueeze(-1)
