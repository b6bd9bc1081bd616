"""What can go wrong, as types. Every message names the argument, its value and what would do.

Each error is also the built-in one that a caller would expect to catch (`ValueError`, `TypeError`, `IndexError`,
`RuntimeError`).
"""

from __future__ import annotations

import difflib


class TilewrightError(Exception):
    """The root of every error that this library raises on purpose."""


class InvalidArgument(TilewrightError, ValueError):
    """An argument that the op's contract does not allow, whichever kernel would run."""

    def __init__(self, op: str, argument: str, problem: str, remedy: str = "") -> None:
        self.op, self.argument, self.problem, self.remedy = op, argument, problem, remedy
        super().__init__(f"{op}: {argument}: {problem}" + (f"; {remedy}" if remedy else ""))


class OutOfRange(TilewrightError, IndexError):
    """An index that points outside what it indexes, found where values can be read without waiting: on a CPU."""


class UnknownName(TilewrightError, ValueError):
    """A backend, op, workload or peer that does not exist; the message lists those that do,
    and the nearest first, where one is near."""

    def __init__(self, what: str, name: object, known: list[str]) -> None:
        self.what, self.name, self.known = what, name, known
        near = difflib.get_close_matches(str(name), known, 1, 0.8)  # cuda is not meant by cudnn
        meant = f", perhaps {near[0]}" if near else ""
        super().__init__(f"unknown {what} {name!r}{meant}; known: {', '.join(known)}")


class Unsupported(TilewrightError, TypeError):
    """A way of calling (DTensor, torch.func, a tensor subclass) that has no rule here."""


class NoKernel(TilewrightError, RuntimeError):
    """No kernel of the pinned backend takes the call; the message holds every reason."""


class NotWarm(TilewrightError, RuntimeError):
    """A call class met for the first time while a CUDA graph is being captured."""


class NoGradient(TilewrightError, RuntimeError):
    """A gradient was asked for where the op has none (or a second derivative)."""


class CheckFailed(TilewrightError, RuntimeError):
    """A kernel disagreed with the reference on the caller's own call (`check="always"`)."""
