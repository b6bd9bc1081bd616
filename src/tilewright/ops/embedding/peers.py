"""What users of embedding bags would call instead: adapters to torch's own function and torch.compile.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. Used by benchmarks
only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Options, Run, Tensors, compiled


def _padding(o: Options) -> int | None:
    """torch has no rule for ids out of range: it reads there. And its negative padding counts from the end."""
    padding: int | None = o["padding_idx"]
    if o["out_of_range"] != "error" or (padding is not None and padding < 0):
        raise NotImplementedError("leaves out one row of the table, and no id beside")
    return padding


def _eager(t: Tensors, o: Options) -> Run:
    """torch's function; `sparse_grad` is its `sparse`."""
    return functools.partial(
        F.embedding_bag, t["indices"], t["weight"], mode="mean", padding_idx=_padding(o), sparse=o["sparse_grad"]
    )


def _gather(t: Tensors, o: Options) -> Run:
    """Rows first, then their mean. Its gradient is aten's index_add_, which adds with atomics."""
    weight, ids, padding = t["weight"], t["indices"], _padding(o)
    counted = torch.ones_like(ids, dtype=weight.dtype) if padding is None else (ids != padding).to(weight.dtype)
    share = (counted / counted.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)

    def run() -> Tensor:
        rows = weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[-1])
        mean: Tensor = (rows * share).sum(-2)
        return mean

    return run


def _bag(indices: Tensor, weight: Tensor, padding: int | None, sparse: bool) -> Tensor:
    return F.embedding_bag(indices, weight, mode="mean", padding_idx=padding, sparse=sparse)


def _compile(t: Tensors, o: Options) -> Run:
    """torch.compile of the same, specialised to the shape: at its best."""
    return compiled(_bag, t["indices"], t["weight"], _padding(o), o["sparse_grad"])


PEERS = {"embedding_bag_mean": {"torch": _eager, "torch.compile": _compile, "index_select": _gather}}
