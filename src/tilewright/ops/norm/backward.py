"""The gradients of the norm family, as ops of their own with kernels of their own.

`rms_norm_backward` serves rms_norm and add_rms_norm, `layer_norm_backward` layer_norm and add_layer_norm: there x is
the saved sum h, and dh its upstream gradient, which is added to dx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, per_column, per_row, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.norm import workloads
from tilewright.ops.norm.forward import l2_norm, layer_norm, rms_norm


def _check_backward(call: Call) -> None:
    main = "y" if call.op == "l2_norm_backward" else "x"
    grads = [n for n in ("dy", "dh") if n in call.tensors]
    wide_rows(call, main)
    floating(call, main, *grads)
    same_shape(call, main, *grads)
    per_column(call, main, *[n for n in ("weight", "bias", "pre_bias") if n in call.tensors])
    per_row(call, main, *[n for n in ("mean", "rstd") if n in call.tensors])
    if all(call.tensors[n] is None for n in grads):
        raise InvalidArgument(call.op, "dy", "no upstream gradient is given", "pass dy, dh or both")


def _rows(t: Tensor) -> Tensor:
    """[M, C] of the accumulation dtype."""
    return upcast(t).reshape(-1, t.shape[-1])


def _met(dy: Tensor | None, *terms: Tensor) -> tuple[Tensor, ...]:
    """What an upstream gradient multiplies, and the gradient. A missing one is nothing: not zeros, which make NaN of an
    infinity."""
    if dy is not None:
        return *terms, dy
    return *(torch.zeros_like(t) for t in terms), torch.zeros_like(terms[0])


def _add_saved_rms(t: dict[str, Any], o: Mapping[str, Any]) -> None:
    t["rstd"] = rms_norm.saved["rstd"].define(t["x"], 1e-6)


def _scale_rms_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    x, r, dy = _met(t.get("dy"), t["x"], t["rstd"].unsqueeze(-1))
    w = (t["weight"] + o["weight_offset"]).abs() if t.get("weight") is not None else torch.ones_like(x[..., :1])
    dx = (r * dy * w).abs() + (x * r**3).abs() * (dy * w * x).abs().mean(-1, keepdim=True)
    dx = dx + t["dh"].abs() if t.get("dh") is not None else dx
    return {"dx": dx, "dweight": (dy * x * r).abs().reshape(-1, x.shape[-1]).sum(0)}


@op(
    family="norm",
    out={"dx": needed(0, like("x")), "dweight": needed(1, like("weight"))},
    check=_check_backward,
    cost=lambda call: (
        bytes_of(call, "dy", "x", "weight", "rstd", "dh", "dx", "dweight"),
        per_element(call, 9),
    ),
    error_scale=_scale_rms_backward,
    probes=Probes(
        dims={"dy": "M C", "x": "M C", "weight": "C", "rstd": "M", "dh": "M C"},
        options=(
            {},
            {"weight_offset": 1.0},
            {"cast_before_weight": True},
            {"needs": (True, False)},
            {"needs": (False, True)},
        ),
        absent=(("dh",), (), ("weight", "dh"), ("dy",)),
        either=("weight",),
        derive=_add_saved_rms,
    ),
    workloads=workloads.NORM,
)
def rms_norm_backward(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dh: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `rms_norm` and of `add_rms_norm`.

    dx = rstd * (dy * w) - x * rstd^3 * mean(dy * w * x) + dh; dweight = sum over rows of dy * x * rstd.

    Args:
        dy: [..., C], upstream gradient of y; None for zero. Any strides.
        x: [..., C], the input (of add_rms_norm: the saved sum h).
        weight: [C] or None, as in forward.
        rstd: [...], float32, as forward saved it.
        dh: [..., C] or None, upstream gradient of h.
        weight_offset, cast_before_weight: as in forward; the gradient treats that rounding as the identity.
        needs: which of (dx, dweight) to compute.

    Returns:
        (dx, dweight) in the dtypes of x and weight; None where not needed or absent. dweight is summed in float32 in
        an order fixed by the shape.
    """
    acc, r, grad = _met(None if dy is None else _rows(dy), _rows(x), rstd.reshape(-1, 1))
    dx = dweight = None
    if needs[0]:
        dn = grad if weight is None else grad * (upcast(weight) + weight_offset)
        dx = r * dn - acc * r**3 * (dn * acc).mean(-1, keepdim=True)
        dx = (dx if dh is None else dx + _rows(dh)).to(x.dtype).reshape(x.shape)
    if needs[1] and weight is not None:
        n = acc * r
        n = upcast(n.to(x.dtype)) if cast_before_weight else n
        dweight = (grad * n).sum(0).to(weight.dtype)
    return dx, dweight


def _add_saved_layer(t: dict[str, Any], o: Mapping[str, Any]) -> None:
    t["mean"] = layer_norm.saved["mean"].define(t["x"])
    t["rstd"] = layer_norm.saved["rstd"].define(t["x"], 1e-5)


