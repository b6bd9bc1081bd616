"""`tilewright demo`: a real sentence encoder served by the library; see `tilewright.models.demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewright.cli.arguments import DeviceName, Json


def command(
    device: DeviceName = "",
    json: Json = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Time the layers as torch.compile makes them, too.")
    ] = False,
) -> None:
    """Run a real model with real weights, its norms and linear layers replaced, verified, tuned and explained."""
    from tilewright.models import demo

    raise typer.Exit(demo.run(device or None, json, compile))
