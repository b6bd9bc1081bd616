"""The forward ops of the norm family: their definitions and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, not_negative, per_column, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.op import Gradient, Saved, like, op, rows_of, upcast
from tilewright.core.probes import Probes
from tilewright.ops.norm import workloads


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, in the accumulation dtype."""
    return torch.rsqrt(upcast(x).square().mean(-1) + eps)


def _check_rms(call: Call) -> None:
    wide_rows(call, "x")
    floating(call, "x", *(["residual"] if "residual" in call.tensors else []))
    same_shape(call, "x", *(["residual"] if "residual" in call.tensors else []))
    per_column(call, "x", "weight")
    not_negative(call, "eps")


def _scale_rms(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {"y": t["y"].abs(), "rstd": t["rstd"].abs()}
    if "residual" in t:
        found["h"] = t["x"].abs() + t["residual"].abs()
    return found


@op(
    family="norm",
    out={"y": like("x")},
    saved={"rstd": Saved(rows_of("x"), rstd_of)},
    gradient=Gradient(
        "rms_norm_backward",
        grads={"y": "dy"},
        takes={"x": "x", "weight": "weight", "rstd": "rstd"},
        gives={"x": "dx", "weight": "dweight"},
    ),
    check=_check_rms,
    cost=lambda call: (bytes_of(call, "x", "weight", "y", "rstd"), per_element(call, 4)),
    error_scale=_scale_rms,
    probes=Probes(
        dims={"x": "M C", "weight": "C"},
        options=({}, {"weight_offset": 1.0, "eps": 1e-5}, {"cast_before_weight": True}, {"eps": 0.0}),
        absent=((), ("weight",)),
        either=("weight",),
    ),
    workloads=workloads.NORM,
    rounding="once, at the output; with cast_before_weight also x * rstd, before the weight",
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019).

    y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps), in float32, rounded once.

    Args:
        x: [..., C], fp32, fp16 or bf16, any strides with a dense last dimension.
        weight: [C], x.dtype or fp32; None for 1.
        eps: added to the mean square; 0 or more.
        weight_offset: 1.0 for Gemma's convention.
        cast_before_weight: round x * rstd to x.dtype before the weight, as Llama and Qwen modelling code does.

    Returns:
        y: shape and dtype of x, contiguous.

    Raises:
        InvalidArgument: wrong dtype, rank, weight size, device mix, or eps < 0.
    """
    y = upcast(x) * rstd_of(x, eps).unsqueeze(-1)
    if weight is not None:
        y = upcast(y.to(x.dtype)) if cast_before_weight else y
        y = y * (upcast(weight) + weight_offset)
    return y.to(x.dtype)


def _rstd_of_sum(h: Tensor, eps: float) -> Tensor:
    return rstd_of(h, eps)


@op(
    family="norm",
    out={"y": like("x"), "h": like("x")},
    saved={"rstd": Saved(rows_of("x"), _rstd_of_sum)},
    gradient=Gradient(
        "rms_norm_backward",
        grads={"y": "dy", "h": "dh"},
        takes={"x": "h", "weight": "weight", "rstd": "rstd"},
        gives={"x": "dx", "residual": "dx", "weight": "dweight"},
    ),
    check=_check_rms,
    cost=lambda call: (bytes_of(call, "x", "residual", "weight", "y", "h", "rstd"), per_element(call, 5)),
    error_scale=_scale_rms,
    probes=Probes(
        dims={"x": "M C", "residual": "M C", "weight": "C"},
        options=({}, {"weight_offset": 1.0}),
        absent=((), ("weight",)),
        either=("weight",),
    ),
    workloads=workloads.NORM,
    rounding="h = x + residual once; y once, from the rounded h",
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Residual addition and rms_norm in one pass: h = x + residual, y = rms_norm(h).

    Args:
        x, residual: [..., C] of one dtype, fp32, fp16 or bf16.
        weight: [C], x.dtype or fp32; None for 1.
        eps, weight_offset: as in `rms_norm`.

    Returns:
        (y, h): both like x. h is rounded to x.dtype and y comes from the rounded h, so the fused and the composed
        forms agree.

    Raises:
        InvalidArgument: as `rms_norm`; also where x and residual differ in shape or dtype.
    """
    h = (upcast(x) + upcast(residual)).to(x.dtype)
    return rms_norm.reference(h, weight, eps=eps, weight_offset=weight_offset), h


def _mean_of(x: Tensor) -> Tensor:
    return upcast(x).mean(-1)


def _centred_rstd_of(x: Tensor, eps: float) -> Tensor:
    acc = upcast(x)
    return torch.rsqrt((acc - acc.mean(-1, keepdim=True)).square().mean(-1) + eps)


def _check_layer(call: Call) -> None:
    added = [n for n in ("residual",) if n in call.tensors]
    wide_rows(call, "x")
    floating(call, "x", *added)
    same_shape(call, "x", *added)
    per_column(call, "x", "weight", "bias", *(["pre_bias"] if "pre_bias" in call.tensors else []))
    not_negative(call, "eps")


