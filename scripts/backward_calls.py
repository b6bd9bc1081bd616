"""Host time of the norms' gradients beside rivals': whole calls of `torch.autograd.grad`, in turn in one process.

    python scripts/backward_calls.py backward-calls.json [--seconds 200]

`nothing` is a gradient of two empty tensors: what autograd itself costs a call. A ratio is ours over theirs of the same
round, as quartiles.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch

from gpu_check import LARGE, MAIN, SMALL, environment, say, write_json
from tilewright.bench import measure
from tilewright.bench.peers import gradient_of, peers_of
from tilewright.bench.problems import problems
from tilewright.core import registry
from tilewright.core.device import default_device

RIVALS = ("liger", "quack")
BATCH, ROUNDS = 60, 15


class Nothing(torch.autograd.Function):
    """A gradient that allocates and launches nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def runs(name: str, shape: tuple[int, int], where: torch.device) -> dict[str, Any]:
    """The gradient by each of us, on one set of tensors."""
    op = registry.op(name)
    problem = problems([name], shapes=[shape], dtypes=[torch.bfloat16], passes=["backward"], device=where)[0]
    tensors = problem.inputs(0)
    found = {"ours": gradient_of(problem, lambda t: op(*(t[n] for n in op.tensors)), tensors, 0)}
    for peer in peers_of(op):
        if peer.name in RIVALS:
            try:
                found[peer.name] = peer.runs(problem, [tensors])[0]
            except (ImportError, NotImplementedError) as error:
                say(f"{name}: {peer.name} is left out: {error}")
    x, weight = (torch.randn(s, device=where, dtype=torch.bfloat16, requires_grad=True) for s in (shape, shape[-1:]))
    y, up = Nothing.apply(x, weight), torch.randn(shape, device=where, dtype=torch.bfloat16)
    found["nothing"] = functools.partial(torch.autograd.grad, [y], [x, weight], [up], retain_graph=True)
    return found


def quartiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[len(ordered) * k // 4], 3) for k in (1, 2, 3)]


def rows(name: str, shape: tuple[int, int], where: torch.device) -> list[dict[str, Any]]:
    found = runs(name, shape, where)
    for run in found.values():
        for _ in range(20):
            run()
    watches = {who: measure.CallWatch(run, where, BATCH) for who, run in found.items()}
    took: dict[str, list[float]] = {who: [] for who in watches}
    for turn in range(ROUNDS):
        for who in list(watches)[:: 1 if turn % 2 else -1]:
            took[who].append(watches[who]())
    out = []
    for who, samples in took.items():
        low, middle, high = quartiles(samples)
        ratios = quartiles([a / b for a, b in zip(took["ours"], samples, strict=True)])
        out.append({"op": name, "shape": list(shape), "who": who, "call_us": round(middle, 2),
                    "iqr_us": round(high - low, 2), "ours_over": ratios})  # fmt: skip
        say(f"{name} {shape} {who}: {middle:.1f} us, ours over it {ratios}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no shape after these")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    unit = f"us of host time a call, in turn, medians of {ROUNDS} batches of {BATCH}; `nothing`: of two empty tensors"
    data = {**environment(), "unit": unit, "calls": []}
    for name in MAIN:
        for shape in LARGE + SMALL:
            if time.monotonic() < end:
                data["calls"] += rows(name, shape, default_device())
                write_json(options.out, data)
    print(json.dumps({"rows": len(data["calls"])}))


if __name__ == "__main__":
    main()
