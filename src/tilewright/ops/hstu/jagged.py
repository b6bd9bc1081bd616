"""hstu_attention and its gradient: their definitions, and what else is declared of them.

The mask is in `masks`, the mathematics and the tolerances in `pointwise`, how inputs are made in `inputs`. The function
that users call is in `functions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Saved, Spec, op, upcast
from tilewright.ops.attention.dense import state_of, state_rule, wanted
from tilewright.ops.attention.softmax import keep_of
from tilewright.ops.hstu import contract, inputs, masks, pointwise, workloads
from tilewright.ops.hstu.masks import Rules


def _check(call: Call) -> None:
    """Of both ops: they name their tensors alike."""
    contract.heads(call, "[T, H, D]")
    contract.sequences(call)
    contract.rules(call)


def _check_values(tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
    offsets, targets, q = (tensors[n] for n in ("seq_offsets", "num_targets", "q"))
    assert offsets is not None and q is not None
    steps = offsets.long().diff()
    if int(offsets[0]) or bool((steps < 0).any()) or int(offsets[-1]) > q.shape[0]:
        needs = f"starts at 0, never decreases, ends at or before {q.shape[0]}"
        raise InvalidArgument("hstu_attention", "seq_offsets", str(offsets.tolist()[:16]), needs)
    if steps.numel() and int(steps.max()) > options["max_seqlen"]:
        problem = f"{options['max_seqlen']}, while a sequence has {int(steps.max())}"
        raise InvalidArgument(
            "hstu_attention", "max_seqlen", problem, "the longest, or more: weights are divided by it"
        )
    if targets is not None and bool(((targets < 0) | (targets > steps)).any()):
        needs = "from 0 to the length of each sequence"
        raise InvalidArgument("hstu_attention", "num_targets", str(targets.tolist()[:16]), needs)


def _o(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    return (*t["q"].shape[:-1], t["v"].shape[-1]), t["q"].dtype


def _read(t: Mapping[str, Any], o: Mapping[str, Any], state: Tensor | None) -> dict[str, Any]:
    """What `pointwise` takes, of one batch, with what lies behind the last sequence put to 0: it may be NaN."""
    tokens, offsets = t["q"].shape[0], t["seq_offsets"]
    seen, place = masks.packed(tokens, offsets, t["num_targets"], Rules.of(o))
    owned = (torch.arange(tokens, device=offsets.device) < offsets[-1])[:, None, None]
    given = {name: t[name] for name in ("q", "k", "v", "do") if t.get(name) is not None}
    found: dict[str, Any] = {name: torch.where(owned, upcast(x), 0.0)[None] for name, x in given.items()}
    factor: Any = 1.0 / o["max_seqlen"]
    if t["attn_scale"] is not None:
        factor = t["attn_scale"].reshape(1, 1, -1, 1)
    keep = keep_of(state, o["dropout_p"], t["q"].shape[1], tokens, place, 1)
    if keep is not None:
        seen, factor = seen & (keep != 0), keep * factor
    return found | {"seen": seen, "factor": factor, "scale": o["alpha"]}


def _forward_state(t: Mapping[str, Any], o: Mapping[str, Any]) -> Tensor | None:
    return state_of(t["seed"], t["offset"], o["dropout_p"])


def _unbatched(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[0] for name, tensor in found.items()}


def _scales(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    return _unbatched(pointwise.scales(**_read(t, o, _forward_state(t, o)))[which])


def _scales_backward(t: Mapping[str, Any], o: Mapping[str, Any], which: int) -> dict[str, Tensor]:
    return _unbatched(pointwise.scales_backward(**_read(t, o, t["state"]))[which])


def _products(call: Call) -> int:
    """Operations of one product of columns of every pair that is seen, for each column: of sequences of one length,
    since lengths on the device are not known."""
    count = max(1, call.seq_offsets.shape[0] - 1)
    tokens, heads, _ = call.q.shape
    length = tokens / count
    each = min(length, call.window) if call.window else length / 2 if call.causal else length
    return int(2 * heads * tokens * each)


def _cost(call: Call) -> tuple[int, int]:
    return bytes_of(call, "q", "k", "v", "attn_scale", "o"), _products(call) * (call.q.columns + call.v.columns)


def _cost_backward(call: Call) -> tuple[int, int]:
    """Five products: the scores again, dP, dv, dq, dk."""
    moved = bytes_of(call, "do", "q", "k", "v", "attn_scale", "dq", "dk", "dv")
    return moved, _products(call) * (3 * call.q.columns + 2 * call.v.columns)


@op(
    family="hstu",
    out={"o": _o},
    saved={"state": Saved(state_rule, state_of, optional=True)},
    gradient=Gradient(
        "hstu_attention_backward",
        grads={"o": "do"},
        takes={n: n for n in ("q", "k", "v", "seq_offsets", "num_targets", "attn_scale", "state")},
        gives={"q": "dq", "k": "dk", "v": "dv"},
    ),
    check=_check,
    check_values=_check_values,
    cost=_cost,
    error_scale=lambda t, o: _scales(t, o, 0),
    narrowed=lambda t, o: _scales(t, o, 1),
    probes=inputs.JAGGED,
    workloads=workloads.JAGGED,
    rounding=pointwise.ROUNDING,
)
def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    num_targets: Tensor | None = None,
    attn_scale: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    max_seqlen: int,
    alpha: float,
    causal: bool = True,
    contextual_len: int = 0,
    window: int = 0,
    full_tail: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of hierarchical sequential transduction units (Zhai et al., 2024) inside each of N sequences that are
    packed along one axis: o = SiLU(alpha q k^T) v / max_seqlen over the keys that a token sees.

    A sequence of n tokens has t targets at its end and c contextual tokens at its start. Token i has the position
    u(i) = max(i - c + 1, 0), or i without context; with targets at most m, where m = n - t (less c - 1): all targets
    share it. With d = u(i) - u(j) (its absolute value where not causal), i sees j where i = j or d > 0; with a window
    also d <= window, or full_tail > 0 and u(i) >= m - full_tail. With context u(i) = 0 sees every u(j) < m besides.

    What is not seen is selected away; tokens behind the last sequence may be NaN and have o = 0. Keys and values that
    only some tokens see must be finite. o is rounded once. In half precision a kernel may round the weights to the
    dtype of v before they meet it; checks then allow an ulp of each such term.

    Args:
        q, k, v: [T, H, D], [T, H, D] and [T, H, Dv], fp32, fp16 or bf16, one dtype. Views of a fused projection are
            read in place.
        seq_offsets: int32 or int64 [N + 1] on the device: where sequences start and the last one ends. They begin with
            0 and never decrease; sequences may be empty.
        num_targets: int32 or int64 [N], or None: no targets.
        attn_scale: fp32, one number or [T], one a query token; multiplies weights in place of 1 / max_seqlen. It has no
            gradient.
        seed, offset: int64[1], for dropout: row h T + token, and column j of a key in its sequence.
        max_seqlen: what weights are divided by, at least the longest sequence.
        alpha: of scores; 0.0 is 0.0.
        causal, contextual_len, window, full_tail: see above; 0 is none.
        dropout_p: weights are dropped with this probability, the others multiplied by 1 / (1 - p).

    Returns:
        o: [T, H, Dv] in the dtype of q, contiguous.

    Raises:
        InvalidArgument: wrong dtypes or shapes, a missing seed; on a CPU also sequences that overlap, end past the
            tokens or are longer than max_seqlen, and targets that a sequence has not. Elsewhere nobody looks, and a
            longer sequence is served.
    """
    given = {"q": q, "k": k, "v": v, "seq_offsets": seq_offsets, "num_targets": num_targets, "attn_scale": attn_scale}
    chosen = {"max_seqlen": max_seqlen, "alpha": alpha, "dropout_p": dropout_p}
    chosen |= Rules(causal, contextual_len, window, full_tail)._asdict()
    return pointwise.forward(**_read(given, chosen, state_of(seed, offset, dropout_p)))[0].to(q.dtype)


