"""Edges of the loss contracts: against torch's own function, and values where formulas break."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.core import registry
from tilewright.ops.loss.log1p import LOG1P
from tilewright.verify.cases import Case, build, make_inputs
from tilewright.verify.check import call_of, check, truth_of

REDUCTIONS = ("mean", "sum", "none")
ROWS, C = 5, 24
PARAMETERS: dict[str, dict[str, tuple[int, ...]]] = {
    "alone": {},
    "positive share a class": {"pos_weight": (C,)},
    "weight a class": {"weight": (C,)},
    "weights of elements": {"weight": (ROWS, C), "pos_weight": (ROWS, C)},
    "both": {"weight": (ROWS, C), "pos_weight": (C,)},
}


def theirs(x: Tensor, y: Tensor, reduction: str, parameters: Mapping[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y, reduction=reduction, **parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_is_torchs_function(name: str, reduction: str, backend: str) -> None:
    """Soft targets, in float64 for the definition, and its gradient."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn(ROWS, C, generator=generator, dtype=dtype) * 9).requires_grad_()
    y = torch.rand(ROWS, C, generator=generator, dtype=dtype)
    parameters = {n: torch.rand(s, generator=generator, dtype=dtype) * 3 for n, s in PARAMETERS[name].items()}
    mine = tw.bce_with_logits(x, y, **parameters, reduction=reduction, backend=backend)
    expected = theirs(x, y, reduction, parameters)
    tolerance: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {}
    torch.testing.assert_close(mine, expected, **tolerance)
    dy = torch.rand(mine.shape, generator=generator, dtype=dtype)
    found, wanted = (torch.autograd.grad(t, x, dy)[0] for t in (mine, expected))
    torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinities_follow_the_formula_as_in_torch(dtype: torch.dtype, backend: str) -> None:
    edges = torch.tensor([-math.inf, -3e38, -1e4, -0.0, 1e4, 3e38, math.inf, math.nan], dtype=dtype)
    for y in (torch.zeros_like(edges), torch.ones_like(edges)):
        mine = tw.bce_with_logits(edges, y, reduction="none", backend=backend)
        torch.testing.assert_close(mine, theirs(edges, y, "none", {}), equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_gradient_does_not_cancel_where_the_logistic_function_is_near_1(backend: str) -> None:
    """s(x) - 1 is 0 in float32 from x = 17 on; the gradient of a positive is -s(-x)."""
    x = torch.linspace(15, 80, 64, requires_grad=True)
    tw.bce_with_logits(x, torch.ones(64), reduction="sum", backend=backend).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), -torch.sigmoid(-x.detach().double()), rtol=1e-5, atol=0)


def test_no_elements() -> None:
    x = torch.empty(0, 3, requires_grad=True)
    assert tw.bce_with_logits(x, x.detach()).isnan()
    total = tw.bce_with_logits(x, x.detach(), reduction="sum")
    total.backward()
    assert total == 0 and x.grad is not None and x.grad.shape == (0, 3)


def test_the_mean_is_over_elements_and_not_over_weights() -> None:
    x, y = torch.randn(2, 4, 6).unbind()
    weight = torch.zeros(6)
    weight[0] = 1
    expected = theirs(x[:, :1], y[:, :1], "sum", {}) / 24
    torch.testing.assert_close(tw.bce_with_logits(x, y, weight), expected)


def test_half_precision_is_summed_in_float32() -> None:
    """70000 losses of log 2: a float16 sum would be infinite, a bfloat16 one stuck."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(700, 100, dtype=dtype)
        for backend in ("reference", "triton"):
            found = tw.bce_with_logits(x, x, backend=backend)
            assert found.dtype == dtype and found == torch.tensor(math.log(2)).to(dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_loss_may_have_another_dtype_and_the_gradient_keeps_that_of_the_logits(
    backend: str, reduction: str
) -> None:
    """Half-precision logits, a float32 loss that no rounding has touched, and a float32 upstream gradient."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, C, generator=generator).bfloat16().requires_grad_()
    y = torch.rand(ROWS, C, generator=generator).bfloat16()
    found = tw.bce_with_logits(x, y, reduction=reduction, out_dtype=torch.float32, backend=backend)
    wide = x.detach().float().requires_grad_()
    expected = theirs(wide, y.float(), reduction, {})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    dy = torch.rand(found.shape, generator=generator) * 1e-3 + 1.0  # bfloat16 would make it 1
    dx, wanted = torch.autograd.grad(found, x, dy)[0], torch.autograd.grad(expected, wide, dy)[0]
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx, wanted.bfloat16(), rtol=2**-7, atol=1e-6)  # the interpreter truncates
    if backend == "reference":
        assert torch.equal(dx, wanted.bfloat16())
    with torch.no_grad():
        compiled = torch.compile(tw.bce_with_logits, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, y, reduction=reduction, out_dtype=torch.float32, backend=backend), found)


def test_a_class_is_told_by_the_dtype_of_its_loss() -> None:
    """Evidence for a bfloat16 loss does not speak for a float32 one, and a worker is asked for the call that it is."""
    from tilewright.core.classes import layout_class
    from tilewright.tune import wire
    from tilewright.tune.sample import inputs_of

    backward = registry.op("bce_with_logits_backward")
    found = set()
    for out_dtype in (None, torch.float32, torch.float16):
        options = {**backward.usual, "reduction": "none", "out_dtype": out_dtype}
        call = call_of(backward, make_inputs(backward, (8, 64), torch.bfloat16, options=options), options, False)
        again = wire.call_from_json(json.loads(json.dumps(wire.call_to_json(call))))
        assert again == call
        made = call_of(backward, dict(zip(backward.tensors, inputs_of(again, 0), strict=True)), options, False)
        assert layout_class(made, dict(backward.options)) == layout_class(call, dict(backward.options))
        found.add(layout_class(call, dict(backward.options)))
    assert len(found) == 3


