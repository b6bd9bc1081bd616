"""What happens when a call has no plan yet, and how calls that are not plain eager are served.

The op's generated `__call__` (`entry.py`) finds plans; `resolve` makes them: facts, selection, binding, gradient.
torch.compile, modes, subclasses and fakes go through the op's `torch.library` node (`node.py`), whose implementation on
real tensors comes back here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tilewright.core import evidence, node, policy, registry, selection
from tilewright.core.arguments import facts_of, normalise
from tilewright.core.call import Call
from tilewright.core.classes import call_class
from tilewright.core.errors import InvalidArgument, NoKernel, Unsupported
from tilewright.core.gradient import Backward
from tilewright.core.in_place import InPlace
from tilewright.core.op import Op
from tilewright.core.plan import Run, bind
from tilewright.core.policy import Frozen, Policy
from tilewright.core.selection import Selection, guarded
from tilewright.core.shortcut import shortcut
from tilewright.core.spent import Held, hooked
from tilewright.core.times import Metric

Tensor = torch.Tensor
TABLE_LIMIT = 4096

Comparer = Callable[[Call, Sequence[Any], Sequence[Any]], None]
_comparer: list[Comparer] = []


def install_comparer(comparer: Comparer) -> None:
    """What `check="always"` runs after each call: (call, clones of the inputs, outputs)."""
    _comparer[:] = [comparer]


_watchers: list[Callable[[Call], None]] = []


@contextmanager
def watched(see: Callable[[Call], None]) -> Iterator[None]:
    """`see` is told every call that is made inside, gradients and other threads included; one signature may come
    several times. All plans are worked out anew, so that none is missed."""
    _watchers.append(see)
    evidence.bump()
    try:
        yield
    finally:
        _watchers.remove(see)


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
        return _plans_elsewhere(op, tensors, chosen_options, backend, frozen)
    wants_grad = grad and any(t is not None and t.requires_grad for t in tensors)
    if wants_grad and op.gradient is None:
        node.refuse_gradient(op)
    if wants_grad:
        node.refuse_inputs(op, tensors)
    now = frozen or (policy.current(), torch.are_deterministic_algorithms_enabled())
    wanted = tuple(t is not None and t.requires_grad for t in tensors) if wants_grad else ()
    backward = Backward(op, chosen_options, backend, now, tensors) if wants_grad else None
    run, chosen = plan(op, tensors, chosen_options, backend, now, "call_us", backward, wanted)
    made = _without(op, run) if backward is None else _with_gradient(run, backward)
    if len(plans) >= TABLE_LIMIT:
        plans.clear()
    # Under the epoch of what the selection has seen: a first-use check bumps it, and so may another thread since then.
    plans[(*key[:-1], (*key[-1][:-1], chosen.epoch))] = made
    return made


def without_key(
    op: Op[Any], tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None, frozen: Frozen | None
) -> Any:
    """A call that has no exact key: an option that cannot be hashed, a tensor without strides or memory."""
    chosen = normalise(op, options, backend)
    facts_of(op, tensors, chosen, False, False)
    return through_node(op, tensors, tuple(chosen.values()), backend, frozen)


def _plans_elsewhere(
    op: Op[Any], tensors: tuple[Tensor | None, ...], options: dict[str, Any], backend: str | None,
    frozen: Frozen | None,
) -> Callable[..., Any]:  # fmt: skip
    """Meta tensors only have the op's output rule; lazily negated ones are made real first."""
    if any(t is not None and t.is_meta for t in tensors):
        facts_of(op, tensors, options, False, False)
        return lambda *tensors: through_node(op, tensors, tuple(options.values()), backend)
    if isinstance(op, InPlace):
        op.refuse_lazy(tensors)
    real = [t is not None and t.is_neg() for t in tensors]
    return lambda *tensors: op(
        *[t.resolve_neg() if lazy else t for t, lazy in zip(tensors, real, strict=True)],
        **options, backend=backend, _frozen=frozen,
    )  # fmt: skip


