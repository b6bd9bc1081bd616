"""Compare the tile compiler's programs with their meaning, on as many random programs as asked for.

    python scripts/tile_random.py [--count 10000] [--first 1000000] [--json record.json] [--seconds 3600]

Each program is run by the interpreter of tiles, and must give the same bits when it is compiled by the machine's C++
compiler and run, when it is lowered for one thread, and when it is lowered for the threads of a GPU with its barriers
and shared arrays; the last two are run by the emulator, which also looks for races. No GPU is needed, and one core.

The record is written after each batch. With a record of this very compiler a run goes on behind it; one of another
compiler is refused, since programs that an older one passed say nothing of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.tile import LowerError, TileError
from tilewright.tile.dtypes import DType
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import Order, run
from tilewright.tile.render.cpu import lanes_of
from tilewright.tile.runtime import cpu
from tilewright.tile.runtime.arguments import memory_of, pack
from tilewright.tile.runtime.store import compiler_digest
from tilewright.tile.runtime.target import need_compiler, this_cpu
from tilewright.tile.schedule import Schedule
from tilewright.tile.sync import barriers
from tilewright.tile.sync.shared import arrange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tile"))
from random_programs import Sample, sample

BATCH = 25
"""Programs a run of the C++ compiler."""
QUICK = tuple("-O1" if flag == "-O3" else flag for flag in cpu.FLAGS)
QUICKEST = tuple("-O0" if flag == "-O3" else flag for flag in cpu.FLAGS)
OPTIMISED = 4
"""One batch of so many is compiled with the optimiser, which takes two thirds of the time."""
SCHEDULES = tuple(Schedule(*s) for s in ((32, 1, 4), (64, 1, 2), (128, 1, 1), (32, 4, 8)))
BLOCK = 16


def program_of(seed: int) -> Sample:
    """Small programs and large ones."""
    return sample(seed, 6 + seed % 12)


def same(mine: Any, other: Any, dtype: DType) -> bool:
    """Whether all elements are equal in their bits, or both NaN."""
    a, b = dtype.decode(np.ascontiguousarray(mine)), dtype.decode(np.ascontiguousarray(other))
    if not dtype.floating:
        return np.array_equal(a, b)
    return bool(((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))).all())


def copy_of(array: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(array, np.ndarray) or array.strides[-1] == array.itemsize:
        return np.copy(array) if isinstance(array, np.ndarray) else array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def outcome(found: Sample, go: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The arguments after a run, or what it refused."""
    mine = {n: copy_of(v) for n, v in found.arguments.items()}
    try:
        go(mine)
    except TileError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return mine


def differs(found: Sample, wanted: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """What is different, in words; empty where nothing is."""
    if "error" in wanted or "error" in mine:
        return "" if wanted.get("error") == mine.get("error") else str(mine.get("error") or wanted.get("error"))
    return ", ".join(n for n, dtype in found.types.items() if not same(wanted[n], mine[n], dtype))


def too_large(found: Sample, schedule: Schedule) -> bool:
    """Whether a block of so many instances has not the shared memory for their arrays: one has."""
    try:
        arrange(barriers.insert(lower(found.program, schedule.vector, schedule)))
    except LowerError as error:
        return schedule.instances > 1 and "shared memory" in str(error)
    return False


def batch(first: int, optimised: bool) -> list[dict[str, Any]]:
    """The mismatches of one batch of seeds."""
    samples = [program_of(seed) for seed in range(first, first + BATCH)]
    lanes, wrong = lanes_of(this_cpu().features), []
    compiled = cpu.compile_all([s.program for s in samples], flags=QUICK if optimised else QUICKEST)
    for seed, found, made in zip(range(first, first + BATCH), samples, compiled, strict=True):
        schedule, how = SCHEDULES[seed % len(SCHEDULES)], {"outputs": found.outputs}
        schedule = replace(schedule, instances=1) if too_large(found, schedule) else schedule

        def call(arguments: dict[str, Any], made: Any = made, found: Sample = found) -> None:
            memories = {n: memory_of(arguments[n], dtype) for n, dtype in found.types.items()}
            scalars = {n: v for n, v in arguments.items() if n not in memories}
            made(pack(made.parameters, memories, scalars), found.grid, 1)

        def threads(arguments: dict[str, Any], found: Sample = found, schedule: Schedule = schedule) -> None:
            function = barriers.insert(lower(found.program, schedule.vector, schedule))
            arena = arrange(function).offsets
            emulator.run(function, arguments, found.grid, outputs=found.outputs, arena=arena)

        def meaning(order: Order, found: Sample = found, how: Any = how) -> dict[str, Any]:
            return outcome(found, lambda a: run(found.program, a, found.grid, order=order, **how))

        one = meaning(Order(lanes, 4, BLOCK))
        alone = outcome(found, lambda a: emulator.run(lower(found.program, lanes), a, found.grid, **how))  # noqa: B023
        many = meaning(Order(schedule.vector, 1, BLOCK, schedule.threads))
        for what, wanted, mine in (
            ("compiled", one, outcome(found, call)), ("one thread", one, alone),
            (f"{schedule.threads} threads", many, outcome(found, threads)),
        ):  # fmt: skip
            if said := differs(found, wanted, mine):
                wrong.append({"seed": seed, "run": what, "differs": said})
    return wrong


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(), "numpy": np.__version__, "c++": need_compiler().version,
        "cpu": str(this_cpu()), "compiler": compiler_digest()[:16],
    }  # fmt: skip


def begun(path: Path, first: int) -> dict[str, Any]:
    """The record to go on with."""
    fresh = {"first_seed": first, "programs": 0, "runs_of_each": ["compiled", "one thread", "threads"],
             "mismatches": [], "seconds": 0.0, **versions()}  # fmt: skip
    if not path.exists():
        return fresh
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    changed = [k for k in ("first_seed", *versions()) if found.get(k) != fresh[k]]
    if changed:
        raise SystemExit(f"{path} is of another run ({', '.join(changed)}): remove it, or name another")
    return found


def save(path: Path, record: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10000, help="programs in all, those of the record included")
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed; tests begin at 0")
    parser.add_argument("--json", type=Path, default=Path("tile-random.json"), help="the record")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after so many")
    chosen = parser.parse_args()
    os.nice(19)
    record, start = begun(chosen.json, chosen.first), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nobody else will want these kernels
        while record["programs"] < chosen.count and time.monotonic() - start < chosen.seconds:
            at, done = time.monotonic(), record["programs"]
            record["mismatches"] += batch(chosen.first + done, done // BATCH % OPTIMISED == 0)
            record["programs"], record["seconds"] = done + BATCH, round(record["seconds"] + time.monotonic() - at, 1)
            save(chosen.json, record)
            print(f"{record['programs']} programs, {len(record['mismatches'])} mismatches, {record['seconds']:.0f} s",
                  flush=True)  # fmt: skip
    return 1 if record["mismatches"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
