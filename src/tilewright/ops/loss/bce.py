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
from tilewright.core.op import Gradient, Saved, Spec, like, op, upcast
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
    unit: TensorFacts | None = call.unit
    if unit is not None and not _saves(call.logits.dtype, call.reduction):
        kind = DTYPE_NAMES.get(call.logits.dtype, str(call.logits.dtype))
        problem = f"given with {kind} logits and reduction {call.reduction!r}"
        raise InvalidArgument(call.op, "unit", problem, "forward saves it for float32 and 'mean' or 'sum' alone")
    if unit is not None and (unit.shape, unit.dtype) != (call.logits.shape, call.logits.dtype):
        raise InvalidArgument(call.op, "unit", f"{unit}", f"needs the shape and dtype of {call.logits}")
    wanted = call.logits.shape if call.reduction == "none" else ()
    if call.dy.shape != wanted:
        problem = f"shape {list(call.dy.shape)}, with reduction {call.reduction!r}"
        raise InvalidArgument(call.op, "dy", problem, f"needs {list(wanted)}, the shape of the loss")


def _loss(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    logits = t["logits"]
    return (tuple(logits.shape) if o["reduction"] == "none" else ()), o["out_dtype"] or logits.dtype


def _saves(dtype: torch.dtype, reduction: str) -> bool:
    """Whether forward saves the gradient: in half precision it would be rounded twice, and for elements there is none
    before the upstream gradient is known."""
    return reduction != "none" and dtype in (torch.float32, torch.float64)


def _unit_rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec | None:
    logits = t["logits"]
    return (tuple(logits.shape), logits.dtype) if _saves(logits.dtype, o["reduction"]) else None


def _unit(
    logits: Tensor, targets: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str
) -> Tensor | None:
    if not _saves(logits.dtype, reduction):
        return None
    return _gradient(upcast(logits.new_ones(())), logits, targets, weight, pos_weight, reduction)


def _gradient(
    d: Tensor, logits: Tensor, targets: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str
) -> Tensor:
    """dlogits in the accumulation dtype; `d` is the upstream gradient in that dtype."""
    x, y = upcast(logits), upcast(targets)
    positive = y * torch.sigmoid(-x)
    if pos_weight is not None:
        positive = upcast(pos_weight) * positive
    if reduction == "mean":
        d = d / logits.numel()
    if weight is not None:
        d = d * upcast(weight)
    return d * ((1.0 - y) * torch.sigmoid(x) - positive)


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
    total = terms.sum() / (terms.numel() if o["reduction"] == "mean" else 1)
    return {"loss": total, "unit": _scale_of_gradient(t, o)}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    if t["unit"] is not None:
        return {"dlogits": t["dy"].abs() * t["unit"].abs()}
    return {"dlogits": t["dy"].abs() * _scale_of_gradient(t, o)}


def _scale_of_gradient(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> Tensor:
    """For an upstream gradient of 1."""
    weight, size, negative, _ = _terms(t)
    positive = t["targets"].abs() * (1.0 if t["pos_weight"] is None else t["pos_weight"].abs())
    x = t["logits"]
    terms = negative * (torch.sigmoid(x) + UNDERFLOW) + positive * (torch.sigmoid(-x) + UNDERFLOW)
    count = x.numel() if o["reduction"] == "mean" else 1
    return weight * terms * (1.0 + size) / count


def _as_forward_has_it(t: dict[str, Any], o: Mapping[str, Any]) -> None:
    """dy: a scalar where the loss is one, and in its dtype. unit: what forward saves, where it does."""
    if t["unit"] is not None:
        t["unit"] = _unit(t["logits"], t["targets"], t["weight"], t["pos_weight"], o["reduction"])
    if o["out_dtype"] is not None:
        t["dy"] = t["dy"].to(o["out_dtype"])
    if o["reduction"] != "none":
        t["dy"] = t["dy"].flatten()[:1].sum()


_DIMS = {"logits": "M C", "targets": "M C", "weight": "C | M C", "pos_weight": "C | M C"}
_PARAMETERS = ("weight", "pos_weight")
_ABSENT = (_PARAMETERS, ("weight",), ("pos_weight",), ())
_UNIT_OR_FORMULA = (_PARAMETERS, *((*absent, "unit") for absent in _ABSENT), ())
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
        takes={n: n for n in ("logits", "targets", *_PARAMETERS, "unit")},
        gives={"logits": "dlogits"},
        spends={"dlogits": "unit"},
    ),
    saved={"unit": Saved(_unit_rule, _unit, optional=True)},
    check=_check,
    cost=lambda call: (bytes_of(call, "logits", "targets", *_PARAMETERS, "loss", "unit"), per_element(call, 12)),
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


def _cost_backward(call: Call) -> tuple[int, int]:
    if call.has("unit"):
        return bytes_of(call, "dy", "unit", "dlogits"), per_element(call, 1)
    return bytes_of(call, "dy", "logits", "targets", *_PARAMETERS, "dlogits"), per_element(call, 12)


@op(
    family="loss",
    out={"dlogits": like("logits")},
    check=_check_backward,
    cost=_cost_backward,
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M C", **_DIMS, "unit": "M C"},
        options=({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "sum"}, *_OUT_DTYPES),
        absent=_UNIT_OR_FORMULA,
        either=_PARAMETERS,
        by_option=("dy",),
        derive=_as_forward_has_it,
    ),
    workloads=workloads.LOGITS,
)
def bce_with_logits_backward(
    dy: Tensor,
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    unit: Tensor | None = None,
    *,
    reduction: str = "mean",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The gradient of `bce_with_logits`: dlogits = d * weight * ((1 - y) * s(x) - pos_weight * y * s(-x)).

    d is dy, or dy / count for "mean". Both terms are formed apart, so nothing cancels where s(x) is near 1. With what
    forward saved it is dlogits = dy * unit, and logits, targets, weight and pos_weight are not read.

    Args:
        dy: upstream gradient of the loss, in its dtype: a scalar, or [..., C] with any strides for "none".
        logits, targets, weight, pos_weight, reduction, out_dtype: as in forward.
        unit: the gradient for an upstream of 1, in the shape of float32 logits; None for the formula.

    Returns:
        dlogits: shape and dtype of logits, formed in float32 and rounded once; from `unit` the product is rounded too,
        which changes nothing where dy is a power of 2.

    Raises:
        InvalidArgument: wrong dtypes or shapes, or a `unit` where forward saves none.
    """
    if unit is not None:
        return (upcast(dy) * unit).to(logits.dtype)
    return _gradient(upcast(dy), logits, targets, weight, pos_weight, reduction).to(logits.dtype)
