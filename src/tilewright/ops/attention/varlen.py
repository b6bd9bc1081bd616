"""varlen_attention and its gradient: attention inside sequences that are packed one after the other.

The mathematics is that of `dense`, under a mask that keeps sequences apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Saved, Spec, op, upcast
from tilewright.ops.attention import contract, inputs_varlen, masks, scales, softmax, workloads
from tilewright.ops.attention.dense import Read, o_rule, state_of, state_rule, wanted
from tilewright.ops.attention.masks import Rules


def _check(call: Call) -> None:
    """Of both ops: they name their tensors alike."""
    contract.heads(call, "[T, H, D]")
    contract.sequences(call)
    contract.rules(call, square=False)
    contract.dropout(call)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = call.options[name]
        if value is not None and value < 0:
            raise InvalidArgument(call.op, name, f"{value}", "the longest sequence, or None")


def _check_values(tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
    for name, main, bound in (("cu_seqlens_q", "q", "max_seqlen_q"), ("cu_seqlens_k", "k", "max_seqlen_k")):
        starts, tokens = tensors[name], tensors[main]
        assert starts is not None and tokens is not None
        steps = starts.long().diff()
        if int(starts[0]) or bool((steps < 0).any()) or int(starts[-1]) > tokens.shape[0]:
            raise InvalidArgument(
                "varlen_attention", name, str(starts.tolist()[:16]),
                f"starts at 0, never decreases, ends at or before {tokens.shape[0]}",
            )  # fmt: skip
        most = options[bound]
        if most is not None and steps.numel() and int(steps.max()) > most:
            raise InvalidArgument("varlen_attention", bound, f"{most}", f"a sequence has {int(steps.max())}")


def _lse(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    return (t["q"].shape[1], t["q"].shape[0]), contract.wide(t["q"].dtype)


def _read(t: Mapping[str, Any], rules: Rules, state: Tensor | None, p: float) -> Read:
    """q, k, v as one batch in the accumulation dtype, who sees what, and the factors of dropout."""
    q, k, v = t["q"], t["k"], t["v"]
    seen, place = masks.packed(q.shape[0], k.shape[0], t["cu_seqlens_q"], t["cu_seqlens_k"], rules)
    keep = softmax.keep_of(state, p, q.shape[1], q.shape[0], place, 1)
    return *softmax.read(q[None], k[None], v[None], seen), seen, keep


def _scales(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    q, k, v, seen, keep = _read(t, Rules.of(o), state_of(t["seed"], t["offset"], o["dropout_p"]), o["dropout_p"])
    scale = softmax.scale_of(o["scale"], q.shape[-1])
    found = scales.forward(q, k, v, t["lse"][None], seen, keep, scale)[which]
    return {n: x[0] for n, x in found.items()}


def _scales_backward(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    q, k, v, seen, keep = _read(t, Rules.of(o), t["state"], o["dropout_p"])
    do, dlse = (None if t[n] is None else t[n][None] for n in ("do", "dlse"))
    scale = softmax.scale_of(o["scale"], q.shape[-1])
    found = scales.backward(do, dlse, q, k, v, t["o"][None], t["lse"][None], seen, keep, scale)[which]
    return {n: x[0] for n, x in found.items()}


def _pairs(call: Call) -> int:
    """Query-key pairs of sequences of one length; device lengths are not known."""
    count = max(1, call.cu_seqlens_q.shape[0] - 1)
    every = call.q.shape[0] * call.k.shape[0] // count
    return int(call.q.shape[1] * (every // 2 if call.causal else every))


def _cost(call: Call) -> tuple[int, int]:
    return bytes_of(call, "q", "k", "v", "o", "lse"), 2 * _pairs(call) * (call.q.columns + call.v.columns)


def _cost_backward(call: Call) -> tuple[int, int]:
    moved = bytes_of(call, "do", "q", "k", "v", "o", "lse", "dq", "dk", "dv")
    return moved, 2 * _pairs(call) * (3 * call.q.columns + 2 * call.v.columns)


@op(
    family="attention",
    out={"o": o_rule, "lse": _lse},
    saved={"state": Saved(state_rule, state_of, optional=True)},
    gradient=Gradient(
        "varlen_attention_backward",
        grads={"o": "do", "lse": "dlse"},
        takes={n: n for n in ("q", "k", "v", "o", "lse", "cu_seqlens_q", "cu_seqlens_k", "state")},
        gives={"q": "dq", "k": "dk", "v": "dv"},
        seldom=("lse",),
    ),
    check=_check,
    check_values=_check_values,
    cost=_cost,
    error_scale=lambda t, o: _scales(t, o, 0),
    narrowed=lambda t, o: _scales(t, o, 1),
    probes=inputs_varlen.FORWARD,
    workloads=workloads.PACKED,
    rounding=scales.ROUNDING,
)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
    window_left: int = -1,
    window_right: int = -1,
    prefix_rows: int = 0,
    prefix_kv: int = -1,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`attention` inside each of N sequences that are packed along one axis, without padding.

    Args:
        q: [Tq, Hq, D], fp32, fp16 or bf16. k, v: [Tk, Hkv, D] and [Tk, Hkv, Dv], of its dtype.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [N + 1] on the device: where sequences start and the last one ends.
            They begin with 0 and never decrease; sequences may be empty.
        seed, offset: int64[1], for dropout: row h Tq + token, and column j of a key in its sequence.
        max_seqlen_q, max_seqlen_k: upper bounds of lengths, where they are known; nothing is read past them.
        causal, align, window_left, window_right, prefix_rows, prefix_kv: as in `attention`, inside each sequence, whose
            key length is kv_len.
        scale, dropout_p: as in `attention`.

    Returns:
        (o, lse): [Tq, Hq, Dv] and float32 [Hq, Tq]. Tokens past the last sequence have o = 0 and lse = -Inf.

    Raises:
        InvalidArgument: as `attention`; on a CPU also sequences that overlap or end past the tokens.
    """
    rules = Rules(causal, align, window_left, window_right, prefix_rows, prefix_kv)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    wide_q, wide_k, wide_v, seen, keep = _read(tensors, rules, state_of(seed, offset, dropout_p), dropout_p)
    o, lse = softmax.forward(wide_q, wide_k, wide_v, seen, keep, softmax.scale_of(scale, q.shape[-1]))
    return o[0].to(q.dtype), lse[0]


