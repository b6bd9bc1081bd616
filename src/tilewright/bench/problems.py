"""What is measured: an op, forward or backward, on inputs of one shape and dtype.

Inputs come from the conformance engine's generator, several sets of them, so that a kernel can be timed on memory that
no cache holds. How they are timed is in `measure.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.arguments import facts_of
from tilewright.core.call import Call
from tilewright.core.device import Device, device_of
from tilewright.core.errors import InvalidArgument, UnknownName
from tilewright.core.op import Op
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
        if not self.backward:
            return self.owner
        assert self.owner.gradient is not None
        return registry.op(self.owner.gradient.op)

    @property
    def pass_name(self) -> str:
        return PASSES[self.backward]

    @property
    def place(self) -> Device:
        return device_of(self.device.type, self.device.index)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Optional tensors of `owner` that are left out: the first set that its probes name."""
        return tuple(self.owner.probes.absent[0])

    @cached_property
    def timed_options(self) -> dict[str, Any]:
        """Options of the timed op; a backward computes every gradient that there is."""
        if not self.backward:
            return {**self.owner.usual, **self.options}
        gradient = self.owner.gradient
        assert gradient is not None
        chosen = {**self.owner.usual, **self.options}
        found = {n: chosen.get(n, default) for n, default in self.op.usual.items()}
        if self.op.may_skip:
            wanted = gradient.asked(self.absent)
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

    def leaves(self, seed: int = 0) -> Tensors:
        """One set of the owner's tensors, each that has a gradient asking for it."""
        gradient = self.owner.gradient
        assert gradient is not None
        made = make_inputs(
            self.owner, self.owner.probes.extent(self.shape), self.dtype,
            options={**self.owner.usual, **self.options}, absent=self.absent, seed=seed, device=self.device,
            makers=self.makers,
        )  # fmt: skip
        return {n: t.requires_grad_() if t is not None and n in gradient.gives else t for n, t in made.items()}

    def upstream(self, timed: Tensors) -> list[Tensor | None]:
        """The upstream gradients of the owner's outputs among the timed op's tensors, in the order of the outputs."""
        gradient = self.owner.gradient
        assert gradient is not None
        return [timed[gradient.grads[out]] for out in self.owner.out]

    def call(self, inputs: Tensors) -> Call:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return facts_of(self.op, [inputs[n] for n in self.op.tensors], self.timed_options, False, deterministic)

    def _absent_here(self) -> tuple[str, ...]:
        if not self.backward:
            return self.absent
        gradient = self.owner.gradient
        assert gradient is not None
        given = set(gradient.grads.values())
        kept = gradient.kept(lambda name: name not in self.absent)
        given |= {name for name, source in kept.items() if source not in self.absent}
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
    chosen: list[tuple[Op[Any], Iterable[str]]] = []
    for name in ops or [op.name for op in registry.ops() if not registry.served_by(op.name)]:
        op = registry.op(name)
        served = registry.served_by(name)
        chosen += [(o, ("backward",)) for o in served] or [(op, passes)]
    for op, wanted in chosen:
        for shape, workload in _wanted(op, workloads, shapes):
            if not shape or min(shape) < 1:
                raise InvalidArgument("bench", "shape", "x".join(map(str, shape)), "rows and columns: 8192x4096")
            for dtype in dtypes or (workload.dtype,):
                for one in wanted:
                    if one == "backward" and op.gradient is None:
                        continue
                    more = (workload.name, device, dict(workload.options), workload.values)
                    found.append(Problem(op, one == "backward", shape, dtype, *more))
    return found


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
