"""Which kernel serves a call: order of choice, evidence, quarantine, and what `explain` says of it.

The kernels here are functions of torch for `l2_norm`, right or wrong on purpose, preferred before the library's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.core import dispatch, evidence, registry, times
from tilewright.core.cache import disk
from tilewright.core.capability import Capability
from tilewright.core.classes import call_class, layout_class
from tilewright.core.device import device_of, target_device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.reason import Reason
from tilewright.verify import first_use

OP = registry.op("l2_norm")
CPU = device_of("cpu")
PLAIN = Config()
calls: list[str] = []
caught: list[torch.Tensor] = []


def _right(x: Any, eps: float, saving: bool) -> list[Any]:
    return OP.define({"x": x}, {"eps": eps}, saving)


def quick(x: Any, *, eps: float, saving: bool) -> list[Any]:
    calls.append("quick")
    return _right(x, eps, saving)


def slow(x: Any, *, eps: float, saving: bool) -> list[Any]:
    calls.append("slow")
    return _right(x, eps, saving)


def wrong(x: Any, *, eps: float, saving: bool) -> list[Any]:
    calls.append("wrong")
    y, *rest = _right(x, eps, saving)
    return [y * 1.5, *rest]


def wrong_on_seven(x: Any, *, eps: float, saving: bool) -> list[Any]:
    """Right on every probe; wrong, and greedy for random numbers, where the caller's data hold a 7."""
    y, *rest = _right(x, eps, saving)
    return [y + 1 if bool((x == 7).any()) else y, *rest]


def lucky(x: Any, *, eps: float, saving: bool) -> list[Any]:
    torch.rand(3)
    return _right(x, eps, saving)


def raising(x: Any, *, eps: float, saving: bool) -> list[Any]:
    calls.append("raising")
    raise ValueError("this kernel never compiles")


def interrupted(x: Any, *, eps: float, saving: bool) -> list[Any]:
    raise KeyboardInterrupt


class DeviceLost(RuntimeError):
    sticky = True


def sticky(x: Any, *, eps: float, saving: bool) -> list[Any]:
    raise DeviceLost("an illegal memory access was encountered")


def hungry(x: Any, *, eps: float, saving: bool) -> list[Any]:
    raise torch.OutOfMemoryError("tried to allocate 3 EiB")


def never_fits(call: Any) -> Iterator[Reason]:
    yield Reason("x", "is not to this kernel's taste", "another x would do")


Make = Callable[..., Kernel]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Adds a kernel of l2_norm for one test, under a label of its own, so that no test sees another's evidence."""
    made: list[Kernel] = []
    calls.clear()

    def add(function: str, preference: int = -10, **more: Any) -> Kernel:
        label = f"{function} {request.node.name}"
        kernel = Kernel("l2_norm", "vendor", f"{__name__}:{function}", label=label, preference=preference, **more)
        registry.add_kernels([kernel])
        made.append(kernel)
        return kernel

    yield add
    for kernel in made:
        registry.remove_kernel(kernel)


def facts(x: torch.Tensor) -> Any:
    return dispatch.facts_of(OP, [x], dict(OP.options), False, False)


def chosen(x: torch.Tensor, **how: Any) -> str:
    found = tw.explain(tw.l2_norm, x, **how).chosen
    return "" if found is None else found.kernel.label.split(" ")[0] or found.backend


def record(kernel: Kernel, x: torch.Tensor, us: float, config: Config = PLAIN, device: Any = CPU) -> None:
    times.record(kernel, config, "l2_norm", call_class(facts(x), dict(OP.options)), device, us, us)


# Order -------------------------------------------------------------------------------------------------------------


def test_pinned_before_tuned_before_declared_before_reference(make: Make) -> None:
    x = torch.randn(3, 17)
    slow, quick = make("slow", -20), make("quick", -10)
    assert chosen(x) == "slow", "the lower declared preference, without times"
    record(slow, x, 20.0), record(quick, x, 10.0)
    assert chosen(x) == "quick", "the faster one, once measured"
    assert "tuned" in tw.explain(tw.l2_norm, x).why
    assert chosen(x, backend="reference") == "reference"
    with tw.use(backend="reference"):
        assert chosen(x) == "reference"
        assert chosen(x, backend="vendor") == "quick", "a pin is stronger than a preference"
    order = [c.kernel.label.split(" ")[0] or c.backend for c in tw.explain(tw.l2_norm, x).candidates if c.fits]
    assert order[:3] == ["quick", "slow", "reference"], "inductor, which must compile first, comes last by declaration"