@op(
    family="attention",
    out={"dq": wanted("q", 0), "dk": wanted("k", 1), "dv": wanted("v", 2)},
    check=_check,
    cost=_cost_backward,
    error_scale=lambda t, o: _scales_backward(t, o, 0),
    narrowed=lambda t, o: _scales_backward(t, o, 1),
    probes=inputs_varlen.BACKWARD,
    workloads=workloads.PACKED,
    rounding=scales.ROUNDING_BACKWARD,
)
def varlen_attention_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    state: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    """The gradient of `varlen_attention`; see `attention_backward`.

    Args:
        do: [Tq, Hq, Dv], upstream gradient of o, or None. dlse: float32 [Hq, Tq], that of lse, or None. Any strides.
        q, k, v, cu_seqlens_q, cu_seqlens_k: the inputs. o, lse: the outputs of forward.
        state: int64[2], seed and offset as forward saves them; with dropout.
        max_seqlen_q, max_seqlen_k, scale, causal, align, window_left, window_right, prefix_rows, prefix_kv, dropout_p:
            as in forward.
        needs: which of (dq, dk, dv) to compute.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k and v, None where not needed; 0 past the last sequence.
    """
    rules = Rules(causal, align, window_left, window_right, prefix_rows, prefix_kv)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    wide_q, wide_k, wide_v, seen, keep = _read(tensors, rules, state, dropout_p)
    grad, dlse_one = None if do is None else upcast(do)[None], None if dlse is None else dlse[None]
    scale = softmax.scale_of(scale, q.shape[-1])
    found = softmax.backward(grad, dlse_one, wide_q, wide_k, wide_v, upcast(o)[None], lse[None], seen, keep, scale)
    dq, dk, dv = (x[0].to(q.dtype) if need else None for x, need in zip(found, needs, strict=True))
    return dq, dk, dv
