"""The tuner: choices that repeat, candidates that misbehave, runs that are interrupted and go on, and its workers."""

from __future__ import annotations

import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tilewright as tw
import toy_kernels
from tilewright.core import cache, dispatch, evidence, registry, times
from tilewright.core.call import Call
from tilewright.core.device import device_of, target_device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.policy import Policy
from tilewright.core.selection import guarded, weigh
from tilewright.tune import classes, others, pool, tune, wire
from tilewright.tune.decide import Place, Times, choice, estimates, settled
from tilewright.tune.pool import Limits, Pool, Worker, WorkerFailed
from tilewright.tune.rounds import Effort, run
from tilewright.verify.cases import make_inputs
from toy_kernels import OP, TUNED_ROWS, toy

QUICK = Effort(least=2, most=4, seconds=2.0)
SHAPE = (TUNED_ROWS, 64)
LIMITS = Limits(prove=60.0, time=60.0)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of the test's own, here and in workers, and a process that remembers nothing."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(others, "LIMIT", 2.0)  # tests run beside tests
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


def forget() -> None:
    """As a new process would: what is on disk stays."""
    cache.cache_directory.cache_clear()
    cache.disk.cache_clear()
    evidence.forget()
    times.forget()


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[list[Kernel]]:
    """The toy kernels that the test names, in declared order, before the reference."""
    added = [toy(name, 300 + place) for place, name in enumerate(request.param)]
    registry.add_kernels(added)
    yield added
    for kernel in added:
        registry.remove_kernel(kernel)


def with_kernels(*names: str) -> Any:
    return pytest.mark.parametrize("kernels", [names], indirect=True, ids=[""])


def a_call(saving: bool = False) -> Call:
    return classes.call_of(registry.op(OP), SHAPE, torch.float32, device_of("cpu"), saving=saving)


def tune_toys(**more: Any) -> Any:
    arguments: dict[str, Any] = {"effort": QUICK, "limits": LIMITS, "backends": ["vendor"], "device": "cpu", **more}
    if "ops" not in arguments and "calls" not in arguments:
        arguments["calls"] = [a_call()]
    return tune(**arguments)


# The choice -------------------------------------------------------------------------------------------------------

KERNEL_A, KERNEL_B = (100, 0), (200, 1)
PLACES = [Place(KERNEL_A, 0), Place(KERNEL_A, 1), Place(KERNEL_B, 0)]


@pytest.mark.parametrize(
    ("times_us", "expected"),
    [
        ((10.0, 10.0, 10.0), 0),
        ((10.09, 10.0, 10.0), 0),
        ((10.2, 10.0, 10.0), 1),
        ((10.2, 10.0, 9.0), 2),
        ((20.0, 10.09, 10.0), 1),
        ((20.0, 10.11, 10.0), 2),
    ],
)
def test_the_first_declared_stays_unless_beaten_by_more_than_the_tie_band(
    times_us: Sequence[float], expected: int
) -> None:
    times = Times(dict(enumerate(times_us)))
    assert choice(times, times, PLACES) == expected


def test_configs_of_a_kernel_are_told_apart_by_kernel_time_and_kernels_by_the_metric_asked_for() -> None:
    kernels = Times({0: 3.0, 1: 2.0, 2: 1.0})
    assert choice(Times({0: 8.0, 1: 8.3, 2: 9.0}), kernels, PLACES) == 1, "0 and 1 differ by the host's noise alone"
    assert choice(kernels, kernels, PLACES) == 2


def test_drift_is_taken_out() -> None:
    """A pair that was dropped while the machine was slow compares with those that ran on."""
    true = {0: 10.0, 1: 12.0, 2: 50.0}
    rounds = []
    for number in range(8):
        speed = 1.5 if number < 2 else 1.0
        rounds.append({pair: us * speed for pair, us in true.items() if pair < 2 or number < 2})
    found = estimates(rounds).us
    assert {pair: round(us / found[0], 6) for pair, us in found.items()} == {0: 1.0, 1: 1.2, 2: 5.0}


def test_the_error_of_a_time_is_what_its_samples_scatter() -> None:
    generator = random.Random(7)
    middles, errors = [], []
    for _ in range(200):
        rounds = [{0: 10.0 * math.exp(generator.gauss(0.0, 0.02)), 1: 10.0, 2: 10.0} for _ in range(24)]
        found = estimates(rounds)
        middles.append(found.us[0])
        errors.append(found.errors[0])
    scatter = statistics.stdev(middles) / 10
    assert 0.8 * scatter < statistics.mean(errors) < 1.25 * scatter


