"""Everything that a GPU machine has to say, in one run: conformance, benchmarks, call times, first-use times.

    python scripts/gpu_check.py --out results --only conformance,bench,calls,first-use --budget 300

Each part writes raw JSON into --out after every step, so that a run that is cut short keeps what it has. --budget is
the number of seconds that each part may start new work in; `--budget bench=600` sets one part's alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import tilewright as tw  # noqa: E402
from tilewright.bench import measure  # noqa: E402
from tilewright.bench.engine import bench  # noqa: E402
from tilewright.bench.peers import peers_of  # noqa: E402
from tilewright.bench.problems import PASSES, problems  # noqa: E402
from tilewright.bench.results import machine, software  # noqa: E402
from tilewright.core import arguments, policy, registry, times  # noqa: E402
from tilewright.core.classes import call_class  # noqa: E402
from tilewright.core.device import default_device, device_of  # noqa: E402
from tilewright.core.errors import TilewrightError  # noqa: E402
from tilewright.core.launch import Config  # noqa: E402
from tilewright.core.plan import bind  # noqa: E402
from tilewright.core.selection import select  # noqa: E402
from tilewright.verify import suite  # noqa: E402

LARGE = [(8192, 4096), (32768, 1024), (4096, 8192), (16384, 16384), (2048, 65536)]
SMALL = [(968, 2048), (10, 1024)]
MAIN = ["rms_norm", "add_rms_norm", "layer_norm"]
OTHERS = ["add_layer_norm", "l2_norm"]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# What compiles fast and matters most comes first: a budget may end before the last.
BACKENDS = ["triton", "cuda", "tile", "tilelang", "vendor", "inductor"]


class Part:
    """One part of the run: its time, its file, and what went wrong in it."""

    def __init__(self, name: str, out: Path, seconds: float) -> None:
        self.name, self.path = name, out / f"{name}.json"
        self.end = time.monotonic() + seconds
        self.notes: list[str] = []

    def steps(self, work: Sequence[Any]) -> Iterator[Any]:
        """The work that there is time for; says what is left out."""
        for place, step in enumerate(work):
            if time.monotonic() > self.end:
                self.note(f"out of time: {len(work) - place} of {len(work)} steps are not done, from {step} on")
                return
            yield step

    def note(self, text: str) -> None:
        self.notes.append(text)
        say(f"[{self.name}] {text}")

    def write(self, data: dict[str, Any], path: Path | None = None) -> None:
        write_json(path or self.path, data)

    def guarded(self, what: str, step: Callable[[], Any]) -> Any:
        """A step that fails is a note; a lost device ends the run."""
        try:
            return step()
        except Exception as error:
            if getattr(error, "sticky", False) or "CUDA error" in str(error):
                self.note(f"{what}: the device is lost: {error}")
                raise
            traceback.print_exc(limit=6)
            self.note(f"{what}: {type(error).__name__}: {str(error).strip()[:300]}")
            return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def environment() -> dict[str, Any]:
    where = default_device()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"device": machine(device_of(where.type, where.index)), "software": software(), "commit": commit}


# (a) -----------------------------------------------------------------------------------------------------------------


def conformance(part: Part, options: argparse.Namespace) -> bool:
    """Every kernel over every case on this device, `--jobs` processes at a time. Returns whether all passed."""
    ops = options.ops or [op.name for op in registry.ops()]
    dtypes = [d for d in DTYPES if not options.dtypes or str(d).removeprefix("torch.") in options.dtypes]
    work = [
        (backend, op, dtype)
        for backend in options.backends or BACKENDS
        for dtype in dtypes
        for op in ops
        if any(k.backend == backend for k in registry.kernels_of(op))
    ]
    found: dict[str, Any] = {**environment(), "results": [], "notes": part.notes}
    good = True
    run = functools.partial(_conformance_apart if options.jobs > 1 else _conformance_here, part, options)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for results in pool.map(run, part.steps(work) if options.jobs == 1 else work):
            for result in results or ():
                good &= not result["failed"]
                found["results"].append(result)
                counts = f"{result['passed']} passed, {result['failed']} failed, {len(result['not_run'])} not run"
                say(f"{result['op']} {result['backend']} {result['dtype']}: {counts} in {result['seconds']} s")
                for failure in result["failures"][:3]:
                    say(f"   {failure['config']}: {failure['case']}: {failure['problem'][:300]}")
            good &= results is not None
            part.write(found)
    return good


def _conformance_here(part: Part, options: argparse.Namespace, step: tuple[str, str, Any]) -> list[Any] | None:
    backend, op, dtype = step
    start = time.monotonic()
    verify = functools.partial(suite.verify, [op], [backend], options.device, dtypes=[dtype], size=options.size or None)
    report = part.guarded(f"{op} {backend} {dtype}", functools.partial(verify, all_configs=options.all_configs))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = round(time.monotonic() - start, 2)
    return None if report is None else [result.as_json() | {"seconds": seconds} for result in report.results]


def _conformance_apart(part: Part, options: argparse.Namespace, step: tuple[str, str, Any]) -> list[Any] | None:
    """One step in a process of its own: compilation keeps every core busy, and a lost device loses one step."""
    backend, op, dtype = step
    left = part.end - time.monotonic()
    if left <= 0:
        part.note(f"out of time: {op} {backend} {dtype} is not done")
        return None
    with tempfile.TemporaryDirectory(prefix="tilewright-conformance-") as folder:
        command = [sys.executable, __file__, "--out", folder, "--only", "conformance", "--ops", op]
        command += ["--backends", backend, "--dtypes", str(dtype).removeprefix("torch."), "--size", options.size]
        command += ["--all-configs"] * options.all_configs + (["--device", options.device] if options.device else [])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            results: list[Any] = json.loads((Path(folder) / "conformance.json").read_text())["results"]
        except (subprocess.TimeoutExpired, OSError) as error:
            tail = "" if isinstance(error, subprocess.TimeoutExpired) else done.stderr[-600:]
            part.note(f"{op} {backend} {dtype}: {type(error).__name__} {tail}")
            return None
    return results or None


# (b) -----------------------------------------------------------------------------------------------------------------


def benchmarks(part: Part, options: argparse.Namespace) -> bool:
    """Workloads, forward and backward, with peers. `bench.json` is what `tilewright bench --json` writes."""
    ops = [registry.op(name) for name in options.ops or MAIN + OTHERS]
    work = [(op.name, shape, p) for op in ops for shape in options.shapes or _shapes(op) for p in options.passes]
    merged: dict[str, Any] = {}
    peers: dict[str, Any] = {**environment(), "results": [], "notes": part.notes}
    for op, shape, name in part.steps(work):
        start = time.monotonic()
        step = functools.partial(
            bench,
            [op],
            shapes=[shape],
            passes=[name],
            backends=options.backends,
            peers=options.peers,
            all_configs=options.all_configs,
            device=options.device,
        )
        report = part.guarded(f"{op} {shape} {name}", step)
        if report is None:
            continue
        rows = report.as_json()
        if merged:
            merged["results"] += rows["results"]
        else:
            merged = rows
        peers["results"] += [row.as_json() for row in report.peers]
        part.notes += report.notes
        for row in report.results:
            say(_line(row))
        if options.record:
            part.guarded("recording times", functools.partial(_keep_times, report.results, options.device))
        say(f"   {time.monotonic() - start:.1f} s")
        part.write(merged)
        part.write(peers, part.path.with_name("bench-peers.json"))
    return bool(merged)


def _shapes(op: Any) -> list[tuple[int, ...]]:
    """What the goals are stated for: the norms' own, and the workloads of any other op."""
    return LARGE + SMALL if op.family == "norm" else list(dict.fromkeys(w.shape for w in op.workloads))


