"""Run the tile compiler's kernels on an NVIDIA GPU: bits against the interpreter, values against torch, and times.

    python scripts/tile_gpu.py [--seconds 110] [--random 60] [--only norm,swiglu] [--json tile_gpu.jsonl]

Each kernel, shape and dtype runs with several schedules: a few rows against the interpreter bit for bit, all rows
against torch, then times by replaying CUDA graphs over inputs that together are four times the second-level cache,
beside a device copy of as many bytes. Then random programs must give the interpreter's bits. In the time that is left
torch.compile is timed likewise. A case that fails is a line; one that takes the GPU down or hangs is one too,
and a new process goes on behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tile_gpu_cases import KINDS, SHAPES, Case, check, random_case, random_schedule
from tilewright.tile.errors import TileError
from tilewright.tile.runtime import cuda, nvrtc
from tilewright.tile.runtime.arguments import pack
from tilewright.tile.schedule import Schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tile"))
import random_programs as generate

Tensor = torch.Tensor
HANG = 10.0
"""Seconds without a result after which a case is given up."""


# Fast ------------------------------------------------------------------------------------------------------------


def graph_us(calls: list[Callable[[], Any]], launches: int = 24) -> float:
    """Median time of one call, replayed in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(launches, len(calls))
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times)


def moved(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def sets(case: Case) -> list[dict[str, Tensor]]:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    first = case.tensors(0)
    count = min(16, max(2, -(-4 * cache // moved(first))))
    return [first, *(case.tensors(i) for i in range(1, count))]


_copies: dict[int, float] = {}


def copy_us(size: int) -> float:
    """A device copy that moves as many bytes, half read and half written."""
    if size not in _copies:
        half = size // 2
        count = min(16, max(2, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size)))
        pairs = torch.zeros(count, 2, half, dtype=torch.uint8, device="cuda")
        _copies[size] = graph_us([lambda p=p: p[0].copy_(p[1]) for p in pairs])
    return _copies[size]


# The run ---------------------------------------------------------------------------------------------------------


class Log:
    """Lines on the screen and in a file; how far the work is, for the process that goes on after this one."""

    def __init__(self, path: str, start: int, end: float) -> None:
        self.file, self.done, self.end = open(path, "a" if start else "w", encoding="utf-8"), start, end  # noqa: SIM115
        self.begun, self.what, self.limit = time.time(), "", HANG
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, row: dict[str, Any], text: str) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(text, flush=True)

    def begin(self, what: str, limit: float = HANG) -> None:
        self.begun, self.what, self.limit = time.time(), what, limit

    def wait(self, future: Future[cuda.Compiled]) -> cuda.Compiled:
        """What is compiled beside the GPU's work: no case hangs meanwhile."""
        what, self.what = self.what, ""
        found = future.result(60)
        self.begin(what)
        return found

    def over(self) -> bool:
        return time.time() > self.end

    def onward(self, why: str) -> None:
        """The rest in a new process: this one's GPU context is lost."""
        self.say({"case": self.what, "failed": why}, f"{self.what:<52} LOST: {why}; going on in a new process")
        given = [a for a in sys.argv[1:] if not a.startswith(("--start", "--end"))]
        os.execv(sys.executable, [sys.executable, sys.argv[0], *given, f"--start={self.done + 1}", f"--end={self.end}"])

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            if self.what and time.time() - self.begun > self.limit:
                self.onward(f"nothing came back in {self.limit:.0f} s")


def guarded(log: Log, what: str, work: Callable[[], None]) -> None:
    log.begin(what)
    try:
        work()
    except Exception as error:  # noqa: BLE001 - one case, one line
        short = " ".join(str(error).split())[:300]
        try:
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the context is lost
            log.onward(short)
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.say({"case": what, "failed": f"{type(error).__name__}: {error}"},
                f"{what:<52} FAILED: {type(error).__name__} ({where.name}:{where.lineno}): {short}")  # fmt: skip
    log.begin("")
    log.done += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--random", type=int, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="tile_gpu.jsonl")
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--emit", action="store_true", help="compile everything for sm_90 and stop; needs no GPU")
    given = parser.parse_args()
    kinds = [k for k in KINDS if not given.only or k in given.only.split(",")]
    cases = [Case(k, *shape, d) for d in ("bfloat16", "float32") for shape in SHAPES for k in kinds]
    jobs = [(c, s) for c in cases for s in c.schedules()]
    if given.emit:
        emit(jobs, given.random)
        return
    arch = cuda.Driver.get().arch()
    log = Log(given.json, given.start, given.end or time.time() + given.seconds)
    facts = {"gpu": torch.cuda.get_device_name(0), "arch": arch, "compiler": nvrtc.version()}
    facts["torch"] = torch.__version__
    log.say(facts, str(facts))
    with ThreadPoolExecutor(max_workers=8) as pool:
        made = [pool.submit(lambda c=c, s=s: cuda.compile(c.program(s), s, arch)) for c, s in jobs]
        every = [pool.submit(lambda i=i: cuda.compile(generate.sample(i).program, random_schedule(i), arch))
                 for i in range(given.random)]  # fmt: skip
        work(log, given.random, every, jobs, made)
        for left in (*every, *made):
            left.cancel()
    log.begin("")
    os._exit(0)  # compilers may still be at work


def work(
    log: Log, seeds: int, every: list[Future[cuda.Compiled]], jobs: list[tuple[Case, Schedule]],
    made: list[Future[cuda.Compiled]],
) -> None:  # fmt: skip
    ran: list[int] = []
    wrong: list[int] = []

    def one(seed: int) -> None:
        if random_case(seed, log.wait(every[seed]))["bits"]:
            wrong.append(seed)
        ran.append(seed)

    print(f"{'case':<36} {'threads x instances, vector':>10} regs spill     us   GB/s of copy  bits values")
    held: dict[Case, list[dict[str, Tensor]]] = {}
    best: dict[Case, float] = {}

    def timed(case: Case, schedule: Schedule, future: Future[cuda.Compiled]) -> None:
        kernel = log.wait(future)
        if case not in held:
            held.clear()
            torch.cuda.empty_cache()
            held[case] = sets(case)
        tensors = held[case]
        said = check(case, schedule, kernel, tensors[0])
        packed = [pack(kernel.parameters, case.memory(t), {"eps": 1e-6}) for t in tensors]
        calls = [lambda p=p: kernel(p, case.grid(schedule)) for p in packed]
        size, us = moved(tensors[0]), graph_us(calls)
        copied = copy_us(size)
        best[case] = min(us, best.get(case, math.inf))
        row = {"case": case.name, "schedule": schedule.json(), "us": us, "gbs": size / us / 1e3, "copy_us": copied,
               "of_copy": copied / us, "registers": kernel.cubin.registers, "spills": kernel.cubin.spills,
               "stack": kernel.cubin.stack, "shared": kernel.source.shared, **said}  # fmt: skip
        log.say(row, f"{case.name:<36} {schedule.threads:>5}x{schedule.instances},{schedule.vector:<3}"
                     f" {kernel.cubin.registers:>4} {kernel.cubin.spills + kernel.cubin.stack:>5} {us:>7.2f}"
                     f" {size / us / 1e3:>6.0f} {copied / us:>6.2f}   {said['bits'] or 'same'} "
                     f"{said['values'] or 'close'}")  # fmt: skip

    for i, ((case, schedule), future) in enumerate(zip(jobs, made, strict=True)):
        if i < log.done:
            continue
        if log.over():
            print(f"time is up: {len(jobs) - i} of {len(jobs)} not run")
            return
        guarded(log, f"{case.name} {schedule.threads}x{schedule.instances},{schedule.vector}",
                lambda c=case, s=schedule, f=future: timed(c, s, f))  # fmt: skip
    held.clear()
    begun = time.time()
    for seed in range(max(0, log.done - len(jobs)), seeds):
        if log.over():
            break
        guarded(log, f"random program {seed}", lambda seed=seed: one(seed))
    if ran:
        log.say({"random": ran, "wrong": wrong},
                f"random programs: {len(ran)} run, {len(wrong)} not the interpreter's bits {wrong}, "
                f"{time.time() - begun:.1f} s")  # fmt: skip
    for i, case in enumerate(c for c in dict.fromkeys(c for c, _ in jobs) if c.kind != "swiglu_flat"):
        if seeds + len(jobs) + i < log.done:
            continue
        if log.over():
            print(f"time is up: torch.compile not run from {case.name} on")
            return
        guarded(log, f"torch.compile {case.name}", lambda c=case: compiled(log, c, best))


def compiled(log: Log, case: Case, best: dict[Case, float]) -> None:
    kind = KINDS[case.kind]
    log.begin(log.what, 60.0)
    torch._dynamo.reset()
    function = torch.compile(kind.torch, dynamic=False)
    tensors = sets(case)
    function(*(tensors[0][n] for n in kind.inputs))
    us = graph_us([lambda t=t: function(*(t[n] for n in kind.inputs)) for t in tensors])
    mine = best.get(case, math.nan)
    log.say({"case": case.name, "torch_compile_us": us, "tile_us": mine},
            f"{case.name:<36} torch.compile {us:>7.2f} us, tile {mine:>7.2f} us, {us / mine:.2f}x")  # fmt: skip


def emit(jobs: list[tuple[Case, Schedule]], seeds: int) -> None:
    """Compile for sm_90 and print what ptxas said."""
    for seed in range(seeds):
        try:
            found = cuda.compile(generate.sample(seed).program, random_schedule(seed), "sm_90").cubin
            if found.spills or found.stack:
                print(f"random {seed}: {found.registers} registers, {found.spills} spilled, stack {found.stack}")
        except TileError as error:
            print(f"random {seed}: {error}")
    for case, schedule in jobs:
        begun = time.time()
        made = cuda.compile(case.program(schedule), schedule, "sm_90")
        print(f"{case.name:<40} {schedule} {made.cubin.registers} registers, {made.cubin.spills} spilled, stack "
              f"{made.cubin.stack}, shared {made.source.shared}, {1e3 * (time.time() - begun):.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
