"""What only a GPU can show: capture, streams, alignment, devices, and evidence that spares the check."""

import pytest
import torch

import tilewright as tw
from tilewright.core import evidence, registry
from tilewright.core.dispatch import explain

pytestmark = pytest.mark.gpu
GPU_BACKENDS = ("triton", "vendor")


def rows(count, columns, dtype=torch.bfloat16):
    return torch.randn(count, columns, device="cuda", dtype=dtype)


def expected(x, w):
    return tw.rms_norm.reference(x.double(), w.double()).to(x.dtype)


@pytest.mark.parametrize("backend", [None, *GPU_BACKENDS])
def test_a_warm_call_is_captured_and_replayed(backend):
    x, w = rows(64, 2048), rows(1, 2048)[0]
    tw.rms_norm(x, w, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tw.rms_norm(x, w, backend=backend)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, expected(x, w))


def test_a_warm_training_step_is_captured():
    x, w = rows(64, 1024).requires_grad_(), rows(1, 1024)[0].requires_grad_()
    dy = rows(64, 1024)

    def step():
        return torch.autograd.grad(tw.rms_norm(x, w), (x, w), dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


def test_a_cold_class_is_refused_by_name_and_the_context_stays_usable():
    x = rows(8, 1736)  # a width that no other test uses
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tw.NotWarm, match=r"l2_norm.*warm|cold"), torch.cuda.graph(graph):
        tw.l2_norm(x, backend="triton")
    assert tw.l2_norm(x, backend="triton").isfinite().all()


def test_launches_follow_the_current_stream():
    x, w = torch.full((64, 2048), float("nan"), device="cuda", dtype=torch.bfloat16), rows(1, 2048)[0]
    values = rows(64, 2048)
    tw.rms_norm(values, w)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.copy_(values)
        y = tw.rms_norm(x, w)
    side.synchronize()
    torch.testing.assert_close(y, expected(values, w))


def test_a_misaligned_view_after_an_aligned_call():
    w = rows(1, 2048)[0]
    flat = torch.randn(64 * 2048 + 8, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 3, 0, 7, 8):
        x = flat[offset : offset + 64 * 2048].view(64, 2048)
        torch.testing.assert_close(tw.rms_norm(x, w, backend="triton"), expected(x, w))


def test_more_than_2_to_31_elements():
    x = torch.empty((1 << 23) + 16, 256, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    w = rows(1, 256)[0]
    y = tw.rms_norm(x, w, backend="triton")
    for part in (slice(0, 4), slice((1 << 23) - 2, None)):
        torch.testing.assert_close(y[part], expected(x[part], w))


def test_no_new_compilation_for_another_batch_size(monkeypatch):
    backend = registry.backend("triton")
    x, w = rows(4000, 2048), rows(1, 2048)[0]
    tw.rms_norm(x, w, backend="triton")
    built = []
    from tilewright.core import artifacts

    real = artifacts.cached
    monkeypatch.setattr(artifacts, "cached", lambda key, build: real(key, lambda: built.append(key) or build()))
    for count in (3999, 4001, 4095):
        tw.rms_norm(x[:count] if count <= 4000 else rows(count, 2048), w, backend="triton")
    assert built == [], backend


def test_shipped_evidence_spares_the_check(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("evidence is shipped for sm_90")
    x, w = rows(8192, 4096), rows(1, 4096)[0]
    chosen = explain(tw.rms_norm, x, w, backend="triton").chosen
    if chosen.verdict is None:
        pytest.skip("evidence is shipped for another version of Triton")
    asked = []
    monkeypatch.setattr(evidence, "prove", lambda *args: asked.append(args))
    torch.testing.assert_close(tw.rms_norm(x, w, backend="triton"), expected(x, w))
    assert asked == []


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    for index in (1, 0, 1):
        x = torch.randn(64, 2048, device=f"cuda:{index}", dtype=torch.bfloat16)
        w = torch.randn(2048, device=f"cuda:{index}", dtype=torch.bfloat16)
        y = tw.rms_norm(x, w, backend="triton")
        assert y.device == x.device
        torch.testing.assert_close(y, expected(x, w))


def test_deterministic_algorithms_are_honoured():
    x, w = rows(512, 1024).requires_grad_(), rows(1, 1024)[0].requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        first = torch.autograd.grad(tw.layer_norm(x, w, w).sum(), (x, w))
        second = torch.autograd.grad(tw.layer_norm(x, w, w).sum(), (x, w))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
