"""What the compiler decided about a kernel, in words: for authors, and for whoever wonders why it is slow.

Each fact is read from the program, its phases and the thread's function; a GPU's registers, from what ptxas says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tilewright.tile.cost import H200, estimate
from tilewright.tile.errors import LowerError, TileError
from tilewright.tile.fuse import decide
from tilewright.tile.instr.record import needed
from tilewright.tile.ir.thread_ir import Barrier, Declare, Function, Load, Store
from tilewright.tile.ir.tile_ir import Most, Node, Program, Region, shape_text
from tilewright.tile.lang.kernel import Argument, Kernel
from tilewright.tile.layout.linear import Layout
from tilewright.tile.lower.kernel import lower
from tilewright.tile.lower.phases import Plan, folds, phases_in_order
from tilewright.tile.lower.threads import dealt
from tilewright.tile.render.c import statements
from tilewright.tile.render.cpu import RECORDS, lanes_of
from tilewright.tile.runtime import cuda, nvrtc
from tilewright.tile.runtime.launch import grid_of
from tilewright.tile.runtime.target import Cpu, this_cpu
from tilewright.tile.schedule import Schedule, default


class Explanation(str):
    """The lines. `layout`: how the threads of a GPU share the elements of a row; None for a CPU."""

    layout: Layout | None = None

    def plot(self, path: str | Path = "") -> str:
        """A picture of the layout as SVG text; see `Layout.plot`.

        Raises:
            TileError: the explanation is a CPU's, where one thread has a whole row.
        """
        if self.layout is None:
            raise TileError("on a CPU one thread has a whole row: there is no layout to draw; explain(..., gpu=...)")
        return self.layout.plot(path, self.partition("\n")[0])


def explain(
    kernel: Kernel, arguments: Mapping[str, Argument], cpu: Cpu | None = None, *, gpu: str = "",
    schedule: Schedule | None = None, instances: int | tuple[int, ...] = (),
) -> Explanation:  # fmt: skip
    """The decisions for arguments of these types, a line each; see `Kernel.trace` for `arguments`.

    Args:
        gpu: an architecture ("sm_90") to explain the code for, instead of a CPU's; it is compiled where a compiler is.
        schedule: of its threads; the usual one where it is not given.
        instances: with a GPU, estimate a launch of so many, or of a grid, and whether to fuse what is bound.
    """
    more = fusions(kernel, arguments, instances) if gpu and instances else []
    return explained(kernel.trace(arguments), cpu, gpu=gpu, schedule=schedule, instances=instances, more=more)


def explained(
    program: Program, cpu: Cpu | None = None, *, gpu: str = "", schedule: Schedule | None = None,
    instances: int | tuple[int, ...] = (), more: Sequence[str] = (),
) -> Explanation:  # fmt: skip
    """The decisions for a program that is traced, and `more` lines of a GPU's; see `explain`."""
    plan = Plan(program)
    if gpu:
        chosen = schedule or default(program)
        lines = [*_about(program, gpu), *_on_gpu(program, plan, gpu, chosen)]
        lines += [_estimate(program, chosen, instances)] if instances else []
        said = Explanation("\n".join([*lines, *more]))
        said.layout = dealt(chosen)
        return said
    target = cpu or this_cpu()
    lanes = lanes_of(target.features)
    function = lower(program, lanes)
    out = _about(program, str(target))
    out.append(f"vectors       {lanes} lanes of float32")
    out += _phases(plan, program.body)
    out += [f"scratch       {_value(n)}, kept by a loop over {shape_text(p.space)}" for n, p in plan.scratch.items()]
    total = sum(a.elements * a.dtype.itemsize for a in function.arrays)
    out.append(f"scratch size  at most {total} bytes a thread")
    out += _slow_accesses(function)
    records = needed("\n".join(statements(function.body, 0, False)), RECORDS, target.features, lanes)
    native = [r.name for r in records if r.needs]
    out.append(f"instructions  {', '.join(native) or 'none of its own'}")
    return Explanation("\n".join(out))


def _about(program: Program, target: str) -> list[str]:
    """What it is compiled for."""
    sizes = [
        f"{name}.shape[{axis}] {'at most ' + str(size.value) if isinstance(size, Most) else '= ' + str(size)}"
        for name, view in program.views.items()
        for axis, size in enumerate(view.sizes)
        if size is not None
    ]
    views = ", ".join(f"{n} {v.dtype}" for n, v in program.views.items())
    return [f"{program.name}  {target}  {views}", f"compiled for  {', '.join(sizes) or 'any size'}"]


def _slow_accesses(function: Function) -> list[str]:
    places: dict[str, set[str]] = {"scattered": set(), "strided": set()}
    for s in _accesses(function):
        if s.type.lanes > 1 and (s.scattered or s.stride != 1):
            places["scattered" if s.scattered else "strided"].add(_place(s))
    return [f"{word:13} {', '.join(sorted(at))}: element by element" for word, at in places.items() if at]


