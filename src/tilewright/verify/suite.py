"""The conformance suite: every (op, kernel, config) over every case. `tilewright verify` prints what it returns."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.core import evidence, registry
from tilewright.core.call import Call
from tilewright.core.classes import layout_class
from tilewright.core.device import default_device, device_of, torch_device
from tilewright.core.errors import InvalidArgument, UnknownName
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.op import Op
from tilewright.verify.cases import DTYPES, SIZES, Case, build, cases
from tilewright.verify.check import Outcome, Truth, add_to_pool, call_of, check, judge_pool, truth_of
from tilewright.verify.numerics import largest_allowed
from tilewright.verify.script import write_script

_VALUES = re.compile(r"'[^']*'|-?\d+(\.\d+)?")
WITHOUT = "without gradient"
Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


@dataclass
class Result:
    """One row of the report. "not run" is never "passed"."""

    op: str
    backend: str
    dtype: str
    kernel: str = ""
    """op/backend, and the label that tells kernels of one backend apart."""
    config: str = ""
    cases: int = 0
    passed: int = 0
    failed: int = 0
    not_run: list[dict[str, str]] = field(default_factory=list)
    max_error: float = 0.0
    """Largest error in ulps, of the case nearest to its limit."""
    tolerance: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class NotRun:
    """A reason why cases of a kernel were not run: how many, and one of them.

    Reasons that differ in a number or a quoted word alone are one; it is given as `example` has it. Of several reasons
    of a case the first counts."""

    reason: str
    cases: int
    kernel: str
    example: str


@dataclass
class Report:
    device: str
    results: list[Result]

    @property
    def failed(self) -> bool:
        return any(r.failed for r in self.results)

    def not_run(self) -> list[NotRun]:
        """Why cases were not run, the most frequent reason first."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for result in self.results:
            for entry in result.not_run:
                reason = entry["reason"].partition("\n")[0]
                entries = found.setdefault((result.kernel, _VALUES.sub("", reason)), [])
                entries.append((reason, f"{result.dtype} {entry['case']}"))
        reasons = [NotRun(entries[0][0], len(entries), kernel, entries[0][1]) for (kernel, _), entries in found.items()]
        return sorted(reasons, key=lambda one: -one.cases)

    def as_json(self) -> dict[str, Any]:
        return {"device": self.device, "results": [r.as_json() for r in self.results]}


def verify(
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: str | torch.device | None = None,
    *,
    dtypes: Iterable[torch.dtype] = DTYPES,
    size: str | None = None,
    all_configs: bool = False,
    record: bool = True,
    progress: Progress | None = None,
    told: Callable[[Result], None] | None = None,
) -> Report:
    """Run the suite.

    Args:
        ops, backends: names; all by default. The reference is the definition and is not compared with itself.
        device: "cpu" or "cuda[:n]"; the GPU if there is one.
        size: "tiny", "small" or "full"; by default what the device bears.
        all_configs: every config of a kernel, not just its first guess for each case.
        record: keep verdicts as evidence.
        progress, told: called before and after each kernel.
    """
    where = default_device() if device is None else torch_device(device) if isinstance(device, str) else device
    if size is not None and size not in SIZES:
        raise UnknownName("size", size, list(SIZES))
    facts = device_of(where.type, where.index)
    chosen = [registry.op(name) for name in ops] or registry.ops()
    others = [name for name in registry.backend_names() if name != "reference"]
    for name in backends:
        registry.backend(name)
    wanted = {op.name: [k for k in registry.kernels_of(op.name) if k.backend in (backends or others)] for op in chosen}
    work = [(op, dtype, wanted[op.name]) for op in chosen for dtype in dtypes]
    total = sum(len(kernels) for _, _, kernels in work)
    report = Report(str(facts), [])
    done = 0
    for op, dtype, kernels in work:
        for kernel in kernels:
            if progress:
                progress(f"{kernel.name} {str(dtype).removeprefix('torch.')}", done, total)
            result = verify_kernel(op, kernel, dtype, where, size=size, all_configs=all_configs, record=record)
            report.results.append(result)
            if told:
                told(result)
            done += 1
    if progress:
        progress("", total, total)
    return report


