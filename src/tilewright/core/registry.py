"""The table of ops, kernels and backends, and how third parties add theirs.

Registration is data only: nothing heavy is imported, and the library's own families not before one of their names is
asked for. Packages add kernels, and ops in the modules that this imports, through the entry-point group
`tilewright.kernels`; one that fails to load is kept in `load_failures` and shown, never raised.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tilewright.core import declaration
from tilewright.core.backend import Backend
from tilewright.core.capability import Capability
from tilewright.core.errors import TilewrightError, UnknownName
from tilewright.core.kernel import Kernel
from tilewright.core.op import Gradient, Op

ENTRY_POINTS = "tilewright.kernels"

_ops: dict[str, Op[Any]] = {}
_forms: dict[str, Op[Any]] = {}
"""In-place forms, by the names of their ops."""
_kernels: dict[str, list[Kernel]] = {}
_backends: dict[str, str] = {}
_families: list[str] = []
"""Modules that declare ops when they are imported."""
_importing = threading.RLock()
"""Held while one is: what another thread has begun to declare, it has not finished."""
_listeners: list[Callable[[], None]] = []
_lock = threading.RLock()
_loading = threading.RLock()
"""Held while plug-ins are imported, and never asked for under `_lock`: a thread that imports one by hand holds its
import lock and adds what it declares."""
_plugins_begun = _plugins_loaded = False


@dataclass(frozen=True, eq=False, repr=False)
class LoadFailure:
    """A plug-in that could not be loaded, and why."""

    name: str
    error: str
    trace: str


load_failures: list[LoadFailure] = []


def add_families(modules: Iterable[str]) -> None:
    """Modules that declare ops and export them by `__all__`, to be imported when a name is looked for."""
    _families.extend(module for module in modules if module not in _families)


def export(name: str) -> Any:
    """What a family exports by this name, or None. Families are imported, in order, until one does."""
    with _importing:
        for module in map(importlib.import_module, _families):
            if name in module.__all__:
                return getattr(module, name)
    return None


def exports() -> list[str]:
    """All that families export."""
    with _importing:
        return [name for module in map(importlib.import_module, _families) for name in module.__all__]


def load_families(enough: Callable[[], bool] = lambda: False) -> None:
    """Import the families, in order, until it is enough."""
    with _importing:
        for module in _families:
            if enough():
                return
            importlib.import_module(module)


def check_op(op: Op[Any]) -> None:
    """Raises `TilewrightError` where the op cannot be added to those that are declared."""
    if op.name in _ops or op.name in [form.name for form in _forms.values()]:
        raise TilewrightError(f"op {op.name!r} is declared twice")
    known = {**_ops, op.name: op}
    for one in known.values():
        for gradient in one.gradients:
            if gradient.op in known and op.name in (one.name, gradient.op):
                declaration.check_gradient(one, known[gradient.op])


def add_op(op: Op[Any]) -> None:
    with _lock:
        check_op(op)
        _ops[op.name] = op
        _kernels[op.name] = [
            # both run the definition, so their digest is that of the module where it stands
            Kernel(
                op.name,
                name,
                f"{op.reference.__module__}:{op.name}",
                Capability(deterministic=same_bits, in_place=True),
            )
            for name, same_bits in (("reference", True), ("inductor", not op.scatters))
        ]


def check_form(form: Op[Any]) -> None:
    """Raises `TilewrightError` where the in-place form cannot be added."""
    if form.functional.name in _forms or form.name in _ops:
        raise TilewrightError(f"op {form.name!r} is declared twice")


def add_form(form: Op[Any]) -> None:
    with _lock:
        check_form(form)
        _forms[form.functional.name] = form


def form_of(name: str) -> Op[Any]:
    """The in-place form of the op of this name."""
    if name not in _forms:
        raise UnknownName("in-place form of", name, sorted(_forms))
    return _forms[name]


def forms() -> list[Op[Any]]:
    """Every in-place form that is listed, those of plug-ins included."""
    load_families()
    _load_plugins()
    return [form for form in _forms.values() if getattr(form, "listed", True)]


def find(name: str) -> Op[Any]:
    """An op or, by its own name, an in-place form."""
    load_families(lambda: name in _ops or name in [form.name for form in _forms.values()])
    if name not in _ops:
        _load_plugins()
    return next((form for form in _forms.values() if form.name == name), None) or op(name)


def add_kernels(kernels: Iterable[Kernel]) -> None:
    """Add declarations of kernels. Their op and backend must exist."""
    kernels = list(kernels)
    for kernel in kernels:
        op(kernel.op)
    with _lock:
        for kernel in kernels:  # all or none
            if kernel.backend not in _backends:
                raise UnknownName("backend", kernel.backend, backend_names())
            if kernel.name in [k.name for k in (*_kernels[kernel.op], *kernels) if k is not kernel]:
                raise TilewrightError(f"kernel {kernel.name} is declared twice; a label tells them apart")
        for kernel in kernels:
            _kernels[kernel.op].append(kernel)
    for changed in _listeners:
        changed()


def remove_kernel(kernel: Kernel) -> None:
    """Take a kernel out again (tests, notebooks)."""
    with _lock:
        _kernels[kernel.op].remove(kernel)
    for changed in _listeners:
        changed()


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def add_backend(name: str, place: str) -> None:
    """`place` is "module:class"; loaded when first asked for. The order of adding is the order of preference."""
    _backends[name] = place


@cache
def backend(name: str) -> Backend:
    if name not in _backends:
        raise UnknownName("backend", name, backend_names())
    module, cls = _backends[name].split(":")
    made: Backend = getattr(importlib.import_module(module), cls)()
    return made


def backend_names() -> list[str]:
    return list(_backends)


def check_pin(name: str, op: Op[Any] | None = None, what: str = "backend") -> None:
    """Whether `backend=` may have this value: a backend's name, or `backend/label` of a kernel of `op`, by default any.
    A gradient takes what its op does, whose pin it is given.

    Raises:
        UnknownName: with the names that would do.
    """
    if name not in backend_names():
        own = None if op is None else op.functional.name
        owners = [o.name for o in ops()] if own is None else [own, *(o.name for o in served_by(own))]
        labelled = list(dict.fromkeys(kernel.pin for owner in owners for kernel in kernels_of(owner) if kernel.label))
        if name not in labelled:
            raise UnknownName(what, name, [*_backends, *labelled])


def op(name: str) -> Op[Any]:
    load_families(lambda: name in _ops)
    if name not in _ops:
        _load_plugins()  # a plug-in may declare it
    if name not in _ops:
        raise UnknownName("op", name, sorted(_ops))
    return _ops[name]


def ops() -> list[Op[Any]]:
    """Every op, those of plug-ins included, the library's own first."""
    load_families()
    _load_plugins()
    return list(_ops.values())


