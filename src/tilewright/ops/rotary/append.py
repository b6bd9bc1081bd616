"""qkv_split_rope_append: its definition, and what else is declared of it. It is qkv_split_rope into a cache of keys and
values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call, TensorFacts
from tilewright.core.contract import floating, has_shape
from tilewright.core.cost import bytes_of
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Spec, like, op
from tilewright.core.probes import Probes
from tilewright.ops.rotary import workloads
from tilewright.ops.rotary.angles import CAPPED, check_numbers, check_tables, turn
from tilewright.ops.rotary.split import OPTIONS, SIZES, TOLD, check_qkv, normed, split, used_tables


def _check(call: Call) -> None:
    tokens, width = check_qkv(call)
    check_tables(call, "qkv", width, tokens)
    floating(call, "qkv", "k_cache", "v_cache")
    cache: TensorFacts = call.k_cache
    lead = tokens[:-1]
    if len(cache.shape) != len(lead) + 3 or (*cache.shape[:-3], *cache.shape[-2:]) != (*lead, call.kv_heads, width):
        wanted = f"needs [{', '.join(map(str, lead))}{', ' * bool(lead)}Smax, {call.kv_heads}, {width}]"
        raise InvalidArgument(call.op, "k_cache", f"shape {list(cache.shape)}", wanted)
    has_shape(call, "v_cache", cache.shape, "the shape of k_cache")
    if tokens[-1] > cache.shape[-3]:
        wanted = f"qkv has sequences of {tokens[-1]} tokens, which never fit"
        raise InvalidArgument(call.op, "k_cache", f"{cache.shape[-3]} rows", wanted)
    check_numbers(call, "pos", lead)
    check_numbers(call, "rope_pos", lead)


def _rows(pos: Tensor, count: int) -> Tensor:
    """Rows [..., S] that a sequence's tokens have from `pos` on."""
    return pos.long().unsqueeze(-1) + torch.arange(count, device=pos.device)


def _turned(z: Tensor, t: Mapping[str, Any], o: Mapping[str, Any], terms: bool = False) -> Tensor:
    """NaN where the tables have no row."""
    if t["cos"] is None:
        return z.abs() if terms else z
    rows = _rows(t["pos"] if t["rope_pos"] is None else t["rope_pos"], z.shape[-3])
    return turn(z, t["cos"], t["sin"], rows, o["style"], terms=terms)


def _appended(cache: Tensor, new: Tensor, pos: Tensor) -> Tensor:
    """A copy of the cache in which row pos + s is the s-th of `new`."""
    place = torch.arange(cache.shape[-3], device=pos.device) - pos.long().unsqueeze(-1)
    given = (place >= 0) & (place < new.shape[-3])
    index = torch.where(given, place, 0).unsqueeze(-1).unsqueeze(-1).expand(cache.shape)
    made = torch.where(given.unsqueeze(-1).unsqueeze(-1), new.gather(-3, index).to(cache.dtype), cache)
    return made.clone(memory_format=torch.contiguous_format)  # of one head, else with the cache's own stride


