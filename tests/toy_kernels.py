"""Kernels for tests of the tuner: right ones of known cost, and every way to misbehave. Not a test module.

They are functions on CPU tensors, found by workers through their module's name.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.kernel import Kernel

OP = "l2_norm"
TUNED_ROWS = 1000
"""More rows than any check on first use has: what happens at this size happens while timing."""


def _right(x: Tensor, eps: float, saving: bool) -> list[Any]:
    return registry.op(OP).define({"x": x}, {"eps": eps}, saving)


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def quick(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    return _right(x, eps, saving)


def slow(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    _busy(0.002)
    return _right(x, eps, saving)


def slower(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    _busy(0.004)
    return _right(x, eps, saving)


def chatty(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    print('{"id": 1, "ok": true}')
    os.write(1, b'{"id": 2, "verdict": {"passed": true}}\n')
    assert sys.stdin.read() == ""
    return _right(x, eps, saving)


def hangs(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    time.sleep(3600)
    return []


def dies(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    print("last words", file=sys.stderr)
    os._exit(7)


def dies_while_timed(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    if x.shape[0] == TUNED_ROWS:
        os.abort()
    return _right(x, eps, saving)


def raises(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    raise RuntimeError(f"no such thing for {x.dtype}")


def wrong(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    y, *rest = _right(x, eps, saving)
    y[..., -1] = 0.0
    return [y, *rest]


def silent(x: Tensor, *, eps: float, saving: bool) -> list[Any]:
    return [torch.empty_like(r) for r in _right(x[:1], eps, saving) for r in [r.new_empty((len(x), *r.shape[1:]))]]


def toy(name: str, preference: int) -> Kernel:
    return Kernel(OP, "vendor", f"{__name__}:{name}", label=name, preference=preference)


TUNED = [toy("slow", 350), toy("quick", 351)]
"""What the entry point of a test's own package gives."""
