"""Kernels with one fault each, which the suite must catch: real kernels of real backends, wrong on purpose."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.core import registry
from tilewright.core.call import Call
from tilewright.core.capability import Capability
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, Launch

BLOCK = 8192


@triton.jit(do_not_specialize=["rows"])
def _row(x, weight, y, rstd, stride, rows, columns, divisor, eps, weight_offset,
         HAS_WEIGHT: tl.constexpr, SAVE: tl.constexpr,
         CAST: tl.constexpr, FAULT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    last = columns - 1 if FAULT == "last column dropped" else columns
    inside = column < last
    if FAULT == "int32 offset":
        offset = (row.to(tl.int32) * stride.to(tl.int32)).to(tl.int64)
    elif FAULT == "contiguous assumed":
        offset = row * columns
    else:
        offset = row * stride
    value = tl.load(x + offset + column, mask=inside, other=0.0)
    if FAULT == "NaN swallowed":
        value = tl.where(value == value, value, 0.0)
    if FAULT == "half-precision accumulation":
        square = tl.sum((value * value).to(tl.float16), axis=0).to(tl.float32) / divisor
    else:
        square = tl.sum(value.to(tl.float32) * value.to(tl.float32), axis=0) / divisor
    root = 1.0 / tl.sqrt(square + (1e-3 if FAULT == "wrong eps" else eps))
    normal = value.to(tl.float32) * root
    if CAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        normal *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
    written = inside
    if FAULT == "partly written":
        written = inside & (column < 1000)
    if FAULT != "never written":
        tl.store(y + row * columns + column, normal.to(y.dtype.element_ty), mask=written)
    if SAVE:
        tl.store(rstd + row, root)


def launch(call: Call, fault: str) -> Launch:
    x = call.x
    rows = x.rows - 1 if fault == "row count off by one" else x.rows
    constants = {
        "HAS_WEIGHT": call.weight is not None, "SAVE": call.rstd is not None, "CAST": call.cast_before_weight,
        "FAULT": fault, "BLOCK": BLOCK,
    }  # fmt: skip
    args = {
        "x": x, "weight": call.weight, "y": call.y, "rstd": call.rstd, "stride": x.row_levels[-1][1], "rows": rows,
        "columns": x.columns, "divisor": float(x.columns), "eps": call.eps, "weight_offset": call.weight_offset,
    }  # fmt: skip
    return Launch(_row, (max(rows, 1), 1, 1), args, constants, {"num_warps": 4, "num_stages": 1})


def _rms(x: Any, weight: Any, eps: float, weight_offset: float, saving: bool) -> tuple[Any, ...]:
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = x.float() * rstd.unsqueeze(-1)
    y = (y if weight is None else y * (weight.float() + weight_offset)).to(x.dtype)
    return (y, rstd) if saving else (y,)


def nondeterministic(
    x: Any, weight: Any, *, eps: float, weight_offset: float, saving: bool, **_: Any
) -> tuple[Any, ...]:
    y, *rest = _rms(x, weight, eps, weight_offset, saving)
    bump = torch.rand_like(y, dtype=torch.float32) < 0.01  # as atomics would: a last bit now and then
    return (torch.where(bump, y * (1 + torch.finfo(y.dtype).eps), y), *rest)


def wrong_stream(x: Any, weight: Any, *, eps: float, weight_offset: float, saving: bool, **_: Any) -> tuple[Any, ...]:
    """Work that is not ordered before what the caller does next: another stream, or on a CPU another thread."""
    y, *rest = _rms(x, weight, eps, weight_offset, saving)
    late = torch.full_like(y, float("nan"))
    if x.is_cuda:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            late.copy_(y)
        torch.cuda.current_stream().synchronize()
        return (late.clone(), *rest)

    def write() -> None:
        time.sleep(0.2)
        late.copy_(y)

    threading.Thread(target=write, daemon=True).start()
    return (late, *rest)


def changes_input(x: Any, weight: Any, *, eps: float, weight_offset: float, saving: bool, **_: Any) -> tuple[Any, ...]:
    found = _rms(x, weight, eps, weight_offset, saving)
    x.add_(1)
    return found


def breaks_the_output_rule(
    x: Any, weight: Any, *, eps: float, weight_offset: float, saving: bool, **_: Any
) -> tuple[Any, ...]:
    y, *rest = _rms(x, weight, eps, weight_offset, saving)
    return (y.float(), *rest)


def gradient_missing_a_term(
    dy: Any, x: Any, weight: Any, rstd: Any, dh: Any, *, weight_offset: float, needs: Any, saving: bool, **_: Any
) -> tuple[Any, ...]:
    """Without the projection on x."""
    rows = x.shape[-1]
    grad = torch.zeros_like(x) if dy is None else dy
    w = 1.0 if weight is None else weight.float() + weight_offset
    dx = rstd.unsqueeze(-1) * grad.float() * w + (0.0 if dh is None else dh.float())
    dweight = (grad.float() * x.float() * rstd.unsqueeze(-1)).reshape(-1, rows).sum(0)
    return (
        dx.to(x.dtype) if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] and weight is not None else None,
    )


def bias_in_the_weights_dtype(x: Any, weight: Any, bias: Any, *, eps: float, saving: bool) -> tuple[Any, ...]:
    """Reads the bias as if its dtype were the weight's, as a kernel with one type for its parameters does."""
    if weight is not None and bias is not None and weight.itemsize < bias.itemsize:
        bias = bias.contiguous().view(weight.dtype)[: bias.shape[0]]
    return tuple(registry.op("layer_norm").define({"x": x, "weight": weight, "bias": bias}, {"eps": eps}, saving))