def plan(
    op: Op[Any],
    tensors: Sequence[Tensor | None],
    options: dict[str, Any],
    backend: str | None,
    frozen: Frozen,
    metric: Metric,
    backward: Backward | None,
    wanted: tuple[bool, ...] = (),
) -> tuple[Run, Selection]:
    """Facts, selection, binding. A kernel that fails to compile or load here is marked and the next is tried.

    `backward`: the gradient that the call saves for, if any; `wanted`: which tensors want one, where that is known.
    """
    call = facts_of(op, tensors, options, backward is not None, frozen[1])
    for see in tuple(_watchers):
        see(call)
    capturing = call.device.kind in ("cuda", "hip") and torch.cuda.is_current_stream_capturing()
    while True:
        chosen = _select(call, frozen[0], backend, metric, capturing, backward, wanted)
        candidate = chosen.chosen
        assert candidate is not None and candidate.config is not None
        with guarded(candidate.kernel, candidate.config, call) as failed:
            run = bind(candidate.kernel, candidate.config, call)
        if not failed:
            break
    if op.check_values is not None and call.device.kind == "cpu":
        run = _looked_at(run, op, options)
    if frozen[0].check(call.op) == "always" and candidate.backend != "reference" and _comparer and not capturing:
        run = _compared(run, call)
    return run, chosen


_selected: dict[Any, Selection] = {}


def _select(
    call: Call, now: Policy, backend: str | None, metric: Metric, capturing: bool,
    backward: Backward | None, wanted: tuple[bool, ...],
) -> Selection:  # fmt: skip
    """The second level of the memo: by call class."""
    pinned = backward is not None and backward.pinned is not None
    defaults = dict(registry.op(call.op).options)
    key = (
        call_class(call, defaults), call.form, bool(call.aliased), call.device, backend, now, metric, evidence.epoch[0],
        (wanted if pinned else (), tuple(f is not None and f.numel == 0 for f in call.tensors.values())),
    )  # fmt: skip
    found = _selected.get(key)
    if found is None:
        found = selection.select(call, now, backend=backend, metric=metric, capturing=capturing)
        refused = backward.refusal(call, wanted) if backward is not None else ""
        if refused:  # here and not in backward: a pin never falls back, and the caller is still there to be told
            raise NoKernel(refused)
        if len(_selected) >= TABLE_LIMIT:
            _selected.clear()
        _selected[(*key[:-2], found.epoch, key[-1])] = found
    return found


def _without(op: Op[Any], run: Run) -> Callable[..., Any]:
    direct: Callable[..., Any] | None = getattr(run, "direct", None)
    if direct is not None:
        return direct
    return (lambda *tensors: run(*tensors)[0]) if op.single else lambda *tensors: tuple(run(*tensors))


def _looked_at(run: Run, op: Op[Any], options: dict[str, Any]) -> Run:
    """What the contract says of values is seen to before the kernel runs."""
    check = op.check_values
    assert check is not None

    def looked_at(*tensors: Tensor | None) -> list[Any]:
        check(dict(zip(op.tensors, tensors, strict=True)), options)
        return run(*tensors)

    return looked_at


def _compared(run: Run, call: Call) -> Run:
    """`check="always"`: the caller's own call against the reference, on clones made before the kernel runs."""

    def compared(*tensors: Tensor | None) -> list[Any]:
        clones = [None if t is None else t.detach().clone(memory_format=torch.preserve_format) for t in tensors]
        outputs = run(*tensors)
        _comparer[0](call, clones, outputs)
        return outputs

    return compared


