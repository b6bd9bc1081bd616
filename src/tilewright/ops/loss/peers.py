"""What users of losses would call instead: torch's own function, composed and compiled. Liger has none of these.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. Used by benchmarks
only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled


def _bce(
    logits: Tensor, targets: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    loss = F.binary_cross_entropy_with_logits(logits, targets, weight, reduction=reduction, pos_weight=pos_weight)
    return loss if out_dtype is None else loss.to(out_dtype)


def _arguments(t: Tensors, o: Options) -> list[Any]:
    return [t["logits"], t["targets"], t["weight"], t["pos_weight"], o["reduction"], o["out_dtype"]]


def _eager(t: Tensors, o: Options) -> Run:
    return functools.partial(_bce, *_arguments(t, o))


def _compile(t: Tensors, o: Options) -> Run:
    """torch.compile of the same, specialised to the shape: at its best."""
    return compiled(_bce, *_arguments(t, o))


PEERS: dict[str, dict[str, Maker]] = {"bce_with_logits": {"torch": _eager, "torch.compile": _compile}}
