"""What torch itself has of attention, through the aten ops that return lse: FlashAttention-2, memory-efficient, cuDNN,
and the blocked one for CPUs. Masks that an op means otherwise are refused, never approximated.

aten's dropout draws random numbers of its own, so dropout is refused everywhere. Sequences in the last but one
dimension ([B, H, S, D]) are views of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import Call
from tilewright.core.reason import Reason
from tilewright.ops.attention.softmax import scale_of

_aten = torch.ops.aten
LEAST_KEYS = 16
"""Of aten's kernel for CPUs: the float32 numbers in 512 bits."""


def common(call: Call) -> Iterable[Reason]:
    """What none of them has."""
    if call.dropout_p > 0.0:
        yield Reason("dropout_p", f"{call.dropout_p}; aten draws random numbers of its own", "use another backend")
    if call.prefix_rows:
        yield Reason("prefix_rows", f"{call.prefix_rows}; aten has no such mask")
    if call.has("kv_len"):
        yield Reason("kv_len", "given; aten's dense attention takes no lengths on the device")
    if call.has("dlse"):
        yield Reason("dlse", "given; aten has no gradient of lse")
    if not call.has("do") and "do" in call.tensors:
        yield Reason("do", "None; aten wants an upstream gradient of o")
    if call.q.columns != call.v.columns:
        yield Reason("v", f"head dimension {call.v.columns}, while q has {call.q.columns}")
    if call.scale is not None and call.scale <= 0.0:
        yield Reason("scale", f"{call.scale}; takes more than 0")


def no_window(call: Call) -> Iterable[Reason]:
    if call.window_left >= 0 or call.window_right >= 0:
        yield Reason("window", f"({call.window_left}, {call.window_right}); takes none")


def no_mask(call: Call) -> Iterable[Reason]:
    if call.has("mask"):
        yield Reason("mask", "given; this kernel takes none")


def top_left(call: Call) -> Iterable[Reason]:
    """Causal as torch has it, where some query sees each key."""
    rows, keys = call.q.shape[1], call.k.shape[1]
    if call.causal and call.align == "bottom_right" and rows != keys:
        yield Reason("align", "'bottom_right' with lengths that differ; this kernel is causal from the top left")
    elif call.causal and rows < keys:
        yield unseen(keys - rows)


def unseen(keys: int) -> Reason:
    """Tiles are multiplied whole."""
    return Reason("k", f"no query sees {keys} keys; this kernel multiplies them by 0, of which NaN is NaN", "cut them")


def flash_causal(call: Call) -> Iterable[Reason]:
    """FlashAttention-2 is causal from the bottom right, and its lse of a row without keys is +Inf."""
    rows, keys = call.q.shape[1], call.k.shape[1]
    diagonal = call.causal or call.window_left >= 0 or call.window_right >= 0
    if diagonal and rows != keys and call.align != "bottom_right":
        yield Reason(
            "align", f"{call.align!r} with lengths that differ; FlashAttention is causal from the bottom right"
        )
    if diagonal and rows > keys:
        yield Reason("q", f"{rows} rows for {keys} keys: some see none, whose lse FlashAttention has otherwise")
    if 0 <= call.window_left < keys - rows:
        yield unseen(keys - rows - call.window_left)


def enough_keys(call: Call) -> Iterable[Reason]:
    """As many as a CPU has in a vector: aten looks for the largest score of the others one by one, where NaN is lost,
    and takes a query that found none for one that sees nothing."""
    keys = call.k.shape[1]
    if keys < LEAST_KEYS:
        yield Reason("k", f"{keys} keys; takes {LEAST_KEYS} or more: of fewer, aten loses a NaN in q")


def heads_alike(call: Call) -> Iterable[Reason]:
    """One head of keys stands for all as a view; of several a view cannot repeat each."""
    if call.k.shape[-2] not in (1, call.q.shape[-2]):
        yield Reason("k", f"{call.k.shape[-2]} heads, while q has {call.q.shape[-2]}; takes as many, or one")


def half(call: Call) -> Iterable[Reason]:
    if call.q.dtype == torch.float32:
        yield Reason("q", "dtype fp32; takes fp16, bf16")


def keys_to_see(call: Call) -> Iterable[Reason]:
    """A mask may hide every key of a row, which the op would average."""
    if call.has("mask"):
        yield Reason("mask", "given, and may hide every key of a row: o would not be 0 and lse not -Inf")


