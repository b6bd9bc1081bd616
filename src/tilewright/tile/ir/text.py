"""L0 as text: one node a line. For people, for the cache key (so that closures and constants count), and for tests."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.tile.ir.tile_ir import Dim, Node, Program, Region, operands_first


def program_text(program: Program, *, lines: bool = False) -> str:
    """The program as text; nodes are numbered by first use, so equal programs have equal text.

    Args:
        lines: name the author's line of each node. Without them the text does not change with where a kernel lives.
    """
    out: list[str] = []
    numbers: dict[Node, int] = {}
    for name, view in program.views.items():
        sizes = ", ".join("?" if s is None else str(s) for s in view.sizes)
        kind = "" if view.unit else " strided"
        out.append(f"view {name}: {view.dtype}[{sizes}]{kind} levels={view.levels} align={view.align}")
    out += [f"scalar {name}: {dtype}" for name, dtype in program.scalars.items()]
    out += sorted("inplace " + " ".join(sorted(pair)) for pair in program.inplace)

    def region(one: Region, depth: int) -> None:
        for effect in one.effects:
            for node in operands_first(effect, numbers.__contains__):
                numbers[node] = len(numbers)
                out.append("  " * depth + _line(node, numbers) + (f"  # {node.line}" if lines else ""))
            if "body" in effect.attrs:
                region(effect.attrs["body"], depth + 1)

    region(program.body, 0)
    return "\n".join(out) + "\n"


def _line(node: Node, numbers: Mapping[Node, int]) -> str:
    attrs = "".join(f" {k}={v.hex() if isinstance(v, float) else v}" for k, v in node.attrs.items() if k != "body")
    args = " ".join(f"%{numbers[a]}" for a in node.args)
    shape = ", ".join(f"%{numbers[a.limit]}<={a.most}" if isinstance(a, Dim) else str(a) for a in node.shape)
    return f"%{numbers[node]} = {node.op}{attrs} {args} : {node.dtype}[{shape}]"
