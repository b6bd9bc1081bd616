"""Edges of scale_bias_add and bias_act: what may be left out, what a gradient keeps, gradients that nothing computes;
activations against torch's own, and where their formulas break."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.core import registry
from tilewright.core.classes import layout_class
from tilewright.tune.sample import inputs_of
from tilewright.verify.cases import build, cases, make_inputs
from tilewright.verify.check import call_of
from tilewright.verify.first_use import probes

TERMS = ("scale", "bias", "residual")
WAYS = [way for n in range(1, 4) for way in itertools.combinations(TERMS, n)]


def _inputs(way: tuple[str, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = make_inputs(registry.op("scale_bias_add"), (5, 3, 24), dtype)
    return {n: t.requires_grad_() for n, t in made.items() if t is not None and n in ("x", *way)}


def _plain(t: dict[str, Tensor]) -> Tensor:
    return t["x"] * t.get("scale", 1.0) + t.get("bias", 0.0) + t.get("residual", 0.0)


@pytest.mark.parametrize("way", WAYS, ids="+".join)
def test_every_way_is_what_torch_makes_of_it(way: tuple[str, ...]) -> None:
    t = _inputs(way)
    y, expected = tw.scale_bias_add(**t), _plain(t)
    torch.testing.assert_close(y, expected)
    weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    found, wanted = (torch.autograd.grad((o * weight).sum(), list(t.values())) for o in (y, expected))
    torch.testing.assert_close(found, wanted)
    for name in t:  # each alone
        (alone,) = torch.autograd.grad((tw.scale_bias_add(**t) * weight).sum(), t[name])
        torch.testing.assert_close(alone, wanted[list(t).index(name)])


@pytest.mark.parametrize("way", WAYS, ids="+".join)
def test_what_is_kept_for_the_gradient(way: tuple[str, ...]) -> None:
    """x only where there is a scale."""
    kept: list[tuple[int, ...]] = []
    t = _inputs(way, torch.float32)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tw.scale_bias_add(**t)
    assert sorted(kept) == sorted([(5, 3, 24)] * ("scale" in way) + [(24,)] * len({"scale", "bias"} & set(way)))


def test_the_gradient_of_a_residual_is_the_upstream_gradient_and_no_kernel_runs() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    t = _inputs(("residual",), torch.float32)
    y, dy = tw.scale_bias_add(**t), torch.randn(5, 3, 24)
    with Watch():
        dx, dresidual = torch.autograd.grad(y, [t["x"], t["residual"]], dy)
    assert dx.data_ptr() == dresidual.data_ptr() == dy.data_ptr()
    assert not [name for name in seen if "tilewright" in name]
    y = tw.scale_bias_add(**t)  # two leaves must not share one gradient
    y.sum().backward()
    assert t["x"].grad is not None and t["residual"].grad is not None
    t["x"].grad.zero_()
    assert t["residual"].grad.all()


def test_compiled_gradients_of_every_way() -> None:
    for way in WAYS:
        t = _inputs(way, torch.float32)
        call = torch.compile(lambda t: tw.scale_bias_add(**t), backend="aot_eager", fullgraph=True)
        found, wanted = (torch.autograd.grad(f(t).sin().sum(), list(t.values())) for f in (call, _plain))
        torch.testing.assert_close(found, wanted)


def test_sums_over_many_rows_are_in_float32() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    x = torch.ones(4096, 8, dtype=torch.bfloat16)
    _, dscale, dbias = tw.scale_bias_add_backward(x, x, x[0], x[0])
    assert dscale is not None and dbias is not None
    assert dscale.tolist() == dbias.tolist() == [4096.0] * 8


def test_rounded_once_and_nothing_multiplied_away() -> None:
    x, b, r = (torch.tensor([[v]], dtype=torch.bfloat16) for v in (256.0, 1.0, 255.0))
    assert tw.scale_bias_add(x, bias=b[0], residual=r).item() == 512.0  # 257 is no bfloat16
    zero = torch.zeros(1)
    assert tw.scale_bias_add(torch.tensor([[math.inf]]), zero).isnan().all()
    assert tw.scale_bias_add(torch.tensor([[-math.inf]]), bias=zero).item() == -math.inf


def test_empty_rows_give_zero_sums() -> None:
    t = {n: v[:0] if v.dim() > 1 else v for n, v in _inputs(TERMS, torch.float32).items()}
    grads = torch.autograd.grad(tw.scale_bias_add(**t).sum(), [t["scale"], t["bias"]])
    assert all((g == 0).all() and g.shape == (24,) for g in grads)


def test_refusals() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(tw.InvalidArgument, match="at least one of the three"):
        tw.scale_bias_add(x)
    with pytest.raises(tw.InvalidArgument, match=r"bias: shape \[4\].*\[8\]"):
        tw.scale_bias_add(x, bias=w[:4])
    with pytest.raises(tw.InvalidArgument, match=r"residual: dtype bf16, while x is fp32"):
        tw.scale_bias_add(x, residual=x.bfloat16())
    with pytest.raises(tw.InvalidArgument, match=r"residual.*shapes must be equal"):
        tw.scale_bias_add(x, residual=x[0])
    with pytest.raises(tw.InvalidArgument, match="dy itself"):
        tw.scale_bias_add_backward(x)
    with pytest.raises(tw.InvalidArgument, match=r"x: None.*scale needs it"):
        tw.scale_bias_add_backward(x, None, w)


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
each = pytest.mark.parametrize("act", ACTS)


@each
@pytest.mark.parametrize("full", [False, True], ids=["by column", "shape of x"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_bias_act_is_torchs_function_of_the_sum(act: str, full: bool, wanted: tuple[bool, bool]) -> None:
    x = torch.linspace(-12, 12, 5 * 3 * 8, dtype=torch.float64).reshape(5, 3, 8)
    bias = torch.linspace(-3, 3, 120 if full else 8, dtype=torch.float64).reshape(x.shape if full else (8,))
    inputs = [t.requires_grad_(w) for t, w in zip((x, bias), wanted, strict=True)]
    wants = [t for t in inputs if t.requires_grad]
    weight = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)
    y, expected = tw.bias_act(x, bias, act=act), ACTS[act](x + bias)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-15)
    found, right = (torch.autograd.grad((t * weight).sum(), wants) for t in (y, expected))
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-13)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_act_at_infinities_and_huge_values(act: str, dtype: torch.dtype) -> None:
    rectifies = act in ("relu", "relu2")
    x = torch.tensor([[-math.inf, -3e38, -1e20, 0.0, 1e9, math.inf, math.nan]], dtype=dtype, requires_grad=True)
    y = tw.bias_act(x, torch.zeros(7, dtype=dtype), act=act)[0]
    assert y[-1].isnan() and (y[0] == 0 if rectifies else y[0].isnan())
    assert (y[1:4] == 0).all() and y[-2] == math.inf and y[4] > 0
    slope = torch.autograd.grad(y[1:5].sum(), x)[0][0, 1:5]
    assert slope.isfinite().all() and (slope[:2] == 0).all()


def test_a_rectifier_selects_and_does_not_multiply_by_zero() -> None:
    dy, x = torch.tensor([[math.inf, math.inf, 1.0]]), torch.tensor([[-1.0, 0.0, math.nan]])
    for act in ("relu", "relu2"):
        dx, _ = tw.bias_act_backward(dy, x, torch.zeros(3), act=act)
        assert dx is not None and dx[0, :2].tolist() == [0.0, 0.0]
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(dx, torch.autograd.grad(ACTS[act](leaf), leaf, dy)[0], equal_nan=True)


def test_the_sum_is_not_rounded_before_the_activation() -> None:
    x, bias = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = tw.bias_act(x, bias, act="silu")
    torch.testing.assert_close(y, F.silu(x.double() + bias.double()).bfloat16(), rtol=0, atol=0)
    assert not torch.equal(y, F.silu(x + bias))


def test_either_form_of_a_bias_has_a_class_and_probes_of_its_own() -> None:
    """A kernel proven for one form is not taken for the other, and is checked on the form that it meets."""
    op = registry.op("bias_act_backward")
    assert {len(case.forms) for case in cases(op, torch.bfloat16, size="tiny")} == {0, 1}
    found = set()
    for bias in (torch.randn(24), torch.randn(5, 3, 24)):
        dy, x = torch.randn(2, 5, 3, 24)
        call = call_of(op, {"dy": dy, "x": x, "bias": bias}, dict(op.usual), False)
        wanted = layout_class(call, dict(op.options))
        made = [build(probe, op) for probe in probes(call)]
        made.append(dict(zip(op.tensors, inputs_of(call, 0), strict=True)))
        for tensors in made:
            assert layout_class(call_of(op, tensors, dict(op.usual), False), dict(op.options)) == wanted
        found.add(wanted)
    assert len(found) == 2


def test_bias_act_refusals() -> None:
    x, bias = torch.randn(2, 3, 8), torch.randn(8)
    with pytest.raises(TypeError, match="act"):
        tw.bias_act(x, bias)  # type: ignore[call-arg]
    with pytest.raises(tw.InvalidArgument, match=r"act: 'tanh'.*'relu', 'relu2', 'silu', 'gelu', 'gelu_tanh'"):
        tw.bias_act(x, bias, act="tanh")
    with pytest.raises(tw.InvalidArgument, match=r"bias: shape \[3, 8\].*\[8\].*\[2, 3, 8\]"):
        tw.bias_act(x, x[0], act="relu")
    with pytest.raises(tw.InvalidArgument, match=r"bias: dtype fp32, while x is bf16"):
        tw.bias_act(x.bfloat16(), x, act="relu")
