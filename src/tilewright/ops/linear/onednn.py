"""oneDNN's inner product on CPUs. torch has it, but reaches it itself only where torch.compile finds frozen weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.reason import Reason

EPILOGUES = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
"""Activations that oneDNN computes before it stores a result: torch's names for them, and the algorithm."""


def one_run(*names: str) -> Any:
    """torch copies what is not contiguous before oneDNN sees it."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is not None and not facts.contiguous:
                why = f"strides {list(facts.stride)}; torch would copy it for oneDNN"
                yield Reason(name, why, f"{name}.contiguous() would do")

    return limit


def by_onednn(call: Call) -> Iterable[Reason]:
    """Whether this torch has oneDNN, and what its inner product computes before it stores."""
    if not torch.backends.mkldnn.is_available():
        yield Reason("device", "this build of torch has no oneDNN")
    elif not torch.backends.mkldnn.enabled:
        yield Reason("device", "oneDNN is switched off", "torch.backends.mkldnn.enabled = True")
    if call.act not in EPILOGUES:
        yield Reason("act", f"{call.act!r}; oneDNN's epilogues have {', '.join(EPILOGUES)}")
    if call.act != "none" and call.has("residual"):
        yield Reason("residual", f"given with act {call.act!r}; torch asks oneDNN for one of them")
    if call.act != "none" and call.saving:
        yield Reason("gradient", f"z of act {call.act!r} is not kept", "use torch.no_grad()")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, act: str, saving: bool
) -> tuple[Tensor | None, ...]:
    """By oneDNN, from the weight as it is. In the blocked layout that oneDNN likes best it would be 3 to 12 % faster
    from 64 rows on, and up to twice as fast with 4; but a copy of each weight would have to be kept, and be kept true.
    """
    function = torch.ops.mkldnn._linear_pointwise
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        kind, algorithm = EPILOGUES[act]
        y = function.default(rows, weight, bias, kind, [], algorithm)
    else:
        y = function.binary(rows, residual.reshape(-1, weight.shape[0]), weight, bias, "add")
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return (y, None) if saving else (y,)
