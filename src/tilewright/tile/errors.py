"""What the compiler says where it cannot go on. Each error names the author's line, not the compiler's."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

_OWN = (str(Path(__file__).parent), contextlib.__file__, "<")


@dataclass(frozen=True)
class Line:
    """A line of the author's source."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


def author_line() -> Line:
    """The innermost line on the stack that is not the compiler's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


class TileError(Exception):
    """Something is wrong with a kernel. `line` is the author's line, where there is one."""

    def __init__(self, problem: str, line: Line | None = None) -> None:
        self.problem, self.line = problem, line
        super().__init__(problem if line is None else f"{line}: {problem}")


class TraceError(TileError):
    """The kernel's Python does what tiles cannot."""

    def __init__(self, problem: str, line: Line | None = None) -> None:
        super().__init__(problem, line or author_line())


class VerifyError(TileError):
    """A program breaks a rule of its form; after tracing this is the author's mistake, later the compiler's."""


class LowerError(TileError):
    """This target cannot express what the program asks for."""


class RunError(TileError):
    """An interpreter saw a program do what it must not: read what nobody wrote, or beyond a tensor."""


class RaceError(RunError):
    """Threads of one instance touch the same memory, one of them writing, and no barrier orders them; or a barrier that
    not all of them reach."""


class CompilerError(TileError):
    """No C++ compiler, or it refused the generated source. `log` is what it said."""

    def __init__(self, problem: str, log: str = "") -> None:
        self.log = log
        super().__init__(problem + (f"\n{log}" if log else ""))