@op(
    family="hstu",
    out={"dq": wanted("q", 0), "dk": wanted("k", 1), "dv": wanted("v", 2)},
    check=_check,
    check_values=_check_values,
    cost=_cost_backward,
    error_scale=lambda t, o: _scales_backward(t, o, 0),
    narrowed=lambda t, o: _scales_backward(t, o, 1),
    probes=inputs.JAGGED_BACKWARD,
    workloads=workloads.JAGGED,
    rounding=pointwise.ROUNDING_BACKWARD,
)
def hstu_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    num_targets: Tensor | None = None,
    attn_scale: Tensor | None = None,
    state: Tensor | None = None,
    *,
    max_seqlen: int,
    alpha: float,
    causal: bool = True,
    contextual_len: int = 0,
    window: int = 0,
    full_tail: int = 0,
    dropout_p: float = 0.0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `hstu_attention`; see `silu_attention_backward`.

    Args:
        do: [T, H, Dv], upstream gradient of o. Any strides.
        q, k, v, seq_offsets, num_targets, attn_scale: the inputs.
        state: int64[2], seed and offset as forward saves them; with dropout.
        max_seqlen, alpha, causal, contextual_len, window, full_tail, dropout_p: as in forward.
        needs: which of (dq, dk, dv) to compute.

    Returns:
        (dq, dk, dv) in the shapes and dtypes of q, k and v, None where not needed; 0 behind the last sequence.
    """
    given = {"q": q, "k": k, "v": v, "seq_offsets": seq_offsets, "num_targets": num_targets, "attn_scale": attn_scale}
    chosen = {"max_seqlen": max_seqlen, "alpha": alpha, "dropout_p": dropout_p}
    chosen |= Rules(causal, contextual_len, window, full_tail)._asdict()
    found = pointwise.backward(**_read({"do": do, **given}, chosen, state))
    dq, dk, dv = (x[0].to(q.dtype) if need else None for x, need in zip(found, needs, strict=True))
    return dq, dk, dv
