"""What users of attention would call instead: torch's scaled_dot_product_attention, one of its kernels at a time.

Each maker takes tensors by name and options, and returns a function that computes o; lse, which torch's function keeps
to itself, is left out. Used by benchmarks only; nothing here is a kernel of ours. Packed sequences have torch's
`varlen_attn`, in the versions that know it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.attention.masks import Rules

Tensors = Mapping[str, Any]
Options = Mapping[str, Any]
Run = Callable[[], Any]
Maker = Callable[[Tensors, Options], Run]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor]:
    """As a user would write it, on [B, S, H, D]."""
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, is_causal=causal, scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return (found.transpose(1, 2),)


def _arguments(t: Tensors, o: Options) -> tuple[Any, ...]:
    rules, rows, keys = Rules.of(o), t["q"].shape[1], t["k"].shape[1]
    if rules.window_left >= 0 or rules.window_right >= 0 or rules.prefix_rows or t["kv_len"] is not None:
        raise NotImplementedError("torch has neither windows, prefixes nor lengths on the device")
    if o["dropout_p"]:
        raise NotImplementedError("torch draws random numbers of its own")
    if rules.causal and rows != keys and rules.align != "top_left":
        raise NotImplementedError("torch is causal from the top left")
    if rules.causal and t["mask"] is not None:
        raise NotImplementedError("torch takes a mask or is causal, not both")
    return t["q"], t["k"], t["v"], t["mask"], rules.causal, o["scale"]


def _eager(t: Tensors, o: Options) -> Run:
    """Whichever kernel torch picks."""
    return functools.partial(_sdpa, *_arguments(t, o))


def _by(name: str) -> Maker:
    """One kernel of torch's, or none."""

    def maker(t: Tensors, o: Options) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        arguments = _arguments(t, o)
        if not t["q"].is_cuda:
            raise NotImplementedError(f"torch has {name} on a GPU alone")

        def run() -> Any:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return _sdpa(*arguments)

        try:
            run()
        except RuntimeError as problem:  # what it cannot do is said so
            if "No available kernel" not in str(problem):
                raise
            raise NotImplementedError(f"torch's {name} does not take this call") from problem
        return run

    return maker


def _composed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor]:
    """By matrix products and a softmax, as before there was a function for it."""
    group = q.shape[2] // k.shape[2]
    a, b, c = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = a @ b.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return ((scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ c).transpose(1, 2),)


def _compile(t: Tensors, o: Options) -> Run:
    """torch.compile of that, which keeps every score: where there are few it is at its best."""
    import torch._functorch.config as functorch

    arguments = _arguments(t, o)
    q, k = t["q"], t["k"]
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] > 1 << 28:
        raise NotImplementedError("keeps every score, and these would fill the memory")
    compiled = torch.compile(_composed, dynamic=False, fullgraph=True)

    def run() -> Any:
        # a graph that is kept for many backwards may not donate its buffers
        with functorch.patch(donated_buffer=False):
            return compiled(*arguments)

    return run if q.requires_grad else functools.partial(compiled, *arguments)


def _varlen(t: Tensors, o: Options) -> Run:
    """FlashAttention-2 on packed sequences, causal from the bottom right."""
    from torch.nn.attention.varlen import varlen_attn  # not in every torch

    rules = Rules.of(o)
    if o["dropout_p"] or rules.prefix_rows or rules.window_left >= 0 or rules.window_right >= 0:
        raise NotImplementedError("neither dropout, prefixes nor windows here")
    if rules.causal and rules.align != "bottom_right" and t["cu_seqlens_q"] is not t["cu_seqlens_k"]:
        raise NotImplementedError("FlashAttention is causal from the bottom right")
    if not t["q"].is_cuda:
        raise NotImplementedError("torch has it on a GPU alone")
    starts = [t[name].to(torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    longest = [int(s.diff().max()) for s in starts]
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": o["scale"]}
    options |= {"window_size": (-1, 0 if rules.causal else -1)} if "window_size" in known else {}
    options |= {"is_causal": rules.causal} if "is_causal" in known else {}
    options |= {"enable_gqa": True} if "enable_gqa" in known else {}
    call = functools.partial(varlen_attn, t["q"], t["k"], t["v"], *starts, *longest, **options)
    return lambda: (call(),)


PEERS: dict[str, dict[str, Maker]] = {
    "attention": {
        "torch": _eager,
        "cudnn": _by("CUDNN_ATTENTION"),
        "flash": _by("FLASH_ATTENTION"),
        "efficient": _by("EFFICIENT_ATTENTION"),
        "torch.compile": _compile,
    },
    "varlen_attention": {"flash": _varlen},
}
"""Liger has neither op."""
