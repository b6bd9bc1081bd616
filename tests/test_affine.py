"""Edges of scale_bias_add: what may be left out, what its gradient keeps, and gradients that nothing computes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core import registry
from tilewright.verify.cases import make_inputs

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
