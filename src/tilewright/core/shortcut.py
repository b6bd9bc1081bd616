"""How a plan is found by guards, as text, and the function made of it that computes a gradient when autograd asks.

An op's entry (`entry.py`) and a gradient's shortcut look in one table under the same keys. The shortcut spares what the
forward knows already: where each tensor comes from, options, policy and backend. It serves what has been met before;
all else it leaves to `Backward.__call__`, which calls the entry.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilewright.core.gradient import Backward
from tilewright.core.op import Op

Shortcut = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
"""Called with the upstream gradients and what was kept."""

_SHORTCUT = """\
def make(_rest, backend, _frozen{options}):
    def _gradient(_grads, _kept):
        grad = grad_enabled()
        if not (grad or is_compiling() or function_modes() or dispatch_modes()) and forward_ad._current_level < 0:
            {sources}
            found = recent.get({level})
            if found{upstream} and not ({nested}):
                given = {given}
                for check, plan in found:
                    if check(*given) and not ({addresses}) & 15:
                        made = plan({tensors})
                        return {results}
        return _rest(_grads, _kept)
    return _gradient
"""
LOCALS = (
    "_gradient", "_grads", "_kept", "_rest", "backend", "_frozen", "grad", "found", "given", "check", "plan", "made",
)  # fmt: skip
"""Names of its own: an argument of such a name would be overwritten, or would overwrite."""


def pieces(op: Op[Any], there: Mapping[str, bool]) -> dict[str, str]:
    """Expressions of the op's arguments by name: what plans are known under, and what guards are asked.

    `there`: of tensors that may be absent, whether they are, where that is known already.
    """
    unknown = [n for n in op.tensors if n not in there and n in op.optional]
    present = [n for n in op.tensors if there.get(n, True)]
    absent = "".join(f"{n} is None, " for n in op.tensors if n in op.optional)
    options = "".join(f"{n}, {n}.__class__, " for n in op.options)
    given = f"({', '.join(present)},)"
    if unknown:
        whole = " and ".join(f"{n} is not None" for n in unknown)
        given = f"{given} if {whole} else [t for t in {given} if t is not None]"
    return {
        "tensors": ", ".join(op.tensors),
        "level": f"({absent}{options}backend, grad, _frozen or (policy_here(), deterministic()), epoch[0])",
        "given": given,
        # Guards ask for sizes, which ends the process where a nested tensor has none.
        "nested": " or ".join(
            f"{n} is not None and {n}.is_nested" if n in unknown else f"{n}.is_nested" for n in present
        ),
        "addresses": " | ".join(
            f"(0 if {n} is None else {n}.data_ptr())" if n in unknown else f"{n}.data_ptr()" for n in present
        ),
    }


def shortcut(plan: Backward, needs: tuple[bool, ...], leading: int) -> Shortcut:
    """What an autograd function does in backward whose inputs are `leading` others and then the op's tensors. `needs`
    says which of all want a gradient."""
    wanted, nothing = needs[leading:], (None,) * leading

    def rest(grads: Sequence[Any], kept: Sequence[Any]) -> tuple[Any, ...]:
        return *nothing, *plan(grads, kept, wanted, False)

    op, places = plan.backward, dict(zip(plan.backward.tensors, plan.places, strict=True))
    options, computes, taken = plan.way(wanted)
    if not computes or plan.spent or plan.sparse or plan.gradient.finds:
        return rest
    upstream = [
        n for n, place in places.items() if 0 <= place < plan.outputs and plan.there.get(n, n not in op.optional)
    ]
    text = _SHORTCUT.format(
        **pieces(op, plan.there),
        options="".join(f", {n}" for n in op.options),
        sources="; ".join(f"{n} = {_source(plan, place)}" for n, place in places.items()),
        upstream="".join(f" and {n} is not None" for n in upstream),
        results=f"({', '.join([*map(str, nothing), *(_result(plan, place) for place in taken)])},)",
    )
    return _maker(op, text)(rest, plan.backend, plan.frozen, **options)  # type: ignore[no-any-return]


def _source(plan: Backward, place: int) -> str:
    """A tensor of the backward op, by its place among (upstream gradients, kept tensors); -1: it is absent."""
    if place < 0:
        return "None"
    return f"_grads[{place}]" if place < plan.outputs else f"_kept[{place - plan.outputs}]"


def _result(plan: Backward, place: int) -> str:
    """The gradient of an input, by its place among (results of the backward op, upstream gradients)."""
    if place < 0:
        return "None"
    if place >= plan.made:
        return f"_grads[{place - plan.made}]"
    return "made" if plan.backward.single else f"made[{place}]"


@lru_cache(maxsize=1024)
def _maker(op: Op[Any], text: str) -> Callable[..., Any]:
    """`make`, which reads what the op's entry reads; compiled once for all calls whose text is the same."""
    own: dict[str, Any] = {}
    exec(
        compile(text, remembered(f"<tilewright gradient {op.name}>", text), "exec"), type(op).__call__.__globals__, own
    )
    return own["make"]  # type: ignore[no-any-return]


def remembered(file: str, text: str) -> str:
    """The name under which tracebacks find these lines."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return file