def test_reference_serves_where_nothing_else_fits() -> None:
    found = tw.explain(tw.l2_norm, torch.randn(3, 17, dtype=torch.float64))
    assert found.chosen is not None and found.chosen.backend == "reference"
    assert all(c.reasons for c in found.candidates if c.backend != "reference")


def test_incumbent_stays_inside_the_tie_band(make: Make) -> None:
    x = torch.randn(3, 18)
    slow, quick = make("slow", -20), make("quick", -10)
    record(slow, x, 10.05), record(quick, x, 10.0)
    assert chosen(x) == "slow", "beaten by half a percent only"
    record(slow, x, 10.2)
    assert chosen(x) == "quick"


def test_the_reference_does_not_win_by_times_that_outlived_a_kernels(make: Make) -> None:
    """Times of an edited kernel count no longer; the reference is never edited so."""
    x = torch.randn(3, 19)
    edited = make("edited", -20)
    reference = next(k for k in registry.kernels_of("l2_norm") if k.backend == "reference")
    record(reference, x, 10.0)
    assert chosen(x) == "edited", "nothing says that it is slower"
    record(edited, x, 11.0)
    assert chosen(x) == "reference"


def test_kernels_whose_calls_were_not_timed_are_told_apart_by_what_their_kernels_take(make: Make) -> None:
    """Benchmarks of every config time kernels alone; the least that a call can take is no call's time."""
    x = torch.randn(3, 21)
    called, alone = make("called", -20), make("alone", -10)
    cls = call_class(facts(x), dict(OP.options))
    times.record(called, PLAIN, "l2_norm", cls, CPU, 30.0, 10.0)
    times.record(alone, PLAIN, "l2_norm", cls, CPU, None, 12.0)
    assert chosen(x) == "called"
    times.record(alone, PLAIN, "l2_norm", cls, CPU, None, 8.0)
    assert chosen(x) == "alone"
    assert "kernels" in tw.explain(tw.l2_norm, x).why
    times.record(alone, PLAIN, "l2_norm", cls, CPU, 40.0, 8.0)
    assert chosen(x) == "called"


def test_configs_are_chosen_by_time_too(make: Make) -> None:
    x = torch.randn(3, 19)
    kernel = make("quick", configs=(Config(n=1), Config(n=2), Config(n=3)))
    for n, us in ((1, 30.0), (2, 10.05), (3, 10.0)):
        record(kernel, x, us, Config(n=n))
    found = tw.explain(tw.l2_norm, x).chosen
    assert found is not None and found.config == Config(n=2), "the first inside the tie band"


def test_shipped_times_of_a_class_are_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines' times would say which of them is faster."""
    first, second = (k for k in registry.kernels_of("rms_norm") if k.backend in ("triton", "tile"))
    pair = [times._pair(kernel, PLAIN, "cuda") for kernel in (first, second)]
    shipped = {
        "sm_90": {
            "NVIDIA H100": {"rms_norm c": {pair[0]: [None, 9.0]}},
            "NVIDIA H200": {"rms_norm c": {pair[1]: [None, 5.0]}},
        }
    }
    monkeypatch.setattr(times, "_shipped", lambda: shipped)
    for name, known in (("NVIDIA H100", first), ("NVIDIA H200", second), ("another of sm_90", first)):
        device = replace(target_device("sm_90"), name=name)
        found = {k.name for k in (first, second) if times.find(k, PLAIN, "rms_norm", "c", device)}
        assert found == {known.name}, name


