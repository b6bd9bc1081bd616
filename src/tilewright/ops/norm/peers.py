"""What users of norms would call instead: adapters to torch's own, torch.compile, Liger, quack and FLA.

Each maker takes tensors by name and options, and returns a function that computes the op's outputs. The rivals are
imported inside, since most machines have none of them. Used by benchmarks only; nothing here is a kernel of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.adapters import Maker, Options, Run, Tensors, compiled


def _plain(options: Options) -> None:
    if options.get("weight_offset") or options.get("cast_before_weight"):
        raise NotImplementedError("takes no weight_offset and no cast_before_weight")


def _composed_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _composed_add_rms(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (x.shape[-1],), weight, eps), h


def _composed_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _composed_add_layer(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, (x.shape[-1],), weight, bias, eps), h


def _composed_l2(x: Tensor, eps: float) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _eager(function: Callable[..., Any], *names: str) -> Maker:
    """torch's own functions, composed as a user would."""

    def maker(t: Tensors, o: Options) -> Run:
        _plain(o)
        return functools.partial(function, *(t[n] for n in names), o["eps"])

    return maker


def _compile(function: Callable[..., Any], *names: str) -> Maker:
    """torch.compile of the same, specialised to the shape: at its best."""

    def maker(t: Tensors, o: Options) -> Run:
        _plain(o)
        return compiled(function, *(t[n] for n in names), o["eps"])

    return maker


def _liger_rms(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    casting = "llama" if o["cast_before_weight"] else "gemma" if o["weight_offset"] else "llama"
    return lambda: LigerRMSNormFunction.apply(t["x"], t["weight"], o["eps"], o["weight_offset"], casting, False)


def _liger_add_rms(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda: LigerFusedAddRMSNormFunction.apply(
        t["x"], t["residual"], t["weight"], o["eps"], o["weight_offset"], "llama", False
    )


def _liger_layer(t: Tensors, o: Options) -> Run:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda: LigerLayerNormFunction.apply(t["x"], t["weight"], t["bias"], o["eps"])


def _quack_rms(t: Tensors, o: Options) -> Run:
    from quack.rmsnorm import rmsnorm

    _plain(o)
    return lambda: rmsnorm(t["x"], t["weight"], eps=o["eps"])


def _quack_add_rms(t: Tensors, o: Options) -> Run:
    from quack.rmsnorm import rmsnorm

    _plain(o)
    return lambda: rmsnorm(t["x"], t["weight"], residual=t["residual"], eps=o["eps"], prenorm=True)


def _quack_layer(t: Tensors, o: Options) -> Run:
    from quack.rmsnorm import layernorm_fwd

    if any(v is not None and v.requires_grad for v in t.values()):
        raise NotImplementedError("its layer norm has no gradient")
    x, weight = t["x"].reshape(-1, t["x"].shape[-1]), t["weight"].float()  # it takes float32 parameters only
    bias = None if t["bias"] is None else t["bias"].float()
    return lambda: layernorm_fwd(x, weight, bias, o["eps"]).reshape(t["x"].shape)


def _fla_rms(t: Tensors, o: Options) -> Run:
    from fla.modules.layernorm import rms_norm

    _plain(o)
    return lambda: rms_norm(t["x"], t["weight"], None, eps=o["eps"])


def _fla_add_rms(t: Tensors, o: Options) -> Run:
    from fla.modules.layernorm import rms_norm

    _plain(o)
    return lambda: rms_norm(t["x"], t["weight"], None, residual=t["residual"], eps=o["eps"], prenorm=True)


def _fla_layer(t: Tensors, o: Options) -> Run:
    from fla.modules.layernorm import layer_norm

    return lambda: layer_norm(t["x"], t["weight"], t["bias"], eps=o["eps"])


def _fla_add_layer(t: Tensors, o: Options) -> Run:
    from fla.modules.layernorm import layer_norm

    return lambda: layer_norm(t["x"], t["weight"], t["bias"], residual=t["residual"], eps=o["eps"], prenorm=True)


def _fla_l2(t: Tensors, o: Options) -> Run:
    from fla.modules.l2norm import l2norm

    return lambda: l2norm(t["x"], eps=o["eps"])


PEERS: dict[str, dict[str, Maker]] = {
    "rms_norm": {
        "torch": _eager(_composed_rms, "x", "weight"),
        "torch.compile": _compile(_composed_rms, "x", "weight"),
        "liger": _liger_rms,
        "quack": _quack_rms,
        "fla": _fla_rms,
    },
    "add_rms_norm": {
        "torch": _eager(_composed_add_rms, "x", "residual", "weight"),
        "torch.compile": _compile(_composed_add_rms, "x", "residual", "weight"),
        "liger": _liger_add_rms,
        "quack": _quack_add_rms,
        "fla": _fla_add_rms,
    },
    "layer_norm": {
        "torch": _eager(_composed_layer, "x", "weight", "bias"),
        "torch.compile": _compile(_composed_layer, "x", "weight", "bias"),
        "liger": _liger_layer,
        "quack": _quack_layer,
        "fla": _fla_layer,
    },
    "add_layer_norm": {
        "torch": _eager(_composed_add_layer, "x", "residual", "weight", "bias"),
        "torch.compile": _compile(_composed_add_layer, "x", "residual", "weight", "bias"),
        "fla": _fla_add_layer,
    },
    "l2_norm": {
        "torch": _eager(_composed_l2, "x"),
        "torch.compile": _compile(_composed_l2, "x"),
        "fla": _fla_l2,
    },
}
