"""What forward saves for the first backward to overwrite: kept beside autograd's own saved tensors, given away once.

Autograd would refuse to hand out, on a retained graph, a saved tensor that has changed, and would hand it out unchanged
in no other way. So such tensors lie on the graph's node; whoever takes them first owns them, and the gradient that is
written there changes no more. Which they are is declared by `Gradient.spends`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

Tensors = Sequence[torch.Tensor | None]


class Held:
    """The tensors of one node of autograd's graph. Threads may race for them: one gets them."""

    __slots__ = ("_capture", "_place", "_shared", "_tensors")

    def __init__(self, tensors: Tensors) -> None:
        first = next(t for t in tensors if t is not None)
        self._place = first.device if first.is_cuda else None
        self._tensors, self._capture, self._shared = [tensors], self._captured(), False

    def take(self, count: int) -> Tensors:
        """The tensors, for the caller to overwrite; `count` times None once they are gone.

        Copies of them where one of forward and backward is captured in a CUDA graph and the other is not, or in
        another: either may be replayed without the other. The graph then reads or writes them whenever it is replayed,
        so from there on everyone gets copies.
        """
        if self._shared or self._captured() != self._capture:
            self._shared = True
            return [None if t is None else t.clone() for t in (self._tensors or [(None,) * count])[0]]
        try:
            return self._tensors.pop()
        except IndexError:
            return (None,) * count

    def _captured(self) -> object:
        return None if self._place is None else capture_of(self._place)


def hooked() -> bool:
    """Whether hooks see what is saved (activation checkpointing, offloading): they are to see everything."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def capture_of(device: torch.device) -> object:
    """What tells the CUDA graph that is being captured on the current stream from every other: None where there is
    none, and something equal to nothing else where the driver does not say."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    ask = _capture_info()
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    failed = ask is None or ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return object() if failed or status.value != 1 else number.value


@cache
def _capture_info() -> Any:
    """cuStreamGetCaptureInfo_v2 of cuda.h: (stream, status, id, graph, dependencies, their number); 1 is "active"."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
