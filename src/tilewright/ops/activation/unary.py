"""silu and gelu, and their gradients: definitions, and what else is declared of them. See `functions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, one_of, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.op import Gradient, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation import workloads
from tilewright.ops.activation.functions import APPROXIMATIONS, act, act_terms, derivative, derivative_terms


def _check(call: Call) -> None:
    rows = [name for name in ("x", "dy") if name in call.tensors]
    wide_rows(call, "x")
    floating(call, *rows)
    same_shape(call, *rows)
    if "approximate" in call.options:
        one_of(call, "approximate", *APPROXIMATIONS)


def _kind(o: Mapping[str, Any]) -> str:
    return APPROXIMATIONS[o["approximate"]] if "approximate" in o else "silu"


def _scale(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"y": act_terms(_kind(o), t["x"])}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"dx": t["dy"].abs() * derivative_terms(_kind(o), t["x"])}


def _gradient(name: str) -> Gradient:
    return Gradient(name, grads={"y": "dy"}, takes={"x": "x"}, gives={"x": "dx"})


_GELU_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"approximate": "tanh"})


@op(
    family="activation",
    out={"y": like("x")},
    gradient=_gradient("silu_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "y"), per_element(call, 4)),
    error_scale=_scale,
    probes=Probes(dims={"x": "M C"}),
    workloads=workloads.FEED_FORWARD,
)
def silu(x: Tensor) -> Tensor:
    """The sigmoid linear unit (Hendrycks and Gimpel, 2016): y = x * s(x), s the logistic function.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides with a dense last dimension.

    Returns:
        y: shape and dtype of x, contiguous, rounded once. -infinity gives NaN, as in torch.

    Raises:
        InvalidArgument: wrong dtype, or no columns.
    """
    return act("silu", upcast(x)).to(x.dtype)


@op(
    family="activation",
    out={"dx": like("x")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "dx"), per_element(call, 8)),
    error_scale=_scale_backward,
    probes=Probes(dims={"dy": "M C", "x": "M C"}),
    workloads=workloads.FEED_FORWARD,
)
def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `silu`: dx = dy * s(x) * (1 + x * (1 - s(x))).

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        x: [..., C], the input.

    Returns:
        dx: shape and dtype of x, rounded once.
    """
    return (upcast(dy) * derivative("silu", upcast(x))).to(x.dtype)


@op(
    family="activation",
    out={"y": like("x")},
    gradient=_gradient("gelu_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "y"), per_element(call, 8)),
    error_scale=_scale,
    probes=Probes(dims={"x": "M C"}, options=_GELU_OPTIONS),
    workloads=workloads.FEED_FORWARD,
)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit (Hendrycks and Gimpel, 2016).

    "none": y = x * (1 + erf(x / sqrt(2))) / 2. "tanh": y = x * s(2 c x (1 + 0.044715 x^2)) with c = sqrt(2 / pi),
    which equals x * (1 + tanh(c (x + 0.044715 x^3))) / 2.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides with a dense last dimension.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Returns:
        y: shape and dtype of x, contiguous, rounded once. -infinity gives NaN, as in torch.

    Raises:
        InvalidArgument: wrong dtype, another `approximate`, or no columns.
    """
    return act(APPROXIMATIONS[approximate], upcast(x)).to(x.dtype)


@op(
    family="activation",
    out={"dx": like("x")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "dx"), per_element(call, 16)),
    error_scale=_scale_backward,
    probes=Probes(dims={"dy": "M C", "x": "M C"}, options=_GELU_OPTIONS),
    workloads=workloads.FEED_FORWARD,
)
def gelu_backward(dy: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`: dx = dy * gelu'(x), with gelu' as `geglu_backward` states it.

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        x: [..., C], the input.
        approximate: as in forward.

    Returns:
        dx: shape and dtype of x, rounded once.
    """
    return (upcast(dy) * derivative(APPROXIMATIONS[approximate], upcast(x))).to(x.dtype)
