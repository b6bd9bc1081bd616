"""Which kernels may write where they read, and how that is known.

That every kernel gives the op's own bits is the conformance suite's to show, on what runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import planted
import tilewright as tw
from form_calls import C, check_against_the_op, every_form, run, target
from op_calls import listed, same
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, stages_of
from tilewright.tile.lang.kernel import Kernel as TileKernel
from tilewright.tune.classes import call_of as tuned_call
from tilewright.verify.cases import Case, build, make_inputs
from tilewright.verify.check import check, truth_of
from tilewright.verify.suite import verify_kernel

# Kernels: who may write in place --------------------------------------------------------------------------------------


@contextmanager
def registered(kernel: Kernel) -> Iterator[None]:
    registry.add_kernels([kernel])
    try:
        yield
    finally:
        registry.remove_kernel(kernel)


def test_what_torch_compiles_gives_the_same_bits_in_place(device: str) -> None:
    """Many rows: compiled to overwrite its input, one element in 500,000 came out otherwise on an AVX512 machine."""
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    w = torch.randn(512, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with tw.use(check="never"):
        wanted = tw.rms_norm(x, w, backend="inductor")
        found = tw.rms_norm_(x, w, backend="inductor")
    assert found is x and torch.equal(found, wanted)


def test_a_kernel_that_does_not_declare_it_is_refused_with_a_reason(device: str) -> None:
    x = torch.randn(5, C, device=device)
    with registered(planted.triton_kernel("none")):
        text = str(tw.explain(tw.rms_norm_, x))
        assert "rms_norm_   x fp32[5, 24]" in text and "eager, no gradient" in text
        assert "in place: does not declare that it can write y over x; rms_norm would do" in text
        assert "in place" not in str(tw.explain(tw.rms_norm, x))
    strided = torch.randn(5, 2 * C, device=device)[:, :C]
    assert "note: x is not contiguous" in str(tw.explain("rms_norm_", strided))


def test_a_kernel_that_reads_what_it_wrote_is_caught(device: str) -> None:
    op, where = registry.op("rms_norm"), torch.device(device)
    kernel = planted.in_place_kernel("reads what it wrote")
    result = verify_kernel(op, kernel, torch.float16, where, size="tiny", stop_at_failure=True)
    assert "in place: y differs in its bits from what rms_norm gives" in result.failures[0]["problem"]
    case = Case("pool", op.name, (4,), 96, torch.float16, op.usual)
    inputs = build(case, op, where)
    truth = truth_of(op, inputs, op.usual, False)
    emulated = device == "cpu"
    for made, red in (
        (kernel, True),
        (planted.triton_kernel("reads what it wrote"), False),
        (planted.in_place_kernel("none"), False),
    ):
        outcome = check(made, Config(), op, inputs, op.usual, truth, saving=False, emulated=emulated, in_place=True)
        assert bool(outcome.problems) is red and outcome.in_place is made.capability.in_place


@pytest.mark.parametrize("shape", [(8, 229), (256, 4096), (2048, 16384), (64, 65536)])
@every_form
def test_the_same_launches_serve_both(form: Any, shape: tuple[int, ...]) -> None:
    """Of every language, those that do not run here too: what tells them apart is where the output lies."""
    op, device, found = form.functional, target_device("sm_90"), []
    absent = op.probes.absent[0]
    plain, over = (tuned_call(o, shape, torch.bfloat16, device, absent=absent) for o in (op, form))
    assert over.aliased and over.form == form.name
    for kernel in registry.kernels_of(op.name):
        if not registry.backend(kernel.backend).launches or kernel.capability.reasons(plain):
            continue
        reasons = kernel.capability.reasons(over)
        if reasons:
            assert [r.argument for r in reasons] == ["in place"]
            continue
        for config in kernel.configs_for(plain):
            pairs = zip(*(stages_of(kernel.load()(call, config)) for call in (plain, over)), strict=True)
            for one, two in pairs:
                assert (_told(one.function), one.grid, one.args) == (_told(two.function), two.grid, two.args)
                assert (one.constants, one.options) == (two.constants, two.options)
        assert kernel.configs_for(plain) == kernel.configs_for(over)
        found.append(kernel.backend)
    assert "triton" in found


def _told(function: Any) -> Any:
    """What a launched function is. A tile kernel is bound to its fragments anew in each launch."""
    if not isinstance(function, TileKernel):
        return function
    return function.function, function.static, {n: (f.function, f.bound) for n, f in function.fragments.items()}


def test_a_limit_may_refuse_the_form_alone() -> None:
    (kernel,) = [k for k in registry.kernels_of("add_rms_norm") if k.backend == "tilelang"]
    for columns, words in ((32768, []), (65536, ["in place: rows above 32768 columns are read back"])):
        calls = [tuned_call(o, (64, columns), torch.bfloat16, target_device("sm_90"), absent=("weight",))
                 for o in (tw.add_rms_norm, tw.add_rms_norm_)]  # fmt: skip
        plain, over = ([str(r).partition(";")[0] for r in kernel.capability.reasons(call)] for call in calls)
        assert not plain and over == words


def test_first_use_proves_the_form_apart(device: str) -> None:
    """Evidence for the op is none for the form: the kernel is quarantined there alone."""
    x = torch.randn(5, C, device=device)
    kernel = planted.in_place_kernel("reads what it wrote")
    kernel = Kernel(**{**kernel.__dict__, "preference": -1})
    with registered(kernel), tw.use(backend="triton"):
        wanted = tw.rms_norm(x)
        chosen = tw.explain(tw.rms_norm, x).chosen
        assert chosen is not None and chosen.kernel is kernel and chosen.verdict is not None
        found = tw.rms_norm_(x)
        assert found is x
        same([found], [wanted])
        served = tw.explain(tw.rms_norm_, x)
        assert served.chosen is not None and served.chosen.kernel is not kernel
        assert "quarantine: " in str(served) and "in place: y differs in its bits" in str(served)
        assert tw.explain(tw.rms_norm, x).chosen is not None and tw.rms_norm(x) is not x


@pytest.mark.interpreted
def test_preferences_pins_and_checks_hold_for_forms() -> None:
    x = torch.randn(5, C)
    with tw.use(backend="triton", ops=["silu_"], strict=True):
        assert tw.explain(tw.silu_, x).chosen.backend == tw.explain(tw.silu, x).chosen.backend == "triton"
        assert tw.explain(tw.gelu_, x).chosen.backend == "reference"
        check_against_the_op(tw.silu_, {"x": x.clone()}, {})
    with tw.use(check="always"):
        check_against_the_op(tw.silu_, {"x": x.clone()}, {}, backend="triton")
    with pytest.raises(tw.NoKernel, match=r'silu_\(backend="cuda"\)'):
        tw.silu_(x, backend="cuda")


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_form
def test_a_warm_call_is_captured_and_takes_no_memory(form: Any) -> None:
    inputs = make_inputs(form, (64, 2048), torch.bfloat16, device="cuda")
    name = target(form, inputs)
    first = inputs[name].clone()
    wanted = listed(run(form.functional, inputs, backend="triton"))
    run(form, inputs, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = listed(run(form, inputs, backend="triton"))
    for _ in range(2):
        inputs[name].copy_(first)
        graph.replay()
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
    held = torch.cuda.memory_allocated()
    fresh_outputs = len(form.out) - len(form.into)
    kept = run(form, inputs, backend="triton")
    grown = torch.cuda.memory_allocated() - held
    assert grown <= fresh_outputs * first.nbytes, kept


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 7, 96, 229, 1000, 4096, 8192, 16384, 24576, 65536])
@every_form
def test_races_would_show(form: Any, columns: int) -> None:
    """Many rows, many times: an element read after another thread wrote it differs sooner or later."""
    rows = max(8, min(4096, (1 << 25) // columns))
    inputs = make_inputs(form, (rows, columns), torch.bfloat16, device="cuda")
    name = target(form, inputs)
    first = inputs[name].clone()
    ran = []
    for backend in ("triton", "tilelang", "cuda"):
        try:
            with tw.use(check="never"):
                wanted = listed(run(form.functional, inputs, backend=backend))
        except tw.NoKernel:
            continue
        for _ in range(20):
            inputs[name].copy_(first)
            with tw.use(check="never"):
                found = listed(run(form, inputs, backend=backend))
            assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True)), backend
        inputs[name].copy_(first)
        ran.append(backend)
    assert "triton" in ran
