"""Eight processes that compile and tune into one cache, three of which are killed; started by `test_cache.py`.

A program of its own, since compiling needs a process in which Triton does not interpret. The children are forked from
one that has imported everything, to keep the test short: the library itself never forks. Prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from tilewright.backends import triton
from tilewright.core import artifacts, registry, times
from tilewright.core.cache import disk
from tilewright.core.device import target_device
from tilewright.core.launch import Config, Launch
from tilewright.tune.classes import call_of

PROCESSES, RECORDS = 8, 10
KILLED = {0: 1, 3: 3, 6: 6}
"""Each is killed once its log has so many lines: the first in mid-build, the others between or in updates."""
CLASS = "one class for all"


def child(number: int, logs: Path, start: int) -> None:
    os.read(start, 1)
    op, device = registry.op("rms_norm"), target_device("sm_90")
    call = call_of(op, (64, 1024), torch.bfloat16, device)
    backend = registry.backend("triton")
    kernel = next(k for k in registry.kernels_of(op.name) if k.backend == "triton")
    configs = kernel.configs_for(call)[:3]
    with open(logs / f"{number}.log", "w", buffering=1) as log:
        if number == 0:
            hold_a_build(log)
        # whoever is to be killed does not end before that, however late the parent looks
        for record in range(1000 if number in KILLED else RECORDS):
            made = kernel.load()(call, configs[(record + number) % len(configs)])
            for launch in [made] if isinstance(made, Launch) else made:
                compiled = backend.compile(launch, device)
                assert compiled.image[:4] == b"\x7fELF"
            times.record(kernel, Config(process=number, record=record), op.name, CLASS, device, 1.0 + number, 1.0)
            print(f"recorded {record}", file=log)
            time.sleep(0.01)
        print("done", file=log)


def hold_a_build(log: IO[str]) -> None:
    """Make this process's first build hang, with the lock that the others need."""

    def hangs() -> artifacts.Artifact:
        print("building", file=log)
        time.sleep(600)
        raise AssertionError("nobody killed the process that holds a build")

    triton._cached = lambda key, build: artifacts.cached(f"triton {key}", hangs)


def count_builds(logs: Path) -> None:
    """Note each build, by key, in a file that all share: short appends are atomic."""
    store = artifacts.disk().store

    def noted(kind: str, key: str, payload: bytes) -> None:
        if kind == artifacts.KIND:
            with open(logs / "builds", "a") as log:
                log.write(key + "\n")
        store(kind, key, payload)

    artifacts.disk().store = noted  # type: ignore[method-assign]


def written(logs: Path, number: int) -> int:
    path = logs / f"{number}.log"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)


def main() -> None:
    logs = Path(sys.argv[1])
    logs.mkdir(parents=True)
    count_builds(logs)
    first, rest = os.pipe(), os.pipe()
    children = []
    for number in range(PROCESSES):
        start = (rest if number else first)[0]
        pid = os.fork()
        if pid == 0:
            try:
                child(number, logs, start)
            except BaseException as error:  # noqa: BLE001  a child ends here, whatever it raised
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    os.write(first[1], b"x")
    wait_for(lambda: written(logs, 0) >= 1)
    os.write(rest[1], b"x" * (PROCESSES - 1))
    time.sleep(0.3)  # the others wait for the build
    for number, lines in KILLED.items():
        wait_for(lambda number=number, lines=lines: written(logs, number) >= lines)
        os.kill(children[number], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    cache = disk()
    (place,) = cache.load_json("times", f"rms_norm {CLASS}").values()
    lost = []
    for number in range(PROCESSES):
        path = logs / f"{number}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        lost += [
            f"{number}: {line}" for line in lines
            if line.startswith("recorded")
            and not any(pair.endswith(f"|process={number} record={line.split()[1]}") for pair in place)
        ]  # fmt: skip
    builds = Counter((logs / "builds").read_text().split("\n")[:-1])
    print(
        json.dumps(
            {
                "killed": codes.count(-signal.SIGKILL),
                "survivors": codes.count(0),
                "bad_entries": cache.health()[2],
                "lost": lost,
                "builds": builds,
                "keys": len(builds),
                "artifacts": len(list(cache.root.glob("artifacts/*.entry"))),
            }
        )
    )


if __name__ == "__main__":
    main()
