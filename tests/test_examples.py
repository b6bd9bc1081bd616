"""The examples run, and what they promise holds: the same training by torch's functions and by ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PCVR = Path(__file__).parent.parent / "examples" / "pcvr"
SIZES = {"batch": 192, "ids": 300, "width": 32, "bag": 6, "fields": 3, "depth": 2, "steps": 12}
TOY = ["--device", "cpu", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]


@pytest.fixture
def pcvr(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PCVR))
    for name in ("data", "model", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train

    return train


def test_the_same_loss_curve_by_torch_and_by_tilewright(pcvr: Any, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = pcvr.main([*TOY, "--ops", "torch", "--same-masks"])
    ours = pcvr.main([*TOY, "--ops", "tilewright"])
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-5, atol=0)
    assert sum(ours.losses[-3:]) < 0.97 * sum(ours.losses[:3]), "it learns"
    assert "tilewright on cpu" in capsys.readouterr().out
    assert ours.peak_mib > 0 and ours.step_ms > 0


@pytest.mark.parametrize("ops", ["torch", "tilewright"])
def test_sparse_gradients_lead_to_the_same_losses(pcvr: Any, ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TOY, "--ops", ops, *(["--same-masks"] if ops == "torch" else [])]
    dense, sparse = pcvr.main(words), pcvr.main([*words, "--sparse"])
    torch.testing.assert_close(sparse.losses, dense.losses, rtol=2e-5, atol=0)
    shown = capsys.readouterr().out
    assert "table gradients: dense" in shown and "table gradients: sparse" in shown
    assert dense.table_gradients_mib == SIZES["fields"] * SIZES["ids"] * SIZES["width"] * 4 / 2**20
    assert 0 < sparse.table_gradients_mib <= SIZES["fields"] * SIZES["batch"] * SIZES["bag"] * (8 + 4 * 32) / 2**20


def test_popular_ids_are_popular_and_batches_repeat(pcvr: Any) -> None:
    sizes = pcvr.Sizes(batch=4000, fields=2, bag=8, ids=1000)
    ids, labels = pcvr.batch(sizes, 3, 7, torch.device("cpu"))
    again, _ = pcvr.batch(sizes, 3, 7, torch.device("cpu"))
    other, _ = pcvr.batch(sizes, 3, 8, torch.device("cpu"))
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    assert ids.min() == 0 and ids.max() < 1000 and 0.1 < labels.mean() < 0.9
    counts = torch.bincount(ids[ids > 0], minlength=1000)
    assert counts[1] > 5 * counts[10] > 0, "rank 1 comes about 11 times as often as rank 10"
