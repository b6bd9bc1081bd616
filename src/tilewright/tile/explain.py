"""What the compiler decided about a kernel, in words: for authors, and for whoever wonders why it is slow.

It lowers and compiles nothing else; each fact is read from the program, its phases and the thread's function.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.tile.instr.record import needed
from tilewright.tile.ir.thread_ir import Load, Store
from tilewright.tile.ir.tile_ir import Most, Node, Program, Region, shape_text
from tilewright.tile.lang.kernel import Argument, Kernel
from tilewright.tile.lower.kernel import lower
from tilewright.tile.lower.phases import Plan, folds, phases_in_order
from tilewright.tile.render.c import statements
from tilewright.tile.render.cpu import RECORDS, lanes_of
from tilewright.tile.runtime.target import Cpu, this_cpu


def explain(kernel: Kernel, arguments: Mapping[str, Argument], cpu: Cpu | None = None) -> str:
    """The decisions for arguments of these types, a line each; see `Kernel.trace` for `arguments`."""
    target = cpu or this_cpu()
    program = kernel.trace(arguments)
    lanes = lanes_of(target.features)
    plan, function = Plan(program), lower(program, lanes)
    out = [f"{program.name}  {target}  {', '.join(f'{n} {v.dtype}' for n, v in program.views.items())}"]
    sizes = [
        f"{name}.shape[{axis}] {'at most ' + str(size.value) if isinstance(size, Most) else '= ' + str(size)}"
        for name, view in program.views.items()
        for axis, size in enumerate(view.sizes)
        if size is not None
    ]
    out.append(f"compiled for  {', '.join(sizes) or 'any size'}")
    out.append(f"vectors       {lanes} lanes of float32")
    out += _phases(program, plan)
    for node, phase in plan.scratch.items():
        out.append(f"scratch       {_value(node)}, kept by a loop over {shape_text(phase.space)}")
    total = sum(a.elements * a.dtype.itemsize for a in function.arrays)
    out.append(f"scratch size  at most {total} bytes a thread")
    accesses = [s for s in function.statements() if isinstance(s, (Load, Store)) and s.type.lanes > 1]
    for word, slow in (("scattered", [s for s in accesses if s.scattered]),
                       ("strided", [s for s in accesses if s.stride != 1 and not s.scattered])):  # fmt: skip
        places = sorted({f"{s.memory} ({s.line})" for s in slow if s.line is not None})
        out += [f"{word:13} {', '.join(places)}: element by element"] if places else []
    records = needed("\n".join(statements(function.body, 0, False)), RECORDS, target.features, lanes)
    native = [r.name for r in records if r.needs]
    out.append(f"instructions  {', '.join(native) or 'none of its own'}")
    return "\n".join(out)


def _phases(program: Program, plan: Plan) -> list[str]:
    out: list[str] = []

    def region(one: Region, depth: int) -> None:
        for segment in plan.segments[one]:
            for _, _, phases in phases_in_order(segment):
                for phase in phases:
                    did = ", ".join(_effect(n) for n in phase.items) or "keeps what is needed later"
                    out.append(f"loop          {'  ' * depth}over {shape_text(phase.space)}: {did}")
            if segment.control is not None:
                out.append(f"{segment.control.op:13} {'  ' * depth}({segment.control.line})")
                region(segment.control.attrs["body"], depth + 1)

    region(program.body, 0)
    return out


def _effect(node: Node) -> str:
    if folds(node):
        return f"{node.attrs['combine']} ({node.line})"
    return f"{node.op} {node.attrs.get('view', 'cell')} ({node.line})"


def _value(node: Node) -> str:
    kind = node.attrs.get("kind") or node.attrs.get("view") or ""
    return f"{node.op} {kind} {node.dtype}{shape_text(node.shape)} ({node.line})".replace("  ", " ")
