"""Inputs of linear layers as real models have them; used by tests, tuning and benchmarks alike."""

from tilewright.core.probes import Workload

FEED_FORWARD = (
    Workload("pi0.5 encoder, up projections", 968, 2048, sizes=(32768,), options={"act": "gelu_tanh"}),
    Workload("feed-forward of 14336, 8192 tokens", 8192, 4096, sizes=(14336,), options={"act": "gelu"}),
)
