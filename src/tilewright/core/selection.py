"""Selection: which kernel and config serve a call class, and a reason for every other.

Order of choice: pinned, tuned (measured here), ranked (shipped measurements, then declared preference), reference.
`weigh` only looks; `select` also gathers the evidence that the chosen kernel needs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.core import evidence, registry, times
from tilewright.core.call import Call
from tilewright.core.classes import call_class, layout_class
from tilewright.core.errors import NoKernel, NotWarm
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.policy import Policy
from tilewright.core.reason import Reason
from tilewright.core.times import TIE_BAND, Metric, Time

log = logging.getLogger("tilewright")
"""Eager calls minimise the whole call, compiled graphs and CUDA graphs the kernels alone."""


@dataclass(eq=False, repr=False)
class Candidate:
    """One kernel, weighed: the config it would run with, and why it would not. `rank` orders the untimed."""

    kernel: Kernel
    config: Config | None
    reasons: list[Reason]
    rank: tuple[int, ...]
    verdict: Verdict | None = None
    time: Time | None = None

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def backend(self) -> str:
        return self.kernel.backend


@dataclass(eq=False, repr=False)
class Selection:
    """The decision for one call class. `candidates` are in the order in which they would be chosen."""

    call: Call
    call_class: str
    layout: str
    candidates: list[Candidate]
    chosen: Candidate | None
    why: str
    notes: list[str] = field(default_factory=list)
    metric: Metric = "call_us"
    epoch: int = 0
    """What `evidence.epoch` was when the candidates were weighed: what has changed since then is not in here."""

    def __str__(self) -> str:
        from tilewright.core.explain import render

        return render(self)


def weigh(
    call: Call, policy: Policy, *, backend: str | None = None, metric: Metric = "call_us", capturing: bool = False
) -> Selection:
    """Weigh every kernel of the call's op. Runs and compiles nothing."""
    epoch = evidence.epoch[0]
    op = registry.op(call.op)
    defaults = dict(op.options)
    layout, cls = layout_class(call, defaults), call_class(call, defaults)
    backend, wanted = _of_op(call.op, backend), _of_op(call.op, backend or policy.backend(call.op))
    order = registry.backend_names()
    candidates = []
    for place, kernel in enumerate(registry.kernels_of(call.op)):
        reasons = _reasons(kernel, call, wanted, capturing)
        declared = order.index(kernel.backend) * 100 if kernel.preference is None else kernel.preference
        candidate = Candidate(kernel, None, reasons, (declared, place))
        if not reasons:
            _choose_config(candidate, call, layout, cls)
        candidates.append(candidate)
    by = _told_apart_by(metric, candidates)
    candidates.sort(key=lambda c: _order(c, by))
    chosen, why = _choose(candidates, backend, wanted, by)
    notes = [note for note in (times.stale(call.op, cls, call.device), *_copies(call), *_load_failures()) if note]
    return Selection(call, cls, layout, candidates, chosen, why, notes, metric, epoch)


def select(
    call: Call, policy: Policy, *, backend: str | None = None, metric: Metric = "call_us", capturing: bool = False
) -> Selection:
    """Weigh, then prove the chosen kernel where it has no evidence yet; one that fails is quarantined and the next is
    tried.

    Raises:
        NoKernel: the pinned backend (or, under `strict`, the preferred one) cannot take the call.
        NotWarm: evidence would have to be gathered while a CUDA graph is being captured.
    """
    while True:
        selection = weigh(call, policy, backend=backend, metric=metric, capturing=capturing)
        wanted = _of_op(call.op, backend or policy.backend(call.op))
        chosen = selection.chosen
        if chosen is None or (wanted and not chosen.kernel.answers(wanted) and policy.strict(call.op)):
            raise NoKernel(refusal(selection, wanted or "any"))
        if policy.check(call.op) == "never" or _proven(chosen) or _empty(call):
            _tell(selection, wanted)
            return selection
        _prove(selection, chosen, capturing)  # then weigh again, with what is known now


def _of_op(op: str, wanted: str | None) -> str | None:
    """What a pin or preference says of an op. The label of another op's kernel says its backend: a gradient goes with
    its forward."""
    if wanted is None or "/" not in wanted or any(kernel.pin == wanted for kernel in registry.kernels_of(op)):
        return wanted
    return wanted.partition("/")[0]


