"""What there is to tune: the call classes that ops and their gradients meet for given shapes and dtypes, or in code.

The former are read from the ops' own declarations: their workloads, and, for backward ops, which tensors and needs the
gradients of forward ops pass on. No memory is allocated for them beyond two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.classes import call_class
from tilewright.core.device import Device
from tilewright.core.dispatch import watched
from tilewright.core.op import Op
from tilewright.verify.cases import make_inputs

SMALL_ROWS = 2


@dataclass(frozen=True)
class Subject:
    """One call class to tune, by a representative call."""

    call: Call
    workload: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def calls_of(run: Callable[[], object]) -> list[Call]:
    """The calls of ops that `run()` makes, one of each call class: what `tune(calls=...)` takes.

    Runs it once. Gradients that it asks for are among them, and calls in graphs that torch.compile made.
    """
    found: dict[Any, Call] = {}

    def see(call: Call) -> None:
        cls = call_class(call, dict(registry.op(call.op).options))
        found.setdefault((call.op, cls, call.device), call)

    with watched(see):
        run()
    return list(found.values())


def subjects(
    ops: Sequence[Op[Any]],
    device: Device,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> list[Subject]:
    """The classes of `ops`, each once. Without `shapes` those of the op's workloads; without `dtypes` the usual one."""
    found: dict[Any, Subject] = {}
    for op in ops:
        wanted: list[tuple[str, tuple[int, ...], torch.dtype, Mapping[str, Any]]]
        if shapes is None:
            wanted = [(w.name, w.shape, w.dtype, w.options) for w in op.workloads]
        else:
            wanted = [("", tuple(shape), torch.bfloat16, {}) for shape in shapes]
        for workload, shape, usual, asked in wanted:
            for dtype in dtypes or (usual,):
                for usually, absent, saving in variants(op):
                    options = {**usually, **asked}
                    call = call_of(op, shape, dtype, device, options=options, absent=absent, saving=saving)
                    key = (op.name, shape, dtype, tuple(options.items()), absent, saving)
                    found.setdefault(key, Subject(call, workload, shape, dtype))
    return list(found.values())


def variants(op: Op[Any]) -> Iterator[tuple[dict[str, Any], tuple[str, ...], bool]]:
    """(options, absent tensors, saving) as calls of the op usually come."""
    callers = registry.served_by(op.name)
    if callers:
        seen = []
        for forward in callers:
            variant = _as_gradient(op, forward)
            if variant not in seen:
                seen.append(variant)
                yield (*variant, False)
        return
    absent = tuple(op.probes.absent[0])
    yield dict(op.usual), absent, False
    if op.gradient is not None:
        yield dict(op.usual), absent, True


def variant(call: Call) -> str:
    """What tells the call from the op's usual one, for people: "with dh"; "" where nothing does."""
    op = registry.op(call.op)
    usual = op.probes.absent[0]
    given = [n for n in op.tensors if n in usual and call.has(n)]
    missing = [n for n in op.tensors if n in op.optional and n not in usual and not call.has(n)]
    parts = ["with " + " and ".join(given)] * bool(given) + ["without " + " or ".join(missing)] * bool(missing)
    parts += [f"{n}={v}" for n, v in call.options.items() if n != "needs" and v != op.usual[n]]
    return ", ".join([*parts, *["training"] * call.saving])


def _as_gradient(op: Op[Any], forward: Op[Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How the backward op is called when every tensor of `forward` needs its gradient."""
    gradient = next(one for one in forward.gradients if one.op == op.name)
    missing = set(forward.probes.absent[0])
    given = gradient.parameters(lambda name: name not in missing)
    options = {name: forward.usual.get(name, default) for name, default in op.usual.items()}
    if op.may_skip:
        wanted = gradient.asked(missing)
        options["needs"] = tuple(out in wanted for out in op.out)
    return options, tuple(n for n in op.tensors if n not in given)


def call_of(
    op: Op[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    *,
    options: Mapping[str, Any] | None = None,
    absent: Sequence[str] = (),
    saving: bool = False,
) -> Call:
    """The facts of a call on contiguous tensors, as large as `shape` says: [..., C], or as the op's probes have it."""
    chosen = {**op.usual, **(options or {})}
    extent = op.probes.extent(shape)
    few = {name: min(size, SMALL_ROWS) for name, size in extent.sizes.items()}
    extent = op.probes.sized(extent, chosen)
    small = make_inputs(op, replace(extent, lead=(SMALL_ROWS,), sizes=few), dtype, options=chosen, absent=absent)
    facts: dict[str, TensorFacts | None] = {
        name: None
        if tensor is None
        # what was derived as one number is one
        else TensorFacts.dense(name, op.probes.shape(name, extent) if tensor.dim() else (), tensor.dtype)
        for name, tensor in small.items()
    }
    return op.call({n: facts[n] for n in op.tensors}, chosen, device, saving=saving)