def verify_kernel(
    op: Op[Any],
    kernel: Kernel,
    dtype: torch.dtype,
    where: torch.device,
    *,
    size: str | None = None,
    all_configs: bool = False,
    record: bool = False,
    stop_at_failure: bool = False,
) -> Result:
    """One kernel in one dtype over every case. See `verify`; `stop_at_failure` ends at the first red case."""
    backend = registry.backend(kernel.backend)
    facts = device_of(where.type, where.index)
    emulated = backend.emulates(facts)
    size = size or ("full" if where.type == "cuda" else "tiny" if emulated else "small")
    result = Result(op.name, kernel.backend, str(dtype).removeprefix("torch."), kernel.name)
    missing = backend.missing(facts.kind) or kernel.capability.elsewhere(facts, emulated)
    pools: dict[Config, dict[str, Any]] = {}
    verdicts: dict[tuple[Config, str], list[Outcome]] = {}
    wrong: dict[tuple[Config, str], str] = {}
    nearest = 0.0
    for case in cases(op, dtype, size=size):
        result.cases += 1
        try:
            ready = None if missing else _prepare(op, kernel, case, where, emulated)
        except (torch.OutOfMemoryError, MemoryError) as error:
            result.not_run.append({"case": str(case), "reason": f"out of memory: {str(error).splitlines()[0]}"})
            continue
        if missing or isinstance(ready, str) or ready is None:
            result.not_run.append({"case": str(case), "reason": str(missing or ready)})
            continue
        call, inputs, truth = ready
        failed = []
        layout = layout_class(call, dict(op.options))
        for config in kernel.configs_for(call)[: None if all_configs else 1]:
            outcome = _checked(kernel, config, op, inputs, call, truth, emulated)
            if outcome is None:
                result.not_run.append({"case": f"{case} {config}", "reason": "out of memory"})
                continue
            add_to_pool(pools.setdefault(config, {}), outcome)
            verdicts.setdefault((config, layout), []).append(outcome)
            if outcome.problems:
                failed.append((config, outcome))
            for mine, base, _ in outcome.errors.values():
                limit = largest_allowed(base)
                if mine.largest / limit >= nearest:
                    nearest, result.max_error, result.tolerance = mine.largest / limit, mine.largest, limit
        if failed:
            result.failed += 1
            config, outcome = failed[0]
            problem = "; ".join(outcome.problems)
            script = write_script(kernel, config, case, outcome.problems, where)
            result.failures.append({"case": str(case), "config": str(config), "problem": problem, "script": script})
            if stop_at_failure:
                return result
            for config, outcome in failed:
                if not record or (config, layout) in wrong:
                    continue
                for kind, problem in _again(kernel, config, op, inputs, call, truth, emulated, outcome).items():
                    script = write_script(kernel, config, case, outcome.problems, where)
                    wrong.setdefault((config, kind), f"{case}: {problem}; reproduce with {script}")
        else:
            result.passed += 1
    for config, pool in pools.items():
        for problem in judge_pool(pool, emulated):
            verdicts = {of: outcomes for of, outcomes in verdicts.items() if of[0] != config}
            result.failed += 1
            result.failures.append({"case": "pool", "config": str(config), "problem": problem, "script": ""})
    if record:
        _record(kernel, facts.arch, verdicts, wrong)
    return result


def _prepare(
    op: Op[Any], kernel: Kernel, case: Case, where: torch.device, emulated: bool
) -> tuple[Call, dict[str, torch.Tensor | None], Truth] | str:
    """The case's call, inputs and truth; or why this kernel does not run it."""
    inputs = build(case, op, where)
    options = {**op.usual, **case.options}
    call = call_of(op, inputs, options, saving=op.gradient is not None)
    if not call.outputs or any(f is not None and f.numel == 0 for f in call.tensors.values()):
        return "nothing to compute: the reference serves empty calls"
    reasons = kernel.capability.reasons(call, emulated=emulated)
    if reasons and call.saving:  # a kernel without a gradient is still checked without one
        call = call_of(op, inputs, options, saving=False)
        reasons = kernel.capability.reasons(call, emulated=emulated)
    if reasons:
        return "\n".join(map(str, reasons))
    return call, inputs, truth_of(op, inputs, options, call.saving)


def _checked(
    kernel: Kernel, config: Config, op: Op[Any], inputs: Any, call: Call, truth: Truth, emulated: bool
) -> Outcome | None:
    """The outcome, with and without saving where there is a gradient, and in place where the op has such a form; None
    where memory ran out.

    A kernel that raises is a red case with its message; a device that is lost ends the run.
    """
    try:
        outcome = check(
            kernel, config, op, inputs, call.options, truth,
            saving=call.saving, emulated=emulated, in_place=not call.saving,
        )  # fmt: skip
        if call.saving and not outcome.problems:
            plain = check(
                kernel, config, op, inputs, call.options, truth, saving=False, emulated=emulated, in_place=True
            )
            outcome.problems += [f"{WITHOUT}: {problem}" for problem in plain.problems]
            outcome.in_place = plain.in_place
        return outcome
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except InvalidArgument:
        raise
    except Exception as error:
        if getattr(error, "sticky", False):
            raise
        said = str(error).strip().splitlines()[0] if str(error) else ""
        return Outcome(problems=[f"{type(error).__name__}: {said}"], raised=True)


def _again(
    kernel: Kernel, config: Config, op: Op[Any], inputs: Any, call: Call, truth: Truth, emulated: bool, first: Outcome
) -> dict[str, str]:  # fmt: skip
    """What is wrong a second time, by layout class: with a gradient and without one may not both be. What raised, or
    ran out of memory, shows nothing."""
    found: dict[str, str] = {}
    layout = layout_class(call, dict(op.options))
    for kind in dict.fromkeys((layout, layout.replace(" saving", ""))) if not first.raised else ():
        form = dataclasses.replace(call, saving=call.saving and kind == layout)
        outcome = _checked(kernel, config, op, inputs, form, truth, emulated)
        own = [] if outcome is None or outcome.raised else [p for p in outcome.problems if not p.startswith(WITHOUT)]
        if own:
            found[kind] = own[0]
    return found


def _record(
    kernel: Kernel,
    arch: str,
    verdicts: dict[tuple[Config, str], list[Outcome]],
    wrong: dict[tuple[Config, str], str],
) -> None:
    """A layout class that passed is evidence, and a wrong result that came again is evidence against the kernel. Where
    it raised, was wrong once or over the pool, first use will tell, with its own probes."""
    found = {}
    for (config, layout), outcomes in verdicts.items():
        plain = layout.replace(" saving", "")
        if not any(o.problems for o in outcomes):
            for kind in (layout, plain):
                found[config, kind] = Verdict(True, len(outcomes), arch, evidence.today())
            if count := sum(o.in_place for o in outcomes):
                found[config, f"{plain} in place"] = Verdict(True, count, arch, evidence.today())
    found |= {of: Verdict(False, 1, arch, evidence.today(), detail) for of, detail in wrong.items()}
    evidence.record_many(kernel, arch, found)
