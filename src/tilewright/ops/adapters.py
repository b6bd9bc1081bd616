"""What the adapters of rivals (`peers` in each family) share: their types, and torch.compile at its best."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Any]
Options = Mapping[str, Any]
Run = Callable[[], Any]
Maker = Callable[[Tensors, Options], Run]


def compiled(function: Callable[..., Any], *arguments: Any) -> Run:
    """torch.compile of `function`, specialised to these arguments, and its call with them."""
    import torch._functorch.config as functorch

    tensors = [a for a in arguments if isinstance(a, Tensor)]
    facts = ((a.shape, a.stride(), a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in arguments)
    code = _compiled(function, tuple(facts))

    def run() -> Any:
        # a graph that is kept for many backwards may not donate its buffers
        with functorch.patch(donated_buffer=False):
            return code(*arguments)

    return run if any(t.requires_grad for t in tensors) else functools.partial(code, *arguments)


@functools.cache
def _compiled(function: Any, signature: tuple[Any, ...]) -> Callable[..., Any]:
    """For one signature alone: with a code object of its own none can use up another's limit of recompilations."""
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copy, dynamic=False, fullgraph=True)
