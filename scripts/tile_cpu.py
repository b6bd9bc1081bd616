"""Measure the tile compiler on a CPU: twelve ops against torch.compile and eager, outputs fresh and preallocated.

    python scripts/tile_cpu.py [--ops rms_norm,softmax] [--rows 1,64,2048] [--columns 1000,4096] [--dtypes bfloat16]

The forms of one problem take turns of eight calls in one process; a time is the lower quartile of a form's calls,
because what disturbs a shared machine only adds. With `--threads 1` they are the thread's CPU time: of a machine that
others use too, the only one that says anything. The rival of a kernel that is given its outputs is the faster of
torch.compile's two forms, one that allocates and one that copies into what is given; that of one with fresh outputs is
the form that allocates. Ratios above 1 say that the tile kernel is faster. A problem with a ratio below 1, or with page
faults, is measured again with longer rounds, and that counts; what the short ones gave is kept as `first`.

The first calls of a turn find memory as another form left it, and a store to what another core has read takes 7.6 ns a
line where one to the core's own takes 0.3 (docs/notes/tile-on-cpus.md). In turns of one call, fresh outputs paid for
eager's intermediates wherever the heap put the one over the other. It hands out two or three places in rotation, so
most of eight calls find what their own form left.

The C library keeps what is freed, in this process and so for every form. Left alone, glibc gives the end of its heap to
the system and asks for it again on each call, or maps each block anew, for one form and not for the other, by what else
lies in the heap: 4096 page faults a call, 6 to 11 ms, where the kernel takes 2.5 ms. `faults` are a call's page faults,
of the form with most: 0, or the times are of something else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import resource
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewright import tile
from tilewright.tile.lang.library import softmax
from tilewright.tile.runtime import cpu
from tilewright.tile.runtime.arguments import memory_of, pack, type_of

Tensor = torch.Tensor
MOST = 65536
LONGER = 6
TURN = 8
FEW = 64
RATIOS = ("given", "fresh", "eager")


@tile.fragment
def add_residual(t: Any, v: Any, at: Any, residual: Any, total: Any) -> Any:
    s = (v + t.load(residual[at]).f32()).to(total.dtype)
    t.store(total[at], s)
    return s.f32()


@tile.fragment
def quantize_row(t: Any, y: Any, at: Any, q: Any, scale: Any, qmax: float) -> None:
    s = t.maximum(t.max(t.abs(y)) / qmax, 1e-10)
    t.store(scale[at[0]], s)
    t.store(q[at], (y / s).to(q.dtype, round="nearest_even" if q.dtype.integer else "", saturate=True))


@tile.kernel(static={"x": (1,)})
def norm(
    t: Any, x: Any, w: Any, b: Any, eps: Any, centre: bool, prologue: Any = None, epilogue: Any = tile.store_as
) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col]).f32()
    v = prologue(t, v, (row, col)) if prologue else v
    v = v - t.mean(v) if centre else v
    y = v * t.rsqrt(t.mean(v * v) + eps) * t.load(w[col]).f32()
    epilogue(t, y if b is None else y + t.load(b[col]).f32(), (row, col))


@tile.kernel(static={"x": (1,)})
def row_softmax(t: Any, x: Any, y: Any) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    t.store(y[row, col], softmax(t, t.load(x[row, col]).f32()).to(y.dtype))


@tile.kernel(static={"x": (1,)})
def quantize(t: Any, x: Any, epilogue: Any = quantize_row) -> None:
    row, col = t.program_id(0), t.arange(x.shape[1])
    epilogue(t, t.load(x[row, col]).f32(), (row, col))


@tile.kernel
def quantize_groups(t: Any, x: Any, q: Any, scale: Any) -> None:
    """Groups of 128 along a row; the last may be short."""
    row, start = t.program_id(0), t.program_id(1) * 128
    col = start + t.arange(128, limit=x.shape[1] - start)
    v = t.load(x[row, col]).f32()
    s = t.maximum(t.max(t.abs(v)) / 448.0, 1e-10)
    t.store(scale[row, t.program_id(1)], s)
    t.store(q[row, col], (v / s).to(q.dtype, saturate=True))


@tile.kernel
def quantize_whole_groups(t: Any, x: Any, q: Any, scale: Any) -> None:
    """Groups of 128 that divide the row, 32 of them a program, one after the other: a group is read again from the
    nearest cache while the next one is on its way."""
    row, start = t.program_id(0), t.program_id(1) * 32
    for group in t.range(start, t.minimum(start + 32, scale.shape[1])):
        at = row, group * 128 + t.arange(128)
        v = t.load(x[at]).f32()
        s = t.maximum(t.max(t.abs(v)) / 448.0, 1e-10)
        t.store(scale[row, group], s)
        t.store(q[at], (v / s).to(q.dtype, saturate=True))


@tile.kernel
def elementwise(t: Any, x: Any, up: Any, y: Any, kind: str) -> None:
    at = t.program_id(0) * 4096 + t.arange(4096, limit=x.shape[0] - t.program_id(0) * 4096)
    g = t.load(x[at]).f32()
    v = g * t.sigmoid(g if kind == "silu" else 1.5957691216057308 * g * (1.0 + 0.044715 * g * g))
    t.store(y[at], (v if up is None else v * t.load(up[at]).f32()).to(y.dtype))


def rms(x: Tensor, w: Tensor) -> Tensor:
    a = x.float()
    return (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def row_scale(y: Tensor, most: float) -> Tensor:
    return (y.abs().amax(-1, keepdim=True) / most).clamp(min=1e-10)


def int8_of(y: Tensor) -> tuple[Tensor, Tensor]:
    s = row_scale(y, 127.0)
    return (y / s).round().clamp(-128, 127).to(torch.int8), s


def fp8_of(y: Tensor) -> tuple[Tensor, Tensor]:
    s = row_scale(y, 448.0)
    return (y / s).clamp(-448, 448).to(torch.float8_e4m3fn), s


def fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(-1, (-1, 128))
    q, s = fp8_of(y)
    return q.flatten(-2)[:, : x.shape[1]], s.squeeze(-1)


Problem = tuple[Callable[..., Any], list[Tensor], list[Tensor], Any, tuple[int, ...], dict[str, Any]]
"""(definition, inputs, outputs, kernel, grid, arguments by name)."""


def problem(op: str, m: int, n: int, dtype: torch.dtype) -> Problem:
    """One op on [m, n]."""
    x, r, y, h = (torch.randn(m, n).to(dtype) for _ in range(4))
    w, b = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    q8, qf, s = torch.empty(m, n, dtype=torch.int8), torch.empty(m, n, dtype=torch.float8_e4m3fn), torch.empty(m)
    add = add_residual(r, h)
    norms = {"x": x, "w": w, "b": None, "eps": 1e-6, "centre": False}
    layers = {**norms, "b": b, "centre": True}
    flat = (-(-m * n // 4096),)
    groups = -(-n // 128)
    table: dict[str, Callable[[], Problem]] = {
        "rms_norm": lambda: (lambda x, w: rms(x, w), [x, w], [y], norm.bind(epilogue=tile.store_as(y)), (m,), norms),
        "add_rms_norm": lambda: (
            lambda x, r, w: (rms(x + r, w), x + r), [x, r, w], [y, h],
            norm.bind(prologue=add, epilogue=tile.store_as(y)), (m,), norms,
        ),
        "layer_norm": lambda: (
            lambda x, w, b: F.layer_norm(x, (n,), w, b, 1e-6), [x, w, b], [y],
            norm.bind(epilogue=tile.store_as(y)), (m,), layers,
        ),
        "add_layer_norm": lambda: (
            lambda x, r, w, b: (F.layer_norm(x + r, (n,), w, b, 1e-6), x + r), [x, r, w, b], [y, h],
            norm.bind(prologue=add, epilogue=tile.store_as(y)), (m,), layers,
        ),
        "silu_mul": lambda: (
            lambda x, r: (F.silu(x.float()) * r.float()).to(x.dtype), [x, r], [y], elementwise, flat,
            {"x": x.view(-1), "up": r.view(-1), "y": y.view(-1), "kind": "silu"},
        ),
        "gelu_mul": lambda: (
            lambda x, r: (F.gelu(x.float(), approximate="tanh") * r.float()).to(x.dtype), [x, r], [y],
            elementwise, flat,
            {"x": x.view(-1), "up": r.view(-1), "y": y.view(-1), "kind": "gelu"},
        ),
        "gelu": lambda: (
            lambda x: F.gelu(x.float(), approximate="tanh").to(x.dtype), [x], [y], elementwise, flat,
            {"x": x.view(-1), "up": None, "y": y.view(-1), "kind": "gelu"},
        ),
        "softmax": lambda: (
            lambda x: torch.softmax(x.float(), -1).to(x.dtype), [x], [y], row_softmax, (m,), {"x": x, "y": y}
        ),
        "int8_row": lambda: (
            lambda x: int8_of(x.float()), [x], [q8, s.view(m, 1)],
            quantize.bind(epilogue=quantize_row(q8, s, qmax=127.0)), (m,), {"x": x},
        ),
        "fp8_row": lambda: (
            lambda x: fp8_of(x.float()), [x], [qf, s.view(m, 1)],
            quantize.bind(epilogue=quantize_row(qf, s, qmax=448.0)), (m,), {"x": x},
        ),
        "fp8_groups": lambda: _groups(x, qf, torch.empty(m, groups), (m, groups)),
        "add_rms_norm_int8": lambda: (
            lambda x, r, w: (*int8_of(_normed(x + r, w)), x + r), [x, r, w], [q8, s.view(m, 1), h],
            norm.bind(prologue=add, epilogue=quantize_row(q8, s, qmax=127.0)), (m,), norms,
        ),
    }  # fmt: skip
    return table[op]()


def _groups(x: Tensor, q: Tensor, s: Tensor, grid: tuple[int, int]) -> Problem:
    if x.shape[1] % 128 == 0:
        whole = (grid[0], -(-grid[1] // 32))
        return fp8_groups, [x], [q, s], quantize_whole_groups, whole, {"x": x, "q": q, "scale": s}
    return fp8_groups, [x], [q, s], quantize_groups, grid, {"x": x, "q": q, "scale": s}


def _normed(h: Tensor, w: Tensor) -> Tensor:
    a = h.float()
    return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * w.float()


OPS = (
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "silu_mul", "gelu_mul", "gelu", "softmax", "int8_row",
    "fp8_row", "fp8_groups", "add_rms_norm_int8",
)  # fmt: skip


def prepared(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], outputs: list[Tensor]
) -> tuple[Callable[[], None], Callable[[], list[Tensor]]]:
    """The kernel as calls without arguments: into the outputs that there are, and into fresh ones."""
    values = {**arguments, **kernel.bound()}
    memories = {n: memory_of(v) for n, v in values.items() if isinstance(v, Tensor)}
    types: dict[str, Any] = {}
    for name, value in values.items():
        if name in memories:
            most = dict.fromkeys(kernel.static.get(name, ()), MOST)
            types[name] = type_of(memories[name], most=most)
        else:
            types[name] = tile.float32 if isinstance(value, float) else value
    compiled = cpu.compile(kernel.trace(types))
    scalars = {n: v for n, v in values.items() if isinstance(v, float)}
    packed, counts = pack(compiled.parameters, memories, scalars), (*grid, 1, 1)[:3]
    moved = sum(math.prod(m.shape) * m.dtype.itemsize for m in memories.values())
    threads = torch.get_num_threads() if moved > 1 << 16 else 1
    pointers = [memories[p.of].address for p in compiled.parameters if p.kind == "pointer"]
    places = [pointers.index(out.data_ptr()) for out in outputs]
    head, tail = struct.Struct(f"={len(pointers)}q").pack, packed[8 * len(pointers) :]

    def fresh() -> list[Tensor]:
        made = [torch.empty_like(out) for out in outputs]
        for place, tensor in zip(places, made, strict=True):
            pointers[place] = tensor.data_ptr()
        compiled(head(*pointers) + tail, counts, threads)
        return made

    return lambda: compiled(packed, counts, threads), fresh


def keep_freed_memory() -> None:
    """No block is a mapping of its own, and the end of the heap is not given back (glibc; nothing elsewhere)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((-4, 0), (-1, -1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(parameter, value)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def lower_quartiles(runs: list[Callable[[], Any]], seconds: float) -> tuple[list[float], float]:
    """Microseconds of each, in turns of `TURN` calls; and the page faults a call of the one with the most, a median."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    faults: list[list[int]] = [[] for _ in runs]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 2 * TURN:
        for run, found, faulted in zip(runs, times, faults, strict=True):
            for _ in range(TURN):
                before, start = page_faults(), clock()
                run()
                found.append((clock() - start) * 1e6)
                faulted.append(page_faults() - before)
    return [sorted(found)[len(found) // 4] for found in times], max(map(statistics.median, faults))


def forms(op: str, m: int, n: int, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """The tile kernel into given outputs and into fresh ones; torch.compile's that allocates and that copies; eager."""
    torch._dynamo.reset()
    define, inputs, outputs, kernel, grid, arguments = problem(op, m, n, dtype)
    ours, fresh = prepared(kernel, grid, arguments, outputs)
    compiled = torch.compile(define, dynamic=False)

    def into(*tensors: Tensor) -> None:
        found = define(*tensors[: len(inputs)])
        for place, value in zip(tensors[len(inputs) :], found if isinstance(found, tuple) else (found,), strict=True):
            place.copy_(value)

    copying = torch.compile(into, dynamic=False)
    return [ours, fresh, lambda: compiled(*inputs), lambda: copying(*inputs, *outputs), lambda: define(*inputs)]


def compared(runs: list[Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """Times and ratios of the five forms."""
    (given, allocated, rival, copied, eager), faults = lower_quartiles(runs, seconds)
    return {
        "tile_us": round(given, 1), "fresh_us": round(allocated, 1), "compile_us": round(min(rival, copied), 1),
        "eager_us": round(eager, 1), "faults": faults, "given": min(rival, copied) / given,
        "fresh": rival / allocated, "eager": eager / given,
    }  # fmt: skip


def settled(runs: list[Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """`compared`; again and for longer where a ratio is below 1 or memory was new, with the `first` ratios kept."""
    found = compared(runs, seconds)
    first = {name: found[name] for name in (*RATIOS, "faults")}
    if min(found[name] for name in RATIOS) >= 1 and found["faults"] < FEW:
        return found
    return {**compared(runs, LONGER * seconds), "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--rows", default="1,64,2048")
    parser.add_argument("--columns", default="1000,1001,4096,5120,16384")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for op in asked.ops.split(","):
            for dtype in asked.dtypes.split(","):
                for m in map(int, asked.rows.split(",")):
                    for n in map(int, asked.columns.split(",")):
                        r = settled(forms(op, m, n, getattr(torch, dtype)), asked.seconds)
                        rows.append({"op": op, "rows": m, "columns": n, "dtype": dtype, **r})
                        print(f"{op:18} {dtype:9} {m:5} x {n:<6} tile {r['tile_us']:9.1f} us  torch.compile "
                              f"{r['compile_us']:9.1f} us  {r['given']:6.2f}x  fresh {r['fresh']:6.2f}x  "
                              f"eager {r['eager']:6.2f}x{'  again' if 'first' in r else ''}", flush=True)  # fmt: skip
    for name in RATIOS:
        values = [r[name] for r in rows]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{name:6} geometric mean {mean:.2f}x, least {min(values):.2f}x of {len(values)}")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
