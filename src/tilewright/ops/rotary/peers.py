"""What users of rotary embeddings would call instead: what models of Hugging Face compose, compiled too, and Liger.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. The rivals are
imported inside, since most machines have none of them. Used by benchmarks only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled


def _rope(x: Tensor, cos: Tensor, sin: Tensor, ids: Tensor | None, style: str) -> Tensor:
    """In the dtype of x, as models have it."""
    c, s = (t[: x.shape[-3]] if ids is None else t[ids] for t in (cos, sin))
    c, s = c.to(x.dtype).unsqueeze(-2), s.to(x.dtype).unsqueeze(-2)
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if style == "half":
        first, second = turned.chunk(2, -1)
        y = torch.cat([first * c - second * s, second * c + first * s], -1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        y = torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)
    return torch.cat([y, rest], -1) if rest.shape[-1] else y


def _split(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    ids: Tensor | None, q_heads: int, kv_heads: int, style: str, eps: float, offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1)).split([q_heads, kv_heads, kv_heads], -2)
    q = q if q_norm is None else F.rms_norm(q, (q.shape[-1],), q_norm + offset, eps)
    k = k if k_norm is None else F.rms_norm(k, (k.shape[-1],), k_norm + offset, eps)
    if cos is not None and sin is not None:
        q, k = _rope(q, cos, sin, ids, style), _rope(k, cos, sin, ids, style)
    return q.contiguous(), k.contiguous(), v.contiguous()


def _append(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, rope_pos: Tensor | None, q_heads: int, kv_heads: int, style: str,
    eps: float, offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of [B, S, ...]: with copies of the caches, as the op that returns them makes."""
    steps = torch.arange(qkv.shape[-2], device=qkv.device)
    rows = pos.long().unsqueeze(-1) + steps
    ids = rows if rope_pos is None else rope_pos.long().unsqueeze(-1) + steps
    q, k, v = _split(qkv, cos, sin, q_norm, k_norm, ids, q_heads, kv_heads, style, eps, offset)
    batch = torch.arange(qkv.shape[0], device=qkv.device).unsqueeze(-1)
    return q, k_cache.index_put((batch, rows), k), v_cache.index_put((batch, rows), v)


def _arguments(t: Tensors, o: Options) -> list[Any]:
    """As the functions above take them: an op's tensors, then its options, each in its order."""
    return [*t.values(), *o.values()]


def _eager(function: Callable[..., Any]) -> Maker:
    """torch's own functions, composed as a user would."""
    return lambda t, o: functools.partial(function, *_arguments(t, o))


def _compile(function: Callable[..., Any]) -> Maker:
    """torch.compile of the same, specialised to the shape: at its best."""
    return lambda t, o: compiled(function, *_arguments(t, o))


def _liger_rope(t: Tensors, o: Options) -> Run:
    """It turns q and k of [B, H, S, D] together, of which k has one head here, and takes whole tables."""
    from liger_kernel.ops.rope import LigerRopeFunction

    x, cos, sin = t["x"], t["cos"], t["sin"]
    if o["style"] != "half" or t["position_ids"] is not None or 2 * cos.shape[1] != x.shape[-1] or x.dim() != 4:
        raise NotImplementedError("takes [B, S, H, D], whole heads, the style half and no position_ids")
    c, s = (torch.cat([table, table], -1)[None, : x.shape[1]].to(x.dtype) for table in (cos, sin))
    k = x.new_zeros(x.shape[0], 1, x.shape[1], x.shape[3])
    return lambda: LigerRopeFunction.apply(x.transpose(1, 2), k, c, s)[0].transpose(1, 2)


PEERS: dict[str, dict[str, Maker]] = {
    "rope": {"torch": _eager(_rope), "torch.compile": _compile(_rope), "liger": _liger_rope},
    "qkv_split_rope": {"torch": _eager(_split), "torch.compile": _compile(_split)},
    "qkv_split_rope_append": {"torch": _eager(_append), "torch.compile": _compile(_append)},
}
