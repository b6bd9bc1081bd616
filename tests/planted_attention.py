"""Attention with one fault, which the suite must catch: a weight of 0 times what is hidden, which may be NaN."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.kernel import Kernel
from tilewright.core.op import upcast
from tilewright.ops.attention import softmax

SUMS = {"keys": "bgcij,bjgd->bigcd", "queries": "bgcij,bigcd->bjgd"}
"""Products by what they sum over."""
FAULTS = (
    ("attention", "keys"),
    ("varlen_attention", "keys"),
    ("attention_backward", "keys"),
    ("attention_backward", "queries"),
    ("varlen_attention_backward", "keys"),
    ("varlen_attention_backward", "queries"),
)
_right = softmax._over_seen


def _runner(op: str, which: str) -> Any:
    def product(equation: str, p: Tensor, x: Tensor, groups: int, seen: Tensor) -> Tensor:
        if equation != SUMS[which]:
            return _right(equation, p, x, groups, seen)
        return torch.einsum(equation, p.unflatten(1, (groups, -1)), x)

    def read(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return upcast(q), upcast(k), upcast(v)

    def run(*tensors: Any, saving: bool, **options: Any) -> list[Any]:
        declared = registry.op(op)
        with patch.object(softmax, "_over_seen", product), patch.object(softmax, "read", read):
            found = declared.define(dict(zip(declared.tensors, tensors, strict=True)), options, saving)
        return [t if t is None else t.contiguous() for t in found]

    return run


for _op, _which in FAULTS:
    globals()[f"{_op}_{_which}"] = _runner(_op, _which)


def kernel(op: str, which: str) -> Kernel:
    return Kernel(op, "vendor", f"planted_attention:{op}_{which}", label=f"hidden {which}", origin="tests")
