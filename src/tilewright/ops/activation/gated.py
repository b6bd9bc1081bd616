"""swiglu and geglu on two tensors, and their gradients: definitions, and what else is declared of them.

The functions themselves are in `functions`; the same ops on one tensor that holds both halves in `packed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.contract import floating, one_of, same_shape, wide_rows
from tilewright.core.cost import bytes_of, per_element
from tilewright.core.op import Gradient, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.activation import workloads
from tilewright.ops.activation.functions import APPROXIMATIONS, act, act_terms, derivative, derivative_terms


def _check(call: Call) -> None:
    rows = [name for name in ("gate", "up", "dy") if name in call.tensors]
    wide_rows(call, rows[0])
    floating(call, *rows)
    same_shape(call, *rows)
    if "approximate" in call.options:
        one_of(call, "approximate", *APPROXIMATIONS)


def _kind(o: Mapping[str, Any]) -> str:
    return APPROXIMATIONS[o["approximate"]] if "approximate" in o else "silu"


def _scale(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"y": act_terms(_kind(o), t["gate"]) * t["up"].abs()}


def _scale_backward(t: Mapping[str, Tensor], o: Mapping[str, Any]) -> dict[str, Tensor]:
    kind, dy = _kind(o), t["dy"].abs()
    return {
        "dgate": dy * t["up"].abs() * derivative_terms(kind, t["gate"]),
        "dup": dy * act_terms(kind, t["gate"]),
    }


_FORWARD = {"gate": "M C", "up": "M C"}
_BACKWARD = {"dy": "M C", "gate": "M C", "up": "M C"}
_NEEDS = ({"needs": (True, False)}, {"needs": (False, True)})


def _gradient(name: str) -> Gradient:
    return Gradient(name, grads={"y": "dy"}, takes={"gate": "gate", "up": "up"}, gives={"gate": "dgate", "up": "dup"})


def _backward(
    kind: str, dy: Tensor, gate: Tensor, up: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    grad, g = upcast(dy), upcast(gate)
    dgate = (grad * upcast(up) * derivative(kind, g)).to(gate.dtype) if needs[0] else None
    return dgate, (grad * act(kind, g)).to(up.dtype) if needs[1] else None


@op(
    family="activation",
    out={"y": like("gate")},
    gradient=_gradient("swiglu_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "gate", "up", "y"), per_element(call, 5)),
    error_scale=_scale,
    probes=Probes(dims=_FORWARD),
    workloads=workloads.FEED_FORWARD,
)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated linear unit with SiLU (Shazeer, 2020): y = gate * s(gate) * up, s the logistic function.

    Args:
        gate, up: [..., C] of one shape and dtype, fp32, fp16 or bf16, any strides with a dense last dimension: the
            two halves of `x.chunk(2, -1)` are read where they lie.

    Returns:
        y: shape and dtype of gate, contiguous. Rounded once: silu(gate) is not rounded before the product. A gate of
        -infinity gives NaN, as silu does in torch.

    Raises:
        InvalidArgument: wrong or different dtypes, different shapes, or no columns.
    """
    return (act("silu", upcast(gate)) * upcast(up)).to(gate.dtype)


@op(
    family="activation",
    out={"dgate": needed(0, like("gate")), "dup": needed(1, like("up"))},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "gate", "up", "dgate", "dup"), per_element(call, 10)),
    error_scale=_scale_backward,
    probes=Probes(dims=_BACKWARD, options=({}, *_NEEDS)),
    workloads=workloads.FEED_FORWARD,
)
def swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, *, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `swiglu`: dup = dy * silu(gate); dgate = dy * up * s(gate) * (1 + gate * (1 - s(gate))).

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        gate, up: [..., C], the inputs.
        needs: which of (dgate, dup) to compute.

    Returns:
        (dgate, dup) in the dtypes of gate and up, each rounded once; None where not needed.
    """
    return _backward("silu", dy, gate, up, needs)


@op(
    family="activation",
    out={"y": like("gate")},
    gradient=_gradient("geglu_backward"),
    check=_check,
    cost=lambda call: (bytes_of(call, "gate", "up", "y"), per_element(call, 9)),
    error_scale=_scale,
    probes=Probes(dims=_FORWARD, options=({}, {"approximate": "none"})),
    workloads=workloads.FEED_FORWARD,
)
def geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """The gated linear unit with GELU (Shazeer, 2020): y = gelu(gate) * up.

    "tanh": gelu(g) = g * s(2 c g (1 + 0.044715 g^2)) with c = sqrt(2 / pi), which equals
    g * (1 + tanh(c (g + 0.044715 g^3))) / 2. "none": gelu(g) = g * (1 + erf(g / sqrt(2))) / 2.

    Args:
        gate, up: [..., C] of one shape and dtype, as in `swiglu`.
        approximate: "tanh" or "none", as in `torch.nn.functional.gelu`; Gemma has the first.

    Returns:
        y: shape and dtype of gate, contiguous. Rounded once: gelu(gate) is not rounded before the product. A gate of
        -infinity gives NaN, as gelu does in torch.

    Raises:
        InvalidArgument: as `swiglu`; also another `approximate`.
    """
    return (act(APPROXIMATIONS[approximate], upcast(gate)) * upcast(up)).to(gate.dtype)


@op(
    family="activation",
    out={"dgate": needed(0, like("gate")), "dup": needed(1, like("up"))},
    check=_check,
    cost=lambda call: (bytes_of(call, "dy", "gate", "up", "dgate", "dup"), per_element(call, 19)),
    error_scale=_scale_backward,
    probes=Probes(dims=_BACKWARD, options=({}, {"approximate": "none"}, *_NEEDS)),
    workloads=workloads.FEED_FORWARD,
)
def geglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    approximate: str = "tanh",
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `geglu`: dup = dy * gelu(gate); dgate = dy * up * gelu'(gate).

    "tanh": gelu'(g) = s(z) + g s(z) s(-z) z', with z = 2 c g (1 + 0.044715 g^2) and z' = 2 c (1 + 3 * 0.044715 g^2);
    "none": Phi(g) + g phi(g).

    Args:
        dy: [..., C], upstream gradient of y. Any strides.
        gate, up: [..., C], the inputs.
        approximate: as in forward.
        needs: which of (dgate, dup) to compute.

    Returns:
        (dgate, dup) in the dtypes of gate and up, each rounded once; None where not needed.
    """
    return _backward(APPROXIMATIONS[approximate], dy, gate, up, needs)
