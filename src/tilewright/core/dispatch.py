"""How a call of an op finds its plan, and what happens when it has none yet.

Exact tensors in plain eager mode take a plan directly: `install` generates the op's `__call__`, which binds arguments,
builds the exact key and looks it up. Everything else (torch.compile, modes, subclasses, fakes) goes through the op's
`torch.library` node, whose implementation on real tensors comes back here.
"""

from __future__ import annotations

import inspect
import linecache
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import evidence, node, policy, registry, selection
from tilewright.core.call import Call, TensorFacts
from tilewright.core.classes import call_class
from tilewright.core.device import device_of
from tilewright.core.errors import InvalidArgument, UnknownName, Unsupported
from tilewright.core.op import Gradient, Op
from tilewright.core.plan import Run, bind
from tilewright.core.policy import Policy
from tilewright.core.selection import Metric, Selection, guarded

Tensor = torch.Tensor
EXACT = frozenset({torch.Tensor, torch.nn.Parameter})
TABLE_LIMIT = 4096

Comparer = Callable[[Call, Sequence[Any], Sequence[Any]], None]
_comparer: list[Comparer] = []


def install_comparer(comparer: Comparer) -> None:
    """What `check="always"` runs after each call: (call, clones of the inputs, outputs)."""
    _comparer[:] = [comparer]


# The generated __call__. Every expression in the key is something that may change which kernel is right or fast.
_ENTRY = """\
def __call__(self, {signature}, backend=None, _frozen=None):
    if is_compiling():
        return through_node(self, ({tensors},), ({options}), backend)
    if {exact} and not (dispatch_modes() or function_modes() or transforms() or tracing()):
        grad = grad_enabled()
        key = ({tensor_keys}, {options} backend, grad, _frozen or (current_policy(), deterministic()), epoch[0])
        plan = plans.get(key)
        if plan is None:
            plan = resolve(self, plans, key, ({tensors},), ({options}), backend, grad, _frozen)
        return plan({tensors})
    return through_node(self, ({tensors},), ({options}), backend)
"""
_TENSOR_KEY = (
    "{n}.shape, {n}.is_contiguous() or {n}.stride(), {n}.dtype, {n}.data_ptr() & 15, {n}.get_device(), "
    "grad and {n}.requires_grad"
)


def install(op: Op[Any]) -> None:
    """Give `op` its `__call__`, on a class of its own, and its torch.library node."""
    required = [n for n in op.tensors if n not in op.optional]
    text = _ENTRY.format(
        signature=_signature(op),
        tensors=", ".join(op.tensors),
        options="".join(f"{n}, " for n in op.options),
        exact=" and ".join(
            [f"type({n}) in EXACT" for n in required]
            + [f"({n} is None or type({n}) in EXACT)" for n in op.tensors if n in op.optional]
        ),
        tensor_keys=", ".join(
            _TENSOR_KEY.format(n=n) if n in required else f"None if {n} is None else ({_TENSOR_KEY.format(n=n)})"
            for n in op.tensors
        ),
    )
    scope: dict[str, Any] = {
        "EXACT": EXACT,
        "is_compiling": torch.compiler.is_dynamo_compiling,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack,
        "transforms": torch._C._are_functorch_transforms_active,
        "tracing": torch._C._get_tracing_state,
        "grad_enabled": torch.is_grad_enabled,
        "deterministic": torch._C._get_deterministic_algorithms,
        "current_policy": policy.current,
        "epoch": evidence.epoch,
        "plans": {},
        "resolve": _resolve,
        "through_node": through_node,
        **{f"default_{name}": value for name, value in op.options.items()},
    }
    file = f"<tilewright op {op.name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), scope)
    op.__class__ = type(op.name, (Op,), {"__call__": scope["__call__"], "__slots__": ()})
    node.define(op, run_node)


def _signature(op: Op[Any]) -> str:
    """The reference's own signature as text. Defaults of options are bound by name."""
    parts = []
    starred = False
    for parameter in inspect.signature(op.reference).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        if parameter.name in op.options:
            optional = "" if parameter.default is parameter.empty else f"=default_{parameter.name}"
        else:
            optional = "" if parameter.default is parameter.empty else "=None"
        parts.append(parameter.name + optional)
    return ", ".join(parts if starred else [*parts, "*"])


Frozen = tuple[Policy, bool]
"""Policy and determinism as forward found them; backward keeps to them."""


