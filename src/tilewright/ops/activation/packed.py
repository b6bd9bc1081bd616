"""swiglu_packed and geglu_packed, on one tensor that holds gate and up, and their gradients: definitions, and what else
is declared of them.

The functions themselves are in `functions`; the same ops on two tensors in `gated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, one_of, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Spec, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation import workloads
from tilewright.ops.activation.functions import APPROXIMATIONS, act, act_terms, derivative, derivative_terms

PLACES = ("first", "second")


def _check(call: Call) -> None:
    rows = [name for name in ("x", "dy") if name in call.tensors]
    wide_rows(call, "x")
    floating(call, *rows)
    shape = call.x.shape
    if call.x.columns % 2:
        raise InvalidArgument(
            call.op, "x", f"shape {list(shape)}", "the last dimension holds gate and up: needs it even"
        )
    wanted = (*shape[:-1], call.x.columns // 2)
    if "dy" in call.tensors and call.dy.shape != wanted:
        raise InvalidArgument(
            call.op, "dy", f"shape {list(call.dy.shape)}", f"needs {list(wanted)}, half as wide as x: the shape of y"
        )
    one_of(call, "gate", *PLACES)
    if "approximate" in call.options:
        one_of(call, "approximate", *APPROXIMATIONS)


def _half(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    """The shape of gate, of up and of y."""
    x = t["x"]
    return (*x.shape[:-1], x.shape[-1] // 2), x.dtype


def _kind(o: Mapping[str, Any]) -> str:
    return APPROXIMATIONS[o["approximate"]] if "approximate" in o else "silu"


def _apart(x: Tensor, gate: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up) as views of x."""
    found = (x[..., ::2], x[..., 1::2]) if interleaved else x.tensor_split(2, -1)
    return (found[0], found[1]) if gate == "first" else (found[1], found[0])


