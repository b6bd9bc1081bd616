"""What forward saves for the first backward to overwrite (`Gradient.spends`): who gets it, who does not, and that no
gradient which a caller holds ever changes. How ops and kernels write there is in `test_spent_kernels.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from loss_calls import backends, close, held, leaf, reductions, wanted
from tilewright.core.spent import Held

# Who gets it ----------------------------------------------------------------------------------------------------------


@reductions
@backends
def test_the_first_backward_writes_where_forward_saved(backend: str | None, reduction: str) -> None:
    for dy in (1.0, 65536.0, -0.37):
        x, y = leaf()
        loss = tw.bce_with_logits(x, y, reduction=reduction, backend=backend)
        (unit,) = held(loss)
        place = unit.data_ptr()
        close(unit, wanted(x, y, reduction))
        del unit
        loss.backward(torch.tensor(dy))
        assert held(loss) == []
        close(x.grad, wanted(x, y, reduction, dy))
        assert x.grad is not None and x.grad.data_ptr() == place, "autograd has copied the gradient"


@reductions
@backends
def test_a_second_backward_starts_from_the_inputs(backend: str | None, reduction: str) -> None:
    x, y = leaf()
    loss = tw.bce_with_logits(x, y, reduction=reduction, backend=backend)
    (first,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    kept = first.clone()
    for dy in (1.0, 5.0):
        (again,) = torch.autograd.grad(loss, x, torch.tensor(dy), retain_graph=True)
        close(again, wanted(x, y, reduction, dy))
        again.fill_(7)
        assert torch.equal(first, kept)
    first.fill_(7)
    loss.backward()
    close(x.grad, wanted(x, y, reduction))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_threads_may_race_for_it() -> None:
    x, y = leaf()
    loss = tw.bce_with_logits(x, y)
    torch.autograd.grad(tw.bce_with_logits(x, y), x)  # plans of both
    found: list[Tensor] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        found.extend(torch.autograd.grad(loss, x, torch.tensor(2.0), retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in found}) == 6
    for each in found:
        close(each, wanted(x, y, dy=2.0))


def test_only_one_gets_it() -> None:
    tensors = (torch.ones(2),)
    store = Held(tensors)
    assert store.take(1) is tensors
    assert store.take(1) == (None,)
    other = Held(tensors)
    other._capture = object()  # as of a graph whose capture has ended
    for copy in (other.take(1)[0], other.take(1)[0]):
        assert copy is not None and copy is not tensors[0] and torch.equal(copy, tensors[0])


@backends
def test_losses_that_share_what_they_are_of(backend: str | None) -> None:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return tw.bce_with_logits(x, y, backend=backend)

    x, y = leaf()
    loss = loss_of(x, y)
    (loss + loss).backward()
    close(x.grad, wanted(x, y, dy=2.0))
    other = leaf(1)[1]
    x.grad = None
    one, two = loss_of(x, y), loss_of(x, other)
    seen: list[Tensor] = []
    handle = x.register_hook(lambda g: seen.append(g.clone()))
    (one + 3 * two).backward(retain_graph=True)
    both = wanted(x, y) + wanted(x, other, dy=3.0)
    close(x.grad, both)
    (one + 3 * two).backward()  # adds to what is there
    handle.remove()
    close(x.grad, 2 * both)
    assert len(seen) == 2
    for each in seen:
        close(each, both)
    hidden, y = leaf()
    (one,) = torch.autograd.grad(loss_of(hidden * 2, y), hidden)  # not a leaf
    close(one, 2 * wanted(hidden * 2, y))


def test_upstream_gradients_of_other_forms() -> None:
    for reduction in ("mean", "sum"):
        x, y = leaf()
        tw.bce_with_logits(x, y, reduction=reduction).expand(3, 2).sum().backward()
        close(x.grad, wanted(x, y, reduction, 6.0))
        loss = tw.bce_with_logits(x, y, reduction=reduction)
        for dy in (torch.tensor([2.0]).expand(5)[3], torch.arange(4.0)[2]):
            close(torch.autograd.grad(loss, x, dy, retain_graph=True)[0], wanted(x, y, reduction, 2.0))
        half = tw.bce_with_logits(x, y, reduction=reduction, out_dtype=torch.float16)
        for _ in range(2):
            (found,) = torch.autograd.grad(half, x, torch.tensor(0.75).half(), retain_graph=True)
            close(found, wanted(x, y, reduction, 0.75))


@pytest.mark.parametrize("how", ["half", "float64", "none", "no grad", "detached"])
def test_what_is_saved_in_which_call(how: str) -> None:
    x, y = leaf()
    if how == "no grad":
        with torch.no_grad():
            assert tw.bce_with_logits(x, y).grad_fn is None
        return
    if how == "detached":
        assert tw.bce_with_logits(x.detach(), y).grad_fn is None
        return
    kind = {"half": torch.bfloat16, "float64": torch.float64}.get(how, torch.float32)
    x, y = x.detach().to(kind).requires_grad_(), y.to(kind)
    loss = tw.bce_with_logits(x, y, reduction="none" if how == "none" else "mean")
    node: Any = loss.grad_fn
    assert getattr(node, "held", None) is not None if how == "float64" else not hasattr(node, "held")
    torch.autograd.grad(loss.sum(), x)


def test_deterministic_algorithms_and_many_calls_give_the_same_bits() -> None:
    x, y = leaf()
    expected = torch.autograd.grad(tw.bce_with_logits(x, y), x)[0]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(tw.bce_with_logits(x, y), x)[0], expected)
    finally:
        torch.use_deterministic_algorithms(False)


# Who does not: where others see what is saved -------------------------------------------------------------------------


def test_hooks_of_saved_tensors_see_it_and_nothing_is_overwritten() -> None:
    x, y = leaf()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = tw.bce_with_logits(x, y)
    assert held(loss) == [] and len(packed) == 3
    unit = packed[-1].clone()
    for dy in (4.0, 3.0):
        (found,) = torch.autograd.grad(loss, x, torch.tensor(dy), retain_graph=True)
        close(found, wanted(x, y, dy=dy))
    assert torch.equal(packed[-1], unit)
    with torch.autograd.graph.save_on_cpu():
        loss = tw.bce_with_logits(x, y)
    loss.backward()
    close(x.grad, wanted(x, y))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, y = leaf()
    loss = checkpoint(lambda x: tw.bce_with_logits(x.sin(), y) * 3, x, use_reentrant=reentrant)
    loss.backward()
    leaves = x.detach().sin().requires_grad_()
    close(x.grad, wanted(leaves, y, dy=3.0) * x.detach().cos())


def test_a_changed_input_is_noticed_though_it_would_not_be_read() -> None:
    x, y = leaf()
    hidden = x * 1
    loss = tw.bce_with_logits(hidden, y)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_graphs_read_it(fresh: None) -> None:
    compiled = torch.compile(lambda x, y: tw.bce_with_logits(x, y), backend="aot_eager", fullgraph=True)
    x, y = leaf()
    with functorch.patch(donated_buffer=False):  # what a graph that is kept may not do
        loss = compiled(x, y)
        first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    close(first, wanted(x, y, dy=3.0))
    compiled(x, y).backward()
    close(x.grad, wanted(x, y))


def test_the_nodes_own_gradient_reads_it() -> None:
    x, y = leaf()
    loss = torch.ops.tilewright.bce_with_logits(x, y, None, None, reduction="sum", out_dtype=None)
    first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    close(first, wanted(x, y, "sum", 3.0))


class Names(TorchDispatchMode):
    """Lists the nodes of the library that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if "tilewright" in str(func) else []
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_nodes() -> None:
    x, y = leaf()
    with Names() as both:
        tw.bce_with_logits(x, y).backward()
    assert both.seen == ["tilewright.bce_with_logits_saving.default", "tilewright.bce_with_logits_backward.default"]
    x, y = leaf()
    loss = tw.bce_with_logits(x, y)
    with Names() as late:
        (first,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    assert late.seen == ["tilewright.bce_with_logits_backward_.default", "tilewright.bce_with_logits_backward.default"]
    assert torch.equal(first, kept)
    close(first, wanted(x, y, dy=3.0))
    close(second, first)


def test_a_second_derivative_is_refused_in_the_ops_name() -> None:
    x, y = leaf()
    with pytest.raises(tw.NoGradient, match=r"^bce_with_logits_backward has no gradient: double backward"):
        torch.autograd.grad(tw.bce_with_logits(x, y), x, create_graph=True)


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_backward_takes_no_memory() -> None:
    x, y = (torch.randn(1 << 20, device="cuda") for _ in range(2))
    x.requires_grad_()
    for _ in range(2):
        tw.bce_with_logits(x, y, backend="triton").backward()
        x.grad = None
    loss = tw.bce_with_logits(x, y, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held_before = torch.cuda.memory_allocated()
    loss.backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held_before < x.nbytes // 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("dy", [1.0, 3.0])
def test_a_captured_step_is_right_on_every_replay(backend: str, dy: float) -> None:
    """Forward writes what it saves anew each time, backward scales it; new values come through the same memory."""
    x, y = leaf(device="cuda")
    upstream = torch.tensor(dy, device="cuda")

    def step() -> Tensor:
        return torch.autograd.grad(tw.bce_with_logits(x, y, backend=backend), x, upstream)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = tw.bce_with_logits(x, y, backend=backend)
        place = held(loss)[0].data_ptr()
        (found,) = torch.autograd.grad(loss, x, upstream)
    assert found.data_ptr() == place, "in one capture it is overwritten"
    for seed in (0, 1, 1, 2):
        new, _ = leaf(seed, "cuda")
        with torch.no_grad():
            x.copy_(new)
        graph.replay()
        close(found, wanted(x, y, dy=dy))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", ["forward", "backward", "each"])
def test_graphs_that_hold_one_pass_have_copies(captured: str) -> None:
    """A graph may be replayed without the other: what is saved then stays as it is. Nothing new has to be warm."""
    x, y = leaf(device="cuda")
    upstream = torch.tensor(3.0, device="cuda")
    torch.autograd.grad(tw.bce_with_logits(x, y, backend="triton"), x, upstream)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # autograd runs a backward where its forward ran, which must be where it is captured
    if captured in ("forward", "each"):
        with torch.cuda.graph(first, stream=stream):
            loss = tw.bce_with_logits(x, y, backend="triton")
        first.replay()
    else:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = tw.bce_with_logits(x, y, backend="triton")
        torch.cuda.current_stream().wait_stream(stream)
    (unit,) = held(loss)
    if captured in ("backward", "each"):
        with torch.cuda.graph(second, pool=first.pool() if captured == "each" else None, stream=stream):
            (found,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        for _ in range(3):
            second.replay()
            close(found, wanted(x, y, dy=3.0))
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        close(found, wanted(x, y, dy=3.0))
    close(unit, wanted(x, y))
    assert found.data_ptr() != unit.data_ptr()
