"""What the user prefers: `tw.use(...)` and the environment. A preference is not a pin: it falls back, and says so.

The policy is a contextvar: it covers the current context, asyncio included. New threads start from the environment's
defaults; backward uses the policy that forward stored, since autograd runs it in threads of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tilewright.core import registry
from tilewright.core.errors import InvalidArgument, UnknownName
from tilewright.core.op import Op

Check = Literal["first", "always", "never"]


@dataclass(frozen=True)
class Rule:
    """One `tw.use` block. None leaves a thing as it was; `ops` None means every op."""

    backend: str | None = None
    ops: frozenset[str] | None = None
    check: Check | None = None
    strict: bool | None = None

    def covers(self, op: str) -> bool:
        """Whether it speaks of `op`; a rule for an op speaks of its backward too."""
        return self.ops is None or op in self.ops or op.removesuffix("_backward") in self.ops


@dataclass(frozen=True, eq=False)
class Policy:
    """The rules in force, innermost last. Compared by identity, so that it is cheap in a plan's key."""

    rules: tuple[Rule, ...] = ()

    def backend(self, op: str) -> str | None:
        return next((r.backend for r in reversed(self.rules) if r.backend is not None and r.covers(op)), None)

    def check(self, op: str) -> Check:
        return next((r.check for r in reversed(self.rules) if r.check is not None and r.covers(op)), "first")

    def strict(self, op: str) -> bool:
        return next((r.strict for r in reversed(self.rules) if r.strict is not None and r.covers(op)), False)


def _from_environment() -> Policy:
    backend = os.environ.get("TILEWRIGHT_BACKEND") or None
    check = os.environ.get("TILEWRIGHT_CHECK") or None
    return Policy((_rule("TILEWRIGHT_", backend, None, check, None),))


def _rule(
    source: str, backend: str | None, ops: Sequence[str | Op[Any]] | None, check: str | None, strict: bool | None
) -> Rule:
    if backend is not None and backend not in registry.backend_names():
        raise UnknownName("backend", backend, registry.backend_names())
    if check is not None and check not in get_args(Check):
        raise InvalidArgument(source, "check", f"{check!r}", f"one of {', '.join(get_args(Check))}")
    if isinstance(ops, str):
        raise InvalidArgument(source, "ops", f"the string {ops!r}", f"a list: [{ops!r}]")
    names = None if ops is None else frozenset(o.name if isinstance(o, Op) else registry.op(o).name for o in ops)
    return Rule(backend, names, check, strict)  # type: ignore[arg-type]  # checked above


_environment: Policy | None = None
_current: ContextVar[Policy | None] = ContextVar("tilewright_policy", default=None)


def current() -> Policy:
    """The policy in force here. The environment is read once."""
    global _environment
    policy = _current.get()
    if policy is None:
        if _environment is None:
            _environment = _from_environment()
        policy = _environment
    return policy


@contextmanager
def use(
    backend: str | None = None,
    *,
    ops: Sequence[str | Op[Any]] | None = None,
    check: Check | None = None,
    strict: bool | None = None,
) -> Iterator[None]:
    """Prefer a backend, or check kernels more or less, for a block of code.

    Args:
        backend: preferred where it fits; a fallback is logged once a call class.
        ops: names or ops that the block speaks of (their backwards included); all by default.
        check: "first" (a kernel needs evidence, gathered on first use), "always" (every call is also compared with
            the reference), "never".
        strict: make a fallback from the preferred backend an error.

    Raises:
        UnknownName: for a backend or op that does not exist.
    """
    token = _current.set(Policy((*current().rules, _rule("use", backend, ops, check, strict))))
    try:
        yield
    finally:
        _current.reset(token)
