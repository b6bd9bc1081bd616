"""Decodes with a KV cache: one step captured in a CUDA graph and replayed over growing lengths.

    python examples/decode/generate.py                          # a GPU: captured
    python examples/decode/generate.py --eager                  # the same steps, launched one by one
    python examples/decode/generate.py --check                  # every step's logits against a whole forward by torch

On a CPU there is no graph, and smaller sizes are wise: --layers 2 --width 64 --vocab 500 --steps 8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from model import Decoder, Sizes, State

import tilewright as tw


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; a temperature of 0 takes the likeliest."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95


@dataclass
class Run:
    tokens: Tensor
    """[B, prompt + steps]"""
    logits: list[Tensor] = field(default_factory=list)
    """[B, V] of every step, where they were asked for."""
    step_us: float = 0.0


class Generator:
    """A decoder, its buffers and one step of it, which may be captured."""

    def __init__(self, model: Decoder, state: State, sampling: Sampling) -> None:
        self.model, self.state, self.sampling = model, state, sampling
        self.last = torch.empty(model.sizes.batch, model.sizes.vocab, dtype=model.head.dtype, device=model.head.device)
        """Logits of the latest step."""

    def draw(self, logits: Tensor) -> None:
        """Draw the token that follows, and write it where the text ends."""
        state, how = self.state, self.sampling
        self.last.copy_(logits)
        scale = 1.0 / how.temperature if how.temperature else 1.0
        probs = tw.softmax(logits.float(), scale=scale)
        ids, _ = tw.top_k_top_p_sample(
            probs, top_k=how.top_k if how.temperature else 1, top_p=how.top_p, seed=state.seed, offset=state.offset
        )
        state.tokens.scatter_(1, state.length[:, None].long(), ids[:, None])
        state.offset += 1

    def prefill(self, prompt: Tensor) -> None:
        state = self.state
        state.tokens[:, : prompt.shape[1]] = prompt
        logits = self.model.logits(prompt, state)
        state.length += prompt.shape[1]
        self.draw(logits)

    def step(self) -> None:
        """Take in the token that was drawn last, and draw the next. Reads and writes its own buffers alone."""
        state = self.state
        logits = self.model.logits(state.tokens.gather(1, state.length[:, None].long()), state)
        state.length += 1
        self.draw(logits)

    def captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Warming it up takes steps, which are taken back."""
        state = self.state
        kept = [t.clone() for t in (state.length, state.tokens, state.offset)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for t, before in zip((state.length, state.tokens, state.offset), kept, strict=True):
            t.copy_(before)
        return graph.replay


def generate(
    model: Decoder, prompt: Tensor, steps: int, sampling: Sampling, *, seed: int = 0, capture: bool = False,
    keep_logits: bool = False,
) -> Run:  # fmt: skip
    """`steps` tokens behind `prompt` [B, P]. The same seed draws the same tokens, captured or not."""
    sizes, weight = model.sizes, model.head
    if prompt.shape[1] + steps > sizes.rows:
        raise ValueError(f"{prompt.shape[1]} + {steps} tokens do not fit into caches of {sizes.rows} rows")
    generator = Generator(model, State(sizes, weight.dtype, weight.device, seed), sampling)
    generator.prefill(prompt)
    run = Run(generator.state.tokens[:, : prompt.shape[1] + steps])
    if keep_logits:
        run.logits.append(generator.last.clone())
    step = generator.captured() if capture else generator.step
    times = []
    for _ in range(steps - 1):
        start = time.perf_counter()
        step()
        if weight.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        if keep_logits:
            run.logits.append(generator.last.clone())
    run.step_us = statistics.median(times[len(times) // 3 :]) if times else 0.0
    return run


@torch.no_grad()
def main(words: list[str] | None = None) -> Run:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt, drawn by the seed")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--check", action="store_true", help="compare every step's logits with torch's")
    options = parser.parse_args(words)
    device = torch.device(options.device)
    sizes = Sizes(**{size.name: getattr(options, size.name) for size in fields(Sizes)})
    model = Decoder(sizes, options.seed, getattr(torch, options.dtype), device)
    random = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(sizes.vocab, (sizes.batch, options.prompt), generator=random, dtype=torch.int32).to(device)
    sampling = Sampling(temperature=0.0 if options.greedy else Sampling.temperature)
    capture = device.type == "cuda" and not options.eager
    run = generate(
        model, prompt, options.steps, sampling, seed=options.seed, capture=capture, keep_logits=options.check
    )
    how = "captured" if capture else "eager"
    print(f"{options.steps} tokens of {sizes.batch} sequences on {device}, {how}: {run.step_us:.0f} us a step")
    if options.check:
        wanted = model.by_torch(run.tokens[:, :-1])[:, options.prompt - 1 :]
        found = torch.stack(run.logits, 1)
        worst = (found - wanted).abs().amax((0, 2)).float() / wanted.float().std()
        print(f"logits against torch's, in standard deviations: at most {worst.max():.3g}, {worst[0]:.3g} at first")
    return run


if __name__ == "__main__":
    main()
