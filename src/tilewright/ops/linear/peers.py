"""What users of linear layers would call instead: adapters to torch's own functions and torch.compile.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. Used by benchmarks
only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Options, Run, Tensors, compiled


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str) -> Tensor:
    """As a user would write it: z and act(z) are rounded between the steps."""
    y = F.linear(x, weight, bias)
    if act == "relu":
        y = F.relu(y)
    elif act == "relu2":
        y = F.relu(y).square()
    elif act == "silu":
        y = F.silu(y)
    elif act != "none":
        y = F.gelu(y, approximate="tanh" if act == "gelu_tanh" else "none")
    return y if residual is None else y + residual


def _eager(t: Tensors, o: Options) -> Run:
    """cuBLAS, then an elementwise kernel a step."""
    return functools.partial(_linear, t["x"], t["weight"], t["bias"], t["residual"], o["act"])


def _fused(t: Tensors, o: Options) -> Run:
    """cuBLASLt's epilogue, which torch reaches by a private name. It has no gradient."""
    if o["act"] not in ("relu", "gelu_tanh") or t["bias"] is None or t["residual"] is not None:
        raise NotImplementedError("cuBLASLt's epilogues in torch are relu and gelu_tanh, of a product with a bias")
    if t["x"].requires_grad:
        raise NotImplementedError("has no gradient")
    outputs = (*t["x"].shape[:-1], t["weight"].shape[0])
    rows, across, gelu = t["x"].reshape(-1, t["x"].shape[-1]), t["weight"].t(), o["act"] == "gelu_tanh"
    return lambda: torch._addmm_activation(t["bias"], rows, across, use_gelu=gelu).reshape(outputs)


def _compile(t: Tensors, o: Options) -> Run:
    """torch.compile of the same, specialised to the shape: at its best."""
    return compiled(_linear, *t.values(), o["act"])


PEERS: dict[str, dict[str, Callable[[Tensors, Options], Run]]] = {
    "linear": {"torch": _eager, "torch.compile": _compile, "cublaslt": _fused},
}
