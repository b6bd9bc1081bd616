"""`tilewright demo`: a real sentence encoder, its norms served by the library; see `tilewright.models.demo`."""

from __future__ import annotations

import typer

from tilewright.cli.arguments import DeviceName, Json


def command(device: DeviceName = "", json: Json = False) -> None:
    """Run a real model with real weights, its norms replaced, verified, tuned and explained."""
    from tilewright.models import demo

    raise typer.Exit(demo.run(device or None, json))
