"""Inputs of residual connections as real models have them; used by tests, tuning and benchmarks alike."""

from tilewright.core.probes import Workload

STREAMS = (
    Workload("llama-3-8b training, 8192 tokens", 8192, 4096),
    Workload("wide stream, 8192 tokens", 8192, 14336),
    Workload("qwen3-0.6b training, 32768 tokens", 32768, 1024),
    Workload("pi0.5 action expert", 10, 1024),
    Workload("recommender, 2048 sequences of 64", 131072, 256),
)
