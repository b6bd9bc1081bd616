"""qkv_split_rope and its gradient: definitions, and what else is declared of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call, TensorFacts
from tilewright.core.contract import floating, has_shape, not_negative, parameter
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Gradient, Saved, Spec, like, needed, op, upcast
from tilewright.core.probes import Probes
from tilewright.ops.rotary import workloads
from tilewright.ops.rotary.angles import (
    CAPPED,
    check_style,
    check_tables,
    have_rows,
    positions,
    some_positions,
    spoil,
    turn,
)

SIZES = {"S": 2, "P": 7, "R": 48}
TOLD = {
    "N": lambda o: o["q_heads"] + 2 * o["kv_heads"],
    "Q": lambda o: o["q_heads"],
    "K": lambda o: o["kv_heads"],
    "A": lambda o: o["q_heads"] + o["kv_heads"],
}
_HEADS = {"q_heads": 2, "kv_heads": 1}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"style": "half", **_HEADS},
    {"style": "interleaved", **_HEADS},
    {"style": "half", "q_heads": 3, "kv_heads": 2, "norm_offset": 1.0},
)


def head_width(call: Call) -> int:
    """D, of a call that has qkv or upstream gradients."""
    for name in ("qkv", "dq", "dk", "dv"):
        facts: TensorFacts | None = call.tensors.get(name)
        if facts is not None:
            return facts.columns // (call.q_heads + 2 * call.kv_heads) if name == "qkv" else facts.columns
    raise InvalidArgument(call.op, "dq", "None, as are dk and dv", "pass at least one")


def check_heads(call: Call) -> None:
    for name in ("q_heads", "kv_heads"):
        if call.options[name] < 1:
            raise InvalidArgument(call.op, name, f"{call.options[name]}", "must be 1 or more")


def check_qkv(call: Call) -> tuple[tuple[int, ...], int]:
    """The shape of its tokens, and D."""
    check_heads(call)
    qkv: TensorFacts = call.qkv
    parts = call.q_heads + 2 * call.kv_heads
    if len(qkv.shape) < 2 or not qkv.columns or qkv.columns % parts:
        raise InvalidArgument(call.op, "qkv", f"shape {list(qkv.shape)}", f"needs [..., S, {parts} D]: {parts} heads")
    floating(call, "qkv")
    check_style(call)
    not_negative(call, "norm_eps")
    width: int = qkv.columns // parts
    for name in ("q_norm", "k_norm"):
        parameter(call, "qkv", name, (width,), "the width of a head")
    return qkv.shape[:-1], width


def _check(call: Call) -> None:
    tokens, width = check_qkv(call)
    check_tables(call, "qkv", width, tokens)


def _check_backward(call: Call) -> None:
    check_heads(call)
    check_style(call)
    width = head_width(call)
    given = [name for name in ("dq", "dk", "dv") if call.has(name)]
    main = given[0]
    first: TensorFacts = call[main]
    if len(first.shape) < 3 or not width:
        raise InvalidArgument(call.op, main, f"shape {list(first.shape)}", "needs [..., S, heads, D]")
    tokens = first.shape[:-2]
    floating(call, main, *given[1:], "qkv")
    for name in given:
        heads = call.q_heads if name == "dq" else call.kv_heads
        has_shape(call, name, (*tokens, heads, width), f"that many heads as wide as those of {main}")
    check_tables(call, main, width, tokens)
    has_shape(call, "qkv", (*tokens, (call.q_heads + 2 * call.kv_heads) * width))
    for name in ("q_norm", "k_norm"):
        parameter(call, main, name, (width,), "the width of a head")
    if call.has("q_norm") or call.has("k_norm"):
        for name in ("qkv", "rstd"):
            if not call.has(name):
                raise InvalidArgument(call.op, name, "None", "the gradient of a norm needs it")
        rstd: TensorFacts = call.rstd
        wanted = torch.float64 if first.dtype == torch.float64 else torch.float32
        if rstd.shape != (*tokens, call.q_heads + call.kv_heads) or rstd.dtype != wanted or not rstd.contiguous:
            raise InvalidArgument(call.op, "rstd", str(rstd), "needs what forward saves")


def split(qkv: Tensor, q_heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[..., S, heads, D] of each part, as views."""
    heads = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1))
    kv = q_heads + kv_heads
    return heads[..., :q_heads, :], heads[..., q_heads:kv, :], heads[..., kv:, :]


