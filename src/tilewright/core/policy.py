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
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from tilewright.core import registry
from tilewright.core.errors import InvalidArgument
from tilewright.core.op import Op

Check = Literal["first", "always", "never"]
ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Rule:
    """One `tw.use` block. None leaves a thing as it was; `ops` None means every op."""

    backend: str | None = None
    ops: frozenset[str] | None = None
    check: Check | None = None
    strict: bool | None = None

    def covers(self, op: str) -> bool:
        return self.ops is None or op in self.ops


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
    return _policy((_rule(ENVIRONMENT, backend, None, check, None),))


@lru_cache(maxsize=1024)
def _policy(rules: tuple[Rule, ...]) -> Policy:
    """One object for equal rules, so that a block entered again finds its plans again."""
    return Policy(rules)


def _rule(
    source: str, backend: str | None, ops: Sequence[str | Op[Any]] | None, check: str | None, strict: bool | None
) -> Rule:
    if backend is not None:
        registry.check_pin(backend, what="backend in TILEWRIGHT_BACKEND," if source == ENVIRONMENT else "backend")
    if check is not None and check not in get_args(Check):
        name = "TILEWRIGHT_CHECK" if source == ENVIRONMENT else "check"
        raise InvalidArgument(source, name, f"{check!r}", f"one of {', '.join(get_args(Check))}")
    if isinstance(ops, str):
        raise InvalidArgument(source, "ops", f"the string {ops!r}", f"a list: [{ops!r}]")
    if ops is None:
        return Rule(backend, None, check, strict)  # type: ignore[arg-type]  # checked above
    chosen = [(o if isinstance(o, Op) else registry.find(o)).functional for o in ops]
    # a rule for an op speaks of its in-place form and its backward too
    names = {o.name for o in chosen} | {gradient.op for o in chosen for gradient in o.gradients}
    return Rule(backend, frozenset(names), check, strict)  # type: ignore[arg-type]


Frozen = tuple[Policy, bool]
"""Policy and determinism as forward found them; backward keeps to them."""
_environment: Policy | None = None
_current: ContextVar[Policy | None] = ContextVar("tilewright_policy", default=None)
_deterministic: ContextVar[bool | None] = ContextVar("tilewright_deterministic", default=None)
"""Set where a backward goes through its node; None: torch's own switch says."""
here = _current.get
"""The policy that `use` has set in this context; None: the environment's. For keys: cheaper than `current`."""


def current() -> Policy:
    """The policy in force here. The environment is read once."""
    global _environment
    policy = _current.get()
    if policy is None:
        if _environment is None:
            _environment = _from_environment()
        policy = _environment
    return policy


def now() -> Frozen:
    """What a call through the node keeps to: what is in force here, or what forward found."""
    asked = _deterministic.get()
    return current(), torch.are_deterministic_algorithms_enabled() if asked is None else asked


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
        backend: preferred where it fits; a fallback is logged once a call class. "triton/hopper" is the kernel of that
            label, for an op that has none the backend.
        ops: names or ops that the block speaks of (their backwards included); all by default.
        check: "first" (a kernel needs evidence, gathered on first use), "always" (every call is also compared with
            the reference), "never".
        strict: make a fallback from the preferred backend an error.

    Raises:
        UnknownName: for a backend or op that does not exist.
    """
    token = _current.set(_policy((*current().rules, _rule("use", backend, ops, check, strict))))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def restored(frozen: Frozen) -> Iterator[None]:
    """What forward found, for its backward."""
    policy, deterministic = _current.set(frozen[0]), _deterministic.set(frozen[1])
    try:
        yield
    finally:
        _current.reset(policy)
        _deterministic.reset(deterministic)
