"""What happens when a call has no plan yet, and how calls that are not plain eager are served.

The op's generated `__call__` (`entry.py`) finds plans; `resolve` makes them: facts, selection, binding, gradient.
torch.compile, modes, subclasses and fakes go through the op's `torch.library` node (`node.py`), whose implementation on
real tensors comes back here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import evidence, node, policy, registry, selection
from tilewright.core.arguments import facts_of, normalise
from tilewright.core.call import Call
from tilewright.core.classes import call_class
from tilewright.core.errors import InvalidArgument, Unsupported
from tilewright.core.op import Op
from tilewright.core.plan import Run, bind
from tilewright.core.policy import Policy
from tilewright.core.selection import Metric, Selection, guarded

Tensor = torch.Tensor
TABLE_LIMIT = 4096

Comparer = Callable[[Call, Sequence[Any], Sequence[Any]], None]
_comparer: list[Comparer] = []


def install_comparer(comparer: Comparer) -> None:
    """What `check="always"` runs after each call: (call, clones of the inputs, outputs)."""
    _comparer[:] = [comparer]


Frozen = tuple[Policy, bool]
"""Policy and determinism as forward found them; backward keeps to them."""


def resolve(
    op: Op[Any],
    plans: dict[Any, Any],
    key: Any,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    backend: str | None,
    grad: bool,
    frozen: Frozen | None,
) -> Callable[..., Any]:
    """Work out the plan of a new exact signature and keep it. Two threads may do so at once without harm."""
    chosen_options = normalise(op, options, backend)
    if any(t is not None and (t.is_meta or t.is_neg()) for t in tensors):
        return _plans_elsewhere(op, tensors, chosen_options, backend)
    wants_grad = grad and any(t is not None and t.requires_grad for t in tensors)
    if wants_grad and op.gradient is None:
        node.refuse_gradient(op)
    now = frozen or (policy.current(), torch.are_deterministic_algorithms_enabled())
    run, chosen = plan(op, tensors, chosen_options, backend, now, wants_grad, "call_us")
    made = _with_gradient(op, run, chosen_options, backend, now) if wants_grad else _without(op, run)
    if len(plans) >= TABLE_LIMIT:
        plans.clear()
    # Under the epoch of what the selection has seen: a first-use check bumps it, and so may another thread since then.
    plans[(*key[:-1], (*key[-1][:-1], chosen.epoch))] = made
    return made


def without_key(op: Op[Any], tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """A call that has no exact key: an option that cannot be hashed, a tensor without strides or memory."""
    chosen = normalise(op, options, backend)
    facts_of(op, tensors, chosen, False, False)
    return through_node(op, tensors, tuple(chosen.values()), backend)


def _plans_elsewhere(
    op: Op[Any], tensors: tuple[Tensor | None, ...], options: dict[str, Any], backend: str | None
) -> Callable[..., Any]:
    """Meta tensors only have the op's output rule; lazily negated ones are made real first."""
    if any(t is not None and t.is_meta for t in tensors):
        facts_of(op, tensors, options, False, False)
        return lambda *tensors: through_node(op, tensors, tuple(options.values()), backend)
    real = [t is not None and t.is_neg() for t in tensors]
    return lambda *tensors: op(
        *[t.resolve_neg() if lazy else t for t, lazy in zip(tensors, real, strict=True)], **options, backend=backend
    )


def plan(
    op: Op[Any],
    tensors: Sequence[Tensor | None],
    options: dict[str, Any],
    backend: str | None,
    frozen: Frozen,
    saving: bool,
    metric: Metric,
) -> tuple[Run, Selection]:
    """Facts, selection, binding. A kernel that fails to compile or load here is marked and the next is tried."""
    call = facts_of(op, tensors, options, saving, frozen[1])
    capturing = call.device.kind in ("cuda", "hip") and torch.cuda.is_current_stream_capturing()
    while True:
        chosen = _select(call, frozen[0], backend, metric, capturing)
        candidate = chosen.chosen
        assert candidate is not None and candidate.config is not None
        with guarded(candidate.kernel, candidate.config, call) as failed:
            run = bind(candidate.kernel, candidate.config, call)
        if not failed:
            break
    if frozen[0].check(op.name) == "always" and candidate.backend != "reference" and _comparer and not capturing:
        run = _compared(run, call)
    return run, chosen


