"""An op: a typed torch function that *is* its definition, and what everything else needs to know of it, as data.

`@op(...)` turns the reference into an `Op`, which is what users call. How a call finds its kernel is in `dispatch.py`,
how it looks to torch.compile in `node.py`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from tilewright.core import declaration
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.errors import InvalidArgument
from tilewright.core.probes import Probes, Workload

R = TypeVar("R")
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a fresh contiguous tensor. Sizes may be symbolic."""
OutRule = Callable[[Mapping[str, Any], Mapping[str, Any]], Spec | None]
"""(tensors by name, options) to a Spec, or None where this call does not produce the output."""


def like(name: str) -> OutRule:
    """Shape and dtype of tensor `name`; nothing where that is absent."""
    return lambda t, o: None if t[name] is None else (tuple(t[name].shape), t[name].dtype)


def rows_of(name: str, dtype: torch.dtype = torch.float32) -> OutRule:
    """One number a row of tensor `name` (float64 for float64 input)."""
    return lambda t, o: (tuple(t[name].shape[:-1]), torch.float64 if t[name].dtype == torch.float64 else dtype)


def needed(index: int, rule: OutRule) -> OutRule:
    """`rule` where the option `needs[index]` is true."""
    return lambda t, o: rule(t, o) if o["needs"][index] else None


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """What forward keeps for backward beside inputs and outputs: its output rule, and its definition in torch. The
    definition's parameters name inputs, outputs and options of the op. `optional`: some calls do not save it; both rule
    and definition then say None."""

    rule: OutRule
    define: Callable[..., torch.Tensor | None]
    optional: bool = False
    parameters: tuple[str, ...] = field(init=False)
    """Of `define`; known beforehand, since torch.compile traces what `Op.define` does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(declaration.signature_of(self.define).parameters))


@dataclass(frozen=True, eq=False, repr=False)
class Gradient:
    """How an op's gradient is had from its backward op, by name.

    `grads` maps outputs to the backward op's parameters for their upstream gradients; `takes` maps its other
    parameters to inputs, outputs or saved statistics; `gives` maps inputs to its outputs. An input that it leaves out
    has no gradient: one that asks for it is refused. Options of the same name carry over; `needs` says which outputs
    are wanted.

    `gives` may name a parameter of `grads`: the upstream gradient itself is the input's, and nothing is computed. Of
    several names the first that such a call has counts. `only` names, for a parameter of `takes`, the input without
    which it is not kept.

    `coo` maps outputs that hold rows of an input's gradient, one an entry, to the outputs that hold which row each is:
    the gradient is then a sparse tensor of the input's shape, uncoalesced.

    `spends` maps outputs to parameters of `takes` that they may overwrite: what forward saved for this alone. In eager
    the first run of the backward op is given it and writes there, so that no memory is taken and, where the numbers are
    right already, none moved; a later run, on a retained graph, has None for it and does without. Where others see what
    is saved (graphs that are compiled, hooks of saved tensors) nothing is overwritten: see `spent.py`.

    `seldom` names outputs, the last ones, that are by-products and hardly ever have an upstream gradient: benchmarks
    time the backward op without it, and rivals need not compute them.

    `finds` are vectors of a number an entry, as
    many as values decide: torch finds them when the gradient is computed, from what their definitions name of the
    forward; the rule, on the backward op's tensors, says how many there may be. The host waits for that, so such a
    gradient is refused in the capture of a CUDA graph and where tensors have no values (torch.compile). The op may be
    given a few zeros more, whose entries are cut off.
    """

    op: str
    grads: Mapping[str, str]
    takes: Mapping[str, str]
    gives: Mapping[str, str | tuple[str, ...]]
    only: Mapping[str, str] = field(default_factory=dict)
    finds: Mapping[str, Saved] = field(default_factory=dict)
    coo: Mapping[str, str] = field(default_factory=dict)
    spends: Mapping[str, str] = field(default_factory=dict)
    seldom: tuple[str, ...] = ()

    def names(self, input: str) -> tuple[str, ...]:
        """What may be the gradient of `input`, in order."""
        found = self.gives.get(input, ())
        return (found,) if isinstance(found, str) else found

    def kept(self, given: Callable[[str], bool]) -> dict[str, str]:
        """`takes` of a call that has the inputs that are `given`."""
        return {p: source for p, source in self.takes.items() if p not in self.only or given(self.only[p])}

    def asked(self, absent: Collection[str]) -> set[str]:
        """Outputs of the backward op that are wanted where every input that is there wants its gradient."""
        return {name for n in self.gives if n not in absent for name in self.names(n)}

    def parameters(self, given: Callable[[str], bool]) -> set[str]:
        """Parameters of the backward op that a call with the inputs that are `given` usually fills."""
        kept = (param for param, source in self.kept(given).items() if given(source))
        upstream = (param for out, param in self.grads.items() if out not in self.seldom)
        return {*upstream, *kept, *self.finds}


@dataclass(eq=False, repr=False)
class Op(Generic[R]):
    """A logical operator. Call it like its reference, with `backend=` to pin one.

    Identity is the name; the registry holds one of each.
    """

    name: str
    family: str
    reference: Callable[..., R]
    out: Mapping[str, OutRule]
    check: Callable[[Call], None]
    cost: Callable[[Call], tuple[int, int]]
    """(fewest bytes that must move, floating-point operations)."""
    error_scale: Callable[..., Mapping[str, torch.Tensor]]
    """The numerics policy's A: for each output, the sum of absolute terms, from float64 inputs."""
    probes: Probes
    narrowed: Callable[..., Mapping[str, torch.Tensor]] | None = None
    """What the contract lets a kernel round to the dtype of the output on its way there (a factor of a product with
    half-precision inputs): for each output the root of the sum of the squares of the terms so rounded, from float64
    inputs. Their errors are independent, so they add up so."""
    workloads: Sequence[Workload] = ()
    saved: Mapping[str, Saved] = field(default_factory=dict)
    gradient: Gradient | None = None
    gradient_if: Mapping[str, Gradient] = field(default_factory=dict)
    """By a boolean option: the gradient, of the same inputs, of calls where it is true."""
    rounding: str = "once, at the output"
    check_values: Callable[[Mapping[str, torch.Tensor | None], Mapping[str, Any]], None] | None = None
    """What the contract refuses in the values of (tensors, options). Only asked on a CPU: elsewhere it would wait."""
    scatters: bool = False
    """Whether the definition adds at indices. What torch compiles from that adds in any order: not deterministic."""
    into: Mapping[str, tuple[str, ...]] = field(init=False, default_factory=dict)
    """By output, the inputs that the in-place form overwrites with it: see `in_place.py`."""
    tensors: tuple[str, ...] = field(init=False)
    optional: frozenset[str] = field(init=False)
    options: Mapping[str, Any] = field(init=False)
    """By name, each with its default; `inspect.Parameter.empty` where a caller must choose."""
    usual: Mapping[str, Any] = field(init=False)
    """Options as calls usually have them: the defaults, and the first of the probes where there is none."""
    option_types: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        hints = declaration.hints_of(self.reference)
        parameters = declaration.signature_of(self.reference).parameters.values()
        is_tensor = {p.name: p.kind is not p.KEYWORD_ONLY for p in parameters}
        self.tensors = tuple(name for name, yes in is_tensor.items() if yes)
        self.optional = frozenset(n for n in self.tensors if type(None) in typing.get_args(hints[n]))
        self.options = {p.name: p.default for p in parameters if not is_tensor[p.name]}
        self.usual = {**self.options, **(self.probes.options[0] if self.probes.options else {})}
        self.option_types = {name: hints[name] for name in self.options}
        self.__doc__ = self.reference.__doc__
        self.__name__ = self.name
        self.__signature__ = _public_signature(self.reference)
        declaration.check(self)

    # Replaced on a subclass of its own by entry.install(); here so that types and docs see it.
    def __call__(self, *args: Any, backend: str | None = None, **options: Any) -> R:
        raise RuntimeError(f"{self.name} was declared but not registered")

    @property
    def functional(self) -> Op[R]:
        """The op itself; of an in-place form the op that it is a form of."""
        return self

    @property
    def in_place(self) -> Op[R]:
        """The in-place form, `<op>_`.

        Raises:
            UnknownName: it has none.
        """
        from tilewright.core import registry

        return registry.form_of(self.name)

    @property
    def single(self) -> bool:
        """Whether it returns one tensor and not a tuple."""
        return len(self.out) == 1 and not self.may_skip

    @property
    def may_save_less(self) -> bool:
        """Whether some calls save only a part of what others do."""
        return any(saved.optional for saved in self.saved.values())

    @property
    def may_skip(self) -> bool:
        """Whether some outputs may be None: it then takes `needs`."""
        return "needs" in self.options

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Every gradient that calls may have, the usual one first."""
        return (() if self.gradient is None else (self.gradient,)) + tuple(self.gradient_if.values())

    def gradient_of(self, options: Mapping[str, Any]) -> Gradient | None:
        """The gradient of calls with these options."""
        return next((one for name, one in self.gradient_if.items() if options[name]), self.gradient)

    def define(self, tensors: Mapping[str, torch.Tensor | None], options: Mapping[str, Any], saving: bool) -> list[Any]:
        """Run the definition: outputs in order (None where not produced), then saved statistics if `saving`."""
        result: Any = self.reference(*(tensors[n] for n in self.tensors), **options)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        if saving:
            known = {**tensors, **options, **dict(zip(self.out, outputs, strict=True))}
            for saved in self.saved.values():
                outputs.append(saved.define(**{n: known[n] for n in saved.parameters}))
        return outputs

    def out_specs(self, tensors: Mapping[str, Any], options: Mapping[str, Any], saving: bool) -> dict[str, Spec | None]:
        """The fake: shape and dtype of every output, then of the saved statistics if `saving`."""
        specs = {name: rule(tensors, options) for name, rule in self.out.items()}
        if saving:
            specs |= {name: saved.rule(tensors, options) for name, saved in self.saved.items()}
        return specs

    def call(
        self,
        tensors: Mapping[str, TensorFacts | None],
        options: Mapping[str, Any],
        device: Device,
        *,
        saving: bool = False,
        deterministic: bool = False,
    ) -> Call:
        """The facts of a call, outputs included; raises `InvalidArgument` where the contract does not allow it."""
        inputs_only = Call(self.name, device, tensors, options, saving, deterministic)
        self.check(inputs_only)
        specs = self.out_specs(tensors, options, saving)
        facts = {n: None if s is None else TensorFacts.dense(n, *s) for n, s in specs.items()}
        if not saving:
            facts |= dict.fromkeys(self.saved)
        return Call(
            self.name,
            device,
            {**tensors, **facts},
            options,
            saving,
            deterministic,
            tuple(n for n, s in specs.items() if s is not None),
        )

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> Any:
        return _by_name, (self.name,)

    def refuse(self, argument: str, problem: str, remedy: str = "") -> InvalidArgument:
        return InvalidArgument(self.name, argument, problem, remedy)


def _by_name(name: str) -> Op[Any]:
    from tilewright.core import registry

    return registry.find(name)


def _public_signature(reference: Callable[..., Any]) -> inspect.Signature:
    signature = declaration.signature_of(reference)
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    return signature.replace(parameters=[*signature.parameters.values(), backend])


def op(*, family: str, **declared: Any) -> Callable[[Callable[..., R]], Op[R]]:
    """Declare an op from its reference. See `Op` for what else is declared; registers it with the library."""

    def declare(reference: Callable[..., R]) -> Op[R]:
        from tilewright.core import entry, in_place, registry

        made: Op[R] = Op(reference.__name__, family, reference, **declared)
        registry.check_op(made)  # before torch hears of it, which takes a name once: a mended declaration must do
        entry.install(made)
        registry.add_op(made)
        in_place.add_spending_forms(made)
        return made

    return declare


def upcast(x: torch.Tensor) -> torch.Tensor:
    """The accumulation dtype: float32, and float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()
