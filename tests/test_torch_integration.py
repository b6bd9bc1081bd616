"""Every op inside the rest of torch: compile, export, fakes, modes, checkpointing, autograd's corners, threads.

Nothing here knows an op by name except where a test needs one that saves its output or one with a residual.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tilewright as tw
from tilewright.core import node, registry
from tilewright.core.op import Op
from tilewright.verify.cases import make_inputs

C = 24
OPS = registry.ops()
DIFFERENTIABLE = [op for op in OPS if op.gradient is not None]
every_op = pytest.mark.parametrize("op", OPS, ids=str)
differentiable = pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)


def inputs_of(
    op: Op[Any], lead: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32, grad: bool = False
) -> list[Any]:
    made = list(make_inputs(op, lead, C, dtype).values())
    if grad:
        for t in made:
            t.requires_grad_()
    return made


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [r for r in results if r is not None]


def loss(results: Any) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    return sum((r.double() * torch.linspace(0.5, 2, r.numel(), dtype=torch.float64).reshape(r.shape)).sum()
               for r in listed(results))  # fmt: skip


def gradients(call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss(call(*inputs)), inputs))


def same(found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(list(found), list(expected), equal_nan=True, **tolerance)


def node_call(op: Op[Any], inputs: list[Any], saving: bool = False) -> Any:
    return getattr(torch.ops.tilewright, op.name + "_saving" * saving)(*inputs, **node.plain(op.options))


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The node ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saving", [False, True])
@every_op
def test_opcheck(op: Op[Any], saving: bool) -> None:
    if saving and op.gradient is None:
        pytest.skip("has no gradient, so it saves nothing")
    inputs = inputs_of(op, grad=op.gradient is not None and not saving)
    torch.library.opcheck(
        getattr(torch.ops.tilewright, op.name + "_saving" * saving).default, tuple(inputs), node.plain(op.options)
    )


@pytest.mark.parametrize("layout", ["", "swapped", "padded 3"])
@every_op
def test_fakes_agree_with_every_output_of_the_real_call(op: Op[Any], layout: str) -> None:
    for options in op.probes.options:
        for absent in op.probes.absent:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                chosen = {**op.options, **options}
                made = make_inputs(op, (2, 3, 2), C, dtype, chosen, absent, layouts={"*": layout})
                for saving in (False, True) if op.gradient is not None else (False,):
                    which = getattr(torch.ops.tilewright, op.name + "_saving" * saving)
                    real = listed(which(*made.values(), **node.plain(chosen)))
                    with FakeTensorMode() as mode:
                        faked = [None if t is None else mode.from_tensor(t) for t in made.values()]
                        fake = listed(which(*faked, **node.plain(chosen)))
                        direct = listed(op(*faked, **chosen))
                    assert [(f.shape, f.dtype, f.stride()) for f in fake] == [
                        (r.shape, r.dtype, r.stride()) for r in real
                    ]
                    assert [f.shape for f in direct] == [r.shape for r in real[: len(direct)]]
                    inside = {t.untyped_storage().data_ptr() for t in made.values() if t is not None}
                    outside = [r.untyped_storage().data_ptr() for r in real]
                    assert not inside & set(outside) and len(outside) == len(set(outside)), "an output is an alias"


@every_op
def test_meta_tensors_give_meta_tensors(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    for _ in range(2):  # a plan of the one must not serve the other
        real, meta = listed(op(*inputs)), listed(op(*[t.to("meta") for t in inputs]))
        assert all(m.is_meta and not r.is_meta and m.shape == r.shape and m.dtype == r.dtype
                   for r, m in zip(real, meta, strict=True))  # fmt: skip


@every_op
def test_make_fx_shows_one_node(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    for mode in ("fake", "symbolic", "real"):
        graph = make_fx(lambda *t: listed(op(*t)), tracing_mode=mode)(*inputs)
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert targets[0] == f"tilewright.{op.name}.default"
        assert all("getitem" in t for t in targets[1:])
        same(graph(*inputs), listed(op(*inputs)))


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
            found = op(*inputs)
        assert log.seen == [f"tilewright.{op.name}.default"]
        same(listed(found), listed(op(*inputs))), op(*inputs)


@every_op
def test_function_modes_and_default_devices_change_nothing(op: Op[Any]) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    inputs = inputs_of(op)
    expected = listed(op(*inputs))
    with Mode():
        same(listed(op(*inputs)), expected)
    assert any(op.name in str(f) for f in seen)
    for where in ("cpu", "meta"):
        with torch.device(where):
            same(listed(op(*inputs)), expected)


class Labelled(Tensor):
    """A subclass with torch's own __torch_function__."""