def _root(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """One number a head: 1 where it has no norm."""
    acc = upcast(x)
    return torch.ones_like(acc[..., 0]) if weight is None else torch.rsqrt(acc.square().mean(-1) + eps)


def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Not rounded."""
    acc = upcast(x)
    if weight is None:
        return acc
    return acc * _root(x, weight, eps).unsqueeze(-1) * (upcast(weight).to(acc.dtype) + offset)


def _rstd(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, q_heads: int, kv_heads: int, norm_eps: float
) -> Tensor | None:
    if q_norm is None and k_norm is None:
        return None
    q, k, _ = split(qkv, q_heads, kv_heads)
    return torch.cat([_root(q, q_norm, norm_eps), _root(k, k_norm, norm_eps)], -1)


def _rstd_rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec | None:
    if t["q_norm"] is None and t["k_norm"] is None:
        return None
    dtype = torch.float64 if t["qkv"].dtype == torch.float64 else torch.float32
    return (*t["qkv"].shape[:-1], o["q_heads"] + o["kv_heads"]), dtype


def _part(heads: str) -> Any:
    def rule(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
        lead, parts = t["qkv"].shape[:-1], o["q_heads"] + 2 * o["kv_heads"]
        return (*lead, o[heads], t["qkv"].shape[-1] // parts), t["qkv"].dtype

    return rule


def _turned(z: Tensor, t: Mapping[str, Any], o: Mapping[str, Any], **how: bool) -> Tensor:
    if t["cos"] is None:
        return upcast(z).abs() if how.get("terms") else upcast(z)
    return turn(z, t["cos"], t["sin"], positions(z, t["position_ids"]), o["style"], **how)


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    q, k, v = split(t["qkv"], o["q_heads"], o["kv_heads"])
    q, k = (normed(x, w, o["norm_eps"], o["norm_offset"]) for x, w in ((q, t["q_norm"]), (k, t["k_norm"])))
    return {"q": _turned(q, t, o, terms=True), "k": _turned(k, t, o, terms=True), "v": v.abs()}


def used_tables(call: Call, tokens: int) -> int:
    if not call.has("cos"):
        return 0
    rows = min(call.cos.shape[0], tokens)
    return int(2 * rows * call.cos.shape[1] * call.cos.dtype.itemsize)


def _cost(call: Call) -> tuple[int, int]:
    qkv: TensorFacts = call.qkv
    moved = bytes_of(call, "qkv", "q_norm", "k_norm", "position_ids", *call.outputs) + used_tables(call, qkv.rows)
    return moved, qkv.numel * (3 + 4 * call.has("q_norm"))


def _cost_backward(call: Call) -> tuple[int, int]:
    tokens = next(call[n] for n in ("dq", "dk", "dv") if call.has(n)).shape[:-2]
    count = 1
    for size in tokens:
        count *= size
    norms = [n for n in ("qkv", "rstd") if call.has("q_norm") or call.has("k_norm")]
    moved = bytes_of(call, "dq", "dk", "dv", *norms, "q_norm", "k_norm", "position_ids", *call.outputs)
    width = head_width(call) * (call.q_heads + 2 * call.kv_heads)
    return moved + used_tables(call, count), count * width * (3 + 9 * bool(norms))


def _derive_backward(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    spoil(found, options)
    q_norm, k_norm = found["q_norm"], found["k_norm"]
    found["rstd"] = _rstd(found["qkv"], q_norm, k_norm, options["q_heads"], options["kv_heads"], 1e-6)


@op(
    family="rotary",
    out={"q": _part("q_heads"), "k": _part("kv_heads"), "v": _part("kv_heads")},
    saved={"rstd": Saved(_rstd_rule, _rstd, optional=True)},
    gradient=Gradient(
        "qkv_split_rope_backward",
        grads={"q": "dq", "k": "dk", "v": "dv"},
        takes={n: n for n in ("cos", "sin", "qkv", "rstd", "q_norm", "k_norm", "position_ids")},
        gives={"qkv": "dqkv", "q_norm": "dq_norm", "k_norm": "dk_norm"},
    ),
    check=_check,
    cost=_cost,
    error_scale=_scale,
    probes=Probes(
        dims={
            "qkv": "M S N*C", "cos": "P R", "sin": "P R", "q_norm": "C", "k_norm": "C", "position_ids": "M S",
        },
        options=OPTIONS,
        absent=(
            ("position_ids",), (), ("q_norm", "k_norm"), ("k_norm", "position_ids"),
            ("cos", "sin", "q_norm", "position_ids"),
        ),
        either=("q_norm", "k_norm"),
        sizes=SIZES,
        told=TOLD,
        capped=CAPPED,
        values={"position_ids": some_positions},
        derive=spoil,
    ),
    workloads=workloads.PROJECTIONS,
)  # fmt: skip
def qkv_split_rope(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    q_heads: int,
    kv_heads: int,
    style: str,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A fused projection taken apart into q, k and v, q and k normalised by head and turned by their positions.

    The norm is `rms_norm` over each head (Henry et al., 2020; Qwen3), the turn that of `rope`; nothing is rounded
    between the two.

    Args:
        qkv: [..., S, (Hq + 2 Hkv) D]: the heads of q, of k, of v. fp32, fp16 or bf16, any strides with a dense last
            dimension.
        cos, sin: [P, R/2] with R <= D, both in the dtype of qkv or both fp32, any strides; no gradient. None: no turn.
        q_norm, k_norm: [D], in the dtype of qkv or fp32; None: that part has no norm.
        position_ids: [..., S], int64 or int32: rows of the tables. None: places in the sequence.
        q_heads, kv_heads: Hq and Hkv.
        style: "half" or "interleaved", see `rope`.
        norm_eps, norm_offset: of the norms; the offset is added to their weights (Gemma: 1).

    Returns:
        q [..., S, Hq, D], k and v [..., S, Hkv, D]: dtype of qkv, contiguous, each rounded once. q and k are NaN for a
        token whose position is outside of 0..P-1.

    Raises:
        InvalidArgument: wrong dtypes or shapes, a width that so many heads do not divide, tables with fewer rows than
            there are tokens (without position_ids), or another style.
    """
    q, k, v = split(qkv, q_heads, kv_heads)
    found = []
    for part, weight in ((q, q_norm), (k, k_norm)):
        z = normed(part, weight, norm_eps, norm_offset)
        z = z if cos is None or sin is None else turn(z, cos, sin, positions(z, position_ids), style)
        found.append(z.to(qkv.dtype))
    return found[0], found[1], v.contiguous()


def _dqkv(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    given = next(t[n] for n in ("dq", "dk", "dv") if t[n] is not None)
    return (*given.shape[:-2], (o["q_heads"] + 2 * o["kv_heads"]) * given.shape[-1]), given.dtype


def _part_backward(
    dy: Tensor, t: Mapping[str, Any], o: Mapping[str, Any], name: str, terms: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of a part and of its weight; of `terms` the sums of their absolute values. Both are 0 of a token
    that has no row in the tables, whatever it holds: its dz is 0, and what that meets is selected away."""
    dz = _turned(dy, t, o, back=True, terms=terms)
    weight = t[f"{name}_norm"]
    if weight is None:
        return dz, None
    heads = {"q": slice(0, o["q_heads"]), "k": slice(o["q_heads"], None)}[name]
    x = split(t["qkv"], o["q_heads"], o["kv_heads"])["qk".index(name)]
    r = t["rstd"][..., heads].unsqueeze(-1)
    n, factor = upcast(x) * r, upcast(weight).to(r.dtype) + o["norm_offset"]
    known = None if t["cos"] is None else have_rows(positions(x, t["position_ids"]), t["cos"])
    n = n if known is None else torch.where(known, n, 0.0)
    if terms:
        n, factor = n.abs(), -factor.abs()
    dn = dz * factor
    dx = (
        r * (dn - n * (dn * n).mean(-1, keepdim=True)) if not terms else r * (n * (-dn * n).mean(-1, keepdim=True) - dn)
    )
    return dx if known is None else torch.where(known, dx, 0.0), (dz * n).flatten(0, -2).sum(0)


def _all_backward(t: Mapping[str, Any], o: Mapping[str, Any], terms: bool) -> dict[str, Any]:
    shape, _ = _dqkv(t, o)
    given = next(t[n] for n in ("dq", "dk", "dv") if t[n] is not None)
    acc = upcast(given).dtype
    found: dict[str, Any] = {"dq_norm": None, "dk_norm": None}
    parts = []
    for name, heads in (("q", o["q_heads"]), ("k", o["kv_heads"]), ("v", o["kv_heads"])):
        dy, weight = t[f"d{name}"], t.get(f"{name}_norm")
        if dy is None:  # nothing, and not zeros, which make NaN of an infinity
            part = torch.zeros((*shape[:-1], heads, given.shape[-1]), dtype=acc, device=given.device)
            found[f"d{name}_norm"] = None if weight is None else torch.zeros_like(weight, dtype=acc)
        elif name == "v":
            part = upcast(dy).abs() if terms else upcast(dy)
        else:
            part, found[f"d{name}_norm"] = _part_backward(dy, t, o, name, terms)
        parts.append(part)
    found["dqkv"] = torch.cat(parts, -2).flatten(-2)
    return found


@op(
    family="rotary",
    out={"dqkv": needed(0, _dqkv), "dq_norm": needed(1, like("q_norm")), "dk_norm": needed(2, like("k_norm"))},
    check=_check_backward,
    cost=_cost_backward,
    error_scale=lambda t, o: {n: a for n, a in _all_backward(t, o, True).items() if a is not None},
    probes=Probes(
        dims={
            "dq": "M S Q C", "dk": "M S K C", "dv": "M S K C", "cos": "P R", "sin": "P R", "qkv": "M S N*C",
            "rstd": "M S A", "q_norm": "C", "k_norm": "C", "position_ids": "M S",
        },
        options=(
            *OPTIONS,
            {**OPTIONS[0], "needs": (True, False, False)},
            {**OPTIONS[0], "needs": (False, True, True)},
            {**OPTIONS[0], "needs": (False, False, True)},
        ),
        absent=(
            ("position_ids",), (), ("q_norm", "k_norm"), ("cos", "sin", "k_norm"), ("dq", "position_ids"), ("dk", "dv"),
        ),
        either=("q_norm", "k_norm"),
        sizes=SIZES,
        told=TOLD,
        capped=CAPPED,
        values={"position_ids": some_positions},
        derive=_derive_backward,
    ),
    workloads=workloads.PROJECTIONS,
)  # fmt: skip
def qkv_split_rope_backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    qkv: Tensor | None = None,
    rstd: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    q_heads: int,
    kv_heads: int,
    style: str,
    norm_offset: float = 0.0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `qkv_split_rope`: the turn back, then the gradient of the norm, into one tensor.

    With dz the upstream gradient turned back, n = x * rstd and dn = dz * (weight + norm_offset):
    dx = rstd * (dn - n * mean(dn * n)), dweight = sum of dz * n over tokens and heads; without a norm dx = dz.

    Args:
        dq: [..., S, Hq, D], dk, dv: [..., S, Hkv, D], upstream gradients; None for zero, not all three. Any strides.
        cos, sin, position_ids, q_heads, kv_heads, style, norm_offset: as in forward.
        qkv, rstd: the input and [..., S, Hq + Hkv] float32, as forward saved it; only norms need them.
        q_norm, k_norm: [D] or None, as in forward.
        needs: which of (dqkv, dq_norm, dk_norm) to compute.

    Returns:
        (dqkv, dq_norm, dk_norm) in the dtypes of qkv, q_norm and k_norm; None where not needed or absent. The weights'
        are summed in float32 in an order fixed by the shape. Of a token whose position is outside of 0..P-1 the q and
        k of dqkv are 0, and it adds nothing to dq_norm and dk_norm, whatever it holds.

    Raises:
        InvalidArgument: no upstream gradient is given, or wrong dtypes or shapes.
    """
    t = {
        "dq": dq, "dk": dk, "dv": dv, "cos": cos, "sin": sin, "qkv": qkv, "rstd": rstd, "q_norm": q_norm,
        "k_norm": k_norm, "position_ids": position_ids,
    }  # fmt: skip
    o = {"q_heads": q_heads, "kv_heads": kv_heads, "style": style, "norm_offset": norm_offset}
    found = _all_backward(t, o, False)
    given = next(d for d in (dq, dk, dv) if d is not None)
    dtypes = {"dqkv": given.dtype, **{f"d{n}": w.dtype for n in ("q_norm", "k_norm") if (w := t[n]) is not None}}
    made = [
        found[name].to(dtypes[name]) if wanted and found[name] is not None else None
        for name, wanted in zip(("dqkv", "dq_norm", "dk_norm"), needs, strict=True)
    ]
    return made[0], made[1], made[2]
