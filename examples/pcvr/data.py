"""Synthetic conversion logs: bags of ids whose popularity falls as a power law, and labels that depend on them.

Each step's batch is a pure function of (seed, step), so two runs see the same data whatever they compute it with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """`fields` bags of up to `bag` ids each out of `ids`, for `batch` examples."""

    batch: int
    fields: int
    bag: int
    ids: int
    power: float = 1.05
    """The share of the id of rank r falls as r ** -power."""


def batch(sizes: Sizes, seed: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ids int64[fields, batch, bag], 0 for padding, and labels fp32[batch, 1]."""
    generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + step)
    shape = (sizes.fields, sizes.batch, sizes.bag)
    uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    ids = _ranks(uniform, sizes.ids - 1, sizes.power) + 1
    lengths = torch.randint(1, sizes.bag + 1, shape[:2], generator=generator, device=device)
    ids = torch.where(torch.arange(sizes.bag, device=device) < lengths[..., None], ids, 0)
    # an id speaks for or against a conversion, by a hash of it
    vote = ((ids * 2_654_435_761) >> 7) % 1024 / 511.5 - 1
    score = (vote * (ids > 0)).sum((0, 2)) / lengths.sum(0).sqrt()
    chance = torch.sigmoid(4.0 * score - 2.0)
    label = torch.rand(sizes.batch, generator=generator, device=device, dtype=torch.float64) < chance
    return ids, label.float()[:, None]


def _ranks(uniform: Tensor, count: int, power: float) -> Tensor:
    """Ranks 0..count-1 of a bounded power law, by its inverse distribution function."""
    rest = 1.0 - power
    rank = (1.0 + uniform * ((count + 1.0) ** rest - 1.0)) ** (1.0 / rest)
    return (rank.long() - 1).clamp_(0, count - 1)