def served_by(gradient: str) -> list[Op[Any]]:
    """The ops that name `gradient` as a gradient of theirs; none for an op that is not one."""
    return [o for o in list(_ops.values()) if any(one.op == gradient for one in o.gradients)]


def gradients_with(name: str) -> list[Gradient]:
    """The gradients of or by the op of this name, as far as both ops are declared."""
    known = [(o.name, one) for o in list(_ops.values()) for one in o.gradients if one.op in _ops]
    return [one for owner, one in known if name in (owner, one.op)]


def kernels_of(op_name: str) -> list[Kernel]:
    """Every kernel of an op, plug-ins included, the library's own first."""
    _load_plugins()
    return list(_kernels[op(op_name).name])


def _load_plugins() -> None:
    global _plugins_begun, _plugins_loaded
    if _plugins_loaded:
        return
    with _loading:  # other threads wait for what is being loaded
        if _plugins_begun:
            return  # this thread is at it: a plug-in may call an op
        _plugins_begun = True
        import importlib.metadata

        entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if entries:
            load_families()  # the library's own names come first
        for entry in entries:
            try:
                found = entry.load()
                add_kernels(found() if callable(found) else found)
            except Exception as error:  # noqa: BLE001  a stranger's import may raise anything; it is kept and shown
                load_failures.append(
                    LoadFailure(entry.name, f"{type(error).__name__}: {error}", traceback.format_exc())
                )
        _plugins_loaded = True
