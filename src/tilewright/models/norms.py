"""Norm modules that call the library's ops, and how a stranger's norm is recognised as one of them.

What all replacements share is in `replacing.py`, walking a model in `patching.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tilewright.core.reason import Reason
from tilewright.models.replacing import R, Replacement, own_forward, share, stranger
from tilewright.ops.norm import layer_norm, rms_norm


@dataclass(frozen=True)
class Convention:
    """One of the ways in which models apply an RMS norm's weight; they differ in their roundings and their sign."""

    name: str
    options: Mapping[str, Any]
    why: str


PLAIN = Convention("plain", {}, "rounds once, after the weight (torch.nn.RMSNorm, OLMo 2, GPT-OSS, Moshi)")
CONVENTIONS = (
    Convention(
        "llama",
        {"cast_before_weight": True},
        "rounds x * rstd to the dtype of x and multiplies that by the weight (Llama, Mistral, Qwen, DeepSeek, T5)",
    ),
    Convention(
        "gemma",
        {"weight_offset": 1.0},
        "keeps weight - 1 and multiplies in float32, rounding once (Gemma, Qwen3-Next)",
    ),
    PLAIN,
)
"""Names do not tell these apart (a GptOssRMSNorm rounds unlike a LlamaRMSNorm), so each module is asked by a probe."""

NAMES = re.compile(r"RMSNorm$|T5LayerNorm$")
"""Classes worth a probe. Anything else is left alone: a probe runs the module's own forward."""
EPSILONS = ("variance_epsilon", "eps", "epsilon")
PROBE_ROWS = 8
MOST_DIFFERENT = 0.01
"""Share of probe values that may differ by a last place (`rsqrt` against `pow(-0.5)`); a wrong convention differs in
more than a tenth of them."""


class LayerNorm(Replacement, nn.LayerNorm):
    """`torch.nn.LayerNorm` served by `tilewright.layer_norm`."""

    _tilewright_op = "layer_norm"

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, _fitting(self.weight, input), _fitting(self.bias, input), eps=self.eps)


class RMSNorm(Replacement, nn.RMSNorm):
    """`torch.nn.RMSNorm` served by `tilewright.rms_norm`."""

    _tilewright_op = "rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        eps = self.eps
        if eps is None:  # torch takes the accumulation dtype's
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return rms_norm(x, _fitting(self.weight, x), eps=eps)


class ModelRMSNorm(Replacement):
    """An RMS norm of somebody's modelling code served by `tilewright.rms_norm`, in its own convention."""

    _tilewright_op = "rms_norm"
    _tilewright_convention: Convention
    _tilewright_eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _fitting(self._parameters.get("weight"), hidden_states)
        return rms_norm(hidden_states, weight, eps=self._tilewright_eps, **self._tilewright_convention.options)

    def _tilewright_note(self) -> str:
        return self._tilewright_convention.why

    def extra_repr(self) -> str:
        weight = self._parameters.get("weight")
        width = "" if weight is None else f"{tuple(weight.shape)}, "
        return f"{width}eps={self._tilewright_eps}, {self._tilewright_convention.name}"


def _fitting(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """The ops take a weight of the dtype of x or float32; widening any other is exact."""
    if weight is None or weight.dtype == x.dtype or weight.dtype == torch.float32:
        return weight
    return weight.float()


def replacement(module: nn.Module) -> Replacement | Reason | None:
    """The module that would serve in the place of `module`, a reason why there is none, or None where `module` is no
    norm at all."""
    kind = type(module)
    if isinstance(module, nn.LayerNorm):
        return _of_torch(module, LayerNorm, nn.LayerNorm)
    if isinstance(module, nn.RMSNorm):
        return _of_torch(module, RMSNorm, nn.RMSNorm)
    if "Norm" not in kind.__name__ or any(True for _ in module.children()):
        return None
    if not NAMES.search(kind.__name__):
        return Reason(kind.__name__, "no op here computes it", "takes LayerNorm and RMSNorm over the last dimension")
    return _of_model(module)


def _of_torch(module: nn.LayerNorm | nn.RMSNorm, cls: type[R], base: type[nn.Module]) -> R | Reason:
    reason = own_forward(module, base)
    if reason is not None:
        return reason
    if len(module.normalized_shape) != 1:
        return Reason("normalized_shape", f"{list(module.normalized_shape)}", "takes one dimension, the last")
    return stranger(module, {"weight", "bias"}) or share(module, cls)


def _of_model(module: nn.Module) -> ModelRMSNorm | Reason:
    reason = stranger(module, {"weight"})
    if reason is not None:
        return reason
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(takes) != 1:
        return Reason("forward", f"takes ({', '.join(takes)})", "norms of one tensor alone are replaced")
    eps = next((getattr(module, n) for n in EPSILONS if isinstance(getattr(module, n, None), float)), None)
    if eps is None:
        return Reason("eps", f"none of {', '.join(EPSILONS)} is a number")
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() != 1:
        return Reason("weight", f"shape {list(weight.shape)}", "takes one dimension")
    convention = _convention(module, eps, None if weight is None else weight.numel())
    if isinstance(convention, Reason):
        return convention
    made = share(module, ModelRMSNorm)
    made.__dict__.update(_tilewright_convention=convention, _tilewright_eps=eps)
    return made


def _convention(module: nn.Module, eps: float, width: int | None) -> Convention | Reason:
    """Which convention `module` computes, found by running it on two seeded probes with a probe weight of its own.

    In bfloat16 the roundings tell the conventions apart; in float32, with values near sqrt(eps), a wrong eps shows.
    """
    generator = torch.Generator().manual_seed(0)
    columns = width or 64
    x = torch.randn(PROBE_ROWS, columns, generator=generator)
    weight = None if width is None else torch.rand(columns, generator=generator) + 0.25
    found: dict[str, float] = {}
    candidates = CONVENTIONS if weight is not None else (PLAIN,)
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float32, max(eps, 1e-12) ** 0.5)):
        probe, w = (x * scale).to(dtype), None if weight is None else weight.to(dtype)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                theirs = functional_call(module, {} if w is None else {"weight": w}, (probe,))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return Reason("forward", f"raised on a probe: {type(error).__name__}: {error}")
        if not isinstance(theirs, Tensor) or theirs.shape != probe.shape or theirs.dtype != dtype:
            return Reason("forward", "does not return a tensor of the shape and dtype of its input")
        for convention in candidates:
            ours = rms_norm.reference(probe, w, eps=eps, **convention.options)
            share = _different(ours, theirs)
            found[convention.name] = max(found.get(convention.name, 0.0), share)
    best = min(candidates, key=lambda c: found[c.name])
    if found[best.name] > MOST_DIFFERENT:
        differ = f"{found[best.name]:.0%} of the values of a probe differ"
        return Reason("forward", f"computes another formula: {differ} under the nearest convention, {best.name}")
    return best


def _different(ours: Tensor, theirs: Tensor) -> float:
    """The share of values that differ: in half precision in any bit, in float32 by more than the noise of its sums.
    A difference of more than two last places in half precision counts as everything."""
    gap, size = (ours - theirs).abs(), torch.finfo(ours.dtype).eps * theirs.abs()
    if ours.dtype == torch.float32:
        return (~(gap <= 16 * size)).float().mean().item()
    return 1.0 if bool((~(gap <= 2 * size)).any()) else (gap != 0).float().mean().item()
