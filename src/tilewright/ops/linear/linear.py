"""linear and its gradient: definitions, and what else is declared of them. Activations are the activation family's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, has_shape, one_of, parameter
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Saved, Spec, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation.functions import KINDS, act_terms, chain, derivative_terms
from tilewright.ops.activation.functions import act as activation
from tilewright.ops.linear import workloads

_USUAL_WIDTH = 72


def _check(call: Call) -> None:
    """Of both ops: they name their tensors alike."""
    if not call.x.shape:
        raise InvalidArgument(call.op, "x", "a scalar", "needs at least one dimension")
    given = [name for name in ("weight", "residual", "dy", "z") if name in call.tensors]
    floating(call, "x", *given)
    one_of(call, "act", *KINDS)
    weight, inputs = call.weight.shape, call.x.columns
    if len(weight) != 2 or weight[1] != inputs:
        wanted = f"needs [N, {inputs}]: {inputs} is the last dimension of x"
        raise InvalidArgument(call.op, "weight", f"shape {list(weight)}", wanted)
    parameter(call, "x", "bias", (weight[0],))
    for name in ("residual", "dy", "z"):
        has_shape(call, name, (*call.x.shape[:-1], weight[0]), "the rows of x, the first dimension of weight")


def _check_backward(call: Call) -> None:
    _check(call)
    if call.act != "none" and not call.has("z"):
        raise InvalidArgument(call.op, "z", f"None, with act {call.act!r}", "needs what forward saves")


def _rows(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    return (*t["x"].shape[:-1], t["weight"].shape[0]), t["x"].dtype


def _flat(t: Tensor) -> Tensor:
    """[M, C], also where either is 0."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = torch.matmul(upcast(x), upcast(weight).t())
    return z if bias is None else z + upcast(bias).to(z.dtype)


