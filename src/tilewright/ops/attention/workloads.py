"""Calls of attention as real models make them: batch, keys, then queries, heads of queries and of keys, D, Dv."""

from __future__ import annotations

from tilewright.core.probes import Workload

CAUSAL = {"causal": True, "align": "bottom_right"}

DENSE = (
    Workload("llama-3-8b training, 8192 tokens", 1, 8192, sizes=(8192, 32, 8, 128, 128), options=CAUSAL),
    Workload("qwen3-8b training, 4 x 4096 tokens", 4, 4096, sizes=(4096, 32, 8, 128, 128), options=CAUSAL),
    Workload("heads of their own, 4 x 4096 tokens", 4, 4096, sizes=(4096, 32, 32, 128, 128), options=CAUSAL),
    Workload("long context, 2 x 16384 tokens", 2, 16384, sizes=(16384, 16, 16, 64, 64), options=CAUSAL),
    Workload("siglip of pi0.5, 3 cameras of 256 patches", 3, 256, sizes=(256, 16, 16, 72, 72)),
    Workload("pi0.5 encoder, 968 tokens", 1, 968, sizes=(968, 8, 1, 256, 256)),
    Workload("pi0.5 action expert, 10 of 978", 1, 978, sizes=(10, 8, 1, 256, 256)),
    Workload("llama-3-8b decode, 32 sequences of 4096", 32, 4096, sizes=(1, 32, 8, 128, 128)),
    Workload("llama-3-8b decode, one sequence of 32768", 1, 32768, sizes=(1, 32, 8, 128, 128)),
    Workload("vit-l, 32 images of 577 patches", 32, 577, sizes=(577, 16, 16, 64, 64)),
)

PACKED = (
    Workload(
        "llama-3-8b training, 16 documents in 8192 tokens", 8192, 8192, sizes=(32, 8, 128, 128, 17), options=CAUSAL
    ),
    Workload("2048 short documents in 65536 tokens", 65536, 65536, sizes=(16, 16, 64, 64, 2049), options=CAUSAL),
    Workload("recommender, 256 users in 32768 events", 32768, 32768, sizes=(4, 4, 64, 64, 257), options=CAUSAL),
)
