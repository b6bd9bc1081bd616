"""What torch itself has of the linear family: aten's addmm, with cuBLASLt's epilogues where it has them.

torch lets cuBLAS add the parts of a split product in half precision unless told otherwise; the contract does not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilewright.core.call import DTYPE_NAMES, Call
from tilewright.core.reason import Reason

_aten = torch.ops.aten
EPILOGUES = {"relu": False, "gelu_tanh": True}
"""Activations that `_addmm_activation` has on a GPU, and its `use_gelu` for them. Its GELU is the form with tanh there
(on a CPU that with erf), as the values of the first check on each machine confirm."""


_SWITCHES = tuple(
    name
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    if hasattr(torch.backends.cuda.matmul, name)
)
_inside = threading.Lock()
_depth = 0
_allowed: list[str] = []


@contextlib.contextmanager
def summed_in_float32() -> Iterator[None]:
    """Products accumulate in float32 inside, in the whole process: torch has one switch for all threads. The last
    thread to leave puts back what the first one found, whatever was written meanwhile."""
    global _depth
    matmul = torch.backends.cuda.matmul
    with _inside:
        _depth += 1
        if _depth == 1:
            _allowed[:] = [name for name in _SWITCHES if getattr(matmul, name)]
            for name in _allowed:
                setattr(matmul, name, False)
    try:
        yield
    finally:
        with _inside:
            _depth -= 1
            if not _depth:
                for name in _allowed:
                    setattr(matmul, name, True)


def _alone() -> None:
    """In the child of a fork: threads that were inside do not exist there, and nobody holds the lock."""
    global _depth, _inside
    _inside = threading.Lock()
    if _depth:
        _depth = 0
        for name in _allowed:
            setattr(torch.backends.cuda.matmul, name, True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


def dense_rows(*names: str) -> Any:
    """cuBLAS reads rows that lie one after the other or further apart; aten copies what overlaps or comes in levels."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is None:
                continue
            count, stride = facts.row_levels[0]
            if facts.column_stride != 1 or len(facts.row_levels) > 1 or (count > 1 and stride < facts.columns):
                yield Reason(name, f"strides {list(facts.stride)}; aten would copy it", f"{name}.contiguous() would do")
            elif stride >= 2**31:
                yield Reason(name, f"rows {stride} elements apart; cuBLAS counts them in 32 bits")

    return limit


def one_kernel(call: Call) -> Iterable[Reason]:
    """What addmm and its epilogues leave out would be a second kernel, on a rounded z."""
    if call.has("bias") and call.bias.dtype != call.x.dtype:
        yield Reason("bias", f"dtype {DTYPE_NAMES[call.bias.dtype]}; takes that of x", "bias.to(x.dtype)")
    if call.has("bias") and call.has("residual"):
        yield Reason("residual", "given beside bias; addmm adds one of them")
    if call.x.dtype != torch.float32 and call.device.is_gpu:
        # measured on an H200, in bf16: M, K of 5, 160 with a residual; of 4, 769 and 33, 2049 with a bias
        if call.has("residual"):
            yield Reason("residual", "given in half precision; aten rounds some products before it adds one")
        if call.has("bias") and call.x.columns % 8:
            yield Reason("bias", f"given with K = {call.x.columns}; aten rounds such products before it adds one")
    if call.act == "none":
        return
    if call.act not in EPILOGUES or not call.device.is_gpu:
        names = ", ".join(EPILOGUES) if call.device.is_gpu else "none of them on a CPU"
        yield Reason("act", f"{call.act!r}; aten's epilogues have {names}")
    if call.has("residual"):
        yield Reason("residual", f"given with act {call.act!r}; aten's epilogue ends with the activation")
    if not call.has("bias"):
        yield Reason("bias", f"None with act {call.act!r}; aten's epilogue wants one")
    if call.saving:
        yield Reason("gradient", f"z of act {call.act!r} is not kept", "use torch.no_grad()")
    if call.x.rows == 1 or call.x.columns == 1 or call.weight.rows == 1:
        yield Reason("x", "a vector; aten's epilogues want matrices")


def plain_gradient(call: Call) -> Iterable[Reason]:
    """aten has each derivative but one."""
    if call.act == "relu2":
        yield Reason("act", "'relu2'; aten has no derivative of it")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, act: str, saving: bool
) -> tuple[Tensor | None, ...]:
    outputs = weight.shape[0]
    rows, across = x.reshape(-1, x.shape[-1]), weight.t()
    added = bias if residual is None else residual.reshape(-1, outputs)
    with summed_in_float32():
        if added is None:
            y = _aten.mm(rows, across)
        elif act == "none":
            y = _aten.addmm(added, rows, across)
        else:
            y = _aten._addmm_activation(added, rows, across, use_gelu=EPILOGUES[act])
    y = y.reshape(*x.shape[:-1], outputs)
    return (y, None) if saving else (y,)


def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    *,
    act: str,
    needs: tuple[bool, bool, bool],
    **_: Any,
) -> tuple[Tensor | None, ...]:
    dz = (dy if z is None or act == "none" else _dz(act, dy, z)).reshape(-1, weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])
    with summed_in_float32():
        dx = _aten.mm(dz, weight).reshape(x.shape) if needs[0] else None
        dweight = _aten.mm(dz.t(), rows) if needs[1] else None
    dbias = dz.sum(0, dtype=bias.dtype) if needs[2] and bias is not None else None
    return dx, dweight, dbias


def _dz(act: str, dy: Tensor, z: Tensor) -> Tensor:
    if act == "relu":
        found = _aten.threshold_backward(dy, z, 0)
    elif act == "silu":
        found = _aten.silu_backward(dy, z)
    else:
        found = _aten.gelu_backward(dy, z, approximate="tanh" if act == "gelu_tanh" else "none")
    made: Tensor = found
    return made