def _keep_times(rows: Sequence[Any], device: Any) -> None:
    """Cold times of proven kernels, for selection: of the class as measured, and of its saving form where that moves
    about as much. Of all configs but the chosen one calls are not timed."""
    where = torch.device(device) if device else default_device()
    for row in rows:
        if row.kernel_us is None or row.cache != "cold":
            continue
        dtype = {str(d).removeprefix("torch."): d for d in DTYPES}[row.dtype]
        problem = problems([row.op], shapes=[tuple(row.shape)], dtypes=[dtype], passes=[row.pass_name], device=where)[0]
        name = problem.op.name
        kernel = next(k for k in registry.kernels_of(name) if k.name == row.kernel)
        config = Config(**{word.partition("=")[0]: int(word.partition("=")[2]) for word in row.config.split()})
        call = problem.call(problem.inputs(0))
        op, forms = problem.op, [call]
        if op.gradient is not None:
            tensors = {n: call.tensors[n] for n in op.tensors}
            forms.append(op.call(tensors, call.options, call.device, saving=True, deterministic=call.deterministic))
        moved = [op.cost(form)[0] for form in forms]
        for form, count in zip(forms, moved, strict=True):
            if count <= 1.05 * moved[0]:
                cls = call_class(form, dict(op.options))
                times.record(kernel, config, name, cls, call.device, row.call_us, row.kernel_us)


def _line(row: Any) -> str:
    head = f"{row.op} {row.pass_name} {'x'.join(map(str, row.shape))} {row.cache} {row.backend} {row.config}"
    if row.kernel_us is None:
        return f"{head}: no passing evidence"
    sol = "" if row.sol is None else f" ({row.sol:.3f})"
    call = "" if row.call_us is None else f" call {row.call_us:.1f}"
    low, high = row.ratio_ci or (0.0, 0.0)
    peer = "" if not row.ratio_ci else f" | {row.peer} {row.peer_us:.2f} [{low:.3f}, {high:.3f}]"
    return f"{head}: {row.kernel_us:.2f} ±{row.iqr_us:.2f}{sol}{call}{peer}"


