"""The tuner: proves and times every (kernel, config) pair of a call class in workers, and records the times.

It chooses nothing itself: selection reads what is recorded here (`core/times.py`). How samples are ordered and when
enough were taken is in `rounds.py`; what there is to tune in `classes.py`; the processes in `pool.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.core import evidence, registry, times
from tilewright.core.call import Call
from tilewright.core.classes import call_class, layout_class
from tilewright.core.device import Device, default_device, device_of, torch_device
from tilewright.core.errors import UnknownName
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.op import Op
from tilewright.core.policy import Policy
from tilewright.core.selection import Selection, weigh
from tilewright.tune import others
from tilewright.tune.classes import Subject, subjects, variant
from tilewright.tune.decide import Place
from tilewright.tune.pool import LIMITS, Limits, Pool, WorkerFailed, alone_on
from tilewright.tune.report import Choice, ClassReport, PairFailure, PairTime, Report, Stage
from tilewright.tune.rounds import EFFORT, METRICS, Effort, run
from tilewright.tune.wire import dtype_to_json
from tilewright.verify.cases import extent_of, main_of

Progress = Callable[[int, int, str], None]
"""(classes done, classes in all, what is being done now)."""


@dataclass(frozen=True)
class Pair:
    """One way to serve a class."""

    kernel: Kernel
    config: Config
    place: Place

    def __str__(self) -> str:
        return f"{self.kernel} {self.config}".strip()


def tune(
    ops: Sequence[str | Op[Any]] | None = None,
    *,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    calls: Sequence[Call] | None = None,
    backends: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    force: bool = False,
    progress: Progress = lambda done, total, text: None,
    effort: Effort = EFFORT,
    limits: Limits = LIMITS,
) -> Report:
    """Time all proven (kernel, config) pairs of the ops' call classes and record the times for selection.

    Each class is recorded as soon as it is measured, so an interrupted run loses one class at most; the next run goes
    on where it ended. A candidate that fails, hangs or kills its process is reported and never stops the run.

    Args:
        ops: names or ops; every op, gradients included, by default. Give backward ops by name too.
        shapes: each [..., C]; the shapes of the ops' workloads by default.
        dtypes: the workload's own by default (bf16 for `shapes`).
        calls: tune exactly these calls (`calls_of(run)`, `explain(...).call`) instead of `ops`, `shapes` and `dtypes`.
        backends: names; every backend by default. The reference is timed beside them in any case.
        device: the first GPU if there is one, else the CPU.
        force: measure pairs again whose times on this GPU, driver and compiler are known. Times that were taken while
            other processes had the CPUs are measured again in any case.
        progress: called before each step.

    Raises:
        UnknownName: for an op or backend that does not exist.
    """
    for name in backends or ():
        if name not in registry.backend_names():
            raise UnknownName("backend", name, registry.backend_names())
    if calls is not None:
        found = [Subject(call, "", _shape(call), main_of(call).dtype) for call in calls]
        where = calls[0].device if calls else _device(device)
    else:
        chosen = [registry.op(o) if isinstance(o, str) else o for o in ops] if ops is not None else registry.ops()
        where = _device(device)
        found = subjects(chosen, where, shapes, dtypes)
    report = Report(str(where), where.driver)
    wanted = None if backends is None else frozenset(backends) | {"reference"}
    with Pool(limits=limits) as pool:
        for done, subject in enumerate(found):
            say = _Say(progress, done, len(found), subject)
            report.classes.append(_tune_class(subject, pool, wanted, force, effort, say))
        progress(len(found), len(found), "done")
    return report


def _tune_class(
    subject: Subject, pool: Pool, backends: frozenset[str] | None, force: bool, effort: Effort, say: _Say
) -> ClassReport:
    start = time.monotonic()
    call = subject.call
    defaults = dict(registry.op(call.op).options)
    cls, layout = call_class(call, defaults), layout_class(call, defaults)
    report = ClassReport(
        call.op,
        cls,
        subject.workload,
        list(subject.shape),
        dtype_to_json(subject.dtype),
        call.saving,
        variant(call),
    )
    every = pairs_of(call, backends)
    known = {
        pair for pair in every
        if (t := times.find(pair.kernel, pair.config, call.op, cls, call.device)) and not t.shipped and not t.busy
    }  # fmt: skip
    missing = [pair for pair in every if force or pair not in known]
    report.kept = len(every) - len(missing)
    if missing:
        # Times of different runs are not compared: those that are known already are measured beside the new ones.
        able = _compiled(every, call, pool, report, say)
        able = [pair for pair in able if _proven(pair, call, layout, pool, report, say)]
        if set(missing) & set(able):
            report.kept = 0
            _measure(able, call, cls, pool, effort, report, say)
    _choices(call, report)
    report.times = _times(every, call, cls)
    report.seconds = time.monotonic() - start
    return report


def pairs_of(call: Call, backends: frozenset[str] | None = None) -> list[Pair]:
    """Every (kernel, config) that takes the call and is not known to be wrong or broken, by declared order."""
    found = []
    layout = layout_class(call, dict(registry.op(call.op).options))
    for candidate in sorted(weigh(call, Policy()).candidates, key=lambda c: c.rank):
        kernel = candidate.kernel
        if candidate.reasons or (backends is not None and kernel.backend not in backends):
            continue
        for number, config in enumerate(kernel.configs_for(call)):
            if evidence.broken(kernel, config, call.device.arch, layout) is not None:
                continue
            verdict = _verdict(kernel, config, layout, call)
            if verdict is None or verdict.passed is not False:
                found.append(Pair(kernel, config, Place(candidate.rank, number)))
    return found


def _verdict(kernel: Kernel, config: Config, layout: str, call: Call) -> Verdict | None:
    return None if kernel.backend == "reference" else evidence.find(kernel, config, layout, call.device.arch)


def _compiled(pairs: Sequence[Pair], call: Call, pool: Pool, report: ClassReport, say: _Say) -> list[Pair]:
    """Compile what is launched on a GPU into the artifact cache, in processes that see none."""
    jobs = [p for p in pairs if call.device.is_gpu and registry.backend(p.kernel.backend).launches]
    if not jobs:
        return list(pairs)
    count = 0

    def done(place: int, failure: WorkerFailed | None) -> None:
        nonlocal count
        count += 1
        say(f"compiling {count}/{len(jobs)}")

    say(f"compiling 0/{len(jobs)}")
    results = pool.compile([(p.kernel, p.config, call) for p in jobs], done)
    failed = {pair for pair, failure in zip(jobs, results, strict=True) if failure is not None}
    for pair, failure in zip(jobs, results, strict=True):
        if failure is not None:
            _out(pair, call, "compile", failure, report)
    return [pair for pair in pairs if pair not in failed]


def _proven(pair: Pair, call: Call, layout: str, pool: Pool, report: ClassReport, say: _Say) -> bool:
    """Whether there is evidence, gathered now where there was none."""
    kernel, config = pair.kernel, pair.config
    if kernel.backend == "reference":
        return True
    known = evidence.find(kernel, config, layout, call.device.arch)
    if known is not None and known.passed:
        return True
    say(f"checking {pair}")
    try:
        verdict = pool.prove(kernel, config, call)
    except WorkerFailed as failure:
        _out(pair, call, "prove", failure, report)
        return False
    evidence.record(kernel, config, layout, call.device.arch, verdict)
    if not verdict.passed:
        kind = "wrong" if verdict.passed is False else "unproven"
        report.failures.append(PairFailure(kernel.backend, str(kernel), str(config), "prove", kind, verdict.detail))
    return bool(verdict.passed)


def _measure(
    pairs: Sequence[Pair], call: Call, cls: str, pool: Pool, effort: Effort, report: ClassReport, say: _Say
) -> None:
    def sampler(number: int) -> tuple[float, float] | None:
        pair = pairs[number]
        say(f"timing {pair}")
        try:
            return pool.time(pair.kernel, pair.config, call)
        except WorkerFailed as failure:
            _out(pair, call, "time", failure, report)
            return None

    with alone_on(call.device):
        watch = others.Others(lambda: pool.runner.pid)
        timed = run(sampler, [pair.place for pair in pairs], effort)
        report.busy = watch.share() if call.device.kind == "cpu" else 0.0
    busy = report.busy if report.busy > others.LIMIT else 0.0
    measured = {(pairs[n].kernel, pairs[n].config): replace(found, busy=busy) for n, found in timed.times.items()}
    if measured:
        times.record_many(measured, call.op, cls, call.device)
    report.rounds, report.timed = timed.rounds, len(measured)
    for metric, settled in timed.settled.items():
        pair = pairs[settled.choice]
        report.chosen[metric] = Choice(pair.kernel.backend, str(pair.kernel), str(pair.config), settled.share)


def _times(pairs: Sequence[Pair], call: Call, cls: str) -> list[PairTime]:
    """All that is known of the class now, measured in this run or before, fastest call first."""
    found = []
    for pair in pairs:
        known = times.find(pair.kernel, pair.config, call.op, cls, call.device)
        if known is not None and known.call_us is not None and not known.shipped:
            names = (pair.kernel.backend, str(pair.kernel), str(pair.config))
            found.append(PairTime(*names, known.call_us, known.kernel_us))
    return sorted(found, key=lambda time: time.call_us)


def _out(pair: Pair, call: Call, stage: Stage, failure: WorkerFailed, report: ClassReport) -> None:
    """A candidate that is out for as long as this process lasts; running out of memory says nothing about it."""
    if failure.kind != "memory":
        evidence.mark_broken(pair.kernel, pair.config, call.device.arch, str(failure))
    report.failures.append(
        PairFailure(pair.kernel.backend, str(pair.kernel), str(pair.config), stage, failure.kind, str(failure))
    )


def _choices(call: Call, report: ClassReport) -> None:
    """What selection itself says now; the tuner only adds how sure it is."""
    for metric in METRICS:
        found: Selection = weigh(call, Policy(), metric=metric)
        if found.chosen is not None:
            kernel, config = found.chosen.kernel, found.chosen.config
            known = report.chosen.get(metric)
            same = known is not None and (known.kernel, known.config) == (str(kernel), str(config))
            report.chosen[metric] = Choice(
                kernel.backend, str(kernel), str(config), known.sure if known is not None and same else 1.0
            )


class _Say:
    """Progress of one class."""

    def __init__(self, progress: Progress, done: int, total: int, subject: Subject) -> None:
        self.progress, self.done, self.total = progress, done, total
        shape = "x".join(map(str, subject.shape))
        self.title = " ".join(
            filter(None, [subject.call.op, variant(subject.call), shape, dtype_to_json(subject.dtype)])
        )

    def __call__(self, text: str) -> None:
        self.progress(self.done, self.total, f"{self.title}: {text}")


def _device(device: torch.device | str | None) -> Device:
    chosen = default_device() if device is None else torch_device(device) if isinstance(device, str) else device
    return device_of(chosen.type, chosen.index)


def _shape(call: Call) -> tuple[int, ...]:
    extent = extent_of(call)
    named = registry.op(call.op).probes.sizes  # what options tell is in the options
    return (*extent.lead, extent.columns, *(extent.sizes[name] for name in named))
