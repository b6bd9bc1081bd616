"""An op's gradient: what forward freezes for its backward op, and whether a pinned backend has kernels for both.

The backward op itself is an op like any other (`op.py`); how autograd gets here is in `dispatch.py` and `node.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tilewright.core import node, policy, registry, selection
from tilewright.core.call import Call, TensorFacts
from tilewright.core.op import Op
from tilewright.core.policy import Policy

Frozen = tuple[Policy, bool]
"""Policy and determinism as forward found them; backward keeps to them."""


class Backward:
    """What forward froze for its gradient: which tensors to keep, and how to call the backward op.

    `tensors` are those of the forward call, in order: their shapes and which are None.
    """

    def __init__(
        self, op: Op[Any], options: dict[str, Any], backend: str | None, frozen: Frozen, tensors: Sequence[Any]
    ) -> None:
        gradient = op.gradient
        assert gradient is not None
        self.op, self.gradient, self.backend, self.frozen = op, gradient, backend, frozen
        self.backward: Op[Any] = registry.op(gradient.op)
        self.outputs = len(op.out)
        names = [*op.tensors, *op.out, *op.saved]
        inputs = dict(zip(op.tensors, tensors, strict=True))
        self.takes = gradient.kept(lambda name: inputs[name] is not None)
        self.keep = [names.index(name) for name in self.takes.values()]
        # The backward op's tensors as indices into (upstream gradients, kept tensors, None).
        upstream = {param: list(op.out).index(out) for out, param in gradient.grads.items()}
        kept = {param: self.outputs + place for place, param in enumerate(self.takes)}
        self.places = [{**upstream, **kept}.get(n, -1) for n in self.backward.tensors]
        self.options = {n: options.get(n, default) for n, default in self.backward.options.items()}
        # Each input's gradient as an index into (results of the backward op, upstream gradients).
        self.made = len(self.backward.out)
        order = [*self.backward.out, *(gradient.grads.get(out, "") for out in op.out)]
        there = self._there(inputs, options)
        self.sources = [next((order.index(n) for n in gradient.names(name) if n in there), None) for name in op.tensors]
        now, name = frozen[0], self.backward.name
        asked = backend or (now.backend(name) if now.strict(name) else None)
        self.pinned = None if asked == "reference" else asked
        """The only backend that may compute it, as a pin or a strict preference says; the reference always can."""
        self._needs: dict[tuple[bool, ...], tuple[bool, ...]] = {}

    def needs(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which outputs of the backward op these inputs want."""
        found = self._needs.get(wanted)
        if found is None:
            asked = {s for s, w in zip(self.sources, wanted, strict=True) if w and s is not None and s < self.made}
            found = self._needs[wanted] = tuple(i in asked for i in range(self.made))
        return found

    def _there(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> set[str]:
        """What can be an input's gradient in such a call: the outputs that the backward op then has, and upstream."""
        upstream = set(self.gradient.grads.values())
        if all(isinstance(names, str) for names in self.gradient.gives.values()):
            return {*self.backward.out, *upstream}
        made = {
            name: None if spec is None else SimpleNamespace(shape=spec[0], dtype=spec[1])
            for name, spec in self.op.out_specs(inputs, options, True).items()
        }
        known = {**inputs, **made}
        given = {param: known[source] for param, source in self.takes.items()}
        given |= {param: known[out] for out, param in self.gradient.grads.items()}
        every = {**self.options, **({"needs": (True,) * self.made} if self.backward.may_skip else {})}
        specs = self.backward.out_specs({n: given.get(n) for n in self.backward.tensors}, every, False)
        return {*(name for name, spec in specs.items() if spec is not None), *upstream}

    def __call__(self, grads: Sequence[Any], kept: Sequence[Any], wanted: tuple[bool, ...], by_node: bool) -> list[Any]:
        """Gradients of the op's tensors, None where not wanted."""
        if all(g is None for g in grads):
            return [None] * len(self.sources)
        every = (*grads, *kept, None)
        tensors = [every[i] for i in self.places]
        options = dict(self.options)
        found: Any
        if self.backward.may_skip:
            options["needs"] = self.needs(wanted)
        if not any(self.needs(wanted)):
            found = (None,) * self.made  # upstream gradients are all that is wanted
        elif by_node:
            with policy.restored(self.frozen[0]):
                found = node.call(self.backward, tensors, options, self.backend)
        else:
            found = self.backward(*tensors, **options, backend=self.backend, _frozen=self.frozen)
        results = (*((found,) if isinstance(found, Tensor) else found), *grads)
        return [
            results[source] if want and source is not None else None
            for source, want in zip(self.sources, wanted, strict=True)
        ]

    def refusal(self, call: Call, wanted: tuple[bool, ...] = ()) -> str:
        """Why the gradient of `call` cannot be had from the backend that is pinned or strictly preferred; "" where it
        can, or may be had from any. `wanted`: which tensors want one; all by default."""
        if self.pinned is None:
            return ""
        found = []
        for each in self._calls(call, wanted):
            found.append(selection.weigh(each, self.frozen[0], backend=self.pinned))
            if found[-1].chosen is not None:
                return ""
        if not found:
            return ""
        why = f"{self.backward.name} is the gradient of {self.op.name}, which this call wants"
        return f"{selection.refusal(found[0], self.pinned)}\n{why}; torch.no_grad() or detached tensors do without"

    def _calls(self, call: Call, wanted: tuple[bool, ...]) -> Iterator[Call]:
        """The calls of the backward op that may follow, the usual one first: dense upstream gradients of all outputs.

        An output may go unused, so each alone may come too; and where it is not known what is wanted, each result.
        """
        takes, backward = self.takes, self.backward
        kept = {param: _named(param, call.tensors.get(source)) for param, source in takes.items()}
        upstream = {param: _named(param, call.tensors.get(out)) for out, param in self.gradient.grads.items()}
        alone = [param for param in upstream if backward.optional.issuperset(upstream.keys() - {param})]
        given = [upstream, *({param: upstream[param]} for param in alone if len(upstream) > 1)]
        present = tuple(call.tensors[n] is not None for n in self.op.tensors)
        ways = [wanted] if wanted else [present, *_each_alone(present)]
        for grads, want in itertools.product(given, ways):
            options = dict(self.options)
            needs = self.needs(want)
            if not any(needs):
                continue  # nothing to compute
            if backward.may_skip:
                options["needs"] = needs
            tensors = {n: {**kept, **grads}.get(n) for n in backward.tensors}
            yield backward.call(tensors, options, call.device, deterministic=call.deterministic)


def _named(name: str, facts: TensorFacts | None) -> TensorFacts | None:
    return None if facts is None else replace(facts, name=name, needs_grad=False)


def _each_alone(present: tuple[bool, ...]) -> list[tuple[bool, ...]]:
    places = range(len(present))
    return [tuple(p == place for p in places) for place in places if present[place]] if sum(present) > 1 else []
