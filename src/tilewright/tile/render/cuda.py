"""A whole CUDA C++ file for one kernel: types, the records that it uses, its arguments, and where an instance's threads
start. It includes no header: neither a vendor's nor libc's.

A block is `threads` wide and `instances` deep; instances are numbered along the grid's last axis first, as on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.tile.instr import nvidia
from tilewright.tile.instr.record import SCALARS, needed
from tilewright.tile.ir.thread_ir import Function, Parameter
from tilewright.tile.render.c import element, statements, symbol_of

GRID = ("grid0", "grid1", "grid2")


@dataclass(frozen=True)
class Source:
    """A kernel's text, its symbol, and the bytes of shared memory that a block needs."""

    text: str
    symbol: str
    shared: int


def source(function: Function, offsets: dict[str, int], shared: int) -> Source:
    """The CUDA C++ of a kernel whose barriers are placed. Comments name the author's lines.

    Args:
        offsets: where in the instance's shared memory each array lies; in all it has `shared` bytes, which 16 divides.
    """
    body, plain = ("\n".join(statements(function.body, 2, where)) for where in (True, False))
    head = [nvidia.types(function.lanes), *(r.text for r in needed(plain, nvidia.RECORDS, (), function.lanes))]
    shape = f"{function.threads} {function.instances}"
    told = "".join([*head, repr(function.parameters), repr(offsets), shape, plain])
    symbol = symbol_of(function.name, told)
    passed = arguments(function)
    wrapped = [p for p in passed if p.kind == "pointer" and p.of in function.read_only]
    given = [*(_argument(p, p in wrapped) for p in passed), *(f"const i64 {count}" for count in GRID)]
    parts = [
        "// made by tilewright.tile", *head, "",
        f'extern "C" __global__ void __launch_bounds__({function.threads * function.instances})',
        f"{symbol}({', '.join(given)}) {{",
        *(f"  const ReadOnly<{element(p.dtype)}> {p.name} = {{{p.name}_}};" for p in wrapped),
        *_places(function), *_arrays(function, offsets, shared), body, "}", "",
    ]  # fmt: skip
    return Source("\n".join(parts), symbol, shared * function.instances)


def arguments(function: Function) -> list[Parameter]:
    """What a launch passes, before the three counts of the grid."""
    return [p for p in function.parameters if p.kind != "builtin"]


def _argument(p: Parameter, read_only: bool) -> str:
    if p.kind != "pointer":
        return f"const {SCALARS[p.dtype.name]} {p.name}"
    return f"const {element(p.dtype)}* const {p.name}_" if read_only else f"{element(p.dtype)}* const {p.name}"


def _places(function: Function) -> list[str]:
    """Which instance, and which of its threads."""
    used = {p.name for p in function.parameters if p.kind == "builtin"}
    out = ["  const u32 inner = (u32)(grid1 * grid2);"]
    if function.instances == 1:
        out.append("  const u32 instance = blockIdx.x;")
    else:
        out.append(f"  const u32 instance = blockIdx.x * {function.instances}u + threadIdx.y;")
        out.append("  if (instance >= (u32)grid0 * inner) return;")
    if {"pid0", "pid1", "pid2"} & used:  # most grids have one axis, and need no division
        out.append("  const u32 row = inner == 1 ? instance : instance / inner, within = instance - row * inner;")
        out.append("  const i64 pid0 = row;")
    if {"pid1", "pid2"} & used:
        out.append("  const i64 pid1 = grid2 == 1 ? within : within / (u32)grid2, pid2 = within - pid1 * grid2;")
    if "tid" in used:
        out.append("  const i64 tid = threadIdx.x;")
    return out


def _arrays(function: Function, offsets: dict[str, int], apart: int) -> list[str]:
    """All of them are shared: what a thread has alone is in registers."""
    if not function.arrays:
        return []
    mine = "of_block" if function.instances == 1 else f"of_block + threadIdx.y * {apart}"
    out = ["  extern __shared__ __align__(16) u8 of_block[];", f"  u8* const shared = {mine};"]
    for a in function.arrays:
        kind = element(a.dtype)
        out.append(f"  {kind}* const {a.name} = ({kind}*)(shared + {offsets[a.name]});")
    return out
