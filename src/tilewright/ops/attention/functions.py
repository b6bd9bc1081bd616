"""attention as users call it: windows as pairs, packed sequences, a seed from torch's generator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.core.errors import InvalidArgument
from tilewright.ops.attention import dense, varlen
from tilewright.ops.seeds import drawn


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
    window: tuple[int, int] | None = None,
    kv_len: Tensor | None = None,
    prefix_rows: int = 0,
    prefix_kv_len: int | Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: o = softmax(scale q k^T) v over visible keys. See the op, `attention.op`.

    Args:
        q: [B, Sq, Hq, D], fp32, fp16 or bf16; [Tq, Hq, D] with cu_seqlens.
        k, v: [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv] (or [Tk, Hkv, .]), dtype of q; Hq is a multiple of Hkv.
        scale: None is D^-1/2.
        causal: a query sees no key behind its own place, which `align` says: "top_left" (query i at key i, as in torch)
            or "bottom_right" (the last query at the last key, as in FlashAttention and in decoding). It may be left
            out where lengths are equal.
        window: (left, right), how far from its place a query sees; -1 is unbounded.
        kv_len: int32[B], the keys that there are; the rest of k and v is not read.
        prefix_rows, prefix_kv_len: the first queries see the first keys alone; an int, or int32[B].
        mask: bool [B or 1, Hq or 1, Sq, Sk], True where visible.
        cu_seqlens_q, cu_seqlens_k: int32[N + 1], packed sequences; see `varlen_attention`. One tensor for both means
            that lengths are equal.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
        dropout_p: weights are dropped with this probability. Without seed and offset (int64[1] on the device) a seed is
            drawn from torch's generator.
        return_lse: return the log-sum-exp too. Both have gradients.
        backend: this backend or an error that says why not.

    Returns:
        o: [B, Sq, Hq, Dv] or [Tq, Hq, Dv]; with return_lse also lse, float32 [B, Hq, Sq] or [Hq, Tq].

    Raises:
        InvalidArgument: as the op, in the words of this function; also what dense and packed sequences do not share,
            and no seed while a CUDA graph is captured, whose replays would all drop the same.
    """
    left, right = (-1, -1) if window is None else _pair(window)
    if seed is None and offset is not None:
        raise InvalidArgument("attention", "offset", "given without a seed", "pass both")
    if seed is None and dropout_p and isinstance(q, Tensor):
        seed = drawn("attention", q.device)
    prefix_kv, prefix_lengths = _prefix(prefix_kv_len)
    kv_len, prefix_lengths = _dense(kv_len), _dense(prefix_lengths)
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "align": align,
        "window_left": left,
        "window_right": right,
        "prefix_rows": prefix_rows,
        "prefix_kv": prefix_kv,
        "dropout_p": dropout_p,
        "backend": backend,
    }
    bounds: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        unfit = {"kv_len": kv_len, "mask": mask, "prefix_kv_len": prefix_lengths}
        why = "given with cu_seqlens", "packed sequences have no batch"
    else:
        unfit, why = bounds, ("given without cu_seqlens", "it bounds packed sequences alone")
    for name, given in unfit.items():
        if given is not None:
            raise InvalidArgument("attention", name, *why)
    try:
        if not packed:
            found = dense.attention(q, k, v, kv_len, prefix_lengths, mask, seed, offset, **options)
            return found if return_lse else found[0]
        if cu_seqlens_q is None or cu_seqlens_k is None:
            name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
            raise InvalidArgument("attention", name, "None", "packed sequences have both")
        starts = _dense(cu_seqlens_q), _dense(cu_seqlens_k)
        if cu_seqlens_q is cu_seqlens_k:
            options["align"] = align or "top_left"
            starts = starts[0], starts[0]
        found = varlen.varlen_attention(q, k, v, *starts, seed, offset, **options, **bounds)
        return found if return_lse else found[0]
    except InvalidArgument as error:  # the ops have names of their own, and for some arguments too
        name = _NAMES.get(error.argument, error.argument)
        raise InvalidArgument("attention", name, error.problem, error.remedy) from None


_NAMES = {"window_left": "window", "window_right": "window", "prefix_kv": "prefix_kv_len"}


def _pair(window: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or [type(w) for w in window] != [int, int]:
        raise InvalidArgument("attention", "window", repr(window), "(left, right), -1 for unbounded")
    return window[0], window[1]


def _dense(numbers: Any) -> Any:
    """Numbers of sequences, one after another: kernels of ours take no other, and a copy costs next to nothing."""
    return numbers.contiguous() if isinstance(numbers, Tensor) else numbers


def _prefix(length: int | Tensor | None) -> tuple[int, Tensor | None]:
    """As the op has it: a number, -1 for none, or a tensor."""
    if length is None or isinstance(length, Tensor):
        return -1, length
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise InvalidArgument("attention", "prefix_kv_len", repr(length), "an int of 0 or more, or int32[B]")
    return length, None


attention.op = dense.attention  # type: ignore[attr-defined]  # for explain, and for its reference
