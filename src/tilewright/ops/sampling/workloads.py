"""Inputs of softmax and of sampling as real models have them; used by tests, tuning and benchmarks alike."""

import torch

from tilewright.core.probes import Workload

SOFTMAX = (
    Workload("attention weights, 4 heads of 2048 x 2048", 8192, 2048),
    Workload("qwen3 logits, 64 sequences", 64, 151936),
    Workload("qwen3 logits, one sequence", 1, 151936, torch.float32),
    Workload("llama-3 logits, 2048 tokens", 2048, 128256),
    Workload("mixture of experts, 32768 tokens over 128", 32768, 128, torch.float32),
)
