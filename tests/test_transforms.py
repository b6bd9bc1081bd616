"""Every op under what torch wraps around it: modes, subclasses, transforms; what has no rule is refused by name."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from op_calls import Block, C, differentiable, every_op, gradients, inputs_of, leaves_of, listed, loss, node_call, same
from tilewright.core import dispatch, evidence, registry
from tilewright.core.op import Op

# Modes and subclasses -------------------------------------------------------------------------------------------------


@every_op
def test_a_dispatch_mode_sees_the_node(op: Op[Any]) -> None:
    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Hidden(Log):
        """One that guards of compiled code do not see, as that of selective checkpointing."""

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    inputs = inputs_of(op)
    for mode in (Log, Hidden, Log, Hidden):  # cold, and where a plan is warm
        with mode() as log:
            found = op(*inputs, **op.usual)
        assert log.seen == [f"tilewright.{op.name}.default"]
        same(listed(found), listed(op(*inputs, **op.usual))), op(*inputs, **op.usual)


@every_op
def test_function_modes_and_default_devices_change_nothing(op: Op[Any]) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    inputs = inputs_of(op)
    expected = listed(op(*inputs, **op.usual))
    with Mode():
        same(listed(op(*inputs, **op.usual)), expected)
    assert any(op.name in str(f) for f in seen)
    for where in ("cpu", "meta"):
        with torch.device(where):
            same(listed(op(*inputs, **op.usual)), expected)


class Labelled(Tensor):
    """A subclass with torch's own __torch_function__."""