_selected: dict[Any, Selection] = {}


def _select(call: Call, now: Policy, backend: str | None, metric: Metric, capturing: bool) -> Selection:
    """The second level of the memo: by call class."""
    defaults = dict(registry.op(call.op).options)
    key = (
        call_class(call, defaults), call.op, call.device, backend, now, metric, evidence.epoch[0],
        tuple(f is not None and f.numel == 0 for f in call.tensors.values()),
    )  # fmt: skip
    found = _selected.get(key)
    if found is None:
        found = selection.select(call, now, backend=backend, metric=metric, capturing=capturing)
        if len(_selected) >= TABLE_LIMIT:
            _selected.clear()
        _selected[(*key[:-2], found.epoch, key[-1])] = found
    return found


def _without(op: Op[Any], run: Run) -> Callable[..., Any]:
    if op.single:
        return getattr(run, "single", None) or (lambda *tensors: run(*tensors)[0])
    return lambda *tensors: tuple(run(*tensors))


def _compared(run: Run, call: Call) -> Run:
    """`check="always"`: the caller's own call against the reference, on clones made before the kernel runs."""

    def compared(*tensors: Tensor | None) -> list[Any]:
        clones = [None if t is None else t.detach().clone(memory_format=torch.preserve_format) for t in tensors]
        outputs = run(*tensors)
        _comparer[0](call, clones, outputs)
        return outputs

    return compared


class Backward:
    """What forward froze for its gradient: which tensors to keep, and how to call the backward op."""

    def __init__(self, op: Op[Any], options: dict[str, Any], backend: str | None, frozen: Frozen) -> None:
        gradient = op.gradient
        assert gradient is not None
        self.op, self.gradient, self.backend, self.frozen = op, gradient, backend, frozen
        self.backward: Op[Any] = registry.op(gradient.op)
        self.outputs = len(op.out)
        names = [*op.tensors, *op.out, *op.saved]
        self.keep = [names.index(name) for name in gradient.takes.values()]
        # The backward op's tensors as indices into (upstream gradients, kept tensors, None).
        upstream = {param: list(op.out).index(out) for out, param in gradient.grads.items()}
        kept = {param: self.outputs + place for place, param in enumerate(gradient.takes)}
        self.places = [{**upstream, **kept}.get(n, -1) for n in self.backward.tensors]
        self.options = {n: options.get(n, default) for n, default in self.backward.options.items()}
        results = list(self.backward.out)
        self.sources = [
            results.index(gradient.gives[n]) if n in gradient.gives else None for n in op.tensors
        ]  # fmt: skip
        self._needs: dict[tuple[bool, ...], tuple[bool, ...]] = {}

    def needs(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which outputs of the backward op these inputs want."""
        found = self._needs.get(wanted)
        if found is None:
            asked = {s for s, w in zip(self.sources, wanted, strict=True) if w and s is not None}
            found = self._needs[wanted] = tuple(i in asked for i in range(len(self.backward.out)))
        return found

    def __call__(self, grads: Sequence[Any], kept: Sequence[Any], wanted: tuple[bool, ...], node: bool) -> list[Any]:
        """Gradients of the op's tensors, None where not wanted."""
        if all(g is None for g in grads):
            return [None] * len(self.sources)
        every = (*grads, *kept, None)
        tensors = [every[i] for i in self.places]
        options = dict(self.options)
        if self.backward.may_skip:
            options["needs"] = self.needs(wanted)
        if node:
            with policy.restored(self.frozen[0]):
                found = call_node(self.backward, tensors, options, self.backend)
        else:
            found = self.backward(*tensors, **options, backend=self.backend, _frozen=self.frozen)
        results = (found,) if isinstance(found, Tensor) else found
        return [
            results[source] if want and source is not None else None
            for source, want in zip(self.sources, wanted, strict=True)
        ]


class _Apply(torch.autograd.Function):
    """The one autograd function of direct calls; the plan decides everything."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, run: Run, *tensors: Tensor | None) -> Any:
        results = run(*tensors)
        every = (*tensors, *results)
        ctx.save_for_backward(*[every[i] for i in backward.keep])
        ctx.set_materialize_grads(False)
        ctx.backward_plan = backward
        n = backward.outputs
        return results[0] if n == 1 else tuple(results[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.backward_plan(grads, ctx.saved_tensors, ctx.needs_input_grad[2:], False)


def _with_gradient(
    op: Op[Any], run: Run, options: dict[str, Any], backend: str | None, frozen: Frozen
) -> Callable[..., Any]:
    backward = Backward(op, options, backend, frozen)
    # functorch was ruled out by the entry, so the Python wrapper of Function.apply has nothing to do
    apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Apply)
    return lambda *tensors: apply(backward, run, *tensors)


# Everything that is not plain eager.


def through_node(op: Op[Any], tensors: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        for name, tensor in zip(op.tensors, tensors, strict=True):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise InvalidArgument(op.name, name, f"a {type(tensor).__name__}", "a torch.Tensor is needed")
            if tensor is not None and tensor.is_nested:
                raise InvalidArgument(op.name, name, "a nested tensor", f"pass {name}.values(), or pad it")
            if type(tensor).__module__.startswith("torch.distributed.tensor"):
                raise Unsupported(f"{op.name}: {name} is a DTensor, for which there is no rule; pass {name}.to_local()")
        options = tuple(normalise(op, options, backend).values())
        if torch._C._are_functorch_transforms_active():
            raise Unsupported(f"{op.name}: torch.func (vmap, grad, jvp) has no rule here; use the reference")
        _refuse_tangents(op, tensors)
    return call_node(op, tensors, dict(zip(op.options, options, strict=True)), backend)


def _refuse_tangents(op: Op[Any], tensors: Sequence[Any]) -> None:
    """Forward-mode differentiation has no rule here; without this the tangents would be lost in silence."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise Unsupported(
                f"{op.name}: {name} has a forward-mode tangent, which has no rule here; use the reference"
            )


