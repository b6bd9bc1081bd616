"""Every op under autograd: its modes, checkpointing, odd gradients and graphs.

Nothing here knows an op by name except where a test needs one that saves its output or one with a residual.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tilewright as tw
from op_calls import (
    DIFFERENTIABLE,
    C,
    ask,
    differentiable,
    every_op,
    few,
    gradients,
    inputs_of,
    leaves_of,
    left_out,
    listed,
    loss,
    node_call,
    same,
)
from tilewright.core import evidence, registry
from tilewright.core.kernel import Kernel
from tilewright.core.op import Op
from tilewright.verify.cases import make_inputs

# Modes ----------------------------------------------------------------------------------------------------------------


@every_op
def test_no_grad_and_inference_mode(op: Op[Any]) -> None:
    outside = inputs_of(op, grad=op.gradient is not None)
    with torch.no_grad():
        expected = listed(op(*outside, **op.usual))
        assert not any(r.requires_grad for r in expected)
    with torch.inference_mode():
        inside = inputs_of(op)
        found, mixed = listed(op(*outside, **op.usual)), listed(op(*inside, **op.usual))
        assert all(r.is_inference() for r in (*found, *mixed))
    same(found, expected), same(mixed, expected)
    same(listed(op(*inside, **op.usual)), expected)
    if op.gradient is not None:
        assert all(r.requires_grad for r in listed(op(*outside, **op.usual)))


@pytest.mark.parametrize("backend", [None, "reference", "vendor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_op
def test_autocast_changes_nothing(op: Op[Any], dtype: torch.dtype, backend: str | None) -> None:
    """The rule: an op keeps the dtype of x and accumulates in float32, whatever autocast says."""
    inputs = inputs_of(op, dtype=dtype, grad=op.gradient is not None)
    with torch.no_grad():
        if backend and tw.explain(op, *inputs, backend=backend, **op.usual).chosen is None:
            pytest.skip(f"{backend} does not take this call")
        expected = listed(op(*inputs, backend=backend, **op.usual))
        with torch.autocast("cpu", torch.float16):
            found = listed(op(*inputs, backend=backend, **op.usual))
            nodes = listed(node_call(op, inputs)) if backend is None else found
    assert [f.dtype for f in found] == [e.dtype for e in expected]
    same(found, expected, rtol=0, atol=0), same(nodes, expected)
    if op.gradient is not None and backend is None:
        with torch.autocast("cpu", torch.float16):
            found = gradients(op, inputs)
        same(found, gradients(op, inputs), rtol=0, atol=0)


def test_vendor_kernels_run_without_autocast_on_any_device() -> None:
    """aten's layer_norm is on CUDA's list of ops that autocast turns to float32; a kernel must not see autocast."""
    kernel = Kernel("l2_norm", "vendor", f"{__name__}:asks_for_autocast", label="autocast", preference=-60)
    registry.add_kernels([kernel])
    try:
        with tw.use(check="never"), torch.autocast("cpu", torch.bfloat16):
            tw.l2_norm(torch.randn(2, 3))
            assert torch.is_autocast_enabled("cpu")
    finally:
        registry.remove_kernel(kernel)
    assert AUTOCAST == [False]


AUTOCAST: list[bool] = []


def asks_for_autocast(x: Tensor, *, eps: float, saving: bool) -> list[Tensor]:
    AUTOCAST.append(torch.is_autocast_enabled("cpu"))
    return registry.op("l2_norm").define({"x": x}, {"eps": eps}, saving)


@every_op
def test_deterministic_algorithms(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    expected = listed(op(*inputs, **op.usual))
    torch.use_deterministic_algorithms(True)
    try:
        same(listed(op(*inputs, **op.usual)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# Checkpointing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reentrant", "plain", "save", "recompute"])
@differentiable
def test_activation_checkpointing(op: Op[Any], kind: str) -> None:
    inputs = inputs_of(op, grad=True)
    nodes = [getattr(torch.ops.tilewright, n).default for n in (op.name, op.name + "_saving")]
    wanted = CheckpointPolicy.MUST_SAVE if kind == "save" else CheckpointPolicy.MUST_RECOMPUTE
    runs: list[bool] = []

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func not in nodes:
            return CheckpointPolicy.PREFER_RECOMPUTE
        runs.append(context.is_recompute)
        return wanted

    more: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind in ("save", "recompute"):
        more["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)

    def model(*tensors: Tensor) -> list[Tensor]:
        given = [t * 2 if t is not None and t.is_floating_point() else t for t in tensors]
        return [r.sin() for r in listed(op(*given, **op.usual))]

    found = torch.autograd.grad(loss(model(*inputs)), leaves_of(inputs))
    outputs = checkpoint(lambda *t: tuple(model(*t)), *inputs, **more)
    loss(outputs).backward()
    same([t.grad for t in leaves_of(inputs)], found)
    if kind in ("save", "recompute"):
        assert runs[0] is False


# Gradients ------------------------------------------------------------------------------------------------------------


@differentiable
def test_gradcheck_in_float64(op: Op[Any]) -> None:
    for options in op.probes.options:
        if options.get("cast_before_weight"):
            continue  # rounds in between, though not in float64
        if any(isinstance(value, torch.dtype) for value in options.values()):
            continue  # rounds at the output
        made = make_inputs(op, few(op, (3,), 5, 4), torch.float64, options, left_out(op))  # each element is asked for
        ask(op, made)

        def call(*tensors: Any) -> list[Tensor]:
            results = listed(op(*tensors, **{**op.usual, **options}))  # noqa: B023
            return [torch.where(r == -math.inf, 0.0, r) for r in results]

        assert torch.autograd.gradcheck(call, list(made.values()))


@pytest.mark.parametrize("node", [False, True])
@differentiable
def test_gradients_agree_with_autograd_through_the_definition(op: Op[Any], node: bool) -> None:
    for absent in op.probes.absent:
        made = make_inputs(op, (2, 3, C), torch.float64, absent=absent)
        ask(op, made)
        inputs = list(made.values())
        call = (lambda *t: node_call(op, list(t))) if node else (lambda *t: op(*t, **op.usual))
        same(gradients(call, inputs), gradients(lambda *t: op.reference(*t, **op.usual), inputs))


@differentiable
def test_each_input_alone_may_want_a_gradient(op: Op[Any]) -> None:
    asking = [i for i, t in enumerate(inputs_of(op, grad=True)) if t is not None and t.requires_grad]
    every = gradients(op, inputs_of(op, grad=True))
    for i, expected in zip(asking, every, strict=True):
        inputs = inputs_of(op)
        inputs[i].requires_grad_()
        loss(op(*inputs, **op.usual)).backward()
        same([inputs[i].grad], [expected])
        assert all(t.grad is None for j, t in enumerate(inputs) if j != i and t is not None)
        loss(node_call(op, inputs)).backward()
        same([inputs[i].grad], [2 * expected])


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if len(op.out) > 1], ids=str)
def test_outputs_may_go_unused(op: Op[Any], used: tuple[bool, bool]) -> None:
    inputs = inputs_of(op, grad=True)
    leaves = leaves_of(inputs)
    pick = lambda results: [r for r, u in zip(results, itertools.cycle(used), strict=False) if u]  # noqa: E731
    found = torch.autograd.grad(loss(pick(op(*inputs, **op.usual))), leaves, allow_unused=True)
    expected = torch.autograd.grad(loss(pick(op.reference(*inputs, **op.usual))), leaves, allow_unused=True)
    for f, e in zip(found, expected, strict=True):
        zero = torch.zeros(()) if f is None and e is None else torch.zeros_like(e if f is None else f)
        same([zero if f is None else f], [zero if e is None else e], rtol=1e-4, atol=1e-4)
    outputs = op(*inputs, **op.usual)
    loss([o.detach().requires_grad_() for o in outputs]).backward()  # none of them used
    assert all(t.grad is None for t in leaves)


@differentiable
def test_expanded_and_strided_upstream_gradients(op: Op[Any]) -> None:
    inputs = inputs_of(op, grad=True)
    leaves = leaves_of(inputs)
    sums = torch.autograd.grad(sum(r.sum() for r in listed(op(*inputs, **op.usual))), leaves)
    ones = torch.autograd.grad(
        listed(op(*inputs, **op.usual)), leaves, [torch.ones_like(r) for r in listed(op(*inputs, **op.usual))]
    )
    same(sums, ones, rtol=1e-4, atol=1e-5)
    results = listed(op(*inputs, **op.usual))
    dense = [torch.randn(r.shape) for r in results]
    strided = [torch.stack([d, d], -1)[..., 0] for d in dense]
    swapped = [d if d.dim() < 2 else d.transpose(0, -1).contiguous().transpose(0, -1) for d in dense]
    expected = torch.autograd.grad(results, leaves, dense, retain_graph=True)
    for bent in (strided, swapped):
        same(torch.autograd.grad(results, leaves, bent, retain_graph=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if "residual" in op.tensors], ids=str)
def test_one_tensor_as_x_and_residual(op: Op[Any]) -> None:
    made = make_inputs(op, (3, C), torch.float32)
    if made.get("weight") is not None and made["weight"].dim() == 2:  # of a product: as wide as x
        made |= {"weight": torch.eye(C), "bias": None}

    def call(run: Any, a: Tensor, b: Tensor) -> Any:
        return run(*{**made, "x": a, "residual": b}.values(), **op.usual)

    x = torch.randn(3, C, requires_grad=True)
    found = gradients(lambda x: call(op, x, x), [x])
    same(found, gradients(lambda x: call(op.reference, x, x), [x]), rtol=1e-4, atol=1e-4)
    a, b = torch.randn(3, C, requires_grad=True), torch.randn(3, C, requires_grad=True)
    loss(call(op, a, b)).backward()
    assert a.grad is not None and b.grad is not None
    same([a.grad, b.grad], gradients(lambda a, b: call(op.reference, a, b), [a, b]), rtol=1e-4, atol=1e-4)
    a.grad.zero_()
    assert b.grad.any(), "two leaves must not share one gradient"


@differentiable
def test_gradients_of_permuted_inputs(op: Op[Any]) -> None:
    """What a definition computes from permuted inputs is permuted too; what is saved is not."""
    for dtype in (torch.float64, torch.float32):
        dense = inputs_of(op, (2, 3, 2), dtype, grad=True)
        plain = [t if t is None else t.detach() for t in dense]
        bent = [t if t is None or t.dim() < 3 else t.transpose(0, 2).contiguous().transpose(0, 2) for t in plain]
        ask(op, dict(zip(op.tensors, bent, strict=True)))
        assert all(r.is_contiguous() for r in listed(op(*bent, **op.usual)))
        same(gradients(op, bent), gradients(op, dense), rtol=1e-4, atol=1e-5)


# Graphs ---------------------------------------------------------------------------------------------------------------


@differentiable
def test_changing_a_saved_tensor_in_place_is_noticed(op: Op[Any]) -> None:
    assert op.gradient is not None
    names = [*op.tensors, *op.out]
    for taken in set(op.gradient.takes.values()) & set(names):
        inputs = inputs_of(op, grad=True)
        working = [t if t is None else t * 1 for t in inputs]
        results = listed(op(*working, **op.usual))
        victim = [*working, *results][names.index(taken)]
        if victim is None:
            continue
        with torch.no_grad():
            victim.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(results).backward()


def test_outputs_that_are_not_saved_may_change_in_place() -> None:
    x = torch.randn(3, C, requires_grad=True)
    y = tw.rms_norm(x * 1)
    y.relu_()
    loss(y).backward()
    expected = torch.autograd.grad(loss(tw.rms_norm(x).relu()), x)
    same([x.grad], expected)


@differentiable
def test_hooks_retained_graphs_and_accumulation(op: Op[Any]) -> None:
    inputs = inputs_of(op, grad=True)
    seen: list[Tensor] = []
    results = listed(op(*inputs, **op.usual))
    results[0].register_hook(lambda g: seen.append(g) or g * 2)
    handle = inputs[0].register_hook(seen.append)
    total = loss(results[0])
    total.backward(retain_graph=True)
    leaves = leaves_of(inputs)
    first = [t.grad.clone() for t in leaves if t.grad is not None]
    total.backward()
    same([t.grad for t in leaves if t.grad is not None], [2 * g for g in first], rtol=1e-4, atol=1e-5)
    assert len(seen) == 4
    handle.remove()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        results = listed(op(*inputs, **op.usual))
    same(torch.autograd.grad(loss(results), leaves_of(inputs)), gradients(op, inputs))
    assert packed


@differentiable
def test_threads_may_race_on_a_miss(op: Op[Any]) -> None:
    define = lambda *t: op.reference(*t, **op.usual)  # noqa: E731
    expected = {rows: gradients(define, inputs_of(op, (rows,), grad=True)) for rows in (2, 3, 70)}
    errors: list[BaseException] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        try:
            barrier.wait()
            for rows, grads in expected.items():
                same(gradients(op, inputs_of(op, (rows,), grad=True)), grads, rtol=1e-3, atol=1e-4)
                evidence.bump()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_missing_upstream_gradient_multiplies_nothing(backend: str) -> None:
    """Zeros in its place would make NaN of an infinity in x."""
    x, weight, dh = torch.randn(4, 96), torch.randn(96), torch.randn(4, 96)
    x[1, 5] = torch.inf
    rstd, mean = torch.rand(4) + 0.1, torch.zeros(4)
    dx, dweight = tw.rms_norm_backward(None, x, weight, rstd, dh, backend=backend)
    same([dx, dweight], [dh, torch.zeros(96)])
    dx, dweight, dbias, _ = tw.layer_norm_backward(None, x, weight, weight, mean, rstd, dh, backend=backend)
    same([dx, dweight, dbias], [dh, torch.zeros(96), torch.zeros(96)])