def _reasons(kernel: Kernel, call: Call, wanted: str | None, capturing: bool) -> list[Reason]:
    if kernel.backend == "reference":
        return []
    backend = registry.backend(kernel.backend)
    missing = backend.missing(call.device.kind)
    if missing is not None:
        return [missing]
    emulated = backend.emulates(call.device)
    reasons = kernel.capability.reasons(call, emulated=emulated, capturing=capturing)
    if emulated and not reasons and not kernel.answers(wanted):
        reasons.append(Reason("device", "runs by interpretation here", f'chosen only by backend="{kernel.backend}"'))
    if not reasons and not kernel.answers(wanted) and _empty(call):
        reasons.append(Reason("size", "nothing to compute: the reference serves empty calls"))
    return reasons


def _empty(call: Call) -> bool:
    """No kernel is launched for these: whichever is chosen, `plan.bind` runs the definition."""
    return any(facts is not None and facts.numel == 0 for facts in call.tensors.values())


def _copies(call: Call) -> list[str]:
    """Of an in-place call that kernels cannot write where it goes."""
    copied = ", ".join(f"{output} is copied to {name}" for output, name in call.into.items())
    return [
        f"{name} is not contiguous at a multiple of 16 bytes, as kernels write: {copied}" for name in call.misplaced[:1]
    ]


def _load_failures() -> list[str]:
    return [f"plug-in {failure.name} could not be loaded: {failure.error}" for failure in registry.load_failures]


def _choose_config(candidate: Candidate, call: Call, layout: str, cls: str) -> None:
    """The first config, among those not known to be wrong or broken, inside the tie band of the fastest; the kernel's
    own first guess without times.

    Configs are told apart by kernel time in eager mode too: the host does the same for each, and its noise is larger
    than what they differ by.
    """
    kernel, arch = candidate.kernel, call.device.arch
    refused: list[Reason] = []
    usable: list[tuple[Config, Verdict | None, Time | None]] = []
    for config in kernel.configs_for(call):
        broken = evidence.broken(kernel, config, arch, layout)
        verdict = evidence.find(kernel, config, layout, arch) if kernel.backend != "reference" else None
        if broken is not None:
            why = ": ".join(filter(None, [str(config), broken]))
            refused.append(Reason("quarantine", why, "lasts as long as this process"))
        elif verdict is not None and verdict.passed is False:
            why = ": ".join(filter(None, [str(config), f"wrong result, {verdict.detail}"]))
            refused.append(Reason("quarantine", why, verdict.where))
        else:
            usable.append((config, verdict, times.find(kernel, config, call.op, cls, call.device)))
    if not usable:
        candidate.reasons = refused or [Reason("config", "no config fits this call")]
        return
    timed = [u for u in usable if u[2] is not None and not u[2].shipped] or [u for u in usable if u[2] is not None]
    if timed:
        best = min(u[2].kernel_us for u in timed if u[2])
        usable = [u for u in timed if u[2] and u[2].tied("kernel_us", best)]
    candidate.config, candidate.verdict, candidate.time = usable[0]


def _told_apart_by(metric: Metric, candidates: list[Candidate]) -> Metric:
    """Calls, where they were timed of every kernel whose time counts; else what its kernels take."""
    known = [c.time for c in candidates if c.fits and c.time is not None]
    shipped = all(time.shipped for time in known)
    return "kernel_us" if any(time.call_us is None for time in known if time.shipped == shipped) else metric


def _order(candidate: Candidate, metric: Metric) -> tuple[Any, ...]:
    """Those that fit first; measured here before shipped before untimed; then declared preference."""
    time = candidate.time
    source = 2 if time is None else 1 if time.shipped else 0
    return (not candidate.fits, source, time.us(metric) if time else 0.0, candidate.rank)


def _choose(
    candidates: list[Candidate], backend: str | None, wanted: str | None, metric: Metric
) -> tuple[Candidate | None, str]:
    fitting = [c for c in candidates if c.fits]
    asked = [c for c in fitting if c.kernel.answers(wanted)]
    if backend is not None:
        if asked:
            return asked[0], "pinned by backend="
        return None, f"none: {backend} cannot take this call, which raises NoKernel"
    if asked:
        return asked[0], "preferred by tw.use or TILEWRIGHT_BACKEND"
    if not fitting:
        return None, "nothing fits"
    first = fitting[0]
    if first.time is None:
        return first, "declared preference: nothing is measured for this class; `tilewright tune` would"
    # The reference's times outlive those of kernels, which count no longer once a kernel is edited.
    declared = min(fitting, key=lambda c: c.rank)
    if first.backend == "reference" and declared.time is None:
        return declared, "declared preference: it is not measured for this class as it is now; `tilewright tune` would"
    # The incumbent, which would be chosen by declaration, stays unless beaten by more than the tie band.
    best, shipped = first.time.us(metric), first.time.shipped
    tied = [c for c in fitting if c.time and c.time.shipped == shipped and c.time.tied(metric, best)]
    what = "call" if metric == "call_us" else "kernels"
    how = "shipped measurement" if first.time.shipped else f"tuned {first.time.date}"
    return min(tied, key=lambda c: c.rank), f"fastest {what} ({how}, tie band {TIE_BAND:.0%})"


