"""In-place forms: `<op>_` is the op of which an output overwrites an input. One declaration makes it.

`gelu_ = in_place(gelu, y="x")` says that `y` may take the place of `x`; everything else is the op's own: its
definition, contract, kernels, options and policy. Here are the form, what it refuses whichever kernel runs, and what is
done around a kernel that overwrites. How the form looks to torch.compile is in `node.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.errors import InvalidArgument, TilewrightError
from tilewright.core.op import Op

R = TypeVar("R")
Tensor = torch.Tensor
Targets = dict[str, str]
"""By output, the input that it overwrites in a call."""


def in_place(op: Op[R], *, anywhere: bool = False, **into: str | tuple[str, ...]) -> Op[R]:
    """Declare the in-place form of `op` and return it.

    Args:
        op: an op that always has all its outputs.
        anywhere: kernels of the op that say `in_place` write what is overwritten by its own strides, of the input's
            facts: it may be far larger than what changes in it. Others write dense outputs, and where the input is none
            it gets a copy.
        into: by output, the input that it overwrites; of several names the first that a call gives.

    Raises:
        TilewrightError: a name that the op does not know, an output that some calls do not have, no input that every
            call gives, or an op that has a form already.
    """
    named = {output: (names,) if isinstance(names, str) else tuple(names) for output, names in into.items()}
    faults = list(_faults(op, named))
    if faults:
        raise TilewrightError(f"the in-place form of op {op.name} does not agree with it: {'; '.join(faults)}")
    return _install(InPlace(op, named, anywhere))


def add_spending_forms(op: Op[Any]) -> None:
    """The forms that gradients ask for (`Gradient.spends`), once `op`, the second of the two ops, is declared. They are
    for autograd and not listed: what they overwrite may be absent, and then there is nothing to call."""
    for gradient in registry.gradients_with(op.name):
        backward = registry.op(gradient.op)
        if gradient.spends and not backward.into:
            _install(InPlace(backward, {output: (name,) for output, name in gradient.spends.items()}, listed=False))


def _install(form: InPlace[R]) -> Op[R]:
    from tilewright.core import entry

    registry.check_form(form)
    entry.install(form)
    registry.add_form(form)
    form.of.into = form.into
    return form


def _faults(op: Op[Any], into: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if not into:
        yield "it names no output"
    if op.may_skip:
        yield "some calls of it have no outputs to overwrite with"
    for output, names in into.items():
        if output not in op.out:
            yield f"{output!r} is none of {', '.join(op.out)}"
        yield from (f"{name!r} is none of {', '.join(op.tensors)}" for name in names if name not in op.tensors)
        if not names:
            yield f"{output} has no place"
        elif names[-1] in op.optional:
            yield f"{names[-1]} may be absent, and then {output} has no place: name a tensor that every call gives last"
    every = [name for names in into.values() for name in names]
    yield from (f"{name} is named twice" for name in dict.fromkeys(every) if every.count(name) > 1)


class InPlace(Op[R]):
    """The in-place form of `functional`: called, explained and pinned like any op. It has no gradient."""

    def __init__(
        self, functional: Op[R], into: Mapping[str, tuple[str, ...]], anywhere: bool = False, *, listed: bool = True
    ) -> None:
        self.__dict__.update(functional.__dict__)
        self.of, self.into, self.anywhere, self.listed = functional, into, anywhere, listed
        self.name = self.__name__ = f"{functional.name}_"
        self.gradient, self.saved = None, {}
        self.__doc__ = f"`{functional.name}` in place: {self.written()}. No gradient.\n\n{functional.__doc__}"

    @property
    def functional(self) -> Op[R]:
        return self.of

    @property
    def in_place(self) -> Op[R]:
        return self

    def targets(self, given: Mapping[str, Any]) -> Targets:
        """What is overwritten in a call that gives these tensors (None: absent)."""
        return {
            output: next((n for n in names if given.get(n) is not None), names[-1])
            for output, names in self.into.items()
        }

    def written(self) -> str:
        """What overwrites what, in words."""
        return "; ".join(f"{output} overwrites {_either(names)}" for output, names in self.into.items())

    def every_target(self) -> list[Targets]:
        """What calls may overwrite, each way once."""
        return [dict(zip(self.into, names, strict=True)) for names in itertools.product(*self.into.values())]

    def call(
        self,
        tensors: Mapping[str, TensorFacts | None],
        options: Mapping[str, Any],
        device: Device,
        *,
        saving: bool = False,
        deterministic: bool = False,
    ) -> Call:
        """The facts of a call, which is one of the op with `into`.

        Raises:
            InvalidArgument: what the contract refuses; also a tensor that cannot hold the output.
        """
        try:
            call = self.of.call(tensors, options, device, deterministic=deterministic)
        except InvalidArgument as error:
            raise self.refuse(error.argument, error.problem, error.remedy) from None
        into = self.targets(tensors)
        for output, name in into.items():
            made, place = call.tensors[output], call.tensors[name]
            assert made is not None
            if place is None:
                raise self.refuse(name, "None, and it is overwritten", f"{self.of.name} would do")
            if (place.shape, place.dtype) != (made.shape, made.dtype):
                raise self.refuse(name, f"{place}, to be overwritten by {made}", f"{self.of.name} returns it")
            if overlaps_itself(place):
                strides = f"strides {list(place.stride)} put several elements of {list(place.shape)} in one place"
                raise self.refuse(name, f"{strides}, and it is overwritten", f"{self.of.name} would do")
        return replace(call, into=into, anywhere=self.anywhere)

    def refuse_lazy(self, tensors: Sequence[Tensor | None]) -> None:
        """A tensor that is negated when it is read cannot be written to."""
        given = dict(zip(self.tensors, tensors, strict=True))
        for name in self.targets(given).values():
            tensor = given[name]
            if isinstance(tensor, Tensor) and tensor.is_neg():
                raise self.refuse(name, "a lazily negated view, and it is overwritten", f"{self.of.name} would do")


def _either(names: Sequence[str]) -> str:
    first = " or ".join(f"{name} where that is given" for name in names[:-1])
    return f"{first}, else {names[-1]}" if first else names[-1]


def overlaps_itself(facts: TensorFacts) -> bool:
    """Whether two elements may share memory. Strides that interleave without meeting are taken for such."""
    reach = 0
    for size, stride in sorted(_dims(facts), key=lambda dim: dim[1]):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _dims(facts: TensorFacts) -> list[tuple[int, int]]:
    if facts.numel == 0:
        return []
    return [(n, s) for n, s in zip(facts.shape, facts.stride, strict=True) if n > 1]


def _extent(facts: TensorFacts) -> int:
    """Bytes from the first element to the end of the last."""
    if facts.numel == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in _dims(facts))) * facts.dtype.itemsize


def meet(one: TensorFacts, other: TensorFacts, distance: int) -> bool:
    """Whether tensors share memory, of which `other` starts `distance` bytes after `one`.

    Exact for equal shapes and strides, as of two parts of one buffer; of others it is enough that one begins before
    the other has ended.
    """
    if not -_extent(other) < distance < _extent(one):
        return False
    step, rest = divmod(distance, one.dtype.itemsize)
    if rest or (one.shape, one.stride, one.dtype) != (other.shape, other.stride, other.dtype):
        return True
    return _reached(step, sorted(_dims(one), key=lambda dim: -dim[1]))


def _reached(step: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Whether `step` is a difference of two offsets in these dimensions, widest stride first."""
    if not dims:
        return step == 0
    (size, stride), inner = dims[0], dims[1:]
    span = sum((n - 1) * s for n, s in inner)
    least, most = -((span - step) // stride), (step + span) // stride
    return any(_reached(step - k * stride, inner) for k in range(max(least, 1 - size), min(most, size - 1) + 1))


def overwriting(run: Callable[..., list[Any]], call: Call) -> Callable[..., list[Any]]:
    """`run`, of a call with `into`, as the form's: what it overwrites shares no memory with another tensor, holds the
    output afterwards whether the kernel wrote there or not, and counts as changed.

    Where tensors lie is looked at in each call, for no plan knows it.
    """
    op = registry.op(call.op)
    inference, bump = torch.is_inference_mode_enabled, torch._C._increment_version
    outputs, places = list(op.out), {name: i for i, name in enumerate(op.tensors)}
    written = [(outputs.index(output), places[name], _beside(op, call, name)) for output, name in call.into.items()]

    def overwrite(*tensors: Any) -> list[Any]:
        for _, at, others in written:
            place = tensors[at]
            if place.is_inference() and not inference():
                problem = "made in inference mode, and it is overwritten outside of that"
                raise InvalidArgument(call.form, op.tensors[at], problem, f"{call.op} would do")
            start = place.data_ptr()
            for other, least, most in others:
                if least < tensors[other].data_ptr() - start < most:
                    _refuse_shared(call, op.tensors[at], op.tensors[other], tensors[other].data_ptr() - start)
        made = run(*tensors)
        for output, at, _ in written:
            place, found = tensors[at], made[output]
            if found is None or found is place:  # the kernel wrote there, which torch has not seen
                bump((place,))
            else:
                place.copy_(found)
            made[output] = place
        return made

    return overwrite


def _beside(op: Op[Any], call: Call, name: str) -> list[tuple[int, int, int]]:
    """The other tensors, by place, and between which distances in bytes they may share memory with `name`."""
    one = call.tensors[name]
    others = [(place, call.tensors[other]) for place, other in enumerate(op.tensors) if other != name]
    return [] if one is None else [(place, -_extent(two), _extent(one)) for place, two in others if two is not None]


def _refuse_shared(call: Call, name: str, other: str, distance: int) -> None:
    one, two = call.tensors[name], call.tensors[other]
    assert one is not None and two is not None
    if meet(one, two, distance):
        same = (one.shape, one.stride) == (two.shape, two.stride)
        problem = f"{'shares' if same else 'may share'} memory with {other}, and it is overwritten"
        raise InvalidArgument(call.form, name, problem, f"{other}.clone() would do")
