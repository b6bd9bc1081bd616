"""What the Triton kernels of attention share: which rows a program has, where they lie, what each may see.

A tile is M rows of packed queries: PACK heads that read the same keys, side by side for each query. Queries are counted
in their sequence, keys too, in 32 bits; what they are multiplied by is 64. A row sees the keys from `low` to `high`,
which says every mask but the one that is a tensor.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument
from tilewright.ops.attention.masks import Rules
from tilewright.ops.attention.softmax import scale_of
from tilewright.ops.residual.philox import limit, scale
from tilewright.ops.residual.triton_dropout import philox

FAR = 1 << 30
"""An unbounded side of a window, and a prefix that hides nothing. Sequences are shorter."""
LOG2E = math.log2(math.e)


@triton.jit
def sequence_of(slot, cu_seqlens, count, PACK: tl.constexpr, M: tl.constexpr):
    """Which packed sequence the `slot`-th tile belongs to, and which tile of it that is.

    Sequence n has the slots from cu_seqlens[n] PACK // M + n on: enough for its tiles wherever it starts, and worked
    out without a sum over the others. Sequence `count` is what lies behind the last one.
    """
    low, high = slot * 0, count.to(tl.int32)
    while low < high:
        middle = (low + high + 1) // 2
        start = (tl.load(cu_seqlens + middle).to(tl.int64) * PACK // M).to(tl.int32) + middle
        if start <= slot:
            low = middle
        else:
            high = middle - 1
    return low, slot - (tl.load(cu_seqlens + low).to(tl.int64) * PACK // M).to(tl.int32) - low


@triton.jit
def place_of(slot, batch, rows, keys, kv_len, cu_seqlens_q, cu_seqlens_k, count, PACK: tl.constexpr, M: tl.constexpr):
    """(tile, first query, queries, first key, keys) of the `slot`-th tile, of one sequence of the batch or packed."""
    if cu_seqlens_q is not None:
        n, tile = sequence_of(slot, cu_seqlens_q, count, PACK, M)
        first = tl.load(cu_seqlens_q + n).to(tl.int64)
        first_key = tl.load(cu_seqlens_k + n).to(tl.int64)
        last, last_key = rows.to(tl.int64), first_key
        if n < count:
            last = tl.load(cu_seqlens_q + n + 1).to(tl.int64)
            last_key = tl.load(cu_seqlens_k + n + 1).to(tl.int64)
        return tile, first, (last - first).to(tl.int32), first_key, (last_key - first_key).to(tl.int32)
    else:
        there = keys.to(tl.int32)
        if kv_len is not None:
            there = tl.minimum(tl.maximum(tl.load(kv_len + batch), 0), keys).to(tl.int32)
        return slot, rows * 0, rows.to(tl.int32), keys * 0, there


@triton.jit
def seen_by(
    query, rows, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """[low, high) of the keys that each query sees."""
    place = query
    if BOTTOM:
        place += keys - rows
    low, high = query * 0, query * 0 + keys
    if LEFT:
        low = tl.maximum(place - left.to(tl.int32), 0)
    if RIGHT:
        high = tl.minimum(high, place + right.to(tl.int32) + 1)
    if PREFIX:
        most = prefix.to(tl.int32)
        if prefix_kv_len is not None:
            most = tl.load(prefix_kv_len + batch).to(tl.int32)
        high = tl.where(query < prefix_rows, tl.minimum(high, most), high)
    return low, high


@triton.jit
def seers(
    first, last, rows, keys, batch, left, right, prefix_rows, prefix, prefix_kv_len,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(start, whole, edge, end), the inverse of `seen_by`: no query outside [start, end) sees a key of [first, last),
    every one of [whole, edge) sees all of them."""
    shift = first * 0
    if BOTTOM:
        shift = keys - rows
    start, whole, edge, end = first * 0, first * 0, rows, rows
    if RIGHT:
        start = tl.maximum(first - right.to(tl.int32) - shift, 0)
        whole = tl.maximum(last - 1 - right.to(tl.int32) - shift, 0)
    if LEFT:
        edge = tl.minimum(edge, first + left.to(tl.int32) + 1 - shift)
        end = tl.minimum(end, last + left.to(tl.int32) - shift)
    if PREFIX:
        most, few = prefix.to(tl.int32), tl.minimum(prefix_rows, rows).to(tl.int32)
        if prefix_kv_len is not None:
            most = tl.load(prefix_kv_len + batch).to(tl.int32)
        start = tl.where(first >= most, tl.maximum(start, few), start)
        whole = tl.where(last > most, tl.maximum(whole, few), whole)
    return start, whole, edge, end


@triton.jit
def kept(seed, offset, rows, first, limit, N: tl.constexpr):
    """Which weights [M, N] of mask rows `rows` and columns from `first` (a multiple of 4) on stay."""
    low = offset + first // 4 + tl.arange(0, N // 4)[None, :]
    rows, low = tl.broadcast(rows[:, None], low)
    a, b, c, d = philox(low, rows, seed)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [rows.shape[0], N])
    return words > limit.to(tl.uint32)


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


def precision(call: Call) -> str:
    """How float32 is multiplied. NVIDIA's tensor cores do it in three products of TF32, which leave out 2^-22 of each:
    a product in registers holds whole rows of both operands there, for which they do not suffice."""
    return "tf32x3" if call.device.kind == "cuda" and call.q.dtype == torch.float32 else "ieee"
