"""Edges of the activation contracts: against torch's own functions, and values where formulas break."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.ops.activation.functions import TAIL, TAIL_STEP

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda x: tw.silu(x), F.silu),
    "gelu": (lambda x: tw.gelu(x), F.gelu),
    "gelu tanh": (lambda x: tw.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "swiglu": (lambda x: tw.swiglu(x, torch.ones_like(x)), F.silu),
    "geglu": (lambda x: tw.geglu(x, torch.ones_like(x)), lambda x: F.gelu(x, approximate="tanh")),
    "geglu erf": (lambda x: tw.geglu(x, torch.ones_like(x), approximate="none"), F.gelu),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


@each
def test_is_torchs_function(name: str) -> None:
    """In float64, so that SiLU, either GELU and any approximation of theirs are told apart."""
    mine, theirs = FUNCTIONS[name]
    x = torch.linspace(-12, 12, 999, dtype=torch.float64, requires_grad=True)
    y, expected = mine(x), theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-15)
    found, wanted = (torch.autograd.grad(t.sum(), x)[0] for t in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinities_and_huge_values(name: str, dtype: torch.dtype) -> None:
    mine, _ = FUNCTIONS[name]
    edges = [-math.inf, -3e38, -1e20, -100.0, -0.0, 0.0, 100.0, 1e20, 3e38, math.inf, math.nan]
    x = torch.tensor(edges, dtype=dtype, requires_grad=True)
    y = mine(x)
    assert y[0].isnan() and y[-1].isnan() and y[-2] == math.inf
    assert (y[1:3] == 0).all() and (y[4:6] == 0).all() and y[3].abs() < 1e-30
    assert torch.equal(y[6:9], x[6:9])
    slope = torch.autograd.grad(y[1:9].sum(), x)[0][1:9]  # finite x has a finite gradient, however large
    assert slope.isfinite().all()
    torch.testing.assert_close(slope, torch.tensor([0, 0, 0, 0.5, 0.5, 1, 1, 1], dtype=dtype))


def test_the_activation_is_not_rounded_before_the_product() -> None:
    gate, up = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = tw.swiglu(gate, up)
    assert torch.equal(y, (F.silu(gate.double()) * up.double()).float().bfloat16())
    assert torch.equal(y, tw.swiglu_packed(torch.cat([gate, up], -1), gate="first"))
    assert not torch.equal(y, F.silu(gate) * up)


@pytest.mark.parametrize("op", [tw.swiglu, tw.geglu], ids=str)
def test_halves_of_a_projection(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(6, 2 * 40, requires_grad=True)
    gate, up = x.chunk(2, -1)
    y = op(gate, up)
    # torch's own functions differ in the last bit between strided and dense memory
    torch.testing.assert_close(y, op(gate.contiguous(), up.contiguous()))
    assert y.is_contiguous()
    whole = torch.autograd.grad(y.sum(), x)[0]  # of an expanded 1
    parts = torch.autograd.grad(
        op(*(leaves := [gate.detach().requires_grad_(), up.detach().requires_grad_()])).sum(), leaves
    )
    assert torch.equal(whole, torch.cat(parts, -1))


PACKED = {
    "swiglu": (lambda x, **o: tw.swiglu_packed(x, **o), lambda gate, up: tw.swiglu(gate, up)),
    "geglu": (lambda x, **o: tw.geglu_packed(x, **o), lambda gate, up: tw.geglu(gate, up)),
    "geglu erf": (
        lambda x, **o: tw.geglu_packed(x, approximate="none", **o),
        lambda gate, up: tw.geglu(gate, up, approximate="none"),
    ),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("gate", ["first", "second"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_is_the_op_on_its_parts(name: str, gate: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Gradient included: which part is the gate, and where it lies. (The last bit is torch's: strided or dense.)"""
    packed, apart = PACKED[name]
    x = torch.randn(5, 2 * 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x.requires_grad_()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    parts = (first, second) if gate == "first" else (second, first)
    y, expected = packed(x, gate=gate, interleaved=interleaved), apart(*(p.contiguous() for p in parts))
    torch.testing.assert_close(y, expected)
    assert y.shape == (5, 24) and y.is_contiguous()
    weight = torch.arange(y.numel(), dtype=dtype).reshape(y.shape)
    found, wanted = (torch.autograd.grad((t * weight).sum(), x)[0] for t in (y, expected))
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous()


def test_packed_refusals() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(TypeError, match="gate"):
        tw.swiglu_packed(x)  # type: ignore[call-arg]
    with pytest.raises(tw.InvalidArgument, match=r"gate: 'left'.*'first', 'second'"):
        tw.geglu_packed(x, gate="left")
    with pytest.raises(tw.InvalidArgument, match=r"x: shape \[3, 7\].*even"):
        tw.swiglu_packed(x[:, :7], gate="first")
    with pytest.raises(tw.InvalidArgument, match=r"dy: shape \[3, 8\].*\[3, 4\]"):
        tw.swiglu_packed_backward(x, x, gate="first")


def test_refusals() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(tw.InvalidArgument, match=r"approximate: 'fast'.*'tanh', 'none'"):
        tw.geglu(x, x, approximate="fast")
    with pytest.raises(tw.InvalidArgument, match="shapes must be equal"):
        tw.swiglu(x, x[:, :4])
    with pytest.raises(tw.InvalidArgument, match=r"up.*bf16, while gate is fp32"):
        tw.swiglu(x, x.bfloat16())


def test_the_normal_distribution_of_kernels_keeps_its_tail():
    a = torch.cat([torch.logspace(-30, 0, 2001), torch.linspace(0, 12, 20001)]).float()
    t = (1.0 / (1.0 + TAIL_STEP * a.double()).float()).double()
    ratio = torch.full_like(t, TAIL[-1])
    for coefficient in TAIL[-2::-1]:
        ratio = (ratio * t + coefficient).float().double()  # a fused multiply-add
    found, right = ratio * torch.exp(-0.5 * a.double() ** 2), torch.special.erfc(a.double() / 2**0.5) / 2
    assert ((found - right).abs() <= 4e-7 * right).all()
