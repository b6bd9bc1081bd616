"""In-place forms: the op's values, bit for bit, in the caller's own tensor; what cannot hold them is refused.

That every kernel gives these bits is the conformance suite's to show. Here are the forms themselves: values, errors,
memory, autograd's bookkeeping and the compilers.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import planted
import tilewright as tw
from op_calls import listed, same
from tilewright.core import in_place, node, registry
from tilewright.core.arguments import facts_of
from tilewright.core.call import TensorFacts
from tilewright.core.device import target_device
from tilewright.core.errors import TilewrightError
from tilewright.core.in_place import InPlace
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, stages_of
from tilewright.core.op import Op
from tilewright.tune.classes import call_of as tuned_call
from tilewright.verify.cases import Case, build, make_inputs
from tilewright.verify.check import check, truth_of
from tilewright.verify.suite import verify_kernel

C = 24
FORMS = registry.forms()
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)


def ways(form: Any) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    return [
        ({**form.usual, **options}, absent)
        for options, absent in itertools.product(form.probes.options, form.probes.absent)
    ]


def made(form: Any, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (5,), **how: Any) -> dict[str, Any]:
    return make_inputs(form, (*lead, C), dtype, **how)


def run(form: Any, inputs: dict[str, Any], options: dict[str, Any] | None = None, **how: Any) -> Any:
    return form(*inputs.values(), **(form.usual if options is None else options), **how)


def check_against_the_op(form: InPlace[Any], inputs: dict[str, Any], options: dict[str, Any], **how: Any) -> None:
    """Call both; results are equal in their bits and lie where they should, and nothing else has changed."""
    wanted = listed(run(form.functional, inputs, options, **how))
    before = {n: None if t is None else t.clone() for n, t in inputs.items()}
    into = form.targets(inputs)
    found = listed(run(form, inputs, options, **how))
    for output, got, want in zip(form.out, found, wanted, strict=True):
        assert torch.equal(got, want), output
        assert (got is inputs[into[output]]) if output in into else not shares(got, inputs)
    for name, tensor in inputs.items():
        assert tensor is None or name in into.values() or torch.equal(tensor, before[name]), name


def shares(tensor: Tensor, inputs: dict[str, Any]) -> bool:
    places = {t.untyped_storage().data_ptr() for t in inputs.values() if t is not None}
    return tensor.untyped_storage().data_ptr() in places


# Values ---------------------------------------------------------------------------------------------------------------


def test_there_are_forms() -> None:
    names = {form.name for form in FORMS}
    assert {"gelu_", "silu_", "bias_act_", "scale_bias_add_", "gated_residual_"} <= names
    assert {"rms_norm_", "add_rms_norm_", "add_layer_norm_"} <= names
    for form in FORMS:
        assert form is form.functional.in_place is getattr(tw, form.name) is form.in_place
        assert form.name in tw.__all__ and form not in registry.ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_form
def test_values_are_those_of_the_op(form: Any, dtype: torch.dtype) -> None:
    for options, absent in ways(form):
        for _ in range(2):  # the second is a hit of the plan
            check_against_the_op(form, made(form, dtype, absent=absent), options)


@every_form
def test_kernels_write_where_the_input_is(form: Any) -> None:
    for options, absent in ways(form)[:3]:
        check_against_the_op(form, made(form, torch.bfloat16, absent=absent), options, backend="triton")


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("layout", ["padded 3", "padded 8", "offset 1", "heads", "swapped", "columns"])
@every_form
def test_any_strides_are_written_rightly(form: Any, layout: str, backend: str | None) -> None:
    name = target(form, made(form))
    inputs = made(form, lead=(2, 3, 2), layouts={name: layout})
    try:
        run(form.functional, inputs, backend=backend)
    except tw.NoKernel:  # what the kernel refuses of the op it refuses of the form
        with pytest.raises(tw.NoKernel, match=rf'{form.name}\(backend="triton"\)(.|\n)*{name}: .*contiguous'):
            run(form, inputs, backend=backend)
        return
    nothing = between(inputs[name])
    check_against_the_op(form, inputs, form.usual, backend=backend)
    assert between(inputs[name]) == nothing, "memory between the rows was written"


def between(tensor: Tensor) -> int:
    """How many NaN its memory holds: in itself there are none."""
    whole = tensor.untyped_storage().nbytes() // tensor.itemsize
    return int(tensor.as_strided((whole,), (1,), 0).isnan().sum())


@every_form
def test_empty_calls(form: Any) -> None:
    inputs = made(form, lead=(0,))
    found = listed(run(form, inputs))
    assert all(f.shape == (0, C) for f in found)


def test_a_choice_goes_by_what_is_given() -> None:
    x, bias, residual = torch.randn(3, C), torch.randn(C), torch.randn(3, C)
    kept = x.clone()
    assert tw.scale_bias_add_(x, None, bias, residual) is residual and torch.equal(x, kept)
    assert tw.scale_bias_add_(x, None, bias) is x and torch.equal(x, kept + bias)


# What is refused ------------------------------------------------------------------------------------------------------


def target(form: Any, inputs: dict[str, Any]) -> str:
    (name,) = form.targets(inputs).values()
    return str(name)


@every_form
def test_an_expanded_tensor_is_refused(form: Any) -> None:
    inputs = made(form)
    name = target(form, inputs)
    for wrong in (inputs[name][:1].expand(5, C), torch.randn(100).as_strided((5, C), (4, 1))):
        with pytest.raises(tw.InvalidArgument, match=f"^{form.name}: {name}: strides .* in one place"):
            run(form, {**inputs, name: wrong})


@every_form
def test_shared_memory_is_refused_on_every_call(form: Any) -> None:
    inputs = made(form)
    name = target(form, inputs)
    others = [n for n in inputs if n != name and inputs[n] is not None and inputs[n].shape == (5, C)]
    if not others:
        pytest.skip("has no other input of rows")
    run(form, inputs)  # a plan hit must look too
    both = torch.randn(2, 5, C)
    for wrong in (both[0], both.flatten()[1 : 1 + 5 * C].view(5, C)):
        with pytest.raises(tw.InvalidArgument, match=f"^{form.name}: {name}: shares memory with {others[0]}"):
            run(form, {**inputs, name: both[0], others[0]: wrong})
    run(form, {**inputs, name: both[0], others[0]: both[1]})
    halves = torch.randn(5, 2 * C)  # extents that interleave, rows that do not
    run(form, {**inputs, name: halves[:, :C], others[0]: halves[:, C:]})
    with pytest.raises(tw.InvalidArgument, match="shares memory"):
        run(form, {**inputs, name: halves[:, :C], others[0]: halves[:, C - 1 : -1]})


def test_whether_memory_is_shared_is_known_exactly() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(4000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        stride = tuple(rng.randint(0, 14) for _ in shape)
        facts = TensorFacts("x", shape, stride, torch.float32)
        offsets = [sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, shape))]
        if len(set(offsets)) < len(offsets):
            assert in_place.overlaps_itself(facts), facts
            continue
        if in_place.overlaps_itself(facts):
            continue  # strides that interleave: refused without need
        step = rng.randint(-40, 40)
        shared = bool(set(offsets) & {o + step for o in offsets})
        assert in_place.meet(facts, facts, 4 * step) == shared, (facts, step)
        seen.add(shared)
    assert seen == {True, False}


@every_form
def test_an_input_that_requires_grad_is_refused_by_name(form: Any) -> None:
    inputs = made(form)
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        asking = {**inputs, name: tensor.clone().requires_grad_()}
        words = f"{form.name} has no gradient: use {form.functional.name}, or"
        for call in (run, lambda f, i: node.call(f, list(i.values()), f.usual, None)):
            with pytest.raises(tw.NoGradient, match=f"^{words}"):
                call(form, asking)
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=words):
            torch.compile(lambda *t: form(*t, **form.usual), backend="eager")(*asking.values())
        with pytest.raises(tw.NoGradient, match=form.name):
            tw.explain(form, *asking.values(), **form.usual)
        with torch.no_grad():
            run(form, asking)  # as torch's own in-place functions


@every_form
def test_the_contract_speaks_in_the_forms_name(form: Any) -> None:
    inputs = made(form)
    with pytest.raises(tw.InvalidArgument, match=f"^{form.name}: .*: dtype int32"):
        run(form, {n: None if t is None else t.int() for n, t in inputs.items()})
    with pytest.raises(tw.UnknownName, match="backend"):
        run(form, inputs, backend="nothing")
    with pytest.raises(TypeError, match=form.name):
        form()


def test_a_lazily_negated_tensor_is_refused() -> None:
    x = torch.randn(3, C, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    for call in (tw.silu_, torch.ops.tilewright.silu_):
        with pytest.raises(tw.InvalidArgument, match="silu_: x: a lazily negated view"):
            call(x)
    wanted = tw.bias_act(torch.ones(3, C), x, act="relu")
    for call in (tw.bias_act_, torch.ops.tilewright.bias_act_):  # read, it is as good as any
        y = torch.ones(3, C)
        call(y, x, act="relu")
        same([y], [wanted])


def test_an_output_of_another_form_than_its_place_is_refused() -> None:
    form = tw.add_rms_norm_
    assert isinstance(form, InPlace)
    swapped = InPlace(form.functional, {"h": ("weight",)})
    x = torch.randn(3, C)
    with pytest.raises(tw.InvalidArgument, match=r"weight: weight fp32\[24\], to be overwritten by h fp32\[3, 24\]"):
        facts_of(swapped, [x, x.clone(), torch.ones(C)], dict(form.usual), False, False)


@pytest.mark.parametrize(
    ("name", "into", "words"),
    [
        ("l2_norm", {}, "it names no output"),
        ("l2_norm", {"z": "x"}, "'z' is none of y"),
        ("l2_norm", {"y": ()}, "y has no place"),
        ("l2_norm", {"y": "z"}, "'z' is none of x"),
        ("layer_norm", {"y": "weight"}, "weight may be absent"),
        ("swiglu", {"y": ("up", "up")}, "up is named twice"),
        ("rms_norm_backward", {"dx": "x"}, "some calls of it have no outputs"),
    ],
)
def test_a_declaration_that_does_not_agree_is_refused(name: str, into: dict[str, Any], words: str) -> None:
    op = registry.op(name)
    with pytest.raises(TilewrightError, match=words):
        in_place.in_place(op, **into)
    assert not op.into
    with pytest.raises(tw.UnknownName, match="in-place form of"):
        _ = op.in_place


def test_a_form_is_declared_once() -> None:
    op = registry.op("silu")
    with pytest.raises(TilewrightError, match="'silu_' is declared twice"):
        in_place.in_place(op, y=("x",))
    taken = Op("silu_", op.family, op.reference, op.out, op.check, op.cost, op.error_scale, op.probes)
    with pytest.raises(TilewrightError, match="'silu_' is declared twice"):
        registry.check_op(taken)
    assert op.in_place is tw.silu_ and tw.silu_(torch.zeros(2)).shape == (2,)


# Kernels: who may write in place --------------------------------------------------------------------------------------


@contextmanager
def registered(kernel: Kernel) -> Iterator[None]:
    registry.add_kernels([kernel])
    try:
        yield
    finally:
        registry.remove_kernel(kernel)


def test_a_kernel_that_does_not_declare_it_is_refused_with_a_reason(device: str) -> None:
    x = torch.randn(5, C, device=device)
    with registered(planted.triton_kernel("none")):
        text = str(tw.explain(tw.rms_norm_, x))
        assert "rms_norm_   x fp32[5, 24]" in text and "eager, no gradient" in text
        assert "in place: does not declare that it can write y over x; rms_norm would do" in text
        assert "in place" not in str(tw.explain(tw.rms_norm, x))
    strided = torch.randn(5, 2 * C, device=device)[:, :C]
    assert "note: x is not contiguous" in str(tw.explain("rms_norm_", strided))


def test_a_kernel_that_reads_what_it_wrote_is_caught(device: str) -> None:
    op, where = registry.op("rms_norm"), torch.device(device)
    kernel = planted.in_place_kernel("reads what it wrote")
    result = verify_kernel(op, kernel, torch.float16, where, size="tiny", stop_at_failure=True)
    assert "in place: y differs in its bits from what rms_norm gives" in result.failures[0]["problem"]
    case = Case("pool", op.name, (4,), 96, torch.float16, op.usual)
    inputs = build(case, op, where)
    truth = truth_of(op, inputs, op.usual, False)
    emulated = device == "cpu"
    for made, red in (
        (kernel, True),
        (planted.triton_kernel("reads what it wrote"), False),
        (planted.in_place_kernel("none"), False),
    ):
        outcome = check(made, Config(), op, inputs, op.usual, truth, saving=False, emulated=emulated, in_place=True)
        assert bool(outcome.problems) is red and outcome.in_place is made.capability.in_place


@pytest.mark.parametrize("shape", [(8, 229), (256, 4096), (2048, 16384), (64, 65536)])
@every_form
def test_the_same_launches_serve_both(form: Any, shape: tuple[int, ...]) -> None:
    """Of every language, those that do not run here too: what tells them apart is where the output lies."""
    op, device, found = form.functional, target_device("sm_90"), []
    absent = op.probes.absent[0]
    plain, over = (tuned_call(o, shape, torch.bfloat16, device, absent=absent) for o in (op, form))
    assert over.aliased and over.form == form.name
    for kernel in registry.kernels_of(op.name):
        if not registry.backend(kernel.backend).launches or kernel.capability.reasons(plain):
            continue
        reasons = kernel.capability.reasons(over)
        if reasons:
            assert [r.argument for r in reasons] == ["in place"]
            continue
        for config in kernel.configs_for(plain):
            pairs = zip(*(stages_of(kernel.load()(call, config)) for call in (plain, over)), strict=True)
            for one, two in pairs:
                assert (one.function, one.grid, one.args) == (two.function, two.grid, two.args)
                assert (one.constants, one.options) == (two.constants, two.options)
        assert kernel.configs_for(plain) == kernel.configs_for(over)
        found.append(kernel.backend)
    assert "triton" in found


def test_a_limit_may_refuse_the_form_alone() -> None:
    (kernel,) = [k for k in registry.kernels_of("add_rms_norm") if k.backend == "tilelang"]
    for columns, words in ((32768, []), (65536, ["in place: rows above 32768 columns are read back"])):
        calls = [tuned_call(o, (64, columns), torch.bfloat16, target_device("sm_90"), absent=("weight",))
                 for o in (tw.add_rms_norm, tw.add_rms_norm_)]  # fmt: skip
        plain, over = ([str(r).partition(";")[0] for r in kernel.capability.reasons(call)] for call in calls)
        assert not plain and over == words


def test_first_use_proves_the_form_apart(device: str) -> None:
    """Evidence for the op is none for the form: the kernel is quarantined there alone."""
    x = torch.randn(5, C, device=device)
    kernel = planted.in_place_kernel("reads what it wrote")
    kernel = Kernel(**{**kernel.__dict__, "preference": -1})
    with registered(kernel), tw.use(backend="triton"):
        wanted = tw.rms_norm(x)
        chosen = tw.explain(tw.rms_norm, x).chosen
        assert chosen is not None and chosen.kernel is kernel and chosen.verdict is not None
        found = tw.rms_norm_(x)
        assert found is x
        same([found], [wanted])
        served = tw.explain(tw.rms_norm_, x)
        assert served.chosen is not None and served.chosen.kernel is not kernel
        assert "quarantine: " in str(served) and "in place: y differs in its bits" in str(served)
        assert tw.explain(tw.rms_norm, x).chosen is not None and tw.rms_norm(x) is not x


def test_preferences_pins_and_checks_hold_for_forms() -> None:
    x = torch.randn(5, C)
    with tw.use(backend="triton", ops=["silu_"], strict=True):
        assert tw.explain(tw.silu_, x).chosen.backend == tw.explain(tw.silu, x).chosen.backend == "triton"
        assert tw.explain(tw.gelu_, x).chosen.backend == "reference"
        check_against_the_op(tw.silu_, {"x": x.clone()}, {})
    with tw.use(check="always"):
        check_against_the_op(tw.silu_, {"x": x.clone()}, {}, backend="triton")
    with pytest.raises(tw.NoKernel, match=r'silu_\(backend="cuda"\)'):
        tw.silu_(x, backend="cuda")


# Autograd's bookkeeping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "triton"])
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


@pytest.mark.gpu
@every_form
def test_a_warm_call_is_captured_and_takes_no_memory(form: Any) -> None:
    inputs = make_inputs(form, (64, 2048), torch.bfloat16, device="cuda")
    name = target(form, inputs)
    first = inputs[name].clone()
    wanted = listed(run(form.functional, inputs, backend="triton"))
    run(form, inputs, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = listed(run(form, inputs, backend="triton"))
    for _ in range(2):
        inputs[name].copy_(first)
        graph.replay()
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
    held = torch.cuda.memory_allocated()
    fresh_outputs = len(form.out) - len(form.into)
    kept = run(form, inputs, backend="triton")
    grown = torch.cuda.memory_allocated() - held
    assert grown <= fresh_outputs * first.nbytes, kept


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 7, 96, 229, 1000, 4096, 8192, 16384, 24576, 65536])
@every_form
def test_races_would_show(form: Any, columns: int) -> None:
    """Many rows, many times: an element read after another thread wrote it differs sooner or later."""
    rows = max(8, min(4096, (1 << 25) // columns))
    inputs = make_inputs(form, (rows, columns), torch.bfloat16, device="cuda")
    name = target(form, inputs)
    first = inputs[name].clone()
    ran = []
    for backend in ("triton", "tilelang", "cuda"):
        try:
            with tw.use(check="never"):
                wanted = listed(run(form.functional, inputs, backend=backend))
        except tw.NoKernel:
            continue
        for _ in range(20):
            inputs[name].copy_(first)
            with tw.use(check="never"):
                found = listed(run(form, inputs, backend=backend))
            assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True)), backend
        inputs[name].copy_(first)
        ran.append(backend)
    assert "triton" in ran
