"""What the declaration of an op must agree on, checked when the module that declares it is imported.

A slip in a name (of a probe, an option, a gradient) would otherwise show at the first call, as a KeyError of the core.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tilewright.core.errors import TilewrightError

if TYPE_CHECKING:
    from tilewright.core.op import Gradient, Op

OPTION_TYPES = (float, int, bool, str, torch.dtype)


signature_of = functools.cache(inspect.signature)
"""Of a reference or a definition: several places ask, when an op is declared."""


def plain_type(kind: Any) -> tuple[Any, bool]:
    """The type of an option without None, and whether it may be None."""
    others = [one for one in typing.get_args(kind) if one is not type(None)]
    optional = len(others) == 1 and len(typing.get_args(kind)) == 2 and typing.get_origin(kind) is not tuple
    return (others[0], True) if optional else (kind, False)


def hints_of(reference: Callable[..., Any]) -> dict[str, Any]:
    """The reference's type hints, which tell tensors that may be None and the types of options.

    Raises:
        TilewrightError: a parameter has none.
    """
    hints = {name: _hint(text, reference) for name, text in reference.__annotations__.items()}
    bare = [name for name in signature_of(reference).parameters if name not in hints]
    if bare:
        raise _fault(reference.__name__, [f"parameter {name} has no type hint" for name in bare])
    return hints


_hints: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
"""By text and what its words mean; these are kept, so that their ids stay theirs."""


def _hint(text: Any, reference: Callable[..., Any]) -> Any:
    """A hint, which is text under `from __future__ import annotations`. Ops share most of theirs, and importing the
    library declares them all, so each is looked at once."""
    if not isinstance(text, str):
        return text
    scope = reference.__globals__
    meanings = [scope.get(word) for word in re.findall(r"\w+", text)]
    key = (text, *map(id, meanings))
    if key not in _hints:
        _hints[key] = eval(text, scope), meanings
    return _hints[key][0]


def check(op: Op[Any]) -> None:
    """Raises `TilewrightError` naming every name that the op's declaration does not know."""
    faults = list(_faults(op))
    if faults:
        raise _fault(op.name, faults)


def check_gradient(op: Op[Any], backward: Op[Any]) -> None:
    """The same for an op and the op of a gradient of it, once both are declared."""
    faults = [fault for one in op.gradients if one.op == backward.name for fault in _gradient_faults(one, backward)]
    if faults:
        raise _fault(op.name, faults)


def _gradient_faults(gradient: Gradient, backward: Op[Any]) -> Iterator[str]:
    given = {*gradient.grads.values(), *gradient.takes, *gradient.finds}
    named = [name for source in gradient.gives for name in gradient.names(source)]
    yield from _unknown("gradient.grads, gradient.takes and gradient.finds", given, backward.tensors)
    yield from _unknown("gradient.gives", named, (*backward.out, *gradient.grads.values()))
    yield from _unknown("gradient.coo", (*gradient.coo, *gradient.coo.values()), backward.out)
    yield from _unknown("gradient.only", gradient.only, [p for p in gradient.takes if p in backward.optional])
    yield from _unknown("gradient.spends", gradient.spends, backward.out)
    if gradient.spends and backward.may_skip:
        yield f"gradient.spends: {backward.name} may skip outputs, and then nothing is overwritten"
    for name in gradient.spends.values():
        if name in backward.tensors and name not in backward.optional:
            yield f"gradient.spends: {backward.name} needs {name}, which a second backward does not have"
    for name in backward.tensors:
        if name not in given and name not in backward.optional:
            yield f"gradient: {backward.name} needs {name}, which neither grads, takes nor finds gives"


def _faults(op: Op[Any]) -> Iterator[str]:
    for name, kind in op.option_types.items():
        if plain_type(kind)[0] not in OPTION_TYPES and typing.get_origin(kind) is not tuple:
            yield f"option {name} is a {kind}; takes float, int, bool, str, dtype, any or None, or a tuple of bool"
    probes = op.probes
    yield from _unknown("probes.dims", probes.dims, op.tensors)
    yield from (f"probes.dims lacks {name}" for name in op.tensors if name not in probes.dims)
    yield from probes.faults()
    yield from _unknown("probes.options", {name for chosen in probes.options for name in chosen}, op.options)
    required = [name for name, default in op.options.items() if default is inspect.Parameter.empty]
    yield from (
        f"probes.options: {dict(chosen)} lacks {name}, which has no default"
        for chosen in probes.options or ({},)
        for name in required
        if name not in chosen
    )
    yield from _unknown("probes.values", probes.values, op.tensors)
    yield from _unknown("probes.dtypes", probes.dtypes, probes.values)
    yield from _unknown("probes.by_option", probes.by_option, op.tensors)
    yield from _unknown("probes.tables", probes.tables, op.tensors)
    yield from _unknown("probes.long", probes.long, probes.sizes)
    yield from _unknown("probes.capped", probes.capped, probes.sizes)
    yield from _unknown("probes.varied", {name for sizes in probes.varied for name in sizes}, probes.sizes)
    yield from _unknown("probes.absent", {name for left in probes.absent for name in left}, op.optional)
    yield from _unknown("probes.either", probes.either, op.tensors)
    for name, saved in op.saved.items():
        known = (*op.tensors, *op.options, *op.out)
        yield from _unknown(f"saved {name}", saved.parameters, known)
    for gradient in op.gradients:
        made = (*op.tensors, *op.out, *op.saved)
        yield from _unknown("gradient.grads", gradient.grads, op.out)
        yield from _unknown("gradient.seldom", gradient.seldom, gradient.grads)
        yield from _unknown("gradient.takes", gradient.takes.values(), made)
        yield from _unknown("gradient.gives", gradient.gives, op.tensors)
        yield from _unknown("gradient.only", gradient.only.values(), op.optional)
        sources = [gradient.takes.get(param, param) for param in gradient.spends.values()]
        yield from _unknown("gradient.spends", sources, op.saved)
        for name, found in gradient.finds.items():
            known = (*made, *op.options)
            yield from _unknown(f"gradient.finds {name}", signature_of(found.define).parameters, known)
    yield from _unknown("gradient_if", op.gradient_if, [n for n, kind in op.option_types.items() if kind is bool])
    yield from (
        f"gradient_if: {name} gives gradients of other inputs than gradient does"
        for name, gradient in op.gradient_if.items()
        if op.gradient is None or set(gradient.gives) != set(op.gradient.gives)
    )


def _unknown(where: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    listed = list(known)
    return (f"{where}: {name!r} is none of {', '.join(listed)}" for name in names if name not in listed)


def _fault(name: str, faults: list[str]) -> TilewrightError:
    return TilewrightError(f"the declaration of op {name} does not agree with itself: {'; '.join(faults)}")
