"""Inputs, results and gradients of any op, for tests that go over every op. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright  # noqa: F401  declares the ops
from tilewright.core import node, registry
from tilewright.core.op import Op
from tilewright.core.probes import Extent
from tilewright.verify.cases import make_inputs

C = 24
OPS = registry.ops()
DIFFERENTIABLE = [op for op in OPS if op.gradient is not None]
every_op = pytest.mark.parametrize("op", OPS, ids=str)
differentiable = pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)


def inputs_of(
    op: Op[Any],
    lead: tuple[int, ...] = (5,),
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    columns: int = C,
) -> list[Any]:
    made = make_inputs(op, (*lead, columns), dtype, absent=left_out(op))
    if grad:
        ask(op, made)
    return list(made.values())


def few(op: Op[Any], lead: tuple[int, ...], columns: int, most: int) -> Extent:
    """Inputs whose other sizes are small too."""
    return Extent(lead, columns, {name: min(size, most) for name, size in op.probes.sizes.items()})


def left_out(op: Op[Any]) -> tuple[str, ...]:
    """Masks and lengths: results that they hide are infinite, of which no finite difference can be had. They have tests
    of their own."""
    return op.probes.absent[0] if set(op.probes.absent[0]) <= set(op.probes.values) else ()


def ask(op: Op[Any], inputs: dict[str, Any]) -> list[Tensor]:
    """Make the inputs that have a gradient ask for it, and return those."""
    assert op.gradient is not None
    return [t.requires_grad_() for n, t in inputs.items() if t is not None and n in op.gradient.gives]


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [r for r in results if r is not None]


def loss(results: Any) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    return sum((r.double() * torch.linspace(0.5, 2, r.numel(), dtype=torch.float64).reshape(r.shape)).sum()
               for r in listed(results))  # fmt: skip


def gradients(call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    options = call.usual if isinstance(call, Op) else {}
    return list(torch.autograd.grad(loss(call(*inputs, **options)), leaves_of(inputs)))


def leaves_of(inputs: list[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t is not None and t.requires_grad]


def same(found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(list(found), list(expected), equal_nan=True, **tolerance)


def node_call(op: Op[Any], inputs: list[Any], saving: bool = False) -> Any:
    """The node as `op(*inputs)` calls it."""
    return getattr(torch.ops.tilewright, op.name + "_saving" * saving)(*inputs, **node.plain(op.usual))


class Block(torch.nn.Module):
    """The op with the last of its inputs that are no ids as a parameter; `given` is what it is called with."""

    def __init__(self, op: Op[Any], inputs: list[Tensor]) -> None:
        super().__init__()
        self.op = op
        assert op.gradient is not None
        self.place = max(op.tensors.index(n) for n in op.gradient.gives)
        self.parameter = torch.nn.Parameter(inputs[self.place].detach().clone())
        self.width = len(inputs)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = list(tensors)
        if self.width > 1:
            given.insert(self.place, self.parameter)
        else:
            given[0] = self.parameter * given[0]
        return listed(self.op(*given, **self.op.usual))
