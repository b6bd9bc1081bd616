"""What a set of times leads to, and how sure that is. Pure arithmetic: nothing here runs, reads or writes anything.

`choice` is selection's own rule (`core/selection.py`) over times alone: within a kernel the first config inside the tie
band of its best, among kernels the first declared inside the tie band of the fastest.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.core.times import TIE_BAND, tied

SWEEPS = 3

Rounds = Sequence[Mapping[int, float]]
"""Samples by round: {place of the pair: microseconds}."""


@dataclass(frozen=True)
class Place:
    """Where a pair stands by declaration: its kernel's rank, then its config's place in the kernel's list."""

    kernel: tuple[int, ...]
    config: int


def choice(times: Mapping[int, float], places: Sequence[Place], errors: Mapping[int, float] | None = None) -> int:
    """The pair that selection takes, given each one's time and the relative standard error of it."""
    errors = errors or {}
    kernels: dict[tuple[int, ...], list[int]] = {}
    for pair in times:
        kernels.setdefault(places[pair].kernel, []).append(pair)
    served: list[int] = []
    for pairs in kernels.values():
        best = min(times[p] for p in pairs)
        equals = [p for p in pairs if tied(times[p], errors.get(p, 0.0), best)]
        served.append(min(equals, key=lambda p: places[p].config))
    best = min(times[p] for p in served)
    equals = [p for p in served if tied(times[p], errors.get(p, 0.0), best)]
    return min(equals, key=lambda p: places[p].kernel)


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


def estimates(rounds: Rounds) -> dict[int, tuple[float, float]]:
    """Each pair's time, the middle of its samples without the drift, and the relative standard error of it."""
    logs = {pair: list(samples.values()) for pair, samples in steady(rounds).items()}
    return {pair: (math.exp(middle(values)), error(values)) for pair, values in logs.items()}


@dataclass(frozen=True)
class Settled:
    """How sure a choice is: `share` of the resamplings agree with it; `contenders` are the pairs that could matter."""

    choice: int
    share: float
    contenders: frozenset[int]


def settled(rounds: Rounds, places: Sequence[Place], *, draws: int = 64, near: float = 0.015) -> Settled:
    """Draw rounds again with replacement and see how often the choice stays the same.

    The generator is seeded: the same samples always lead to the same answer.
    """
    samples = steady(rounds)
    best = {pair: math.exp(middle(list(logs.values()))) for pair, logs in samples.items()}
    errors = {pair: error(list(logs.values())) for pair, logs in samples.items()}
    chosen = choice(best, places, errors)
    fastest = min(best.values())
    near_ones = (pair for pair, us in best.items() if tied(us, errors[pair], fastest, TIE_BAND + near))
    contenders = frozenset({chosen, *near_ones})
    generator = random.Random(len(rounds))
    numbers = sorted({number for pair in contenders for number in samples[pair]})
    agreed = 0
    for _ in range(draws):
        drawn = generator.choices(numbers, k=len(numbers))
        found = {}
        for pair in contenders:
            logs = [samples[pair][n] for n in drawn if n in samples[pair]] or list(samples[pair].values())
            found[pair] = math.exp(middle(logs))
        agreed += choice(found, places, errors) == chosen
    return Settled(chosen, agreed / draws, contenders)
