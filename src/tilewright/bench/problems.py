"""What is measured: an op, forward or backward, on inputs of one shape and dtype.

Inputs come from the conformance engine's generator, several sets of them, so that a kernel can be timed on memory that
no cache holds. How they are timed is in `measure.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilewright.core import policy, registry
from tilewright.core.arguments import facts_of
from tilewright.core.call import Call
from tilewright.core.device import Device, device_of
from tilewright.core.errors import InvalidArgument, UnknownName
from tilewright.core.gradient import Backward
from tilewright.core.op import Gradient, Op
from tilewright.core.probes import Maker, Workload
from tilewright.verify.cases import make_inputs

Tensors = dict[str, Tensor | None]
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Problem:
    """One pass of `owner`. The op that is timed is `owner` itself, or the op of its gradient."""

    owner: Op[Any]
    backward: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    workload: str
    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    makers: Mapping[str, Maker] = field(default_factory=dict)
    """Of the workload's own ids and the like."""

    @property
    def op(self) -> Op[Any]:
        return registry.op(self.gradient.op) if self.backward else self.owner

    @property
    def gradient(self) -> Gradient:
        """The owner's, for these options."""
        found = self.owner.gradient_of({**self.owner.usual, **self.options})
        assert found is not None
        return found

    @property
    def pass_name(self) -> str:
        return PASSES[self.backward]

    @property
    def place(self) -> Device:
        return device_of(self.device.type, self.device.index)

    @property
    def waits(self) -> bool:
        """Whether the host waits for values in this gradient, so that no CUDA graph holds it."""
        return self.backward and bool(self.gradient.finds)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Optional tensors of `owner` that are left out: the first set that its probes name."""
        return tuple(self.owner.probes.absent[0])

    @cached_property
    def timed_options(self) -> dict[str, Any]:
        """Options of the timed op; a backward computes every gradient that there is."""
        if not self.backward:
            return {**self.owner.usual, **self.options}
        chosen = {**self.owner.usual, **self.options}
        found = {n: chosen.get(n, default) for n, default in self.op.usual.items()}
        if self.op.may_skip:
            wanted = self.gradient.asked(self.absent)
            found["needs"] = tuple(name in wanted for name in self.op.out)
        return found

    @cached_property
    def given_options(self) -> dict[str, Any]:
        """What a caller of `owner` writes down: its own options, and those that have no default."""
        wanted = {n: v for n, v in self.owner.usual.items() if self.owner.options[n] is inspect.Parameter.empty}
        return {**wanted, **self.options}

    def inputs(self, seed: int = 0) -> Tensors:
        """One set of the timed op's tensors."""
        return make_inputs(
            self.op, self.op.probes.extent(self.shape), self.dtype,
            options=self.timed_options, absent=self._absent_here(), seed=seed, device=self.device, makers=self.makers,
        )  # fmt: skip

    def bearable(self) -> Problem:
        """The same, no larger than the op says that its definition bears."""
        extent = self.owner.probes.bearable(self.owner.probes.extent(self.shape))
        lead = (math.prod(extent.lead),) if extent.sizes else extent.lead
        return replace(self, shape=(*lead, extent.columns, *extent.sizes.values()))

    def leaves(self, seed: int = 0) -> Tensors:
        """One set of the owner's tensors, each that has a gradient asking for it."""
        made = make_inputs(
            self.owner, self.owner.probes.extent(self.shape), self.dtype,
            options={**self.owner.usual, **self.options}, absent=self.absent, seed=seed, device=self.device,
            makers=self.makers,
        )  # fmt: skip
        return {n: t.requires_grad_() if t is not None and n in self.gradient.gives else t for n, t in made.items()}

    def upstream(self, timed: Tensors) -> list[Tensor | None]:
        """The upstream gradients of the owner's outputs among the timed op's tensors, in the order of the outputs."""
        return [timed[self.gradient.grads[out]] for out in self.owner.out]

    def whole(self, run: Callable[..., Any], timed: Tensors, seed: int) -> Callable[[], Any]:
        """The gradient as autograd has it, what torch finds for it included, with `run` for the timed op."""
        options = {**self.owner.usual, **self.options}
        leaves = {n: None if t is None else t.detach() for n, t in self.leaves(seed).items()}
        backward = Backward(self.owner, options, None, (policy.current(), False), list(leaves.values()))
        backward.serve = lambda *tensors, **_: tuple(run(*tensors))
        with torch.no_grad():
            every = [*leaves.values(), *self.owner.define(leaves, options, True)]
        kept, upstream = [every[i] for i in backward.keep], self.upstream(timed)
        wanted = tuple(n in self.gradient.gives for n in self.owner.tensors)
        return lambda: backward(upstream, kept, wanted, False)

    def call(self, inputs: Tensors) -> Call:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return facts_of(self.op, [inputs[n] for n in self.op.tensors], self.timed_options, False, deterministic)

    def _absent_here(self) -> tuple[str, ...]:
        if not self.backward:
            return self.absent
        given = self.gradient.parameters(lambda name: name not in self.absent)
        return tuple(n for n in self.op.tensors if n not in given)

    def __str__(self) -> str:
        return f"{self.owner.name} {self.pass_name} {'x'.join(map(str, self.shape))}"