def stops_at_the_largest(gate: Any, up: Any, *, saving: bool, **options: Any) -> tuple[Any, ...]:
    """The largest number of its dtype where the result is beyond it, and nothing that is read is Inf."""
    (y,) = registry.op("swiglu").define({"gate": gate, "up": up}, options, saving)
    beyond = y.isinf() & gate.isfinite() & up.isfinite()
    return (torch.where(beyond, y.sign() * torch.finfo(y.dtype).max, y).contiguous(),)


TRITON_FAULTS = (
    "wrong eps",
    "last column dropped",
    "row count off by one",
    "never written",
    "partly written",
    "int32 offset",
    "contiguous assumed",
    "half-precision accumulation",
    "NaN swallowed",
)


def _launcher(fault: str) -> Any:
    def function(call: Call, config: Config) -> Launch:
        return launch(call, fault)

    return function


def triton_reads_what_it_wrote(call: Call, config: Config) -> tuple[Launch, Launch]:
    """Right twice over, as long as what it reads stays what it was."""
    return launch(call, "none"), launch(call, "none")


for _fault in (*TRITON_FAULTS, "none"):
    globals()["triton_" + _fault.replace(" ", "_").replace("-", "_")] = _launcher(_fault)


def _one_level(call: Call) -> Any:
    from tilewright.core.reason import Reason

    if len(call.x.row_levels) > 1 or call.x.columns > BLOCK:
        yield Reason("x", "one row stride and 8192 columns at most")
    if call.weight is not None and call.weight.column_stride != 1:
        yield Reason("weight", "not dense")


def triton_kernel(fault: str) -> Kernel:
    source = "planted:triton_" + fault.replace(" ", "_").replace("-", "_")
    return Kernel("rms_norm", "triton", source, Capability(limits=(_one_level,)), label=fault, origin="tests")


def in_place_kernel(fault: str) -> Kernel:
    """The same kernels, said to bear that y is x."""
    made = triton_kernel(fault)
    return replace(made, capability=replace(made.capability, in_place=True))


FUNCTION_FAULTS = {
    "nondeterministic": ("rms_norm", "nondeterministic"),
    "wrong stream": ("rms_norm", "wrong_stream"),
    "input changed": ("rms_norm", "changes_input"),
    "output rule broken": ("rms_norm", "breaks_the_output_rule"),
    "bias in the weight's dtype": ("layer_norm", "bias_in_the_weights_dtype"),
    "stops at the largest": ("swiglu", "stops_at_the_largest"),
    "gradient missing a term": ("rms_norm_backward", "gradient_missing_a_term"),
}


def function_kernel(fault: str) -> Kernel:
    op, function = FUNCTION_FAULTS[fault]
    return Kernel(op, "vendor", f"planted:{function}", label=fault, origin="tests")
