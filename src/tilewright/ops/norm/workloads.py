"""Inputs of norms as real models have them; used by tests, tuning and benchmarks alike."""

from tilewright.core.probes import Workload

NORM = (
    Workload("llama-3-8b training, 8192 tokens", 8192, 4096),
    Workload("qwen3-0.6b training, 32768 tokens", 32768, 1024),
    Workload("llama-3-70b training, 4096 tokens", 4096, 8192),
    Workload("wide rows 16K", 16384, 16384),
    Workload("wide rows 64K", 2048, 65536),
    Workload("pi0.5 encoder", 968, 2048),
    Workload("pi0.5 action expert", 10, 1024),
    Workload("decode, one token", 1, 1024),
)
HEADS = (
    Workload("qk norm, 4096 tokens of 32 heads", 131072, 128),
    Workload("gated delta rule keys, 8192 tokens of 16 heads", 131072, 128),
)
