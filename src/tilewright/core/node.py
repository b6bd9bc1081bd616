"""The `torch.ops.tilewright.<op>` nodes: what torch.compile, export, fakes and modes see of an op.

Each op has a node that returns its outputs and, if it has a gradient, a second one, `<op>_saving`, that also returns
what forward saves. Nodes select at run time on real tensors; on fakes only the op's output rule runs. Gradients sit
on the Autograd key, so that exported graphs differentiate.

An in-place form has a node that says in its schema what it overwrites, `Tensor(a!)`, and returns its other outputs
alone. Where calls differ in what they overwrite, each way is an overload, named by that input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from tilewright.core import registry
from tilewright.core.declaration import plain_type
from tilewright.core.errors import InvalidArgument, NoGradient
from tilewright.core.in_place import InPlace, Targets
from tilewright.core.op import Op


class _Nodes(torch._ops._OpNamespace):
    """`torch.ops.tilewright`: a name that is not there yet may be one of a family that is not imported yet, as when an
    exported program is loaded."""

    __module__ = torch._ops.__name__  # nodes are pickled by it
    here = threading.local()
    """`defining`: in this thread torch asks for a name because it is being defined."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if getattr(self.here, "defining", False):
                raise
            registry.ops()  # every family, and what plug-ins declare
            return super().__getattr__(name)


NodeRun = Callable[[Op[Any], Sequence[Any], dict[str, Any], str | None, bool], list[Any]]

_library = torch.library.Library("tilewright", "DEF")
setattr(torch.ops, _library.ns, _Nodes(_library.ns))
_SCHEMA = {float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType"}


def define(op: Op[Any], run: NodeRun) -> None:
    """Register the op's nodes: schema, implementation, fake, gradient."""
    _Nodes.here.defining = True
    try:
        _define_all(op, run)
    finally:
        _Nodes.here.defining = False


def _define_all(op: Op[Any], run: NodeRun) -> None:
    if isinstance(op, InPlace):
        for into in op.every_target():
            _define_in_place(op, run, into)
        return
    _define(op, run, saving=False)
    if op.gradient is not None:
        _define(op, run, saving=True)
    _library.impl(op.name, _autograd(op), "Autograd")


def schema(op: Op[Any], saving: bool) -> str:
    """The node's schema. An op that may skip outputs, or save less, returns a list of those it has."""
    returns = (
        "Tensor[]"
        if _listed(op, saving)
        else "Tensor"
        if op.single and not saving
        else ("(" + ", ".join(["Tensor"] * (len(op.out) + len(op.saved) * saving)) + ")")
    )
    return f"{op.name + '_saving' * saving}({_arguments(op)}) -> {returns}"


def in_place_schema(op: InPlace[Any], into: Targets) -> str:
    """The schema of an in-place form where calls overwrite `into`. Aliases cannot be among the results."""
    fresh = ["Tensor"] * (len(op.out) - len(into))
    returns = "Tensor" if len(fresh) == 1 else f"({', '.join(fresh)})"
    return f"{_place(op, into)}({_arguments(op, list(into.values()))}) -> {returns}"


def _place(op: InPlace[Any], into: Targets) -> str:
    """The node of a form, and the overload where it has several."""
    return op.name if len(op.every_target()) == 1 else f"{op.name}.{'_'.join(into.values())}"


def _arguments(op: Op[Any], written: Sequence[str] = ()) -> str:
    kinds = {n: f"Tensor({chr(97 + written.index(n))}!)" if n in written else "Tensor" for n in op.tensors}
    tensors = [f"{kinds[n]}? {n}" if n in op.optional else f"{kinds[n]} {n}" for n in op.tensors]
    options = [f"{_option(op.option_types[n])} {n}" for n in op.options]
    return ", ".join([*tensors, "*", *options, "str? backend=None"])


def _option(kind: Any) -> str:
    kind, optional = plain_type(kind)
    return _SCHEMA.get(kind, "bool[]") + "?" * optional


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in options.items()}


def _listed(op: Op[Any], saving: bool) -> bool:
    return op.may_skip or (saving and op.may_save_less)


def pack(op: Op[Any], results: Sequence[Any], saving: bool = False) -> Any:
    """The op's results as the node returns them."""
    if _listed(op, saving):
        return [r for r in results if r is not None]
    return results[0] if len(results) == 1 else tuple(results)


