"""Interleaved rounds of samples until the choice is settled: who is sampled, in which order, and when that ends.

Taking a sample is the caller's business, so this runs on any clock; the arithmetic is in `decide.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.core.times import Metric, Time
from tilewright.tune.decide import Place, Rounds, Settled, estimates, settled

METRICS: tuple[Metric, Metric] = ("call_us", "kernel_us")
Sampler = Callable[[int], tuple[float, float] | None]
"""A pair's (call, kernel) microseconds now; None when it failed, after which it is not asked again."""


@dataclass(frozen=True)
class Effort:
    """How hard to try. A round samples each pair twice, there and back again, so that steady drift cancels."""

    least: int = 4
    close: int = 12
    """At the least where more than one pair is near enough to be chosen."""
    most: int = 36
    seconds: float = 30.0
    sure: float = 0.98
    """A choice is settled when so large a share of resamplings agrees with it, and did so a round before."""
    screen: tuple[float, ...] = (1.6, 1.3)
    """After the first rounds, pairs slower than this times the best by both metrics are not sampled any more."""


EFFORT = Effort()


@dataclass
class Timed:
    """What the rounds found: times by pair, and how sure the choice by each metric is."""

    times: dict[int, Time] = field(default_factory=dict)
    settled: dict[Metric, Settled] = field(default_factory=dict)
    rounds: int = 0


def run(sampler: Sampler, places: Sequence[Place], effort: Effort = EFFORT) -> Timed:
    """Sample all pairs in rounds; then those that matter, until the choice is settled or the effort is spent."""
    taken: dict[Metric, list[dict[int, float]]] = {metric: [] for metric in METRICS}
    alive = [p for p in range(len(places)) if sampler(p) is not None]  # warms all before any sample counts
    active = list(alive)
    result = Timed()
    end = time.monotonic() + effort.seconds
    while active and result.rounds < effort.most:
        failed = _round(sampler, active, taken)
        alive = [p for p in alive if p not in failed]
        result.rounds += 1
        for found in taken.values():
            found[:] = [{p: us for p, us in samples.items() if p in alive} for samples in found]
        if not alive:
            break
        active = [p for p in active if p in alive]
        if result.rounds <= len(effort.screen):
            active = _screened(active, taken, effort.screen[result.rounds - 1])
        if result.rounds < effort.least:
            continue
        before = result.settled
        result.settled = _settled(taken, places)
        enough = result.rounds >= effort.close
        unsure = [
            s for m, s in result.settled.items()
            if not _stands(s, before.get(m), effort.sure) or (len(s.contenders) > 1 and not enough)
        ]  # fmt: skip
        if not unsure or time.monotonic() > end:
            break
        active = sorted(frozenset().union(*(s.contenders for s in unsure)) & set(alive))
    if alive and set(result.settled) != set(METRICS):
        result.settled = _settled(taken, places)
    if not alive:
        return Timed(rounds=result.rounds)
    calls, kernels = (estimates(taken[metric]) for metric in METRICS)
    for p in alive:
        result.times[p] = Time(calls.us[p], kernels.us[p], calls.errors[p], kernels.errors[p])
    return result


def _settled(taken: Mapping[Metric, Rounds], places: Sequence[Place]) -> dict[Metric, Settled]:
    return {metric: settled(found, taken["kernel_us"], places) for metric, found in taken.items()}


def _stands(now: Settled, before: Settled | None, sure: float) -> bool:
    """Sure twice in a row: looking after every round for one lucky moment would find it."""
    return before is not None and now.choice == before.choice and min(now.share, before.share) >= sure


def _round(sampler: Sampler, active: Sequence[int], taken: dict[Metric, list[dict[int, float]]]) -> set[int]:
    """There and back again: A B C C B A. Returns the pairs that failed."""
    samples: dict[int, list[tuple[float, float]]] = {}
    failed: set[int] = set()
    for pair in (*active, *reversed(active)):
        if pair not in failed:
            sample = sampler(pair)
            if sample is None:
                failed.add(pair)
            else:
                samples.setdefault(pair, []).append(sample)
    for place, metric in enumerate(METRICS):
        whole = {p: found for p, found in samples.items() if p not in failed}
        taken[metric].append({p: _both_ways([s[place] for s in found]) for p, found in whole.items()})
    return failed


def _both_ways(samples: Sequence[float]) -> float:
    """Of the way there and the way back; where they differ by more than drift explains, one met an interruption."""
    low, high = min(samples), max(samples)
    return low if high > 1.05 * low else sum(samples) / len(samples)


def _screened(active: Sequence[int], taken: dict[Metric, list[dict[int, float]]], factor: float) -> list[int]:
    kept: set[int] = set()
    for found in taken.values():
        best = {p: min(samples[p] for samples in found if p in samples) for p in active}
        limit = min(best.values()) * factor
        kept |= {p for p, us in best.items() if us <= limit}
    return [p for p in active if p in kept]