@every_op
def test_subclasses_and_parameters(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    expected = listed(op(*inputs, **op.usual))
    found = listed(op(inputs[0].as_subclass(Labelled), *inputs[1:], **op.usual))
    assert all(isinstance(f, Labelled) for f in found)
    same([f.as_subclass(Tensor) for f in found], expected)
    with torch.no_grad():
        parameters = [t if t is None else torch.nn.Parameter(t, t.is_floating_point()) for t in inputs]
        same(listed(op(*parameters, **op.usual)), expected)


def test_lazily_negated_tensors_are_read_right() -> None:
    """The imaginary part of a conjugate has its sign in a bit of the tensor, not in memory."""
    z = torch.randn(4, C, dtype=torch.complex64)
    x = z.conj().imag
    expected = tw.rms_norm(-z.imag.contiguous(), backend="reference")
    assert x.is_neg()
    tw.rms_norm(z.imag)  # a plan of the same strides
    for backend in (None, "reference", "vendor"):
        same([tw.rms_norm(x, backend=backend)], [expected])
    dy, rstd = x, torch.ones(4)
    real = z.real.contiguous()
    found = tw.rms_norm_backward(dy, real, None, rstd, backend="triton")[:1]
    same(found, tw.rms_norm_backward(dy.clone().contiguous(), real, None, rstd, backend="reference")[:1])
    leaf = torch.randn(4, C, dtype=torch.complex64, requires_grad=True)
    loss(tw.rms_norm(leaf.conj().imag)).backward()
    other = leaf.detach().clone().requires_grad_()
    loss(tw.rms_norm.reference(-other.imag)).backward()
    same([leaf.grad], [other.grad], rtol=1e-4, atol=1e-5)


def test_kernels_get_no_lazily_negated_tensor_contiguous_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read memory, where the sign is not. A view of one element, or cut out anew, is contiguous."""
    lazy: list[bool] = []

    def seeing(*args: Any, **options: Any) -> Any:
        run = bind(*args, **options)

        def looked_at(*tensors: Tensor | None) -> Any:
            lazy.append(any(t is not None and t.is_neg() for t in tensors))
            return run(*tensors)

        return looked_at

    bind = dispatch.bind
    monkeypatch.setattr(dispatch, "bind", seeing)
    evidence.bump()
    z = torch.randn(4, C, dtype=torch.complex64)
    views = [z.conj().imag, z.conj().imag[:1, :1], z.conj().imag.as_strided((3, C), (C, 1))]
    for x in views:
        assert x.is_neg()
        plain = z.clone().imag.as_strided(x.shape, x.stride()).copy_(x)  # its address is as odd
        for given in (plain, x, plain, x, x):
            same([tw.rms_norm(given, backend="reference")], [tw.rms_norm.reference(plain)])
        ones = torch.ones(x.shape, requires_grad=True)
        y = tw.rms_norm(ones, backend="reference")
        for given in (plain, x, x):
            torch.autograd.grad(y, ones, given, retain_graph=True)
        if x.is_contiguous():
            tw.rms_norm_(plain, backend="reference")
            with pytest.raises(tw.TilewrightError, match="lazily negated"):
                tw.rms_norm_(x, backend="reference")
    assert lazy and not any(lazy)


# Refusals -------------------------------------------------------------------------------------------------------------


@every_op
def test_functional_transforms_are_refused(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    stacked = [None if t is None else torch.stack([t, t]) for t in inputs]
    with pytest.raises(tw.Unsupported, match=rf"{op.name}: torch.func"):
        torch.func.vmap(lambda *t: op(*t, **op.usual), tuple(None if t is None else 0 for t in inputs))(*stacked)
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda t: loss(op(t, *inputs[1:], **op.usual)))(inputs[0])
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.func.jvp(lambda t: listed(op(t, *inputs[1:], **op.usual))[0], (inputs[0],), (torch.ones_like(inputs[0]),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(tw.Unsupported, match="forward-mode tangent"):
            op(dual, *inputs[1:], **op.usual)
        same(listed(op(*inputs, **op.usual)), listed(op(*inputs, **op.usual)))
    same(listed(op(*inputs, **op.usual)), listed(op(*inputs, **op.usual)))


def test_dtensor_is_refused() -> None:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.randn(4, C), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(tw.Unsupported, match=r"rms_norm: x is a DTensor, .*x.to_local\(\)"):
            tw.rms_norm(x)
        with pytest.raises(tw.Unsupported, match="weight is a DTensor"):
            tw.rms_norm(torch.randn(4, C), x[0])
        assert tw.rms_norm(x.to_local()).shape == (4, C)
    finally:
        destroy_process_group()


@pytest.mark.parametrize("node", [False, True])
@differentiable
def test_double_backward_is_refused_by_name(op: Op[Any], node: bool) -> None:
    inputs = inputs_of(op, grad=True)
    assert op.gradient is not None
    with pytest.raises(tw.NoGradient, match=f"{op.gradient.op} has no gradient: double backward"):
        results = node_call(op, inputs) if node else op(*inputs, **op.usual)
        # squared, so that the upstream gradient of a linear op depends on its inputs too
        found = torch.autograd.grad(loss(results).square(), leaves_of(inputs), create_graph=True)
        sum(g.square().sum() for g in found).backward()
    same(gradients(op, inputs), gradients(op, inputs))


ODD_NAMES = """
import torch, tilewright as tw
from tilewright.core import dispatch, evidence, registry
from tilewright.core.op import Gradient, like, op
from tilewright.core.probes import Probes
from tilewright.verify.cases import cases

shared = {"family": "odd", "check": lambda call: None, "cost": lambda call: (0, 0), "error_scale": lambda t, o: {}}

@op(out={"x_back": like("x")}, probes=Probes({"x": "M C", "up": "M C"}), **shared)
def pullback(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return up * 2 * x

@op(out={"y": like("x")}, probes=Probes({"x": "M C"}), **shared,
    gradient=Gradient("pullback", grads={"y": "up"}, takes={"x": "x"}, gives={"x": "x_back"}))
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x

@op(out={"y": like("x")}, probes=Probes({"x": "M C"}), **shared)
def looks_backward(x: torch.Tensor) -> torch.Tensor:
    return x + 1

x = torch.ones(2, 3, requires_grad=True)
assert torch.autograd.grad(squared(x).sum(), x)[0].eq(2).all()
for call in (lambda: torch.autograd.grad(squared(x).sum(), x, create_graph=True), lambda: looks_backward(x)):
    try:
        call()
    except tw.NoGradient as error:
        print(error)
bent = {(name, layout) for c in cases(pullback, torch.float32, size="tiny") for name, layout in c.layouts.items()}
print(sorted(name for name, layout in bent if layout == "expanded"))
print([o.name for o in registry.served_by("pullback")], registry.served_by("looks_backward"))
"""


def test_what_is_a_gradient_is_declared_and_not_read_off_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", ODD_NAMES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "pullback has no gradient: double backward (create_graph=True) is not supported",
        "looks_backward has no gradient: call it under torch.no_grad() or on detached inputs",
        "['up']",
        "['squared'] []",
    ], done.stderr


def test_batched_gradients_are_refused() -> None:
    x = torch.randn(3, C, requires_grad=True)
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.autograd.grad(tw.rms_norm(x), x, torch.ones(2, 3, C), is_grads_batched=True)


# Copies ---------------------------------------------------------------------------------------------------------------


def test_modules_that_hold_an_op_can_be_copied_and_scripted_by_trace() -> None:
    block = Block(registry.op("rms_norm"), [torch.randn(3, C), torch.ones(C)])
    twin = copy.deepcopy(block)
    assert twin.op is block.op
    x = torch.randn(3, C)
    same(twin(x), block(x))
    traced = torch.jit.trace(lambda x: tw.rms_norm(x), (x,))
    same([traced(x[:2])], [tw.rms_norm(x[:2])])
