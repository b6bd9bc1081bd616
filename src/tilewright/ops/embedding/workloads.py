"""Inputs of embedding bags as recommenders have them: bags, columns, (rows of the table, ids a bag)."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from tilewright.core.probes import Shape, Workload


def uniform(
    shape: Shape, generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> torch.Tensor:
    """Every id but the padding, equally often: what no cache helps with."""
    return torch.randint(1, sizes["V"], shape, generator=generator, device=device)


def popular(
    shape: Shape, generator: torch.Generator, device: torch.device | str, sizes: Mapping[str, int]
) -> torch.Tensor:
    """The id of rank r in proportion to 1 / r (Zipf): ids up to k come log(k) / log(V) of the time."""
    share = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    return (sizes["V"] ** share).long().clamp(1, sizes["V"] - 1)


BAGS = (
    Workload(
        "recommender, uniform: 65536 bags of 32 from 2M rows",
        65536,
        128,
        torch.float16,
        (2_000_000, 32),
        values={"indices": uniform},
    ),
    Workload(
        "recommender, power law: 65536 bags of 32 from 2M rows",
        65536,
        128,
        torch.float16,
        (2_000_000, 32),
        values={"indices": popular},
    ),
    Workload("dlrm, 8192 bags of 20 from 1M rows", 8192, 64, torch.float32, (1_000_000, 20)),
    Workload("short history, 4096 bags of 50 from 100K rows", 4096, 256, torch.bfloat16, (100_000, 50)),
    Workload("small vocabulary, 65536 bags of 8 from 1000 rows", 65536, 64, torch.bfloat16, (1000, 8)),
    Workload("serving, 16 bags of 200 from 1M rows", 16, 128, torch.float16, (1_000_000, 200)),
)
SPARSE = (
    Workload(
        "sparse gradient, 8192 bags of 32 from 500K rows",
        8192,
        128,
        torch.float32,
        (500_000, 32),
        {"sparse_grad": True},
        {"indices": popular},
    ),
    Workload(
        "sparse gradient, 65536 bags of 20 from 2M rows",
        65536,
        64,
        torch.bfloat16,
        (2_000_000, 20),
        {"sparse_grad": True},
        {"indices": popular},
    ),
)
SPARSE_BACKWARD = tuple(replace(workload, options={}) for workload in SPARSE)
"""The same for the op of that gradient, which has no such option."""
