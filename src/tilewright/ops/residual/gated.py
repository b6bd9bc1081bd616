"""gated_residual and its gradient: their definitions, and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.contract import floating, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.residual import workloads


def _check(call: Call) -> None:
    rows = [name for name in ("x", "residual", "dy") if name in call.tensors]
    wide_rows(call, "x")
    floating(call, *rows)
    same_shape(call, *rows)
    x: TensorFacts = call.x
    gate: TensorFacts = call.gate
    if gate.shape not in ((x.columns,), (*x.shape[:-1], 1), x.shape):
        needs = f"needs [{x.columns}], {[*x.shape[:-1], 1]} or the shape of x, {list(x.shape)}"
        raise InvalidArgument(call.op, "gate", f"shape {list(gate.shape)}", f"{needs}: expand it")
    if gate.dtype not in (x.dtype, torch.float32):
        known = DTYPE_NAMES.get(gate.dtype, str(gate.dtype))
        raise InvalidArgument(call.op, "gate", f"dtype {known}", "takes the dtype of x, or fp32")


def _scale(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"y": t["residual"].abs() + (t["x"] * t["gate"]).abs()}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    terms = (t["dy"] * t["x"]).abs()
    return {"dx": (t["dy"] * t["gate"]).abs(), "dgate": terms.sum_to_size(t["gate"].shape)}


_GATE = "C | M 1 | M C"


@op(
    family="residual",
    out={"y": like("x")},
    gradient=Gradient(
        "gated_residual_backward",
        grads={"y": "dy"},
        takes={"x": "x", "gate": "gate"},
        gives={"x": "dx", "gate": "dgate", "residual": "dy"},
    ),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", "gate", "residual", "y"), per_element(call, 2)),
    error_scale=_scale,
    probes=Probes(dims={"x": "M C", "gate": _GATE, "residual": "M C"}, either=("gate",)),
    workloads=workloads.STREAMS,
)
def gated_residual(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    """A residual connection with a gate (the adaLN-Zero block of Peebles and Xie, 2022): y = residual + x * gate.

    Args:
        x, residual: [..., C] of one shape and dtype, fp32, fp16 or bf16, any strides with a dense last dimension.
        gate: [C], [..., 1] or the shape of x, in its dtype or float32. Another shape that broadcasts is expanded by
            the caller, `gate.expand_as(x)`, which copies nothing.

    Returns:
        y: shape and dtype of x, contiguous. The product is not rounded before the sum.

    Raises:
        InvalidArgument: wrong or different dtypes, another shape, or no columns.
    """
    return (upcast(residual) + upcast(x) * upcast(gate)).to(x.dtype)


@op(
    family="residual",
    out={"dx": needed(0, like("x")), "dgate": needed(1, like("gate"))},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "x", "gate", "dx", "dgate"), per_element(call, 3)),
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M C", "x": "M C", "gate": _GATE},
        options=({}, {"needs": (True, False)}, {"needs": (False, True)}),
        either=("gate",),
    ),
    workloads=workloads.STREAMS,
)
def gated_residual_backward(
    dy: Tensor, x: Tensor, gate: Tensor, *, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `gated_residual`: dx = dy * gate; dgate = dy * x, summed over the axes along which the gate is
    broadcast. That of the residual is dy itself.

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        x, gate: the inputs.
        needs: which of (dx, dgate) to compute.

    Returns:
        (dx, dgate) in the shapes and dtypes of x and gate, each rounded once; None where not needed. Sums are taken in
        float32, in an order that shape and device fix.
    """
    grad = upcast(dy)
    dx = (grad * upcast(gate)).to(x.dtype) if needs[0] else None
    dgate = (grad * upcast(x)).sum_to_size(gate.shape).to(gate.dtype) if needs[1] else None
    return dx, dgate
