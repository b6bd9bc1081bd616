"""In-place forms as autograd and the compilers see them: versions, nodes, fakes, compiled and exported graphs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright as tw
from form_calls import C, every_form, made, run, target, ways
from op_calls import listed, same
from tilewright.core import node, registry

# Autograd's bookkeeping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("node_", [False, True])
@every_form
def test_the_version_counts_one_change(form: Any, node_: bool, backend: str | None) -> None:
    inputs = made(form)
    before = {n: t._version for n, t in inputs.items() if t is not None}
    if node_:
        node.call(form, list(inputs.values()), form.usual, backend)
    else:
        run(form, inputs, backend=backend)
    name = target(form, inputs)
    for n, version in before.items():
        assert (inputs[n]._version > version) is (n == name)


@pytest.mark.interpreted
def test_what_autograd_has_saved_is_known_to_be_stale() -> None:
    leaf = torch.randn(5, C, requires_grad=True)
    hidden = torch.exp(leaf)
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        tw.silu_(hidden, backend="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_and_its_tensors() -> None:
    x = torch.randn(5, C)
    with torch.inference_mode():
        y = torch.randn(5, C)
        for call in (tw.silu_, torch.ops.tilewright.silu_):
            call(x)
            call(y)
    with pytest.raises(tw.InvalidArgument, match="silu_: x: made in inference mode"):
        tw.silu_(y)


def test_autocast_changes_nothing() -> None:
    x = torch.randn(5, C)
    wanted = tw.silu(x)
    with torch.autocast("cpu"):
        assert tw.silu_(x) is x and x.dtype == torch.float32 and torch.equal(x, wanted)


# The node and the compilers -------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def overloads(form: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every overload, with inputs that it takes."""
    seen = set()
    for _, absent in ways(form):
        inputs = made(form, absent=absent)
        name, _, overload = node._place(form, form.targets(inputs)).partition(".")
        if overload not in seen:
            seen.add(overload)
            yield getattr(getattr(torch.ops.tilewright, name), overload or "default"), inputs


@every_form
def test_opcheck(form: Any) -> None:
    found = list(overloads(form))
    assert len(found) == len(getattr(torch.ops.tilewright, form.name).overloads())
    for overload, inputs in found:
        assert overload._schema.is_mutable
        torch.library.opcheck(overload, tuple(inputs.values()), node.plain(form.usual))


def test_an_overload_refuses_what_is_not_its_own() -> None:
    x = torch.randn(3, C)
    with pytest.raises(tw.InvalidArgument, match=r"scale_bias_add_\.x, does not overwrite"):
        torch.ops.tilewright.scale_bias_add_.x(x, None, None, x.clone())


@every_form
def test_fakes_return_the_tensor_itself(form: Any) -> None:
    inputs = made(form)
    with FakeTensorMode() as mode:
        faked = {n: None if t is None else mode.from_tensor(t) for n, t in inputs.items()}
        found = listed(run(form, faked))
    assert [f.shape for f in found] == [(5, C)] * len(found)
    assert any(f is faked[target(form, inputs)] for f in found)


@every_form
def test_make_fx_shows_one_node(form: Any) -> None:
    inputs = made(form)
    for mode in ("fake", "symbolic", "real"):
        graph = make_fx(lambda *t: listed(form(*t, **form.usual)), tracing_mode=mode)(*[
            None if t is None else t.clone() for t in inputs.values()
        ])  # fmt: skip
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        name, _, overload = node._place(form, form.targets(inputs)).partition(".")
        assert [t for t in targets if "getitem" not in t] == [f"tilewright.{name}.{overload or 'default'}"]


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@every_form
def test_compiled_graphs_overwrite_too(form: Any, compiler: str, fresh: None) -> None:
    """Before and after are used as well: what functionalisation must keep apart."""

    def step(*tensors: Any) -> list[Tensor]:
        inputs = dict(zip(form.tensors, tensors, strict=True))
        place = inputs[target(form, inputs)]
        earlier = place * 2
        found = listed(form(*tensors, **form.usual))
        return [earlier, place + 1, *[f * 3 for f in found], place]

    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    for rows in (5, 7, 9):
        eager, inputs = made(form, lead=(rows,)), made(form, lead=(rows,))
        wanted, found = step(*eager.values()), compiled(*inputs.values())
        same(found, wanted)
        name = target(form, inputs)
        same([inputs[name]], [eager[name]])
        assert found[-1].data_ptr() == inputs[name].data_ptr()


def test_a_compiled_graph_keeps_a_pin(fresh: None) -> None:
    compiled = torch.compile(lambda x: tw.silu_(x, backend="cuda"), backend="aot_eager", fullgraph=True)
    with pytest.raises(tw.NoKernel, match=r'silu_\(backend="cuda"\)'):
        compiled(torch.randn(3, C))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_overwrite(strict: bool, fresh: None) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            y, h = tw.add_rms_norm_(x, residual)
            return y + h

    x, residual = torch.randn(3, C), torch.randn(3, C)
    module = torch.export.export(Block(), (x, residual.clone()), strict=strict).module()
    one, two = residual.clone(), residual.clone()
    same([module(x, one)], [Block()(x, two)])
    same([one], [two])


def test_transforms_have_no_rule() -> None:
    with pytest.raises(tw.Unsupported, match=r"silu_: torch\.func"):
        torch.func.vmap(tw.silu_)(torch.randn(3, 2, C))


def test_meta_tensors() -> None:
    x = torch.empty(3, C, device="meta")
    assert tw.silu_(x) is x


@every_form
def test_forms_are_ops_to_look_at(form: Any) -> None:
    assert pickle.loads(pickle.dumps(form)) is form
    assert repr(form) == f"<op {form.name}>" and form.gradient is None
    assert form.__doc__.startswith(f"`{form.functional.name}` in place: ")
    assert registry.find(form.name) is form
