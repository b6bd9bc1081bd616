"""What users of activations would call instead: adapters to torch's own functions, torch.compile and Liger.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. The rivals are
imported inside, since most machines have none of them. Used by benchmarks only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _parts(x: Tensor, gate: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return (first, second) if gate == "first" else (second, first)


def _swiglu_packed(x: Tensor, gate: str, interleaved: bool) -> Tensor:
    return _swiglu(*_parts(x, gate, interleaved))


def _geglu_packed(x: Tensor, gate: str, interleaved: bool, approximate: str) -> Tensor:
    return _geglu(*_parts(x, gate, interleaved), approximate)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _scale_bias_add(x: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = x if scale is None else x * scale
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


def _bias_act(x: Tensor, bias: Tensor, act: str) -> Tensor:
    return ACTS[act](x + bias)


def _arguments(t: Tensors, o: Options) -> list[Any]:
    """As the functions above take them: an op's tensors, then its options, each in its order."""
    return [*t.values(), *o.values()]


def _eager(function: Callable[..., Any]) -> Maker:
    """torch's own functions, composed as a user would."""
    return lambda t, o: functools.partial(function, *_arguments(t, o))


def _compile(function: Callable[..., Any]) -> Maker:
    """torch.compile of the same, specialised to the shape: at its best."""
    return lambda t, o: compiled(function, *_arguments(t, o))


def _liger_swiglu(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda: LigerSiLUMulFunction.apply(t["gate"], t["up"])


def _liger_geglu(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if o["approximate"] != "tanh":
        raise NotImplementedError("takes the tanh form only")
    return lambda: LigerGELUMulFunction.apply(t["gate"], t["up"])


def _liger_packed(function: Maker) -> Maker:
    def maker(t: Tensors, o: Options) -> Run:
        if o["interleaved"]:
            raise NotImplementedError("takes halves only")
        gate, up = _parts(t["x"], o["gate"], False)
        return function({"gate": gate, "up": up}, o)

    return maker


PEERS: dict[str, dict[str, Maker]] = {
    "swiglu": {"torch": _eager(_swiglu), "torch.compile": _compile(_swiglu), "liger": _liger_swiglu},
    "geglu": {"torch": _eager(_geglu), "torch.compile": _compile(_geglu), "liger": _liger_geglu},
    "swiglu_packed": {
        "torch": _eager(_swiglu_packed),
        "torch.compile": _compile(_swiglu_packed),
        "liger": _liger_packed(_liger_swiglu),
    },
    "geglu_packed": {
        "torch": _eager(_geglu_packed),
        "torch.compile": _compile(_geglu_packed),
        "liger": _liger_packed(_liger_geglu),
    },
    "silu": {"torch": _eager(_silu), "torch.compile": _compile(_silu)},
    "gelu": {"torch": _eager(_gelu), "torch.compile": _compile(_gelu)},
    "bias_act": {"torch": _eager(_bias_act), "torch.compile": _compile(_bias_act)},
    "scale_bias_add": {"torch": _eager(_scale_bias_add), "torch.compile": _compile(_scale_bias_add)},
}