def unpack(op: Op[Any], found: Any, tensors: Sequence[Any], options: Mapping[str, Any], saving: bool = False) -> Any:
    """What the node returned as the op returns it: None where an output was skipped, or nothing saved."""
    if not _listed(op, saving):
        return found
    rest = iter(found)
    specs = op.out_specs(dict(zip(op.tensors, tensors, strict=True)), options, saving)
    return tuple(None if spec is None else next(rest) for spec in specs.values())


def call(op: Op[Any], tensors: Sequence[Any], options: Mapping[str, Any], backend: str | None) -> Any:
    """Call the op's node and put its outputs into the op's own form."""
    if isinstance(op, InPlace):
        return _call_in_place(op, tensors, options, backend)
    found = getattr(torch.ops.tilewright, op.name)(*tensors, **plain(options), backend=backend)
    return unpack(op, found, tensors, options)


def _call_in_place(op: InPlace[Any], tensors: Sequence[Any], options: Mapping[str, Any], backend: str | None) -> Any:
    given = dict(zip(op.tensors, tensors, strict=True))
    into = op.targets(given)
    name, _, overload = _place(op, into).partition(".")
    found = getattr(getattr(torch.ops.tilewright, name), overload or "default")(
        *tensors, **plain(options), backend=backend
    )
    fresh = iter((found,) if isinstance(found, torch.Tensor) else found or ())
    results = tuple(given[into[output]] if output in into else next(fresh) for output in op.out)
    return results[0] if op.single else results


