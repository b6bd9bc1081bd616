"""`tilewright demo`: a real sentence encoder, its norms served by the library; see `tilewright.models.demo`."""

from __future__ import annotations


def command() -> None:
    """Run a real model with real weights, its norms replaced, verified, tuned and explained."""
    from tilewright.models import demo

    demo.run()
