"""What commands share in speaking to people and programs: consoles, clean JSON, progress."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDTH = 160
"""Of tables, at least: a narrow terminal wraps their lines, and nothing is cut off."""
UNBOUNDED = 1 << 16
"""Of what is no terminal: a file or a program has room for any line."""
PADDED = 200
"""Columns up to which cells of such a table are padded. Where there is more to say, columns do not line up."""
stderr = Console(stderr=True)


class Piped(Console):
    """What is no terminal: a row of a table is a line, of which nothing is cut off."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(_lines(each) if isinstance(each, Table) else each for each in objects), **how)


def _lines(table: Table) -> Group:
    texts = [
        [" ".join(Text.from_markup(str(cell)).plain.splitlines()) for cell in (c.header, *c.cells)]
        for c in table.columns
    ]
    sides = [str.rjust if column.justify == "right" else str.ljust for column in table.columns]
    widths = [max(map(len, column)) for column in texts]
    widths[-1] *= sides[-1] is str.rjust
    while sum(widths) + 2 * len(widths) > PADDED:
        widths[widths.index(max(widths))] -= 1
    rows = [map(lambda side, *how: side(*how), sides, row, widths) for row in zip(*texts, strict=True)]
    title = [str(table.title)] if table.title else []
    return Group(*(Text(line) for line in (*title, *("  ".join(row).rstrip() for row in rows))))


def stdout() -> Console:
    """Made when used, so that it writes to what `sys.stdout` is then."""
    console = Console()
    return Console(width=max(console.width, WIDTH)) if console.is_terminal else Piped(width=UNBOUNDED)


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
    """A progress bar on standard error, for people, that appears when something takes over two seconds.

    Call it as the engines do: (what, done, total).
    """

    def __init__(self, delay: float = 2.0) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self.task = self.progress.add_task("", total=None)
        self.timer = threading.Timer(delay, self.progress.start)
        self.timer.daemon = True

    def __call__(self, what: str, done: int, total: int) -> None:
        self.progress.update(self.task, description=what, completed=done, total=total)

    def say(self, line: str, style: str = "") -> None:
        """A line that stays, above the bar where there is one. An empty one is not printed."""
        if line:
            self.progress.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Bar:
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        self.timer.join()
        self.progress.stop()
