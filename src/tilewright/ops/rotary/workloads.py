"""Inputs of rotary embeddings as real models have them: rows are sequences, columns the width of a head."""

from tilewright.core.probes import Workload

HEADS = (
    # sizes: tokens a sequence, heads, rows of the tables, half of what is turned
    Workload("llama-3-8b training, queries of 4 x 2048", 4, 128, sizes=(2048, 32, 8192, 64)),
    Workload("qwen3-0.6b training, queries of 16 x 2048", 16, 128, sizes=(2048, 16, 4096, 64)),
    Workload("pi0.5 encoder, queries", 1, 256, sizes=(968, 8, 1024, 128)),
    Workload("decode, 64 sequences", 64, 128, sizes=(1, 32, 4096, 64)),
)

PROJECTIONS = (
    # sizes: tokens a sequence, rows of the tables, half of what is turned
    Workload("qwen3-8b training, 4 x 2048", 4, 128, sizes=(2048, 8192, 64), options={"q_heads": 32, "kv_heads": 8}),
    Workload("qwen3-0.6b training, 16 x 2048", 16, 128, sizes=(2048, 4096, 64), options={"q_heads": 16, "kv_heads": 8}),
    Workload(
        "pi0.5 encoder",
        1,
        256,
        sizes=(968, 1024, 128),
        options={"q_heads": 8, "kv_heads": 1, "style": "interleaved"},
    ),
    Workload("decode, 64 sequences", 64, 128, sizes=(1, 4096, 64), options={"q_heads": 32, "kv_heads": 8}),
)

CACHED = (
    # sizes: new tokens a sequence, rows of the tables, half of what is turned, rows of the caches
    Workload(
        "qwen3-8b decode, 64 sequences", 64, 128, sizes=(1, 4096, 64, 4096), options={"q_heads": 32, "kv_heads": 8}
    ),
    Workload(
        "qwen3-8b prefill, 2048 tokens", 1, 128, sizes=(2048, 4096, 64, 4096), options={"q_heads": 32, "kv_heads": 8}
    ),
    Workload(
        "pi0.5 action expert, 10 tokens",
        1,
        256,
        sizes=(10, 1024, 128, 1024),
        options={"q_heads": 8, "kv_heads": 1, "style": "interleaved"},
    ),
)
