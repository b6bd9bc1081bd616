"""What the contract of the family refuses, whichever kernel runs: shapes, dtypes, options that do not agree."""

from __future__ import annotations

import torch

from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts
from tilewright.core.contract import floating, has_shape
from tilewright.core.errors import InvalidArgument
from tilewright.ops.attention.masks import ALIGNS, Rules


def heads(call: Call, axes: str) -> None:
    """q, k, v and what is shaped like them, of dimensions `axes` ("[B, S, H, D]", "[T, H, D]")."""
    rank = axes.count(",") + 1
    q, k, v = call.q, call.k, call.v
    for facts in (q, k, v):
        if len(facts.shape) != rank:
            raise InvalidArgument(call.op, facts.name, f"shape {list(facts.shape)}", f"needs {axes}")
    given = [n for n in ("do", "o") if n in call.tensors and n not in call.outputs and call.has(n)]
    floating(call, "q", "k", "v", *given)
    _agree(call, k, q, (-1,), "the last dimension of q")
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidArgument(call.op, "v", f"shape {list(v.shape)}, while k has {list(k.shape)}", "sizes must match")
    if rank == 4:
        _agree(call, k, q, (0,), "the batch of q")
    if not (q.shape[-1] and v.shape[-1] and q.shape[-2] and k.shape[-2]):
        raise InvalidArgument(call.op, "q", f"shape {list(q.shape)}", "heads and their dimensions must not be empty")
    if q.shape[-2] % k.shape[-2]:
        raise InvalidArgument(
            call.op, "k", f"{k.shape[-2]} heads, while q has {q.shape[-2]}", "the heads of q must be a multiple"
        )
    for name in ("do", "o"):
        if name not in call.outputs:
            has_shape(call, name, (*q.shape[:-1], v.shape[-1]), "as forward returns it")
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name in ("lse", "dlse"):
        facts = call.tensors.get(name)
        if facts is None or name in call.outputs:
            continue
        has_shape(call, name, rows, "as forward returns it")
        if facts.dtype != wide(q.dtype):
            raise InvalidArgument(
                call.op, name, str(facts), f"needs {DTYPE_NAMES[wide(q.dtype)]}, as forward returns it"
            )
    if "do" in call.tensors and not call.has("do") and not call.has("dlse"):
        raise InvalidArgument(call.op, "do", "None, and dlse too", "needs an upstream gradient")
    scale, least = call.options["scale"], torch.finfo(torch.float32).tiny
    if scale and wide(q.dtype) == torch.float32 and not least <= abs(scale) <= 1.0 / least:
        raise InvalidArgument(call.op, "scale", repr(scale), f"kernels take 0, or {least:.1e} to {1 / least:.1e}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """That of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _agree(call: Call, facts: TensorFacts, other: TensorFacts, places: tuple[int, ...], why: str) -> None:
    for place in places:
        if facts.shape[place] != other.shape[place]:
            raise InvalidArgument(
                call.op, facts.name, f"shape {list(facts.shape)}", f"needs {other.shape[place]} there: {why}"
            )


def lengths(call: Call, *names: str) -> None:
    """int32 [B]: read on the device, so that one capture serves many."""
    for name in names:
        has_shape(call, name, (call.q.shape[0],), "one for each of the batch")
        facts = call.tensors[name]
        if facts is not None and facts.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(call.op, name, f"dtype {_name(facts)}", "takes int32, int64")


def mask(call: Call) -> None:
    facts = call.tensors["mask"]
    if facts is None:
        return
    if facts.dtype != torch.bool:
        raise InvalidArgument(call.op, "mask", f"dtype {_name(facts)}", "takes bool, where True is visible")
    q, keys = call.q, call.k.shape[1]
    wanted = (q.shape[0], q.shape[2], q.shape[1], keys)
    fits = len(facts.shape) == 4 and facts.shape[2:] == wanted[2:]
    if not fits or facts.shape[0] not in (1, wanted[0]) or facts.shape[1] not in (1, wanted[1]):
        needs = f"needs {list(wanted)}, where the first two may be 1; mask.expand copies nothing"
        raise InvalidArgument(call.op, "mask", f"shape {list(facts.shape)}", needs)


def rules(call: Call, square: bool) -> None:
    """The options of masks. `square`: queries stand opposite to keys without being told how."""
    chosen = Rules.of(call.options)
    if chosen.align is not None and chosen.align not in ALIGNS:
        raise InvalidArgument(call.op, "align", repr(chosen.align), f"takes {', '.join(map(repr, ALIGNS))}")
    if chosen.diagonal and chosen.align is None and not square:
        raise InvalidArgument(
            call.op, "align", "None, with causal or a window and lengths that may differ",
            'choose "top_left" (query i stands at key i, as in torch) or "bottom_right" (the last at the last)',
        )  # fmt: skip
    for name in ("window_left", "window_right", "prefix_kv"):
        if call.options[name] < -1:
            raise InvalidArgument(call.op, name, f"{call.options[name]}", "takes 0 or more, or -1 for none")
    if chosen.prefix_rows < 0:
        raise InvalidArgument(call.op, "prefix_rows", f"{chosen.prefix_rows}", "must be 0 or more")
    name = "prefix_kv_len" if "prefix_kv_len" in call.tensors else "prefix_kv"
    given = call.has("prefix_kv_len") + (chosen.prefix_kv >= 0)
    if given == 2:
        raise InvalidArgument(call.op, name, f"given, and prefix_kv={chosen.prefix_kv} too", "pass one of them")
    if chosen.prefix_rows and not given:
        needs = "an int, or int32[B]" if name == "prefix_kv_len" else "an int"
        raise InvalidArgument(call.op, name, f"None, with prefix_rows={chosen.prefix_rows}", needs)
    if given and not chosen.prefix_rows:
        raise InvalidArgument(call.op, name, "given, with prefix_rows=0", "say how many queries it is for")


def dropout(call: Call) -> None:
    if not 0.0 <= call.dropout_p <= 1.0:
        raise InvalidArgument(call.op, "dropout_p", f"{call.dropout_p}", "a probability lies in [0, 1]")
    for name, size in (("seed", 1), ("offset", 1), ("state", 2)):
        facts = call.tensors.get(name)
        if facts is None or name in call.outputs:
            continue
        if facts.dtype != torch.int64 or facts.shape != (size,) or not facts.contiguous:
            raise InvalidArgument(call.op, name, str(facts), f"needs int64[{size}]")
    if call.has("offset") and not call.has("seed"):
        raise InvalidArgument(call.op, "offset", "given without a seed", "pass both")
    name = "seed" if "seed" in call.tensors else "state"
    if call.dropout_p > 0.0 and not call.has(name):
        raise InvalidArgument(call.op, name, "None", "what is dropped needs one: int64 on the device of q")


def sequences(call: Call) -> None:
    """cu_seqlens: int32 or int64 [N + 1], of one N."""
    first = call.cu_seqlens_q
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        facts = call.tensors[name]
        assert facts is not None
        if facts.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(call.op, name, f"dtype {_name(facts)}", "takes int32, int64")
        if len(facts.shape) != 1 or not facts.shape[0] or facts.shape != first.shape or not facts.contiguous:
            raise InvalidArgument(call.op, name, str(facts), "needs [N + 1], one N for queries and keys")


def _name(facts: TensorFacts) -> str:
    return DTYPE_NAMES.get(facts.dtype, str(facts.dtype).removeprefix("torch."))
