"""What commands share in speaking to people and programs: consoles, clean JSON, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH = 160
"""Of tables that go into a file or a pipe."""
stderr = Console(stderr=True)


def stdout() -> Console:
    """Made when used, so that it writes to what `sys.stdout` is then."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def json_only(wanted: bool) -> Iterator[Callable[[Any], None]]:
    """Yields how to print the result as JSON. While `wanted`, whatever else is written to standard output, by other
    libraries and their subprocesses too, goes to standard error, so that the JSON stands alone."""
    if not wanted:
        yield lambda value: print(json.dumps(value, indent=1))
        return
    sys.stdout.flush()
    result: list[str] = []
    try:
        own = sys.stdout.fileno() == 1
    except (OSError, ValueError):  # captured by a test
        own = False
    kept = os.dup(1) if own else -1
    if own:
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield lambda value: result.append(json.dumps(value, indent=1))
    finally:
        if own:
            os.dup2(kept, 1)
            os.close(kept)
    for text in result:
        print(text, flush=True)


class Bar:
    """A progress bar on standard error that appears only when something takes over two seconds.

    Call it as the engines do: (what, done, total).
    """

    def __init__(self, delay: float = 2.0) -> None:
        self.start = time.monotonic() + delay
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=stderr, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("", total=None)
        self.shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        self.progress.update(self.task, description=what, completed=done, total=total)
        if not self.shown and (time.monotonic() >= self.start or what):
            self.progress.start()
            self.shown = True

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.progress.stop()