def test_sums_of_many_programs_have_the_same_bits_each_time() -> None:
    """Two stages, whatever the grid: more tiles than programs, and more programs than one."""
    op = registry.op("bce_with_logits")
    kernel = next(k for k in registry.kernels_of(op.name) if k.backend == "triton")
    inputs = make_inputs(op, (37, 1000), torch.float32, absent=("weight",))
    call = call_of(op, inputs, dict(op.usual), False)
    config = kernel.configs_for(call)[0]
    truth = truth_of(op, inputs, op.usual, False)
    outcome = check(kernel, type(config)(**{**config, "per_sm": 5}), op, inputs, op.usual, truth, saving=False,
                    emulated=True)  # fmt: skip
    assert not outcome.problems, outcome.problems


def test_a_form_of_a_parameter_is_a_class_of_its_own() -> None:
    """[C] and [M, C] are read with other strides: evidence and times of the one do not speak for the other."""
    from tilewright.core.classes import call_class, layout_class
    from tilewright.tune.sample import inputs_of
    from tilewright.verify.first_use import probes

    op = registry.op("bce_with_logits")
    found = []
    for forms in ({}, {"weight": "M C"}, {"weight": "M C", "pos_weight": "M C"}):
        case = Case("form", op.name, (8,), 64, torch.float32, forms=forms)
        call = call_of(op, build(case, op), dict(op.usual), False)
        found.append(layout_class(call, dict(op.options)))
        made = [*(list(build(p, op).values()) for p in probes(call)), inputs_of(call, 0)]
        for tensors in made:
            again = call_of(op, dict(zip(op.tensors, tensors, strict=True)), call.options, False)
            assert layout_class(again, dict(op.options)) == found[-1]
        assert call_class(again, dict(op.options)) == call_class(call, dict(op.options))
    assert len(set(found)) == 3


def test_refusals() -> None:
    x, y = torch.randn(2, 3, 8).unbind()
    with pytest.raises(tw.InvalidArgument, match="reduction: 'batchmean'; takes 'mean', 'sum', 'none'"):
        tw.bce_with_logits(x, y, reduction="batchmean")
    with pytest.raises(tw.InvalidArgument, match=r"targets: shape .*shapes must be equal"):
        tw.bce_with_logits(x, y[:1])
    with pytest.raises(tw.InvalidArgument, match="targets: dtype int64"):
        tw.bce_with_logits(x, y.long())
    with pytest.raises(
        tw.InvalidArgument, match=r"weight: shape \[3, 1\]; needs \[8\] or the shape of logits, \[3, 8\]"
    ):
        tw.bce_with_logits(x, y, y[:, :1])
    with pytest.raises(tw.InvalidArgument, match="pos_weight: dtype fp64"):
        tw.bce_with_logits(x, y, None, y[0].double())
    with pytest.raises(tw.InvalidArgument, match=r"dy: shape \[\], with reduction 'none'; needs \[3, 8\]"):
        tw.bce_with_logits_backward(torch.ones(()), x, y, reduction="none")
    for wrong, message in ((torch.int32, "int32"), (torch.float64, "fp64")):
        with pytest.raises(tw.InvalidArgument, match=f"out_dtype: {message}; takes fp32, fp16, bf16"):
            tw.bce_with_logits(x, y, out_dtype=wrong)
    with pytest.raises(tw.InvalidArgument, match=r"out_dtype: 'float16' is a str; a torch\.dtype is needed"):
        tw.bce_with_logits(x, y, out_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidArgument, match=r"dy: dtype fp32, while the loss is fp16; dy\.to"):
        tw.bce_with_logits_backward(torch.ones(()), x, y, out_dtype=torch.float16)


@pytest.mark.parametrize("name", ["targets", "weight", "pos_weight"])
def test_gradients_that_there_are_not_are_refused_by_name(name: str) -> None:
    """In eager, through the node, and by explain; the others' do not suffer."""
    given = {n: torch.rand(3, 8) for n in ("logits", "targets", "weight", "pos_weight")}
    given["logits"].requires_grad_()
    given[name].requires_grad_()
    message = f"bce_with_logits has no gradient for {name}, which requires one: pass {name}.detach()"
    for call in (tw.bce_with_logits, lambda **t: tw.explain(tw.bce_with_logits, **t),
                 torch.compile(lambda **t: tw.bce_with_logits(**t), backend="eager")):  # fmt: skip
        with pytest.raises(
            (tw.NoGradient, torch._dynamo.exc.TorchRuntimeError), match=message.replace("(", r"\(")[:60]
        ):
            call(**given)  # type: ignore[operator]
    with torch.no_grad():
        assert tw.bce_with_logits(**given).isfinite()
    given[name] = given[name].detach()
    tw.bce_with_logits(**given).backward()
    assert given["logits"].grad is not None


def test_the_polynomial_of_log1p_is_as_good_as_float32():
    u = torch.cat([torch.logspace(-40, 0, 4001), torch.linspace(0, 1, 20001)]).float()
    ratio = torch.full_like(u, LOG1P[-1]).double()
    for coefficient in LOG1P[-2::-1]:
        ratio = (ratio * u.double() + coefficient).float().double()  # a fused multiply-add
    found, right = (ratio * u.double()).float(), torch.log1p(u.double())
    ulp = torch.finfo(torch.float32).eps * right
    assert ((found - right).abs() <= 2 * ulp + 2.0**-149).all()