def _scale_layer_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    x, r, dy = _met(t.get("dy"), t["x"], t["rstd"].unsqueeze(-1))
    e = (dy * t["weight"] if t.get("weight") is not None else dy).abs()
    n = (x.abs() + x.abs().mean(-1, keepdim=True)) * r
    dx = r * (e + e.mean(-1, keepdim=True) + n * (e * n).mean(-1, keepdim=True))
    dx = dx + t["dh"].abs() if t.get("dh") is not None else dx
    terms = {"dweight": dy.abs() * n, "dbias": dy.abs(), "dpre_bias": dx}
    return {"dx": dx, **{name: t.reshape(-1, x.shape[-1]).sum(0) for name, t in terms.items()}}


@op(
    family="norm",
    out={
        "dx": needed(0, like("x")),
        "dweight": needed(1, like("weight")),
        "dbias": needed(2, like("bias")),
        "dpre_bias": needed(3, like("pre_bias")),
    },
    check=_check_backward,
    cost=lambda call: (
        bytes_of(call, "dy", "x", "weight", "mean", "rstd", "dh", "dx", "dweight", "dbias", "dpre_bias"),
        per_element(call, 13),
    ),
    error_scale=_scale_layer_backward,
    probes=Probes(
        dims={
            "dy": "M C", "x": "M C", "weight": "C", "bias": "C", "mean": "M", "rstd": "M", "dh": "M C", "pre_bias": "C",
        },
        options=({}, {"needs": (True, False, False, False)}, {"needs": (False, True, True, True)}),
        absent=(("dh", "pre_bias"), (), ("weight", "bias", "dh", "pre_bias"), ("dy",), ("bias", "pre_bias")),
        either=("weight", "bias", "pre_bias"),
        derive=_add_saved_layer,
    ),
    workloads=workloads.NORM,
)  # fmt: skip
def layer_norm_backward(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dh: Tensor | None = None,
    pre_bias: Tensor | None = None,
    *,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `layer_norm` and of `add_layer_norm`.

    With e = dy * weight and n = (x - mean) * rstd: dx = rstd * (e - mean(e) - n * mean(e * n)) + dh;
    dweight = sum dy * n, dbias = sum dy, dpre_bias = sum dx over rows (before dx is rounded).

    Args:
        dy: [..., C], upstream gradient of y; None for zero. Any strides.
        x: [..., C], the input (of add_layer_norm: the saved sum h).
        weight: [C] or None, as in forward.
        bias, pre_bias: [C] or None; only their dtypes are used.
        mean, rstd: [...], float32, as forward saved them.
        dh: [..., C] or None, upstream gradient of h.
        needs: which of (dx, dweight, dbias, dpre_bias) to compute.

    Returns:
        (dx, dweight, dbias, dpre_bias) in the dtypes of their inputs; None where not needed or absent. Sums over rows
        are in float32 in an order fixed by the shape.
    """
    r = rstd.reshape(-1, 1)
    n, r, grad = _met(None if dy is None else _rows(dy), (_rows(x) - mean.reshape(-1, 1)) * r, r)
    dx = dweight = dbias = dpre_bias = None
    if needs[0] or (needs[3] and pre_bias is not None):
        e = grad if weight is None else grad * upcast(weight)
        full = r * (e - e.mean(-1, keepdim=True) - n * (e * n).mean(-1, keepdim=True))
        full = full if dh is None else full + _rows(dh)
        dx = full.to(x.dtype).reshape(x.shape) if needs[0] else None
        dpre_bias = full.sum(0).to(pre_bias.dtype) if needs[3] and pre_bias is not None else None
    if needs[1] and weight is not None:
        dweight = (grad * n).sum(0).to(weight.dtype)
    if needs[2] and bias is not None:
        dbias = grad.sum(0).to(bias.dtype)
    return dx, dweight, dbias, dpre_bias


def _make_l2(t: dict[str, Any], o: Mapping[str, Any]) -> None:
    x = t["y"]
    t["rstd"] = l2_norm.saved["rstd"].define(x, 1e-6)
    t["y"] = l2_norm.reference(x)


@op(
    family="norm",
    out={"dx": like("y")},
    check=_check_backward,
    cost=lambda call: (bytes_of(call, "dy", "y", "rstd", "dx"), per_element(call, 5)),
    error_scale=lambda t, o: {
        "dx": t["rstd"].unsqueeze(-1) * (t["dy"].abs() + t["y"].abs() * (t["dy"] * t["y"]).abs().sum(-1, keepdim=True))
    },
    probes=Probes(dims={"dy": "M C", "y": "M C", "rstd": "M"}, derive=_make_l2),
    workloads=workloads.HEADS,
)
def l2_norm_backward(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of `l2_norm`: dx = rstd * (dy - y * sum(dy * y)).

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        y: [..., C], the output as forward returned it.
        rstd: [...], float32, as forward saved it.

    Returns:
        dx: like y.
    """
    grad, out = _rows(dy), _rows(y)
    dx = rstd.reshape(-1, 1) * (grad - out * (grad * out).sum(-1, keepdim=True))
    return dx.to(y.dtype).reshape(y.shape)
