"""silu_attention and its gradient: their definitions, and what else is declared of them.

The mathematics and the tolerances are in `pointwise`, how inputs are made in `inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.cost import bytes_of
from tilewright.core.op import Gradient, Spec, op, upcast
from tilewright.ops.attention.dense import wanted
from tilewright.ops.hstu import contract, inputs, pointwise, workloads


def _check(call: Call) -> None:
    """Of both ops: they name their tensors alike."""
    contract.heads(call, "[B, S, H, D]")
    contract.multiplier(call)


def _o(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    return (*t["q"].shape[:-1], t["v"].shape[-1]), t["q"].dtype


def _read(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Any]:
    """What `pointwise` takes, with what sees nothing and what nobody sees put to 0: it may be NaN."""
    found: dict[str, Any] = {name: upcast(t[name]) for name in ("q", "k", "v", "do") if t.get(name) is not None}
    found |= {"seen": None, "factor": o["post_scale"], "scale": o["scale"]}
    if t["mask"] is not None:
        seen = t["mask"] != 0
        found |= {"seen": seen, "factor": upcast(t["mask"]) * o["post_scale"]}
        for name, axis in (("q", 3), ("do", 3), ("k", 2), ("v", 2)):
            if name in found:
                some = seen.any(axis).transpose(1, 2)[..., None]  # [B or 1, S, H or 1, 1]
                found[name] = torch.where(some, found[name], 0.0)
    return found


def _products(call: Call) -> int:
    """Operations of one product of columns of every pair and head, for each column."""
    return int(2 * call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[1])


def _cost(call: Call) -> tuple[int, int]:
    return bytes_of(call, "q", "k", "v", "mask", "o"), _products(call) * (call.q.columns + call.v.columns)


def _cost_backward(call: Call) -> tuple[int, int]:
    """Five products: the scores again, dP, dv, dq, dk."""
    moved = bytes_of(call, "do", "q", "k", "v", "mask", "dq", "dk", "dv")
    return moved, _products(call) * (3 * call.q.columns + 2 * call.v.columns)


@op(
    family="hstu",
    out={"o": _o},
    gradient=Gradient(
        "silu_attention_backward",
        grads={"o": "do"},
        takes={n: n for n in ("q", "k", "v", "mask")},
        gives={"q": "dq", "k": "dk", "v": "dv"},
    ),
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: pointwise.scales(**_read(t, o))[0],
    narrowed=lambda t, o: pointwise.scales(**_read(t, o))[1],
    probes=inputs.DENSE,
    workloads=workloads.DENSE,
    rounding=pointwise.ROUNDING,
)
def silu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, post_scale: float = 1.0
) -> Tensor:
    """Attention by SiLU (Zhai et al., 2024, "Actions speak louder than words"): with X = scale q k^T,
    o = (SiLU(X) mask post_scale) v. Nothing is normalised.

    The mask multiplies. Where it is 0 a pair counts for nothing, selected and not multiplied away: a score may be NaN
    there, a query that sees nothing gives 0, and neither it nor a key that nobody sees is read into a sum. Keys and
    values that only some queries see must be finite.

    o is rounded once. In half precision a kernel may round the weights to the dtype of v before they meet it; checks
    then allow an ulp of each such term.

    Args:
        q: [B, Sq, H, D], fp32, fp16 or bf16. Views of a fused projection and of [B, H, S, D] are read in place.
        k, v: [B, Sk, H, D] and [B, Sk, H, Dv], dtype of q.
        mask: [B or 1, H or 1, Sq, Sk], a real multiplier in the dtype of q or fp32. It has no gradient.
        scale: of scores; 0.0 is 0.0.
        post_scale: of weights.

    Returns:
        o: [B, Sq, H, Dv] in the dtype of q, contiguous.

    Raises:
        InvalidArgument: wrong dtypes or shapes.
    """
    given = {"q": q, "k": k, "v": v, "mask": mask}
    return pointwise.forward(**_read(given, {"scale": scale, "post_scale": post_scale})).to(q.dtype)


@op(
    family="hstu",
    out={"dq": wanted("q", 0), "dk": wanted("k", 1), "dv": wanted("v", 2)},
    check=_check,
    cost=_cost_backward,
    error_scale=lambda t, o: pointwise.scales_backward(**_read(t, o))[0],
    narrowed=lambda t, o: pointwise.scales_backward(**_read(t, o))[1],
    probes=inputs.DENSE_BACKWARD,
    workloads=workloads.DENSE,
    rounding=pointwise.ROUNDING_BACKWARD,
)
def silu_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    post_scale: float = 1.0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `silu_attention`: with P the weights, s(X) the logistic function and
    dX = (do v^T) mask post_scale s(X) (1 + X (1 - s(X))) scale: dq = dX k, dk = dX^T q, dv = P^T do.

    Args:
        do: [B, Sq, H, Dv], upstream gradient of o. Any strides.
        q, k, v, mask, scale, post_scale: as in forward.
        needs: which of (dq, dk, dv) to compute.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k and v, None where not needed.
    """
    given = {"do": do, "q": q, "k": k, "v": v, "mask": mask}
    found = pointwise.backward(**_read(given, {"scale": scale, "post_scale": post_scale}))
    dq, dk, dv = (x.to(q.dtype) if need else None for x, need in zip(found, needs, strict=True))
    return dq, dk, dv
