"""L0 as text: one node a line. For people, for the cache key (so that closures and constants count), and for tests."""

from __future__ import annotations

from tilewright.tile.ir.tile_ir import Dim, Node, Program, Region, operands_first


def program_text(program: Program, *, lines: bool = False) -> str:
    """The program as text; nodes are numbered by first use, so equal programs have equal text.

    Args:
        lines: name the author's line of each node. Without them the text does not change with where a kernel lives.
    """
    return _Printer(lines).program(program)


class _Printer:
    def __init__(self, lines: bool) -> None:
        self.lines = lines
        self.numbers: dict[Node, int] = {}
        self.out: list[str] = []

    def program(self, program: Program) -> str:
        for name, view in program.views.items():
            sizes = ", ".join("?" if s is None else str(s) for s in view.sizes)
            kind = "" if view.unit else " strided"
            self.out.append(f"view {name}: {view.dtype}[{sizes}]{kind} levels={view.levels} align={view.align}")
        self.out += [f"scalar {name}: {dtype}" for name, dtype in program.scalars.items()]
        self.out += sorted("inplace " + " ".join(sorted(pair)) for pair in program.inplace)
        self.region(program.body, 0)
        return "\n".join(self.out) + "\n"

    def region(self, region: Region, depth: int) -> None:
        for effect in region.effects:
            self.node(effect, depth)
            if "body" in effect.attrs:
                self.region(effect.attrs["body"], depth + 1)

    def node(self, node: Node, depth: int) -> None:
        for one in operands_first(node, self.numbers.__contains__):
            self.numbers[one] = len(self.numbers)
            self.out.append("  " * depth + self.one(one))

    def one(self, node: Node) -> str:
        attrs = "".join(f" {k}={_plain(v)}" for k, v in node.attrs.items() if k != "body")
        args = " ".join(f"%{self.numbers[a]}" for a in node.args)
        where = f"  # {node.line}" if self.lines else ""
        shape = ", ".join(f"%{self.numbers[a.limit]}<={a.most}" if isinstance(a, Dim) else str(a) for a in node.shape)
        return f"%{self.numbers[node]} = {node.op}{attrs} {args} : {node.dtype}[{shape}]{where}"


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, float) else str(value)
