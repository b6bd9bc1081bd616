"""Edges of the embedding contracts: torch's own function, ids that count for nothing, segments of any length."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.core import registry
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.verify.check import call_of, check, truth_of

KERNELS = [k for op in ("embedding_bag_mean", "embedding_bag_mean_backward") for k in registry.kernels_of(op)
           if k.backend not in ("reference", "inductor")]  # fmt: skip
FORWARD = [k for k in KERNELS if k.op == "embedding_bag_mean"]
BACKWARD = [k for k in KERNELS if k.op == "embedding_bag_mean_backward"]


def table(rows: int, columns: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def ids_of(rows: int, *shape: int) -> Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(1))


def agree(kernel: Kernel, tensors: dict[str, Tensor], device: str, every: bool = True, **options: Any) -> None:
    """The kernel against the float64 oracle: each config, or the first."""
    op = registry.op(kernel.op)
    inputs = {n: tensors[n].to(device) for n in op.tensors}
    options = {**op.usual, **options}
    saving = op.gradient is not None
    call = call_of(op, inputs, options, saving)
    backend = registry.backend(kernel.backend)
    emulated = backend.emulates(call.device)
    reasons = [backend.missing()] if backend.missing() else kernel.capability.reasons(call, emulated=emulated)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    truth = truth_of(op, inputs, options, saving)
    configs: tuple[Config, ...] = kernel.configs_for(call)
    for config in configs if every else configs[:1]:
        outcome = check(kernel, config, op, inputs, options, truth, saving=saving, emulated=emulated)
        assert not outcome.problems, (config, outcome.problems)


def gradient_inputs(indices: Tensor, rows: int, columns: int, padding_idx: int | None = 0) -> dict[str, Tensor]:
    weight = table(rows, columns)
    counted = (indices >= 0) & (indices < rows)
    if padding_idx is not None:
        counted &= indices != padding_idx
    dout = torch.randn(*indices.shape[:-1], columns, generator=torch.Generator().manual_seed(2))
    return {"dout": dout, "indices": indices, "count": counted.sum(-1).float(), "weight": weight}


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_is_torchs_function(padding_idx: int | None) -> None:
    weight = table(20, 7).double().requires_grad_()
    indices = ids_of(20, 30, 9)
    y = tw.embedding_bag_mean(weight, indices, padding_idx=padding_idx)
    expected = F.embedding_bag(indices, weight, mode="mean", padding_idx=padding_idx)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    found, wanted = (torch.autograd.grad(t.square().sum(), weight)[0] for t in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    weight, indices = table(5, 3).double().requires_grad_(), ids_of(5, 4, 6)
    assert torch.autograd.gradcheck(tw.embedding_bag_mean, (weight, indices))


def test_bags_without_ids_are_zero() -> None:
    weight = table(6, 5).requires_grad_()
    empty = tw.embedding_bag_mean(weight, torch.zeros(3, 0, dtype=torch.int64))
    assert empty.shape == (3, 5) and not empty.any()
    assert not torch.autograd.grad(empty.sum(), weight)[0].any()
    assert tw.embedding_bag_mean(weight, torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 5)
    padded = tw.embedding_bag_mean(weight, torch.zeros(3, 4, dtype=torch.int64))
    assert not padded.any() and not torch.autograd.grad(padded.sum(), weight)[0].any()


def test_padding_need_not_be_a_row() -> None:
    weight = table(6, 5)
    y = tw.embedding_bag_mean(weight, torch.tensor([[1, -1, 2, -1]]), padding_idx=-1)
    torch.testing.assert_close(y[0], (weight[1] + weight[2]) / 2)


def test_an_id_out_of_range_is_an_index_error_on_a_cpu() -> None:
    weight = table(6, 5).requires_grad_()
    for bad in (6, -1, 1 << 40):
        indices = torch.tensor([[1, 2], [3, bad]])
        with pytest.raises(IndexError, match=rf"indices: {bad} at \[1, 1\] is outside 0 to 5"):
            tw.embedding_bag_mean(weight, indices)
        with pytest.raises(tw.OutOfRange):  # through the node too
            torch.compile(tw.embedding_bag_mean, backend="eager", fullgraph=True)(weight, indices)
        y = tw.embedding_bag_mean(weight, indices, out_of_range="skip")
        torch.testing.assert_close(y, torch.stack([(weight[1] + weight[2]) / 2, weight[3]]))
        assert torch.autograd.grad(y.sum(), weight)[0].sum() == 10


@pytest.mark.parametrize("kernel", FORWARD, ids=str)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_elsewhere_its_bag_is_nan(kernel: Kernel, padding_idx: int | None, device: str) -> None:
    """The definition says so whichever device it runs on, and every kernel agrees on where."""
    indices = ids_of(10, 5, 4)
    indices[1, 2], indices[3, 0] = 10, -(1 << 35)
    weight = table(10, 33)
    expected = tw.embedding_bag_mean.reference(weight, indices, padding_idx=padding_idx)
    assert expected.isnan().all(-1).tolist() == [False, True, False, True, False]
    agree(kernel, {"weight": weight, "indices": indices}, device, padding_idx=padding_idx)


@pytest.mark.parametrize("kernel", FORWARD, ids=str)
def test_what_does_not_count_is_not_read_into_the_sum(kernel: Kernel, device: str) -> None:
    """NaN in the padding row, and in row 0 where bad ids could be sent."""
    weight, indices = table(10, 33), ids_of(10, 5, 4).clamp(min=1)
    weight[0] = math.nan
    indices[2], indices[0, 1] = 0, 0
    agree(kernel, {"weight": weight, "indices": indices}, device)
    indices[1, 1], indices[4, 3] = 77, -5
    agree(kernel, {"weight": weight, "indices": indices}, device, out_of_range="skip")
    clean = tw.embedding_bag_mean.reference(weight, indices, out_of_range="skip")
    assert clean.isfinite().all() and not clean[2].any()


@pytest.mark.parametrize("kernel", BACKWARD, ids=str)
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_segments_of_any_length(kernel: Kernel, hot: float, device: str) -> None:
    """One id everywhere, half of the time, or nowhere: segments within a chunk, over two, and over many whole ones."""
    indices = ids_of(23, 90, 13)
    uniform = torch.rand(indices.shape, generator=torch.Generator().manual_seed(3))
    indices[uniform < hot] = 7
    indices[3] = 0
    inputs = gradient_inputs(indices, 23, 40)
    agree(kernel, inputs, device)
    agree(kernel, inputs | gradient_inputs(indices, 23, 40, None), device, every=False, padding_idx=None)


@pytest.mark.parametrize("kernel", BACKWARD, ids=str)
def test_more_than_768_ids_of_the_padding_row(kernel: Kernel, device: str) -> None:
    indices = torch.zeros(100, 9, dtype=torch.int64)
    indices[::7, 2] = 5
    inputs = gradient_inputs(indices, 6, 3)
    agree(kernel, inputs, device, every=False)
    dweight = tw.embedding_bag_mean_backward.reference(*inputs.values())
    assert not dweight[:5].any() and dweight[5].all()


@pytest.mark.parametrize("kernel", BACKWARD, ids=str)
def test_ids_out_of_range_get_no_gradient(kernel: Kernel, device: str) -> None:
    indices = ids_of(9, 12, 5)
    indices[0], indices[1, 1], indices[2, 2] = 9, -1, 1 << 40
    agree(kernel, gradient_inputs(indices, 9, 17), device)


def test_atomics_are_refused_where_the_same_bits_are_wanted() -> None:
    op = registry.op("embedding_bag_mean_backward")
    inputs = gradient_inputs(ids_of(9, 12, 5), 9, 17)
    call = replace(call_of(op, inputs, op.usual, False), deterministic=True)
    refused = [k.name for k in registry.kernels_of(op.name) if k.capability.deterministic is False]
    assert refused == ["embedding_bag_mean_backward/inductor", "embedding_bag_mean_backward/triton/atomic"]
    for kernel in registry.kernels_of(op.name):
        reasons = [r for r in kernel.capability.reasons(call, emulated=True) if "not deterministic" in str(r)]
        assert bool(reasons) == (kernel.name in refused)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang", "vendor"])
def test_both_passes_can_be_captured(backend: str) -> None:
    weight = table(500, 64, torch.float16, "cuda").requires_grad_()
    indices = ids_of(500, 300, 20).cuda()

    def step() -> Tensor:
        out = tw.embedding_bag_mean(weight, indices, backend=backend)
        return torch.autograd.grad(out, weight, torch.ones_like(out))[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    indices.add_(7).remainder_(500)  # the graph reads ids, not what they were
    graph.replay()
    assert torch.equal(captured, step()) and not torch.equal(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_tables_of_more_than_2_to_the_31_elements(backend: str) -> None:
    rows = (1 << 24) + 1000
    weight = torch.zeros(rows, 129, dtype=torch.float16, device="cuda")
    weight[-1000:] = torch.arange(1000, device="cuda", dtype=torch.float16)[:, None]
    indices = (rows - 1 - ids_of(1000, 64, 8)).cuda()
    weight.requires_grad_()
    out = tw.embedding_bag_mean(weight, indices, backend=backend)
    wanted = (indices - (rows - 1000)).float().mean(-1, keepdim=True).half().expand(-1, 129)
    torch.testing.assert_close(out, wanted)
    dweight = torch.autograd.grad(out, weight, torch.ones_like(out))[0]
    counts = torch.bincount(indices.flatten(), minlength=rows)
    torch.testing.assert_close(dweight[-1000:], (counts[-1000:, None] / 8).half().expand(-1, 129))
    assert not dweight[:-1000].any()


def test_refusals() -> None:
    weight, indices = table(6, 5), ids_of(6, 3, 2)
    with pytest.raises(tw.InvalidArgument, match=r"indices: dtype int16; takes int64, int32"):
        tw.embedding_bag_mean(weight, indices.short())
    with pytest.raises(tw.InvalidArgument, match=r"out_of_range: 'wrap'.*'error', 'skip'"):
        tw.embedding_bag_mean(weight, indices, out_of_range="wrap")
    with pytest.raises(tw.InvalidArgument, match=r"weight: shape \[5\]"):
        tw.embedding_bag_mean(weight[0], indices)
    with pytest.raises(tw.InvalidArgument, match=r"padding_idx.*an integer is needed"):
        tw.embedding_bag_mean(weight, indices, padding_idx=0.0)  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidArgument, match=r"dout: shape \[3, 4\]; needs \[3, 5\]"):
        tw.embedding_bag_mean_backward(torch.ones(3, 4), indices, torch.ones(3), weight)
