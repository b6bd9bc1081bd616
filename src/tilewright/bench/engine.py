"""Measures every proven kernel on every problem: kernel time, call time, and the ratio to the best rival.

A kernel is verified before it is timed; one without passing evidence gets a row without a time. Nothing of the user's
is changed: inputs come from seeded generators, and times are not recorded for selection (`tilewright tune` does that).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright.bench import measure
from tilewright.bench.measure import Run, Watch
from tilewright.bench.peers import Peer, gradient_of, peers_of
from tilewright.bench.problems import PASSES, Problem, Tensors, input_bytes, problems
from tilewright.bench.results import PeerRow, Report, Row, machine, software
from tilewright.core import evidence, policy, registry
from tilewright.core.call import Call
from tilewright.core.classes import layout_class
from tilewright.core.device import default_device, device_of, torch_device
from tilewright.core.errors import NoKernel
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, scratches, stages_of
from tilewright.core.plan import bind, prepare
from tilewright.core.selection import guarded, select

log = logging.getLogger("tilewright")
Progress = Callable[[str, int, int], None]
"""(what, done, total)"""
LARGEST_ON_CPU = 1 << 23
"""Elements of the largest workload that a CPU is given without being asked for it by name or shape."""


@dataclass(frozen=True)
class Subject:
    """A (kernel, config) to time, unless it is not verified. `auto`: what its backend would choose."""

    kernel: Kernel
    config: Config
    verified: bool
    auto: bool


def bench(
    ops: Sequence[str] = (),
    *,
    workloads: Sequence[str] = (),
    shapes: Sequence[tuple[int, ...]] = (),
    dtypes: Sequence[torch.dtype] = (),
    backends: Sequence[str] = (),
    passes: Sequence[str] = PASSES,
    peers: bool | Sequence[str] = False,
    all_configs: bool = False,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure ops on this machine.

    Args:
        ops: names; all but the gradients by default. Each is measured forward and backward, as `passes` says.
        workloads: parts of workload names; shapes: instead of workloads; dtypes: the workload's own by default.
        backends: names; all by default.
        peers: measure the rivals that are installed (or those of these names), and each kernel against the best.
        all_configs: every proven config of every kernel, not the one that selection takes.
        device: the GPU if there is one.

    Raises:
        UnknownName: an op, workload or backend that does not exist.
    """
    where = default_device() if device is None else torch_device(device) if isinstance(device, str) else device
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    for name in backends:
        registry.backend(name)
    work = problems(ops, workloads=workloads, shapes=shapes, dtypes=dtypes, passes=passes, device=where)
    report = Report(machine(device_of(where.type, where.index)), software(), 0.0, 0.0)
    if where.type == "cpu" and not shapes and not workloads:
        small = [p for p in work if p.shape[0] * p.shape[1] <= LARGEST_ON_CPU]
        if len(small) < len(work):
            left_out = len(work) - len(small)
            report.notes.append(f"{left_out} problems are left out as too large for a CPU; name a workload or a shape")
        work = small
    if progress:
        progress("copy and matmul rates", 0, len(work))
    rates = measure.ceilings(where)
    report.copy_tb_s, report.matmul_tflops = float(f"{rates.copy_tb_s:.4g}"), float(f"{rates.matmul_tflops:.4g}")
    for done, problem in enumerate(work):
        if progress:
            progress(str(problem), done, len(work))
        with policy.use(check="first"):
            _Bench(problem, report, rates, backends, peers, all_configs).run()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    if progress:
        progress("", len(work), len(work))
    return report


def gradient_by(problem: Problem, backend: str, first: Tensors) -> Run:
    """The gradient of the problem's op by autograd, by one backend, on a graph that is kept.

    Forward is by the definition, so that only the backward is this backend's; a preference, not a pin, reaches it. It
    comes last, for what is said of an op is said of its gradient.
    """
    owner = problem.owner

    def forward(leaves: Tensors) -> Any:
        return owner(*(leaves[n] for n in owner.tensors), **problem.given_options)

    chosen = partial(policy.use, backend, ops=[problem.op], strict=True)
    try:
        with policy.use("reference", ops=[owner]), chosen():
            return gradient_of(problem, forward, first, 0)
    except torch.OutOfMemoryError:  # a definition may keep every pair of tokens
        with chosen():
            return gradient_of(problem, forward, first, 0)


