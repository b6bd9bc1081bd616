"""A plan: a selection made ready to call. It allocates the outputs, runs the kernel and returns what it wrote.

Everything that can be known ahead of the call is worked out here once for an exact signature; a call of a plan touches
tensors only for memory and addresses. How plans are found is in `dispatch.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from tilewright.core import registry
from tilewright.core.backend import Backend, Buffers
from tilewright.core.call import Call, TensorFacts
from tilewright.core.in_place import overwriting
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, Launch, Scratch, Stage, TorchStep, scratches, stages_of
from tilewright.core.op import Op

Tensor = torch.Tensor
Run = Callable[..., list[Any]]
"""Called with the op's tensors in order; returns its outputs (None where skipped), then what it saved."""


def bind(kernel: Kernel, config: Config, call: Call, *, poison: bool = False) -> Run:
    """The kernel, ready to run calls with exactly these facts. Compiles what is not compiled yet.

    `poison`: fill outputs and scratch with NaN first, so that what is not written shows (checks ask for it).
    """
    run = _bound(kernel, config, call, poison)
    return overwriting(run, call) if call.into else run


def _bound(kernel: Kernel, config: Config, call: Call, poison: bool) -> Run:
    op = registry.op(call.op)
    empty = not call.outputs or any(f is not None and f.numel == 0 for f in call.tensors.values())
    if kernel.backend == "reference" or empty:
        return _without_autocast(_definition(op, call))
    backend = registry.backend(kernel.backend)
    if not backend.launches:
        return _without_autocast(backend.bind(kernel, call))
    stages = stages_of(kernel.load()(call, config))
    launch = prepare(backend, stages, call)
    return _allocating(op, call, launch, [scratch.facts for scratch in scratches(stages)], poison)


def _allocating(
    op: Op[Any], call: Call, launch: Callable[[Buffers], None], scratch: Sequence[TensorFacts], poison: bool
) -> Run:
    """Allocates results and scratch, and launches. Generated, for loops cost here what an allocation costs.

    Its attribute `direct`, of a call that saves nothing, does the same and returns what the op returns.
    """
    space: dict[str, Any] = {"launch": launch, "empty": _plain_allocator(call), "poisoned": _poisoned}
    like = next(i for i, n in enumerate(op.tensors) if call.tensors[n] is not None)

    def allocation(facts: TensorFacts | None) -> str:
        if facts is None:
            return "None"
        number = len(space)
        space.update({f"shape{number}": facts.shape, f"stride{number}": facts.stride, f"dtype{number}": facts.dtype})
        what = f"shape{number}, stride{number}, "
        fresh = f"empty({what}dtype{number})"
        if space["empty"] is None:
            fresh = f"t{like}.new_empty_strided({what}dtype=dtype{number})"
        return f"poisoned({fresh})" if poison else fresh

    given = [f"t{i}" for i in range(len(op.tensors))]
    over = {output: given[op.tensors.index(name)] for output, name in call.aliased.items()}
    results = [n for n in call.tensors if n not in op.tensors and (call.saving or n in op.out)]
    made = [f"m{i}" for i in range(len(results))]
    # Names that are absent from this call (statistics that are not saved) still hold their place in the buffers.
    absent = ["None"] * (len(call.tensors) - len(given) - len(made))
    lines = [f"{m} = {over.get(n) or allocation(call.tensors[n])}" for m, n in zip(made, results, strict=True)]
    lines.append(f"launch(({', '.join([*given, *made, *absent, *map(allocation, scratch)])},))")
    run: Run = _generated(space, given, [*lines, f"return [{', '.join(made)}]"])
    returned = made[0] if op.single else f"({', '.join(made)},)"
    run.direct = _generated(space, given, [*lines, f"return {returned}"])  # type: ignore[attr-defined]
    return run


