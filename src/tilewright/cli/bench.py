"""`tilewright bench`: kernel time and call time of proven kernels, against the machine's limits and rivals."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewright.cli import arguments
from tilewright.cli.arguments import Backends, DeviceName, Dtypes, Json, Ops, Shapes, Workloads
from tilewright.cli.output import Bar, json_only, stderr, stdout


def command(
    ops: Ops = None,
    workload: Workloads = None,
    shape: Shapes = None,
    dtype: Dtypes = None,
    backends: Backends = "",
    passes: Annotated[str, typer.Option("--passes", help="forward, backward; both with a comma.")] = "forward,backward",
    peers: Annotated[bool, typer.Option("--peers", help="Also the rivals that are installed, interleaved.")] = False,
    all_configs: Annotated[bool, typer.Option("--all-configs", help="Every proven config of every kernel.")] = False,
    device: DeviceName = "",
    json: Json = False,
) -> None:
    """Measure ops forward and backward. A kernel whose numbers are not proven gets no time."""
    with json_only(json) as emit:
        import tilewright  # noqa: F401  declares the ops
        from tilewright.bench import report as tables
        from tilewright.bench.engine import bench
        from tilewright.bench.problems import PASSES
        from tilewright.core.errors import UnknownName

        wanted = arguments.words(passes)
        for name in wanted:
            if name not in PASSES:
                raise UnknownName("pass", name, list(PASSES))
        with Bar() as bar:
            found = bench(
                ops or (),
                workloads=workload or (),
                shapes=arguments.shapes(shape, ops),
                dtypes=arguments.dtypes(dtype),
                backends=arguments.words(backends),
                passes=wanted,
                peers=peers,
                all_configs=all_configs,
                device=device or None,
                progress=bar,
            )
        if json:
            emit(found.as_json())
        else:
            tables.render(found, stdout())
    for note in found.notes:
        stderr.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)