def test_times_of_another_gpu_driver_or_compiler_are_not_used(make: Make) -> None:
    x = torch.randn(3, 20)
    make("slow", -20)
    quick = make("quick", -10)
    record(quick, x, 1.0, device=replace(CPU, driver="999.99"))
    record(quick, x, 1.0, device=replace(CPU, name="another machine"))
    found = tw.explain(tw.l2_norm, x)
    assert chosen(x) == "slow" and "999.99" in str(found) and "not used here" in str(found)
    cls = call_class(facts(x), dict(OP.options))
    older = {f"{quick.name} {quick.digest} 0.0.1|": {"call_us": 1.0, "kernel_us": 1.0}}
    disk().update("times", f"l2_norm {cls}", lambda known: known.update({f"{CPU.name}|{CPU.driver}": older}))
    times.forget()
    assert chosen(x) == "slow", "a time under another compiler"
    assert times.find(quick, Config(), "l2_norm", cls, CPU) is None


# Evidence ----------------------------------------------------------------------------------------------------------


def test_first_use_checks_once_and_never_again(make: Make) -> None:
    make("quick")
    x = torch.randn(3, 33)
    tw.l2_norm(x)
    first = len(calls)
    assert first > 3, "probes, then the call"
    for rows in (3, 4, 1000):
        tw.l2_norm(torch.randn(rows, 33))
    assert len(calls) == first + 3, "no probe for other row counts"
    evidence.forget()  # as in another process
    tw.l2_norm(x)
    assert len(calls) == first + 4, "evidence is on the disk"


def test_check_never_runs_no_probe(make: Make) -> None:
    make("wrong")
    x = torch.randn(3, 34)
    with tw.use(check="never"):
        y = tw.l2_norm(x)
    assert calls == ["wrong"]
    assert not torch.allclose(y, OP.reference(x))


def test_check_always_catches_what_probes_do_not_show(make: Make) -> None:
    make("wrong_on_seven")
    x = torch.randn(3, 35)
    tw.l2_norm(x)
    x[1, 1] = 7
    kept = x.clone()
    tw.l2_norm(x)  # unnoticed
    with tw.use(check="always"):
        tw.l2_norm(torch.randn(3, 35))
        with pytest.raises(tw.CheckFailed, match=r"l2_norm: y: .*allowed"):
            tw.l2_norm(x)
        tw.l2_norm(torch.randn(3, 35))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("check", ["first", "always"])
def test_checks_advance_no_generator_and_follow_no_mode(make: Make, check: Any) -> None:
    make("lucky")
    x = torch.randn(3, 36 + (check == "always"), requires_grad=True)
    before = torch.random.get_rng_state()
    with tw.use(check=check), torch.random.fork_rng():
        tw.l2_norm(x)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(5)
    torch.rand(3)
    expected = torch.rand(1)
    torch.manual_seed(5)
    evidence.forget()
    tw.l2_norm(torch.randn(3, 38, generator=torch.Generator()))
    assert torch.equal(torch.rand(1), expected), "the call's own three numbers and none of the probes'"


