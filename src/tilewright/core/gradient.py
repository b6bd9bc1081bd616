"""An op's gradient: what forward freezes for its backward op, and whether a pinned backend has kernels for both.

The backward op itself is an op like any other (`op.py`); how autograd gets here is in `dispatch.py` and `node.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, cuda, sparse_coo_tensor
from torch._guards import detect_fake_mode
from torch.nn.functional import pad

from tilewright.core import declaration, node, policy, registry, selection
from tilewright.core.call import Call, TensorFacts
from tilewright.core.errors import Unsupported
from tilewright.core.op import Op, Saved
from tilewright.core.policy import Frozen

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


class Backward:
    """What forward froze for its gradient: which tensors to keep, and how to call the backward op.

    `tensors` are those of the forward call, in order: their shapes and which are None.
    """

    def __init__(
        self, op: Op[Any], options: dict[str, Any], backend: str | None, frozen: Frozen, tensors: Sequence[Any]
    ) -> None:
        gradient = op.gradient_of(options)
        assert gradient is not None
        self.op, self.gradient, self.backend, self.frozen = op, gradient, backend, frozen
        self.backward: Op[Any] = registry.op(gradient.op)
        self.serve: Callable[..., Any] = self.backward
        """What computes it in eager: the backward op, which chooses a kernel, or one that benchmarks have chosen."""
        self.outputs = len(op.out)
        self.spend: Callable[..., Any] = self.backward
        """What computes it where `spent` may be overwritten."""
        names = [*op.tensors, *op.out, *op.saved]
        inputs = dict(zip(op.tensors, tensors, strict=True))
        self.takes = gradient.kept(lambda name: inputs[name] is not None)
        more = (name for found in gradient.finds.values() for name in names_of(found) if name in names)
        self.spent = self._spent(inputs, options)
        """Sources of what the first backward may overwrite, in such a call."""
        if self.spent:
            self.spend = self.backward.in_place
        kept_in_any_order = dict.fromkeys([*self.takes.values(), *more])
        self.kept = [*(name for name in kept_in_any_order if name not in self.spent), *self.spent]
        """Sources in the forward of what is kept for the gradient; what may be spent comes last."""
        self.keep = [names.index(name) for name in self.kept]
        self.known = {n: value for n, value in options.items() if n not in names}
        # Where its tensors are among (upstream gradients, kept tensors, what is found, None).
        upstream = {param: list(op.out).index(out) for out, param in gradient.grads.items()}
        kept = {param: self.outputs + self.kept.index(source) for param, source in self.takes.items()}
        found = {param: self.outputs + len(self.kept) + place for place, param in enumerate(gradient.finds)}
        self.places = [{**upstream, **kept, **found}.get(n, -1) for n in self.backward.tensors]
        self.gather = _picker(self.places)
        self.there = self._known(inputs)
        self.options = {n: options.get(n, default) for n, default in self.backward.options.items()}
        # Each input's gradient as an index into (results of the backward op, upstream gradients).
        self.made = len(self.backward.out)
        order = [*self.backward.out, *(gradient.grads.get(out, "") for out in op.out)]
        there = self._there(inputs, options)
        self.sources = [next((order.index(n) for n in gradient.names(name) if n in there), None) for name in op.tensors]
        # Which results are rows of a sparse gradient: (of the values, of their row numbers, shape of the input).
        self.sparse = [
            (order.index(n), order.index(gradient.coo[n]), tuple(inputs[name].shape))
            for name in op.tensors for n in gradient.names(name) if n in gradient.coo
        ]  # fmt: skip
        now, name = frozen[0], self.backward.name
        asked = backend or (now.backend(name) if now.strict(name) else None)
        self.pinned = None if asked == "reference" else asked
        """The only backend that may compute it, as a pin or a strict preference says; the reference always can."""
        self._ways: dict[tuple[bool, ...], tuple[dict[str, Any], bool, Picker]] = {}
        self.shortcuts: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By what autograd's function says that its inputs want: see `shortcut.py`."""

    def _known(self, inputs: Mapping[str, Any]) -> dict[str, bool]:
        """Whether tensors of the backward op will be there, of those of which the forward call tells; of the gradient
        of a single output, in every call that computes something."""
        always = {*self.op.out} if not self.op.may_skip else set()
        always |= {name for name, saved in self.op.saved.items() if not saved.optional}
        known = {n: False for n, place in zip(self.backward.tensors, self.places, strict=True) if place < 0}
        for param, source in self.takes.items():
            if source in inputs:
                known[param] = inputs[source] is not None
            elif source in always:
                known[param] = True
        return known | (dict.fromkeys(self.gradient.grads.values(), True) if self.outputs == 1 else {})

    def _spent(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        sources = [self.takes[param] for param in self.gradient.spends.values()]
        there = all(self.op.saved[name].rule(inputs, options) is not None for name in sources)
        return sources if there else []

    def needs(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which outputs of the backward op these inputs want."""
        asked = {s for s, w in zip(self.sources, wanted, strict=True) if w and s is not None and s < self.made}
        return tuple(i in asked for i in range(self.made))

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

    def __call__(
        self, grads: Sequence[Any], kept: Sequence[Any], wanted: tuple[bool, ...], by_node: bool, spending: bool = False
    ) -> tuple[Any, ...]:
        """Gradients of the op's tensors, None where not wanted. `spending`: what is in `spent` may be overwritten."""
        if grads[0] is None and all(g is None for g in grads):
            return (None,) * len(self.sources)
        found, entries = self._find(kept) if self.gradient.finds else ((), 0)
        tensors = self.gather((*grads, *kept, *found, None))
        options, computes, pick = self._ways.get(wanted) or self._add_way(wanted)
        made: Any
        if not computes:
            made = (None,) * self.made  # upstream gradients are all that is wanted
        elif by_node:
            with policy.restored(self.frozen):
                made = node.call(self.backward, tensors, options, self.backend)
        else:
            serve = self.spend if spending else self.serve
            made = serve(*tensors, **options, backend=self.backend, _frozen=self.frozen)
        results = (made, *grads, None) if isinstance(made, Tensor) else (*made, *grads, None)
        return pick(self._sparse_of(results, entries) if self.sparse else results)

    def way(self, wanted: tuple[bool, ...]) -> tuple[dict[str, Any], bool, list[int]]:
        """What depends on which inputs want a gradient: options, whether there is anything to compute, and which of
        (results of the backward op, upstream gradients, None) are the inputs' gradients."""
        needs = self.needs(wanted)
        options = {**self.options, "needs": needs} if self.backward.may_skip else self.options
        taken = [-1 if s is None or not want else s for s, want in zip(self.sources, wanted, strict=True)]
        return options, any(needs), taken

    def _add_way(self, wanted: tuple[bool, ...]) -> tuple[dict[str, Any], bool, Picker]:
        options, computes, taken = self.way(wanted)
        found = self._ways[wanted] = options, computes, _picker(taken)
        return found

    def _sparse_of(self, results: Sequence[Any], entries: int) -> list[Any]:
        made = list(results)
        for values, rows, shape in self.sparse:
            if made[values] is not None:
                made[values] = sparse_coo_tensor(
                    made[rows][None, :entries], made[values][:entries], shape, check_invariants=False,
                    is_coalesced=False,
                )  # fmt: skip
        return made

    def _find(self, kept: Sequence[Any]) -> tuple[list[Tensor | None], int]:
        """The parameters of the backward op that depend on values, and how many entries of it they stand for. The host
        waits for the device here.

        They are lengthened to one of few sizes, a 64th more at the most: a plan serves a size, and there is hardly a
        step that has that of another.
        """
        self.refuse_waiting(kept)
        known = {**self.known, **dict(zip(self.kept, kept, strict=True))}
        found = [one.define(**{n: known[n] for n in names_of(one)}) for one in self.gradient.finds.values()]
        entries = next((len(one) for one in found if one is not None), 0)
        step = max(1, 1 << entries.bit_length() >> 7)
        more = -entries % step
        return [one if one is None or not more else pad(one, (0, more)) for one in found], entries

    def refuse_waiting(self, tensors: Sequence[Any]) -> None:
        """Raise where the gradient has to wait for values, and cannot.

        Raises:
            Unsupported: a CUDA graph is being captured, or the tensors have no values.
        """
        if not self.gradient.finds:
            return
        given = [t for t in tensors if t is not None]
        if any(t.is_cuda for t in given) and cuda.is_current_stream_capturing():
            where = "a CUDA graph that is being captured"
        elif any(t.is_meta for t in given) or detect_fake_mode(given) is not None:
            where = "tensors without values (torch.compile, export, fake or meta tensors)"
        else:
            return
        chosen = next((name for name, one in self.op.gradient_if.items() if one is self.gradient), "")
        raise Unsupported(
            f"{self.op.name}{f'({chosen}=True)' if chosen else ''}: the size of its gradient depends on values, for "
            f"which the host waits: no rule for {where}; call it outside" + f", or with {chosen}=False" * bool(chosen)
        )

    def refusal(self, call: Call, wanted: tuple[bool, ...] = ()) -> str:
        """Why the gradient of `call` cannot be had from the backend that is pinned or strictly preferred; "" where it
        can, or may be had from any. `wanted`: which tensors want one; all by default."""
        if self.pinned is None:
            return ""
        if not self.spent:
            return self._refusal(self.backward, call, wanted, ())
        gone = tuple(self.gradient.spends.values())  # in a second backward on a retained graph, which may come or not
        first = self._refusal(self.backward.in_place, call, wanted, ())
        return first or self._refusal(self.backward, call, wanted, gone)

    def _refusal(self, backward: Op[Any], call: Call, wanted: tuple[bool, ...], gone: Sequence[str]) -> str:
        assert self.pinned is not None
        found = []
        for each in self._calls(backward, call, wanted, gone):
            found.append(selection.weigh(each, self.frozen[0], backend=self.pinned))
            if found[-1].chosen is not None:
                return ""
        if not found:
            return ""
        why = f"{self.backward.name} is the gradient of {self.op.name}, which this call wants"
        return f"{selection.refusal(found[0], self.pinned)}\n{why}; torch.no_grad() or detached tensors do without"

    def _calls(self, backward: Op[Any], call: Call, wanted: tuple[bool, ...], gone: Sequence[str]) -> Iterator[Call]:
        """The calls of the backward op, or its form, that may follow, the usual one first: dense upstream gradients of
        all outputs. `gone`: parameters that it does without.

        An output may go unused, so each alone may come too; and where it is not known what is wanted, each result.
        """
        kept = {param: _named(param, call.tensors.get(source)) for param, source in self.takes.items()}
        kept |= self._most_found(kept, call)
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
            tensors = {n: None if n in gone else {**kept, **grads}.get(n) for n in backward.tensors}
            yield backward.call(tensors, options, call.device, deterministic=call.deterministic)

    def _most_found(self, kept: Mapping[str, Any], call: Call) -> dict[str, TensorFacts | None]:
        specs = {param: found.rule(kept, call.options) for param, found in self.gradient.finds.items()}
        return {param: None if spec is None else TensorFacts.dense(param, *spec) for param, spec in specs.items()}


def _picker(places: Sequence[int]) -> Picker:
    """Takes these places of a tuple. No `itemgetter`: compiled autograd does not look into one."""
    return lambda every: tuple([every[place] for place in places])


def names_of(found: Saved) -> list[str]:
    """What its definition reads."""
    return list(declaration.signature_of(found.define).parameters)


def _named(name: str, facts: TensorFacts | None) -> TensorFacts | None:
    return None if facts is None else replace(facts, name=name, needs_grad=False)


def _each_alone(present: tuple[bool, ...]) -> list[tuple[bool, ...]]:
    places = range(len(present))
    return [tuple(p == place for p in places) for place in places if present[place]] if sum(present) > 1 else []
