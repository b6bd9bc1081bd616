"""The op that may overwrite what forward saved, its form for autograd, and their kernels. Who calls which is in
`test_spent.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from loss_calls import ROWS, C, backends, close, leaf, skip_unless_it_runs, wanted
from tilewright.core import declaration, registry
from tilewright.core.arguments import facts_of
from tilewright.core.errors import TilewrightError
from tilewright.core.kernel import Kernel
from tilewright.core.op import Gradient
from tilewright.core.plan import bind
from tilewright.verify.cases import Case, build, cases
from tilewright.verify.check import call_of, check, truth_of

OP, BACKWARD = registry.op("bce_with_logits"), registry.op("bce_with_logits_backward")
FORM = BACKWARD.in_place


# The op and its form --------------------------------------------------------------------------------------------------


def given(dy: float = 3.0, **more: Any) -> dict[str, Any]:
    x, y = leaf()
    unit = wanted(x, y)
    return {"dy": torch.as_tensor(dy), "logits": x.detach(), "targets": y, "weight": None, "pos_weight": None,
            "unit": unit, **more}  # fmt: skip


@backends
def test_the_op_multiplies_what_it_is_given_and_reads_nothing_else(backend: str | None) -> None:
    inputs = given()
    nothing = torch.full((ROWS, 2 * C), torch.nan)[:, ::2]  # in strides that no kernel of the formula takes
    inputs |= {"logits": nothing, "targets": nothing}
    assert torch.equal(tw.bce_with_logits_backward(**inputs, backend=backend), 3.0 * inputs["unit"])


@backends
def test_the_form_writes_there_and_leaves_alone_what_is_right(backend: str | None) -> None:
    for dy in (3.0, 1.0, torch.nan):
        inputs = given(dy)
        inputs["unit"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        expected = tw.bce_with_logits_backward(**inputs, backend=backend)
        found = FORM(**inputs, backend=backend)
        assert found is inputs["unit"]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_form_is_for_autograd_and_not_listed() -> None:
    assert FORM.name == "bce_with_logits_backward_" and FORM not in registry.forms()
    assert registry.find(FORM.name) is FORM and not hasattr(tw, FORM.name)
    inputs = given(unit=None)
    with pytest.raises(tw.InvalidArgument, match="bce_with_logits_backward_: unit: None, and it is overwritten"):
        FORM(**inputs)
    node = torch.ops.tilewright.bce_with_logits_backward_.default
    assert "Tensor(a5!)? unit" in str(node._schema) or "Tensor(a!)? unit" in str(node._schema)
    torch.library.opcheck(node, tuple(given().values()), {"reduction": "mean", "out_dtype": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "none", "dy": torch.ones(ROWS, C)}, "unit: given with fp32 logits and reduction 'none'"),
        ({"unit": torch.ones(ROWS, C + 1)}, r"unit: unit fp32\[6, 41\]; needs the shape and dtype of logits fp32"),
        ({"unit": torch.ones(ROWS, C).double()}, "unit: unit fp64"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.InvalidArgument, match=message):
        tw.bce_with_logits_backward(**given(**changes))
    half = {n: t.bfloat16() for n, t in given().items() if t is not None}
    with pytest.raises(tw.InvalidArgument, match="unit: given with bf16 logits and reduction 'mean'"):
        tw.bce_with_logits_backward(**half)


@backends
def test_any_strides_are_read_and_kernels_say_what_they_take(backend: str | None) -> None:
    inputs = given()
    wide = torch.full((ROWS, C + 3), torch.nan)
    inputs["unit"] = wide[:, :C].copy_(inputs["unit"])
    if backend is not None:
        with pytest.raises(
            tw.NoKernel, match=r"unit: strides \[43, 1\] are not contiguous; unit.contiguous\(\) would do"
        ):
            tw.bce_with_logits_backward(**inputs, backend=backend)
        return
    expected = 3.0 * inputs["unit"]
    assert torch.equal(tw.bce_with_logits_backward(**inputs), expected)
    assert torch.equal(FORM(**inputs), expected) and wide[:, C:].isnan().all()


def _kernels(op: Any) -> list[Kernel]:
    return [k for k in registry.kernels_of(op.name) if k.backend in ("triton", "tilelang", "tile") and not k.label]


def _with_unit() -> Iterator[Case]:
    """The cases of the backward op, each once, with what forward saves; the suite itself has few such."""
    seen = set()
    for case in cases(BACKWARD, torch.float32, size="tiny"):
        absent = tuple(n for n in case.absent if n != "unit")
        for reduction in ("mean", "sum"):
            made = dataclasses.replace(case, options={**case.options, "reduction": reduction}, absent=absent)
            dense = all(kind.startswith("offset") for kind in case.layouts.values())  # as forward saves it
            if dense and 0 not in case.lead and str(made) not in seen:
                seen.add(str(made))
                yield made


@pytest.mark.parametrize("kernel", _kernels(BACKWARD), ids=str)
def test_kernels_conform_where_they_are_given_it(kernel: Kernel, device: str) -> None:
    """By value, twice, poisoned, and in place with the same bits."""
    skip_unless_it_runs(kernel.backend, device)
    emulated = device == "cpu" and kernel.backend == "triton"
    ran = in_place = 0
    for case in _with_unit():
        inputs = build(case, BACKWARD, device)
        assert inputs["unit"] is not None
        options = {**BACKWARD.usual, **case.options}
        call = call_of(BACKWARD, inputs, options, False)
        truth = truth_of(BACKWARD, inputs, options, False)
        for config in kernel.configs_for(call)[: 1 if emulated else None]:
            outcome = check(kernel, config, BACKWARD, inputs, options, truth, saving=False, emulated=emulated,
                            in_place=True)  # fmt: skip
            assert not outcome.problems, (str(case), config, outcome.problems)
            ran, in_place = ran + 1, in_place + outcome.in_place
    assert ran > 20 and in_place > 15


@pytest.mark.parametrize("kernel", _kernels(BACKWARD), ids=str)
def test_nothing_moves_where_the_upstream_gradient_is_1(kernel: Kernel, device: str) -> None:
    """Bits that no product would leave: a kernel that writes them makes another NaN of them, on a GPU at the least."""
    skip_unless_it_runs(kernel.backend, device)
    tensors = [None if t is None else t.to(device) for t in given(1.0).values()]
    unit = tensors[5]
    assert unit is not None
    odd = torch.tensor(
        [0x7FC12345, -0x3EDCBB, 0x7F812345], dtype=torch.int32, device=device
    )  # quiet, quiet, signalling
    unit.view(torch.int32)[1, :3] = odd
    before = unit.view(torch.int32).clone()
    call = facts_of(FORM, tensors, dict(BACKWARD.options), False, False)
    found = bind(kernel, kernel.configs_for(call)[0], call)(*tensors)
    assert found == [unit] and torch.equal(unit.view(torch.int32), before)


# Backends and declarations --------------------------------------------------------------------------------------------


def test_atens_forward_is_refused_with_a_reason_where_it_would_have_to_save() -> None:
    x, y = leaf()
    with pytest.raises(tw.NoKernel, match="does not form the gradient beside the loss"):
        tw.bce_with_logits(x, y, backend="vendor")
    assert "does not form the gradient beside the loss" in str(tw.explain(tw.bce_with_logits, x, y))
    with torch.no_grad():
        assert "does not form" not in str(tw.explain(tw.bce_with_logits, x, y))


@pytest.mark.interpreted
def test_a_pin_is_refused_at_forward_where_the_gradient_cannot_be_written_in_place() -> None:
    mine = next(k for k in registry.kernels_of(BACKWARD.name) if k.backend == "triton")
    elsewhere = dataclasses.replace(mine.capability, in_place=False)
    other = dataclasses.replace(mine, capability=elsewhere, label="elsewhere")
    registry.remove_kernel(mine)
    registry.add_kernels([other])
    x, y = leaf()
    try:
        with pytest.raises(tw.NoKernel, match="in place: does not declare that it can write dlogits over unit"):
            tw.bce_with_logits(x, y, backend="triton", reduction="sum")
    finally:
        registry.remove_kernel(other)
        registry.add_kernels([mine])
    tw.bce_with_logits(x, y, backend="triton", reduction="sum").backward()
    close(x.grad, wanted(x, y, "sum"))


def test_cost_is_of_what_moves() -> None:
    x, y = leaf()
    n = x.nbytes
    saving = call_of(OP, {"logits": x, "targets": y, "weight": None, "pos_weight": None}, OP.usual, True)
    assert OP.cost(saving)[0] == 3 * n + 4
    for unit, moved in ((wanted(x, y), 2 * n + 4), (None, 3 * n + 4)):
        options = {**BACKWARD.usual, "reduction": "mean"}
        assert BACKWARD.cost(call_of(BACKWARD, given(unit=unit), options, False))[0] == moved


@pytest.mark.parametrize(
    ("spends", "words"),
    [
        ({"dlogits": "unity"}, "gradient.spends: 'unity' is none of unit"),
        ({"dlogits": "logits"}, "gradient.spends: 'logits' is none of unit"),
        ({"dx": "unit"}, "gradient.spends: 'dx' is none of dlogits"),
    ],
)
def test_a_declaration_that_does_not_agree_is_refused(spends: dict[str, str], words: str) -> None:
    assert OP.gradient is not None
    wrong = dataclasses.replace(OP.gradient, spends=spends)
    assert isinstance(wrong, Gradient)
    changed: Any = type("Changed", (), {**OP.__dict__, "gradient": wrong, "gradients": (wrong,)})()
    judge: Callable[[], None]
    for judge in (lambda: declaration.check(changed), lambda: declaration.check_gradient(changed, BACKWARD)):
        try:
            judge()
        except TilewrightError as error:
            assert words in str(error)
            return
    pytest.fail("nothing was refused")
