"""Inputs and expected results of attention, worked out by loops in float64. Not a test module."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.residual.philox import random_words, threshold

each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])
STATE = (torch.tensor([0x0123456789ABCDEF]), torch.tensor([(1 << 40) + 7]))
"""A seed and an offset of more than 32 bits."""

CASES: tuple[dict[str, Any], ...] = (
    {"causal": True, "align": "top_left"},
    {"causal": True, "align": "bottom_right"},
    {"window": (2, 1), "align": "top_left"},
    {"window": (0, -1), "align": "bottom_right"},
    {"window": (3, -1), "causal": True, "align": "bottom_right", "kv_len": True},
    {"prefix_rows": 2, "prefix_kv_len": 3, "mask": "1H"},
    {"prefix_rows": 3, "prefix_kv_len": True, "kv_len": True},
    {"mask": "B1", "causal": True, "align": "bottom_right", "kv_len": True, "window": (4, 0)},
)
"""Options; True stands for lengths, which `lengths` makes."""


def made(
    batch: int, rows: int, keys: int, *, heads: int = 2, groups: int = 1, width: int = 16, v_width: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """q, k, v: [B, S, H, D]."""
    generator = torch.Generator().manual_seed(rows * 31 + keys)
    shapes = ((batch, rows, heads, width), (batch, keys, groups, width), (batch, keys, groups, v_width or width))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def lengths(case: dict[str, Any], rows: int, keys: int) -> dict[str, Any]:
    """`case` with tensors of lengths and masks for a batch of two, four heads."""
    options = dict(case)
    if "kv_len" in case:
        options["kv_len"] = torch.tensor([keys - 1, keys // 2], dtype=torch.int32)
    if case.get("prefix_kv_len") is True:
        options["prefix_kv_len"] = torch.tensor([2, 0], dtype=torch.int32)
    if "mask" in case:
        shape = (2, 1, rows, keys) if case["mask"] == "B1" else (1, 4, rows, keys)
        options["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.7
        options["mask"][:, :, 0] = False
    return options


def run(*tensors: Tensor, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
    """o and lse by one backend, on the device of q."""
    moved = {n: x.to(tensors[0].device) if isinstance(x, Tensor) else x for n, x in options.items()}
    with tw.use(check="never"):
        found = tw.attention(*tensors, return_lse=True, backend=backend, **moved)
    assert isinstance(found, tuple)
    return found


def seen_by_loops(batch: int, heads: int, rows: int, keys: int, options: dict[str, Any]) -> Tensor:
    """[B, Hq, Sq, Sk]: the rules of the contract, one query and key at a time."""
    seen = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    window, mask = options.get("window", (-1, -1)), options.get("mask")
    for b, h, i, j in itertools.product(range(batch), range(heads), range(rows), range(keys)):
        there = int(options["kv_len"][b]) if "kv_len" in options else keys
        place = i + there - rows if options.get("align") == "bottom_right" else i
        ok = j < there
        ok &= not options.get("causal", False) or j <= place
        ok &= window[0] < 0 or place - window[0] <= j
        ok &= window[1] < 0 or j <= place + window[1]
        if i < options.get("prefix_rows", 0):
            limit = options["prefix_kv_len"]
            ok &= j < (int(limit[b]) if isinstance(limit, Tensor) else limit)
        if mask is not None:
            ok &= bool(mask[b % mask.shape[0], h % mask.shape[1], i, j])
        seen[b, h, i, j] = ok
    return seen


def by_loops(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(o, lse), each row a softmax over the keys that it sees. Differentiable."""
    batch, rows, heads, width = q.shape
    group = heads // k.shape[2]
    outs, levels = [], []
    for b, i, h in itertools.product(range(batch), range(rows), range(heads)):
        which = seen[b, h, i].nonzero().squeeze(-1)
        if not len(which):
            outs.append(q[b, i, h, :1].expand(v.shape[-1]) * 0.0)
            levels.append(torch.full((), -math.inf, dtype=q.dtype))
            continue
        scores = (k[b, which, h // group] @ q[b, i, h]) / math.sqrt(width)
        p = scores.softmax(-1)
        outs.append((p if keep is None else p * keep[b, h, i, which]) @ v[b, which, h // group])
        levels.append(scores.logsumexp(-1))
    o = torch.stack(outs).reshape(batch, rows, heads, v.shape[-1])
    return o, torch.stack(levels).reshape(batch, rows, heads).transpose(1, 2)


def kept_by_words(rows: int, columns: int, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """The mask of `dropout_add`, [rows, columns]."""
    if p == 0.0:
        return torch.ones(rows, columns, dtype=torch.bool)
    return (random_words(rows, columns, seed, offset) >> 8) >= threshold(p)