class _Bench:
    """One problem: its inputs, its rivals, its kernels."""

    def __init__(
        self,
        problem: Problem,
        report: Report,
        rates: measure.Ceilings,
        backends: Sequence[str],
        peers: bool | Sequence[str],
        every: bool,
    ) -> None:
        self.problem, self.report, self.rates = problem, report, rates
        self.backends = list(backends) or registry.backend_names()
        self.peers, self.every = peers, every
        self.gpu = problem.device.type == "cuda"
        self.stream = torch.cuda.Stream(problem.device) if self.gpu else None

    def run(self) -> None:
        problem = self.problem
        first = problem.inputs(0)
        call = problem.call(first)
        self.size = input_bytes(first)
        cache = measure.cache_bytes(problem.device)
        count, self.flush = measure.rotation(self.size, cache) if self.gpu else (1, False)
        self.sets = [first, *(problem.inputs(seed) for seed in range(1, count))]
        bytes_moved, operations = problem.op.cost(call)
        if self.gpu:
            caches = ["cold", "hot"] if bytes_moved < 2 * cache else ["cold"]
        else:
            caches = ["cold" if bytes_moved >= 2 * cache else "hot"]
        subjects = list(self._subjects(call))
        rivals = {c: self._rivals(c) for c in caches} if self.peers and subjects else {}
        for subject in subjects:
            if not subject.verified:
                self._row(subject, caches[0], bytes_moved)
                continue
            with _noted(self.report, f"{problem} {subject.kernel} {subject.config}"), torch.no_grad():
                call_us = self._call_us(subject)
                runs = self._kernel_runs(subject.kernel, subject.config, call)
                for c in caches:
                    watch = self._watch(runs, c)
                    floor = self.rates.floor_us(bytes_moved, operations)
                    self._measure(subject, watch, rivals.get(c, []), c, bytes_moved, floor, call_us)

    # What is timed

    def _subjects(self, call: Call) -> Iterator[Subject]:
        for name in self.backends:
            kernels = [k for k in registry.kernels_of(call.op) if k.backend == name]
            if not kernels:
                continue
            if registry.backend(name).emulates(call.device):
                self._note(f"{', '.join(map(str, kernels))}: interpreted here; not timed")
                continue
            try:
                chosen = select(call, policy.current(), backend=name).chosen
            except NoKernel as error:
                yield from self._red(call, name)
                reasons = "; ".join(line.strip() for line in str(error).splitlines()[1:-1])
                self._note(f"{kernels[0] if len(kernels) == 1 else name}: not timed: {reasons}")
                continue
            except (torch.OutOfMemoryError, MemoryError) as error:
                self._note(f"{', '.join(map(str, kernels))}: not verified, out of memory: {str(error).splitlines()[0]}")
                continue
            assert chosen is not None and chosen.config is not None
            yield Subject(chosen.kernel, chosen.config, True, True)
            if self.every and name != "reference":
                yield from self._others(call, name, chosen.kernel, chosen.config)

    def _red(self, call: Call, backend: str) -> Iterator[Subject]:
        """Kernels of the backend that take the call and are known to be wrong."""
        layout = layout_class(call, dict(registry.op(call.op).options))
        for kernel in registry.kernels_of(call.op):
            if kernel.backend != backend or kernel.capability.reasons(call):
                continue
            for config in kernel.configs_for(call):
                verdict = evidence.find(kernel, config, layout, call.device.arch)
                if verdict is not None and verdict.passed is False:
                    yield Subject(kernel, config, False, True)

    def _others(self, call: Call, backend: str, kernel: Kernel, config: Config) -> Iterator[Subject]:
        """Every other config of every kernel of the backend that takes the call, each with its own evidence."""
        layout = layout_class(call, dict(registry.op(call.op).options))
        for other in registry.kernels_of(call.op):
            if other.backend != backend or other.capability.reasons(call):
                continue
            for candidate in other.configs_for(call):
                if (other, candidate) == (kernel, config):
                    continue
                verdict = evidence.find(other, candidate, layout, call.device.arch)
                if verdict is None:
                    with guarded(other, candidate, call) as failed:
                        verdict = evidence.prove(other, candidate, call)
                    if failed or verdict is None:
                        self._note(f"{f'{other} {candidate}'.strip()}: {'; '.join(failed)}")
                        continue
                    evidence.record(other, candidate, layout, call.device.arch, verdict)
                if not verdict.passed:
                    self._note(f"{f'{other} {candidate}'.strip()}: no passing evidence, so not timed: {verdict.detail}")
                yield Subject(other, candidate, bool(verdict.passed), False)

    def _kernel_runs(self, kernel: Kernel, config: Config, call: Call) -> list[Run]:
        """The kernel alone on each set; on a CPU with its outputs allocated ahead, where it lets us."""
        tensors = [[inputs[n] for n in self.problem.op.tensors] for inputs in self.sets]
        if self.problem.waits:
            self._note("the host waits for values in it, so it is timed as a whole, what torch does for it included")
            run = _any_size(kernel, config, self.problem)
            return [self.problem.whole(run, timed, seed) for seed, timed in enumerate(self.sets)]
        if not self.gpu and registry.backend(kernel.backend).launches:
            return [_preallocated(kernel, config, call, tensors[0])]
        run = bind(kernel, config, call)
        return [partial(run, *each) for each in tensors]

    def _watch(self, runs: Sequence[Run], cache: str) -> Watch:
        cold = cache == "cold"
        if self.problem.waits and self.gpu:
            return measure.EventWatch(runs if cold else runs[:1], self.problem.device, self.stream)
        return measure.kernel_watch(
            runs, self.problem.device, self.stream, size=self.size, cold=cold, flush=cold and self.flush
        )

    def _call_us(self, subject: Subject) -> float | None:
        """The call as a user makes it: the op, pinned; for a backward, its gradient by autograd on a kept graph.

        Only what selection takes can be called so; another config has no call time.
        """
        if not subject.auto:
            return None
        problem, name = self.problem, subject.kernel.backend
        first = self.sets[0]
        if not problem.backward:
            tensors = [first[n] for n in problem.op.tensors]
            with torch.no_grad():
                run: Run = partial(problem.op, *tensors, backend=name, **problem.given_options)
                return measure.call_time(run, problem.device).median
        run = gradient_by(problem, name, first)
        return measure.call_time(run, problem.device).median

    # Rivals

    def _rivals(self, cache: str) -> list[tuple[PeerRow, Watch]]:
        """Each rival that is here and computes the same, timed once; fastest first."""
        found = []
        problem = self.problem
        for peer in peers_of(problem.owner):
            wanted = self.peers is True or (self.peers and peer.name in self.peers)
            made = self._rival(peer, cache) if wanted else None
            if made is not None:
                found.append(made)
                self.report.peers.append(made[0])
        return sorted(found, key=lambda pair: pair[0].kernel_us)

    def _rival(self, peer: Peer, cache: str) -> tuple[PeerRow, Watch] | None:
        problem = self.problem
        try:
            with torch.set_grad_enabled(problem.backward):
                with _on(self.stream):
                    runs = peer.runs(problem, self.sets if cache == "cold" else self.sets[:1])
                    peer.check(problem, runs[0], self.sets[0])
                    watch = self._watch(runs, cache)
                took = measure.sample(watch, 10, seconds=1.0)
                call_us = measure.call_time(peer.runs(problem, self.sets[:1])[0], problem.device, count=5, seconds=1.0)
        except ImportError as error:
            note = f"peer {peer.name} is not installed: {error}"
            if note not in self.report.notes:
                self.report.notes.append(note)
            return None
        except Exception as error:  # noqa: BLE001  a stranger's code may raise anything; its rival is left out by name
            self._note(f"peer {peer.name} is left out: {type(error).__name__}: {str(error).strip()[:200]}")
            return None
        dtype = str(problem.dtype).removeprefix("torch.")
        row = PeerRow(
            problem.owner.name, problem.pass_name, list(problem.shape), dtype, cache, peer.name,
            took.median, took.iqr, call_us.median,
        )  # fmt: skip
        return row, watch

    # Rows

    def _measure(
        self, subject: Subject, watch: Watch, rivals: Sequence[tuple[PeerRow, Watch]], cache: str,
        bytes_moved: int, floor: float, call_us: float | None,
    ) -> None:  # fmt: skip
        row = self._row(subject, cache, bytes_moved)
        if rivals:
            best, theirs = rivals[0]
            outcome = measure.duel(watch, theirs)
            took = outcome.ours
            row.peer, row.peer_us = best.peer, outcome.theirs.median
            row.ratio_ci = [outcome.low, outcome.high]
        else:
            took = measure.sample(watch)
        row.kernel_us, row.iqr_us, row.call_us = took.median, took.iqr, call_us
        row.sol = floor / took.median if cache == "cold" else None

    def _row(self, subject: Subject, cache: str, bytes_moved: int) -> Row:
        problem = self.problem
        row = Row(
            op=problem.owner.name,
            pass_name=problem.pass_name,
            workload=problem.workload,
            shape=list(problem.shape),
            dtype=str(problem.dtype).removeprefix("torch."),
            backend=subject.kernel.backend,
            config=str(subject.config),
            cache=cache,
            bytes=bytes_moved,
            verified=subject.verified,
            kernel=subject.kernel.name,
        )
        self.report.results.append(row)
        return row

    def _note(self, text: str) -> None:
        note = f"{self.problem}: {text}"
        if note not in self.report.notes:
            self.report.notes.append(note)


