"""The tile backend: kernels of the library's own tile compiler, run on the CPU.

A kernel function returns launches whose `function` is a `tile.Kernel`. `args` are its arguments by name; a tensor is a
view of its rows, [rows, columns], unless `options["flat"]` names it: then it is one axis of all its elements. What an
option or an absent tensor leaves out of the kernel is a constant of its trace. How tiles are compiled is in `tile/`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tilewright.core.backend import Backend, Buffers, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Launch, Scratch, scratches
from tilewright.core.reason import Reason
from tilewright.tile import dtypes
from tilewright.tile.ir.tile_ir import ViewType
from tilewright.tile.lang.kernel import Argument
from tilewright.tile.runtime import cpu, target
from tilewright.tile.runtime.arguments import Memory, pack, type_of
from tilewright.tile.runtime.store import compiler_digest

WIDEST = 131072
"""The most columns of a view whose kernel asks for them: what scratch is made for."""
SERIAL_BYTES = 1 << 16
"""Calls that move less run on one thread: entering a parallel region costs more than they do."""
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

    def missing(self) -> Reason | None:
        why = target.missing()
        return Reason("compiler", why, "install g++") if why else None

    def version(self) -> str:
        tool = target.compiler()
        return f"{tool.version}, {target.this_cpu()}, {compiler_digest()[:16]}" if tool else ""

    def targets(self) -> list[str]:
        return [str(target.this_cpu())] if target.compiler() else []

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
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


def _argument(name: str, value: Any, asked: Collection[int], flat: bool) -> Argument:
    if isinstance(value, (TensorFacts, Scratch)):
        facts = value.facts if isinstance(value, Scratch) else value
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


def _bound(launch: Launch, call: Call, places: dict[str, int]) -> Callable[[Buffers], None]:
    kernel, flat = launch.function, launch.options.get("flat", ())
    facts = {n: v.facts if isinstance(v, Scratch) else v for n, v in launch.args.items()
             if isinstance(v, (TensorFacts, Scratch))}  # fmt: skip
    named = {f.name: n for n, f in facts.items()}
    pairs = [(named[out], named[into]) for out, into in call.aliased.items() if out in named and into in named]
    kernel = kernel.aliased(*pairs) if pairs else kernel
    arguments = tuple(
        (n, _argument(n, v, kernel.static.get(n, ()), n in flat)) for n, v in launch.args.items()
    )  # fmt: skip
    compiled = cpu.compile(kernel.trace({**dict(arguments), **launch.constants}))
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
