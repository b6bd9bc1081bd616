"""Gradients that are asked for again and again: what serves the second time must see all that the first time saw.

Each test first makes the shortcut warm, then changes one thing that it has to notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from op_calls import C, differentiable, inputs_of, leaves_of, listed, same
from tilewright.core import dispatch, evidence, policy
from tilewright.core.gradient import Backward
from tilewright.core.op import Op

long_way: list[str] = []
"""The backward op of each gradient that no shortcut served."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    call = Backward.__call__

    def counting(self: Backward, *args: Any) -> Any:
        long_way.append(self.backward.name)
        return call(self, *args)

    monkeypatch.setattr(Backward, "__call__", counting)
    evidence.bump()  # what other tests made warm is cold again
    long_way.clear()
    yield


def aside(t: Tensor) -> Tensor:
    """The same at an address that only its own size divides."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype)
    return room[1:].view(t.shape).copy_(t)


def thrice(t: Tensor) -> Tensor:
    """The same, each element the first of three."""
    return torch.stack([t, t, t], -1)[..., 0]


def norm() -> tuple[Tensor, list[Tensor], Tensor]:
    x, w = torch.randn(5, C, requires_grad=True), torch.randn(C, requires_grad=True)
    y = tw.rms_norm(x, w)
    return y, [x, w], torch.randn(5, C)


def grad(y: Tensor, leaves: list[Tensor], dy: Tensor, **how: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy, retain_graph=True, **how)


def taken(run: Callable[[], Any]) -> int:
    """How many gradients went the long way meanwhile."""
    before = len(long_way)
    run()
    return len(long_way) - before


@differentiable
def test_every_form_of_upstream_gradients(op: Op[Any]) -> None:
    inputs = inputs_of(op, (2, 3), grad=True)
    leaves, results = leaves_of(inputs), listed(op(*inputs, **op.usual))
    defined = listed(op.reference(*inputs, **op.usual))
    torch.manual_seed(0)
    dense = [torch.randn_like(r) for r in results]
    forms = [
        dense,
        [thrice(d) for d in dense],
        [aside(d) for d in dense],
        [torch.randn(()).expand(r.shape) for r in results],
        *([d if i == j else None for j, d in enumerate(dense)] for i in range(len(dense)) if len(dense) > 1),
    ]
    for again in range(3):
        for form in forms:
            there = [i for i, d in enumerate(form) if d is not None]
            pick = lambda made, there=there: [made[i] for i in there]  # noqa: E731
            found = torch.autograd.grad(pick(results), leaves, pick(form), retain_graph=True, allow_unused=True)
            wanted = torch.autograd.grad(pick(defined), leaves, pick(form), retain_graph=True, allow_unused=True)
            for f, w in zip(found, wanted, strict=True):
                none = torch.zeros(())
                like = next((t for t in (f, w) if t is not None), none)
                same([like * 0 if f is None else f], [like * 0 if w is None else w], rtol=1e-4, atol=1e-4)
        if again == 1:
            long_way.clear()
    gradient = op.gradient_of(op.usual)
    assert gradient is not None
    if not gradient.spends and not gradient.finds:
        assert len(long_way) == 1, "what is not aligned, and that alone"


@differentiable
def test_each_set_of_wanted_gradients(op: Op[Any]) -> None:
    """Graphs in turn, of which each wants other gradients of the same values."""
    inputs = inputs_of(op, grad=True)
    places = [i for i, t in enumerate(inputs) if t is not None and t.requires_grad]
    graphs = []
    for wanted in (places, *([place] for place in places)):
        given = [t if t is None or i in wanted else t.detach() for i, t in enumerate(inputs)]
        graphs.append((wanted, listed(op(*given, **op.usual))))
    ups = [torch.randn_like(r) for r in graphs[0][1]]
    expected = dict(
        zip(places, torch.autograd.grad(graphs[0][1], leaves_of(inputs), ups, retain_graph=True), strict=True)
    )
    for _ in range(3):
        for wanted, results in graphs:
            pairs = [(r, up) for r, up in zip(results, ups, strict=True) if r.requires_grad]
            found = torch.autograd.grad(
                [r for r, _ in pairs], [inputs[i] for i in wanted], [up for _, up in pairs], retain_graph=True
            )
            same(found, [expected[i] for i in wanted], rtol=1e-4, atol=1e-5)


def test_a_gradient_met_before_is_served_without_the_entry() -> None:
    y, leaves, dy = norm()
    assert taken(lambda: grad(y, leaves, dy)) == 1
    assert taken(lambda: [grad(y, leaves, dy) for _ in range(3)]) == 0
    other, more, _ = norm()
    assert taken(lambda: grad(other, more, dy)) == 0, "a second graph of the same signature"
    x = more[0]
    half = tw.rms_norm(x, more[1].detach())
    assert taken(lambda: grad(half, [x], dy)) == 1, "one that wants less"
    assert taken(lambda: grad(half, [x], dy)) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_saved_tensors_may_come_back_otherwise() -> None:
    """Hooks may give another address, other strides, another type, or what is no tensor for this op."""
    x, w, dy = torch.randn(5, C, requires_grad=True), torch.randn(C, requires_grad=True), torch.randn(5, C)
    form: list[Callable[[Tensor], Any]] = [Tensor.clone]
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: form[0](t) if t.shape == x.shape else t):
        y = tw.rms_norm(x, w)
    expected = grad(y, [x, w], dy)
    for _ in range(3):
        for form[0] in (Tensor.clone, thrice, aside, torch.nn.Parameter):
            same(grad(y, [x, w], dy), expected, rtol=1e-5, atol=1e-5)
    odd: dict[str, Callable[[Tensor], Any]] = {
        "x: a nested tensor": lambda t: torch.nested.nested_tensor([t, t]),
        "x: layout torch.sparse_coo": Tensor.to_sparse,
        "dy: shape": lambda t: t[:4],
    }
    for message, form[0] in odd.items():
        with pytest.raises(tw.InvalidArgument, match=f"^rms_norm_backward: .*{message}"):
            grad(y, [x, w], dy)
    form[0] = Tensor.clone
    assert taken(lambda: same(grad(y, [x, w], dy), expected)) == 0


def test_a_gradient_that_is_undefined_upstream() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 1

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return None if stop else dy

    y, leaves, dy = norm()
    z = Stop.apply(y)
    for stop in (False, False, True, True, False):
        found = grad(z, leaves, dy, allow_unused=True)
        assert [t is None for t in found] == [stop, stop]


def test_modes_see_the_node_and_a_second_derivative_is_refused() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    y, leaves, dy = norm()
    expected = grad(y, leaves, dy)
    grad(y, leaves, dy)
    seen: list[str] = []
    with Names():
        same(grad(y, leaves, dy), expected)
    assert [name for name in seen if "tilewright" in name] == ["tilewright.rms_norm_backward.default"]
    with pytest.raises(tw.NoGradient, match="double backward"):
        grad(y, leaves, dy, create_graph=True)
    assert taken(lambda: grad(y, leaves, dy)) == 0


def test_policy_and_determinism_are_those_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(dispatch, "_comparer", [lambda call, inputs, outputs: compared.append(call.op)])
    plain, leaves, dy = norm()
    with tw.use(backend="inductor", check="never"):  # on a GPU and on a CPU no reference, which needs no comparison
        unchecked, theirs, _ = norm()
    with tw.use(backend="inductor", check="always"):
        checked, others, _ = norm()
    for turn in range(5):
        compared.clear()
        if turn == 2:  # twice, for what was learned of the kernels at first makes all plans anew
            long_way.clear()
        with tw.use(backend="reference", check="always" if turn % 2 else "never"):
            grad(plain, leaves, dy), grad(unchecked, theirs, dy)
            assert not compared
            grad(checked, others, dy)
        assert compared == ["rms_norm_backward"]
    assert not long_way


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Seeing, BaseTorchFunctionMode])
@pytest.mark.parametrize("form", [Tensor.clone, torch._neg_view, aside])
def test_ways_around_the_shortcut_keep_to_them_too(
    form: Callable[[Tensor], Tensor], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes, which see the node, and a tensor that is negated lazily."""
    found: list[tuple[str, Any]] = []
    plan = dispatch.plan

    def planning(op: Op[Any], tensors: Any, options: Any, backend: Any, frozen: Any, *rest: Any) -> Any:
        found.append((op.name, frozen))
        return plan(op, tensors, options, backend, frozen, *rest)

    monkeypatch.setattr(dispatch, "plan", planning)
    dispatch._node_plans.clear()
    with tw.use(backend="inductor", check="never"):
        there = policy.current()
        y, leaves, dy = norm()
    torch.use_deterministic_algorithms(True)
    try:
        with mode():
            grad(y, leaves, form(dy))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [("rms_norm", (there, False)), ("rms_norm_backward", (there, False))]


