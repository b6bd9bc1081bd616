"""scale_bias_add and its gradient: definitions, and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, per_column, same_shape, wide_rows
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Spec, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation import workloads

TERMS = ("scale", "bias", "residual")


def _check(call: Call) -> None:
    wide_rows(call, "x")
    floating(call, "x", "residual")
    same_shape(call, "x", "residual")
    per_column(call, "x", "scale", "bias")
    if not any(call.has(name) for name in TERMS):
        raise InvalidArgument(call.op, "scale", "None, as are bias and residual", "give at least one of the three")


def _check_backward(call: Call) -> None:
    wide_rows(call, "dy")
    floating(call, "dy", "x")
    same_shape(call, "dy", "x")
    per_column(call, "dy", "scale", "bias")
    if not (call.has("scale") or call.has("bias")):
        raise InvalidArgument(call.op, "scale", "None, as is bias", "every gradient is dy itself")
    if call.has("scale") and call.needs[1] and not call.has("x"):
        raise InvalidArgument(call.op, "x", "None", "the gradient of scale needs it")


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    found = t["x"].abs() if t["scale"] is None else (t["x"] * t["scale"]).abs()
    for name in ("bias", "residual"):
        found = found if t[name] is None else found + t[name].abs()
    return {"y": found}


def _scale_backward(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    dy = t["dy"].abs()
    found = {"dbias": _over_rows(dy)}
    if t["scale"] is not None:
        found["dx"] = dy * t["scale"].abs()
    if t["x"] is not None:
        found["dscale"] = _over_rows(dy * t["x"].abs())
    return found


def _over_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


def _dx(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec | None:
    """Without a scale it is dy itself."""
    return None if t["scale"] is None else (tuple(t["dy"].shape), t["dy"].dtype)


def _terms(call: Call, *names: str) -> int:
    return sum(call.has(name) for name in names)


@op(
    family="activation",
    out={"y": like("x")},
    gradient=Gradient(
        "scale_bias_add_backward",
        grads={"y": "dy"},
        takes={"x": "x", "scale": "scale", "bias": "bias"},
        gives={"x": ("dx", "dy"), "scale": "dscale", "bias": "dbias", "residual": "dy"},
        only={"x": "scale"},
    ),
    check=_check,
    cost=lambda call: (bytes_of(call, "x", *TERMS, "y"), call.x.numel * _terms(call, *TERMS)),
    error_scale=_scale,
    probes=Probes(
        dims={"x": "M C", "scale": "C", "bias": "C", "residual": "M C"},
        absent=(
            (),
            ("scale",),
            ("bias",),
            ("residual",),
            ("scale", "bias"),
            ("scale", "residual"),
            ("bias", "residual"),
        ),
        either=("scale", "bias"),
    ),
    workloads=workloads.RESIDUAL,
)
def scale_bias_add(
    x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y = x * scale + bias + residual, each of the three left out where it is not given.

    A bias, a residual connection, both, or a LayerScale (Touvron et al., 2021) before a residual connection, in one
    pass over memory.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides with a dense last dimension.
        scale, bias: [C] or None, in the dtype of x or fp32.
        residual: shape and dtype of x, or None. Any strides with a dense last dimension.

    Returns:
        y: shape and dtype of x, contiguous. Rounded once: neither the product nor a sum is rounded before.

    Raises:
        InvalidArgument: none of the three is given, wrong dtypes or shapes, or no columns.
    """
    y = upcast(x)
    y = y if scale is None else y * upcast(scale)
    y = y if bias is None else y + upcast(bias)
    y = y if residual is None else y + upcast(residual)
    return y.to(x.dtype)


@op(
    family="activation",
    out={"dx": needed(0, _dx), "dscale": needed(1, like("scale")), "dbias": needed(2, like("bias"))},
    check=_check_backward,
    cost=lambda call: (
        bytes_of(call, "dy", *["x"] * call.has("dscale"), *["scale"] * call.has("dx"), "dx", "dscale", "dbias"),
        call.dy.numel * (_terms(call, "dx", "dbias") + 2 * _terms(call, "dscale")),
    ),
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M C", "x": "M C", "scale": "C", "bias": "C"},
        options=(
            {},
            {"needs": (True, False, False)},
            {"needs": (False, True, False)},
            {"needs": (False, False, True)},
            {"needs": (False, True, True)},
        ),
        absent=((), ("bias",), ("x", "scale")),
        either=("scale", "bias"),
    ),
    workloads=workloads.RESIDUAL,
)
def scale_bias_add_backward(
    dy: Tensor,
    x: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `scale_bias_add`: dx = dy * scale; dscale = sum of dy * x, dbias = sum of dy over rows.

    The gradient of residual, and without a scale that of x, is dy itself: not a result of this op.

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        x: [..., C], the input; only dscale needs it.
        scale: [C] or None, as in forward.
        bias: [C] or None; only its dtype is used.
        needs: which of (dx, dscale, dbias) to compute.

    Returns:
        (dx, dscale, dbias) in the dtypes of x, scale and bias; None where not needed, and dx also without a scale.
        Sums over rows are in float32 in an order fixed by the shape.

    Raises:
        InvalidArgument: neither scale nor bias is given, dscale is needed without x, wrong dtypes or shapes.
    """
    grad = upcast(dy)
    dx = dscale = dbias = None
    if needs[0] and scale is not None:
        dx = (grad * upcast(scale)).to(dy.dtype)
    if needs[1] and scale is not None and x is not None:
        dscale = _over_rows(grad * upcast(x)).to(scale.dtype)
    if needs[2] and bias is not None:
        dbias = _over_rows(grad).to(bias.dtype)
    return dx, dscale, dbias