def _accesses(function: Function) -> list[Load | Store]:
    """Those that an author wrote."""
    return [s for s in function.statements() if isinstance(s, (Load, Store)) and s.line is not None]


def _place(s: Load | Store) -> str:
    memory = s.source if isinstance(s, Store) and s.source else s.memory
    return f"{memory.removeprefix('p_')} ({s.line})"


def _access(s: Load | Store) -> str:
    """What an access of vectors does."""
    word = "load" if isinstance(s, Load) else "copy" if s.source else "store"
    how = ", to shared memory while the thread goes on" if word == "copy" else ""
    return f"{word} {_place(s)}: {s.align} bytes at once{how}"


def _on_gpu(program: Program, plan: Plan, arch: str, schedule: Schedule) -> list[str]:
    function, source = cuda.text_of(program, schedule)
    beside = f", {schedule.instances} instances a block" if schedule.instances > 1 else ""
    out = [f"threads       {schedule.threads} an instance{beside}, vectors of {schedule.vector} elements"]
    out += _phases(plan, program.body)
    wide = (_access(s) for s in _accesses(function) if s.align)
    out += [*(f"access        {said}" for said in dict.fromkeys(wide)), *_slow_accesses(function)]
    out += [f"waits         {_value(node)}" for node in plan.scratch]
    held = [s for s in function.statements() if isinstance(s, Declare) and s.count and not s.name.startswith("acc")]
    words = sum(s.count * s.type.lanes * max(4, s.type.dtype.itemsize) // 4 for s in held)
    out += [f"waits in      {len(held)} of them in {words} registers a thread"] if held else []
    out.append(f"shared        {source.shared} bytes a block, in {len(function.arrays)} arrays")
    barriers = Counter((s.scope, _parted(s.why)) for s in function.statements() if isinstance(s, Barrier))
    out += [f"barrier       {scope}, {count} x {why}" for (scope, why), count in sorted(barriers.items())]
    if why := nvrtc.missing():
        return [*out, f"registers     unknown: {why}"]
    cubin = cuda.compile(program, schedule, arch).cubin
    return [*out, f"registers     {cubin.registers} a thread, {cubin.spills} bytes spilled, {cubin.stack} of stack"]


def _estimate(program: Program, schedule: Schedule, grid: int | tuple[int, ...]) -> str:
    try:
        cost = estimate(program, schedule, whole := grid_of(program.name, grid))
    except LowerError as error:
        return f"estimate      none: {error}"
    return (f"estimate      {cost.us:.0f} us for {math.prod(whole)} instances on an {H200.name}, limited by "
            f"{cost.limit}")  # fmt: skip


def fusions(kernel: Kernel, arguments: Mapping[str, Argument], grid: int | tuple[int, ...]) -> list[str]:
    """Whether to fuse what is bound to a kernel: a line each."""
    out = []
    for place, piece in kernel.pieces().items():
        if piece is not None:
            try:
                found = decide(kernel, place, arguments, grid)
                times = {"fuse": found.fused_us, "stage": found.staged_us, "materialise": found.apart_us}
                best = times.pop(found.choice.partition("_")[0])
                rest = ", ".join(f"{form} {us:.0f}" for form, us in times.items() if us < math.inf)
                said = f"{found.choice} {best:.0f} us ({rest})"
            except TileError as error:
                said = f"no decision: {error}"
            out.append(f"fusion        {piece.function.__name__}: {said}")
    return out


def _parted(why: str) -> str:
    """What a barrier parts: memory by its author's name; the compiler's arrays have numbers for names."""
    name, _, rest = why.partition(": ")
    own = "a fold over warps" if name.startswith("w") else "a tile that waits"
    return f"{name[2:] if name.startswith('p_') else own}: {rest}"


def _phases(plan: Plan, region: Region, depth: int = 0) -> Iterator[str]:
    for segment in plan.segments[region]:
        for phase in (p for _, phases in phases_in_order(segment) for p in phases):
            did = ", ".join(_effect(n) for n in phase.items) or "keeps what is needed later"
            order = f" by axes {', '.join(map(str, phase.order))}" if phase.order else ""
            yield f"loop          {'  ' * depth}over {shape_text(phase.space)}{order}: {did}"
        if segment.control is not None:
            yield f"{segment.control.op:13} {'  ' * depth}({segment.control.line})"
            yield from _phases(plan, segment.control.attrs["body"], depth + 1)


def _effect(node: Node) -> str:
    if folds(node):
        return f"{node.attrs['combine']} ({node.line})"
    name = next((node.attrs[k] for k in ("view", "text", "scope") if k in node.attrs), "cell")
    return f"{node.op} {name} ({node.line})"


def _value(node: Node) -> str:
    kind = node.attrs.get("kind") or node.attrs.get("view") or node.attrs.get("scope") or ""
    return f"{node.op} {kind} {node.dtype}{shape_text(node.shape)} ({node.line})".replace("  ", " ")
