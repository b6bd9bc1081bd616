"""Preferences: `tw.use`, the environment, pins, what falls back and what is said of it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core import policy, registry, selection
from tilewright.core.capability import Capability
from tilewright.core.errors import UnknownName
from tilewright.core.kernel import Kernel
from tilewright.core.reason import Reason

W = torch.ones(24)


def node_of(x: Tensor, **how: Any) -> Tensor:
    y: Tensor = torch.ops.tilewright.rms_norm(x, None, eps=1e-6, weight_offset=0.0, cast_before_weight=False, **how)
    return y


def chosen(op: Any = tw.rms_norm, x: Tensor | None = None, **how: Any) -> str:
    found = tw.explain(op, torch.randn(3, 24) if x is None else x, **how).chosen
    assert found is not None
    return found.backend


def test_blocks_nest_and_the_innermost_that_speaks_decides() -> None:
    start = chosen()
    with tw.use(backend="vendor"):
        assert chosen() == "vendor"
        with tw.use(check="never"):
            assert chosen() == "vendor" and policy.current().check("rms_norm") == "never"
            with tw.use(backend="reference", strict=True, check="first"):
                assert chosen() == "reference" and policy.current().strict("rms_norm")
                assert policy.current().check("rms_norm") == "first"
            assert chosen() == "vendor" and not policy.current().strict("rms_norm")
        assert policy.current().check("rms_norm") == "first"
    assert chosen() == start


def test_a_block_ends_with_its_exception() -> None:
    before = policy.current()
    with pytest.raises(ZeroDivisionError), tw.use(backend="reference"):
        1 / 0
    assert policy.current() is before


@pytest.mark.parametrize("ops", [["add_rms_norm"], [tw.add_rms_norm]])
def test_ops_limit_a_block_and_bring_their_backward(ops: Any) -> None:
    with tw.use(backend="vendor", check="never", strict=True, ops=ops):
        now = policy.current()
        assert now.backend("rms_norm") is None and now.check("rms_norm") == "first" and not now.strict("rms_norm")
        for name in ("add_rms_norm", "rms_norm_backward"):  # the latter is the gradient of the former
            assert now.backend(name) == "vendor" and now.check(name) == "never" and now.strict(name)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(tw.UnknownName) as error:
        tw.rms_norm(torch.randn(2, 4), backend="tritn")
    assert all(name in str(error.value) for name in ("'tritn'", *registry.backend_names()))
    with pytest.raises(tw.UnknownName, match=r"known: .*reference"), tw.use(backend="cudnn"):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(tw.UnknownName, match=r"unknown op 'rmsnorm', perhaps rms_norm; known: .*rms_norm"),
        tw.use(ops=["rmsnorm"]),
    ):
        pass
    with (
        pytest.raises(tw.InvalidArgument, match=r"ops: the string 'l2_norm'; a list: \['l2_norm'\]"),
        tw.use(ops="l2_norm"),
    ):
        pass
    wrong: Any = "sometimes"
    with (
        pytest.raises(tw.InvalidArgument, match="check: 'sometimes'; one of first, always, never"),
        tw.use(check=wrong),
    ):
        pass
    with pytest.raises(tw.UnknownName, match="unknown op"):
        registry.op("nope")
    assert tw.rms_norm(torch.randn(2, 4)).shape == (2, 4)


def test_asyncio_tasks_keep_their_own() -> None:
    async def one(backend: str, log: list[tuple[str, str]]) -> None:
        with tw.use(backend=backend):
            for _ in range(4):
                await asyncio.sleep(0)
                log.append((backend, chosen()))

    async def main() -> list[tuple[str, str]]:
        log: list[tuple[str, str]] = []
        with tw.use(check="never"):
            await asyncio.gather(one("vendor", log), one("reference", log))
            assert policy.current().check("rms_norm") == "never"
        return log

    log = asyncio.run(main())
    assert len(log) == 8 and all(wanted == got for wanted, got in log)


def test_new_threads_start_from_the_environment() -> None:
    found: list[Any] = []
    with tw.use(backend="reference", check="never"):
        thread = threading.Thread(target=lambda: found.append(policy.current()))
        thread.start()
        thread.join()
    assert found[0].backend("rms_norm") is None and found[0].check("rms_norm") == "first"


SEEN: list[str] = []


def seen_backward(dy: Any, x: Any, weight: Any, rstd: Any, dh: Any, *, saving: bool, **options: Any) -> list[Any]:
    SEEN.append(threading.current_thread().name)
    return list(tw.rms_norm_backward.reference(dy, x, weight, rstd, dh, **options))


@pytest.mark.parametrize("node", [False, True])
def test_backward_keeps_what_forward_found(node: bool) -> None:
    """Backward runs outside of the block, and in another thread, whose own policy says otherwise."""
    kernel = Kernel("rms_norm_backward", "vendor", f"{__name__}:seen_backward", label=f"seen {node}", preference=-50)
    registry.add_kernels([kernel])
    SEEN.clear()
    try:
        results = []
        for backend in ("vendor", "reference"):
            x = torch.randn(3, 24, requires_grad=True)
            with tw.use(backend=backend, check="never"):
                y = node_of(x) if node else tw.rms_norm(x)
            thread = threading.Thread(target=y.sum().backward, name=f"{backend} thread")
            thread.start()
            thread.join()
            results.append(x.grad)
        assert SEEN == ["vendor thread"] and all(g is not None for g in results)
    finally:
        registry.remove_kernel(kernel)


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import torch, tilewright as tw\nx = torch.randn(3, 24)\n" + code],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_environment_sets_the_defaults_and_bad_values_are_refused_by_name() -> None:
    show = "print(tw.explain(tw.rms_norm, x).chosen.backend)"
    code = f"{show}\nwith tw.use(backend='vendor'): {show}"
    done = _run(code, TILEWRIGHT_BACKEND="reference", TILEWRIGHT_CHECK="always")
    assert done.stdout.split() == ["reference", "vendor"], done.stderr
    code = """
