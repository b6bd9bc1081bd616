"""Sparse gradients: torch's own function as the oracle, optimizers, what has no entry, and where they are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from tilewright.core import registry
from tilewright.core.kernel import Kernel
from tilewright.tune.sample import inputs_of
from tilewright.verify.check import call_of, check, truth_of

BACKWARD = "embedding_bag_mean_sparse_backward"
KERNELS = [k for k in registry.kernels_of(BACKWARD) if k.backend not in ("reference", "inductor")]
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreted)]


def table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def ids_of(rows: int, *shape: int) -> Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(1))


def entries(gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row numbers and values, as they stand."""
    assert gradient is not None and gradient.layout == torch.sparse_coo
    assert not gradient.is_coalesced() or gradient._nnz() == 0
    return gradient._indices()[0], gradient._values()


class Watched(TorchDispatchMode):
    """Any mode at all: calls go through the op's node."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("through_the_node", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_is_torchs_sparse_gradient(padding_idx: int | None, backend: str, through_the_node: bool) -> None:
    """The same entries: as many, of the same rows, and summed up the same."""
    weight, indices = table(20, 7), ids_of(20, 30, 9)
    dout = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
    expected = F.embedding_bag(indices, weight, mode="mean", padding_idx=padding_idx, sparse=True)
    (wanted,) = torch.autograd.grad(expected, weight, dout)

    def call() -> Tensor:
        y = tw.embedding_bag_mean(weight, indices, padding_idx=padding_idx, sparse_grad=True, backend=backend)
        (found,) = torch.autograd.grad(y, weight, dout)
        return found

    if through_the_node:
        with Watched():
            found = call()
    else:
        found = call()
    rows, values = entries(found)
    assert torch.equal(rows, indices[indices != (-1 if padding_idx is None else padding_idx)])
    assert found.shape == weight.shape and found._nnz() == wanted._nnz() and values.is_contiguous()
    torch.testing.assert_close(found.coalesce(), wanted.coalesce())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_adds_up_to_the_dense_gradient(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    weight, indices = table(20, 8, dtype), ids_of(20, 4, 5, 6).to(ids_dtype)
    dense, sparse = (
        tw.embedding_bag_mean(weight, indices, sparse_grad=s).float().square().sum() for s in (False, True)
    )
    (found,), (wanted,) = torch.autograd.grad(sparse, weight), torch.autograd.grad(dense, weight)
    rows, values = entries(found)
    assert rows.dtype == torch.int64 and values.dtype == dtype
    summed = torch.zeros(20, 8, dtype=torch.float64).index_add(0, rows, values.double())
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # of values rounded each
    torch.testing.assert_close(summed, wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "indices",
    [torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)],
    ids=["all padding", "no ids", "no bags"],
)
def test_nothing_that_counts_is_no_entry(indices: Tensor, backend: str) -> None:
    weight = table(6, 5)
    tw.embedding_bag_mean(weight, indices, sparse_grad=True, backend=backend).sum().backward()
    rows, values = entries(weight.grad)
    assert weight.grad is not None and weight.grad.shape == (6, 5)
    assert rows.shape == (0,) and values.shape == (0, 5)
    before = weight.detach().clone()
    torch.optim.SGD([weight], lr=1.0).step()
    torch.optim.SparseAdam([weight], lr=1.0).step()
    assert torch.equal(weight, before)


def test_a_bad_id_has_no_entry() -> None:
    weight = table(6, 5)
    indices = torch.tensor([[1, 6, 2], [-1, 1 << 40, 3], [9, 9, 9]])
    y = tw.embedding_bag_mean(weight, indices, out_of_range="skip", sparse_grad=True)
    y.sum().backward()
    rows, values = entries(weight.grad)
    assert rows.tolist() == [1, 2, 3]
    torch.testing.assert_close(values, torch.tensor([0.5, 0.5, 1.0])[:, None].expand(3, 5))
    with pytest.raises(tw.OutOfRange, match=r"indices: 6 at \[0, 1\]"):
        tw.embedding_bag_mean(weight, indices, sparse_grad=True)


def test_where_bags_are_nan_entries_are_those_of_the_other_ids() -> None:
    """On a GPU a bad id makes its bag NaN under out_of_range="error"; what is found there is the same."""
    gradient = tw.embedding_bag_mean.gradient_of({**tw.embedding_bag_mean.usual, "sparse_grad": True})
    assert gradient is not None
    places = gradient.finds["places"].define(table(6, 5), torch.tensor([[1, 6, 0], [0, -1, 3]]), 0)
    assert places is not None and places.tolist() == [0, 5]


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam", "Adagrad"])
def test_optimizers_take_the_same_steps_as_with_torchs_function(optimizer: str) -> None:
    def train(bag: Any) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        tables = [torch.nn.Parameter(torch.randn(50, 8)) for _ in range(2)]
        head = torch.nn.Linear(16, 1)
        steps = [getattr(torch.optim, optimizer)(tables, lr=0.05), torch.optim.SGD(head.parameters(), lr=0.05)]
        losses, ids = [], ids_of(50, 2, 32, 5)
        for _ in range(6):
            y = head(torch.cat([bag(t, i) for t, i in zip(tables, ids, strict=True)], -1))
            loss = F.binary_cross_entropy_with_logits(y[:, 0], (ids[0, :, 0] % 2).float())
            for one in steps:
                one.zero_grad()
            loss.backward()
            for one in steps:
                one.step()
            losses.append(float(loss.detach()))
        return tables, losses

    ours, losses = train(lambda t, i: tw.embedding_bag_mean(t, i, sparse_grad=True))
    theirs, expected = train(lambda t, i: F.embedding_bag(i, t, mode="mean", padding_idx=0, sparse=True))
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0] and losses == pytest.approx(expected, rel=1e-5)


def test_gradients_of_several_uses_of_one_table_add_up() -> None:
    weight, first, second = table(9, 4), ids_of(9, 5, 3), ids_of(9, 7, 2)
    uses = [lambda s: tw.embedding_bag_mean(weight, first, sparse_grad=s).sum() * 2,
            lambda s: tw.embedding_bag_mean(weight, second, sparse_grad=s).square().sum()]  # fmt: skip
    (wanted,) = torch.autograd.grad(sum(use(False) for use in uses), weight)
    (found,) = torch.autograd.grad(sum(use(True) for use in uses), weight)
    assert found.layout == torch.sparse_coo
    torch.testing.assert_close(found.to_dense(), wanted)
    (mixed,) = torch.autograd.grad(uses[0](True) + uses[1](False), weight)
    torch.testing.assert_close(mixed.to_dense(), wanted)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_places_may_come_in_any_order_and_again(kernel: Kernel, device: str) -> None:
    """What is asked for is what is written, whatever the ids: a bag without any that count is divided by 1."""
    op, backend = registry.op(BACKWARD), registry.backend(kernel.backend)
    indices = ids_of(40, 6, 5, 3)
    counted = indices != 0
    counted[2, 1] = False
    inputs: dict[str, Tensor | None] = {
        "dout": torch.randn(6, 5, 37, generator=torch.Generator().manual_seed(2)).to(device),
        "indices": indices.to(device),
        "count": counted.sum(-1).float().to(device),
        "places": torch.tensor([89, 0, 34, 34, 33, 1, 88, 50, 35]).to(device),
    }
    call = call_of(op, inputs, {}, False)
    emulated = backend.emulates(call.device)
    reasons = [backend.missing()] if backend.missing() else kernel.capability.reasons(call, emulated=emulated)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    truth = truth_of(op, inputs, {}, False)
    for config in kernel.configs_for(call):
        outcome = check(kernel, config, op, inputs, {}, truth, saving=False, emulated=emulated)
        assert not outcome.problems, (config, outcome.problems)


def test_samples_for_the_tuner_have_as_many_places_as_the_call() -> None:
    """More than its ids would have by chance, fewer, or one: a kernel launched for so many reads so many."""
    op = registry.op(BACKWARD)
    for many in (1, 17, 30):
        inputs = {"dout": torch.ones(6, 8), "indices": ids_of(40, 6, 5), "count": torch.full((6,), 5.0)}
        call = call_of(op, {**inputs, "places": torch.arange(many)}, {}, False)
        made = dict(zip(op.tensors, inputs_of(call, 0), strict=True))
        places = made["places"]
        assert places is not None and places.shape == (many,) and 0 <= int(places.min()) <= int(places.max()) < 30


def test_sizes_that_change_from_step_to_step_share_a_class() -> None:
    """Evidence and times are kept by class: how many ids count, give or take, tells none apart."""
    from tilewright.core.classes import call_class, layout_class

    op = registry.op(BACKWARD)
    found = set()
    for many in (17, 23, 30):
        inputs = {"dout": torch.ones(6, 8), "indices": ids_of(40, 6, 5), "count": torch.full((6,), 5.0)}
        call = call_of(op, {**inputs, "places": torch.arange(many)}, {}, False)
        found.add((layout_class(call, {}), call_class(call, {})))
    assert len(found) == 1


def test_a_backend_without_a_kernel_of_it_is_refused_at_forward() -> None:
    weight, indices = table(6, 5), ids_of(6, 3, 2)
    with pytest.raises(tw.NoKernel, match=f"{BACKWARD} has no vendor kernel") as caught:
        tw.embedding_bag_mean(weight, indices, sparse_grad=True, backend="vendor")
    assert f"{BACKWARD} is the gradient of embedding_bag_mean, which this call wants" in str(caught.value)
    assert tw.embedding_bag_mean(weight, indices, backend="vendor").grad_fn is not None
    assert tw.embedding_bag_mean(weight.detach(), indices, sparse_grad=True, backend="vendor").isfinite().all()


def test_where_tensors_have_no_values_it_is_refused_and_without_a_gradient_it_is_not() -> None:
    weight, indices = table(6, 5), ids_of(6, 3, 2)

    def bag(weight: Tensor, indices: Tensor) -> Tensor:
        return tw.embedding_bag_mean(weight, indices, sparse_grad=True)

    message = r"embedding_bag_mean\(sparse_grad=True\): the size of its gradient depends on values.*sparse_grad=False"
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        compiled(weight, indices)
    with FakeTensorMode() as mode, pytest.raises(tw.Unsupported, match=message):
        bag(mode.from_tensor(weight), mode.from_tensor(indices))
    with pytest.raises(tw.Unsupported, match=message):
        bag(weight.detach().to("meta").requires_grad_(), indices.to("meta"))
    assert torch.equal(compiled(weight.detach(), indices), bag(weight, indices))
    torch.library.opcheck(torch.ops.tilewright.embedding_bag_mean, (weight.detach(), indices),
                          {"padding_idx": 0, "out_of_range": "error", "sparse_grad": True})  # fmt: skip


def test_a_second_derivative_is_refused() -> None:
    weight, indices = table(6, 5), ids_of(6, 3, 2)
    y = tw.embedding_bag_mean(weight, indices, sparse_grad=True)
    with pytest.raises(tw.NoGradient, match=re.escape(f"{BACKWARD} has no gradient: double backward")):
        torch.autograd.grad(y.square().sum(), weight, create_graph=True)


@pytest.mark.gpu
def test_in_the_capture_of_a_graph_it_is_refused_before_anything_runs() -> None:
    weight = table(50, 8).detach().cuda().requires_grad_()
    indices = ids_of(50, 6, 4).cuda()
    tw.embedding_bag_mean(weight, indices, sparse_grad=True).sum().backward()
    with torch.no_grad():
        tw.embedding_bag_mean(weight, indices, sparse_grad=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(6, 8, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(tw.Unsupported, match="a CUDA graph that is being captured"):
            tw.embedding_bag_mean(weight, indices, sparse_grad=True)
        with torch.no_grad():
            out.copy_(tw.embedding_bag_mean(weight, indices, sparse_grad=True))
    graph.replay()
    torch.testing.assert_close(out, tw.embedding_bag_mean(weight, indices))


def test_refusals() -> None:
    op, dout, indices = tw.embedding_bag_mean_sparse_backward, torch.ones(3, 5), ids_of(6, 3, 2)
    count, places = torch.full((3,), 2.0), torch.arange(6)
    with pytest.raises(tw.InvalidArgument, match=r"places: .*needs contiguous int64\[N\]"):
        op(dout, indices, count, places.int())
    with pytest.raises(tw.InvalidArgument, match=r"dout: shape \[2, 5\]; needs \[3, 5\]"):
        op(dout[:2], indices, count, places)
    with pytest.raises(tw.InvalidArgument, match=r"count: .*needs contiguous fp32\[3\]"):
        op(dout, indices, count.double(), places)
    with pytest.raises(tw.InvalidArgument, match="indices: dtype int16"):
        op(dout, indices.short(), count, places)
