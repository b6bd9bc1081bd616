"""The tile backend: kernels of the library's own tile compiler, on CPUs and on NVIDIA GPUs.

A kernel function returns launches whose `function` is a `tile.Kernel`. `args` are its arguments by name; a tensor is a
view of its rows, [rows, columns], unless `options["flat"]` names it: then it is one axis of all its elements. What an
option or an absent tensor leaves out of the kernel is a constant of its trace. On a GPU `options["config"]` says how
an instance is spread over threads (the fields of a `Schedule`; none: as usual), and sizes that the kernel asks for are
constants. How tiles are compiled is in `tile/`; what is compiled for a GPU is kept and launched as every backend's is.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.backends import cuda
from tilewright.backends.cubin import CubinRunner
from tilewright.core import artifacts
from tilewright.core.backend import Artifact, Backend, Buffers, Parameter, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, Launch, Scratch, launches_of, scratches
from tilewright.core.reason import Reason
from tilewright.tile import dtypes
from tilewright.tile.errors import LowerError
from tilewright.tile.explain import explained, fusions
from tilewright.tile.ir.text import program_text
from tilewright.tile.ir.tile_ir import Program, ViewType
from tilewright.tile.lang.kernel import Argument
from tilewright.tile.lang.kernel import Kernel as TileKernel
from tilewright.tile.render.cuda import GRID, arguments
from tilewright.tile.runtime import cpu, nvrtc, target
from tilewright.tile.runtime.arguments import Memory, alignment, all_values, is_real, pack, type_of
from tilewright.tile.runtime.cuda import check, text_of
from tilewright.tile.runtime.store import compiler_digest
from tilewright.tile.schedule import Schedule, default, worth_timing

WIDEST = 131072
"""The most columns of a view whose kernel asks for them: what scratch is made for."""
SERIAL_BYTES = 1 << 16
"""Calls that move less run on one thread: entering a parallel region costs more than they do."""
MOST_INSTANCES = 2**31 - 1
MOST_ANSWERS = 1024
_answers: dict[Any, str] = {}
_asking = threading.Lock()
DTYPES = {
    torch.float32: dtypes.float32,
    torch.float16: dtypes.float16,
    torch.bfloat16: dtypes.bfloat16,
    torch.float8_e4m3fn: dtypes.float8_e4m3fn,
    torch.int64: dtypes.int64,
    torch.int32: dtypes.int32,
    torch.int8: dtypes.int8,
    torch.uint8: dtypes.uint8,
    torch.bool: dtypes.boolean,
}


class TileBackend(Backend):
    name = "tile"

    def missing(self, kind: str = "") -> Reason | None:
        if kind == "cpu":
            why = target.missing()
            return Reason("compiler", why, "install g++") if why else None
        if kind == "cuda":
            return cuda.CudaBackend().missing()
        lacking = [self.missing(one) for one in ("cpu", "cuda")]
        return None if None in lacking else lacking[0]

    def version(self, kind: str = "") -> str:
        if not kind:
            return "; ".join(filter(None, map(self.version, ("cpu", "cuda"))))
        tool = target.compiler()
        if kind == "cpu" and tool:
            return f"{tool.version}, {target.this_cpu()}, {compiler_digest()[:16]}"
        return f"{nvrtc.version()}, {compiler_digest()[:16]}" if kind == "cuda" and nvrtc.version() else ""

    def targets(self) -> list[str]:
        return [str(target.this_cpu())] * (target.compiler() is not None) + cuda.CudaBackend().targets()

    def compile(self, launch: Launch, device: Device) -> Artifact:
        return for_gpu(launch, device, {})[0]

    def explain(self, kernel: Kernel, config: Config, call: Call) -> str:
        launches = launches_of(kernel.load()(call, config))
        if not call.device.sm:
            return "\n\n".join(explained(_traced(launch, call.aliased, exact=False)[0]) for launch in launches)
        said = []
        for launch in launches:
            program, schedule, arch = _planned(launch, call.device, call.aliased)
            more = fusions(*_given(launch, call.aliased, exact=True)[:2], launch.grid)
            said.append(explained(program, gpu=arch, schedule=schedule, instances=launch.grid, more=more))
        return "\n\n".join(said)

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
        if call.device.sm:
            made = [for_gpu(launch, call.device, call.aliased) for launch in launches]
            return CubinRunner([artifact for artifact, _ in made], [launch for _, launch in made], call)
        return TileRunner(launches, call)


def memory(facts: TensorFacts, flat: bool) -> Memory:
    """A tensor as a view reads it, at an address that a call will tell."""
    dtype = DTYPES[facts.dtype]
    if flat:
        if facts.contiguous:
            return Memory(0, (facts.numel,), (1,), dtype)
        if len(facts.shape) == 1:
            return Memory(0, facts.shape, facts.stride, dtype)
        raise ValueError(f"{facts} is no single axis")
    levels = facts.row_levels
    shape = (*(n for n, _ in levels), facts.columns)
    return Memory(0, shape, (*(s for _, s in levels), facts.column_stride), dtype, len(levels))


def _argument(name: str, value: Any, asked: Collection[int], flat: bool, exact: bool) -> Argument:
    """`exact`: sizes that the kernel asks for, and what its address and strides can be divided by, are in the type."""
    if isinstance(value, (TensorFacts, Scratch)):
        facts = value.facts if isinstance(value, Scratch) else value
        if exact:
            here = memory(facts, flat)
            return replace(type_of(here), align=math.gcd(facts.align, alignment(here)))
        found = type_of(memory(facts, flat), most=dict.fromkeys(asked, WIDEST))
        return ViewType(found.dtype, tuple(s if i in asked else None for i, s in enumerate(found.sizes)), found.unit,
                        found.levels)  # fmt: skip
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return dtypes.float32 if isinstance(value, float) else dtypes.int64
    raise TypeError(f"{name} is {value!r}: tensors' facts, numbers and None are arguments")


class TileRunner(Runner):
    """Compiled kernels with everything packed but addresses."""

    def __init__(self, launches: Sequence[Launch], call: Call) -> None:
        names = [*call.tensors, *(s.name for s in scratches(launches))]
        places = {name: i for i, name in enumerate(names)}
        runs = [_bound(launch, call, places) for launch in launches if 0 not in launch.grid]
        self.run: Callable[[Buffers], None] = runs[0] if len(runs) == 1 else _in_order(runs)

    def __call__(self, buffers: Buffers) -> None:
        self.run(buffers)


def _in_order(runs: Sequence[Callable[[Buffers], None]]) -> Callable[[Buffers], None]:
    def run(buffers: Buffers) -> None:
        for one in runs:
            one(buffers)

    return run


def _traced(launch: Launch, aliased: Mapping[str, str], exact: bool) -> tuple[Program, dict[str, TensorFacts]]:
    """The program of a launch, and the facts of its tensors by their names in the kernel."""
    kernel, arguments, facts = _given(launch, aliased, exact)
    return kernel.trace(arguments), facts


def _given(
    launch: Launch, aliased: Mapping[str, str], exact: bool
) -> tuple[TileKernel, dict[str, Any], dict[str, TensorFacts]]:
    """The kernel of a launch, the types of its arguments, and the facts of its tensors by their names in the kernel."""
    kernel, flat = launch.function, launch.options.get("flat", ())
    facts = {n: v.facts if isinstance(v, Scratch) else v for n, v in launch.args.items()
             if isinstance(v, (TensorFacts, Scratch))}  # fmt: skip
    named = {f.name: n for n, f in facts.items()}
    pairs = [(named[out], named[into]) for out, into in aliased.items() if out in named and into in named]
    kernel = kernel.aliased(*pairs) if pairs else kernel
    arguments = {n: _argument(n, v, kernel.static.get(n, ()), n in flat, exact) for n, v in launch.args.items()}
    return kernel, {**arguments, **launch.constants}, facts


def _planned(launch: Launch, device: Device, aliased: Mapping[str, str]) -> tuple[Program, Schedule, str]:
    """The program of a launch on a GPU, how it is spread over threads, and for which architecture."""
    if not device.sm:
        raise ValueError(f"tiles are compiled for NVIDIA GPUs ahead of a call, not for {device}")
    program, _ = _traced(launch, aliased, exact=True)
    config = launch.options.get("config")
    return program, Schedule(**config) if config else default(program), f"sm_{device.sm}"


def for_gpu(launch: Launch, device: Device, aliased: Mapping[str, str]) -> tuple[Artifact, Launch]:
    """The launch compiled, and as the launcher takes it: with all that may be among its arguments, in blocks."""
    program, schedule, arch = _planned(launch, device, aliased)
    told = (program.name, program_text(program), repr(schedule), arch, nvrtc.version(), compiler_digest())
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()
    artifact = artifacts.cached(f"tile {key}", lambda: _build(program, schedule, arch))
    tensors = {n: v for n, v in launch.args.items() if isinstance(v, (TensorFacts, Scratch))}
    flat = launch.options.get("flat", ())
    memories = {n: memory(v.facts if isinstance(v, Scratch) else v, n in flat) for n, v in tensors.items()}
    args: dict[str, Any] = {f"p_{n}": v for n, v in tensors.items()}
    args |= all_values(memories, {n: v for n, v in launch.args.items() if isinstance(v, (int, float))})
    args |= zip(GRID, launch.grid, strict=True)
    blocks = -(-math.prod(launch.grid) // artifact.block[1])
    return artifact, replace(launch, grid=(blocks, 1, 1), args=args, constants={}, options={})


def _build(program: Program, schedule: Schedule, arch: str) -> Artifact:
    function, source = text_of(program, schedule, arch)
    made = nvrtc.compile(source.text, source.symbol, arch)
    kinds = {p.name: "pointer" if p.kind == "pointer" else "f32" if is_real(p) else "i64" for p in arguments(function)}
    parameters = tuple(Parameter(kind, name) for name, kind in {**kinds, **dict.fromkeys(GRID, "i64")}.items())
    block = (function.threads, function.instances, 1)
    return Artifact(made.image, source.symbol, parameters, block, source.shared,
                    registers=made.registers, spills=made.spills)  # fmt: skip


def fitting(launches: Sequence[Launch], call: Call) -> tuple[tuple[Schedule, ...], str]:
    """The schedules of those launches that follow the config with which all can be compiled for the call's GPU, best
    guess first; and where there is none, why. It is the lowering that is asked."""
    traced = [_traced(launch, call.aliased, exact=True) for launch in launches]
    over = [n for n in (math.prod(launch.grid) for launch in launches) if n > MOST_INSTANCES]
    if over:
        return (), f"a grid of {over[0]} instances; a GPU takes {MOST_INSTANCES}"
    found, why = [], ""
    for schedule in worth_timing(traced[0][0], max(f.columns for _, facts in traced for f in facts.values())):
        spread = [(p, schedule if "config" in launch.options else default(p))
                  for (p, _), launch in zip(traced, launches, strict=True)]  # fmt: skip
        said = next(filter(None, (_refused(*one, f"sm_{call.device.sm}") for one in spread)), "")
        found += [schedule] * (not said)
        why = why or said
    return tuple(found), "" if found else why


def _refused(program: Program, schedule: Schedule, arch: str) -> str:
    """What the lowering says against it; it takes milliseconds, and selection asks often."""
    key = (program.name, program_text(program), schedule, arch)
    if key not in _answers:
        try:
            check(program, schedule, arch)
            answer = ""
        except LowerError as error:
            answer = str(error)
        with _asking:
            if len(_answers) >= MOST_ANSWERS:
                _answers.clear()
            _answers[key] = answer
    return _answers[key]


def _bound(launch: Launch, call: Call, places: dict[str, int]) -> Callable[[Buffers], None]:
    program, facts = _traced(launch, call.aliased, exact=False)
    compiled, flat = cpu.compile(program), launch.options.get("flat", ())
    memories = {n: memory(f, n in flat) for n, f in facts.items()}
    scalars: dict[str, Any] = {n: v for n, v in launch.args.items() if n not in facts}
    pointers = [p for p in compiled.parameters if p.kind == "pointer"]
    head = struct.Struct(f"={len(pointers)}q").pack
    tail = pack(compiled.parameters[len(pointers) :], memories, scalars)
    order = [places[facts[p.of].name] for p in pointers]
    moved = sum(f.numel * f.dtype.itemsize for f in facts.values())
    grid = launch.grid
    serial = moved <= SERIAL_BYTES or grid == (1, 1, 1)
    threads = torch.get_num_threads

    def run(buffers: Buffers) -> None:
        addresses = [buffers[i].data_ptr() for i in order]  # type: ignore[union-attr]
        compiled(head(*addresses) + tail, grid, 1 if serial else threads())

    return run