def _define_in_place(op: InPlace[Any], run: NodeRun, into: Targets) -> None:
    name = _place(op, into)
    fresh = [place for place, output in enumerate(op.out) if output not in into]
    written = [op.tensors.index(tensor) for tensor in into.values()]
    _library.define(in_place_schema(op, into))

    def results(found: Sequence[Any]) -> Any:
        kept = [found[place] for place in fresh]
        return kept[0] if len(kept) == 1 else tuple(kept) or None

    def implementation(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        inputs = _padded(op, tensors)
        if op.targets(dict(zip(op.tensors, inputs, strict=True))) != into:
            absent = next(iter(into.values()))
            raise op.refuse(absent, f"this overload, {name}, does not overwrite what is given", f"call {op.name}")
        return results(run(op, inputs, options, backend, False))

    def fake(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        return results(_fakes(op, _padded(op, tensors), options, False))

    def changed(keys: Any, *tensors: Any, backend: str | None = None, **options: Any) -> Any:
        """Count what is overwritten as changed, as autograd does for functions of torch."""
        inputs = _padded(op, tensors)
        torch._C._increment_version([inputs[place] for place in written if inputs[place] is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return node.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *inputs, **options, backend=backend)

    def autograd(keys: Any, *tensors: Any, backend: str | None = None, **options: Any) -> Any:
        inputs = _padded(op, tensors)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            refuse_gradient(op)
        with torch._C._AutoDispatchBelowAutograd():
            return node.redispatch(keys & torch._C._after_autograd_keyset, *inputs, **options, backend=backend)

    def resolved(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        """Torch's own fallback for lazily negated tensors wants what is overwritten returned."""
        op.refuse_lazy(_padded(op, tensors))
        return node(*[None if t is None else t.resolve_neg() for t in tensors], **options, backend=backend)

    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    _library.impl(name, resolved, "Negative")
    _library.impl(name, changed, "ADInplaceOrView", with_keyset=True)
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    packet, _, overload = name.partition(".")
    node = getattr(getattr(torch.ops.tilewright, packet), overload or "default")


def _fakes(op: Op[Any], tensors: Sequence[Any], options: Mapping[str, Any], saving: bool) -> list[Any]:
    """Outputs by the output rule alone, then what is saved."""
    inputs = dict(zip(op.tensors, tensors, strict=True))
    like = next(t for t in inputs.values() if t is not None)
    for argument, t in inputs.items():
        if t is not None and t.device != like.device:  # one meta tensor is enough to be called here
            raise InvalidArgument(
                op.name, argument, f"on {t.device}, other tensors on {like.device}", "move it there first"
            )
    specs = op.out_specs(inputs, options, saving)
    return [None if s is None else like.new_empty(s[0], dtype=s[1]) for s in specs.values()]


def _define(op: Op[Any], run: NodeRun, saving: bool) -> None:
    name = op.name + "_saving" * saving
    _library.define(schema(op, saving))

    def implementation(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        inputs = _padded(op, tensors)
        results = run(op, inputs, options, backend, saving)
        return pack(op, results, saving)

    def fake(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        return pack(op, _fakes(op, _padded(op, tensors), options, saving), saving)

    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")  # register_fake looks up source lines, which costs half a millisecond an op


def _padded(op: Op[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    return (*tensors, *[None] * (len(op.tensors) - len(tensors)))


class _NodeApply(torch.autograd.Function):
    """The node's gradient: forward through `<op>_saving`, backward through the backward op's node."""

    @staticmethod
    def forward(ctx: Any, op: Op[Any], options: dict[str, Any], backend: str | None, *tensors: Any) -> Any:
        from tilewright.core import policy
        from tilewright.core.gradient import Backward

        frozen = (policy.current(), torch.are_deterministic_algorithms_enabled())
        ctx.plan = Backward(op, options, backend, frozen, tensors)
        ctx.plan.refuse_waiting(tensors)
        saving = getattr(torch.ops.tilewright, op.name + "_saving")
        with torch._C._AutoDispatchBelowAutograd():
            found = saving(*tensors, **options, backend=backend)
        found = unpack(op, found, tensors, options, True)
        results = (found,) if isinstance(found, torch.Tensor) else found  # one output, and nothing saved
        every = (*tensors, *results)
        ctx.save_for_backward(*[every[i] for i in ctx.plan.keep])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[r for r in results[len(op.out) :] if r is not None])
        outputs = results[: len(op.out)]
        return outputs[0] if op.single else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *ctx.plan(grads, ctx.saved_tensors, ctx.needs_input_grad[3:], True)


class _Refuse(torch.autograd.Function):
    """Passes the results of a backward op on; differentiating them again is refused.

    Tracers run backward with grad mode on without ever asking for a second derivative, so it cannot be refused before.
    """

    @staticmethod
    def forward(ctx: Any, op: Op[Any], options: dict[str, Any], backend: str | None, *tensors: Any) -> Any:
        ctx.op = op
        with torch._C._AutoDispatchBelowAutograd():
            found = getattr(torch.ops.tilewright, op.name)(*tensors, **options, backend=backend)
        return tuple(found) if op.may_skip else found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_gradient(ctx.op)


def refuse_gradient(op: Op[Any]) -> NoReturn:
    """Raise what an op without a gradient says."""
    if registry.served_by(op.functional.name):
        name = op.functional.name
        raise NoGradient(f"{name} has no gradient: double backward (create_graph=True) is not supported")
    if op.functional is not op:
        raise NoGradient(f"{op.name} has no gradient: use {op.functional.name}, or call it under torch.no_grad()")
    raise NoGradient(f"{op.name} has no gradient: call it under torch.no_grad() or on detached inputs")


def refuse_inputs(op: Op[Any], tensors: Sequence[Any]) -> None:
    """Raise where an input asks for a gradient that the op does not have."""
    assert op.gradient is not None
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and tensor.requires_grad and name not in op.gradient.gives:
            raise NoGradient(f"{op.name} has no gradient for {name}, which requires one: pass {name}.detach()")


def _autograd(op: Op[Any]) -> Callable[..., Any]:
    def autograd(*tensors: Any, backend: str | None = None, **options: Any) -> Any:
        inputs = _padded(op, tensors)
        wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if not wants:
            below = getattr(torch.ops.tilewright, op.name).default
            with torch._C._AutoDispatchBelowAutograd():
                return below(*inputs, **options, backend=backend)
        if op.gradient is not None:
            refuse_inputs(op, inputs)
            return _NodeApply.apply(op, options, backend, *inputs)  # type: ignore[no-untyped-call]
        if not registry.served_by(op.name):
            refuse_gradient(op)
        found = _Refuse.apply(op, options, backend, *inputs)  # type: ignore[no-untyped-call]
        return list(found) if op.may_skip else found

    return autograd