def test_equals_stay_equal_where_times_are_uncertain() -> None:
    def chosen(first_us: float, error: float) -> int:
        times = Times({0: first_us, 1: 10.0}, {0: error})
        return choice(times, times, PLACES)

    assert chosen(10.25, 0.0) == 1
    assert chosen(10.25, 0.01) == 0
    assert chosen(10.35, 0.5) == 1, "chance explains only so much"


class Machine:
    """A machine whose clock drifts and whose samples scatter, with an outlier now and then."""

    def __init__(self, true: Sequence[float], seed: int, noise: float) -> None:
        self.true, self.noise, self.seed = true, noise, seed
        self.random = random.Random(seed)
        self.drift = 0.0
        self.asked = 0

    def __call__(self, pair: int) -> tuple[float, float]:
        self.asked += 1
        self.drift = 0.98 * self.drift + self.random.gauss(0.0, 0.004)
        factor = math.exp(self.drift + self.random.gauss(0.0, self.noise))
        factor *= 1.5 if self.random.random() < 0.03 else 1.0
        return self.host(pair) * math.exp(self.random.gauss(0.0, self.noise)), self.true[pair] * factor

    def host(self, pair: int) -> float:
        return self.true[pair] * 1.3


class HostBound(Machine):
    """Calls take what the host takes, up to 4 % more or less for each pair in each process, whatever the kernel."""

    def host(self, pair: int) -> float:
        return (60.0, 75.0, 66.0)[pair // 4] * (1 + 0.08 * (random.Random(f"{self.seed} {pair}").random() - 0.5))


def a_class(seed: int) -> tuple[list[Place], list[float]]:
    """Three kernels of four configs each: some equal, some close, most not."""
    generator = random.Random(1000 + seed)
    places = [Place((100 * kernel, kernel), config) for kernel in range(3) for config in range(4)]
    true = [40.0 * (1 + generator.choice([0.0, 0.02, 0.05, 0.1, 0.3, 1.0]) * generator.random()) for _ in places]
    return places, true


@pytest.mark.parametrize("machine", [Machine, HostBound])
@pytest.mark.parametrize(("noise", "least"), [(0.003, 38), (0.01, 34)])
def test_tuned_twice_it_chooses_the_same(machine: type[Machine], noise: float, least: int) -> None:
    """In 19 of 20 classes on a quiet machine; at 1 % of noise in 17 of 20 at the least."""
    same = 0
    for seed in range(40):
        places, true = a_class(seed)
        chosen = []
        for again in (1, 2):
            found = run(machine(true, 10 * seed + again, noise=noise), places).times
            calls = Times({p: t.call_us for p, t in found.items()}, {p: t.call_error for p, t in found.items()})
            kernels = Times({p: t.kernel_us for p, t in found.items()}, {p: t.kernel_error for p, t in found.items()})
            chosen.append([choice(times, kernels, places) for times in (calls, kernels)])
        same += chosen[0] == chosen[1]
    assert same >= least


def test_clear_cases_end_early_and_close_ones_take_more_rounds() -> None:
    places = [Place((i, i), 0) for i in range(4)]
    clear, close = Machine([10, 15, 20, 40], 1, 0.004), Machine([10.1, 10, 20, 40], 1, 0.004)
    assert run(clear, places).rounds == Effort().least + 1
    assert run(close, places).rounds >= Effort().close
    assert clear.asked < 2 * Effort().least * len(places)  # those far behind were dropped


def test_a_pair_that_fails_between_rounds_is_left_out() -> None:
    places = [Place((i, i), 0) for i in range(3)]
    asked = 0

    def sampler(pair: int) -> tuple[float, float] | None:
        nonlocal asked
        asked += pair == 0
        return None if pair == 0 and asked == 4 else (10.0 + pair, 10.0 + pair)

    found = run(sampler, places)
    assert set(found.times) == {1, 2}
    assert found.settled["call_us"].choice == 1


def test_nothing_alive_is_no_choice() -> None:
    found = run(lambda pair: None, [Place((0, 0), 0)])
    assert found.times == {}
    assert found.settled == {}


def test_being_sure_is_told() -> None:
    places = [Place((0, 0), 0), Place((1, 1), 0)]
    machine = Machine([10.2, 10.0], 3, 0.002)
    many = [{0: machine(0)[1], 1: machine(1)[1]} for _ in range(20)]
    sure = settled(many, many, places)
    machine = Machine([10.1, 10.0], 3, 0.02)
    few = [{0: machine(0)[1], 1: machine(1)[1]} for _ in range(5)]
    unsure = settled(few, few, places)
    assert sure.share >= 0.97
    assert unsure.share < 0.97


# What there is to tune --------------------------------------------------------------------------------------------


def test_classes_are_those_that_calls_meet() -> None:
    """A class of each forward op, with and without saving, and of its backward as autograd calls it."""
    for op in registry.ops():
        if op.gradient is None:
            continue
        names = [n for n in op.tensors if n not in op.probes.absent[0]]
        made = make_inputs(op, (4, 32), torch.float32, absent=op.probes.absent[0])
        tensors = {n: made[n] for n in names}
        for n in op.gradient.gives:
            if n in tensors:
                tensors[n].requires_grad_()
        seen: list[Call] = []

        def noting(call: Call, *args: Any, seen: list[Call] = seen, **more: Any) -> Any:
            seen.append(call)
            return weigh(call, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilewright.core.selection.weigh", noting)
            with tw.use(backend="reference"):
                evidence.bump()
                outputs = op(**tensors, **op.usual)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                used = [o for n, o in zip(op.out, outputs, strict=True) if n not in op.gradient.seldom]
                sum(o.sum() for o in used).backward()
        expected = {
            (s.call.op, str(dict(s.call.options)), tuple(n for n, t in s.call.tensors.items() if t), s.call.saving)
            for o in (op, registry.op(op.gradient.op))
            for s in classes.subjects([o], device_of("cpu"), [(4, 32)], [torch.float32])
        }
        met = {(c.op, str(dict(c.options)), tuple(n for n, t in c.tensors.items() if t), c.saving) for c in seen}
        assert len(met) == 2
        assert met <= expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_calls_are_found_in_code(compiled: bool) -> None:
    """Also those whose plans are known already, each class once, gradients and in-place forms included."""
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(7, 24)
    function = tw.linear
    if compiled:
        function = torch.compile(lambda *tensors, act: tw.linear(*tensors, act=act), backend="aot_eager")

    def step(rows: int = 5) -> None:
        for _ in range(2):
            function(tw.l2_norm(x[:rows]), weight, act="relu").sum().backward()
        with torch.no_grad():
            tw.silu_(torch.ones(3, 24))

    with tw.use("reference"):
        step()
        found = classes.calls_of(step)
        assert len(classes.calls_of(lambda: (step(5), step(1)))) > len(found), "other rows, another class"
    assert {(c.op, c.saving) for c in found} == {
        ("l2_norm", True), ("linear", True), ("linear_backward", False), ("l2_norm_backward", False), ("silu", False)
    }  # fmt: skip
    assert len(found) == 5 and found[0].x.shape == (5, 24)
    assert not dispatch._watchers


def test_each_class_of_an_op_has_a_name_of_its_own() -> None:
    """One gradient serves two ops: which calls a row is about can be read off it."""
    for op in registry.ops():
        found = [classes.variant(s.call) for s in classes.subjects([op], device_of("cpu"), [(4, 32)])]
        assert len(found) == len(set(found))
    gradient = [classes.variant(s.call) for s in classes.subjects([tw.rms_norm_backward], device_of("cpu"), [(4, 32)])]
    assert gradient == ["", "with dh"]
    x = torch.randn(4, 32, requires_grad=True)
    odd = tw.explain(tw.layer_norm, x, torch.ones(32), eps=0.5).call
    assert classes.variant(odd) == "without bias, eps=0.5, training"


def printed(report: Any) -> str:
    from tilewright.cli.tune import _print

    with pytest.MonkeyPatch.context() as patch:
        console = Console(width=200, record=True, file=io.StringIO())
        patch.setattr("tilewright.cli.tune.stdout", lambda: console)
        _print(report)
    return console.export_text()


def test_requests_survive_json() -> None:
    for op in registry.ops():
        for subject in classes.subjects([op], target_device("sm_90")):
            data = json.loads(json.dumps(wire.call_to_json(subject.call)))
            assert wire.call_from_json(data) == subject.call
    for kernel in registry.kernels_of(OP):
        assert wire.kernel_from_json(json.loads(json.dumps(wire.kernel_to_json(kernel)))) is kernel


def test_a_kernel_whose_source_changed_is_refused() -> None:
    data = {**wire.kernel_to_json(toy("quick", 300)), "digest": "another"}
    with pytest.raises(tw.TilewrightError, match="source changed"):
        wire.kernel_from_json(data)


# Tuning here ------------------------------------------------------------------------------------------------------


@with_kernels("slow", "slower")
def test_tuned_twice_here_it_chooses_the_same(fresh: Path, kernels: list[Kernel]) -> None:
    chosen = []
    for _ in range(2):
        report = tune_toys(ops=[OP], shapes=[SHAPE], dtypes=[torch.float32], force=True)
        assert [c.saving for c in report.classes] == [False, True]
        assert not report.failures
        for found in report.classes:
            assert {t.kernel for t in found.times} == {*map(str, kernels), f"{OP}/reference"}
            assert all(t.call_us > 0 for t in found.times)
        chosen.append([found.chosen["call_us"].kernel for found in report.classes])
        forget()
    assert chosen[0] == chosen[1]
    assert chosen[0] == [f"{OP}/reference"] * 2  # although it is declared last
    x = torch.randn(SHAPE)
    explained = tw.explain(getattr(tw, OP), x)
    assert explained.chosen is not None
    assert str(explained.chosen.kernel) == chosen[0][0]
    assert "tuned" in explained.why


@with_kernels("hangs", "dies", "raises", "wrong", "silent", "dies_while_timed", "slow", "chatty")
def test_bad_candidates_are_reported_and_never_stop_the_run(fresh: Path, kernels: list[Kernel]) -> None:
    call = a_call()
    with Pool(limits=LIMITS) as warm:  # a worker's start and the first use of torch are not what hangs
        warm.prove(toy("quick", 300), Config(), call)
        warm.limits = Limits(prove=3.0, time=8.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilewright.tune.engine.Pool", lambda limits: warm)
            report = tune_toys(calls=[call])
    (found,) = report.classes
    failed = {f.kernel.rpartition("/")[2]: (f.stage, f.kind, f.reason) for f in found.failures}
    assert failed.keys() == {"hangs", "dies", "raises", "wrong", "silent", "dies_while_timed"}
    assert failed["hangs"][:2] == ("prove", "hung")
    assert failed["dies"][:2] == ("prove", "died")
    assert "exit 7" in failed["dies"][2]
    assert "last words" in failed["dies"][2]
    assert failed["raises"][:2] == ("prove", "error")
    assert "RuntimeError: no such thing for torch.float32" in failed["raises"][2]
    assert failed["wrong"][:2] == ("prove", "wrong")
    assert failed["silent"][:2] == ("prove", "wrong")
    assert failed["dies_while_timed"][:2] == ("time", "died")
    assert "SIGABRT" in failed["dies_while_timed"][2]
    assert {t.kernel.rpartition("/")[2] for t in found.times} == {"slow", "chatty", "reference"}
    # Selection knows what happened, and why; only the wrong ones are remembered by the next process.
    reasons = {c.kernel.label: c.reasons for c in weigh(call, Policy()).candidates}
    for name in failed:
        assert reasons[name][0].argument == "quarantine", name
    forget()
    reasons = {c.kernel.label: c.reasons for c in weigh(call, Policy()).candidates}
    assert {name for name in failed if reasons[name]} == {"wrong", "silent"}


@with_kernels("quick", "slow")
def test_an_interrupted_run_goes_on_where_it_ended(fresh: Path, kernels: list[Kernel]) -> None:
    subjects = [classes.call_of(registry.op(OP), (rows, 64), torch.float32, device_of("cpu")) for rows in (16, 300)]
    pids: list[int | None] = []

    def interrupt(done: int, total: int, text: str) -> None:
        if done == 1 and "timing" in text:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        ask = Worker.ask

        def noting(self: Worker, request: Any, seconds: float) -> Any:
            reply = ask(self, request, seconds)
            pids.append(self.pid)
            return reply

        patch.setattr(Worker, "ask", noting)
        with pytest.raises(KeyboardInterrupt):
            tune_toys(calls=subjects, progress=interrupt)
    assert not any(alive(pid) for pid in pids if pid is not None), "an interrupted run leaves no worker"
    forget()
    report = tune_toys(calls=subjects)
    found = [(c.kept, c.timed, c.rounds > 0, len(c.times)) for c in report.classes]
    assert found == [(3, 0, False, 3), (0, 3, True, 3)]
    assert report.classes[0].chosen["call_us"].backend
    again = tune_toys(calls=subjects)
    assert [(c.kept, c.timed) for c in again.classes] == [(3, 0), (3, 0)]
    lines = [line for line in printed(report).splitlines() if not line.startswith("rough")]
    assert [line.split()[-2:] for line in lines[-2:]] == [["3", "before"], ["3", "now"]]
    assert not list(fresh.glob("*/.new-*"))


@with_kernels("quick")
def test_times_taken_on_a_busy_cpu_are_measured_again(
    fresh: Path, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(others, "LIMIT", 0.1)
            report = tune_toys()
            text = printed(report)
    finally:
        for process in spin:
            process.kill()
            process.wait()
    assert 0.1 < report.classes[0].busy <= 1.0
    assert "other processes took up to" in text
    (again,) = tune_toys().classes
    assert (again.kept, again.timed) == (0, 2), "the kernel and the reference"
    (known,) = tune_toys().classes
    assert (known.kept, known.timed) == (2, 0)


def test_what_the_tuner_and_its_workers_do_is_not_put_down_to_others() -> None:
    watch, before, begun = others.Others(lambda: None), os.times(), others._busy()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        sum(range(1000))
    share, after, taken = watch.share(), os.times(), others._busy() - begun
    mine = after.user + after.system - before.user - before.system
    cpus = len(os.sched_getaffinity(0))
    assert mine > 0.2, "so much must be seen in the next line"
    assert share == pytest.approx((taken / os.sysconf("SC_CLK_TCK") - mine) / cpus, abs=0.4 * mine / cpus)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(tw.UnknownName, match="no_such_op"):
        tune(["no_such_op"], device="cpu")
    with pytest.raises(tw.UnknownName, match="no_such_backend"):
        tune([OP], backends=["no_such_backend"], device="cpu")


def test_a_plug_in_of_another_package_is_tuned(tmp_path: Path) -> None:
    """Client and worker both find it through its entry point alone."""
    facts = tmp_path / "toys-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[tilewright.kernels]\ntoys = stranger:TUNED\n")
    (tmp_path / "stranger.py").write_text(Path(toy_kernels.__file__).read_text())
    script = f"""
import torch
from rich.console import Console
from tilewright.core.call import Call
from tilewright.tune import tune
from tilewright.tune.rounds import Effort
from tilewright.verify.cases import make_inputs
report = tune(["{OP}"], shapes=[(64, 32)], dtypes=[torch.float32], backends=["vendor"], device="cpu",
              effort=Effort(least=1, most=1))
assert not report.failures, report.failures
print(sorted({{t.kernel for c in report.classes for t in c.times}}))
"""
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    own = {"PYTHONPATH": path, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"['{OP}/reference', '{OP}/vendor/quick', '{OP}/vendor/slow']"


# Workers ----------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_worker_ends_with_its_client_whatever_it_is_doing(fresh: Path) -> None:
    worker = Worker()
    try:
        worker.ask({"do": "ping"}, 60)
        process = worker._process
        assert process is not None and process.stdin is not None
        request = wire.job("prove", toy("hangs", 300), Config(), a_call())
        with pytest.raises(WorkerFailed):
            worker.ask({**request, "op": "nonsense", "do": "nonsense"}, 60)  # a bad request is answered
        process.stdin.write(json.dumps({**request, "id": 9}).encode() + b"\n")
        process.stdin.flush()
        time.sleep(0.2)
        process.stdin.close()  # what the system does when the client is killed
        assert process.wait(timeout=10) == 0
    finally:
        worker.close()


def test_first_use_of_a_new_kernel_may_be_checked_in_a_worker(fresh: Path) -> None:
    call = a_call(saving=True)
    try:
        assert pool.prove_in_worker(toy("quick", 300), Config(), call).passed
        verdict = pool.prove_in_worker(toy("wrong", 300), Config(), call)
        assert verdict.passed is False
        assert verdict.detail
        with guarded(toy("dies", 300), Config(), call) as failed:
            pool.prove_in_worker(toy("dies", 300), Config(), call)
        assert "the worker died (exit 7)" in failed[0]
        assert "exit 7" in (evidence.broken(toy("dies", 300), Config(), call.device.arch) or "")
    finally:
        pool._shared.close()


def test_which_kernels_are_checked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that launch on a GPU and have passed nowhere; functions of torch and CPU calls are checked in process."""
    asked: list[str] = []
    passed = evidence.Verdict(True)
    monkeypatch.setattr(evidence, "_prover", [lambda kernel, config, call: asked.append("here") or passed])
    monkeypatch.setattr(evidence, "_isolated", [lambda kernel, config, call: asked.append("apart") or passed])
    new, function = Kernel(OP, "triton", "toy_kernels:quick", label="toy"), toy("quick", 300)
    on_gpu = classes.call_of(registry.op(OP), SHAPE, torch.float32, target_device("sm_90"))
    for kernel, call in ((new, on_gpu), (function, on_gpu), (new, a_call())):
        evidence.prove(kernel, Config(), call)
    assert asked == ["apart", "here", "here"]
    monkeypatch.setattr(evidence, "proven_anywhere", lambda kernel, here: True)
    evidence.prove(new, Config(), on_gpu)
    assert asked[-1] == "here"
