"""Random shapes, strides, dtypes, options and absences of every op, by value against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.core import registry
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.op import Op
from tilewright.verify.cases import Case, build
from tilewright.verify.check import call_of, check, truth_of
from tilewright.verify.numerics import bits

OPS = registry.ops()
LAYOUTS = ["", "padded 1", "padded 8", "columns", "expanded", "heads", "swapped", "broadcast rows",
           *[f"offset {n}" for n in range(1, 16)]]  # fmt: skip
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 129, 229, 255, 257, 769]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op = draw(st.sampled_from(OPS))
    rows = [n for n in op.tensors if op.probes.is_rows(n)]
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    parameters = list(op.probes.either)
    return Case(
        "random",
        op.name,
        tuple(draw(st.lists(st.integers(1, 5), max_size=3))),
        draw(WIDTHS),
        dtype,
        dict(draw(st.sampled_from(list(op.probes.options)))),
        draw(st.sampled_from(list(op.probes.absent))),
        dict.fromkeys(sorted(draw(st.sets(st.sampled_from(parameters)))) if parameters else (), torch.float32),
        draw(st.dictionaries(st.sampled_from(rows or [""]), st.sampled_from(LAYOUTS), max_size=len(rows))),
        draw(st.sampled_from(["normal", "wild", "large", "offset"])),
        draw(st.integers(0, 1000)),
    )


def run(case: Case, kernel: Kernel, emulated: bool, device: str, config: int = 0) -> None:
    op = registry.op(case.op)
    inputs, options = build(case, op, device), {**op.usual, **case.options}
    saving = op.gradient is not None
    call = call_of(op, inputs, options, saving)
    if kernel.capability.reasons(call, emulated=emulated):
        reject()
    configs = kernel.configs_for(call) if kernel.backend != "reference" else (Config(),)
    assert configs, "a kernel that takes a call has a config for it"
    truth = truth_of(op, inputs, options, saving)
    chosen = configs[config % len(configs)]
    outcome = check(kernel, chosen, op, inputs, options, truth, saving=saving, emulated=emulated)
    assert not outcome.problems, (chosen, outcome.problems)


@pytest.mark.parametrize("backend", ["reference", "vendor", "triton"])
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_random_calls_are_right(backend: str, data: st.DataObject, device: str) -> None:
    case = data.draw(cases())
    found = [k for k in registry.kernels_of(case.op) if k.backend == backend]
    assume(found)
    emulated = backend == "triton" and device == "cpu"
    run(case, found[0], emulated, device, data.draw(st.integers(0, 7)))


@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm"])
def test_wide_rows_in_two_levels(op: str, config: int, device: str) -> None:
    """The kernel that walks a row takes them too, with a residual and without one, whose levels are then no numbers."""
    kernel = next(k for k in registry.kernels_of(op) if k.backend == "triton")
    case = Case("two levels", op, (2, 2), 33000, torch.float32, layouts={"*": "heads"})
    run(case, kernel, device == "cpu", device, config)


@pytest.mark.parametrize("columns", [160, 1024, 40000])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_whose_squares_overflow_make_zeros_as_in_the_definition(columns: int, device: str) -> None:
    x = torch.randn(2, columns, device=device) * 1e30
    with tw.use(check="never"):
        y = tw.layer_norm(x, backend="triton")
    assert torch.equal(y, tw.layer_norm(x, backend="reference")) and not y.any()


@given(case=cases())
@settings(max_examples=25)
def test_the_output_rule_holds_for_every_call(case: Case) -> None:
    """Whatever kernel is chosen: shape, dtype, strides, and gradients for what asked for one."""
    op: Op[Any] = registry.op(case.op)
    inputs, options = build(case, op), {**op.usual, **case.options}
    gives = op.gradient.gives if op.gradient is not None else {}
    for name, t in inputs.items():
        if t is not None and name in gives:
            t.requires_grad_()
    results = op(*inputs.values(), **options, backend="reference")
    results = [results] if op.single else list(results)
    for spec, result in zip(op.out_specs(inputs, options, False).values(), results, strict=True):
        if spec is None:
            assert result is None
            continue
        assert (tuple(result.shape), result.dtype) == spec and result.is_contiguous()
    if op.gradient is not None:
        sum(r.float().sum() for r in results).backward()
        for name, t in inputs.items():
            assert (
                t is None
                or name not in gives
                or (t.grad is not None and t.grad.shape == t.shape and t.grad.dtype == t.dtype)
            )


def test_one_element_has_bits_whatever_its_stride_is() -> None:
    assert torch.equal(bits(torch.ones(4)[::2][:1]), bits(torch.ones(1)))
