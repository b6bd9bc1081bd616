"""What the kernels of attention are told of a call, whichever language they are in: strides, masks, numbers. Launch
arguments and constants by name; nothing here imports a compiler.
"""

from __future__ import annotations

import math

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument
from tilewright.ops.attention.masks import FAR, Rules
from tilewright.ops.attention.softmax import scale_of
from tilewright.ops.residual.philox import limit, scale

LOG2E = math.log2(math.e)


def heads_of(call: Call) -> dict[str, int]:
    """Of query heads, and of heads for each key head."""
    return {"heads": call.q.shape[-2], "group": call.q.shape[-2] // call.k.shape[-2]}


def unit_of(*tensors: TensorFacts) -> int:
    """The power of two, up to 16 bytes, that every stride of these is a multiple of, in elements. Strides are told in
    it, so that the compiler knows how wide accesses may be, of heads of 72 too."""
    steps = (s for facts in tensors for n, s in zip(facts.shape[:-1], facts.stride[:-1], strict=True) if n > 1)
    return math.gcd(16 // tensors[0].dtype.itemsize, *steps)


def strides(facts: TensorFacts, unit: int) -> dict[str, Argument]:
    """Of [B, S, H, D] or [T, H, D], in units."""
    batch, row, head = (0, *facts.stride)[-4:-1]
    found = {"batch": batch, "row": row, "head": head}
    return {f"{facts.name}_{which}": step // unit for which, step in found.items()}


def mask_arguments(call: Call) -> dict[str, Argument]:
    """The tensors and numbers of every mask, and where packed sequences begin."""
    rules = Rules.of(call.options)
    right = 0 if rules.causal else FAR
    right = right if rules.window_right < 0 else min(right, rules.window_right)
    mask: TensorFacts | None = call.tensors.get("mask")
    steps = [0] * 4 if mask is None else [s * (n > 1) for n, s in zip(mask.shape, mask.stride, strict=True)]
    places: dict[str, Argument] = dict(zip(("mask_batch", "mask_head", "mask_row", "mask_step"), steps, strict=True))
    if places["mask_step"] == 1:  # None: nothing to multiply by, and accesses are wide
        places["mask_step"] = None
    starts = call.tensors.get("cu_seqlens_q")
    return {
        "kv_len": call.tensors.get("kv_len"),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": call.tensors.get("cu_seqlens_k"),
        "prefix_kv_len": call.tensors.get("prefix_kv_len") if rules.prefix_kv < 0 else None,
        "mask": mask,
        **places,
        "left": min(rules.window_left, FAR),
        "right": min(right, FAR),
        "prefix_rows": min(rules.prefix_rows, FAR),
        "prefix": min(max(rules.prefix_kv, 0), FAR),
        "count": 0 if starts is None else starts.shape[0] - 1,
        "rows": call.q.shape[-3],
        "keys": call.k.shape[-3],
    }


def mask_constants(call: Call) -> dict[str, bool]:
    rules = Rules.of(call.options)
    return {
        "BOTTOM": rules.align == "bottom_right",
        "LEFT": rules.window_left >= 0,
        "RIGHT": rules.causal or rules.window_right >= 0,
        "PREFIX": rules.prefix_rows > 0,
    }


def number_arguments(call: Call) -> dict[str, Argument]:
    """The factor of scores, in powers of 2 and without its sign, and what dropout needs."""
    factor = scale_of(call.scale, call.q.columns)
    drops = call.dropout_p > 0.0
    return {
        "factor": abs(factor) * LOG2E,
        "limit": limit(call.dropout_p) if drops else 0,
        "kept_scale": scale(call.dropout_p) if drops else 1.0,
    }


def tiles_of(call: Call, m: int, pack: int) -> int:
    """Tiles of M rows of one head: of packed sequences as many as there can be."""
    rows: int = call.q.shape[-3] * pack
    if "cu_seqlens_q" in call.tensors:
        return rows // m + int(call.cu_seqlens_q.shape[0])
    return -(-rows // m)