def _any_size(kernel: Kernel, config: Config, problem: Problem) -> Callable[..., Any]:
    """The kernel for tensors whose sizes are known when it is called; bound once for each."""
    bound: dict[Any, Callable[..., Any]] = {}

    def run(*tensors: Any) -> Any:
        key = tuple(None if t is None else (t.shape, t.stride(), t.data_ptr() % 16) for t in tensors)
        if key not in bound:
            bound[key] = bind(kernel, config, problem.call(dict(zip(problem.op.tensors, tensors, strict=True))))
        return bound[key](*tensors)

    return run


def _preallocated(kernel: Kernel, config: Config, call: Call, tensors: Sequence[Any]) -> Run:
    """The launches of a kernel into buffers that exist."""
    stages = stages_of(kernel.load()(call, config))
    runner = prepare(registry.backend(kernel.backend), stages, call)
    device = next(t.device for t in tensors if t is not None)
    facts = [f if n in call.outputs else None for n, f in call.tensors.items() if n not in registry.op(call.op).tensors]
    facts += [s.facts for s in scratches(stages)]
    results = [None if f is None else torch.empty(f.shape, dtype=f.dtype, device=device) for f in facts]
    return partial(runner, [*tensors, *results])


@contextmanager
def _noted(report: Report, what: str) -> Iterator[None]:
    """A kernel that fails while it is timed costs its own row and no other. A lost device ends the run."""
    rows = len(report.results)
    try:
        yield
    except Exception as error:
        if getattr(error, "sticky", False):
            raise
        del report.results[rows:]
        report.notes.append(f"{what}: not timed, {type(error).__name__}: {str(error).strip()[:200]}")
        log.warning("%s: not timed", what, exc_info=error)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Work enqueued inside goes to `stream`, after what was enqueued before and before what comes after."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


__all__ = ["Progress", "Subject", "Tensors", "bench"]
