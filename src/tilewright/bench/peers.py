"""Rivals: what a user would call instead of an op. Adapters are data of the op's family, imported when asked for.

A family that has rivals keeps them in a module `peers` beside its ops, as PEERS: {op: {peer: maker}}. A maker takes
the op's tensors by name and its options, imports the rival and returns a function without arguments that returns the
op's outputs, differentiable; those that the op's gradient calls `seldom` may be missing. It raises ImportError where
the rival is not installed and NotImplementedError where it cannot compute these options. This file finds them, and
checks that they compute the same; of a maker whose attribute `draws` is true, which has random numbers of its own, that
results are as large.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.measure import Run
from tilewright.bench.problems import Problem, Tensors
from tilewright.core.op import Op

Maker = Callable[[Mapping[str, Any], Mapping[str, Any]], Run]
TOLERANCE = 0.03
"""Largest difference from the definition, over the largest value: enough to tell another function, not a proof."""
SMALLEST = torch.finfo(torch.float32).tiny
DRAWN_TOLERANCE = 0.2
"""Of root mean squares, where random numbers differ."""
MOST_CHECKED = 1 << 26


@dataclass(frozen=True)
class Peer:
    name: str
    maker: Maker

    def runs(self, problem: Problem, sets: Sequence[Tensors]) -> list[Run]:
        """The problem on each set. For a backward: the gradient alone, of a graph that is kept.

        Call it on the stream that will be captured: autograd runs a backward where its forward ran.
        """
        options = {**problem.owner.usual, **problem.options}
        if not problem.backward:
            return [self.maker(tensors, options) for tensors in sets]

        def forward(leaves: Tensors) -> Any:
            return self.maker(leaves, options)()

        return [gradient_of(problem, forward, timed, seed) for seed, timed in enumerate(sets)]

    def check(self, problem: Problem, run: Run, timed: Tensors) -> None:
        """Compare with the definition on the first set.

        Raises:
            NotImplementedError: it computes something else.
        """
        if max(t.numel() for t in timed.values() if t is not None) > MOST_CHECKED:
            return
        try:
            wanted = self._defined(problem, timed)
        except torch.OutOfMemoryError:  # a definition may keep every pair of tokens
            problem = problem.bearable()
            timed = problem.inputs(0)
            wanted, run = self._defined(problem, timed), self.runs(problem, [timed])[0]
        found = _dense(run())
        gradient = problem.owner.gradient
        if gradient is not None and len(wanted) - len(found) == len(gradient.seldom):
            wanted = wanted[: len(found)]
        for mine, theirs in zip(wanted, found, strict=True):
            if getattr(self.maker, "draws", False):
                if not mine.is_floating_point() and mine.shape == theirs.shape and mine.dtype == theirs.dtype:
                    continue  # ids that are drawn tell no more
                sizes = [float(t.float().square().mean().sqrt()) for t in (mine, theirs)]
                if mine.shape != theirs.shape or abs(sizes[0] - sizes[1]) > DRAWN_TOLERANCE * sizes[0]:
                    raise NotImplementedError(f"computes something else: root mean squares are {sizes}")
                continue
            worst = (mine.float() - theirs.float()).abs().max() / mine.float().abs().max().clamp_min(SMALLEST)
            if not worst < TOLERANCE:
                raise NotImplementedError(f"computes something else: off by {float(worst):.2g} of the largest value")

    def _defined(self, problem: Problem, timed: Tensors) -> Any:
        """What the definition finds."""
        options = {**problem.owner.usual, **problem.options}

        def define(tensors: Mapping[str, Any]) -> Any:
            # through the op, whose gradient is declared: autograd's of the formula is another where that has corners
            return problem.owner(*(tensors[n] for n in problem.owner.tensors), backend="reference", **options)

        return _dense(gradient_of(problem, define, timed, 0)() if problem.backward else define(timed))


def gradient_of(problem: Problem, forward: Callable[[Tensors], Any], timed: Tensors, seed: int) -> Run:
    """Run `forward` on leaves once; returns the gradient of its outputs by autograd, as often as it is called."""
    with torch.enable_grad():
        leaves = problem.leaves(seed)
        outputs = _tuple(forward(leaves))
    wanted = [t for t in leaves.values() if t is not None and t.requires_grad]
    pairs = [(o, up) for o, up in zip(outputs, problem.upstream(timed), strict=False) if up is not None]
    used, upstream = [o for o, _ in pairs], [up for _, up in pairs]
    return lambda: torch.autograd.grad(used, wanted, upstream, retain_graph=True)


def peers_of(op: Op[Any]) -> list[Peer]:
    """The rivals that the op's family declares."""
    place = op.reference.__module__.rpartition(".")[0] + ".peers"
    try:
        if importlib.util.find_spec(place) is None:
            return []
    except ModuleNotFoundError:
        return []
    declared: Mapping[str, Mapping[str, Maker]] = importlib.import_module(place).PEERS
    return [Peer(name, maker) for name, maker in declared.get(op.name, {}).items()]


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _dense(found: Any) -> list[Tensor]:
    return [tensor.to_dense() if tensor.is_sparse else tensor for tensor in _tuple(found)]
