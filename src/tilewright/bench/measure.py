"""How time is measured: one sample at a time by a watch, then statistics over samples.

A watch is a callable that returns the microseconds of one call of what it watches. Kernel time comes from CUDA-graph
replay with inputs rotated through more memory than the L2 holds; call time from the host's clock over batches. Which
kernels are watched, and against whom, is decided in `engine.py`.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tilewright.core.device import device_of

Run = Callable[[], Any]
Watch = Callable[[], float]

BATCH = 500
"""Calls in one sample of call time; fewer where they would take longer than `BATCH_SECONDS`, on large inputs."""
BATCH_SECONDS = 0.25
ROUNDS = 30
COLD_FACTOR = 4
"""Inputs are rotated over this many times the last-level cache."""
MAX_SETS = 256
"""Sets of inputs at most. Where that many do not cover the cache, it is flushed before each sample instead."""
MOST_CALLS = 10
HOT_CALLS = 200
REPLAY_BYTES = 2 << 30
"""A cold replay of large inputs reads about this much: enough for the clock, not more. At most `MOST_CALLS` calls."""
LEAD_CYCLES = 1_000_000
"""The GPU is kept busy this long while the host enqueues a replay, so that no host time is counted."""


@dataclass(frozen=True)
class Spread:
    """Median and interquartile range of samples, in microseconds."""

    median: float
    iqr: float


@dataclass(frozen=True)
class Duel:
    """Two watches, interleaved. `ratio` is theirs over ours, with its 95 % interval: above 1 ours is faster."""

    ours: Spread
    theirs: Spread
    ratio: float
    low: float
    high: float


def spread(samples: Sequence[float]) -> Spread:
    if len(samples) < 2:
        return Spread(samples[0], 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(statistics.median(samples), high - low)


def sample(watch: Watch, count: int = ROUNDS, *, seconds: float = 2.0, least: int = 5) -> Spread:
    """Up to `count` samples; fewer, but at least `least`, where they would take longer than `seconds`."""
    watch()  # the first one pays for what is lazy
    samples: list[float] = []
    end = time.perf_counter() + seconds
    with _collector_off():
        while len(samples) < count and (len(samples) < least or time.perf_counter() < end):
            samples.append(watch())
    return spread(samples)


def duel(ours: Watch, theirs: Watch, rounds: int = ROUNDS) -> Duel:
    """ABBA rounds: drift that is linear over a round cancels in its ratio."""
    ours(), theirs()
    mine: list[float] = []
    others: list[float] = []
    ratios: list[float] = []
    with _collector_off():
        for _ in range(rounds):
            a1, b1, b2, a2 = ours(), theirs(), theirs(), ours()
            mine += [a1, a2]
            others += [b1, b2]
            ratios.append((b1 + b2) / (a1 + a2))
    low, high = interval(ratios)
    return Duel(spread(mine), spread(others), statistics.median(ratios), low, high)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval for the median that assumes nothing of the distribution: two order statistics, by the binomial law.

    Of 30 values the 10th and the 21st cover the median with 95.7 %. Fewer than 6 values cannot give 95 %: all of them.
    """
    ordered = sorted(values)
    n = len(ordered)
    outside, rank = 0.0, 0  # the interval runs from the rank-th smallest to the rank-th largest
    for k in range(n // 2):
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 1 - confidence:
            break
        rank = k
    return ordered[rank], ordered[n - 1 - rank]


def rotation(set_bytes: int, cache_bytes: int) -> tuple[int, bool]:
    """(sets of inputs, whether the cache must be flushed as well) for a cold measurement."""
    wanted = math.ceil(COLD_FACTOR * cache_bytes / max(set_bytes, 1))
    return min(max(wanted, 1), MAX_SETS), wanted > MAX_SETS


@cache
def cache_bytes(device: torch.device) -> int:
    """The last cache before memory: the GPU's L2, the CPU's L3."""
    if device.type == "cuda":
        return device_of("cuda", device.index).l2_bytes or 50 << 20
    for index in (3, 2):
        try:
            text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").read_text(encoding="ascii").strip()
            return int(text.rstrip("KM")) << {"K": 10, "M": 20}[text[-1]]
        except (OSError, ValueError, KeyError):
            continue
    return 32 << 20


def kernel_watch(
    runs: Sequence[Run], device: torch.device, stream: Any, *, size: int = 0, cold: bool, flush: bool = False
) -> Watch:
    """Watch the kernels of `runs`: the same work, each on inputs of `size` bytes (0: small). A hot measurement uses the
    first alone. What `runs` raise propagates."""
    if device.type == "cuda":
        count = len(runs)
        if not cold:
            runs, calls = runs[:1], HOT_CALLS
        elif flush:
            calls = count  # a second rotation would find the first one's lines
        else:
            wanted = min(MOST_CALLS, max(2, REPLAY_BYTES // max(size, 1)))
            calls = count * math.ceil(wanted / count)
        return GraphWatch(runs, calls, device, stream, flush=flush)
    return LoopWatch(runs[0])


class GraphWatch:
    """Device time of one call, by replay of a CUDA graph that holds many.

    Outputs of one rotation are kept apart, so that writes are as cold as reads.
    """

    def __init__(self, runs: Sequence[Run], calls: int, device: torch.device, stream: Any, *, flush: bool) -> None:
        self.device, self.stream, self.calls = device, stream, calls
        count = len(runs)
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            with torch.cuda.stream(stream):
                for run in (*runs[:2], *runs[:2]):
                    run()
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            kept: list[Any] = [None] * count
            with torch.cuda.graph(self.graph, stream=stream):
                for i in range(self.calls):
                    kept[i % count] = runs[i % count]()
            self.kept = kept, runs
            self.flushed = _flush_buffer(device) if flush else None
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)

    def __call__(self) -> float:
        start, end = self.events
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if self.flushed is not None:
                self.flushed.amax()  # reads only: dirty lines would be written back during the measurement
            torch.cuda._sleep(LEAD_CYCLES)
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls


class EventWatch:
    """Device time from the first kernel of a call to the last, gaps included, of calls that no graph can hold because
    the host waits in them."""

    def __init__(self, runs: Sequence[Run], device: torch.device, stream: Any, calls: int = 20) -> None:
        self.device, self.stream, self.runs = device, stream, runs
        self.calls = calls * len(runs)
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # inputs were made on another stream
            with torch.cuda.stream(stream):
                self.kept = [run() for run in (*runs, *runs)]

    def __call__(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            start.record()
            for i in range(self.calls):
                self.kept[i % len(self.runs)] = self.runs[i % len(self.runs)]()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    """What is read to fill the cache with something else; one a device, since many watches live at a time."""
    return torch.zeros(COLD_FACTOR * cache_bytes(device) // 4, dtype=torch.int32, device=device)


class LoopWatch:
    """Host time of one call on a CPU, where the call is the work: a loop long enough for the clock."""

    def __init__(self, run: Run, seconds: float = 0.005, most: int = 10_000) -> None:
        self.run = run
        run()
        start = time.perf_counter()
        run()
        once = max(time.perf_counter() - start, 1e-7)
        self.calls = min(max(int(seconds / once), 1), most)

    def __call__(self) -> float:
        run, calls = self.run, self.calls
        start = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            run()
        return (time.perf_counter() - start) * 1e6 / calls


class CallWatch:
    """Host time of one call in a batch of `BATCH`, the device idle before and drained after."""

    def __init__(self, run: Run, device: torch.device, batch: int = BATCH) -> None:
        self.run, self.device, self.batch = run, device, batch

    def __call__(self) -> float:
        run = self.run
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in itertools.repeat(None, self.batch):
            run()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) * 1e6 / self.batch


def call_watch(run: Run, device: torch.device, batch: int = BATCH) -> Watch:
    """Watch whole calls as a user makes them."""
    return CallWatch(run, device, batch) if device.type == "cuda" else LoopWatch(run)


def call_time(run: Run, device: torch.device, *, count: int = 10, seconds: float = 2.0) -> Spread:
    """Time of a call as the host sees it."""
    batch = BATCH
    if device.type == "cuda":
        few = CallWatch(run, device, 5)
        few()
        batch = max(10, min(BATCH, int(BATCH_SECONDS * 1e6 / few())))
    return sample(call_watch(run, device, batch), count, seconds=seconds, least=3)


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do, measured: bytes read plus written a second by a copy, bf16 operations by a product."""

    copy_tb_s: float
    matmul_tflops: float

    def floor_us(self, bytes: int, operations: int) -> float:
        """The least time for that many bytes and operations."""
        return max(bytes / self.copy_tb_s, operations / self.matmul_tflops) / 1e6


@cache
def ceilings(device: torch.device) -> Ceilings:
    """Measured once a process and device."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return Ceilings(_copy_rate(device, stream), _matmul_rate(device, stream))


def _copy_rate(device: torch.device, stream: Any) -> float:
    """The better of a copy replayed from a graph and one launched by itself: on an H100 the latter is 25 % faster."""
    size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8) if stream is not None else 128 << 20
    generator = torch.Generator(device=device).manual_seed(0)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)
    target = torch.empty_like(source)
    took = sample(kernel_watch([lambda: target.copy_(source)], device, stream, size=size, cold=True), 20, seconds=1.0)
    best = took.median
    if stream is not None:
        best = min(best, sorted(_event_us(lambda: target.copy_(source), device) for _ in range(20))[10])
    return 2 * size / best / 1e6


def _event_us(run: Run, device: torch.device) -> float:
    """Microseconds between two events around one launch; for work that is far longer than a launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _matmul_rate(device: torch.device, stream: Any) -> float:
    side = 8192 if stream is not None else 512
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).bfloat16() for _ in range(2))
    took = sample(kernel_watch([lambda: a @ b], device, stream, size=4 * side**2, cold=True), 20, seconds=1.0)
    return 2 * side**3 / took.median / 1e6


@contextmanager
def _collector_off() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