def _proven(chosen: Candidate) -> bool:
    """Whether it may run: it is the reference, or has evidence."""
    return chosen.backend == "reference" or (chosen.verdict is not None and bool(chosen.verdict.passed))


def _prove(selection: Selection, chosen: Candidate, capturing: bool) -> None:
    """Gather the evidence that the chosen candidate lacks; whatever comes of it is recorded or marked."""
    call, kernel, config = selection.call, chosen.kernel, chosen.config
    assert config is not None
    if capturing:
        raise NotWarm(
            f"{call.form}: {kernel.backend} is not warm for {selection.call_class}: run this call once before "
            "capturing the CUDA graph"
        )
    with guarded(kernel, config, call) as failed:
        verdict = evidence.prove(kernel, config, call)
    if failed:
        return
    evidence.record(kernel, config, selection.layout, call.device.arch, verdict)
    if verdict.passed is False:
        log.warning("%s %s is wrong on %s and quarantined: %s", kernel, config, call.device, verdict.detail)
    elif verdict.passed is None:
        why = f"not verified: {verdict.detail}"
        evidence.mark_broken(kernel, config, call.device.arch, why, selection.layout)


class guarded:
    """Around a kernel's compilation and check: errors are kept as its reason and logged, never hidden.

    Errors after which the device is lost, interrupts and running out of memory propagate.
    """

    def __init__(self, kernel: Kernel, config: Config, call: Call) -> None:
        self.kernel, self.config, self.call = kernel, config, call
        self.failed: list[str] = []

    def __enter__(self) -> list[str]:
        return self.failed

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, NotWarm)) or getattr(error, "sticky", False):
            return False
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        evidence.mark_broken(self.kernel, self.config, self.call.device.arch, why)
        log.warning("%s %s failed to compile or run: %s", self.kernel, self.config, why, exc_info=error)
        self.failed.append(why)
        return True


_told: set[tuple[str, str]] = set()


def _tell(selection: Selection, wanted: str | None) -> None:
    """Once a class: a preference that was not met, and the reference serving a GPU call."""
    call, chosen = selection.call, selection.chosen
    assert chosen is not None
    subject, told = "", selection.candidates
    if wanted and not chosen.kernel.answers(wanted):
        subject = f"{call.form}: preferred backend {wanted} does not take this call"
        told = [c for c in told if c.kernel.answers(wanted)]  # its own reasons are what the caller can act on
    elif call.device.is_gpu and chosen.backend == "reference" and wanted != "reference":
        subject = f"{call.form}: the reference serves a GPU call"
    if subject and (subject, selection.call_class) not in _told:
        _told.add((subject, selection.call_class))
        reasons = (
            "; ".join(f"{c.kernel.pin}: {c.reasons[0]}" for c in told if c.reasons) or f"it has no kernel of {call.op}"
        )
        log.warning("%s (%s): %s runs. %s", subject, selection.call_class, chosen.backend, reasons)


def refusal(selection: Selection, wanted: str) -> str:
    """The message of `NoKernel`: every reason of the wanted backend's kernels, then a line on the others."""
    lines = [f'{selection.call.form}(backend="{wanted}") cannot take this call']
    wanted = _of_op(selection.call.op, wanted) or wanted
    mine = [c for c in selection.candidates if c.kernel.answers(wanted)]
    rest = [c for c in selection.candidates if not c.kernel.answers(wanted)]
    lines += [f"  {f'{c.kernel.pin}: ' if len(mine) > 1 else ''}{reason}" for c in mine for reason in c.reasons]
    if not mine:
        lines.append(f"  {selection.call.op} has no {wanted} kernel")
    fitting = sorted({c.kernel.pin for c in rest if c.fits})
    others = [f"{c.kernel.pin}: {c.reasons[0]}" for c in rest if c.reasons]
    lines.append(
        f"Other kernels: {', '.join(fitting) or 'none'} fit{'s' if len(fitting) == 1 else ''}; " + "; ".join(others)
    )
    lines += _load_failures()
    return "\n".join(lines)
