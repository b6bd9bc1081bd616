"""Inputs of activations as real models have them; used by tests, tuning and benchmarks alike."""

from tilewright.core.probes import Workload

FEED_FORWARD = (
    Workload("llama-3-8b training, 8192 tokens", 8192, 14336),
    Workload("qwen3-0.6b training, 32768 tokens", 32768, 3072),
    Workload("pi0.5 encoder", 968, 16384),
    Workload("pi0.5 action expert", 10, 4096),
    Workload("recommender, 2048 sequences of 64", 131072, 256),
    Workload("decode, one token", 1, 14336),
)

RESIDUAL = (
    Workload("llama-3-8b training, 8192 tokens", 8192, 4096),
    Workload("pi0.5 encoder", 968, 2048),
    Workload("pi0.5 vision tower", 768, 1152),
    Workload("recommender, 2048 sequences of 64", 131072, 256),
    Workload("decode, one token", 1, 4096),
)

BIASED = (
    Workload("pi0.5 vision tower", 768, 4304),
    Workload("gpt-2 training, 32 sequences of 1024", 32768, 3072),
    Workload("bert-large, 16 sequences of 512", 8192, 4096),
    Workload("recommender, 2048 sequences of 64", 131072, 256),
    Workload("decode, one token", 1, 3072),
)
