"""The command line: `tilewright ops | explain | verify | bench | tune | doctor | demo`.

One thin file a command; what they show comes from the engines. This file assembles them and turns errors into exit
codes: 0 well, 1 a check failed, 2 a mistake in the call, 130 interrupted.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tilewright.cli import bench, demo, doctor, explain, ops, tune, verify
from tilewright.cli.output import stderr
from tilewright.core.errors import TilewrightError


def _with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            stderr.print("interrupted", style="yellow")
            raise typer.Exit(130) from None
        except TilewrightError as error:
            stderr.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapped


app = typer.Typer(
    name="tilewright",
    help="One logical operator, many kernels: the fastest one that is proven right on this machine, with the reasons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _module in (ops, explain, verify, bench, tune, doctor, demo):
    app.command(name=_module.__name__.rpartition(".")[2])(_with_exit_codes(_module.command))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        import tilewright

        print(tilewright.__version__)
        raise typer.Exit


class _Brief(logging.Formatter):
    """Warnings of the library without tracebacks: the message says what is wrong and where."""

    def formatException(self, ei: object) -> str:
        return ""


def _log_to_stderr() -> None:
    log = logging.getLogger("tilewright")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Brief("tilewright: %(message)s"))
        log.addHandler(handler)
        log.propagate = False


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    try:
        app(args=arguments, prog_name="tilewright")
    except KeyboardInterrupt:
        return 130
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def main() -> None:
    """The `tilewright` command."""
    _log_to_stderr()
    sys.exit(run())


__all__ = ["app", "main", "run"]
