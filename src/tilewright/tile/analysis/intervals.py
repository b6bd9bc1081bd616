"""Between which bounds an integer lies, by rules that never claim too much.

C's division and remainder agree with the language's, which round down, where what is divided is proven not to be
negative.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.tile.dtypes import int64
from tilewright.tile.ir.tile_ir import Most, Node, Program, operands_first, static_size

Range = tuple[int, int]
"""The least and the greatest possible value."""
COUNT = (1 << 62) - 1
"""The most that anything can be counted to."""


def _product(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


RULES: dict[str, Callable[[Range, Range], Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]), "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]), "mul": _product,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}  # fmt: skip
BY_POSITIVE: dict[str, Callable[[Range, int], Range]] = {
    "floordiv": lambda a, by: (a[0] // by, a[1] // by), "shr": lambda a, by: (a[0] >> by, a[1] >> by),
    "mod": lambda a, by: a if a[0] >= 0 and a[1] < by else (0, by - 1), "and": lambda a, by: (0, by),
}  # fmt: skip
"""Where the second operand is a positive constant."""


class Facts:
    """What is known of the integers of a program. An index or a cell of a loop is known by its bounds alone."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[Node, Range] = {}

    def of(self, node: Node) -> Range:
        """Bounds of every element of a node."""
        for one in operands_first(node, self._found.__contains__):
            self._found[one] = self._one(one)
        return self._found[node]

    def _one(self, node: Node) -> Range:
        if not node.dtype.integer:
            return int64.bounds
        a, args, found = node.attrs, [self._found[x] for x in node.args], node.dtype.bounds
        low, high = found
        if node.op == "const":
            return a["value"], a["value"]
        if node.op in ("program_id", "num_programs"):
            return int(node.op == "num_programs"), COUNT
        if node.op == "size":
            size = self.program.views[a["view"]].sizes[a["axis"]]
            return 0, size.value if isinstance(size, Most) else COUNT
        if node.op == "arange":
            return 0, static_size(node.shape[0]) - 1
        if node.op in ("broadcast", "reshape", "cast", "stage"):
            found = args[0]
        elif node.op == "where":
            found = min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
        elif node.op == "binary":
            by = node.args[1].attrs["value"] if node.args[1].op == "const" else 0
            if a["kind"] in RULES:
                found = RULES[a["kind"]](*args)
            elif by > 0 and a["kind"] in BY_POSITIVE:
                found = BY_POSITIVE[a["kind"]](args[0], by)
        return found if low <= found[0] and found[1] <= high else (low, high)  # it may have wrapped round