def head_dims(most: int) -> Callable[[Call], Iterable[Reason]]:
    def limit(call: Call) -> Iterable[Reason]:
        if call.q.columns > most or call.q.columns % 8:
            yield Reason("q", f"head dimension {call.q.columns}; takes multiples of 8 to {most}")

    return limit


def _swap(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _back(*tensors: Tensor) -> list[Tensor]:
    """Not as views, of which autograd would let none be changed in place."""
    return [t.transpose(1, 2).contiguous().data for t in tensors]


def _needed(found: Iterable[Tensor], needs: tuple[bool, ...]) -> list[Tensor | None]:
    return [t if need else None for t, need in zip(found, needs, strict=True)]


def flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, saving: bool, **o: Any) -> list[Tensor | None]:
    """FlashAttention-2 on our layout, with its windows."""
    left, right = o["window_left"], o["window_right"]
    o_, lse, *_ = _aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, o["causal"], False,
        scale=scale_of(o["scale"], q.shape[-1]),
        window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right,
    )  # fmt: skip
    # Where a weight is NaN it says Inf. No row that sees nothing comes here, whose lse would be Inf too.
    return [o_, lse.add_(lse, alpha=0.0), None][: 2 + saving]


def flash_backward(
    do: Tensor, dlse: None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *_: Any,
    needs: tuple[bool, bool, bool], saving: bool, **options: Any,
) -> list[Tensor | None]:  # fmt: skip
    left, right = options["window_left"], options["window_right"]
    none = torch.empty(2, dtype=torch.int64, device=q.device)
    found = _aten._flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[1], k.shape[1], 0.0, options["causal"], none, none,
        scale=scale_of(options["scale"], q.shape[-1]),
        window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right,
    )  # fmt: skip
    return _needed(found, needs)


def cpu(q: Tensor, k: Tensor, v: Tensor, *_: Any, saving: bool, **o: Any) -> list[Tensor | None]:
    """Blocked attention for CPUs."""
    a, b, c = _swap(q, k, v)
    found, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        a, b, c, 0.0, o["causal"], scale=scale_of(o["scale"], q.shape[-1])
    )
    return [*_back(found), lse.contiguous(), None][: 2 + saving]


def cpu_backward(
    do: Tensor, dlse: None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *_: Any,
    needs: tuple[bool, bool, bool], saving: bool, **options: Any,
) -> list[Tensor | None]:  # fmt: skip
    swapped = _swap(do, q, k, v, o)
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *swapped, lse, 0.0, options["causal"], scale=scale_of(options["scale"], q.shape[-1])
    )
    return _needed(_back(*found), needs)


def efficient(q: Tensor, k: Tensor, v: Tensor, *_: Any, saving: bool, **o: Any) -> list[Tensor | None]:
    """Memory-efficient attention (Rabe and Staats, 2021), as xFormers has it. Its lse is padded to whole tiles."""
    a, b, c = _swap(q, *(t.expand(-1, -1, q.shape[2], -1) for t in (k, v)))
    found, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        a, b, c, None, True, 0.0, o["causal"], scale=scale_of(o["scale"], q.shape[-1])
    )
    return [*_back(found), lse[..., : q.shape[1]].contiguous().data, None][: 2 + saving]


def cudnn(q: Tensor, k: Tensor, v: Tensor, *_: Any, saving: bool, **o: Any) -> list[Tensor | None]:
    """cuDNN's, which has lse as [B, H, S, 1], and takes fewer heads of keys than of queries as they are."""
    a, b, c = _swap(q, k, v)
    found, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        a, b, c, None, True, 0.0, o["causal"], False, scale=scale_of(o["scale"], q.shape[-1])
    )
    return [*_back(found), lse.reshape(q.shape[0], q.shape[2], q.shape[1]).contiguous().data, None][: 2 + saving]


def cudnn_backward(
    do: Tensor, dlse: None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *_: Any,
    needs: tuple[bool, bool, bool], saving: bool, **options: Any,
) -> list[Tensor | None]:  # fmt: skip
    # torch keeps what it has compiled by the strides of q, k and v alone: with others of do it would read as before.
    a, b, c, d, e = _swap(do.contiguous(), q, k, v, o.contiguous())
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    found = _aten._scaled_dot_product_cudnn_attention_backward(
        a, b, c, d, e, lse.unsqueeze(-1), none, none, None, None, None, q.shape[1], k.shape[1], 0.0, options["causal"],
        scale=scale_of(options["scale"], q.shape[-1]),
    )  # fmt: skip
    return _needed(_back(*found), needs)
