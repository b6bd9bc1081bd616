"""softmax over the last dimension and its gradient: definitions, and what else is declared of them. Over another
dimension it is taken by the function that users call, in `calls`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.sampling import workloads

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"scale": 0.125}, {"scale": -2.0})


def _check(call: Call) -> None:
    names = [name for name in ("x", "dy", "y") if name in call.tensors and name not in call.outputs]
    wide_rows(call, names[0])
    floating(call, *names)
    same_shape(call, *names)
    if not math.isfinite(call.scale):
        remedy = "must be finite; a temperature of 0 is argmax"
        raise InvalidArgument(call.op, "scale", f"{call.scale}", remedy)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """scale * x in the accumulation dtype; a scale of 1 changes nothing."""
    return upcast(x) if scale == 1.0 else upcast(x) * scale


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    """An exponential is as far off as its argument, which is a difference of two."""
    z = _scaled(t["x"], o["scale"])
    terms = z.abs() + z.abs().amax(-1, keepdim=True) + 1.0 if z.numel() else z
    return {"y": torch.nan_to_num(torch.softmax(z, -1) * terms)}


def _scale_backward(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    dy, y = t["dy"].abs(), t["y"].abs()
    return {"dx": abs(o["scale"]) * y * (dy + (dy * y).sum(-1, keepdim=True))}


def _derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """What forward returns."""
    found["y"] = torch.softmax(upcast(found["y"]), -1).to(found["y"].dtype)


@op(
    family="sampling",
    out={"y": like("x")},
    gradient=Gradient("softmax_backward", grads={"y": "dy"}, takes={"y": "y"}, gives={"x": "dx"}),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "y"), per_element(call, 5)),
    error_scale=_scale,
    probes=Probes(dims={"x": "M C"}, options=OPTIONS),
    workloads=workloads.SOFTMAX,
)
def softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """softmax(scale * x): exp(scale * x - m) over its sum, with m the largest scale * x.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides, any width.
        scale: a factor of x, as 1 / temperature. Finite: a temperature of 0 is argmax, and no softmax.

    Returns:
        y: shape and dtype of x, contiguous, rounded once. A row of -infinity alone is NaN, as in torch.

    Raises:
        InvalidArgument: wrong dtype, no columns, or a scale that is not finite.
    """
    return torch.softmax(_scaled(x, scale), -1).to(x.dtype)


@op(
    family="sampling",
    out={"dx": like("dy")},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "y", "dx"), per_element(call, 5)),
    error_scale=_scale_backward,
    probes=Probes(dims={"dy": "M C", "y": "M C"}, options=OPTIONS, derive=_derive),
    workloads=workloads.SOFTMAX,
)
def softmax_backward(dy: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """The gradient of `softmax`: dx = scale * y * (dy - sum(dy * y)).

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        y: [..., C], as forward returned it.
        scale: as in forward.

    Returns:
        dx: shape and dtype of dy, rounded once.
    """
    grad, p = upcast(dy), upcast(y)
    return (scale * p * (grad - (grad * p).sum(-1, keepdim=True))).to(dy.dtype)