def _scale_layer(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    h = t["h"] if "h" in t else t["x"]
    rstd = t["rstd"]
    # the mean carries the rounding of all its terms, and the deviation and rstd carry the mean's
    size = h.abs().mean(-1)
    y = (h.abs() + size.unsqueeze(-1)) * rstd.unsqueeze(-1)
    y = y * t["weight"].abs() if t.get("weight") is not None else y
    y = y + t["bias"].abs() if t.get("bias") is not None else y
    found = {"y": y, "mean": size, "rstd": rstd * (1 + size * rstd)}
    if "residual" in t:
        terms = t["x"].abs() + t["residual"].abs()
        found["h"] = terms + t["pre_bias"].abs() if t.get("pre_bias") is not None else terms
    return found


@op(
    family="norm",
    out={"y": like("x")},
    saved={"mean": Saved(rows_of("x"), _mean_of), "rstd": Saved(rows_of("x"), _centred_rstd_of)},
    gradient=Gradient(
        "layer_norm_backward",
        grads={"y": "dy"},
        takes={"x": "x", "weight": "weight", "bias": "bias", "mean": "mean", "rstd": "rstd"},
        gives={"x": "dx", "weight": "dweight", "bias": "dbias"},
    ),
    check=_check_layer,
    cost=lambda call: (bytes_of(call, "x", "weight", "bias", "y", "mean", "rstd"), per_element(call, 7)),
    error_scale=_scale_layer,
    probes=Probes(
        dims={"x": "M C", "weight": "C", "bias": "C"},
        options=({}, {"eps": 1e-6}),
        absent=((), ("weight", "bias"), ("bias",), ("weight",)),
        either=("weight", "bias"),
    ),
    workloads=workloads.NORM,
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last dimension (Ba, Kiros and Hinton, 2016).

    y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps): two passes, centred.

    Args:
        x: [..., C], fp32, fp16 or bf16.
        weight, bias: [C], x.dtype or fp32; either may be None.
        eps: added to the variance; 0 or more.

    Returns:
        y: shape and dtype of x, contiguous, rounded once.

    Raises:
        InvalidArgument: wrong dtype, rank, weight or bias size, device mix, or eps < 0.
    """
    acc = upcast(x)
    centred = acc - acc.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * upcast(weight)
    y = y if bias is None else y + upcast(bias)
    return y.to(x.dtype)


def _mean_of_sum(h: Tensor) -> Tensor:
    return _mean_of(h)


def _centred_rstd_of_sum(h: Tensor, eps: float) -> Tensor:
    return _centred_rstd_of(h, eps)


@op(
    family="norm",
    out={"y": like("x"), "h": like("x")},
    saved={"mean": Saved(rows_of("x"), _mean_of_sum), "rstd": Saved(rows_of("x"), _centred_rstd_of_sum)},
    gradient=Gradient(
        "layer_norm_backward",
        grads={"y": "dy", "h": "dh"},
        takes={"x": "h", "weight": "weight", "bias": "bias", "mean": "mean", "rstd": "rstd", "pre_bias": "pre_bias"},
        gives={"x": "dx", "residual": "dx", "weight": "dweight", "bias": "dbias", "pre_bias": "dpre_bias"},
    ),
    check=_check_layer,
    cost=lambda call: (
        bytes_of(call, "x", "residual", "weight", "bias", "pre_bias", "y", "h", "mean", "rstd"),
        per_element(call, 9),
    ),
    error_scale=_scale_layer,
    probes=Probes(
        dims={"x": "M C", "residual": "M C", "weight": "C", "bias": "C", "pre_bias": "C"},
        absent=(("pre_bias",), (), ("weight", "bias", "pre_bias")),
        either=("weight", "bias", "pre_bias"),
    ),
    workloads=workloads.NORM,
    rounding="h = x + pre_bias + residual once; y once, from the rounded h",
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    pre_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer_norm in one pass: h = x + pre_bias + residual, y = layer_norm(h).

    Args:
        x, residual: [..., C] of one dtype, fp32, fp16 or bf16.
        weight, bias: as in `layer_norm`.
        pre_bias: [C], x.dtype or fp32; added to x before the residual.
        eps: added to the variance; 0 or more.

    Returns:
        (y, h): both like x. h is rounded once and y comes from the rounded h.

    Raises:
        InvalidArgument: as `layer_norm`; also where x and residual differ in shape or dtype.
    """
    acc = upcast(x) if pre_bias is None else upcast(x) + upcast(pre_bias)
    h = (acc + upcast(residual)).to(x.dtype)
    return layer_norm.reference(h, weight, bias, eps=eps), h


def _check_l2(call: Call) -> None:
    wide_rows(call, "x")
    floating(call, "x")
    not_negative(call, "eps")


def _l2_rstd_of(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(upcast(x).square().sum(-1) + eps)


@op(
    family="norm",
    out={"y": like("x")},
    saved={"rstd": Saved(rows_of("x"), _l2_rstd_of)},
    gradient=Gradient("l2_norm_backward", grads={"y": "dy"}, takes={"y": "y", "rstd": "rstd"}, gives={"x": "dx"}),
    check=_check_l2,
    cost=lambda call: (bytes_of(call, "x", "y", "rstd"), per_element(call, 3)),
    error_scale=lambda t, o: {"y": t["y"].abs(), "rstd": t["rstd"].abs()},
    probes=Probes(dims={"x": "M C"}, options=({}, {"eps": 1e-12})),
    workloads=workloads.HEADS,
)
def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Division by the Euclidean norm of the last dimension, as delta-rule layers normalise queries and keys.

    y = x / sqrt(sum(x^2) + eps): eps is inside the root, unlike in `torch.nn.functional.normalize`.

    Args:
        x: [..., C], fp32, fp16 or bf16.
        eps: added to the sum of squares; 0 or more.

    Returns:
        y: shape and dtype of x, contiguous, rounded once.

    Raises:
        InvalidArgument: wrong dtype or rank, or eps < 0.
    """
    return (upcast(x) * _l2_rstd_of(x, eps).unsqueeze(-1)).to(x.dtype)
