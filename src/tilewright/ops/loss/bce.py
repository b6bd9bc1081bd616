"""bce_with_logits and its gradient: their definitions, and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.capability import FLOATS
from tilewright.core.contract import floating, one_of, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Spec, like, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.loss import workloads

REDUCTIONS = ("mean", "sum", "none")
UNDERFLOW = 2.0**-102
"""What stands beside a logistic function among the terms: 2^-24 of it is the smallest normal number."""


def _check(call: Call) -> None:
    one_of(call, "reduction", *REDUCTIONS)
    wide_rows(call, "logits")
    floating(call, "logits", "targets")
    out_dtype = call.options["out_dtype"]
    if out_dtype not in (None, *FLOATS, call.logits.dtype):
        name = DTYPE_NAMES.get(out_dtype, str(out_dtype))
        raise InvalidArgument(call.op, "out_dtype", name, "takes fp32, fp16, bf16, or None for that of logits")
    same_shape(call, "logits", "targets")
    logits: TensorFacts = call.logits
    for name in ("weight", "pos_weight"):
        facts = call.tensors[name]
        if facts is None:
            continue
        if facts.shape not in ((logits.columns,), logits.shape):
            needs = f"needs [{logits.columns}] or the shape of logits, {list(logits.shape)}"
            raise InvalidArgument(call.op, name, f"shape {list(facts.shape)}", f"{needs}: expand it")
        if facts.dtype not in (logits.dtype, torch.float32):
            known = DTYPE_NAMES.get(facts.dtype, str(facts.dtype))
            raise InvalidArgument(call.op, name, f"dtype {known}", "takes the dtype of logits, or fp32")


def _check_backward(call: Call) -> None:
    _check(call)
    kind = call.options["out_dtype"] or call.logits.dtype
    if call.dy.dtype != kind:
        problem = f"dtype {DTYPE_NAMES.get(call.dy.dtype, call.dy.dtype)}, while the loss is {DTYPE_NAMES[kind]}"
        raise InvalidArgument(call.op, "dy", problem, f"dy.to({kind})")
    wanted = call.logits.shape if call.reduction == "none" else ()
    if call.dy.shape != wanted:
        problem = f"shape {list(call.dy.shape)}, with reduction {call.reduction!r}"
        raise InvalidArgument(call.op, "dy", problem, f"needs {list(wanted)}, the shape of the loss")


def _loss(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    logits = t["logits"]
    return (tuple(logits.shape) if o["reduction"] == "none" else ()), o["out_dtype"] or logits.dtype


def _terms(t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """|w|, |x|, |1 - y| and |1 + (p - 1) y| as sums of absolute terms."""
    weight, pos_weight, y = t["weight"], t["pos_weight"], t["targets"].abs()
    positive = y * (1.0 if pos_weight is None else pos_weight.abs() + 1.0)
    return torch.ones_like(y) if weight is None else weight.abs(), t["logits"].abs(), 1.0 + y, 1.0 + positive


def _scale(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    """The exponential also makes |x| times as much of the rounding of its argument."""
    weight, size, negative, positive = _terms(t)
    tail = torch.exp(-size)
    softplus = torch.log1p(tail) + torch.clamp(-t["logits"], min=0.0) + size * tail + UNDERFLOW
    terms = weight * (negative * size + positive * softplus)
    if o["reduction"] == "none":
        return {"loss": terms}
    return {"loss": terms.sum() / (terms.numel() if o["reduction"] == "mean" else 1)}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    weight, size, negative, _ = _terms(t)
    positive = t["targets"].abs() * (1.0 if t["pos_weight"] is None else t["pos_weight"].abs())
    x = t["logits"]
    terms = negative * (torch.sigmoid(x) + UNDERFLOW) + positive * (torch.sigmoid(-x) + UNDERFLOW)
    count = x.numel() if o["reduction"] == "mean" else 1
    return {"dlogits": t["dy"].abs() / count * weight * terms * (1.0 + size)}


def _dy_of_the_loss(t: dict[str, Any], o: Mapping[str, Any]) -> None:
    """A scalar where the loss is one, and in its dtype."""
    if o["out_dtype"] is not None:
        t["dy"] = t["dy"].to(o["out_dtype"])
    if o["reduction"] != "none":
        t["dy"] = t["dy"].flatten()[:1].sum()


_DIMS = {"logits": "M C", "targets": "M C", "weight": "C | M C", "pos_weight": "C | M C"}
_PARAMETERS = ("weight", "pos_weight")
_ABSENT = (_PARAMETERS, ("weight",), ("pos_weight",), ())
_OUT_DTYPES = (
    {"reduction": "mean", "out_dtype": torch.float32},
    {"reduction": "none", "out_dtype": torch.float32},
    {"reduction": "none", "out_dtype": torch.float16},
    {"reduction": "sum", "out_dtype": torch.bfloat16},
)


@op(
    family="loss",
    out={"loss": _loss},
    gradient=Gradient(
        "bce_with_logits_backward",
        grads={"loss": "dy"},
        takes={"logits": "logits", "targets": "targets", "weight": "weight", "pos_weight": "pos_weight"},
        gives={"logits": "dlogits"},
    ),
    check=_check,
    cost=lambda call: (bytes_of(call, "logits", "targets", *_PARAMETERS, "loss"), per_element(call, 12)),
    error_scale=_scale,
    probes=Probes(
        dims=_DIMS,
        options=({}, {"reduction": "sum"}, {"reduction": "none"}, *_OUT_DTYPES),
        absent=_ABSENT,
        either=_PARAMETERS,
    ),
    workloads=workloads.LOGITS,
)
def bce_with_logits(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Binary cross entropy of logits, as `torch.nn.functional.binary_cross_entropy_with_logits` defines it.

    With q = log1p(exp(-|x|)) + max(-x, 0), which is -log s(x) without overflow, an element's loss is
    l = weight * ((1 - y) * x + (1 + (pos_weight - 1) * y) * q).

    Args:
        logits: [..., C], x: fp32, fp16 or bf16, any strides with a dense last dimension.
        targets: like logits, y: soft targets are allowed, and what lies outside of [0, 1] is not checked.
        weight: [C] or the shape of logits, in its dtype or float32; None for 1.
        pos_weight: the same, for the positive share of each target; None for 1.
        reduction: "mean" divides the sum by the number of elements (not by the sum of weights), "sum", or "none".
        out_dtype: of the loss: fp32, fp16 or bf16; None for that of logits. The gradient of logits keeps theirs.

    Returns:
        The loss in `out_dtype`, rounded once: a scalar, or the shape of logits for "none". Sums are taken in
        float32 in an order that shape and device fix. Of no elements the mean is NaN and the sum 0.

    Raises:
        InvalidArgument: wrong or different dtypes or shapes, no columns, or another reduction or `out_dtype`.
        NoGradient: targets, weight or pos_weight ask for a gradient.
    """
    x, y = upcast(logits), upcast(targets)
    q = torch.log1p(torch.exp(-x.abs())) + torch.clamp(-x, min=0.0)
    share = q if pos_weight is None else (1.0 + (upcast(pos_weight) - 1.0) * y) * q
    loss = (1.0 - y) * x + share
    if weight is not None:
        loss = upcast(weight) * loss
    if reduction != "none":
        loss = loss.sum()
    return (loss / logits.numel() if reduction == "mean" else loss).to(out_dtype or logits.dtype)


