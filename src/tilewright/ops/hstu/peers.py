"""What users of the family would call instead: torch's products under a mask that is kept, in eager and compiled. There
is no kernel for it in torch, nor in Liger; the Triton kernels of generative-recommenders are in no package.

Each maker takes tensors by name and options, and returns a function that computes o. Used by benchmarks only; nothing
here is a kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled
from tilewright.ops.hstu.masks import Rules, visible

MOST_SCORES = 1 << 33
"""Of a rival that keeps every one of them."""


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | float, scale: float, count: float
) -> tuple[Tensor]:
    """As a user would write it, on [B, S, H, D]: in the dtype of q, as autocast would have it."""
    weights = F.silu(torch.einsum("bihd,bjhd->bhij", q, k) * scale) * count
    if mask is not None:
        weights = torch.where(mask, weights, 0.0) if mask.dtype == torch.bool else weights * mask
    if isinstance(factor, Tensor):
        weights = weights * factor
    return (torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v),)


def _silu(make: Callable[..., Run]) -> Maker:
    def maker(t: Tensors, o: Options) -> Run:
        return make(_dense, t["q"], t["k"], t["v"], t["mask"], 1.0, o["scale"], o["post_scale"])

    return maker


def _padded(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, there: Tensor, seen: Tensor, back: Tensor, factor: Tensor | float,
    scale: float, count: float,
) -> tuple[Tensor]:  # fmt: skip
    """The same of packed sequences: padded to the longest, [N, L, H, D], and back."""
    a, b, c = (torch.where(there[..., None, None], x[rows], 0.0) for x in (q, k, v))
    (found,) = _dense(a, b, c, seen, factor, scale, count)
    return (found.flatten(0, 1)[back],)


def _hstu(make: Callable[..., Run]) -> Maker:
    def maker(t: Tensors, o: Options) -> Run:
        if o["dropout_p"]:
            raise NotImplementedError("torch draws random numbers of its own")
        offsets, heads = t["seq_offsets"].long(), t["q"].shape[1]
        lengths = offsets.diff()
        count, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
        if int(offsets[-1]) != t["q"].shape[0] or not longest:
            raise NotImplementedError("tokens behind the last sequence, or none, are left to us")
        if count * longest * longest * heads > MOST_SCORES:
            raise NotImplementedError("keeps every score of padded sequences, and these would fill the memory")
        place = torch.arange(longest, device=offsets.device)
        there = place[None] < lengths[:, None]
        rows = (offsets[:-1, None] + place[None]).clamp(max=max(t["q"].shape[0] - 1, 0))
        targets = None if t["num_targets"] is None else t["num_targets"].long()[:, None, None]
        seen = visible(place[None, :, None], place[None, None], lengths[:, None, None], targets, Rules.of(o))
        seen = (seen & there[:, :, None] & there[:, None])[:, None]
        factor: Any = t["attn_scale"]
        if factor is not None and factor.numel() > 1:
            factor = factor[rows][:, None, :, None]
        divisor = 1.0 if factor is not None else 1.0 / o["max_seqlen"]
        back = there.flatten().nonzero().squeeze(-1)
        given = (t["q"], t["k"], t["v"], rows, there, seen, back, 1.0 if factor is None else factor)
        return make(_padded, *given, o["alpha"], divisor)

    return maker


PEERS: dict[str, dict[str, Maker]] = {
    "silu_attention": {"torch": _silu(partial), "torch.compile": _silu(compiled)},
    "hstu_attention": {"torch": _hstu(partial), "torch.compile": _hstu(compiled)},
}