def _parts(t: Mapping[str, Any], o: Mapping[str, Any], terms: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split(t["qkv"], o["q_heads"], o["kv_heads"])
    q, k = (
        _turned(normed(x, w, o["norm_eps"], o["norm_offset"]), t, o, terms)
        for x, w in ((q, t["q_norm"]), (k, t["k_norm"]))
    )
    rows = _rows(t["pos"], q.shape[-3])
    fits = (rows >= 0) & (rows < t["k_cache"].shape[-3])
    return torch.where(fits.unsqueeze(-1).unsqueeze(-1), q, math.nan), k, v


def _scale(t: Mapping[str, Any], o: Mapping[str, Any]) -> dict[str, Tensor]:
    q, k, v = _parts(t, o, True)
    found = {"q": q, "k_cached": _appended(t["k_cache"].abs(), k, t["pos"])}
    return {**found, "v_cached": _appended(t["v_cache"].abs(), v.abs(), t["pos"])}


def _cost(call: Call) -> tuple[int, int]:
    """What lies in the caches is read and written where they are not overwritten."""
    qkv: TensorFacts = call.qkv
    kv = qkv.numel // (call.q_heads + 2 * call.kv_heads) * 2 * call.kv_heads * qkv.dtype.itemsize
    whole = 0 if call.into else 2 * bytes_of(call, "k_cache", "v_cache")
    moved = bytes_of(call, "qkv", "q", "q_norm", "k_norm", "pos", "rope_pos") + kv + whole
    return moved + used_tables(call, qkv.rows), qkv.numel * (3 + 4 * call.has("q_norm"))


def _some_rows(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> Tensor:
    """From where all tokens fit into the cache and the tables."""
    most = max(1, min(sizes["T"], sizes["P"]) - sizes["S"] + 1)
    return torch.randint(0, most, shape, generator=generator, device=device, dtype=torch.int32)


def _derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """With the style "interleaved" some sequences leave the cache and the tables."""
    if options["style"] == "interleaved":
        for name in ("pos", "rope_pos"):
            if found[name] is not None and found[name].dim():
                edges = torch.iinfo(found[name].dtype)
                for place, bad in ((1, found["k_cache"].shape[-3] - 1), (3, -1), (4, edges.max)):
                    if place < found[name].numel():
                        found[name].view(-1)[place] = bad


def _q(t: Mapping[str, Any], o: Mapping[str, Any]) -> Spec:
    parts = o["q_heads"] + 2 * o["kv_heads"]
    return (*t["qkv"].shape[:-1], o["q_heads"], t["qkv"].shape[-1] // parts), t["qkv"].dtype


@op(
    family="rotary",
    out={"q": _q, "k_cached": like("k_cache"), "v_cached": like("v_cache")},
    check=_check,
    cost=_cost,
    error_scale=_scale,
    probes=Probes(
        dims={
            "qkv": "M S N*C", "k_cache": "M T K C", "v_cache": "M T K C", "pos": "M", "cos": "P R", "sin": "P R",
            "q_norm": "C", "k_norm": "C", "rope_pos": "M",
        },
        options=OPTIONS,
        absent=(
            ("rope_pos",), (), ("q_norm", "k_norm", "rope_pos"), ("k_norm",), ("cos", "sin", "q_norm", "rope_pos"),
        ),
        either=("q_norm", "k_norm"),
        sizes={**SIZES, "T": 5},
        told=TOLD,
        capped=CAPPED,
        values={"pos": _some_rows, "rope_pos": _some_rows},
        dtypes={"pos": (torch.int64,)},
        derive=_derive,
    ),
    workloads=workloads.CACHED,
)  # fmt: skip
def qkv_split_rope_append(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    rope_pos: Tensor | None = None,
    *,
    q_heads: int,
    kv_heads: int,
    style: str,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_split_rope` with k and v put into caches: token s of a sequence into row pos + s. No gradient.

    `qkv_split_rope_append_` overwrites the caches, and reads nothing of them; this function returns changed copies.

    Args:
        qkv: [..., S, (Hq + 2 Hkv) D], as in `qkv_split_rope`.
        k_cache, v_cache: [..., Smax, Hkv, D], dtype of qkv, any strides with a dense last dimension.
        pos: [...], int32 or int64 on the device of qkv: the row of each sequence's first token. Read when the kernel
            runs, so that it may be advanced between the replays of a CUDA graph.
        cos, sin, q_norm, k_norm, q_heads, kv_heads, style, norm_eps, norm_offset: as in `qkv_split_rope`.
        rope_pos: [...] or None: the first token's row of the tables, where that is not pos.

    Returns:
        q [..., S, Hq, D] and the caches with the new rows. A token whose row is outside of 0..Smax-1 is not written and
        its q is NaN; q and k are NaN for one that has no row in the tables.

    Raises:
        InvalidArgument: wrong dtypes or shapes, more tokens than the caches have rows, or another style.
    """
    t = {
        "qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "pos": pos, "cos": cos, "sin": sin, "q_norm": q_norm,
        "k_norm": k_norm, "rope_pos": rope_pos,
    }  # fmt: skip
    o = {
        "q_heads": q_heads, "kv_heads": kv_heads, "style": style, "norm_eps": norm_eps, "norm_offset": norm_offset
    }  # fmt: skip
    q, k, v = _parts(t, o)
    return q.to(qkv.dtype), _appended(k_cache, k.to(qkv.dtype), pos), _appended(v_cache, v, pos)
