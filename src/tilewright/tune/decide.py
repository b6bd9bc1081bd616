"""What a set of times leads to, and how sure that is. Pure arithmetic: nothing here runs, reads or writes anything.

`choice` is selection's own rule (`core/selection.py`) over times alone: within a kernel the first config inside the tie
band of its best kernel time, among kernels the first declared inside the tie band of the fastest by the given metric.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.core.times import TIE_BAND, tied

SWEEPS = 3
NEAR = 0.015
"""Pairs so far outside the tie band could still be chosen, had the samples come out otherwise."""

Rounds = Sequence[Mapping[int, float]]
"""Samples by round: {place of the pair: microseconds}."""


@dataclass(frozen=True)
class Place:
    """Where a pair stands by declaration: its kernel's rank, then its config's place in the kernel's list."""

    kernel: tuple[int, ...]
    config: int


@dataclass(frozen=True)
class Times:
    """Microseconds by pair, with their relative standard errors where these are known."""

    us: Mapping[int, float]
    errors: Mapping[int, float] = field(default_factory=dict)

    def tied(self, pairs: Iterable[int], band: float = TIE_BAND) -> list[int]:
        """Those not shown to be slower than the best of them by more than the band."""
        pairs = list(pairs)
        best = min(self.us[p] for p in pairs)
        return [p for p in pairs if tied(self.us[p], self.errors.get(p, 0.0), best, band)]


def choice(times: Times, kernels: Times, places: Sequence[Place]) -> int:
    """The pair that selection takes by `times`, of the metric asked for; configs are told apart by kernel time."""
    served = [min(equals, key=lambda p: places[p].config) for equals in _of_each_kernel(kernels, places, TIE_BAND)]
    return min(times.tied(served), key=lambda p: places[p].kernel)


def _of_each_kernel(kernels: Times, places: Sequence[Place], band: float) -> list[list[int]]:
    """Of each kernel, the pairs inside the band of its best."""
    found: dict[tuple[int, ...], list[int]] = {}
    for pair in kernels.us:
        found.setdefault(places[pair].kernel, []).append(pair)
    return [kernels.tied(pairs, band) for pairs in found.values()]


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half: as deaf to outliers as a median, and steadier."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    return math.fsum(kept) / len(kept)


def steady(rounds: Rounds) -> dict[int, dict[int, float]]:
    """{pair: {round: log of its sample}} with the machine's drift taken out, pairs against rounds by turns.

    A pair that was dropped after two rounds is thereby comparable with those that ran twenty.
    """
    logs = [{pair: math.log(us) for pair, us in samples.items()} for samples in rounds if samples]
    pairs = sorted({pair for samples in logs for pair in samples})
    drift = [0.0] * len(logs)
    for _ in range(SWEEPS):
        level = {p: middle([s[p] - d for s, d in zip(logs, drift, strict=True) if p in s]) for p in pairs}
        drift = [statistics.median(us - level[pair] for pair, us in samples.items()) for samples in logs]
        usual = statistics.median(drift)
        drift = [d - usual for d in drift]
    return {p: {n: s[p] - drift[n] for n, s in enumerate(logs) if p in s} for p in pairs}


def error(values: Sequence[float]) -> float:
    """The standard error of their middle, from the quartiles: outliers do not count."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return 0.8 * (upper - lower) / math.sqrt(len(values))


def estimates(rounds: Rounds) -> Times:
    """Each pair's time, the middle of its samples without the drift."""
    return _times(steady(rounds))


@dataclass(frozen=True)
class Settled:
    """How sure a choice is: `share` of the resamplings agree with it; `contenders` are the pairs that could matter."""

    choice: int
    share: float
    contenders: frozenset[int]


def settled(rounds: Rounds, kernel_rounds: Rounds, places: Sequence[Place], *, draws: int = 64) -> Settled:
    """Draw rounds again with replacement and see how often the choice by `rounds`' metric stays the same.

    The generator is seeded: the same samples always lead to the same answer.
    """
    samples, inner = steady(rounds), steady(kernel_rounds)
    times, kernels = _times(samples), _times(inner)
    chosen = choice(times, kernels, places)
    near = TIE_BAND + NEAR
    close = _of_each_kernel(kernels, places, near)
    served = {min(pairs, key=lambda p: times.us[p]): pairs for pairs in close}
    contenders = frozenset({chosen}.union(*(served[p] for p in times.tied(served, near))))
    generator = random.Random(len(rounds))
    numbers = sorted({number for pair in contenders for number in samples[pair]})
    agreed = 0
    for _ in range(draws):
        drawn = generator.choices(numbers, k=len(numbers))
        found = (
            {
                p: math.exp(middle([logs[p][n] for n in drawn if n in logs[p]] or list(logs[p].values())))
                for p in contenders
            }
            for logs in (samples, inner)
        )
        agreed += choice(Times(next(found), times.errors), Times(next(found), kernels.errors), places) == chosen
    return Settled(chosen, agreed / draws, contenders)


def _times(samples: Mapping[int, Mapping[int, float]]) -> Times:
    logs = {pair: list(found.values()) for pair, found in samples.items()}
    return Times(
        {p: math.exp(middle(found)) for p, found in logs.items()}, {p: error(found) for p, found in logs.items()}
    )
