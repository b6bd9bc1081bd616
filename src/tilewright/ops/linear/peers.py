"""What users of linear layers would call instead: adapters to torch's own functions and torch.compile.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. Used by benchmarks
only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Any]
Options = Mapping[str, Any]
Run = Callable[[], Any]


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


@functools.cache
def _compiled(signature: tuple[Any, ...]) -> Callable[..., Any]:
    """torch.compile for one signature alone: with a code object of its own no signature can use up another's limit."""
    copy = types.FunctionType(_linear.__code__.replace(), _linear.__globals__, _linear.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def _compile(t: Tensors, o: Options) -> Run:
    """torch.compile of the same, specialised to the shape: at its best."""
    import torch._functorch.config as functorch

    arguments = [*t.values(), o["act"]]
    facts = ((a.shape, a.stride(), a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in arguments)
    compiled = _compiled(tuple(facts))

    def run() -> Any:
        # a graph that is kept for many backwards may not donate its buffers
        with functorch.patch(donated_buffer=False):
            return compiled(*arguments)

    gradient = any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
    return run if gradient else functools.partial(compiled, *arguments)


PEERS: dict[str, dict[str, Callable[[Tensors, Options], Run]]] = {
    "linear": {"torch": _eager, "torch.compile": _compile, "cublaslt": _fused},
}