def call_node(op: Op[Any], tensors: Sequence[Any], options: dict[str, Any], backend: str | None) -> Any:
    """Call the op's torch.library node and put its outputs into the op's own form."""
    found = getattr(torch.ops.tilewright, op.name)(*tensors, **node.plain(options), backend=backend)
    return node.unpack(op, found, tensors, options)


def run_node(
    op: Op[Any], tensors: Sequence[Any], options: dict[str, Any], backend: str | None, saving: bool
) -> list[Any]:
    """The node on real tensors, below autograd."""
    chosen = normalise(op, [options[n] for n in op.options], backend)
    now = (policy.current(), torch.are_deterministic_algorithms_enabled())
    tensors = [None if t is None else t.detach().resolve_neg() for t in tensors]
    try:
        memory = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device()) for t in tensors
        ]
    except RuntimeError:
        facts_of(op, tensors, chosen, saving, False)  # says what is wrong with a tensor without strides or memory
        raise
    key = (op.name, backend, saving, now, evidence.epoch[0], tuple(chosen.items()), *memory)
    run = _node_plans.get(key)
    if run is None:
        run, selected = plan(op, tensors, chosen, backend, now, saving, "kernel_us")
        if len(_node_plans) >= TABLE_LIMIT:
            _node_plans.clear()
        _node_plans[(*key[:4], selected.epoch, *key[5:])] = run
    return run(*tensors)


_node_plans: dict[Any, Run] = {}


def explain(op: Op[Any] | str, *args: Any, backend: str | None = None, **options: Any) -> Selection:
    """How `op(*args, **options)` would be served: every kernel with its rank, evidence, times and reasons.

    Runs nothing and compiles nothing. The result prints as a table. `op` may also be an op's name.
    """
    if isinstance(op, str):
        op = registry.op(op)
    elif not isinstance(op, Op):
        known = ", ".join(o.name for o in registry.ops())
        raise InvalidArgument("explain", "op", f"{op!r} is no op", f"one of {known}")
    bound = inspect.signature(op.reference).bind(*args, **options)
    bound.apply_defaults()
    tensors = [bound.arguments[n] for n in op.tensors]
    chosen = normalise(op, [bound.arguments[n] for n in op.options], backend)
    saving = (
        op.gradient is not None
        and torch.is_grad_enabled()
        and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    )
    call = facts_of(op, tensors, chosen, saving, torch.are_deterministic_algorithms_enabled())
    return selection.weigh(call, policy.current(), backend=backend)
