"""bias_act and its gradient: definitions, and what else is declared of them. See `functions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call, TensorFacts
from tilewright.core.contract import floating, one_of, per_column, same_shape, wide_rows
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Spec, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation import workloads
from tilewright.ops.activation.functions import act as activation
from tilewright.ops.activation.functions import act_terms, chain, derivative_terms

OPERATIONS = {"relu": 1, "relu2": 2, "silu": 4, "gelu": 8, "gelu_tanh": 8}
"""The activations, and how many operations each is for `cost`."""


def _check(call: Call) -> None:
    grads = [name for name in ("dy",) if name in call.tensors]
    wide_rows(call, "x")
    floating(call, "x", *grads)
    same_shape(call, "x", *grads)
    if len(call.bias.shape) == 1:
        per_column(call, "x", "bias")
    elif call.bias.shape == call.x.shape:
        floating(call, "x", "bias")
    else:
        raise InvalidArgument(
            call.op, "bias", f"shape {list(call.bias.shape)}",
            f"needs [{call.x.columns}], the last dimension of x, or {list(call.x.shape)}, its shape",
        )  # fmt: skip
    one_of(call, "act", *OPERATIONS)


def _operations(call: Call, factor: int) -> int:
    x: TensorFacts = call.x
    return x.numel * (1 + factor * OPERATIONS[call.act])


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"y": act_terms(o["act"], t["x"] + t["bias"])}


def _scale_backward(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    dx = t["dy"].abs() * derivative_terms(o["act"], t["x"] + t["bias"])
    return {"dx": dx, "dbias": _over_rows(dx)}


def _over_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


def _dbias(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec | None:
    """Of a bias of the shape of x it is dx."""
    bias = t["bias"]
    return (tuple(bias.shape), bias.dtype) if len(bias.shape) == 1 else None


_FORM = "C | M C"


@op(
    family="activation",
    out={"y": like("x")},
    gradient=Gradient(
        "bias_act_backward",
        grads={"y": "dy"},
        takes={"x": "x", "bias": "bias"},
        gives={"x": "dx", "bias": ("dbias", "dx")},
    ),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "bias", "y"), _operations(call, 1)),
    error_scale=_scale,
    probes=Probes(
        dims={"x": "M C", "bias": _FORM},
        options=tuple({"act": name} for name in ("gelu_tanh", "gelu", "silu", "relu", "relu2")),
        either=("bias",),
    ),
    workloads=workloads.BIASED,
)
def bias_act(x: Tensor, bias: Tensor, *, act: str) -> Tensor:
    """An activation of a sum: y = act(x + bias).

    "relu": max(z, 0), "relu2": max(z, 0)^2 (So et al., 2021), "silu": z * s(z), "gelu": z * (1 + erf(z / sqrt(2))) / 2,
    "gelu_tanh": z * (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides with a dense last dimension.
        bias: [C], in the dtype of x or fp32; or shape and dtype of x.
        act: "relu", "relu2", "silu", "gelu" or "gelu_tanh".

    Returns:
        y: shape and dtype of x, contiguous. Rounded once: the sum is not rounded before the activation. NaN stays, also
        in a rectifier; a sum of -infinity gives NaN but for those, as in torch.

    Raises:
        InvalidArgument: wrong dtypes or shapes, another `act`, or no columns.
    """
    return activation(act, upcast(x) + upcast(bias)).to(x.dtype)


@op(
    family="activation",
    out={"dx": needed(0, like("x")), "dbias": needed(1, _dbias)},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "bias", "dx", "dbias"), _operations(call, 2) + 2 * call.x.numel),
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M C", "x": "M C", "bias": _FORM},
        options=(
            *({"act": name} for name in ("gelu_tanh", "gelu", "silu", "relu", "relu2")),
            {"act": "gelu_tanh", "needs": (True, False)},
            {"act": "relu2", "needs": (False, True)},
        ),
        either=("bias",),
    ),
    workloads=workloads.BIASED,
)
def bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor, *, act: str, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `bias_act`: dx = dy * act'(x + bias); dbias = the sum of dx over rows, before dx is rounded.

    A bias of the shape of x has the gradient dx, which is not written twice. At 0 a rectifier has the slope 0.

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        x: [..., C], the input.
        bias: as in forward.
        act: as in forward.
        needs: which of (dx, dbias) to compute.

    Returns:
        (dx, dbias) in the dtypes of x and bias; None where not needed, and dbias also where bias has the shape of x.
        The sum is in float32 in an order fixed by the shape.
    """
    full = chain(act, upcast(dy), upcast(x) + upcast(bias))
    dbias = _over_rows(full).to(bias.dtype) if needs[1] and bias.dim() == 1 else None
    return full.to(x.dtype) if needs[0] else None, dbias
