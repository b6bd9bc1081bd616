"""The benchmark engine: its statistics, what it rotates, and that a kernel with red numbers is never timed."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import tilewright as tw
from tilewright.bench import measure
from tilewright.bench.engine import bench, gradient_by
from tilewright.bench.measure import MAX_SETS, duel, interval, rotation, sample, spread
from tilewright.bench.peers import peers_of
from tilewright.bench.problems import Problem, input_bytes, problems
from tilewright.bench.report import render
from tilewright.bench.results import Report
from tilewright.core import registry
from tilewright.core.capability import Capability
from tilewright.core.errors import InvalidArgument, UnknownName
from tilewright.core.kernel import Kernel

CPU = torch.device("cpu")
M, C = 16, 64
KEYS = [
    "op", "pass", "workload", "shape", "dtype", "backend", "config", "cache", "bytes", "kernel_us", "iqr_us", "call_us",
    "sol", "verified", "peer", "peer_us", "ratio_ci",
]  # fmt: skip


def test_interval_covers_a_known_median() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        low, high = interval([rng.lognormvariate(0.0, 0.5) for _ in range(30)])
        hits += low <= 1.0 <= high
    assert hits / 400 > 0.93


def test_interval_of_thirty_is_the_tenth_and_the_twenty_first() -> None:
    values = [float(v) for v in range(1, 31)]
    assert interval(values) == (10.0, 21.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)  # too few for 95 %: all of them


def test_duel_finds_a_known_ratio_under_drift() -> None:
    """Both slow down together, much more than they differ: ABBA keeps that out of the ratio."""
    clock = itertools.count()
    rng = random.Random(1)

    def watch(true: float) -> measure.Watch:
        return lambda: true * (1 + 0.01 * next(clock)) * rng.gauss(1.0, 0.005)

    found = duel(watch(10.0), watch(12.5))
    assert found.low <= 1.25 <= found.high
    assert found.high - found.low < 0.02


def test_spread_is_median_and_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == measure.Spread(3.0, 2.0)
    assert spread([7.0]) == measure.Spread(7.0, 0.0)


def test_sample_stops_for_time_but_never_below_its_least() -> None:
    taken = []

    def slow() -> float:
        taken.append(1)
        return 1.0

    sample(slow, 30, seconds=0.0, least=5)
    assert len(taken) == 1 + 5  # the first is thrown away


@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 20, 3 << 20, 1 << 28, 1 << 31])
def test_rotation_covers_four_times_the_cache_or_flushes(size: int) -> None:
    cache = 50 << 20
    sets, flush = rotation(size, cache)
    assert 1 <= sets <= MAX_SETS
    assert flush or sets * size >= 4 * cache
    assert not flush or sets == MAX_SETS


def test_sets_of_inputs_differ_and_repeat() -> None:
    problem = problems(["add_rms_norm"], shapes=[(M, C)], device=CPU, passes=["forward"])[0]
    a, b, again = problem.inputs(0), problem.inputs(1), problem.inputs(0)
    assert a["x"] is not None and b["x"] is not None and again["x"] is not None
    assert not torch.equal(a["x"], b["x"])
    assert torch.equal(a["x"], again["x"])


def test_problems_come_from_workloads_and_from_shapes() -> None:
    for op in registry.ops():
        found = problems([op.name], device=CPU)
        assert {p.pass_name for p in found} <= {"forward", "backward"}
    served = problems(["rms_norm_backward"], shapes=[(M, C)], device=CPU)
    assert [(p.owner.name, p.pass_name) for p in served] == [("rms_norm", "backward"), ("add_rms_norm", "backward")]
    named = problems(["rms_norm"], workloads=["PI0.5 encoder"], device=CPU)
    assert {p.shape for p in named} == {(968, 2048)}
    with pytest.raises(UnknownName, match=r"pi0\.5 encoder"):
        problems(["rms_norm"], workloads=["no such thing"], device=CPU)
    with pytest.raises(InvalidArgument, match="8192x4096"):
        problems(["rms_norm"], shapes=[()], device=CPU)


@pytest.mark.parametrize(
    ("op", "backward", "wanted"),
    [
        ("rms_norm", False, 2 * M * C * 4 + C * 4),
        ("add_rms_norm", False, 4 * M * C * 4 + C * 4),
        ("rms_norm", True, 3 * M * C * 4 + 2 * C * 4 + M * 4),
        ("add_rms_norm", True, 4 * M * C * 4 + 2 * C * 4 + M * 4),
        ("layer_norm", True, 3 * M * C * 4 + 4 * C * 4 + 2 * M * 4 - C * 4),  # bias itself is never read
    ],
)
def test_bytes_are_those_of_the_contract(op: str, backward: bool, wanted: int) -> None:
    """Each distinct byte once: weight gradients and saved statistics too, bias not where only its dtype is used."""
    passes = ["backward" if backward else "forward"]
    problem = problems([op], shapes=[(M, C)], dtypes=[torch.float32], device=CPU, passes=passes)[0]
    inputs = problem.inputs()
    moved, operations = problem.op.cost(problem.call(inputs))
    outputs = 2 * C * 4 if op == "layer_norm" else C * 4
    if backward:
        assert moved <= input_bytes(inputs) + M * C * 4 + outputs
    assert moved == wanted
    assert operations > 0


def test_rows_hold_the_schema_and_nothing_of_the_caller_changes() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    backends = ["reference", "vendor"]
    report = bench(["rms_norm"], shapes=[(M, C)], dtypes=[torch.float32], backends=backends, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    found = report.as_json()
    assert list(found) == ["device", "software", "copy_tb_s", "matmul_tflops", "results"]
    assert found["copy_tb_s"] > 0 and found["matmul_tflops"] > 0
    rows = {(r["backend"], r["pass"]): r for r in found["results"]}
    assert {("reference", "forward"), ("vendor", "forward"), ("reference", "backward")} <= set(rows)
    for row in rows.values():
        assert list(row) == KEYS
        assert row["shape"] == [M, C] and row["dtype"] == "float32" and row["verified"] is True
        assert row["cache"] == "hot" and row["sol"] is None  # no fraction of the copy rate out of a cache
        assert row["kernel_us"] > 0 and row["call_us"] > 0
        assert row["peer"] is None and row["ratio_ci"] is None
    assert rows["reference", "forward"]["bytes"] == 2 * M * C * 4 + C * 4


def test_a_table_says_what_was_measured() -> None:
    """A CPU has no clock of kernels; the same report from a GPU has one, and no note of its lack."""
    report = bench(["l2_norm"], shapes=[(M, C)], backends=["reference"], passes=["forward"], device="cpu")
    here = printed(report)
    assert "function us" in here and "no clock of kernels" in here and "kernel us" not in here
    report.device = {**report.device, "multiprocessors": 132}
    there = printed(report)
    assert "kernel us" in there and "function us" not in there and "no clock" not in there
    for text in (here, there):
        assert "of copy" in text and "of limit" not in text


def printed(report: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    render(report, console)
    return console.export_text()


def half_wrong(x: Tensor, *, eps: float, saving: bool) -> list[Tensor]:
    """A kernel whose second half of the columns is off by a little: it looks right and is fast."""
    y, rstd = tw.l2_norm.define({"x": x}, {"eps": eps}, True)
    y[..., x.shape[-1] // 2 :] *= 1.01
    return [y, rstd] if saving else [y]


@pytest.fixture
def red_kernel() -> Iterator[Kernel]:
    kernel = Kernel("l2_norm", "vendor", f"{__name__}:half_wrong", Capability(), label="half-wrong", origin="test")
    registry.add_kernels([kernel])
    yield kernel
    registry.remove_kernel(kernel)


def test_a_red_kernel_gets_no_time(red_kernel: Kernel) -> None:
    report = bench(
        ["l2_norm"],
        shapes=[(M, C)],
        dtypes=[torch.float32],
        backends=["vendor", "reference"],
        passes=["forward"],
        device="cpu",
    )
    rows = {row.backend: row for row in report.results}
    assert rows["reference"].kernel_us is not None
    red = rows["vendor"]
    assert red.verified is False
    assert (red.kernel_us, red.iqr_us, red.call_us, red.sol, red.peer_us) == (None,) * 5
    assert any("l2_norm/vendor/half-wrong: not timed: quarantine: wrong result" in note for note in report.notes)


def test_torch_as_a_peer_computes_the_same_and_an_impostor_is_found_out() -> None:
    found = problems([], shapes=[(M, C)], dtypes=[torch.float32], device=CPU)
    for problem in [p for p in found if "torch" in {peer.name for peer in peers_of(p.owner)}]:
        peers = {p.name: p for p in peers_of(problem.owner)}
        sets = [problem.inputs(0)]
        runs = peers["torch"].runs(problem, sets)
        peers["torch"].check(problem, runs[0], sets[0])
        impostor: Any = lambda run=runs[0]: [t * 1.5 for t in _tuple(run())]  # noqa: E731
        with pytest.raises(NotImplementedError, match="something else"):
            peers["torch"].check(problem, impostor, sets[0])


def test_a_gradient_is_compared_as_the_op_declares_it_where_the_formula_has_a_corner() -> None:
    """Autograd has half of |x|'s slope at 0; among millions of drawn logits some are 0."""

    class Zeros(Problem):
        def leaves(self, seed: int = 0) -> dict[str, Tensor | None]:
            made = super().leaves(seed)
            return made | {"logits": torch.zeros(M, C).requires_grad_()}

    op = registry.op("bce_with_logits")
    problem = Zeros(op, backward=True, shape=(M, C), dtype=torch.float32, workload="zeros", device=CPU)
    peers = {p.name: p for p in peers_of(problem.owner)}
    sets = [problem.inputs(0)]
    peers["torch"].check(problem, peers["torch"].runs(problem, sets)[0], sets[0])