# (c) -----------------------------------------------------------------------------------------------------------------


def calls(part: Part, options: argparse.Namespace) -> bool:
    """Host time of tiny calls: against torch's own, rivals, and launcher and allocations alone."""
    where = torch.device(options.device) if options.device else default_device()
    found: dict[str, Any] = {**environment(), "results": [], "notes": part.notes}
    work = [(op, grad) for op in options.ops or MAIN for grad in (False, True)]
    for name, grad in part.steps(work):
        op = registry.op(name)
        problem = problems([name], shapes=[(1, 1024)], dtypes=[torch.bfloat16], passes=["forward"], device=where)[0]
        named = problem.leaves(0) if grad else problem.inputs(0)
        tensors = [named[n] for n in op.tensors]
        rivals = _rivals(part, op, named, options.peers)
        ours: dict[str, Any] = {"auto": functools.partial(op, *tensors)}
        ours |= {b: functools.partial(op, *tensors, backend=b) for b in options.backends or BACKENDS}
        with torch.set_grad_enabled(grad):
            for backend, run in ours.items():
                step = functools.partial(_call_row, op, tensors, backend, run, rivals, where, grad)
                row = part.guarded(f"{name} {backend}", step)
                if row is not None:
                    found["results"].append(row)
                    say(f"{name} {'grad' if grad else 'no grad'} {backend}: " + json.dumps(row["summary"]))
                part.write(found)
    return bool(found["results"])


def _rivals(part: Part, op: Any, named: dict[str, Any], wanted: Any) -> dict[str, Any]:
    found = {}
    for peer in peers_of(op):
        if wanted is True or peer.name in wanted:
            try:
                found[peer.name] = peer.maker(named, op.usual)
            except (ImportError, NotImplementedError) as error:
                part.note(f"{op.name}: peer {peer.name} is left out: {error}")
    return found


