"""What torch itself has of the norm family: aten's fused rms_norm and layer_norm, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.reason import Reason

_aten = torch.ops.aten
WIDEST_STATISTICS = 32768
"""On an H100 aten's rstd of 65536 columns was 5 ulp off where 4 are allowed."""


def plain_rms(call: Call) -> Iterable[Reason]:
    """aten has neither weight_offset nor cast_before_weight, and wants the weight in the dtype of x."""
    if call.options.get("weight_offset") and call.weight is not None:
        yield Reason("weight_offset", f"{call.weight_offset}; takes 0")
    if call.options.get("cast_before_weight"):
        yield Reason("cast_before_weight", "True; takes False")
    if call.options.get("eps") == 0:
        yield Reason("eps", "0.0 is read as unset by aten")
    if call.saving and call.device.is_gpu and call.x.columns > WIDEST_STATISTICS:
        yield Reason("x", f"last dimension {call.x.columns}: aten's rstd is off beyond {WIDEST_STATISTICS} columns")
    yield from _same_dtype(call, "weight")


def plain_layer(call: Call) -> Iterable[Reason]:
    """aten wants weight and bias in one dtype, and its half-precision statistics on CPU are not float32."""
    yield from _same_dtype(call, "weight", "bias")
    if call.saving and not call.device.is_gpu and call.x.dtype != torch.float32:
        yield Reason("gradient", f"aten's CPU statistics of {DTYPE_NAMES[call.x.dtype]} are not float32")


def plain_backward(call: Call) -> Iterable[Reason]:
    """No residual gradient, no missing dy; on CPU half precision keeps other statistics."""
    for name in ("dh", "pre_bias"):
        if call.has(name):
            yield Reason(name, "given; aten's gradient has no residual")
    if not call.has("dy"):
        yield Reason("dy", "None; aten needs it")
    if not call.device.is_gpu and call.x.dtype != torch.float32:
        yield Reason("x", f"aten's CPU gradient of {DTYPE_NAMES[call.x.dtype]} wants other statistics")
    if "bias" in call.tensors and call.has("bias") != call.has("weight"):
        yield Reason("bias", "aten wants weight and bias together")
    if call.options.get("weight_offset") and call.weight is not None:
        yield Reason("weight_offset", f"{call.weight_offset}; takes 0")
    if call.options.get("cast_before_weight"):
        yield Reason("cast_before_weight", "True; takes False")
    yield from _same_dtype(call, "weight", *(["bias"] if "bias" in call.tensors else []))


def _same_dtype(call: Call, *names: str) -> Iterable[Reason]:
    for name in names:
        facts = call.tensors[name]
        if facts is not None and facts.dtype != call.x.dtype:
            yield Reason(name, f"dtype {DTYPE_NAMES[facts.dtype]}; takes that of x", f"{name}.to(x.dtype)")


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, saving: bool, **_: Any) -> tuple[Tensor, ...]:
    y, rstd = _aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return (y.contiguous(), rstd.reshape(x.shape[:-1])) if saving else (y.contiguous(),)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, saving: bool
) -> tuple[Tensor, ...]:
    y, mean, rstd = _aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    rows = x.shape[:-1]
    return (y.contiguous(), mean.reshape(rows), rstd.reshape(rows)) if saving else (y.contiguous(),)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dh: None, *, needs: tuple[bool, bool], **_: Any
) -> tuple[Tensor | None, Tensor | None]:
    wanted = [needs[0], needs[1] and weight is not None]
    dx, dweight = _aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rstd.unsqueeze(-1), weight, wanted)
    return dx if wanted[0] else None, dweight if wanted[1] else None


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dh: None,
    pre_bias: None,
    *,
    needs: tuple[bool, bool, bool, bool],
    saving: bool,
) -> tuple[Tensor | None, ...]:
    wanted = [needs[0], needs[1] and weight is not None, needs[2] and bias is not None]
    found = _aten.native_layer_norm_backward(
        dy, x, [x.shape[-1]], mean.unsqueeze(-1), rstd.unsqueeze(-1), weight, bias, wanted
    )
    return (*(t if want else None for t, want in zip(found, wanted, strict=True)), None)