for _ in range(2):
    try: tw.rms_norm(x)
    except tw.TilewrightError as error: print(type(error).__name__, error)
"""
    done = _run(code, TILEWRIGHT_BACKEND="tritn")
    assert done.stdout.count("UnknownName") == 2 and "TILEWRIGHT_BACKEND" in done.stdout, done.stderr
    assert "'tritn'" in done.stdout and "triton" in done.stdout
    done = _run(code, TILEWRIGHT_CHECK="yes")
    assert done.stdout.count("InvalidArgument") == 2, done.stderr
    assert "TILEWRIGHT_CHECK: 'yes'; one of first, always, never" in done.stdout


def test_pinned_backend_never_falls_back_nor_does_its_gradient() -> None:
    x = torch.randn(3, 24, requires_grad=True)
    with pytest.raises(
        tw.NoKernel, match=r'l2_norm\(backend="vendor"\) cannot take this call\n  l2_norm has no vendor kernel'
    ):
        tw.l2_norm(x, backend="vendor")
    with pytest.raises(tw.NoKernel) as error:
        tw.rms_norm(x.double(), backend="triton")
    assert "x: dtype fp64; takes fp32, fp16, bf16" in str(error.value) and "reference fits" in str(error.value)
    with tw.use(backend="reference"), pytest.raises(tw.NoKernel):
        tw.rms_norm(x.double(), backend="vendor")
    tw.layer_norm(x, backend="reference").sum().backward()
    assert x.grad is not None


def by_node(x: Tensor, backend: str) -> Tensor:
    return node_of(x, backend=backend)


def by_compiler(x: Tensor, backend: str) -> Tensor:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tw.rms_norm(x, backend=backend), backend="aot_eager", fullgraph=True)
    y: Tensor = compiled(x)
    return y


def by_strict_preference(x: Tensor, backend: str) -> Tensor:
    with tw.use(backend=backend, strict=True, check="never"):
        return tw.rms_norm(x)


WAYS: list[Any] = [tw.rms_norm, by_node, by_compiler, by_strict_preference]


@pytest.mark.parametrize("call", WAYS, ids=["direct", "node", "compiled", "strict"])
def test_a_pin_without_a_gradient_kernel_is_refused_at_forward(call: Any) -> None:
    """For float32 on a CPU aten has a forward kernel for this call, and none for its gradient."""
    x = torch.randn(3, 24, requires_grad=True)
    for _ in range(2):
        with pytest.raises(tw.NoKernel, match=r'rms_norm_backward\(backend="vendor"\) cannot') as error:
            call(x, backend="vendor")
        for part in ("  device: ", "gradient of rms_norm, which this call wants", "Other kernels: "):
            assert part in str(error.value)
    with torch.no_grad():
        assert call(x, backend="vendor").shape == x.shape
    assert call(x.detach(), backend="vendor").shape == x.shape
    call(x, backend="reference").sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_a_pin_is_refused_only_for_gradients_that_cannot_be_had() -> None:
    """aten's layer_norm takes weight and bias together in its gradient, and has no gradient of a residual."""
    x, w, b = torch.randn(3, 24, requires_grad=True), W.clone(), torch.zeros(24)
    tw.layer_norm(x, w, b, backend="vendor").sum().backward()
    assert x.grad is not None
    with pytest.raises(tw.NoKernel, match=r"layer_norm_backward.*\n  bias: aten wants weight and bias together"):
        tw.layer_norm(x, w, backend="vendor")
    told = str(tw.explain(tw.layer_norm, x, w, backend="vendor"))
    assert "chosen: none" in told and "raises NoKernel" in told
    assert "note: layer_norm_backward" in told and "weight and bias together" in told
    assert "raises NoKernel" not in str(tw.explain(tw.layer_norm, x, w, b, backend="vendor"))


