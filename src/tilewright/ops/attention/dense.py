"""attention and attention_backward: their definitions, and what else is declared of them.

The mathematics is in `softmax`, the masks in `masks`, the tolerances in `scales`, how inputs are made in `inputs`. The
function that users call, which takes packed sequences too, is in `functions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.cost import bytes_of
from tilewright.core.op import Gradient, OutRule, Saved, Spec, like, needed, op, upcast
from tilewright.ops.attention import contract, inputs, masks, scales, softmax, workloads
from tilewright.ops.attention.masks import Rules


def _check(call: Call) -> None:
    """Of both ops: they name their tensors alike."""
    contract.heads(call, "[B, S, H, D]")
    contract.lengths(call, "kv_len", "prefix_kv_len")
    contract.mask(call)
    contract.rules(call, square=call.q.shape[1] == call.k.shape[1] and not call.has("kv_len"))
    contract.dropout(call)


def o_rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    return (*t["q"].shape[:-1], t["v"].shape[-1]), t["q"].dtype


def _lse(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    batch, rows, heads, _ = t["q"].shape
    return (batch, heads, rows), contract.wide(t["q"].dtype)


def state_rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec | None:
    return ((2,), torch.int64) if o["dropout_p"] > 0.0 else None


def state_of(seed: Tensor | None, offset: Tensor | None, dropout_p: float) -> Tensor | None:
    """Copies, for the caller advances them."""
    if seed is None or dropout_p == 0.0:
        return None
    return torch.cat([seed, torch.zeros_like(seed) if offset is None else offset])


Read = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _read(t: Mapping[str, Any], rules: Rules, state: Tensor | None, p: float) -> Read:
    """q, k, v in the accumulation dtype, who sees what, and the factors of dropout."""
    q, k, v = t["q"], t["k"], t["v"]
    seen = masks.dense(q, k, t["kv_len"], t["prefix_kv_len"], t["mask"], rules)
    place = torch.arange(k.shape[1], device=q.device)
    keep = softmax.keep_of(state, p, q.shape[2], q.shape[1], place, q.shape[0])
    return *softmax.read(q, k, v, seen), seen, keep


def _scales(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    q, k, v, seen, keep = _read(t, Rules.of(o), state_of(t["seed"], t["offset"], o["dropout_p"]), o["dropout_p"])
    return scales.forward(q, k, v, t["lse"], seen, keep, softmax.scale_of(o["scale"], q.shape[-1]))[which]


def _scales_backward(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    q, k, v, seen, keep = _read(t, Rules.of(o), t["state"], o["dropout_p"])
    scale = softmax.scale_of(o["scale"], q.shape[-1])
    return scales.backward(t["do"], t["dlse"], q, k, v, t["o"], t["lse"], seen, keep, scale)[which]


def pairs(call: Call) -> int:
    """Query-key pairs that are seen, as far as shapes tell."""
    batch, rows, heads, _ = call.q.shape
    keys = call.k.shape[1]
    every = rows * keys
    if call.causal and rows <= keys:
        every -= rows * (rows - 1) // 2 + ((keys - rows) * rows if call.align != "bottom_right" else 0)
    width = call.window_left + (call.window_right if call.window_right >= 0 else 0) + 1
    if call.window_left >= 0 and (call.causal or call.window_right >= 0):
        every = min(every, rows * width)
    return int(batch * heads * every)


def _cost(call: Call) -> tuple[int, int]:
    moved = bytes_of(call, "q", "k", "v", "mask", "o", "lse")
    return moved, 2 * pairs(call) * (call.q.columns + call.v.columns)


def _cost_backward(call: Call) -> tuple[int, int]:
    """Five products: the scores again, dP, dv, dq, dk."""
    moved = bytes_of(call, "do", "q", "k", "v", "mask", "o", "lse", "dq", "dk", "dv")
    return moved, 2 * pairs(call) * (3 * call.q.columns + 2 * call.v.columns)


def wanted(name: str, index: int) -> OutRule:
    return needed(index, like(name))


@op(
    family="attention",
    out={"o": o_rule, "lse": _lse},
    saved={"state": Saved(state_rule, state_of, optional=True)},
    gradient=Gradient(
        "attention_backward",
        grads={"o": "do", "lse": "dlse"},
        takes={n: n for n in ("q", "k", "v", "o", "lse", "state", "kv_len", "prefix_kv_len", "mask")},
        gives={"q": "dq", "k": "dk", "v": "dv"},
        seldom=("lse",),
    ),
    check=_check,
    cost=_cost,
    error_scale=lambda t, o: _scales(t, o, 0),
    narrowed=lambda t, o: _scales(t, o, 1),
    probes=inputs.FORWARD,
    workloads=workloads.DENSE,
    rounding=scales.ROUNDING,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    prefix_kv_len: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
    window_left: int = -1,
    window_right: int = -1,
    prefix_rows: int = 0,
    prefix_kv: int = -1,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al., 2017): o = softmax(scale q k^T) v over the keys that a query sees.

    Query head h reads key head h // (Hq / Hkv) (Ainslie et al., 2023). Query i sees key j where all of these hold:
    j < kv_len[b]; with causal j <= p_i; with a window p_i - left <= j <= p_i + right; i >= prefix_rows or
    j < prefix_kv_len[b]; mask[b, h, i, j]. p_i is i for align "top_left" (torch), i + kv_len[b] - Sq for
    "bottom_right" (FlashAttention). A query that sees no key gives o = 0 and lse = -Inf.

    A pair that is not seen adds nothing to any result or gradient, whatever both of them hold: what no query sees, and
    a query that sees nothing with its upstream gradients, may be NaN. Kernels keep to that, and to sequences, elements
    of the batch and key heads apart from each other; but they multiply whole tiles, so of a key that only some queries
    see they may carry NaN to others of the same sequence and key head.

    o is rounded once. In half precision a kernel may round the weights to the dtype of v before they meet it; checks
    then allow an ulp of each such term.

    Args:
        q: [B, Sq, Hq, D], fp32, fp16 or bf16. Views of a fused projection and of [B, H, S, D] are read in place.
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv], dtype of q; Hq is a multiple of Hkv.
        kv_len: int32 or int64 [B], the keys that there are, clamped to 0..Sk; read when the kernel runs.
        prefix_kv_len: int32 or int64 [B], keys that the first `prefix_rows` queries see at most; or `prefix_kv`.
        mask: bool [B or 1, Hq or 1, Sq, Sk], True where visible.
        seed, offset: int64[1], which decide what dropout drops: row (b Hq + h) Sq + i and column j of the mask of
            `dropout_add`. One call uses up ceil(Sk / 4) offsets.
        scale: None is D^-1/2; 0.0 is 0.0.
        causal, align, window_left, window_right: see above; -1 is unbounded. `align` may be left out where Sq = Sk and
            kv_len is None.
        dropout_p: weights are dropped with this probability, the others multiplied by 1 / (1 - p).

    Returns:
        (o, lse): o [B, Sq, Hq, Dv] in the dtype of q; lse float32 [B, Hq, Sq], the natural logarithm of the sum of
        exponentials of scores. Both contiguous.

    Raises:
        InvalidArgument: wrong dtypes or shapes, heads that do not divide, a missing `align` or seed.
    """
    rules = Rules(causal, align, window_left, window_right, prefix_rows, prefix_kv)
    tensors = {"q": q, "k": k, "v": v, "kv_len": kv_len, "prefix_kv_len": prefix_kv_len, "mask": mask}
    wide_q, wide_k, wide_v, seen, keep = _read(tensors, rules, state_of(seed, offset, dropout_p), dropout_p)
    o, lse = softmax.forward(wide_q, wide_k, wide_v, seen, keep, softmax.scale_of(scale, q.shape[-1]))
    return o.to(q.dtype), lse


