"""hstu_attention as users call it: with a seed from torch's generator."""

from __future__ import annotations

from torch import Tensor

from tilewright.core.errors import InvalidArgument
from tilewright.ops.hstu import jagged
from tilewright.ops.seeds import drawn


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    *,
    max_seqlen: int,
    alpha: float,
    causal: bool = True,
    num_targets: Tensor | None = None,
    contextual_len: int = 0,
    window: int = 0,
    full_tail: int = 0,
    attn_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """HSTU attention of packed sequences: o = SiLU(alpha q k^T) v / max_seqlen over the keys that a token sees. See the
    op, `hstu_attention.op`, for the mask.

    Args:
        q, k, v: [T, H, D], [T, H, D] and [T, H, Dv], fp32, fp16 or bf16.
        seq_offsets: int32 or int64 [N + 1], where sequences start and the last one ends.
        max_seqlen: what weights are divided by, at least the longest sequence.
        alpha: of scores.
        causal: a token sees no later one.
        num_targets: int32 or int64 [N], tokens at the end of each sequence that do not see each other.
        contextual_len: tokens at the start of each sequence that see each other and the history.
        window: how far back a token sees; 0 is unbounded.
        full_tail: the last tokens of the history, and the targets, see all of it in spite of the window.
        attn_scale: fp32, one number or [T], in place of 1 / max_seqlen.
        dropout_p: weights are dropped with this probability. Without seed and offset (int64[1] on the device) a seed is
            drawn from torch's generator.
        backend: this backend or an error that says why not.

    Returns:
        o: [T, H, Dv].

    Raises:
        InvalidArgument: as the op; also no seed while a CUDA graph is captured, whose replays would all drop the same.
    """
    if seed is None and offset is not None:
        raise InvalidArgument("hstu_attention", "offset", "given without a seed", "pass both")
    if seed is None and dropout_p and isinstance(q, Tensor):
        seed = drawn("hstu_attention", q.device)
    return jagged.hstu_attention(
        q, k, v, seq_offsets, num_targets, attn_scale, seed, offset, max_seqlen=max_seqlen, alpha=alpha, causal=causal,
        contextual_len=contextual_len, window=window, full_tail=full_tail, dropout_p=dropout_p, backend=backend,
    )  # fmt: skip


hstu_attention.op = jagged.hstu_attention  # type: ignore[attr-defined]  # for explain, and for its reference
