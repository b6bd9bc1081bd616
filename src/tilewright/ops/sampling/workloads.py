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

_K_AND_P = {"top_k": 50, "top_p": 0.9, "few": True}
_P = {"top_k": None, "top_p": 0.9, "few": False}
_MANY = {"top_k": 1000, "top_p": None, "few": False}
SAMPLING = (
    Workload("qwen3, one sequence, k 50 and p 0.9", 1, 151936, torch.float32, options=_K_AND_P),
    Workload("qwen3, 64 sequences, k 50 and p 0.9", 64, 151936, torch.float32, options=_K_AND_P),
    Workload("qwen3, one sequence, p 0.9", 1, 151936, torch.float32, options=_P),
    Workload("qwen3, 64 sequences, p 0.9", 64, 151936, torch.float32, options=_P),
    Workload("llama-3, 16 sequences, k 1000", 16, 128256, torch.float32, options=_MANY),
)