@pytest.mark.parametrize("asking", ["reference", "toy", ""])
def test_a_backend_may_ask_for_checks_on_one_thread(make: Make, monkeypatch: pytest.MonkeyPatch, asking: str) -> None:
    """As in a forked child; afterwards torch has its threads again."""
    kernel = make("lucky")
    if asking:
        name = "reference" if asking == "reference" else kernel.backend
        monkeypatch.setattr(type(registry.backend(name)), "serial", lambda self: True)
    seen, real = [], first_use.check

    def check(*args: Any, **how: Any) -> Any:
        seen.append(torch.get_num_threads())
        return real(*args, **how)

    monkeypatch.setattr(first_use, "check", check)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tw.l2_norm(torch.randn(3, 37))
        assert set(seen) == {1 if asking else 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_wrong_kernel_is_quarantined_and_the_next_serves(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = make("wrong", -20), make("quick", -10)
    x = torch.randn(3, 40)
    y = tw.l2_norm(x)
    torch.testing.assert_close(y, OP.reference(x))
    assert any("wrong" in r.message and "quarantined" in r.message for r in caplog.records)
    table = str(tw.explain(tw.l2_norm, x))
    assert "quarantine" in table and "largest error" in table and chosen(x) == "quick"
    bads = len([c for c in calls if c == "wrong"])
    evidence.forget()  # as in another process: the verdict is kept
    tw.l2_norm(torch.randn(4, 40))
    assert len([c for c in calls if c == "wrong"]) == bads
    layout = layout_class(facts(x), dict(OP.options))
    stored = evidence.find(bad, Config(), layout, CPU.arch)
    assert stored is not None and stored.passed is False
    changed = replace(bad)
    changed.__dict__["digest"] = "0123456789abcdef"  # the source was mended
    assert evidence.find(changed, Config(), layout, CPU.arch) is None
    found = evidence.find(good, Config(), layout, CPU.arch)
    assert found is not None and found.passed


def test_pinned_kernel_that_is_wrong_is_refused_with_its_error(make: Make) -> None:
    make("wrong")
    with pytest.raises(tw.NoKernel, match="wrong result, y: largest error"):
        tw.l2_norm(torch.randn(3, 41), backend="vendor")


def test_error_while_checking_lasts_as_long_as_the_process(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    bad = make("raising", -20)
    make("quick", -10)
    x = torch.randn(3, 42)
    torch.testing.assert_close(tw.l2_norm(x), OP.reference(x))
    tw.l2_norm(torch.randn(5, 42)), tw.l2_norm(torch.randn(5, 43))
    assert calls.count("raising") == 1
    assert "ValueError: this kernel never compiles" in str(tw.explain(tw.l2_norm, x))
    assert any(r.exc_info for r in caplog.records), "the trace is logged, not swallowed"
    assert not disk().load_json("evidence", evidence._group(bad, CPU.arch)), "nothing persists"
    evidence.forget()
    assert chosen(x) == "raising", "the next process tries again"


def test_out_of_memory_in_a_check_is_no_verdict(make: Make) -> None:
    bad = make("hungry", -20)
    make("quick", -10)
    x = torch.randn(3, 44)
    torch.testing.assert_close(tw.l2_norm(x), OP.reference(x))
    assert "not verified: out of memory" in str(tw.explain(tw.l2_norm, x))
    other = str(tw.explain(tw.l2_norm, torch.randn(3, 444)))  # a class that may need less memory
    assert "not verified" not in other
    assert not disk().load_json("evidence", evidence._group(bad, CPU.arch))


@pytest.mark.parametrize(("function", "error"), [("interrupted", KeyboardInterrupt), ("sticky", DeviceLost)])
def test_what_must_propagate_does_and_leaves_all_usable(make: Make, function: str, error: type) -> None:
    kernel = make(function, -20)
    make("quick", -10)
    x = torch.randn(3, 45)
    with pytest.raises(error):
        tw.l2_norm(x)
    assert evidence.broken(kernel, Config(), CPU.arch) is None
    with pytest.raises(error):
        tw.l2_norm(x)
    registry.remove_kernel(kernel)
    torch.testing.assert_close(tw.l2_norm(x), OP.reference(x))
    registry.add_kernels([kernel])


# What is kept ------------------------------------------------------------------------------------------------------


def test_new_evidence_kernels_and_times_invalidate_plans(make: Make) -> None:
    x = torch.randn(3, 50)
    with tw.use(check="never"):
        slow = make("slow", -20)
        tw.l2_norm(x)
        quick = make("quick", -30)
        tw.l2_norm(x)
        record(quick, x, 20.0), record(slow, x, 10.0)
        tw.l2_norm(x)
        evidence.mark_broken(slow, Config(), CPU.arch, "made up")
        tw.l2_norm(x)
    assert calls == ["slow", "quick", "slow", "quick"]


def test_a_quarantine_during_a_miss_is_not_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread finds the kernel broken after it was chosen here: the plan made meanwhile must not last."""
    bad = make("slow", -20)
    make("quick", -10)
    bind = dispatch.bind

    def late(kernel: Kernel, config: Config, call: Any) -> Any:
        made = bind(kernel, config, call)
        monkeypatch.setattr(dispatch, "bind", bind)
        evidence.mark_broken(bad, Config(), CPU.arch, "found by another thread")
        return made

    x = torch.randn(3, 51)
    with tw.use(check="never"):
        monkeypatch.setattr(dispatch, "bind", late)
        tw.l2_norm(x)
        tw.l2_norm(x)
    assert calls == ["slow", "quick"]


def test_plan_tables_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("quick")
    plans = type(OP).__call__.__globals__["plans"]  # type: ignore[attr-defined]
    monkeypatch.setattr(dispatch, "TABLE_LIMIT", 16)
    with tw.use(check="never"):
        for n in range(40):
            tw.l2_norm(torch.randn(n + 1, 8))
            torch.ops.tilewright.l2_norm(torch.randn(n + 1, 8), eps=1e-6)
            tw.l2_norm(torch.randn(2, n + 1))
    for table in (plans, dispatch._selected, dispatch._node_plans):
        assert 0 < len(table) <= 16
    assert len(calls) == 120


def test_entering_a_block_again_finds_its_plans_again(make: Make) -> None:
    make("quick")
    plans = type(OP).__call__.__globals__["plans"]  # type: ignore[attr-defined]
    x = torch.randn(3, 52)
    sizes = set()
    for _ in range(5):
        with tw.use(check="never", ops=["l2_norm"]), tw.use(strict=True):
            tw.l2_norm(x)
        sizes.add(len(plans))
    assert len(sizes) == 1


# What is said ------------------------------------------------------------------------------------------------------


def test_explain_holds_every_kernel_and_every_reason(make: Make) -> None:
    make("quick")
    make("slow", capability=Capability(limits=(never_fits,)))
    found = tw.explain(tw.l2_norm, torch.randn(3, 60))
    text = str(found)
    for kernel in registry.kernels_of("l2_norm"):
        assert kernel.backend in text and kernel.label in text
    for candidate in found.candidates:
        assert candidate.fits or all(str(reason) in text for reason in candidate.reasons)
    assert "x: is not to this kernel's taste; another x would do" in text
    assert "l2_norm" in text and "fp32[3, 60]" in text and "chosen:" in text and " >" in text
    assert not calls, "explain runs nothing"


def test_evidence_on_disk_is_plain_json(make: Make) -> None:
    kernel = make("quick")
    tw.l2_norm(torch.randn(3, 62))
    stored = disk().load("evidence", evidence._group(kernel, CPU.arch))
    assert stored is not None
    (entry,) = json.loads(stored).values()
    assert entry["passed"] is True and entry["cases"] >= 3 and entry["where"] == CPU.arch


def test_evidence_of_other_sources_and_compilers_goes_when_new_is_kept(make: Make) -> None:
    kernel, other = make("quick"), make("slow")
    mine, theirs = evidence._group(kernel, CPU.arch), evidence._group(other, CPU.arch)
    older = mine.replace(kernel.digest, "0123456789abcdef")
    compiler = mine.replace(f" vendor {registry.backend('vendor').version()} ", " vendor 0.0.1 ")
    elsewhere = evidence._group(kernel, "sm_90")
    assert len({mine, theirs, older, compiler, elsewhere}) == 5
    for group in (theirs, older, compiler, elsewhere):
        disk().store("evidence", group, b"{}")
    evidence.forget()
    tw.l2_norm(torch.randn(3, 63))
    kept = {g for g in (mine, theirs, older, compiler, elsewhere) if disk().load("evidence", g) is not None}
    assert kept == {mine, theirs, elsewhere}


def test_times_that_nothing_can_use_any_more_go_when_new_ones_are_kept(make: Make) -> None:
    x = torch.randn(3, 64)
    quick, gone = make("quick"), make("slow")
    cls = call_class(facts(x), dict(OP.options))
    pair, stranger = (times._pair(kernel, Config(), "cpu") for kernel in (quick, gone))
    registry.remove_kernel(gone)
    older = pair.replace(quick.digest, "0123456789abcdef")
    compiler = f"{quick.name} {quick.digest} 0.0.1|"
    us = {"call_us": 1.0, "kernel_us": 1.0}
    here, there = f"{CPU.name}|{CPU.driver}", f"another machine|{CPU.driver}"
    stored = {
        here: dict.fromkeys((older, compiler, stranger), us),
        there: dict.fromkeys((pair, older), us),
        f"{CPU.name}|an older driver": {pair: us},
        "a third|1": {compiler: us},
    }
    disk().store("times", f"l2_norm {cls}", json.dumps(stored).encode())
    times.forget()
    record(quick, x, 2.0)
    kept = {place: set(pairs) for place, pairs in disk().load_json("times", f"l2_norm {cls}").items()}
    assert kept == {here: {pair, stranger}, there: {pair}}
    assert times.find(quick, Config(), "l2_norm", cls, CPU) == times.Time(2.0, 2.0, date=evidence.today())
    registry.add_kernels([gone])
