"""In-place forms: the op's values, bit for bit, in the caller's own tensor; what cannot hold them is refused.

What kernels do is in `test_in_place_kernels.py`, what autograd and the compilers see in `test_in_place_graphs.py`.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from form_calls import FORMS, C, check_against_the_op, every_form, made, run, target, ways
from op_calls import listed, same
from tilewright.core import in_place, node, registry
from tilewright.core.arguments import facts_of
from tilewright.core.call import TensorFacts
from tilewright.core.errors import TilewrightError
from tilewright.core.in_place import InPlace
from tilewright.core.op import Op

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


@pytest.mark.interpreted
@every_form
def test_kernels_write_where_the_input_is(form: Any) -> None:
    for options, absent in ways(form)[:3]:
        check_against_the_op(form, made(form, torch.bfloat16, absent=absent), options, backend="triton")


@pytest.mark.parametrize("backend", [None, pytest.param("triton", marks=pytest.mark.interpreted)])
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
        with pytest.raises(
            tw.InvalidArgument, match=f"^{form.name}: {name}: (shares|may share) memory with {others[0]}"
        ):
            run(form, {**inputs, name: both[0], others[0]: wrong})
    run(form, {**inputs, name: both[0], others[0]: both[1]})
    halves = torch.randn(5, 2 * C)  # extents that interleave, rows that do not
    run(form, {**inputs, name: halves[:, :C], others[0]: halves[:, C:]})
    with pytest.raises(tw.InvalidArgument, match=r"shares? memory"):
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