@every_op
def test_subclasses_and_parameters(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    expected = listed(op(*inputs))
    found = listed(op(inputs[0].as_subclass(Labelled), *inputs[1:]))
    assert all(isinstance(f, Labelled) for f in found)
    same([f.as_subclass(Tensor) for f in found], expected)
    with torch.no_grad():
        same(listed(op(*[torch.nn.Parameter(t) for t in inputs])), expected)


# torch.compile and export ------------------------------------------------------------------------------------------


@every_op
def test_full_graph_compile_forward_and_backward(op: Op[Any], fresh: None) -> None:
    compiled = torch.compile(lambda *t: op(*t), backend="aot_eager", fullgraph=True)
    if op.gradient is None:
        inputs = inputs_of(op)
        same(listed(compiled(*inputs)), listed(op(*inputs)))
        return
    inputs = inputs_of(op, grad=True)
    same(listed(compiled(*inputs)), listed(op(*inputs)))
    same(gradients(compiled, inputs), gradients(op, inputs))
    plain = [t.detach() for t in inputs]
    same(listed(compiled(*plain)), listed(op(*plain)))


@differentiable
def test_dynamic_shapes_do_not_recompile_for_ever(op: Op[Any], fresh: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: op(*t), backend=counter, fullgraph=True)
    for rows in (3, 5, 7, 11, 13, 17):
        inputs = inputs_of(op, (rows,), grad=True)
        same(gradients(compiled, inputs), gradients(op, inputs))
    assert counter.frame_count <= 2


def test_compiled_graphs_keep_pins_and_follow_the_policy_of_the_run(fresh: None) -> None:
    x = torch.randn(3, C)
    pinned = torch.compile(lambda x: tw.rms_norm(x, backend="cuda"), backend="aot_eager", fullgraph=True)
    with pytest.raises(tw.NoKernel, match=r'rms_norm\(backend="cuda"\)'):
        pinned(x)
    free = torch.compile(lambda x: tw.rms_norm(x), backend="aot_eager", fullgraph=True)
    same([free(x)], [tw.rms_norm(x)])
    with tw.use(backend="cuda", strict=True), pytest.raises(tw.NoKernel):
        free(x)
    same([free(x)], [tw.rms_norm(x)])


@pytest.mark.slow
@differentiable
def test_inductor_compiles_forward_and_backward(op: Op[Any], fresh: None) -> None:
    compiled = torch.compile(lambda *t: [r * 2 for r in listed(op(*t))], fullgraph=True)
    inputs = inputs_of(op, grad=True)
    same(gradients(compiled, inputs), gradients(lambda *t: [r * 2 for r in listed(op(*t))], inputs))


class Block(torch.nn.Module):
    def __init__(self, op: Op[Any], inputs: list[Tensor]) -> None:
        super().__init__()
        self.op = op
        self.parameter = torch.nn.Parameter(inputs[-1].detach().clone())
        self.width = len(inputs)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return listed(self.op(*tensors, self.parameter) if self.width > 1 else self.op(self.parameter * tensors[0]))


@pytest.mark.parametrize("strict", [False, True])
@differentiable
def test_exported_programs_run_and_differentiate(op: Op[Any], strict: bool, fresh: None) -> None:
    inputs = inputs_of(op)
    block = Block(op, inputs)
    given = tuple(inputs[:-1]) if len(inputs) > 1 else (torch.ones_like(inputs[0]),)
    program = torch.export.export(block, given, strict=strict)
    assert any(f"tilewright.{op.name}" in str(n.target) for n in program.graph.nodes)
    module = program.module()
    same(module(*given), block(*given))
    loss(module(*given)).backward()
    loss(block(*given)).backward()
    grads = [p.grad for p in module.parameters()]
    assert grads[0] is not None
    same(grads, [p.grad for p in block.parameters()])


# Checkpointing -----------------------------------------------------------------------------------------------------


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
        return [r.sin() for r in listed(op(*[t * 2 for t in tensors]))]

    found = torch.autograd.grad(loss(model(*inputs)), inputs)
    outputs = checkpoint(lambda *t: tuple(model(*t)), *inputs, **more)
    loss(outputs).backward()
    same([t.grad for t in inputs], found)
    if kind in ("save", "recompute"):
        assert runs[0] is False


# Modes of torch ----------------------------------------------------------------------------------------------------


@every_op
def test_no_grad_and_inference_mode(op: Op[Any]) -> None:
    outside = inputs_of(op, grad=op.gradient is not None)
    with torch.no_grad():
        expected = listed(op(*outside))
        assert not any(r.requires_grad for r in expected)
    with torch.inference_mode():
        inside = inputs_of(op)
        found, mixed = listed(op(*outside)), listed(op(*inside))
        assert all(r.is_inference() for r in (*found, *mixed))
    same(found, expected), same(mixed, expected)
    same(listed(op(*inside)), expected)
    if op.gradient is not None:
        assert all(r.requires_grad for r in listed(op(*outside)))


@pytest.mark.parametrize("backend", [None, "reference", "vendor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_op
def test_autocast_changes_nothing(op: Op[Any], dtype: torch.dtype, backend: str | None) -> None:
    """The rule: an op keeps the dtype of x and accumulates in float32, whatever autocast says."""
    inputs = inputs_of(op, dtype=dtype, grad=op.gradient is not None)
    with torch.no_grad():
        if backend and tw.explain(op, *inputs, backend=backend).chosen is None:
            pytest.skip(f"{backend} does not take this call")
        expected = listed(op(*inputs, backend=backend))
        with torch.autocast("cpu", torch.float16):
            found = listed(op(*inputs, backend=backend))
            nodes = listed(node_call(op, inputs)) if backend is None else found
    assert [f.dtype for f in found] == [e.dtype for e in expected]
    same(found, expected, rtol=0, atol=0), same(nodes, expected)
    if op.gradient is not None and backend is None:
        with torch.autocast("cpu", torch.float16):
            found = gradients(op, inputs)
        same(found, gradients(op, inputs), rtol=0, atol=0)


def test_vendor_kernels_run_without_autocast_on_any_device() -> None:
    """aten's layer_norm is on CUDA's list of ops that autocast turns to float32; a kernel must not see autocast."""
    from tilewright.core.kernel import Kernel

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
    expected = listed(op(*inputs))
    torch.use_deterministic_algorithms(True)
    try:
        same(listed(op(*inputs)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@every_op
def test_functional_transforms_are_refused(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    stacked = [torch.stack([t, t]) for t in inputs]
    with pytest.raises(tw.Unsupported, match=rf"{op.name}: torch.func"):
        torch.func.vmap(lambda *t: op(*t))(*stacked)
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda t: loss(op(t, *inputs[1:])))(inputs[0])
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.func.jvp(lambda t: listed(op(t, *inputs[1:]))[0], (inputs[0],), (torch.ones_like(inputs[0]),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(tw.Unsupported, match="forward-mode tangent"):
            op(dual, *inputs[1:])
        same(listed(op(*inputs)), listed(op(*inputs)))
    same(listed(op(*inputs)), listed(op(*inputs)))


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


# Autograd's corners ------------------------------------------------------------------------------------------------


@differentiable
def test_gradcheck_in_float64(op: Op[Any]) -> None:
    for options in op.probes.options:
        if options.get("cast_before_weight"):
            continue  # rounds in between, though not in float64
        inputs = [t.detach()[..., :5].contiguous().requires_grad_() for t in inputs_of(op, (3,), torch.float64)]
        assert torch.autograd.gradcheck(lambda *t: op(*t, **options), inputs)  # noqa: B023


@pytest.mark.parametrize("node", [False, True])
@differentiable
def test_gradients_agree_with_autograd_through_the_definition(op: Op[Any], node: bool) -> None:
    for absent in op.probes.absent:
        made = make_inputs(op, (2, 3), C, torch.float64, absent=absent)
        leaves = [t.requires_grad_() for t in made.values() if t is not None]

        def fill(call: Any, *leaves: Tensor) -> Any:
            rest = iter(leaves)
            return call(*[None if t is None else next(rest) for t in made.values()])  # noqa: B023

        call = (lambda *t: node_call(op, list(t))) if node else op
        same(gradients(lambda *t: fill(call, *t), leaves), gradients(lambda *t: fill(op.reference, *t), leaves))  # noqa: B023


@differentiable
def test_each_input_alone_may_want_a_gradient(op: Op[Any]) -> None:
    every = gradients(op, inputs_of(op, grad=True))
    for i, expected in enumerate(every):
        inputs = inputs_of(op)
        inputs[i].requires_grad_()
        loss(op(*inputs)).backward()
        same([inputs[i].grad], [expected])
        assert all(t.grad is None for j, t in enumerate(inputs) if j != i)
        loss(node_call(op, inputs)).backward()
        same([inputs[i].grad], [2 * expected])


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if len(op.out) > 1], ids=str)
def test_outputs_may_go_unused(op: Op[Any], used: tuple[bool, bool]) -> None:
    inputs = inputs_of(op, grad=True)
    pick = lambda results: [r for r, u in zip(results, used, strict=True) if u]  # noqa: E731
    found = torch.autograd.grad(loss(pick(op(*inputs))), inputs, allow_unused=True)
    expected = torch.autograd.grad(loss(pick(op.reference(*inputs))), inputs, allow_unused=True)
    for f, e in zip(found, expected, strict=True):
        zero = torch.zeros(()) if f is None and e is None else torch.zeros_like(e if f is None else f)
        same([zero if f is None else f], [zero if e is None else e], rtol=1e-4, atol=1e-4)
    outputs = op(*inputs)
    loss([o.detach().requires_grad_() for o in outputs]).backward()  # none of them used
    assert all(t.grad is None for t in inputs)


@differentiable
def test_expanded_and_strided_upstream_gradients(op: Op[Any]) -> None:
    inputs = inputs_of(op, grad=True)
    sums = torch.autograd.grad(sum(r.sum() for r in listed(op(*inputs))), inputs)
    ones = torch.autograd.grad(listed(op(*inputs)), inputs, [torch.ones_like(r) for r in listed(op(*inputs))])
    same(sums, ones, rtol=1e-4, atol=1e-5)
    results = listed(op(*inputs))
    dense = [torch.randn(r.shape) for r in results]
    strided = [torch.stack([d, d], -1)[..., 0] for d in dense]
    swapped = [d.t().contiguous().t() for d in dense]
    expected = torch.autograd.grad(results, inputs, dense, retain_graph=True)
    for bent in (strided, swapped):
        same(torch.autograd.grad(results, inputs, bent, retain_graph=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if "residual" in op.tensors], ids=str)
def test_one_tensor_as_x_and_residual(op: Op[Any]) -> None:
    x = torch.randn(3, C, requires_grad=True)
    found = gradients(lambda x: op(x, x), [x])
    same(found, gradients(lambda x: op.reference(x, x), [x]), rtol=1e-4, atol=1e-4)
    a, b = torch.randn(3, C, requires_grad=True), torch.randn(3, C, requires_grad=True)
    loss(op(a, b)).backward()
    assert a.grad is not None and b.grad is not None
    same([a.grad], [b.grad])
    a.grad.zero_()
    assert b.grad.any(), "two leaves must not share one gradient"


@differentiable
def test_changing_a_saved_tensor_in_place_is_noticed(op: Op[Any]) -> None:
    assert op.gradient is not None
    names = [*op.tensors, *op.out]
    for taken in set(op.gradient.takes.values()) & set(names):
        inputs = inputs_of(op, grad=True)
        working = [t * 1 for t in inputs]
        results = listed(op(*working))
        victim = [*working, *results][names.index(taken)]
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
    results = listed(op(*inputs))
    results[0].register_hook(lambda g: seen.append(g) or g * 2)
    handle = inputs[0].register_hook(seen.append)
    total = loss(results[0])
    total.backward(retain_graph=True)
    first = [t.grad.clone() for t in inputs if t.grad is not None]
    total.backward()
    same([t.grad for t in inputs if t.grad is not None], [2 * g for g in first], rtol=1e-4, atol=1e-5)
    assert len(seen) == 4
    handle.remove()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        results = listed(op(*inputs))
    same(torch.autograd.grad(loss(results), inputs), gradients(op, inputs))
    assert packed


@pytest.mark.parametrize("node", [False, True])
@differentiable
def test_double_backward_is_refused_by_name(op: Op[Any], node: bool) -> None:
    inputs = inputs_of(op, grad=True)
    assert op.gradient is not None
    with pytest.raises(tw.NoGradient, match=f"{op.gradient.op} has no gradient: double backward"):
        found = torch.autograd.grad(loss(node_call(op, inputs) if node else op(*inputs)), inputs, create_graph=True)
        sum(g.square().sum() for g in found).backward()
    same(gradients(op, inputs), gradients(op, inputs))


def test_batched_gradients_are_refused() -> None:
    x = torch.randn(3, C, requires_grad=True)
    with pytest.raises(tw.Unsupported, match=r"torch\.func"):
        torch.autograd.grad(tw.rms_norm(x), x, torch.ones(2, 3, C), is_grads_batched=True)


@differentiable
def test_gradients_of_permuted_inputs(op: Op[Any]) -> None:
    """What a definition computes from permuted inputs is permuted too; what is saved is not."""
    for dtype in (torch.float64, torch.float32):
        dense = inputs_of(op, (2, 3, 2), dtype, grad=True)
        plain = [t.detach() for t in dense]
        bent = [t.transpose(0, 2).contiguous().transpose(0, 2) if t.dim() > 1 else t for t in plain]
        for t in bent:
            t.requires_grad_()
        assert all(r.is_contiguous() for r in listed(op(*bent)))
        same(gradients(op, bent), gradients(op, dense), rtol=1e-4, atol=1e-5)


# Threads and copies ------------------------------------------------------------------------------------------------


@differentiable
def test_threads_may_race_on_a_miss(op: Op[Any]) -> None:
    expected = {rows: gradients(op.reference, inputs_of(op, (rows,), grad=True)) for rows in (2, 3, 70)}
    from tilewright.core import evidence

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


def test_modules_that_hold_an_op_can_be_copied_and_scripted_by_trace() -> None:
    block = Block(registry.op("rms_norm"), [torch.randn(3, C), torch.ones(C)])
    twin = copy.deepcopy(block)
    assert twin.op is block.op
    x = torch.randn(3, C)
    same(twin(x), block(x))
    traced = torch.jit.trace(lambda x: tw.rms_norm(x), (x,))
    same([traced(x[:2])], [tw.rms_norm(x[:2])])