@op(
    family="loss",
    out={"dlogits": like("logits")},
    check=_check_backward,
    cost=lambda call: (bytes_of(call, "dy", "logits", "targets", *_PARAMETERS, "dlogits"), per_element(call, 12)),
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M C", **_DIMS},
        options=({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "sum"}, *_OUT_DTYPES),
        absent=_ABSENT,
        either=_PARAMETERS,
        by_option=("dy",),
        derive=_dy_of_the_loss,
    ),
    workloads=workloads.LOGITS,
)
def bce_with_logits_backward(
    dy: Tensor,
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The gradient of `bce_with_logits`: dlogits = d * weight * ((1 - y) * s(x) - pos_weight * y * s(-x)).

    d is dy, or dy / count for "mean". Both terms are formed apart, so nothing cancels where s(x) is near 1.

    Args:
        dy: upstream gradient of the loss, in its dtype: a scalar, or [..., C] with any strides for "none".
        logits, targets, weight, pos_weight, reduction, out_dtype: as in forward.

    Returns:
        dlogits: shape and dtype of logits, formed in float32 and rounded once.
    """
    x, y, d = upcast(logits), upcast(targets), upcast(dy)
    positive = y * torch.sigmoid(-x)
    if pos_weight is not None:
        positive = upcast(pos_weight) * positive
    if reduction == "mean":
        d = d / logits.numel()
    if weight is not None:
        d = d * upcast(weight)
    return (d * ((1.0 - y) * torch.sigmoid(x) - positive)).to(logits.dtype)