def _together(gate_part: Tensor, up_part: Tensor, gate: str, interleaved: bool) -> Tensor:
    """The inverse of `_apart`."""
    parts = (gate_part, up_part) if gate == "first" else (up_part, gate_part)
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def _scale(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    gate, up = _apart(t["x"], o["gate"], o["interleaved"])
    return {"y": act_terms(_kind(o), gate) * up.abs()}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    kind, dy = _kind(o), t["dy"].abs()
    gate, up = _apart(t["x"], o["gate"], o["interleaved"])
    of_gate, of_up = dy * up.abs() * derivative_terms(kind, gate), dy * act_terms(kind, gate)
    return {"dx": _together(of_gate, of_up, o["gate"], o["interleaved"])}


def _forward(kind: str, x: Tensor, gate: str, interleaved: bool) -> Tensor:
    g, up = _apart(upcast(x), gate, interleaved)
    return (act(kind, g) * up).to(x.dtype)


def _backward(kind: str, dy: Tensor, x: Tensor, gate: str, interleaved: bool) -> Tensor:
    grad = upcast(dy)
    g, up = _apart(upcast(x), gate, interleaved)
    dx = _together(grad * up * derivative(kind, g), grad * act(kind, g), gate, interleaved)
    return dx.to(x.dtype)


def _gradient(name: str) -> Gradient:
    return Gradient(name, grads={"y": "dy"}, takes={"x": "x"}, gives={"x": "dx"})


_FORWARD = {"x": "M 2C"}
_BACKWARD = {"dy": "M C", "x": "M 2C"}
_PACKED: tuple[dict[str, Any], ...] = (
    {"gate": "first"},
    {"gate": "second"},
    {"gate": "first", "interleaved": True},
    {"gate": "second", "interleaved": True},
)
_ERF: tuple[dict[str, Any], ...] = (
    {"gate": "first", "approximate": "none"},
    {"gate": "second", "interleaved": True, "approximate": "none"},
)


@op(
    family="activation",
    out={"y": _half},
    gradient=_gradient("swiglu_packed_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "y"), per_element(call, 5) // 2),
    error_scale=_scale,
    probes=Probes(dims=_FORWARD, options=_PACKED),
    workloads=workloads.FEED_FORWARD,
)
def swiglu_packed(x: Tensor, *, gate: str, interleaved: bool = False) -> Tensor:
    """`swiglu` of the two halves of one tensor, as a fused projection makes it: y = silu(gate) * up.

    Args:
        x: [..., 2H], gate and up, fp32, fp16 or bf16, any strides with a dense last dimension.
        gate: which half is the gate, "first" (Llama, Qwen, Gemma) or "second". Models differ, so there is no default.
        interleaved: the halves alternate, x[..., 2i] and x[..., 2i + 1]; else one lies behind the other.

    Returns:
        y: [..., H], contiguous, in the dtype of x. Rounded once: silu(gate) is not rounded before the product, so y is
        what `swiglu` makes of the two halves. A gate of -infinity gives NaN, as in torch.

    Raises:
        InvalidArgument: wrong dtype, another `gate`, no columns, or an odd number of them.
    """
    return _forward("silu", x, gate, interleaved)


@op(
    family="activation",
    out={"dx": like("x")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "dx"), per_element(call, 10) // 2),
    error_scale=_scale_backward,
    probes=Probes(dims=_BACKWARD, options=_PACKED),
    workloads=workloads.FEED_FORWARD,
)
def swiglu_packed_backward(dy: Tensor, x: Tensor, *, gate: str, interleaved: bool = False) -> Tensor:
    """The gradient of `swiglu_packed`: that of `swiglu` for gate and up, in one tensor, packed as x is.

    Args:
        dy: [..., H], upstream gradient of y. Any strides.
        x: [..., 2H], the input.
        gate, interleaved: as in forward.

    Returns:
        dx: shape and dtype of x, rounded once.
    """
    return _backward("silu", dy, x, gate, interleaved)


@op(
    family="activation",
    out={"y": _half},
    gradient=_gradient("geglu_packed_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "y"), per_element(call, 9) // 2),
    error_scale=_scale,
    probes=Probes(dims=_FORWARD, options=(*_PACKED, *_ERF)),
    workloads=workloads.FEED_FORWARD,
)
def geglu_packed(x: Tensor, *, gate: str, interleaved: bool = False, approximate: str = "tanh") -> Tensor:
    """`geglu` of the two halves of one tensor, as a fused projection makes it: y = gelu(gate) * up.

    Args:
        x: [..., 2H], gate and up, as in `swiglu_packed`.
        gate: which half is the gate, "first" or "second", as in `swiglu_packed`.
        interleaved: the halves alternate, as in `swiglu_packed`.
        approximate: "tanh" or "none", as in `geglu`.

    Returns:
        y: [..., H], contiguous, in the dtype of x. Rounded once: gelu(gate) is not rounded before the product, so y is
        what `geglu` makes of the two halves. A gate of -infinity gives NaN, as in torch.

    Raises:
        InvalidArgument: as `swiglu_packed`; also another `approximate`.
    """
    return _forward(APPROXIMATIONS[approximate], x, gate, interleaved)


@op(
    family="activation",
    out={"dx": like("x")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "dx"), per_element(call, 19) // 2),
    error_scale=_scale_backward,
    probes=Probes(dims=_BACKWARD, options=(*_PACKED, *_ERF)),
    workloads=workloads.FEED_FORWARD,
)
def geglu_packed_backward(
    dy: Tensor, x: Tensor, *, gate: str, interleaved: bool = False, approximate: str = "tanh"
) -> Tensor:
    """The gradient of `geglu_packed`: that of `geglu` for gate and up, in one tensor, packed as x is.

    Args:
        dy: [..., H], upstream gradient of y. Any strides.
        x: [..., 2H], the input.
        gate, interleaved, approximate: as in forward.

    Returns:
        dx: shape and dtype of x, rounded once.
    """
    return _backward(APPROXIMATIONS[approximate], dy, x, gate, interleaved)