def _saved_z(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor | None:
    return None if act == "none" else _pre_activation(x, weight, bias).to(x.dtype)


def _steps(depth: int) -> float:
    """How many times 2^-24 of its terms a running sum of `depth` of them may be off. Each of the depth / 16 steps of a
    tensor core truncates by up to 2^-23 of the sum so far, and that grows as the root of what is summed."""
    return max(1.0, math.sqrt(depth) / 16.0)


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    """Terms of z, through the activation at z or a little above it, where an exponential tail is larger; the square of
    a rectifier is steeper there too."""
    kind, bias, residual = o["act"], t["bias"], t["residual"]
    z = _pre_activation(t["x"], t["weight"], bias)
    terms = torch.matmul(t["x"].abs(), t["weight"].abs().t()) * _steps(t["x"].shape[-1])
    terms = terms if bias is None else terms + bias.abs()
    above = z + terms * 2.0**-22
    slope = torch.maximum(derivative_terms(kind, z), derivative_terms(kind, above))
    y = act_terms(kind, z) + slope * terms
    return {"y": y if residual is None else y + residual.abs(), "z": terms}


def _scale_backward(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    dz = t["dy"].abs()
    if o["act"] != "none":  # dz is rounded for the products, beside what is off in the derivative
        dz = dz * derivative_terms(o["act"], t["z"]) + chain(o["act"], t["dy"], t["z"]).abs()
    rows = _flat(dz)
    return {
        "dx": torch.matmul(dz, t["weight"].abs()) * _steps(rows.shape[1]),
        "dweight": torch.matmul(rows.t(), _flat(t["x"]).abs()) * _steps(rows.shape[0]),
        "dbias": rows.sum(0),
    }


def _cost(call: Call) -> tuple[int, int]:
    return bytes_of(call, "x", "weight", "bias", "residual", "y", "z"), 2 * call.y.numel * call.x.columns


def _cost_backward(call: Call) -> tuple[int, int]:
    products = call.has("dx") + call.has("dweight")
    moved = bytes_of(call, "dy", "x", "weight", "dx", "dweight", "dbias", *(["z"] if call.act != "none" else []))
    return moved, 2 * products * call.dy.numel * call.x.columns


def _keep_z(tensors: dict[str, Any], options: Mapping[str, Any]) -> None:
    if options["act"] == "none":
        tensors["z"] = None


_ACTS = tuple({"act": kind} for kind in KINDS[1:])


@op(
    family="linear",
    out={"y": _rows},
    saved={"z": Saved(lambda t, o: None if o["act"] == "none" else _rows(t, o), _saved_z, optional=True)},
    gradient=Gradient(
        "linear_backward",
        grads={"y": "dy"},
        takes={"x": "x", "weight": "weight", "z": "z", "bias": "bias"},
        gives={"x": "dx", "weight": "dweight", "bias": "dbias", "residual": "dy"},
    ),
    check=_check,
    cost=_cost,
    error_scale=_scale,
    probes=Probes(
        dims={"x": "M C", "weight": "N C", "bias": "N", "residual": "M N"},
        options=({}, *_ACTS),
        absent=(("residual",), (), ("bias", "residual"), ("bias",)),
        either=("bias",),
        sizes={"N": _USUAL_WIDTH},
    ),
    workloads=workloads.FEED_FORWARD,
    rounding="once, at the output; z before act is not rounded",
)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, act: str = "none"
) -> Tensor:
    """A linear layer with its epilogue: y = act(z) + residual, z = x W^T + b.

    The product accumulates in float32 and is not rounded before the activation, unlike a matmul that is followed by
    one. float32 means IEEE float32; the reference and vendor kernels take TF32 where torch's own switch
    (`torch.backends.cuda.matmul`) allows it.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        weight: [N, K], dtype of x: as `torch.nn.Linear` keeps it.
        bias: [N] or None, dtype of x or fp32.
        residual: [..., N] or None, dtype of x; added after the activation.
        act: "none", "relu", "relu2" (max(z, 0)^2; So et al., 2021), "silu", "gelu" (with erf) or "gelu_tanh".

    Returns:
        y: [..., N], dtype of x, contiguous, rounded once. K = 0 gives act(b) + residual.

    Raises:
        InvalidArgument: wrong or different dtypes, shapes that do not match, another `act`.
    """
    y = activation(act, _pre_activation(x, weight, bias))
    return (y if residual is None else y + upcast(residual)).to(x.dtype)


@op(
    family="linear",
    out={"dx": needed(0, like("x")), "dweight": needed(1, like("weight")), "dbias": needed(2, like("bias"))},
    check=_check_backward,
    cost=_cost_backward,
    error_scale=_scale_backward,
    probes=Probes(
        dims={"dy": "M N", "x": "M C", "weight": "N C", "z": "M N", "bias": "N"},
        options=(
            {"act": "gelu"},
            *({"act": kind} for kind in KINDS if kind != "gelu"),
            *({"act": "gelu", "needs": needs} for needs in ((True, False, False), (False, True, False))),
            *({"act": act, "needs": (False, False, True)} for act in ("none", "silu")),
        ),
        absent=((), ("bias",)),
        either=("bias",),
        sizes={"N": _USUAL_WIDTH},
        derive=_keep_z,
    ),
    workloads=workloads.FEED_FORWARD,
    rounding="dz to the dtype of x; each output once",
)
def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    act: str = "none",
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `linear`: dz = dy * act'(z); dx = dz W; dweight = dz^T x; dbias = sum dz over the rows.

    dz is rounded to the dtype of x, in which the products take it. The gradient of the residual is dy itself.

    Args:
        dy: [..., N], upstream gradient of y. Any strides.
        x, weight: the inputs.
        z: [..., N], x W^T + b in the dtype of x, as forward saves it; not read for act "none".
        bias: the input; read for its dtype alone. Without it dbias is None.
        act: as in forward. At 0 the derivative of "relu" is 0, as in torch.
        needs: which of (dx, dweight, dbias) to compute.

    Returns:
        (dx, dweight, dbias) in the dtypes of x, weight and bias; None where not needed.

    Raises:
        InvalidArgument: as `linear`; also an activation without z.
    """
    dz = upcast(dy) if z is None or act == "none" else chain(act, upcast(dy), upcast(z))
    rows = upcast(_flat(dz).to(x.dtype))
    dbias = rows.sum(0).to(bias.dtype) if needs[2] and bias is not None else None
    dx = torch.matmul(rows, upcast(weight)).reshape(x.shape).to(x.dtype) if needs[0] else None
    dweight = torch.matmul(rows.t(), _flat(upcast(x))).to(weight.dtype) if needs[1] else None
    return dx, dweight, dbias
