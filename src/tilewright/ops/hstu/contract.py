"""What the contract of the family refuses, whichever kernel runs: shapes, dtypes, options."""

from __future__ import annotations

import torch

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.contract import floating, has_shape
from tilewright.core.errors import InvalidArgument
from tilewright.ops.attention.contract import dropout
from tilewright.ops.attention.masks import FAR


def heads(call: Call, axes: str) -> None:
    """q, k, v and do, of dimensions `axes` ("[B, S, H, D]", "[T, H, D]"): as many heads each."""
    rank, q = axes.count(",") + 1, call.q
    for facts in (q, call.k, call.v):
        if len(facts.shape) != rank:
            raise InvalidArgument(call.op, facts.name, f"shape {list(facts.shape)}", f"needs {axes}")
    floating(call, "q", "k", "v", *(n for n in ("do",) if n in call.tensors))
    same = slice(None, -1) if rank == 3 else slice(-2, -1)
    for name, places in (("k", same), ("v", same)):
        facts = call.tensors[name]
        assert facts is not None
        if facts.shape[places] != q.shape[places] or facts.shape[:-3] != q.shape[:-3]:
            wanted = "the tokens and heads of q" if rank == 3 else "the batch and heads of q"
            raise InvalidArgument(call.op, name, f"shape {list(facts.shape)}", f"needs {wanted}, {list(q.shape)}")
    if call.k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(call.op, "k", f"shape {list(call.k.shape)}", f"needs the {q.shape[-1]} columns of q")
    if call.k.shape[:-1] != call.v.shape[:-1]:
        raise InvalidArgument(
            call.op, "v", f"shape {list(call.v.shape)}, while k has {list(call.k.shape)}", "sizes must match"
        )
    for name in ("q", "v"):
        if not call[name].shape[-1]:
            raise InvalidArgument(call.op, name, f"shape {list(call[name].shape)}", "heads must not be empty")
    has_shape(call, "do", (*q.shape[:-1], call.v.shape[-1]), "as forward returns o")


def multiplier(call: Call) -> None:
    """mask: real, [B or 1, H or 1, Sq, Sk]."""
    facts = call.tensors["mask"]
    if facts is None:
        return
    q, keys = call.q, call.k.shape[1]
    if facts.dtype not in (q.dtype, torch.float32):
        name = _name(facts)
        raise InvalidArgument(call.op, "mask", f"dtype {name}", "a multiplier: takes the dtype of q, or fp32")
    wanted = (q.shape[0], q.shape[2], q.shape[1], keys)
    fits = len(facts.shape) == 4 and facts.shape[2:] == wanted[2:]
    if not fits or facts.shape[0] not in (1, wanted[0]) or facts.shape[1] not in (1, wanted[1]):
        needs = f"needs {list(wanted)}, where the first two may be 1; mask.expand copies nothing"
        raise InvalidArgument(call.op, "mask", f"shape {list(facts.shape)}", needs)


def sequences(call: Call) -> None:
    """seq_offsets, num_targets and attn_scale."""
    starts = call.seq_offsets
    if starts.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(call.op, "seq_offsets", f"dtype {_name(starts)}", "takes int32, int64")
    if len(starts.shape) != 1 or not starts.shape[0] or not starts.contiguous:
        raise InvalidArgument(call.op, "seq_offsets", str(starts), "needs [N + 1], side by side")
    targets: TensorFacts | None = call.tensors["num_targets"]
    if targets is not None:
        has_shape(call, "num_targets", (starts.shape[0] - 1,), "one a sequence")
        if targets.dtype not in (torch.int32, torch.int64) or not targets.contiguous:
            raise InvalidArgument(call.op, "num_targets", str(targets), "takes int32, int64, side by side")
    factor: TensorFacts | None = call.tensors["attn_scale"]
    if factor is not None:
        if factor.dtype not in (torch.float32, call.q.dtype if call.q.dtype == torch.float64 else torch.float32):
            raise InvalidArgument(call.op, "attn_scale", f"dtype {_name(factor)}", "takes fp32")
        if factor.shape not in ((), (1,), (call.q.shape[0],)):
            needs = f"needs one number, or [{call.q.shape[0]}], one a query token"
            raise InvalidArgument(call.op, "attn_scale", f"shape {list(factor.shape)}", needs)


def rules(call: Call) -> None:
    """The options of the jagged op."""
    if call.max_seqlen < 1:
        raise InvalidArgument(call.op, "max_seqlen", f"{call.max_seqlen}", "weights are divided by it: 1 or more")
    for name in ("contextual_len", "window", "full_tail"):
        if call.options[name] < 0:
            raise InvalidArgument(call.op, name, f"{call.options[name]}", "takes 0 (none) or more")
    if call.contextual_len > FAR:  # counted in 32 bits, together with a window
        raise InvalidArgument(call.op, "contextual_len", f"{call.contextual_len}", f"takes up to {FAR}")
    dropout(call)


def _name(facts: TensorFacts) -> str:
    return DTYPE_NAMES.get(facts.dtype, str(facts.dtype).removeprefix("torch."))