class _Apply(torch.autograd.Function):
    """The one autograd function of direct calls; the plan decides everything."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, run: Run, *tensors: Tensor | None) -> Any:
        results = run(*tensors)
        every = (*tensors, *results)
        kept = [every[i] for i in backward.keep]
        if backward.spent:
            apart = 0 if hooked() else len(backward.spent)
            ctx.held = Held(kept[-apart:]) if apart else None
            kept = kept[: len(kept) - apart]
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.backward_plan = backward
        n = backward.outputs
        return results[0] if n == 1 else tuple(results[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, needs = ctx.backward_plan, ctx.needs_input_grad
        serve = plan.shortcuts.get(needs)
        if serve is not None:
            return serve(grads, ctx.saved_tensors)
        kept, spending = ctx.saved_tensors, False
        if not plan.spent:
            if not torch.compiler.is_dynamo_compiling():
                plan.shortcuts[needs] = shortcut(plan, needs, 2)
        elif ctx.held is not None and any(g is not None for g in grads):
            # Once the caller has the gradient no one else may refer to it, or autograd copies what it adds up.
            given = ctx.held.take(len(plan.spent))
            kept, spending = (*kept, *given), given[0] is not None
        return None, None, *plan(grads, kept, needs[2:], False, spending)


# The engine calls `apply` of the node's class; torch's own finds out each time that `backward` is what to call.
_Apply._backward_cls.apply = _Apply.backward  # type: ignore[attr-defined]


def _with_gradient(run: Run, backward: Backward) -> Callable[..., Any]:
    # functorch was ruled out by the entry, so the Python wrapper of Function.apply has nothing to do
    apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Apply)

    def ready(*tensors: Tensor | None) -> Any:
        backward.refuse_waiting(tensors)
        return apply(backward, run, *tensors)

    return ready if backward.gradient.finds else lambda *tensors: apply(backward, run, *tensors)


# Everything that is not plain eager.


def through_node(
    op: Op[Any], tensors: Sequence[Any], options: Sequence[Any], backend: str | None, frozen: Frozen | None = None
) -> Any:
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
    given = dict(zip(op.options, options, strict=True))
    if frozen is None:
        return node.call(op, tensors, given, backend)
    with policy.restored(frozen):
        return node.call(op, tensors, given, backend)


def _refuse_tangents(op: Op[Any], tensors: Sequence[Any]) -> None:
    """Forward-mode differentiation has no rule here; without this the tangents would be lost in silence."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise Unsupported(
                f"{op.name}: {name} has a forward-mode tangent, which has no rule here; use the reference"
            )


def run_node(
    op: Op[Any], tensors: Sequence[Any], options: dict[str, Any], backend: str | None, saving: bool
) -> list[Any]:
    """The node on real tensors, below autograd."""
    chosen = normalise(op, [options[n] for n in op.options], backend)
    now = policy.now()
    if isinstance(op, InPlace):
        op.refuse_lazy(tensors)
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
        backward = Backward(op, chosen, backend, now, tensors) if saving else None
        run, selected = plan(op, tensors, chosen, backend, now, "kernel_us", backward)
        if len(_node_plans) >= TABLE_LIMIT:
            _node_plans.clear()
        _node_plans[(*key[:4], selected.epoch, *key[5:])] = run
    return run(*tensors)


_node_plans: dict[Any, Run] = {}


def _asks_gradient(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def explain(op: Op[Any] | str, *args: Any, backend: str | None = None, **options: Any) -> Selection:
    """How `op(*args, **options)` would be served: every kernel with its rank, evidence, times and reasons.

    Runs nothing and compiles nothing. The result prints as a table. `op` may also be an op's name.
    """
    op = getattr(op, "op", op)  # a function that calls an op names it so
    if isinstance(op, str):
        op = registry.find(op)
    elif not isinstance(op, Op):
        known = ", ".join(o.name for o in registry.ops())
        raise InvalidArgument("explain", "op", f"{op!r} is no op", f"one of {known}")
    bound = inspect.signature(op.reference).bind(*args, **options)
    bound.apply_defaults()
    tensors = [bound.arguments[n] for n in op.tensors]
    chosen = normalise(op, [bound.arguments[n] for n in op.options], backend)
    saving = op.gradient is not None and _asks_gradient(tensors)
    if isinstance(op, InPlace) and _asks_gradient(tensors):
        node.refuse_gradient(op)
    if saving:
        node.refuse_inputs(op, [t if isinstance(t, Tensor) else None for t in tensors])
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = facts_of(op, tensors, chosen, saving, deterministic)
    found = selection.weigh(call, policy.current(), backend=backend)
    if saving and found.chosen is not None:
        wanted = tuple(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        refused = Backward(op, chosen, backend, (policy.current(), deterministic), tensors).refusal(call, wanted)
        if refused:
            found.chosen, found.why = None, "none: its gradient could not be had, which raises NoKernel"
            found.notes.append(refused)
    return found