@op(
    family="attention",
    out={"dq": wanted("q", 0), "dk": wanted("k", 1), "dv": wanted("v", 2)},
    check=_check,
    cost=_cost_backward,
    error_scale=lambda t, o: _scales_backward(t, o, 0),
    narrowed=lambda t, o: _scales_backward(t, o, 1),
    probes=inputs.BACKWARD,
    workloads=workloads.DENSE,
    rounding=scales.ROUNDING_BACKWARD,
)
def attention_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    state: Tensor | None = None,
    kv_len: Tensor | None = None,
    prefix_kv_len: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
    window_left: int = -1,
    window_right: int = -1,
    prefix_rows: int = 0,
    prefix_kv: int = -1,
    dropout_p: float = 0.0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `attention` (Dao et al., 2022): with P = exp(S - lse), Z = keep / (1 - p), delta = sum do o,
    dP = (do v^T) Z and dS = P (dP - delta + dlse) scale: dq = dS k, dk = dS^T q, dv = (P Z)^T do.

    In half precision a kernel may round P Z and dS before these products; checks then allow an ulp of each such term.

    Args:
        do: [B, Sq, Hq, Dv], upstream gradient of o, or None. Any strides.
        dlse: float32 [B, Hq, Sq], upstream gradient of lse, or None. Any strides.
        q, k, v, kv_len, prefix_kv_len, mask: the inputs.
        o, lse: the outputs of forward.
        state: int64[2], seed and offset as forward saves them; with dropout.
        scale, causal, align, window_left, window_right, prefix_rows, prefix_kv, dropout_p: as in forward.
        needs: which of (dq, dk, dv) to compute.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k and v, None where not needed. dk and dv are summed over the query
        heads of a group in float32. A query without keys, and keys past kv_len, have gradient 0.
    """
    rules = Rules(causal, align, window_left, window_right, prefix_rows, prefix_kv)
    tensors = {"q": q, "k": k, "v": v, "kv_len": kv_len, "prefix_kv_len": prefix_kv_len, "mask": mask}
    wide_q, wide_k, wide_v, seen, keep = _read(tensors, rules, state, dropout_p)
    grad = None if do is None else upcast(do)
    found = softmax.backward(
        grad, dlse, wide_q, wide_k, wide_v, upcast(o), lse, seen, keep, softmax.scale_of(scale, q.shape[-1])
    )
    dq, dk, dv = (x.to(q.dtype) if need else None for x, need in zip(found, needs, strict=True))
    return dq, dk, dv
