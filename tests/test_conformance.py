"""The conformance suite over every (op, kernel, dtype) of the registry that runs on this machine.

`make test` takes what is quick: aten, Triton's interpreter, inductor for one op; the rest of inductor, which compiles
each op for seconds, and of the interpreted gradients and products of every row by every row runs by `make test-all`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tilewright.core import registry
from tilewright.core.classes import layout_class
from tilewright.core.device import device_of
from tilewright.core.kernel import Kernel
from tilewright.core.op import Op
from tilewright.tune.sample import inputs_of
from tilewright.verify.cases import DTYPES, build, cases
from tilewright.verify.check import call_of
from tilewright.verify.first_use import probes
from tilewright.verify.suite import verify_kernel

QUICK = {
    ("triton", "layer_norm", torch.float16),
    ("inductor", "l2_norm", torch.float32),
    ("tile", "rms_norm", torch.float32),
    ("tile", "gelu", torch.float16),
    ("tile", "layer_norm_backward", torch.bfloat16),
    ("tile", "geglu_backward", torch.float32),
    ("triton", "rms_norm_backward", torch.bfloat16),
    ("triton", "layer_norm_backward", torch.float16),
    ("triton", "l2_norm_backward", torch.float32),
}
KERNELS = [k for op in registry.ops() for k in registry.kernels_of(op.name) if k.backend != "reference"]


def _marks(kernel: Kernel, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    op = registry.op(kernel.op)
    heavy = op.gradient is None or dtype == torch.float16 or op.probes.small is not None
    # a tile kernel is compiled for each form of a call; its dtypes differ in a load and a store
    compiled = kernel.backend == "tile" and (dtype != torch.bfloat16 or op.gradient is None)
    costly = (kernel.backend == "inductor" or compiled or (kernel.backend == "triton" and heavy)) and (
        kernel.backend,
        kernel.op,
        dtype,
    ) not in QUICK
    # inductor compiles each form of a call, of which some ops have dozens
    return [pytest.mark.slow, pytest.mark.timeout(1800)] if costly else []


PAIRS = [
    pytest.param(k, dtype, id=f"{k.name}-{str(dtype).removeprefix('torch.')}", marks=_marks(k, dtype))
    for k in KERNELS
    for dtype in DTYPES
]


@pytest.mark.parametrize(("kernel", "dtype"), PAIRS)
def test_kernel_conforms(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    op, backend = registry.op(kernel.op), registry.backend(kernel.backend)
    where = torch.device(device)
    facts = device_of(where.type)
    size = "tiny" if device == "cpu" else "full"
    result = verify_kernel(op, kernel, dtype, where, size=size)
    assert not result.failed, result.failures
    assert result.passed + result.failed + len(result.not_run) >= result.cases > 20
    reasons = {entry["reason"] for entry in result.not_run}
    assert all(reasons), "a case that did not run says why"
    serves = not kernel.capability.devices or any(t.accepts(facts) for t in kernel.capability.devices)
    if backend.missing() is not None:
        assert result.passed == 0 and reasons == {str(backend.missing())}
        pytest.skip(f"{kernel.backend}: {backend.missing()}")
    if not serves and not backend.emulates(facts):
        assert result.passed == 0 and all("device: " in r or "nothing to compute" in r for r in reasons)
        pytest.skip(f"{kernel.backend} does not run on {facts}")
    unexpected = {r for r in reasons if "out of memory" not in r and "nothing to compute" not in r}
    if kernel.backend in ("triton", "inductor", "tilelang"):
        # the library's own kernels take everything but more strides than two, and columns apart; beside one that does,
        # another may be for some calls only
        special = kernel.label and any(not k.label for k in KERNELS if (k.op, k.backend) == (kernel.op, kernel.backend))
        assert special or all("strides" in r or "stride " in r for r in unexpected), unexpected
        assert special or result.passed >= result.cases * 0.7
        if not result.passed:
            pytest.skip("; ".join(sorted(unexpected))[:200])
    elif dtype not in kernel.capability.dtypes or (not result.passed and all("dtype" in r for r in unexpected)):
        # a gradient of half precision takes statistics in float32, and refuses the rest by a limit
        assert unexpected and result.passed == 0 and all("dtype" in reason for reason in unexpected)
        pytest.skip("; ".join(sorted(unexpected))[:200])
    elif result.passed == 0:
        # aten: half precision on a CPU keeps statistics that are not ours
        assert device == "cpu" and dtype != torch.float32 and unexpected
        pytest.skip("; ".join(sorted(unexpected))[:200])
    else:
        assert result.passed >= result.cases * 0.1


YET_TO_COME = {
    "attention_backward": {"tilelang"},
    "varlen_attention_backward": {"tilelang"},
    "qkv_split_rope": {"tilelang"},
    "qkv_split_rope_backward": {"tilelang"},
    "qkv_split_rope_append": {"tilelang"},
    "top_k_top_p_renorm": {"tilelang"},
    "top_k_top_p_sample": {"tilelang"},
}
"""What ops lack whose families are not finished. One that gains a kernel leaves the table."""


def test_every_op_has_more_than_its_reference() -> None:
    wanted = {"reference", "inductor", "triton", "tilelang"}
    lacking = {op.name: wanted - {k.backend for k in registry.kernels_of(op.name)} for op in registry.ops()}
    assert {name: lacks for name, lacks in lacking.items() if lacks} == YET_TO_COME


@pytest.mark.parametrize("op", [op for op in registry.ops() if len(op.probes.either) > 1], ids=str)
def test_parameters_of_mixed_dtypes_are_probed_as_they_are(op: Op[Any]) -> None:
    """Of any two each is fp32 beside the other in half precision, and first use and the tuner follow the call."""
    mixed = [c for c in cases(op, torch.bfloat16, size="tiny") if c.name == "one fp32 parameter"]
    pairs = {(a, b) for c in mixed for a in c.dtypes for b in op.probes.either if b not in (*c.dtypes, *c.absent)}
    assert pairs == set(itertools.permutations(op.probes.either, 2))
    for case in mixed:
        options = {**op.usual, **case.options}
        call = call_of(op, build(case, op), options, op.gradient is not None)
        wanted = layout_class(call, dict(op.options))
        assert "=fp32" in wanted and "=bf16" in wanted
        made = [build(probe, op) for probe in probes(call)]
        made.append(dict(zip(op.tensors, inputs_of(call, 0), strict=True)))
        for tensors in made:
            assert layout_class(call_of(op, tensors, options, call.saving), dict(op.options)) == wanted
