"""A benchmark's report as tables for people. The JSON is `Report.as_json`; what is measured is in `engine.py`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tilewright.bench.results import Report, Row

NO_CLOCK = (
    "function us: a CPU has no clock of kernels, so this is the host's time of the kernel's function alone. It is "
    "measured apart from the whole call, and may exceed it by noise."
)


def render(report: Report, console: Console) -> None:
    """One table a problem, after a line on the machine."""
    rates = f"copy {report.copy_tb_s:.3g} TB/s, bf16 product {report.matmul_tflops:.3g} TFLOP/s"
    versions = "  ".join(f"{name} {version}" for name, version in report.software.items())
    console.print(f"{report.device['name']} ({report.device['arch']})   {rates}", highlight=False)
    console.print(versions, style="dim", highlight=False)
    clock = "kernel us" if report.kernel_clock else "function us"
    for title, rows in _groups(report.results):
        console.print()
        console.print(_table(title, rows, clock))
    if not report.kernel_clock:
        console.print(NO_CLOCK, style="dim", highlight=False)


def _groups(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        shape = "x".join(map(str, row.shape))
        title = f"{row.op} {row.pass_name} {shape} {row.dtype}" + (f"   {row.workload}" if row.workload else "")
        found.setdefault(title, []).append(row)
    yield from found.items()


def _table(title: str, rows: list[Row], clock: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    table.add_column("cache")
    for name in (clock, "call us", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("vs best peer (95 %)", no_wrap=True)
    table.add_column("evidence")
    for row in rows:
        name = f"{row.kernel.partition('/')[2]}  {row.config}".rstrip()
        if row.kernel_us is None or row.iqr_us is None:
            table.add_row(name, "", "", "", "", "", "[red]no passing evidence: no time[/red]")
            continue
        peer = ""
        if row.peer and row.peer_us is not None and row.ratio_ci is not None:
            low, high = row.ratio_ci
            peer = f"{row.peer} {row.peer_us:.1f} us  {row.peer_us / row.kernel_us:.2f}x [{low:.2f}, {high:.2f}]"
            peer = peer.replace("[", r"\[")
        table.add_row(
            name,
            row.cache,
            f"{row.kernel_us:.1f} ±{row.iqr_us:.1f}",
            "" if row.call_us is None else f"{row.call_us:.1f}",
            "" if row.sol is None else f"{row.sol:.2f}",
            peer,
            "[green]the definition[/green]" if row.backend == "reference" else "[green]proven[/green]",
        )
    return table
