"""`tilewright ops`: every op, its kernels, and whether they can run here."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tilewright.cli.arguments import Json
from tilewright.cli.output import json_only, stdout


def command(json: Json = False) -> None:
    """List every op with its kernels: available, or why not."""
    with json_only(json) as emit:
        from tilewright.core.device import default_device, device_of

        where = default_device()
        device = device_of(where.type, where.index)
        found = [_facts(op, device) for op in _every_op()]
        if json:
            emit(found)
            return
    table = Table(title=f"ops on {device}", title_justify="left", box=None, pad_edge=False)
    for name in ("op", "gradient", "kernel", "version", "here"):
        table.add_column(name, no_wrap=name != "here")
    for op in found:
        for place, kernel in enumerate(op["kernels"]):
            here = "[green]yes[/green]" if kernel["available"] else "; ".join(kernel["reasons"]).replace("[", r"\[")
            forms = ", ".join(filter(None, (op["op"], op["in_place"])))
            head = (forms, op["gradient"] or "none") if place == 0 else ("", "")
            table.add_row(*head, kernel["kernel"].partition("/")[2], kernel["version"], here)
    stdout().print(table)


def _every_op() -> list[Any]:
    import tilewright  # noqa: F401  declares the ops
    from tilewright.core import registry

    return registry.ops()


def _facts(op: Any, device: Any) -> dict[str, Any]:
    from tilewright.core import registry

    kernels = []
    for kernel in registry.kernels_of(op.name):
        reasons = _reasons(kernel, device)
        backend = registry.backend(kernel.backend)
        kernels.append(
            {
                "kernel": kernel.name,
                "backend": kernel.backend,
                "version": _version(kernel, backend),
                "available": not reasons,
                "reasons": reasons,
            }
        )
    gradient = None if op.gradient is None else op.gradient.op
    form = op.in_place.name if op.into and op.in_place.listed else None
    return {"op": op.name, "family": op.family, "gradient": gradient, "in_place": form, "kernels": kernels}


def _version(kernel: Any, backend: Any) -> str:
    """The kernel's version: the digest of its source, or the backend's where the op's definition is the source."""
    return str(kernel.digest if kernel.source else backend.version())


def _reasons(kernel: Any, device: Any) -> list[str]:
    """What keeps the kernel from this machine, whatever the call."""
    from tilewright.core import registry

    backend = registry.backend(kernel.backend)
    missing = backend.missing(device.kind)
    if missing is not None:
        return [str(missing)]
    targets = kernel.capability.devices
    if targets and not backend.emulates(device) and not any(t.accepts(device) for t in targets):
        return [f"device: {device.arch} is not supported; needs {' or '.join(map(str, targets))}"]
    return []
