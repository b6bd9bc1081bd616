"""Measure on an NVIDIA GPU what decides whether to fuse: copies by width and by part of a sector that is used, what
arithmetic takes, what a launch takes, and kernels with a fragment fused, fused through shared memory, and apart.

    python scripts/tile_fusion.py --out tile_fusion.jsonl [--seconds 230] [--only "add > norm"]
    python scripts/tile_fusion.py --emit       # compile everything for sm_90; needs no GPU
    python scripts/tile_fusion.py --emulate    # small cases in the emulator: both forms must give the same values

Times are a kernel's own, by replaying CUDA graphs over inputs that together are four times the second-level cache; of
two kernels apart, those of the pair one behind the other, each with its best schedule. The values of both forms are
compared. A case that fails is a line too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tile_fusion_cases import FP8, INT8, TORCH, Case, cases, tiny
from tile_fusion_probes import Probe, copy, probes
from tile_gpu import graph_us
from tilewright import tile
from tilewright.tile.oracle import emulator
from tilewright.tile.runtime import cuda, nvrtc
from tilewright.tile.runtime.arguments import Memory, pack
from tilewright.tile.schedule import Schedule

Tensor = torch.Tensor


# The run -------------------------------------------------------------------------------------------------------


Forms = dict[str, list[tuple[Schedule, cuda.Compiled | str]]]
"""By form: each schedule, and what was compiled with it or why nothing was."""


def probe_compiled(index: int, arch: str) -> cuda.Compiled:
    """In a process of its own."""
    probe = list(probes())[index]
    made = cuda.compile(probe.program, probe.schedule, arch)
    probe.proven(made)
    return made


def case_compiled(text: str, arch: str) -> Forms:
    """In a process of its own."""
    case = next(c for c in cases() if c.text == text)
    found: Forms = {}
    for form, program in case.programs.items():
        found[form] = []
        for schedule in case.schedules(form):
            try:
                found[form].append((schedule, cuda.compile(program, schedule, arch)))
            except tile.TileError as error:
                found[form].append((schedule, str(error)[:300]))
    return found


def memory(tensor: Tensor) -> Memory:
    element = next(d for d, other in TORCH.items() if other == tensor.dtype)
    return Memory(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), element)


def sets(make: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    first = make(0)
    size = sum(t.untyped_storage().nbytes() for t in first.values())
    count = min(16, max(2, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size)))
    return [first, *(make(i) for i in range(1, count))]


def ready(kernel: cuda.Compiled, tensors: dict[str, Tensor], grid: tuple[int, int, int]) -> Callable[[], None]:
    packed = pack(kernel.parameters, {n: memory(t) for n, t in tensors.items()}, {})
    return lambda: kernel(packed, grid)


def facts_of(kernel: cuda.Compiled) -> dict[str, Any]:
    cubin = kernel.cubin
    return {"registers": cubin.registers, "spills": cubin.spills, "shared": kernel.source.shared}


def probed(probe: Probe, future: Future[cuda.Compiled]) -> dict[str, Any]:
    kernel = future.result(200)
    generator = torch.Generator("cuda").manual_seed(0)
    held = sets(lambda i: {n: s.tensor(probe.rows, probe.columns, generator, "cuda") for n, s in probe.specs.items()})
    us = graph_us([ready(kernel, t, (probe.rows // probe.block, 1, 1)) for t in held])
    if probe.kernel is copy and not torch.equal(held[0]["x"], held[0]["y"]):
        raise ValueError("a copy is none")
    size = sum(t.numel() * t.element_size() for t in held[0].values())
    return {**probe.name, "rows": probe.rows, "columns": probe.columns, "schedule": probe.schedule.json(), "us": us,
            "bytes": size, "gbs": size / us / 1e3, **facts_of(kernel)}  # fmt: skip


def far(case: Case, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, str]:
    """Outputs of which more than one element in a thousand is further apart than rounding in between explains."""
    found = {}
    for name, spec in case.specs.items():
        if not spec.output or name.endswith("_between"):
            continue
        a, b = one[name].float(), other[name].float()
        bound = (
            2.0 ** (-3 if spec.dtype == FP8 else -5) * b.abs()
            + 2.0**-6 * b.abs().mean()
            + (1.01 if spec.dtype == INT8 else 0.0)
        )
        if spec.shape == "mh":
            bound = bound + 0.02 * b.abs().mean() + 1.0
        wrong = ~((a - b).abs() <= bound) & ~(a.isnan() & b.isnan())
        if wrong.float().mean() > 1e-3 or b.abs().max() == 0:
            found[name] = f"{int(wrong.sum())} of {wrong.numel()}"
    return found


def timed(case: Case, made: Forms) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": case.text,
        "rows": case.rows,
        "columns": case.columns,
        "place": case.place,
        "forms": {},
    }
    held = sets(case.tensors)
    best: dict[str, tuple[float, cuda.Compiled]] = {}
    for form, kernels in made.items():
        row["forms"][form] = []
        for schedule, kernel in kernels:
            if isinstance(kernel, str):
                row["forms"][form].append({"schedule": schedule.json(), "failed": kernel})
                continue
            us = graph_us([ready(kernel, t, case.grid(form)) for t in held])
            row["forms"][form].append({"schedule": schedule.json(), "us": us, **facts_of(kernel)})
            if form not in best or us < best[form][0]:
                best[form] = us, kernel
    row["fused_us"] = best["fused"][0] if "fused" in best else None
    row["staged_us"] = best["staged"][0] if "staged" in best else None
    if "first" in best and "second" in best:
        calls = [(ready(best["first"][1], t, case.grid("first")), ready(best["second"][1], t, case.grid("second")))
                 for t in held]  # fmt: skip
        row["apart_us"] = graph_us([lambda p=p: (p[0](), p[1]()) for p in calls])
    if {"fused", "first", "second"} <= set(best):
        results = []
        for forms in (("fused",), ("staged",), ("first", "second")):
            if not set(forms) <= set(best):
                continue
            for name, tensor in held[0].items():
                if case.specs[name].output:
                    tensor.view(torch.uint8 if tensor.stride(-1) == 1 else tensor.dtype).fill_(0)
            for form in forms:
                ready(best[form][1], held[0], case.grid(form))()
            torch.cuda.synchronize()
            results.append({n: t.clone() for n, t in held[0].items() if case.specs[n].output})
        row["far"] = {n: why for one in results[1:] for n, why in far(case, one, results[0]).items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="tile_fusion.jsonl")
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--emit", action="store_true", help="compile everything for sm_90 and stop; needs no GPU")
    parser.add_argument("--emulate", action="store_true", help="run small cases in the emulator and stop; needs no GPU")
    given = parser.parse_args()
    end = time.time() + given.seconds
    chosen = [c for c in cases() if given.only in c.text]
    some = [] if given.only else list(probes())
    if given.emulate:
        emulate(chosen)
        return
    arch = "sm_90"
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"))
    first = [pool.submit(probe_compiled, i, arch) for i in range(len(some))]
    made = [pool.submit(case_compiled, c.text, arch) for c in chosen]
    if given.emit:
        emit(some, first, chosen, made)
        return
    with open(given.out, "w", encoding="utf-8") as file:

        def say(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps(row)[:220], flush=True)

        device = torch.cuda.get_device_properties(0)
        say({"gpu": device.name, "arch": cuda.Driver.get().arch(), "compiler": nvrtc.version(),
             "torch": torch.__version__, "cache": device.L2_cache_size, "sms": device.multi_processor_count,
             "cases": len(chosen)})  # fmt: skip
        works: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = [
            *((p.name, lambda p=p, f=f: probed(p, f)) for p, f in zip(some, first, strict=True)),
            *(({"case": c.text}, lambda c=c, f=f: timed(c, f.result(200))) for c, f in zip(chosen, made, strict=True)),
        ]
        for name, work in works:
            if time.time() > end:
                say({**name, "left": "time is up"})
                continue
            try:
                say(work())
            except Exception as error:  # noqa: BLE001 - one case, one line
                say({**name, "failed": f"{type(error).__name__}: {error}"[:400]})
            torch.cuda.empty_cache()
    os._exit(0)  # compilers may still be at work


def emit(some: list[Probe], first: list[Future[cuda.Compiled]], chosen: list[Case], made: list[Future[Forms]]) -> None:
    """What ptxas said."""
    for probe, future in zip(some, first, strict=True):
        kernel = future.result()
        print(f"{probe.name} {kernel.cubin.registers} registers, {kernel.cubin.spills} spilled", flush=True)
    for case, forms in zip(chosen, made, strict=True):
        said = [
            f"{form} {schedule.threads}x{schedule.instances},{schedule.vector}: "
            + (kernel if isinstance(kernel, str) else f"{kernel.cubin.registers}+{kernel.cubin.spills}")
            for form, kernels in forms.result().items()
            for schedule, kernel in kernels
        ]
        print(f"{case.text:<60} {'; '.join(said)}", flush=True)


def emulate(chosen: list[Case]) -> None:
    done: set[str] = set()
    for case in map(tiny, chosen):
        if case.text in done:
            continue
        done.add(case.text)
        tensors, results = case.tensors(0, "cpu"), []
        for forms in (("fused",), ("staged",), ("first", "second")):
            for form in forms:
                function, _ = cuda.lowered(
                    case.programs[form], replace(case.schedules(form)[0], threads=64, instances=1)
                )
                outputs = tuple(n for n, s in case.specs.items() if s.output and n in case.programs[form].written())
                emulator.run(function, {n: raw(t) for n, t in tensors.items()}, case.grid(form), outputs=outputs)
            results.append({n: tensors[n].clone() for n, s in case.specs.items() if s.output})
            for name, spec in case.specs.items():
                if spec.output:
                    tensors[name].view(torch.uint8 if tensors[name].stride(-1) == 1 else tensors[name].dtype).fill_(0)
        print(f"{case.text:<60} {[far(case, r, results[0]) or 'close' for r in results[1:]]}", flush=True)


def raw(tensor: Tensor) -> Any:
    """The elements in place as the emulator takes them: bits, where numpy has no such type."""
    same = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    found = tensor.numpy() if same is None else tensor.view(same).numpy()
    return found.view("uint16") if same == torch.int16 else found


if __name__ == "__main__":
    main()
