"""Edges of the linear contract: sizes that fill no tile, sums of nothing, views, what is rounded and what is saved."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.backends.enqueue import bind
from tilewright.core import registry
from tilewright.core.backend import Artifact, Parameter
from tilewright.core.launch import Launch, Scratch
from tilewright.verify.cases import Case, build
from tilewright.verify.check import call_of, check, truth_of

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
each_act = pytest.mark.parametrize("act", ACTS)


def _made(lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*lead, k), (n, k), (n,), (*lead, n))
    x, weight, bias, residual = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(dtype) for t in (x, weight / math.sqrt(max(k, 1)), bias, residual)]


@each_act
def test_is_torchs_function(act: str) -> None:
    leaves = [t.requires_grad_() for t in _made((4, 3), 11, 7)]
    x, weight, bias, residual = leaves
    y, expected = tw.linear(*leaves, act=act), ACTS[act](F.linear(x, weight, bias)) + residual
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    upstream = torch.randn(y.shape, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(t, leaves, upstream) for t in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


ONEDNN = next(k for k in registry.kernels_of("linear") if k.label == "onednn")
SIZES = [((1,), 129, 1), ((1,), 1, 131), ((3,), 7, 5), ((70,), 33, 129), ((2, 9), 130, 257), ((17,), 96, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lead", "k", "n"), SIZES)
def test_sizes_that_fill_no_tile(lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype, device: str) -> None:
    """One row, one column, odd K and N: against float64, forward and backward, by every kernel that takes them."""
    where = torch.device(device)
    for name in ("linear", "linear_backward"):
        op = registry.op(name)
        case = Case("size", name, lead, k, dtype, {"act": "gelu"}, sizes={"N": n})
        inputs, options = build(case, op, where), {**op.usual, **case.options}
        saving = op.gradient is not None
        truth = truth_of(op, inputs, options, saving)
        for kernel in registry.kernels_of(name):
            backend = registry.backend(kernel.backend)
            call = call_of(op, inputs, options, saving)
            emulated = kernel.backend == "triton" and device == "cpu"
            if kernel.backend in ("reference", "inductor") or backend.missing() is not None:
                continue
            if kernel.capability.reasons(call, emulated=emulated):
                continue
            for config in kernel.configs_for(call)[:2]:
                outcome = check(kernel, config, op, inputs, options, truth, saving=saving, emulated=emulated)
                assert not outcome.problems, (kernel, config, outcome.problems)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("act", [act for act in ACTS if act != "relu2"])
@pytest.mark.parametrize(("lead", "k", "n"), [*SIZES, ((19,), 1536, 40)])
def test_onednns_epilogues(lead: tuple[int, ...], k: int, n: int, act: str) -> None:
    """Which the test above leaves out, since forward saves there."""
    op, where = registry.op("linear"), torch.device("cpu")
    case = Case("size", "linear", lead, k, torch.float32, {"act": act}, sizes={"N": n}, absent=_absent(act))
    inputs, options = build(case, op, where), {**op.usual, **case.options}
    assert not ONEDNN.capability.reasons(call_of(op, inputs, options, False))
    (config,) = ONEDNN.configs_for(call_of(op, inputs, options, False))
    outcome = check(ONEDNN, config, op, inputs, options, truth_of(op, inputs, options, False), saving=False)
    assert not outcome.problems, outcome.problems


def _absent(act: str) -> tuple[str, ...]:
    return () if act == "none" else ("residual",)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_onednn_follows_the_weight_and_the_switch() -> None:
    x, weight, bias, _ = _made((20,), 16, 8, torch.float32)
    call = call_of(tw.linear, {"x": x, "weight": weight, "bias": bias, "residual": None}, {"act": "none"}, False)
    product = ONEDNN.load()
    for change in (lambda: None, lambda: weight.mul_(2), lambda: weight.detach().numpy().fill(0.5)):
        change()
        (y,) = product(x, weight, bias, None, act="none", saving=False)
        torch.testing.assert_close(y, F.linear(x, weight, bias))
    assert not ONEDNN.capability.reasons(call)
    torch.backends.mkldnn.enabled = False
    try:
        (reason,) = ONEDNN.capability.reasons(call)
    finally:
        torch.backends.mkldnn.enabled = True
    assert "oneDNN is switched off" in str(reason)


@each_act
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_sum_of_nothing(act: str, backend: str) -> None:
    """K = 0 gives act(b) + residual; its gradients are those of the bias and the residual."""
    x, weight, bias, residual = (t.requires_grad_() for t in _made((3,), 0, 5, torch.float32))
    y = tw.linear(x, weight, bias, residual, act=act, backend=backend)
    torch.testing.assert_close(y, ACTS[act](bias) + residual)
    expected = torch.autograd.grad((ACTS[act](bias) + residual).sum(), (bias, residual))
    y.sum().backward()
    torch.testing.assert_close((bias.grad, residual.grad), expected)
    assert x.grad is not None and x.grad.shape == (3, 0)
    assert tw.linear(x, weight, act=act).eq(0).all()


def test_no_rows_and_no_outputs() -> None:
    for lead, n in (((0,), 5), ((2, 0), 5), ((3,), 0)):
        leaves = [t.requires_grad_() for t in _made(lead, 8, n, torch.float32)]
        y = tw.linear(*leaves, act="silu")
        assert y.shape == (*lead, n)
        y.sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape and not t.grad.any() for t in leaves)


def test_z_is_not_rounded_before_the_activation() -> None:
    x, weight, bias, _ = _made((64,), 256, 128, torch.bfloat16)
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double())).float().bfloat16()
    assert int((tw.linear(x, weight, bias, act="gelu") != exact).sum()) < 20  # of 8192: ties within float32's error
    assert int((F.gelu(F.linear(x, weight, bias)) != exact).sum()) > 1000


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_views_are_read_where_they_lie(backend: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(6, 3, 2 * 40, generator=generator).to(device)
    weights = torch.randn(2 * 24, 50, generator=generator).to(device)
    x, weight, residual = fused.chunk(2, -1)[1], weights[::2, 3:43], fused[..., 7:31]
    dense = [t.contiguous() for t in (x, weight, residual)]
    with tw.use(check="never"):
        found = tw.linear(x, weight, residual=residual, act="silu", backend=backend)
        expected = tw.linear(dense[0], dense[1], residual=dense[2], act="silu", backend=backend)
    assert torch.equal(found, expected) and found.is_contiguous()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_overflow_of_half_precision_is_infinite(backend: str, device: str) -> None:
    x = torch.full((2, 64), 300.0, dtype=torch.float16, device=device)
    weight = torch.stack([torch.full((64,), sign * 300.0) for sign in (1.0, -1.0)]).half().to(device)
    with tw.use(check="never"):
        y = tw.linear(x, weight, backend=backend)
        held = tw.linear(x, weight, act="relu", backend=backend)
    assert y.tolist() == [[math.inf, -math.inf]] * 2
    assert held.tolist() == [[math.inf, 0.0]] * 2


def test_what_a_rectifier_holds_back_is_zero_whatever_comes_from_above() -> None:
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    y = tw.linear(x, torch.ones(1, 1), act="relu2")
    (dx,) = torch.autograd.grad(y, x, torch.full((2, 1), math.inf))
    assert dx.tolist() == [[math.inf], [0.0]]


@pytest.mark.parametrize("act", ["none", "gelu"])
def test_z_is_saved_where_an_activation_needs_it(act: str) -> None:
    tensors: list[Tensor] = []
    x, weight, bias, _ = (t.requires_grad_() for t in _made((8,), 16, 32, torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (tensors.append(t), t)[1], lambda t: t):
        tw.linear(x, weight, bias, act=act)
    assert [tuple(t.shape) for t in tensors].count((8, 32)) == (act != "none")


@each_act
def test_under_torch_compile(act: str) -> None:
    """Whether z is saved or not: no graph break, and the gradients of the direct call."""

    def layer(*tensors: Tensor) -> Tensor:
        return tw.linear(*tensors, act=act).sin()

    leaves = [t.requires_grad_() for t in _made((6,), 16, 8, torch.float32)]
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, layer))
    torch.testing.assert_close(found, expected)


def test_the_gradient_of_the_residual_is_the_upstream_gradient() -> None:
    """It passes through: nothing is computed, and nothing is copied."""
    x, weight, _, residual = _made((8,), 16, 32, torch.float32)
    residual.requires_grad_()
    y = tw.linear(x, weight, residual=residual, act="gelu")
    upstream = torch.randn(8, 32)
    (found,) = torch.autograd.grad(y, residual, upstream)
    assert found.data_ptr() == upstream.data_ptr()


def test_refusals() -> None:
    x, weight, bias, residual = _made((3,), 8, 4, torch.float32)
    with pytest.raises(tw.InvalidArgument, match=r"weight: shape \[8, 4\].*needs \[N, 8\]"):
        tw.linear(x, weight.t())
    with pytest.raises(tw.InvalidArgument, match=r"bias: shape \[3\].*needs \[4\]"):
        tw.linear(x, weight, bias[:3])
    with pytest.raises(tw.InvalidArgument, match=r"residual: shape \[4\].*needs \[3, 4\]"):
        tw.linear(x, weight, residual=bias)
    with pytest.raises(tw.InvalidArgument, match=r"weight.*bf16, while x is fp32"):
        tw.linear(x, weight.bfloat16())
    with pytest.raises(tw.InvalidArgument, match=r"act: 'tanh'.*'gelu_tanh'"):
        tw.linear(x, weight, act="tanh")
    with pytest.raises(tw.InvalidArgument, match="z: None, with act 'silu'"):
        tw.linear_backward(residual, x, weight, act="silu")


@pytest.mark.parametrize("saving", [False, True])
def test_programs_that_stay_finish_every_tile(device: str, saving: bool) -> None:
    """Fewer programs than tiles, tiles beyond both ends, a sum that ends within a step."""
    (kernel,) = [k for k in registry.kernels_of("linear") if k.label == "descriptors"]
    op = registry.op("linear")
    lead, k, n = (300,), 136, 712
    made = _made(lead, k, n, torch.bfloat16)
    inputs: dict[str, Tensor | None] = dict(zip(op.tensors, (t.to(device) for t in made), strict=True))
    options = {**op.usual, "act": "silu"}
    call = call_of(op, inputs, options, saving)
    emulated = registry.backend("triton").emulates(call.device)
    if kernel.capability.reasons(call, emulated=emulated):
        pytest.skip("runs on Hopper, or by the interpreter")
    truth = truth_of(op, inputs, options, saving)
    for config in kernel.configs_for(call)[:2]:
        outcome = check(kernel, config, op, inputs, options, truth, saving=saving, emulated=emulated)
        assert not outcome.problems, (config, outcome.problems)


def test_a_workspace_too_small_is_refused() -> None:
    artifact = Artifact(b"", "tiles", (Parameter("pointer", "*"),), (128, 1, 1), workspace=384)
    launch = Launch(None, (4, 1, 1), {}, workspace=Scratch("descriptors", (4 * 384,), torch.uint8))
    assert bind(artifact, launch, {"descriptors": 0}).slots == (0,)
    for less in (None, Scratch("descriptors", (3 * 384,), torch.uint8)):
        with pytest.raises(ValueError, match="384 bytes"):
            bind(artifact, replace(launch, workspace=less), {"descriptors": 0})


FORK = """
import os, torch
from tilewright.ops.linear.vendor import summed_in_float32
switch = lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
with summed_in_float32():
    assert not switch()
    child = os.fork()
    if not child:
        with summed_in_float32():
            inside = switch()
        os._exit(0 if switch() and not inside else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and not switch()
assert switch()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_torchs_switch_survives_a_fork_inside_a_call() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