def _generated(space: dict[str, Any], parameters: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
    """A function of these lines. What is in `space` it reads as locals of an enclosing one, faster than globals."""
    inner = "\n        ".join(lines)
    text = f"def make({', '.join(space)}):\n    def run({', '.join(parameters)}):\n        {inner}\n    return run\n"
    return _factory(text)(**space)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _factory(text: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(compile(text, "<tilewright plan>", "exec"), scope)
    return scope["make"]  # type: ignore[no-any-return]


def prepare(backend: Backend, stages: Sequence[Stage], call: Call) -> Callable[[Buffers], None]:
    """What runs `stages` in order, called with every tensor of the call in `call.tensors` order, then the scratch."""
    launches = [stage for stage in stages if isinstance(stage, Launch)]
    if len(launches) == len(stages):
        runner = backend.prepare(launches, call)
        return getattr(runner, "run", runner)  # a launcher's generated function spares the cost of __call__
    names = [*call.tensors, *(s.name for s in scratches(stages))]
    places = {name: i for i, name in enumerate(names)}
    parts: list[Callable[[Buffers], None]] = []
    for launching, group in itertools.groupby(stages, lambda stage: isinstance(stage, Launch)):
        if not launching:
            parts += [partial(_run_torch, step, places) for step in group if isinstance(step, TorchStep)]
            continue
        run = [stage for stage in group if isinstance(stage, Launch)]
        own = [places[name] for name in (*call.tensors, *(s.name for s in scratches(run)))]
        parts.append(partial(_run_part, prepare(backend, run, call), own))

    def in_order(buffers: Buffers) -> None:
        for part in parts:
            part(buffers)

    return in_order


def _run_part(launch: Callable[[Buffers], None], own: Sequence[int], buffers: Buffers) -> None:
    launch([buffers[i] for i in own])


def _run_torch(step: TorchStep, places: dict[str, int], buffers: Buffers) -> None:
    step.function(**{
        name: buffers[places[value.name]] if isinstance(value, (TensorFacts, Scratch)) else value
        for name, value in step.args.items()
    })  # fmt: skip


def _definition(op: Op[Any], call: Call) -> Run:
    """The reference as a kernel: its results keep the output rule, so they are contiguous and memory of their own."""
    names, options, saving = op.tensors, dict(call.options), call.saving

    def run(*tensors: Tensor | None) -> list[Any]:
        found = op.define(dict(zip(names, tensors, strict=True)), options, saving)
        results: list[Any] = []
        for made in found:
            shared = made is not None and any(made is t for t in (*tensors, *results))
            results.append(made if made is None else _copy(made) if shared else _own(_dense(made)))
        return results

    return run


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous, in the strides that fresh memory has: `contiguous` leaves those of dimensions of size 1."""
    dense = tensor.contiguous()
    return dense.view(-1).view(dense.shape) if 1 in dense.shape else dense


def _own(tensor: Tensor) -> Tensor:
    """The same memory; of several outputs that are views autograd would let none be changed in place."""
    return tensor.data if tensor._is_view() else tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _without_autocast(run: Run) -> Run:
    """Functions of torch under autocast: an op keeps its dtypes, whatever aten's own norm would make of them."""

    def plain(*tensors: Tensor | None) -> list[Any]:
        if not torch._C._is_any_autocast_enabled():
            return run(*tensors)
        with torch.autocast(next(t for t in tensors if t is not None).device.type, enabled=False):
            return run(*tensors)

    return plain


def _plain_allocator(call: Call) -> Callable[..., Tensor] | None:
    """What torch's own compiled code allocates with: 1.7 us cheaper a tensor than empty_like. It allocates on the
    current device, so it serves only where there is one."""
    guards = torch._C._dynamo.guards
    if call.device.kind in ("cuda", "hip") and torch.cuda.device_count() == 1:
        return getattr(guards, "_empty_strided_cuda", None)
    return getattr(guards, "_empty_strided_cpu", None) if call.device.kind == "cpu" else None


def _poisoned(made: Tensor) -> Tensor:
    made.reshape(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
    return made
