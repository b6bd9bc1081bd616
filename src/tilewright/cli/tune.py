"""`tilewright tune`: times proven kernels on this machine, so that selection chooses by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from tilewright.cli import arguments
from tilewright.cli.arguments import Backends, DeviceName, Dtypes, Json, Ops, Shapes, Workloads
from tilewright.cli.output import Bar, json_only, stderr, stdout


def command(
    ops: Ops = None,
    workload: Workloads = None,
    shape: Shapes = None,
    dtype: Dtypes = None,
    backends: Backends = "",
    device: DeviceName = "",
    force: Annotated[bool, typer.Option("--force", help="Measure again what is already known here.")] = False,
    json: Json = False,
) -> None:
    """Time all proven kernels of ops and their gradients, in processes that may die, and keep the times.

    A run that was interrupted goes on where it ended.
    """
    with json_only(json) as emit:
        import tilewright  # noqa: F401  declares the ops
        from tilewright.tune.engine import tune

        chosen = _with_gradients(ops) if ops else None
        shapes = arguments.shapes(shape, chosen) or None
        dtypes = arguments.dtypes(dtype) or None
        calls = _of_workloads(chosen, workload, dtypes, device) if workload and not shapes else None
        with Bar() as bar:
            report = tune(
                chosen, shapes=shapes, dtypes=dtypes, calls=calls, backends=arguments.words(backends) or None,
                device=device or None, force=force, progress=lambda done, total, what: bar(what, done, total),
            )  # fmt: skip
        if json:
            emit(report.to_json())
        else:
            _print(report)
    for failure in report.failures:
        text = f"{failure.kernel} {failure.config}: {failure.stage}: {failure.kind}: {failure.reason}"
        stderr.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _with_gradients(names: Sequence[str]) -> list[str]:
    from tilewright.core import registry

    found: dict[str, None] = {}
    for name in names:
        op = registry.op(name)
        found[name] = None
        found |= dict.fromkeys(gradient.op for gradient in op.gradients)
    return list(found)


def _of_workloads(names: Sequence[str] | None, workloads: Sequence[str], dtypes: Any, device: str) -> list[Any]:
    """The calls of those workloads whose names contain one of `workloads`."""
    from tilewright.core import registry
    from tilewright.core.device import default_device, device_of, torch_device
    from tilewright.core.errors import UnknownName
    from tilewright.tune.classes import subjects

    where = torch_device(device) if device else default_device()
    chosen = [registry.op(n) for n in names] if names is not None else registry.ops()
    every = subjects(chosen, device_of(where.type, where.index), None, dtypes)
    calls = [s.call for s in every if any(w.lower() in s.workload.lower() for w in workloads)]
    if not calls:
        raise UnknownName("workload", workloads[0], sorted({s.workload for s in every}))
    return calls


def _print(report: Any) -> None:

    table = Table(title=f"tuned on {report.device}", title_justify="left", box=None, pad_edge=False)
    for name in ("op", "shape", "dtype", "eager takes", "call us", "captured takes", "kernel us", "pairs timed"):
        table.add_column(name, no_wrap=True, justify="right" if name.endswith("us") else "left")
    for c in report.classes:
        cells = [f"{c.op}  {c.variant}".rstrip(), "x".join(map(str, c.shape)), c.dtype.removeprefix("torch.")]
        for metric in ("call_us", "kernel_us"):
            choice = c.chosen.get(metric)
            if choice is None:
                cells += ["-", ""]
                continue
            took = next((t for t in c.times if (t.kernel, t.config) == (choice.kernel, choice.config)), None)
            name = choice.kernel.partition("/")[2]
            cells += [f"{name} {choice.config}".strip(), f"{getattr(took, metric):.1f}" if took else ""]
        cells.append(f"{c.timed} now" if c.timed else f"{c.kept} before")
        table.add_row(*cells)
    stdout().print(table)
    if report.rough:
        stdout().print(report.rough)