def test_a_compiled_rival_is_one_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shape uses up another's limit of recompilations; by Dynamo alone, which counts them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("gated_residual", "bce_with_logits", "rms_norm", "linear", "gelu"):
            for rows in (2, 3, 4):
                problem = next(p for p in problems([name], shapes=[(rows, C)], dtypes=[torch.float32], device=CPU)
                               if p.backward)  # fmt: skip
                rival = next(p for p in peers_of(problem.owner) if p.name == "torch.compile")
                sets = [problem.inputs(0)]
                rival.check(problem, rival.runs(problem, sets)[0], sets[0])


def test_a_peer_is_interleaved_and_missing_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile is left out here: it costs half a minute on a CPU."""
    import tilewright.bench.engine as engine

    monkeypatch.setattr(engine, "peers_of", lambda op: [p for p in peers_of(op) if p.name != "torch.compile"])
    report = bench(
        ["l2_norm"], shapes=[(M, C)], dtypes=[torch.float32], backends=["reference"], device="cpu", peers=True
    )
    for row in report.results:
        assert row.peer == "torch"
        assert row.peer_us is not None and row.ratio_ci is not None
        assert row.ratio_ci[0] <= row.ratio_ci[1]
    assert any("fla" in note for note in report.notes) or any(p.peer == "fla" for p in report.peers)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


@pytest.mark.parametrize("backend", ["vendor", "reference"])
def test_the_call_of_a_gradient_is_by_the_backend_whose_row_it_is(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a graph whose forward is the definition's."""
    served: list[str] = []
    backward = registry.op("silu_backward")
    (aten,) = [k for k in registry.kernels_of(backward.name) if k.backend == "vendor"]
    real = aten.load()

    def counted(*args: Any, **how: Any) -> Any:
        served.append("vendor")
        return real(*args, **how)

    monkeypatch.setattr("tilewright.ops.activation.vendor.silu_backward", counted)
    (problem,) = problems(["silu"], passes=["backward"], shapes=[(M, C)], dtypes=[torch.float32], device=CPU)
    run = gradient_by(problem, backend, problem.inputs(0))
    run()  # which proves the kernel
    served.clear()
    run()
    assert served == (["vendor"] if backend == "vendor" else [])
