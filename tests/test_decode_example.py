"""The decode example: its tokens are those of whole forwards by torch at every length, captured or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

DECODE = Path(__file__).parent.parent / "examples" / "decode"
STEPS, PROMPT = 10, 5
TOY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96, "vocab": 300, "rows": 24,
       "batch": 3}  # fmt: skip


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DECODE))
    for name in ("model", "generate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import generate

    return generate


def made(example: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    model = example.Decoder(example.Sizes(**TOY), 0, dtype, torch.device(device))
    prompt = torch.randint(TOY["vocab"], (TOY["batch"], PROMPT), generator=torch.Generator().manual_seed(1))
    return model, prompt.int().to(device)


def right_at_each_length(model: Any, run: Any, tolerance: float) -> None:
    wanted = model.by_torch(run.tokens[:, :-1])[:, PROMPT - 1 :]
    assert len(run.logits) == wanted.shape[1] == STEPS
    worst = (torch.stack(run.logits, 1) - wanted).abs().amax((0, 2)) / wanted.std()
    assert bool((worst < tolerance).all()), worst


@torch.no_grad()
def test_logits_are_those_of_whole_forwards_at_each_length(example: Any) -> None:
    model, prompt = made(example)
    run = example.generate(model, prompt, STEPS, example.Sampling(), keep_logits=True)
    assert torch.equal(run.tokens[:, :PROMPT], prompt)
    right_at_each_length(model, run, 1e-5)
    again = example.generate(model, prompt, STEPS, example.Sampling())
    other = example.generate(model, prompt, STEPS, example.Sampling(), seed=1)
    assert torch.equal(again.tokens, run.tokens) and not torch.equal(other.tokens, run.tokens)


@torch.no_grad()
def test_greedy_takes_the_likeliest_and_full_caches_are_refused(example: Any) -> None:
    model, prompt = made(example)
    run = example.generate(model, prompt, STEPS, example.Sampling(temperature=0.0), keep_logits=True)
    likeliest = model.by_torch(run.tokens[:, :-1])[:, PROMPT - 1 :].argmax(-1)
    assert torch.equal(run.tokens[:, PROMPT:], likeliest.int())
    with pytest.raises(ValueError, match="5 \\+ 20 tokens do not fit into caches of 24 rows"):
        example.generate(model, prompt, 20, example.Sampling())


def test_the_command_says_how_far_it_is_from_torch(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name, size in TOY.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    example.main([*words, "--steps", "4", "--prompt", "3", "--dtype", "bfloat16", "--device", "cpu", "--check"])
    shown = capsys.readouterr().out
    assert "4 tokens of 3 sequences on cpu, eager" in shown and "in standard deviations: at most 0.0" in shown


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_captured_step_serves_every_length(example: Any, dtype: torch.dtype) -> None:
    model, prompt = made(example, "cuda", dtype)
    eager = example.generate(model, prompt, STEPS, example.Sampling(), keep_logits=True)
    run = example.generate(model, prompt, STEPS, example.Sampling(), capture=True, keep_logits=True)
    right_at_each_length(model, run, 1e-4 if dtype is torch.float32 else 0.1)
    assert torch.equal(run.tokens[:, : PROMPT + 1], eager.tokens[:, : PROMPT + 1])
    if dtype is torch.float32:
        assert torch.equal(run.tokens, eager.tokens)
