"""The `__call__` that an op is given: it binds arguments and finds the plan of an exact signature.

It is generated, as dataclasses generate `__init__`, because every microsecond here is paid on every call. Three levels:
guards of the signatures seen last, in torch's own C++ (one call compares types, dispatch keys, sizes, strides and what
needs a gradient); then the exact key in a table; then `dispatch.resolve`. Whatever is not plain eager goes to the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.core import dispatch, evidence, node, policy, shortcut
from tilewright.core.declaration import signature_of
from tilewright.core.errors import TilewrightError
from tilewright.core.op import Op

EXACT = frozenset({torch.Tensor, torch.nn.Parameter})
RECENT = 4
"""Signatures that are looked for by guards, for each set of options."""

# Every expression in the keys is something that may change which kernel is right or fast. Guards leave out
# modes (some dispatch modes, that of selective checkpointing among them, are hidden from them), forward-mode levels and
# addresses.
_ENTRY = """\
def {name}(self, {signature}, backend=None, _frozen=None):
    if is_compiling():
        return through_node(self, ({tensors},), ({options}), backend)
    grad = grad_enabled()
    plain = not (function_modes() or dispatch_modes()) and forward_ad._current_level < 0
    level = {level}
    try:
        found = recent.get(level) if plain and not ({nested}) else None
    except (TypeError, AttributeError):
        return without_key(self, ({tensors},), ({options}), backend, _frozen)
    if found:
        given = {given}
        for check, plan in found:
            if check(*given) and not ({addresses}) & 15:
                return plan({tensors})
    if plain and {exact} and not (transforms() or tracing()):
        try:
            key = ({tensor_keys}, level)
            plan = plans.get(key)
        except (TypeError, RuntimeError):
            return without_key(self, ({tensors},), ({options}), backend, _frozen)
        fresh = plan is None
        if fresh:
            plan = resolve(self, plans, key, ({tensors},), ({options}), backend, grad, _frozen)
        remember(recent, level, ({tensors},), plan, fresh)
        return plan({tensors})
    return through_node(self, ({tensors},), ({options}), backend, _frozen)
"""
_FIRST = """\
def {name}(self, {signature}, backend=None, _frozen=None):
    if is_compiling():
        return through_node(self, ({tensors},), ({options}), backend)
    return entry_of(self)(self, {tensors}, {named}backend=backend, _frozen=_frozen)
"""
# Lazily negated views of complex numbers are contiguous too, where they have one element or are cut by `as_strided`.
# What has no memory (meta) is no CPU tensor, though its device has the same number. True equals 1 and 1.0, so the types
# of options are keys too.
_TENSOR_KEY = (
    "{n}.shape, {n}.is_contiguous() or {n}.stride(), {n}.is_neg(), {n}.dtype, "
    "address & 15 if (address := {n}.data_ptr()) else 16, {n}.get_device(), "
    "grad and {n}.requires_grad"
)


LOCALS = (*shortcut.LOCALS, "self", "plain", "level", "key", "fresh", "address")
"""Names of the entry's own: an argument of such a name would be overwritten, or would overwrite."""


def install(op: Op[Any]) -> None:
    """Give `op` its `__call__`, on a class of its own, and its torch.library node. The entry is generated when it is
    first called eagerly, since compiling all of them would be most of what importing the library costs.

    Raises:
        TilewrightError: a tensor or an option has a name that the entry needs for itself.
    """
    scope: dict[str, Any] = {
        "EXACT": EXACT,
        "is_compiling": torch.compiler.is_dynamo_compiling,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack,
        "transforms": torch._C._are_functorch_transforms_active,
        "tracing": torch._C._get_tracing_state,
        "forward_ad": torch.autograd.forward_ad,
        "grad_enabled": torch.is_grad_enabled,
        "deterministic": torch._C._get_deterministic_algorithms,
        "policy_here": policy.here,
        "epoch": evidence.epoch,
        "plans": {},
        "recent": {},
        "remember": _remember,
        "resolve": dispatch.resolve,
        "without_key": dispatch.without_key,
        "through_node": dispatch.through_node,
        "entry_of": _entry_of,
        **{one.__name__: one for one in (type, TypeError, AttributeError, RuntimeError)},
        **{f"default_{name}": value for name, value in op.options.items()},
    }
    taken = [name for name in (*op.tensors, *op.options) if name in LOCALS or name in scope]
    if taken:
        raise TilewrightError(f"op {op.name}: {', '.join(taken)} is a name of the entry's own; choose another")
    shown = {"__doc__": op.__doc__, "__module__": op.reference.__module__}
    first = _generated(
        op,
        scope,
        _FIRST.format(**_common(op), tensors=", ".join(op.tensors), named="".join(f"{n}={n}, " for n in op.options)),
    )
    op.__class__ = type(op.name, (type(op),), {"__call__": first, "__slots__": (), **shown})
    node.define(op, dispatch.run_node)


