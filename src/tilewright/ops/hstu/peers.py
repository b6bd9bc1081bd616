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
AT_A_TIME = 1 << 31
"""Scores of sequences that are padded together: 4 GB in half precision."""


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
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, there: Tensor, seen: Tensor, factor: Tensor | float, scale: float,
    count: float,
) -> tuple[Tensor]:  # fmt: skip
    """The same of some packed sequences: padded to the longest of them, [N, L, H, D]. Returns [N L, H, Dv]."""
    a, b, c = (torch.where(there[..., None, None], x[rows], 0.0) for x in (q, k, v))
    (found,) = _dense(a, b, c, seen, factor, scale, count)
    return (found.flatten(0, 1),)


def _groups(lengths: list[int], heads: int) -> list[list[int]]:
    """Sequences of some tokens from the longest on, as many at a time as `AT_A_TIME` allows."""
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    found: list[list[int]] = []
    for n in order:
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] ** 2 * heads <= AT_A_TIME:
            found[-1].append(n)
        else:
            found.append([n])
    return found


def _hstu(make: Callable[..., Run]) -> Maker:
    def maker(t: Tensors, o: Options) -> Run:
        if o["dropout_p"]:
            raise NotImplementedError("torch draws random numbers of its own")
        offsets, heads, tokens = t["seq_offsets"].long(), t["q"].shape[1], t["q"].shape[0]
        lengths = offsets.diff()
        groups = _groups(lengths.tolist(), heads)
        if not groups:
            raise NotImplementedError("no tokens are left to us")
        if sum(len(g) * int(lengths[g[0]]) ** 2 for g in groups) * heads > MOST_SCORES:
            raise NotImplementedError("keeps every score of padded sequences, and these would fill the memory")
        factor: Any = t["attn_scale"]
        divisor = 1.0 / o["max_seqlen"] if factor is None else 1.0
        back, runs, begin = torch.full((tokens,), -1, device=offsets.device), [], 0
        for group in groups:
            chosen = torch.tensor(group, device=offsets.device)
            longest = int(lengths[group[0]])
            each = lengths[chosen].int()
            place = torch.arange(longest, dtype=torch.int32, device=offsets.device)
            there = place[None] < each[:, None]
            rows = (offsets[chosen][:, None] + place[None]).clamp(max=tokens - 1)
            targets = None if t["num_targets"] is None else t["num_targets"][chosen].int()[:, None, None]
            seen = visible(place[None, :, None], place[None, None], each[:, None, None], targets, Rules.of(o))
            seen = (seen & there[:, :, None] & there[:, None])[:, None]
            scale: Any = 1.0 if factor is None else factor
            if factor is not None and factor.numel() > 1:
                scale = factor[rows][:, None, :, None]
            back[rows[there]] = begin + there.flatten().nonzero().squeeze(-1)
            begin += there.numel()
            runs.append(make(_padded, t["q"], t["k"], t["v"], rows, there, seen, scale, o["alpha"], divisor))
        behind = t["v"].new_zeros(1, *t["v"].shape[1:])  # what lies behind the last sequence
        return lambda: (torch.cat([*(run()[0] for run in runs), behind])[back],)

    return maker


PEERS: dict[str, dict[str, Maker]] = {
    "silu_attention": {"torch": _silu(partial), "torch.compile": _silu(compiled)},
    "hstu_attention": {"torch": _hstu(partial), "torch.compile": _hstu(compiled)},
}