def test_what_is_new_makes_a_plan_anew() -> None:
    y, leaves, dy = norm()
    expected = grad(y, leaves, dy)
    assert taken(lambda: grad(y, leaves, dy)) == 0
    evidence.bump()
    assert taken(lambda: same(grad(y, leaves, dy), expected)) == 1
    assert taken(lambda: same(grad(y, leaves, dy), expected)) == 0


def test_threads_share_a_graph() -> None:
    y, leaves, dy = norm()
    expected = grad(y, leaves, dy)
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            barrier.wait()
            for turn in range(200):
                some = slice(0, 1) if turn % 3 == 0 else slice(0, 2)
                same(grad(y, leaves[some], dy), expected[some])
                if turn % 50 == 0:
                    evidence.bump()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_compiled_autograd_traces_it_whole() -> None:
    torch._dynamo.reset()
    try:
        warm, leaves, dy = norm()
        expected = grad(warm, leaves, dy)
        grad(warm, leaves, dy)
        for y in (warm, tw.rms_norm(*leaves, eps=1e-6, weight_offset=0.0, backend="reference")):  # and a cold one
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                y.backward(dy)
            same([leaf.grad for leaf in leaves], expected)
            for leaf in leaves:
                leaf.grad = None
    finally:
        torch._dynamo.reset()