def input_bytes(inputs: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in inputs.values() if t is not None)


def problems(
    ops: Sequence[str],
    *,
    workloads: Sequence[str] = (),
    shapes: Sequence[tuple[int, ...]] = (),
    dtypes: Sequence[torch.dtype] = (),
    passes: Iterable[str] = PASSES,
    device: torch.device,
) -> list[Problem]:
    """Every problem of `ops` (all that are not gradients, by default).

    Without shapes: the workloads of each op whose names contain one of `workloads`, in any case. Without dtypes: the
    workload's own, bf16 for a shape that is no workload's. The name of a gradient op stands for the backward of the ops
    that it serves.

    Raises:
        UnknownName: an op or workload that does not exist.
        InvalidArgument: a shape without columns.
    """
    found = []
    chosen: list[tuple[Op[Any], Iterable[str], dict[str, Any]]] = []
    for name in ops or [op.name for op in registry.ops() if not registry.served_by(op.name)]:
        op = registry.op(name)
        served = registry.served_by(name)
        chosen += [(o, ("backward",), _asking(o, name)) for o in served] or [(op, passes, {})]
    for op, wanted, asked in chosen:
        for shape, workload in _wanted(op, workloads, shapes):
            if not shape or min(shape) < 1:
                raise InvalidArgument("bench", "shape", "x".join(map(str, shape)), "rows and columns: 8192x4096")
            for dtype in dtypes or (workload.dtype,):
                for one in wanted:
                    if one == "backward" and op.gradient is None:
                        continue
                    more = (workload.name, device, {**workload.options, **asked}, workload.values)
                    found.append(Problem(op, one == "backward", shape, dtype, *more))
    return found


def _asking(op: Op[Any], gradient: str) -> dict[str, Any]:
    """Options of `op` whose gradient is the op of this name."""
    return {option: one.op == gradient for option, one in op.gradient_if.items()}


def _wanted(
    op: Op[Any], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], Workload]]:
    """The op's workloads that are asked for; a shape that none has comes with a nameless one."""
    if shapes:
        known = [(s, [w for w in op.workloads if w.shape == s] or [Workload("", 0, 0)]) for s in shapes]
        return [(shape, workload) for shape, same in known for workload in same]
    picked = [w for w in op.workloads if not names or any(name.lower() in w.name.lower() for name in names)]
    if names and not picked:
        raise UnknownName(f"workload of {op.name}", names[0], [w.name for w in op.workloads])
    return [(w.shape, w) for w in picked]
