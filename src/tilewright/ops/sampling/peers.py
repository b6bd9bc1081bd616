"""What users of softmax and of sampling would call instead: torch's own functions, with a sort, Liger and FlashInfer.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. The rivals are
imported inside, since most machines have none of them. Used by benchmarks only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled


def _softmax(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(x * scale, -1)


def _renorm(
    probs: Tensor, row_k: Tensor | None, row_p: Tensor | None, top_k: int | None, top_p: float | None, order: str
) -> Tensor:
    """By a sort of the whole row."""
    ranked, index = probs.sort(-1, descending=True)
    stays = torch.ones_like(ranked, dtype=torch.bool)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    for k in (top_k, row_k):
        if k is not None:
            stays = stays & (rank < (k.unsqueeze(-1) if isinstance(k, Tensor) else k))
    counted = torch.where(stays, ranked, 0.0) if order == "top_k_first" else ranked
    mass = counted.cumsum(-1)
    for p in (top_p, row_p):
        if p is not None:
            share = p.unsqueeze(-1) if isinstance(p, Tensor) else p
            stays = stays & (mass - counted < share * mass[..., -1:])
    kept = torch.where(stays, ranked, 0.0)
    return torch.zeros_like(probs).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


def _sample(
    probs: Tensor, seed: Tensor, offset: Tensor | None, row_k: Tensor | None, row_p: Tensor | None, top_k: int | None,
    top_p: float | None, order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With torch's own random numbers."""
    kept = _renorm(probs, row_k, row_p, top_k, top_p, order)
    ids = kept.reshape(-1, kept.shape[-1]).multinomial(1).reshape(kept.shape[:-1]).int()
    return ids, torch.ones_like(ids, dtype=torch.bool)


def _arguments(t: Tensors, o: Options) -> list[Any]:
    """As the functions above take them: what tells our own kernels apart is not for them."""
    return [*t.values(), *(value for name, value in o.items() if name != "few")]


def _eager(function: Callable[..., Any]) -> Maker:
    """torch's own functions, composed as a user would."""
    return lambda t, o: functools.partial(function, *_arguments(t, o))


def _compile(function: Callable[..., Any]) -> Maker:
    """torch.compile of the same, specialised to the shape: at its best."""
    return lambda t, o: compiled(function, *_arguments(t, o))


def _drawing(maker: Maker) -> Maker:
    """Its random numbers are its own."""

    @functools.wraps(maker)
    def drawn(t: Tensors, o: Options) -> Run:
        return maker(t, o)

    drawn.draws = True  # type: ignore[attr-defined]
    return drawn


def _liger_softmax(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    if o["scale"] != 1.0:
        raise NotImplementedError("takes no scale")
    return lambda: LigerSoftmaxFunction.apply(t["x"])


def _flashinfer_sample(t: Tensors, o: Options) -> Run:
    import flashinfer

    k, p = o["top_k"], o["top_p"]
    if t["row_k"] is not None or t["row_p"] is not None or k is None or p is None:
        raise NotImplementedError("compared with numbers k and p alone")

    def run() -> tuple[Tensor, Tensor]:
        ids = flashinfer.sampling.top_k_top_p_sampling_from_probs(t["probs"], k, p, filter_apply_order=o["order"])
        return ids, torch.ones_like(ids, dtype=torch.bool)

    return run


PEERS: dict[str, dict[str, Maker]] = {
    "softmax": {"torch": _eager(_softmax), "torch.compile": _compile(_softmax), "liger": _liger_softmax},
    "top_k_top_p_renorm": {"torch": _eager(_renorm), "torch.compile": _compile(_renorm)},
    "top_k_top_p_sample": {
        "torch": _drawing(_eager(_sample)),
        "torch.compile": _drawing(_compile(_sample)),
        "flashinfer": _drawing(_flashinfer_sample),
    },
}
