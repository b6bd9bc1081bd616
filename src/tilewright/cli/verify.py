"""`tilewright verify`: the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tilewright.cli import arguments
from tilewright.cli.arguments import Backends, DeviceName, Dtypes, Json, Ops
from tilewright.cli.output import Bar, json_only, stderr, stdout

MOST_REASONS = 20


def command(
    ops: Ops = None,
    backends: Backends = "",
    device: DeviceName = "",
    dtype: Dtypes = None,
    size: Annotated[str, typer.Option("--size", help="tiny, small or full; by default what the device bears.")] = "",
    all_configs: Annotated[bool, typer.Option("--all-configs", help="Every config, not the first guess.")] = False,
    json: Json = False,
) -> None:
    """Check every kernel against its op's definition, over workloads and hostile inputs. Exit 1 on any failure."""
    with json_only(json) as emit:
        import tilewright  # noqa: F401  declares the ops
        from tilewright.verify import cases, suite

        dtypes = arguments.dtypes(dtype) or cases.DTYPES
        with Bar() as bar:
            report = suite.verify(
                ops or (), arguments.words(backends), device or None, dtypes=dtypes, size=size or None,
                all_configs=all_configs, progress=bar, told=lambda result: bar.say(*_line(result)),
            )  # fmt: skip
        if json:
            emit(report.as_json())
        else:
            _print(report)
    if report.failed:
        raise typer.Exit(1)


def _line(result: Any) -> tuple[str, str]:
    """What to say as a kernel is done, and its style; "" of one that did not run, which takes no time."""
    ran = result.passed + result.failed
    text = f"{result.kernel} {result.dtype}: {result.passed} of {ran} passed" if ran else ""
    return text, "red" if result.failed else "dim"


def _print(report: Any) -> None:
    table = Table(title=f"conformance on {report.device}", title_justify="left", box=None, pad_edge=False)
    for name in ("op", "kernel", "dtype", "passed", "not run", "largest error (ulp)"):
        table.add_column(name, no_wrap=True)
    for r in report.results:
        ran = r.passed + r.failed
        passed = f"{r.passed}/{ran}" if ran else "-"
        style = "red" if r.failed else "green" if ran else "dim"
        error = f"{r.max_error:.3g} of {r.tolerance:.3g}" if ran else ""
        missing = f"{len(r.not_run)}" if r.not_run else ""
        table.add_row(r.op, r.kernel.partition("/")[2], r.dtype, f"[{style}]{passed}[/{style}]", missing, error)
    stdout().print(table)
    _print_not_run(report.not_run())
    for r in report.results:
        for failure in r.failures:
            text = f"{r.kernel} {r.dtype} {failure['config']}: {failure['case']}: {failure['problem']}"
            script = f"\n  reproduce: {failure['script']}" if failure.get("script") else ""
            stderr.print(text + script, style="red", markup=False, highlight=False, soft_wrap=True)


def _print_not_run(reasons: Sequence[Any]) -> None:
    """Each reason on a line: how many cases, why, of which kernel, and one of them."""
    if not reasons:
        return
    table = Table(title="not run", title_justify="left", box=None, pad_edge=False, title_style="not italic")
    table.add_column("cases", justify="right", no_wrap=True)
    for name in ("why", "kernel", "for example"):
        table.add_column(name)
    for one in reasons[:MOST_REASONS]:
        table.add_row(str(one.cases), *map(escape, (one.reason, one.kernel, one.example)))
    stdout().print("", table)
    if rest := reasons[MOST_REASONS:]:
        cases = sum(one.cases for one in rest)
        stdout().print(f"and {cases} cases for {len(rest)} other reasons: --json has them all", highlight=False)