def only_y(dy: Any, x: Any, weight: Any, rstd: Any, dh: Any, *, saving: bool, **options: Any) -> list[Any]:
    return list(tw.rms_norm_backward.reference(dy, x, weight, rstd, dh, **options))


def only_y_forward(x: Any, residual: Any, weight: Any, *, saving: bool, **options: Any) -> list[Any]:
    return tw.add_rms_norm.define({"x": x, "residual": residual, "weight": weight}, options, saving)


def _takes_no_dh(call: Any) -> Any:
    if call.has("dh"):
        yield Reason("dh", "given")
    if call.needs[1]:
        yield Reason("needs", "dweight is not computed")


@pytest.mark.parametrize("node", [False, True])
def test_an_output_that_may_go_unused_is_no_reason_to_refuse(node: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Kernel("add_rms_norm", "vendor", f"{__name__}:only_y_forward", label=f"y {node}")
    limits = Capability(limits=(_takes_no_dh,))
    backward = Kernel("rms_norm_backward", "vendor", f"{__name__}:only_y", limits, label=f"y {node}")
    registry.add_kernels([forward, backward])
    x, residual, w = torch.randn(3, 24, requires_grad=True), torch.randn(3, 24), W.clone()
    try:
        with tw.use(check="never"):
            if node:
                op: Any = torch.ops.tilewright.add_rms_norm
                options = {"eps": 1e-6, "weight_offset": 0.0}
            else:
                op, options = tw.add_rms_norm, {}
            op(x, residual, w, **options, backend="vendor")[0].sum().backward()
            assert x.grad is not None
            weighed: list[Any] = []
            weigh = selection.weigh
            monkeypatch.setattr(selection, "weigh", lambda *a, **k: weighed.append(a) or weigh(*a, **k))
            op(x, residual, w, **options, backend="vendor")
            assert not weighed, "a plan that is found costs nothing more"
            y, h = op(x, residual, w, **options, backend="vendor")
            with pytest.raises(tw.NoKernel, match="dh: given"):
                (y + h).sum().backward()
            w.requires_grad_()
            if not node:  # the node does not know for which tensors a gradient is wanted
                with pytest.raises(tw.NoKernel, match="dweight is not computed"):
                    op(x, residual, w, **options, backend="vendor")
    finally:
        registry.remove_kernel(forward), registry.remove_kernel(backward)


def test_a_kernel_of_several_of_a_backend_is_named_as_explain_does() -> None:
    """On the call, its gradient and in a block; another op, whose kernels have no such label, keeps to the backend."""
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64)
    for name in ("vendor/aten", "vendor/onednn"):
        found = tw.explain(tw.linear, x, w, backend=name)
        assert found.chosen is not None and found.chosen.kernel.pin == name and f" >  {name} " in str(found)
        y = tw.linear(x, w, backend=name)
        y.backward(torch.ones_like(y))
        assert torch.allclose(y, x @ w.T, atol=1e-5)
        with tw.use(backend=name):
            found = tw.explain(tw.linear, x, w)
            assert found.chosen is not None and found.chosen.kernel.pin == name
            assert chosen() == "vendor"
    with pytest.raises(tw.NoKernel, match=r'backend="vendor/onednn"(.|\n)*fits?; (.|\n)*vendor/aten: '):
        tw.linear(x.to(torch.float64), w.to(torch.float64), backend="vendor/onednn")
    with pytest.raises(tw.NoKernel, match=r"\n  vendor/aten: (.|\n)*\n  vendor/onednn: "):
        tw.linear(x.to(torch.float64), w.to(torch.float64), backend="vendor")
    for op, name in ((tw.rms_norm, "vendor/onednn"), (tw.linear, "vendor/no"), (tw.linear, "linear/vendor/aten")):
        with pytest.raises(UnknownName, match=f"backend '?{name}"):
            op(x, w, backend=name)
    with pytest.raises(UnknownName, match="vendor/onednn"), tw.use(backend="vendor/oneDNN"):
        pass


