"""Every op as compilers see it: the node and its fakes, torch.compile and export.

Nothing here knows an op by name except where a test needs one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright as tw
from op_calls import Block, C, differentiable, every_op, few, gradients, inputs_of, listed, loss, same
from tilewright.core import node
from tilewright.core.op import Op
from tilewright.verify.cases import make_inputs

LAYOUTS = ("", "swapped", "padded 3")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The node -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saving", [False, True])
@every_op
def test_opcheck(op: Op[Any], saving: bool) -> None:
    if saving and op.gradient is None:
        pytest.skip("has no gradient, so it saves nothing")
    inputs = inputs_of(op, grad=op.gradient is not None and not saving)
    torch.library.opcheck(
        getattr(torch.ops.tilewright, op.name + "_saving" * saving).default, tuple(inputs), node.plain(op.usual)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@every_op
def test_fakes_agree_with_every_output_of_the_real_call(op: Op[Any], layout: str) -> None:
    """Of many calls each is in another dtype in each layout."""
    calls = list(itertools.product(op.probes.options, op.probes.absent))
    for number, (options, absent) in enumerate(calls, LAYOUTS.index(layout)):
        for dtype in DTYPES if len(calls) < 4 else (DTYPES[number % 3],):
            chosen = {**op.usual, **options}
            made = make_inputs(op, few(op, (2, 3, 2), C, 8), dtype, chosen, absent, layouts={"*": layout})
            for saving in (False, True) if op.gradient is not None else (False,):
                which = getattr(torch.ops.tilewright, op.name + "_saving" * saving)
                real = listed(which(*made.values(), **node.plain(chosen)))
                with FakeTensorMode() as mode:
                    faked = [None if t is None else mode.from_tensor(t) for t in made.values()]
                    fake = listed(which(*faked, **node.plain(chosen)))
                    direct = listed(op(*faked, **chosen))
                assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]
                assert [f.shape for f in direct] == [r.shape for r in real[: len(direct)]]
                inside = {t.untyped_storage().data_ptr() for t in made.values() if t is not None}
                outside = [r.untyped_storage().data_ptr() for r in real]
                assert not inside & set(outside) and len(outside) == len(set(outside)), "an output is an alias"


@every_op
def test_meta_tensors_give_meta_tensors(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    for _ in range(2):  # a plan of the one must not serve the other
        real, meta = (
            listed(op(*inputs, **op.usual)),
            listed(op(*[t if t is None else t.to("meta") for t in inputs], **op.usual)),
        )
        assert all(m.is_meta and not r.is_meta and m.shape == r.shape and m.dtype == r.dtype
                   for r, m in zip(real, meta, strict=True))  # fmt: skip


@every_op
def test_make_fx_shows_one_node(op: Op[Any]) -> None:
    inputs = inputs_of(op)
    for mode in ("fake", "symbolic", "real"):
        graph = make_fx(lambda *t: listed(op(*t, **op.usual)), tracing_mode=mode)(*inputs)
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert targets[0] == f"tilewright.{op.name}.default"
        assert all("getitem" in t for t in targets[1:])
        same(graph(*inputs), listed(op(*inputs, **op.usual)))


# torch.compile and export ---------------------------------------------------------------------------------------------


@every_op
def test_full_graph_compile_forward_and_backward(op: Op[Any], fresh: None) -> None:
    compiled = torch.compile(lambda *t: op(*t, **op.usual), backend="aot_eager", fullgraph=True)
    if op.gradient is None:
        inputs = inputs_of(op)
        same(listed(compiled(*inputs)), listed(op(*inputs, **op.usual)))
        return
    inputs = inputs_of(op, grad=True)
    same(listed(compiled(*inputs)), listed(op(*inputs, **op.usual)))
    same(gradients(compiled, inputs), gradients(op, inputs))
    plain = [t if t is None else t.detach() for t in inputs]
    same(listed(compiled(*plain)), listed(op(*plain, **op.usual)))


@differentiable
def test_dynamic_shapes_do_not_recompile_for_ever(op: Op[Any], fresh: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: op(*t, **op.usual), backend=counter, fullgraph=True)
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
    compiled = torch.compile(lambda *t: [r * 2 for r in listed(op(*t, **op.usual))], fullgraph=True)
    inputs = inputs_of(op, grad=True)
    same(gradients(compiled, inputs), gradients(lambda *t: [r * 2 for r in listed(op(*t, **op.usual))], inputs))


@pytest.mark.parametrize("strict", [False, True])
@differentiable
def test_exported_programs_run_and_differentiate(op: Op[Any], strict: bool, fresh: None) -> None:
    inputs = inputs_of(op)
    block = Block(op, inputs)
    rest = inputs[: block.place] + inputs[block.place + 1 :]
    given = tuple(rest) if rest else (torch.ones_like(inputs[0]),)
    program = torch.export.export(block, given, strict=strict)
    assert any(f"tilewright.{op.name}" in str(n.target) for n in program.graph.nodes)
    module = program.module()
    same(module(*given), block(*given))
    loss(module(*given)).backward()
    loss(block(*given)).backward()
    grads = [p.grad for p in module.parameters()]
    assert grads[0] is not None
    same(grads, [p.grad for p in block.parameters()])
