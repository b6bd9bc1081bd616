"""What the suite keeps against a kernel: a wrong result that came again, of the form that was wrong; nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.backends.cubin import LaunchError, LaunchOutOfMemory
from tilewright.core import evidence, registry
from tilewright.core.device import device_of
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.verify.suite import Result, verify_kernel

OP = registry.op("rms_norm")
CPU = device_of("cpu")
runs: list[bool] = []


def right(x: Any, saving: bool, options: dict[str, Any]) -> list[Any]:
    found = OP.define(x, {n: options[n] for n in OP.options}, saving)
    return [each if each is None else each.contiguous() for each in found]


def once_wrong(x: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    """Wrong in the first check, then it raises."""
    runs.append(saving)
    if len(runs) > 2:
        raise ValueError("something else")
    found = right({"x": x, "weight": weight}, saving, options)
    return [found[0] * 1.25, *found[1:]]


def wrong_plain(x: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    found = right({"x": x, "weight": weight}, saving, options)
    return found if saving else [found[0] * 1.25, *found[1:]]


def wrong_saving(x: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    found = right({"x": x, "weight": weight}, saving, options)
    return [found[0] * 1.25, *found[1:]] if saving else found


def once_wrong_then_no_memory(x: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    runs.append(saving)
    if len(runs) > 2:
        raise torch.OutOfMemoryError("of 1 GiB")
    found = right({"x": x, "weight": weight}, saving, options)
    return [found[0] * 1.25, *found[1:]]


def no_memory(x: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    raise LaunchOutOfMemory("loading kernel k", 2, "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.fixture
def verified(request: pytest.FixtureRequest) -> Iterator[tuple[Kernel, Result, dict[str, Verdict]]]:
    """A kernel, how it fared, and what is known of it by layout class."""
    runs.clear()
    kernel = Kernel("rms_norm", "vendor", f"{__name__}:{request.param}", label=request.param, origin="test")
    registry.add_kernels([kernel])
    result = verify_kernel(OP, kernel, torch.float32, torch.device("cpu"), size="tiny", record=True)
    group = evidence._group(kernel, CPU.arch)
    known = {entry.partition("|")[2]: verdict for (of, entry), verdict in evidence._memory.items() if of == group}
    yield kernel, result, known
    registry.remove_kernel(kernel)


def kinds(known: dict[str, Verdict], passed: bool) -> set[bool]:
    return {" saving" in layout for layout, verdict in known.items() if verdict.passed is passed}


@pytest.mark.parametrize("verified", ["once_wrong"], indirect=True)
def test_an_error_does_not_confirm_a_wrong_result(verified: tuple[Kernel, Result, dict[str, Verdict]]) -> None:
    kernel, result, known = verified
    assert "largest error" in result.failures[0]["problem"] and "ValueError" in result.failures[1]["problem"]
    assert not kinds(known, False) and not evidence.against(kernel, CPU.arch)


@pytest.mark.parametrize("verified", ["wrong_plain", "wrong_saving"], indirect=True)
def test_only_the_form_that_was_wrong_is_put_away(verified: tuple[Kernel, Result, dict[str, Verdict]]) -> None:
    kernel, result, known = verified
    assert result.failed and not result.passed
    assert kinds(known, False) == {kernel.label == "wrong_saving"}
    assert not kinds(known, True)


@pytest.mark.parametrize("verified", ["no_memory"], indirect=True)
def test_a_launcher_without_memory_says_nothing_of_the_kernel(
    verified: tuple[Kernel, Result, dict[str, Verdict]],
) -> None:
    kernel, result, known = verified
    assert not result.failed and not known and {e["reason"] for e in result.not_run} >= {"out of memory"}
    found = tw.explain(tw.rms_norm, x := torch.randn(3, 41), torch.ones(41))
    tw.rms_norm(x, torch.ones(41))
    candidate = next(c for c in found.candidates if c.kernel is kernel)
    assert evidence.broken(kernel, candidate.kernel.configs_for(found.call)[0], CPU.arch) is None
    assert issubclass(LaunchOutOfMemory, LaunchError) and issubclass(LaunchOutOfMemory, torch.OutOfMemoryError)


def test_memory_that_is_gone_when_a_wrong_result_is_looked_at_again_is_no_verdict() -> None:
    runs.clear()
    name = "once_wrong_then_no_memory"
    kernel = Kernel("rms_norm", "vendor", f"{__name__}:{name}", label=name, origin="test", preference=-20)
    registry.add_kernels([kernel])
    try:
        x, weight = torch.randn(3, 47), torch.ones(47)
        torch.testing.assert_close(tw.rms_norm(x, weight), OP.reference(x, weight))
        assert len(runs) > 2 and "not verified: out of memory" in str(tw.explain(tw.rms_norm, x, weight))
        assert not evidence.against(kernel, CPU.arch)
    finally:
        registry.remove_kernel(kernel)
