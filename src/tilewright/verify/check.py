"""One kernel, one config, one case: run it poisoned and twice, and compare with the oracle under the policy.

Used by the suite (`suite.py`) and by first-use checks (`first_use.py`) alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.core.arguments import facts_of
from tilewright.core.call import Call
from tilewright.core.in_place import InPlace
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.op import Op
from tilewright.core.plan import Run, bind
from tilewright.verify.numerics import Errors, errors, largest_allowed, rms_allowed, same_bits

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Truth:
    """What the outputs of a case should be: the float64 oracle, the baseline in the call's dtypes, A, and what may be
    rounded on the way."""

    oracle: dict[str, Tensor | None]
    baseline: dict[str, Tensor | None]
    scale: Mapping[str, Tensor]
    narrowed: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Outcome:
    """`problems` is empty when the case passed by itself; RMS errors are judged over a pool, by `judge_pool`."""

    problems: list[str] = field(default_factory=list)
    errors: dict[str, tuple[Errors, Errors, torch.dtype]] = field(default_factory=dict)
    """Output name to (errors of the kernel, of the baseline, dtype)."""
    in_place: bool = False
    """Whether the in-place form was run too, with the kernel writing where the input is."""
    raised: bool = False
    """It did not compile or run: there is no result that could be wrong."""


def truth_of(op: Op[Any], inputs: Tensors, options: Mapping[str, Any], saving: bool) -> Truth:
    """Run the definition in float64 and in the call's own dtypes."""
    names = [*op.out, *(op.saved if saving else ())]
    wide = {n: None if t is None else t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    exact = {n: torch.float64 if isinstance(v, torch.dtype) else v for n, v in options.items()}  # it rounds nothing
    with torch.no_grad(), _no_python_native():
        oracle = dict(zip(names, op.define(wide, exact, saving), strict=True))
        baseline = dict(zip(names, op.define(inputs, options, saving), strict=True))
        known = {**wide, **oracle}
        if not saving:
            known |= dict(zip([*op.out, *op.saved], op.define(wide, exact, True), strict=True))
        scale = op.error_scale(known, options)
        narrowed = {} if op.narrowed is None else op.narrowed(known, options)
    return Truth(oracle, baseline, scale, narrowed)


class _no_python_native:
    """torch 2.13 may route aten norms to a kernel of its own; oracles keep to plain torch."""

    def __enter__(self) -> None:
        self.native = getattr(torch.backends, "python_native", None)
        self.before = getattr(self.native, "enabled", None)
        if isinstance(self.before, bool):
            self.native.enabled = False  # type: ignore[union-attr]

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.before, bool):
            self.native.enabled = self.before  # type: ignore[union-attr]


def call_of(op: Op[Any], inputs: Tensors, options: Mapping[str, Any], saving: bool) -> Call:
    return facts_of(op, [inputs[n] for n in op.tensors], dict(options), saving, False)


def check(
    kernel: Kernel, config: Config, op: Op[Any], inputs: Tensors, options: Mapping[str, Any], truth: Truth,
    *, saving: bool, emulated: bool = False, in_place: bool = False,
) -> Outcome:  # fmt: skip
    """Run the kernel on `inputs` and judge every output. Compile and launch errors propagate.

    `in_place`: where the kernel serves the op's in-place form for such tensors, that must give the same bits.
    """
    call = call_of(op, inputs, options, saving)
    run = bind(kernel, config, call, poison=True)
    tensors = [inputs[n] for n in op.tensors]
    before = [None if t is None else t.clone() for t in tensors]
    names = [*op.out, *(op.saved if saving else ())]
    outcome = Outcome()
    with torch.no_grad():
        first = dict(zip(names, _run(run, tensors), strict=True))
        second = dict(zip(names, _run(run, tensors), strict=True))
        elsewhere = _run_on_a_side_stream(run, tensors, before)
    for name, tensor, kept in zip(op.tensors, tensors, before, strict=True):
        if not same_bits(tensor, kept):
            outcome.problems.append(f"input {name} was changed")
    if elsewhere is not None and kernel.capability.deterministic:
        strays = [n for n, found in zip(names, elsewhere, strict=True) if not same_bits(found, first[n])]
        if strays:
            outcome.problems.append(f"{', '.join(strays)}: not ordered by the current stream")
    specs = op.out_specs(inputs, options, saving)
    for name in names:
        found, wanted = first[name], truth.baseline[name]
        problem = _form(name, found, specs[name])
        if problem:
            outcome.problems.append(problem)
            continue
        if found is None or wanted is None:
            continue
        if kernel.capability.deterministic and not same_bits(found, second[name]):
            outcome.problems.append(f"{name}: two runs differ in their bits, and the kernel says it is deterministic")
        judge(outcome, name, found, truth, emulated, statistic=name in op.saved)
    if in_place and op.into and kernel.capability.in_place and _can_alias(op, call):
        outcome.in_place = True
        _check_in_place(outcome, kernel, config, op, tensors, options, truth, emulated, first)
    return outcome


def _can_alias(op: Op[Any], call: Call) -> bool:
    """Whether the kernel itself writes all that the in-place form of this call overwrites."""
    form = op.in_place
    assert isinstance(form, InPlace)
    into = form.targets(call.tensors)
    if any(call.tensors[name] is None for name in into.values()):
        return False
    return replace(call, into=into, anywhere=form.anywhere).aliased == into


