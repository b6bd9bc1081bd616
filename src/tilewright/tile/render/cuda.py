"""A whole CUDA C++ file for one kernel: types, the records that it uses, its arguments, and where an instance's threads
start. It includes no header: neither a vendor's nor libc's.

A block is `threads` wide and `instances` deep; instances are numbered along the grid's last axis first, as on a CPU.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tilewright.tile.errors import LowerError
from tilewright.tile.instr import nvidia
from tilewright.tile.instr.record import needed
from tilewright.tile.ir.thread_ir import Function
from tilewright.tile.render.c import SCALARS, arguments, element, statements

MOST_SHARED = 227 << 10
"""Bytes of shared memory that a block can ask for on sm_90; less elsewhere, which the driver says."""
GRID = ("grid0", "grid1", "grid2")


@dataclass(frozen=True)
class Source:
    """A kernel's text, its symbol, and the bytes of shared memory that a block needs."""

    text: str
    symbol: str
    shared: int


def source(function: Function, offsets: dict[str, int], shared: int, *, where: bool = True) -> Source:
    """The CUDA C++ of a kernel whose barriers are placed.

    Args:
        offsets: where in the instance's shared memory each array lies; in all it has `shared` bytes.
        where: name the author's lines in comments.

    Raises:
        LowerError: the block needs more shared memory than there is.
    """
    apart = -(-shared // 16) * 16
    total = apart * function.instances
    if total > MOST_SHARED:
        raise LowerError(f"{function.name} needs {total} bytes of shared memory; a block has {MOST_SHARED}")
    body, plain = ("\n".join(statements(function.body, 2, w)) for w in (where, False))
    head = [nvidia.types(function.lanes), *(r.text for r in needed(plain, nvidia.RECORDS, (), function.lanes))]
    shape = f"{function.threads} {function.instances}"
    told = "".join([*head, repr(function.parameters), repr(offsets), shape, plain])
    name = re.sub(r"[^0-9A-Za-z]+", "_", function.name).strip("_") or "kernel"
    symbol = f"tile_{name}_{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    parts = ["// made by tilewright.tile", *head, "", arguments(function.parameters, symbol, *GRID), ""]
    bound = function.threads * function.instances
    parts.append(f'extern "C" __global__ void __launch_bounds__({bound})')
    parts.append(f"{symbol}(const __grid_constant__ Args_{symbol} args) {{")
    parts += [*_places(function), *_arrays(function, offsets, apart), *_parameters(function), body, "}", ""]
    return Source("\n".join(parts), symbol, total)


def _places(function: Function) -> list[str]:
    """Which instance, and which of its threads."""
    used = {p.name for p in function.parameters if p.kind == "builtin"}
    out = ["  const u32 grid1 = (u32)args.grid1, grid2 = (u32)args.grid2;"]
    if function.instances == 1:
        out.append("  const u32 instance = blockIdx.x;")
    else:
        out.append(f"  const u32 instance = blockIdx.x * {function.instances}u + threadIdx.y;")
        out.append("  if (instance >= (u32)args.grid0 * grid1 * grid2) return;")
    if {"pid1", "pid2"} & used:
        out.append("  const i64 pid2 = grid2 == 1 ? 0 : instance % grid2;")
        out.append("  const u32 before = grid2 == 1 ? instance : instance / grid2;")
        out.append("  const i64 pid1 = before % grid1, pid0 = before / grid1;")
    elif "pid0" in used:
        out.append("  const i64 pid0 = grid1 * grid2 == 1 ? instance : instance / (grid1 * grid2);")
    if "tid" in used:
        out.append("  const i64 tid = threadIdx.x;")
    return out


def _arrays(function: Function, offsets: dict[str, int], apart: int) -> list[str]:
    out = []
    if any(a.shared for a in function.arrays):
        out.append("  extern __shared__ __align__(16) u8 of_block[];")
        mine = "of_block" if function.instances == 1 else f"of_block + threadIdx.y * {apart}"
        out.append(f"  u8* const shared = {mine};")
    for a in function.arrays:
        kind = element(a.dtype)
        if a.shared:
            out.append(f"  {kind}* const {a.name} = ({kind}*)(shared + {offsets[a.name]});")
        else:
            out.append(f"  {kind} {a.name}[{a.elements}];")
    return out


def _parameters(function: Function) -> list[str]:
    out = []
    for p in function.parameters:
        if p.kind == "builtin":
            if p.name == "grid0":
                out.append("  const i64 grid0 = args.grid0;")
            continue
        assert p.dtype is not None
        kind = element(p.dtype)
        if p.kind != "pointer":
            out.append(f"  const {SCALARS[p.dtype.name]} {p.name} = ({SCALARS[p.dtype.name]})args.{p.name};")
        elif p.of in function.read_only:
            out.append(f"  const ReadOnly<{kind}> {p.name} = {{args.{p.name}}};")
        else:
            out.append(f"  {kind}* const {p.name} = args.{p.name};")
    return out
