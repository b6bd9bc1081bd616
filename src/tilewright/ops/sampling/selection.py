"""Which tokens top-k and top-p keep, in torch and in whole numbers, so that every backend keeps the same.

A token's mass is its probability in units of a power of two that its row's largest tells: an int64, of which sums are
exact in any order. What is kept, and what is drawn, then depends on no order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDERS = ("top_k_first", "joint")
LARGEST = 0x7F800000
"""Bits of infinity in float32: what reaches them is no probability."""


def unit_bits(columns: int) -> int:
    """A row's largest probability, of [2^e, 2^(e + 1)), counts as 2^s to 2^(s + 1): all of them add up to less than
    2^62."""
    return 61 - columns.bit_length()


def masses(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [..., C] masses, the exponent [...] of what 2^s of them are, and which rows are probabilities.

    A row is none with a NaN, an infinity or a negative number in it, or where all of it is 0.
    """
    p = probs.float()
    good = (torch.isfinite(p) & (p >= 0)).all(-1)
    p = torch.where(good.unsqueeze(-1), p, 1.0)
    largest = p.amax(-1)
    exponent = (largest.view(torch.int32) >> 23).clamp(min=1).long() - 127
    scale = power_of_2(unit_bits(p.shape[-1]) - exponent)
    return (p.double() * scale.unsqueeze(-1)).long(), exponent, good & (largest > 0)


def power_of_2(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly, of int64 that are small."""
    return ((exponent + 1023) << 52).view(torch.float64)


def bounds(
    columns: int, like: Tensor, row_k: Tensor | None, row_p: Tensor | None, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """k and p (float64 of a float32) of each row, the smaller of what is given, and which rows have both."""
    k = torch.full_like(like, columns if top_k is None else min(top_k, columns))
    p = torch.full_like(like, 1.0 if top_p is None else min(top_p, 1.0), dtype=torch.float32)
    valid = torch.ones_like(like, dtype=torch.bool)
    if row_k is not None:
        valid &= row_k >= 1
        k = torch.minimum(k, row_k.to(k.dtype).clamp(min=1))
    if row_p is not None:
        single = row_p.float()
        valid &= ~single.isnan()
        p = torch.minimum(p, torch.where(single.isnan(), 1.0, single))
    return k, p.double(), valid


def kept(
    probs: Tensor, row_k: Tensor | None, row_p: Tensor | None, top_k: int | None, top_p: float | None, order: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masses of what is kept (0 of the rest), which that is, exponents, and valid rows."""
    mass, exponent, good = masses(probs)
    k, p, valid = bounds(probs.shape[-1], exponent, row_k, row_p, top_k, top_p)
    k, p = k.unsqueeze(-1), p.unsqueeze(-1)
    single = torch.where((good & valid).unsqueeze(-1), probs.float(), 0.0)
    ranked = torch.sort(single, dim=-1, descending=True, stable=True).indices  # ties: the lowest index first
    sorted_mass = mass.gather(-1, ranked)
    among = torch.arange(probs.shape[-1], device=probs.device) < k
    counted = torch.where(among, sorted_mass, 0) if order == "top_k_first" else sorted_mass
    target = torch.ceil(p * counted.sum(-1, keepdim=True).double()).long().clamp(min=1)
    before = counted.cumsum(-1) - counted
    stays = among & ((before < target) | (p >= 1.0))
    mask = torch.zeros_like(stays).scatter(-1, ranked, stays)
    return torch.where(mask, mass, 0), mask, exponent, good & valid