def _copy(tensor: Tensor, call: Call) -> Tensor:
    """What may be overwritten for it; where the form takes it anywhere, it lies as the tensor does."""
    if not call.anywhere:
        return tensor.clone()
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _check_in_place(
    outcome: Outcome, kernel: Kernel, config: Config, op: Op[Any], tensors: Sequence[Tensor | None],
    options: Mapping[str, Any], truth: Truth, emulated: bool, functional: Mapping[str, Tensor | None],
) -> None:  # fmt: skip
    """Run the in-place form twice: the same bits as the op gave, in the tensors that it overwrites. What differs from
    one run to the next is judged as any result."""
    form = op.in_place
    call = facts_of(form, tensors, dict(options), False, False)
    run = bind(kernel, config, call, poison=True)
    for _ in range(2):
        given = [
            None if t is None else _copy(t, call) if name in call.into.values() else t
            for name, t in zip(op.tensors, tensors, strict=True)
        ]
        with torch.no_grad():
            results: dict[str, Tensor] = dict(zip(op.out, _run(run, given), strict=True))
        for output, found in results.items():
            place = given[op.tensors.index(call.into[output])] if output in call.into else found
            if found is not place:
                outcome.problems.append(f"in place: {output} is not the tensor that it overwrites")
            elif not kernel.capability.deterministic:
                judge(outcome, output, found, truth, emulated)
            elif not same_bits(found, functional[output]):
                outcome.problems.append(f"in place: {output} differs in its bits from what {op.name} gives")


def _run(run: Run, tensors: Sequence[Tensor | None]) -> list[Any]:
    results = run(*tensors)
    device = next(t.device for t in tensors if t is not None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results


def _run_on_a_side_stream(
    run: Run, tensors: Sequence[Tensor | None], values: Sequence[Tensor | None]
) -> list[Any] | None:
    """Run while the inputs are still NaN for the default stream; they get their values late, on the current one.

    A kernel on another stream reads the NaN. None on a CPU, and where an input cannot be filled in place.
    """
    first = next(t for t in tensors if t is not None)
    filled = [(t, v) for t, v in zip(tensors, values, strict=True) if t is not None and v is not None]
    if not first.is_cuda or any(0 in t.stride() for t, _ in filled):
        return None
    for tensor, _ in filled:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    torch.cuda.synchronize(first.device)
    stream = torch.cuda.Stream(first.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000)
        for tensor, value in filled:
            tensor.copy_(value)
        results = run(*tensors)
    torch.cuda.synchronize(first.device)
    return results


def _form(name: str, found: Tensor | None, spec: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    """Shape, dtype and strides against the op's output rule; "" when they agree."""
    if spec is None or found is None:
        return "" if spec is None and found is None else f"{name}: {'missing' if found is None else 'not asked for'}"
    if tuple(found.shape) != tuple(spec[0]) or found.dtype != spec[1]:
        return f"{name}: {found.dtype}{list(found.shape)}, the output rule says {spec[1]}{list(spec[0])}"
    return "" if found.is_contiguous() else f"{name}: strides {list(found.stride())} are not contiguous"


def judge(outcome: Outcome, name: str, found: Tensor, truth: Truth, emulated: bool, *, statistic: bool = False) -> None:
    """Judge one output by itself. A statistic that is not finite makes every gradient NaN, whichever kind it is."""
    oracle, baseline = truth.oracle[name], truth.baseline[name]
    assert oracle is not None and baseline is not None
    if not found.dtype.is_floating_point:  # numbers that are counted or drawn have no rounding
        wrong = int((found != baseline).sum())
        outcome.problems += [f"{name}: {wrong} integers are not those of the reference"] if wrong else []
        return
    scale, narrowed = truth.scale.get(name), truth.narrowed.get(name)
    mine, base = (errors(t, oracle, baseline, scale, narrowed) for t in (found, baseline))
    outcome.errors[name] = mine, base, found.dtype
    if statistic:
        mine.misplaced = int((torch.isfinite(found) != torch.isfinite(baseline)).sum())
    if mine.misplaced:
        outcome.problems.append(
            f"{name}: {mine.misplaced} elements are NaN or Inf where the reference is not, or the reverse"
        )
    limit = largest_allowed(base) + emulation(found.dtype, emulated)
    if mine.largest > limit:
        outcome.problems.append(f"{name}: largest error {mine.largest:.3g} ulp, allowed {limit:.3g}")


def emulation(dtype: torch.dtype, emulated: bool) -> float:
    """Ulps that Triton's interpreter adds in float32: it sums some rows one element after the other."""
    return 8.0 if emulated and dtype == torch.float32 else 0.0


def judge_pool(pool: Mapping[str, tuple[Errors, Errors, torch.dtype]], emulated: bool) -> list[str]:
    """The RMS rule over errors added up by output."""
    problems = []
    for name, (mine, base, dtype) in pool.items():
        limit = rms_allowed(base, dtype) + emulation(dtype, emulated)
        if mine.rms > limit:
            problems.append(f"{name}: RMS error {mine.rms:.3g} ulp over {mine.count} elements, allowed {limit:.3g}")
    return problems


def add_to_pool(pool: dict[str, tuple[Errors, Errors, torch.dtype]], outcome: Outcome) -> None:
    for name, (mine, base, dtype) in outcome.errors.items():
        known = pool.setdefault(name, (Errors(), Errors(), dtype))
        known[0].add(mine)
        known[1].add(base)