def _call_row(
    op: Any, tensors: list[Any], backend: str, run: Any, rivals: dict[str, Any], where: torch.device, grad: bool
) -> dict[str, Any] | None:
    try:
        for _ in range(20):
            run()
    except TilewrightError as error:
        return {"op": op.name, "backend": backend, "grad": grad, "summary": {"refused": str(error).splitlines()[0]}}
    row: dict[str, Any] = {"op": op.name, "backend": backend, "grad": grad, "shape": [1, 1024], "against": {}}
    mine = measure.call_watch(run, where)
    row["call_us"] = measure.sample(mine, 30).median
    summary: dict[str, Any] = {"call_us": round(row["call_us"], 2)}
    # the same launcher and the same allocations, without dispatch
    options = arguments.normalise(op, list(op.usual.values()), None)
    call = arguments.facts_of(op, tensors, options, grad and op.gradient is not None, False)
    chosen = select(call, policy.current(), backend=None if backend == "auto" else backend).chosen
    assert chosen is not None and chosen.config is not None
    row["kernel"], row["config"] = str(chosen.kernel), str(chosen.config)
    plan = bind(chosen.kernel, chosen.config, call)
    plain = [None if t is None else t.detach() for t in tensors]
    pairs = {"launcher and allocations": lambda: plan(*plain)}
    if op.name == "rms_norm":
        pairs["F.rms_norm"] = lambda: F.rms_norm(tensors[0], (1024,), tensors[1], 1e-6)
    if backend in ("auto", "triton"):
        pairs |= rivals
    for name, other in pairs.items():
        try:
            for _ in range(20):
                other()
            duel = measure.duel(mine, measure.call_watch(other, where))
        except Exception as error:  # noqa: BLE001  a rival may raise anything; it is named
            row["against"][name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        row["against"][name] = {
            "ours_us": duel.ours.median, "theirs_us": duel.theirs.median, "ours_over_theirs": 1 / duel.ratio,
            "ci": [1 / duel.high, 1 / duel.low], "difference_us": duel.ours.median - duel.theirs.median,
        }  # fmt: skip
        summary[name] = f"{duel.theirs.median:.2f} us, ours {1 / duel.ratio:.3f}x"
    row["summary"] = summary
    return row


# (d) -----------------------------------------------------------------------------------------------------------------

_FIRST = """
import json, sys, time
t0 = time.perf_counter()
import torch
t1 = time.perf_counter()
import tilewright as tw
t2 = time.perf_counter()
op, backend, rows, columns, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
def sync():
    if device.startswith("cuda"):
        torch.cuda.synchronize()
x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
w = torch.randn(columns, device=device, dtype=torch.bfloat16)
more = {"add_rms_norm": [x.clone()]}.get(op, [])
call = getattr(tw, op)
(x + 1).sum().item()
def timed(x, w):
    sync(); start = time.perf_counter(); call(x, *more, w, backend=backend); sync()
    return (time.perf_counter() - start) * 1e3
first = timed(x, w)
again = timed(x, w)
more = [m[: rows // 2 + 1] for m in more]
other = timed(x[: rows // 2 + 1], w)
print(json.dumps({"import_torch_ms": (t1 - t0) * 1e3, "import_ms": (t2 - t1) * 1e3, "first_ms": first,
                  "second_ms": again, "other_rows_ms": other}))
"""


def first_use(part: Part, options: argparse.Namespace) -> bool:
    """First call of a class in a fresh process: nothing known; evidence alone; evidence and artifacts."""
    device = options.device or str(default_device())
    found: dict[str, Any] = {**environment(), "results": [], "notes": part.notes}
    work = [
        (op, backend, rows, columns)
        for op, rows, columns in (("rms_norm", 8192, 4096), ("rms_norm", 2048, 65536), ("layer_norm", 8192, 4096))
        for backend in options.backends or BACKENDS
    ]
    for op, backend, rows, columns in part.steps(work):
        if not any(k.backend == backend for k in registry.kernels_of(op)):
            continue
        with tempfile.TemporaryDirectory(prefix="tilewright-first-") as folder:
            known = Path(folder) / "known"
            row: dict[str, Any] = {"op": op, "backend": backend, "shape": [rows, columns]}
            row["nothing known"] = _fresh(known, op, backend, rows, columns, device)
            row["evidence and artifacts"] = _fresh(known, op, backend, rows, columns, device)
            if (known / "evidence").is_dir():
                shutil.copytree(known / "evidence", Path(folder) / "proven" / "evidence")
            row["evidence alone"] = _fresh(Path(folder) / "proven", op, backend, rows, columns, device)
        found["results"].append(row)
        say(json.dumps(row))
        part.write(found)
    return bool(found["results"])


def _fresh(cache: Path, *arguments: Any) -> dict[str, Any]:
    env = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")}
    env["TRITON_CACHE_DIR"] = str(cache / "triton")  # a compiler's own cache would hide what first use costs
    env["TILELANG_CACHE_DIR"] = str(cache / "tilelang")
    env["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    run = subprocess.run(
        [sys.executable, "-c", _FIRST, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300
    )
    if run.returncode:
        return {"error": run.stderr.strip().splitlines()[-1][:300] if run.stderr.strip() else f"exit {run.returncode}"}
    facts: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return {name: round(value, 3) for name, value in facts.items()}


# ---------------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Part, argparse.Namespace], bool]] = {
    "conformance": conformance,
    "bench": benchmarks,
    "calls": calls,
    "first-use": first_use,
}


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def _list(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON files")
    parser.add_argument("--only", type=_list, default=list(PARTS), help=f"parts, by commas: {','.join(PARTS)}")
    parser.add_argument("--budget", action="append", default=[], help="seconds a part, or part=seconds; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the conformance part")
    parser.add_argument("--dtypes", type=_list, default=[], help="float32, float16, bfloat16; all by default")
    parser.add_argument("--size", default="", help="cases of the conformance part: tiny, small, full")
    parser.add_argument("--ops", type=_list, default=[], help="ops, by commas")
    parser.add_argument("--backends", type=_list, default=[], help="backends, by commas")
    parser.add_argument("--shapes", type=lambda t: [_shape(s) for s in _list(t)], default=[], help="8192x4096,10x1024")
    parser.add_argument("--passes", type=_list, default=list(PASSES), help="forward, backward")
    parser.add_argument("--peers", type=_list, default=None, help="rivals, by commas; all by default, none for ''")
    parser.add_argument("--all-configs", action="store_true", help="every config, in conformance and bench")
    parser.add_argument("--record", action="store_true", help="keep the benchmarks' times for selection")
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:1")
    options = parser.parse_args()
    options.peers = True if options.peers is None else options.peers
    options.device = options.device or None
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    budgets = dict.fromkeys(PARTS, 600.0)
    for text in options.budget:
        name, equals, seconds = text.rpartition("=")
        budgets |= {name: float(seconds)} if equals else dict.fromkeys(PARTS, float(seconds))
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"tilewright {tw.__version__} on {json.dumps(environment())}")
    good = True
    for name in options.only:
        part = Part(name, options.out, budgets[name])
        start = time.monotonic()
        done = PARTS[name](part, options)
        good &= done
        say(f"== {name}: {'done' if done else 'with failures'} in {time.monotonic() - start:.0f} s, {part.path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