def _resolve(
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
    wants_grad = grad and any(t is not None and t.requires_grad for t in tensors)
    if wants_grad and op.gradient is None:
        node.refuse_gradient(op)
    now = frozen or (policy.current(), torch.are_deterministic_algorithms_enabled())
    run, _ = plan(op, tensors, chosen_options, backend, now, wants_grad, "call_us")
    made = _with_gradient(op, run, chosen_options, backend, now) if wants_grad else _without(op, run)
    if len(plans) >= TABLE_LIMIT:
        plans.clear()
    # A first-use check bumps the epoch, under whose old value the plan would be found no more.
    plans[(*key[:-1], evidence.epoch[0])] = made
    return made


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
        _selected[(*key[:-2], evidence.epoch[0], key[-1])] = found
    return found


def facts_of(
    op: Op[Any], tensors: Sequence[Tensor | None], options: dict[str, Any], saving: bool, deterministic: bool
) -> Call:
    """The call as facts, checked against the op's contract."""
    facts: dict[str, TensorFacts | None] = {}
    first: Tensor | None = None
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is None:
            if name not in op.optional:
                raise InvalidArgument(op.name, name, "None", "a tensor is needed")
            facts[name] = None
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(op.name, name, f"a {type(tensor).__name__}", "a torch.Tensor is needed")
        if tensor.layout is not torch.strided:
            raise InvalidArgument(op.name, name, f"layout {tensor.layout}", "a strided tensor is needed")
        if first is not None and tensor.device != first.device:
            raise InvalidArgument(
                op.name, name, f"on {tensor.device}, other tensors on {first.device}", "move it there first"
            )
        first = tensor if first is None else first
        facts[name] = TensorFacts.of(name, tensor)
    if first is None:
        raise InvalidArgument(op.name, op.tensors[0], "every tensor is None")
    device = device_of(first.device.type, first.device.index)
    return op.call(facts, options, device, saving=saving, deterministic=deterministic)


def normalise(op: Op[Any], options: Sequence[Any], backend: str | None) -> dict[str, Any]:
    """Options as the types that the op declares; anything else is refused by name."""
    if backend is not None and backend not in registry.backend_names():
        raise UnknownName("backend", backend, registry.backend_names())
    found: dict[str, Any] = {}
    for (name, kind), value in zip(op.option_types.items(), options, strict=True):
        if kind is float:
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "a number is needed")
            value = float(value)
            if math.isnan(value):
                raise InvalidArgument(op.name, name, "NaN", "a number is needed")
        elif kind is bool:
            if not isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "True or False")
        elif kind is int:
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidArgument(op.name, name, f"{value!r} is a {type(value).__name__}", "an integer is needed")
        elif isinstance(value, (list, tuple)):
            value = tuple(bool(v) for v in value)
        found[name] = value
    return found


def _without(op: Op[Any], run: Run) -> Callable[..., Any]:
    if op.single:
        return lambda *tensors: run(*tensors)[0]
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
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InvalidArgument(op.name, name, f"a {type(tensor).__name__}", "a torch.Tensor is needed")
        if type(tensor).__module__.startswith("torch.distributed.tensor"):
            raise Unsupported(f"{op.name}: {name} is a DTensor, for which there is no rule; pass {name}.to_local()")
    if torch._C._are_functorch_transforms_active():
        raise Unsupported(f"{op.name}: torch.func transforms (vmap, grad, jvp) have no rule here; use the reference")
    return call_node(op, tensors, dict(zip(op.options, options, strict=True)), backend)


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
    tensors = [None if t is None else t.detach() for t in tensors]
    key = (
        op.name, backend, saving, now, evidence.epoch[0], tuple(chosen.items()),
        *((None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device())) for t in tensors),
    )  # fmt: skip
    run = _node_plans.get(key)
    if run is None:
        run, _ = plan(op, tensors, chosen, backend, now, saving, "kernel_us")
        if len(_node_plans) >= TABLE_LIMIT:
            _node_plans.clear()
        _node_plans[(*key[:4], evidence.epoch[0], *key[5:])] = run
    return run(*tensors)


_node_plans: dict[Any, Run] = {}


def explain(op: Op[Any], *args: Any, backend: str | None = None, **options: Any) -> Selection:
    """How `op(*args, **options)` would be served: every kernel with its rank, evidence, times and reasons.

    Runs nothing and compiles nothing. The result prints as a table.
    """
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


__all__ = ["Backward", "Frozen", "Gradient", "call_node", "explain", "facts_of", "install", "plan", "run_node"]