def _entry_of(op: Op[Any]) -> Callable[..., Any]:
    """The whole entry, which takes the place of the first. Two threads may make it at once without harm."""
    text = _ENTRY.format(
        **_common(op),
        **shortcut.pieces(op, {}),
        exact=" and ".join(
            f"type({n}) in EXACT" if n not in op.optional else f"({n} is None or type({n}) in EXACT)"
            for n in op.tensors
        ),
        tensor_keys=", ".join(
            f"None if {n} is None else ({_TENSOR_KEY.format(n=n)})" if n in op.optional else _TENSOR_KEY.format(n=n)
            for n in op.tensors
        ),
    )
    made = _generated(op, type(op).__call__.__globals__, text)
    type(op).__call__ = made  # type: ignore[method-assign]
    return made


def _common(op: Op[Any]) -> dict[str, str]:
    """What both entries say of the op. Its name is what Python calls them in its own errors."""
    return {
        "name": op.name,
        "signature": _signature(op),
        "options": "".join(f"{n}, " for n in op.options),
    }


def _generated(op: Op[Any], scope: dict[str, Any], text: str) -> Callable[..., Any]:
    own: dict[str, Callable[..., Any]] = {}  # an op may be called as something that its text reads
    exec(compile(text, shortcut.remembered(f"<tilewright op {op.name}>", text), "exec"), scope, own)
    return own[op.name]


def _signature(op: Op[Any]) -> str:
    """The reference's own signature as text. Defaults of options are bound by name."""
    parts = []
    starred = False
    for parameter in signature_of(op.reference).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        if parameter.name in op.options:
            optional = "" if parameter.default is parameter.empty else f"=default_{parameter.name}"
        else:
            optional = "" if parameter.default is parameter.empty else "=None"
        parts.append(parameter.name + optional)
    return ", ".join(parts if starred else [*parts, "*"])


Plan = Callable[..., Any]
Recent = dict[Any, list[tuple[Callable[..., bool], Plan]]]


def _remember(recent: Recent, level: Any, tensors: Sequence[Any], plan: Plan, fresh: bool) -> None:
    """Guard this signature, so that its next call needs no key. A new one drives out the oldest.

    Guards do not say that two arguments are one tensor, and do not see addresses: such calls keep to the table.
    """
    known = recent.get(level, [])
    given = [t for t in tensors if t is not None]
    if _guards is None or (len(known) >= RECENT and not fresh) or len({id(t) for t in given}) < len(given):
        return
    if any(t.data_ptr() % 16 or not t.data_ptr() for t in given):
        return
    if len(recent) >= dispatch.TABLE_LIMIT:
        recent.clear()
    guard = _guards(
        *given,
        dynamic_dims_sizes=[list(t.shape) for t in given],
        dynamic_dims_strides=[list(t.stride()) for t in given],
    )
    recent[level] = [(guard.check, plan), *known[: RECENT - 1]]


def _find_guards() -> Any:
    """torch's TensorGuards, where this torch has them and they do what is relied on here; else None."""
    make: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    try:
        probe, other = torch.empty(2, 3), torch.empty(3, 2)
        guard = make(probe, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
        good = guard.check(torch.empty(2, 3)) and not guard.check(other) and not guard.check(other.t())
        return make if good and not guard.check(None) else None
    except (TypeError, RuntimeError):
        return None


_guards = _find_guards()
