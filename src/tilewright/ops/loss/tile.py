"""The loss family in the library's own tile language: a block of columns a program, and a second launch for sums."""

from __future__ import annotations

import contextlib
from typing import Any

from tilewright import tile
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Config, Launch, Scratch
from tilewright.ops.loss.configs import scales
from tilewright.ops.loss.log1p import LOG1P
from tilewright.ops.tile_rows import accuracy, grid, one_row, place

CHUNK = 4096


def _softplus(t: Any, x: Any, u: Any) -> Any:
    """log1p(u) + max(-x, 0), with u = exp(-|x|)."""
    ratio = t.fma(u, LOG1P[-1], LOG1P[-2])
    for coefficient in reversed(LOG1P[:-2]):
        ratio = t.fma(ratio, u, coefficient)
    return ratio * u + t.maximum(-x, 0.0)


def _slope(t: Any, x: Any, y: Any, u: Any, pos_weight: Any, accuracy: str) -> Any:
    """(1 - y) * s(x) - pos_weight * y * s(-x), both logistic functions of u = exp(-|x|)."""
    near = t.reciprocal(1.0 + u, accuracy)
    far = u * near
    positive = y * t.where(x < 0.0, near, far)
    if pos_weight is not None:
        positive = pos_weight * positive
    return (1.0 - y) * t.where(x < 0.0, far, near) - positive


def _parameter(t: Any, view: Any, row: Any, col: Any, by_column: bool) -> Any:
    return t.load(view[col] if by_column else view[row, col]).f32()


@tile.kernel
def loss_block(
    t: Any, logits: Any, targets: Any, weight: Any, pos_weight: Any, loss: Any, partials: Any, unit: Any, count: Any,
    weight_by_column: bool, pos_by_column: bool, accuracy: str,
) -> None:  # fmt: skip
    """The loss of each element, or with `partials` the sum of a block. `unit`: the gradient for an upstream of 1, over
    the count if there is one."""
    row, col = place(t, logits.shape[1])
    x, y = t.load(logits[row, col]).f32(), t.load(targets[row, col]).f32()
    u = t.exp(-t.abs(x), accuracy)
    p = None if pos_weight is None else _parameter(t, pos_weight, row, col, pos_by_column)
    w = None if weight is None else _parameter(t, weight, row, col, weight_by_column)
    q = _softplus(t, x, u)
    if p is not None:
        q = (1.0 + (p - 1.0) * y) * q
    found = (1.0 - y) * x + q
    found = found if w is None else w * found
    if unit is not None:
        slope = _slope(t, x, y, u, p, accuracy)
        if count is not None:
            w = 1.0 / count if w is None else 1.0 / count * w
        t.store(unit[row, col], slope if w is None else w * slope)
    if partials is None:
        t.store(loss[row, col], found.to(loss.dtype))
    else:
        t.store(partials[row, t.program_id(1)], t.sum(found))


@tile.kernel
def sum_all(t: Any, partials: Any, out: Any, count: Any) -> None:
    """The sum of all partial sums, over the count if there is one."""
    total = t.var(0.0)
    for start in t.range(0, partials.shape[0], CHUNK):
        at = start + t.arange(CHUNK, limit=partials.shape[0] - start)
        total.set(total.get() + t.sum(t.load(partials[at])))
    found = total.get() if count is None else total.get() / count
    t.store(out[0], found.to(out.dtype))


@tile.kernel
def gradient_block(
    t: Any, dy: Any, logits: Any, targets: Any, weight: Any, pos_weight: Any, dlogits: Any, count: Any, one_dy: bool,
    weight_by_column: bool, pos_by_column: bool, accuracy: str,
) -> None:  # fmt: skip
    """d * weight times the slope of the loss."""
    row, col = place(t, logits.shape[1])
    x, y = t.load(logits[row, col]).f32(), t.load(targets[row, col]).f32()
    d = t.load(dy[0] if one_dy else dy[row, col]).f32()
    d = d if count is None else d / count
    p = None if pos_weight is None else _parameter(t, pos_weight, row, col, pos_by_column)
    if weight is not None:
        d = d * _parameter(t, weight, row, col, weight_by_column)
    slope = _slope(t, x, y, t.exp(-t.abs(x), accuracy), p, accuracy)
    t.store(dlogits[row, col], (d * slope).to(dlogits.dtype))


@tile.kernel
def scale_block(t: Any, dy: Any, unit: Any, dlogits: Any, in_place: bool) -> None:
    """dlogits = dy * unit. `in_place`: they are one tensor, which stays as it is where dy is 1."""
    row, col = place(t, dlogits.shape[1])
    d = t.load(dy[0]).f32()
    with t.when(d != 1.0) if in_place else contextlib.nullcontext():
        t.store(dlogits[row, col], (d * t.load(unit[row, col]).f32()).to(dlogits.dtype))


def _arguments(call: Call, more: dict[str, TensorFacts | None]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(tensors, constants, names of those along columns)."""
    logits, tensors = call.logits, call.tensors
    names = {"weight": "weight_by_column", "pos_weight": "pos_by_column"}
    along = [n for n in names if tensors[n] is not None and tensors[n].shape != logits.shape]  # type: ignore[union-attr]
    args = {n: tensors[n] for n in ("logits", "targets", *names)} | more
    if not along:
        args = one_row(args)
    return args, {flag: n in along for n, flag in names.items()}, along


def forward(call: Call, config: Config) -> Launch | tuple[Launch, ...]:
    """bce_with_logits."""
    if call.reduction == "none":
        args, constants, along = _arguments(call, {"loss": call.loss})
        args |= {"partials": None, "unit": None, "count": None}
        constants["accuracy"] = accuracy(call.loss)
        return Launch(loss_block, grid(args["logits"]), args, constants, {"flat": tuple(along), "config": config})
    args, constants, along = _arguments(call, {"unit": call.tensors.get("unit")})
    constants["accuracy"] = accuracy(call.loss, args["unit"])
    cells = grid(args["logits"])
    partials = Scratch("partials", cells[:2])
    count = float(call.logits.numel) if call.reduction == "mean" else None
    args |= {"loss": None, "partials": partials, "count": count if call.has("unit") else None}
    blocks = Launch(loss_block, cells, args, constants, {"flat": tuple(along), "config": config})
    total = {"partials": partials, "out": call.loss, "count": count}
    return blocks, Launch(sum_all, (1, 1, 1), total, {}, {"flat": ("partials", "out")})


def backward(call: Call, config: Config) -> Launch:
    """bce_with_logits_backward, from the inputs or from what forward saved."""
    if scales(call):
        rows = one_row({"unit": call.unit, "dlogits": call.dlogits})
        dlogits = rows["dlogits"]
        assert dlogits is not None
        constants: dict[str, Any] = {"in_place": "dlogits" in call.aliased}
        how = {"flat": ("dy",), "config": config}
        return Launch(scale_block, grid(dlogits), {"dy": call.dy, **rows}, constants, how)
    each = call.reduction == "none"
    args, constants, along = _arguments(call, {"dlogits": call.dlogits, **({"dy": call.dy} if each else {})})
    args |= {"dy": args["dy"] if each else call.dy, "count": None}
    if call.reduction == "mean":
        args["count"] = float(call.logits.numel)
    flat = (*along, *(() if each else ("dy",)))
    constants |= {"one_dy": not each, "accuracy": accuracy(call.dlogits)}
    how = {"flat": flat, "config": config}
    return Launch(gradient_block, grid(args["logits"]), args, constants, how)