def test_preference_falls_back_with_one_record_a_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tilewright")
    with tw.use(backend="cuda", check="never", ops=["l2_norm"]):
        for rows in (5, 6, 7, 8, 5):  # one class: rows count by the next power of two
            assert tw.l2_norm(torch.randn(rows, 31)).shape == (rows, 31)
        with tw.use(strict=False):
            tw.l2_norm(torch.randn(5, 31))
        told = [r.message for r in caplog.records if "preferred backend cuda" in r.message]
        assert len(told) == 1 and "l2_norm" in told[0]
        (reason,) = told[0].split(" runs. ")[1:]
        assert reason == "it has no kernel of l2_norm"
        tw.l2_norm(torch.randn(5, 32))
    assert len([r for r in caplog.records if "preferred backend cuda" in r.message]) == 2


def test_the_record_of_a_fallback_holds_the_backends_own_reasons_alone(caplog: pytest.LogCaptureFixture) -> None:
    with tw.use(backend="cuda", check="never"):
        tw.rms_norm(torch.randn(3, 31))
    (told,) = [r.message for r in caplog.records if "preferred backend cuda" in r.message]
    assert re.search(r"runs\. cuda: device: \S+ is not supported; needs sm_90 or later$", told), told


def test_strict_makes_the_fallback_an_error() -> None:
    x = torch.randn(3, 24)
    with tw.use(backend="cuda", strict=True, check="never"):
        with pytest.raises(
            tw.NoKernel, match=r'rms_norm\(backend="cuda"\).*\n.*device: .* is not supported; needs sm_90'
        ):
            tw.rms_norm(x)
        assert tw.rms_norm(x, backend="reference").shape == x.shape, "a pin is not the preference"
    assert tw.rms_norm(x).shape == x.shape


def test_empty_calls_suit_every_backend(caplog: pytest.LogCaptureFixture) -> None:
    """A batch may be empty now and then: neither a pin nor a strict preference breaks on it, and nothing is logged."""
    x = torch.randn(0, 24, requires_grad=True)
    tw.rms_norm(x, W, backend="triton").sum().backward()
    with tw.use(backend="triton", strict=True):
        tw.rms_norm(x, W).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 24) and not caplog.records


def test_the_reference_on_a_cpu_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tw.rms_norm(torch.randn(3, 25, dtype=torch.float64))
    tw.add_layer_norm(torch.randn(3, 25).double(), torch.randn(3, 25).double())
    with tw.use(backend="reference"):
        tw.rms_norm(torch.randn(3, 25))
    assert not caplog.records


def test_explain_takes_the_policy_into_account() -> None:
    with tw.use(backend="vendor"):
        assert "preferred by tw.use" in str(tw.explain(tw.rms_norm, torch.randn(3, 24), W))
    assert "pinned by backend=" in str(tw.explain(tw.rms_norm, torch.randn(3, 24), W, backend="reference"))
    refused = tw.explain(tw.rms_norm, torch.randn(3, 24), W, backend="cuda")
    assert refused.chosen is None and "cuda cannot take this call" in str(refused)
