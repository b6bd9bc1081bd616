"""Inputs of losses as real models have them; used by tests, tuning and benchmarks alike."""

import torch

from tilewright.core.probes import Workload

LOGITS = (
    Workload("ranking, 2^24 logits", 4096, 4096, torch.float32),
    Workload("ranking, 65536 requests of 16 tasks", 65536, 16, torch.float32),
    Workload("recommender, 2048 sequences of 64, 4 tasks", 131072, 4, torch.float32),
    Workload("multi-label, 8192 images of 1000 classes", 8192, 1000),
    Workload("detection, 8 images of 80 classes", 174592, 80),
)
