"""What users of residual connections would call instead: torch's own functions, composed and compiled.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. Liger has neither
op. Used by benchmarks only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Tensors, compiled

Arguments = Callable[[Tensors, Options], tuple[Any, ...]]


def _gated(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    return residual + x * gate


def _dropout(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x, p, training)


def _gated_arguments(t: Tensors, o: Options) -> tuple[Any, ...]:
    return t["x"], t["gate"], t["residual"]


def _dropout_arguments(t: Tensors, o: Options) -> tuple[Any, ...]:
    return t["x"], t["residual"], o["p"], o["training"]


def _eager(function: Callable[..., Tensor], arguments: Arguments) -> Maker:
    return lambda t, o: functools.partial(function, *arguments(t, o))


def _compile(function: Callable[..., Tensor], arguments: Arguments) -> Maker:
    """torch.compile of the same, specialised to the shape: at its best."""
    return lambda t, o: compiled(function, *arguments(t, o))


def _drawing(maker: Maker) -> Maker:
    """Its mask is its own."""
    maker.draws = True  # type: ignore[attr-defined]
    return maker


PEERS: dict[str, dict[str, Maker]] = {
    "gated_residual": {
        "torch": _eager(_gated, _gated_arguments),
        "torch.compile": _compile(_gated, _gated_arguments),
    },
    "dropout_add": {
        "torch": _drawing(_eager(_dropout, _dropout_arguments)),
        "torch.compile": _drawing(_compile(_dropout, _dropout_arguments)),
    },
}
