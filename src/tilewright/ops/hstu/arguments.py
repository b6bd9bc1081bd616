"""What the kernels of the family are told of a call, whichever language they are in. Launch arguments and constants by
name; nothing here imports a compiler.
"""

from __future__ import annotations

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument
from tilewright.ops.attention.arguments import strides, unit_of
from tilewright.ops.attention.masks import FAR
from tilewright.ops.hstu.masks import Rules
from tilewright.ops.residual.philox import limit, scale

__all__ = ["constants", "numbers", "programs", "strides", "tensors", "unit_of"]


def jagged(call: Call) -> bool:
    return "seq_offsets" in call.tensors


def tensors(call: Call) -> dict[str, Argument]:
    """Those that say what is seen and how much it counts; None where the op has none."""
    return {name: call.tensors.get(name) for name in ("seq_offsets", "num_targets", "attn_scale", "mask")}


def numbers(call: Call, rows: int, main: str = "q") -> dict[str, Argument]:
    """Strides of masks and factors, counts, options. `rows`: of a tile of `main`."""
    facts: TensorFacts | None = call.tensors.get("mask")
    steps = [0] * 4 if facts is None else [s * (n > 1) for n, s in zip(facts.shape, facts.stride, strict=True)]
    found: dict[str, Argument] = dict(zip(("mask_batch", "mask_head", "mask_row", "mask_step"), steps, strict=True))
    factor: TensorFacts | None = call.tensors.get("attn_scale")
    found["factor_step"] = 0 if factor is None or factor.numel <= 1 else factor.stride[0]
    found["count"] = call.seq_offsets.shape[0] - 1 if jagged(call) else 0
    found |= {"rows": call.q.shape[-3], "keys": call.k.shape[-3]}
    found |= {"tiles": -(-call[main].shape[-3] // rows), "heads": call.q.shape[-2]}
    drops = dropping(call)
    if jagged(call):
        rules = Rules.of(call.options)
        found |= {"shared": rules.shared, "window": min(rules.window, FAR), "tail": min(rules.full_tail, FAR)}
        found |= {"alpha": call.alpha, "post": 1.0 / call.max_seqlen}
    else:
        found |= {"shared": 0, "window": 0, "tail": 0, "alpha": call.scale, "post": call.post_scale}
    found["limit"] = limit(call.dropout_p) if drops else 0
    found["kept_scale"] = scale(call.dropout_p) if drops else 1.0
    return found


def dropping(call: Call) -> bool:
    return jagged(call) and call.dropout_p > 0.0


def constants(call: Call) -> dict[str, bool]:
    """Of masks and numbers. LIFTS: float16 needs its products lifted to where it holds them."""
    rules = Rules.of(call.options) if jagged(call) else Rules(False, 0, 0, 0)
    return {
        "CAUSAL": rules.causal, "CONTEXT": rules.contextual_len > 0, "WINDOW": rules.window > 0,
        "DROPS": dropping(call), "LIFTS": call.q.dtype == torch.float16,
    }  # fmt: skip


def programs(call: Call, facts: TensorFacts, rows: int) -> int:
    """Tiles of so many rows of every head: of packed sequences as many as there can be."""
    tokens, heads = facts.shape[-3], facts.shape[-2]
    if jagged(call):
        return int((tokens // rows + call.seq_offsets.shape[0]) * heads)
    return int(-(-tokens // rows) * heads * facts.shape[0])
