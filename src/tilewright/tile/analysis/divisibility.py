"""What is known of an integer: a divisor and an interval, by rules that never claim too much.

`Known` is an abstract integer; each operation gives a `Known` that holds every possible result. `of` finds it for the
nodes of a program. Division and remainder round down, as in the language: C's agree where `non_negative` is proven.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from tilewright.tile.ir.tile_ir import Most, Node, Program, operands_first, static_size

Bound = int | None


@dataclass(frozen=True)
class Known:
    """A multiple of `divisor` in [low, high]; None is no bound. Only 0 is a multiple of 0."""

    divisor: int = 1
    low: Bound = None
    high: Bound = None

    def holds(self, value: int) -> bool:
        """Whether `value` is possible."""
        multiple = value % self.divisor == 0 if self.divisor else value == 0
        return multiple and (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    @property
    def non_negative(self) -> bool:
        return self.low is not None and self.low >= 0

    @property
    def positive(self) -> bool:
        return self.low is not None and self.low > 0

    def fits(self, bits: int) -> bool:
        """Whether a signed integer of so many bits holds every possible value."""
        most = 1 << bits - 1
        return self.low is not None and self.high is not None and -most <= self.low and self.high < most

    def __add__(self, other: Known) -> Known:
        return Known(gcd(self.divisor, other.divisor), _both(self.low, other.low), _both(self.high, other.high))

    def __neg__(self) -> Known:
        return Known(self.divisor, None if self.high is None else -self.high, None if self.low is None else -self.low)

    def __sub__(self, other: Known) -> Known:
        return self + -other

    def __mul__(self, other: Known) -> Known:
        divisor = self.divisor * other.divisor
        if None not in (self.low, self.high, other.low, other.high):
            ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]  # type: ignore[operator]
            return Known(divisor, min(ends), max(ends))
        if self.non_negative and other.non_negative:
            assert self.low is not None and other.low is not None
            return Known(divisor, self.low * other.low, None)
        return Known(divisor)

    def __floordiv__(self, by: int) -> Known:
        """By a positive constant. A multiple of 16 over 12 is a multiple of nothing: 16 // 12 is 1."""
        divisor = self.divisor // by if self.divisor % by == 0 else 1
        return Known(divisor, _over(self.low, by), _over(self.high, by))

    def __mod__(self, by: int) -> Known:
        """Of a positive constant. A multiple of 16 modulo 3 is anything below 3."""
        if self.divisor % by == 0:
            return constant(0)
        if self.non_negative and self.high is not None and self.high < by:
            return self
        return Known(gcd(self.divisor, by), 0, by - 1)

    def join(self, other: Known) -> Known:
        """What holds of a value that is one of two."""
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Known(gcd(self.divisor, other.divisor), low, high)

    def least(self, other: Known) -> Known:
        """Of the smaller of two."""
        highs = [h for h in (self.high, other.high) if h is not None]
        return replace(self.join(other), high=min(highs, default=None))

    def greatest(self, other: Known) -> Known:
        lows = [b for b in (self.low, other.low) if b is not None]
        return replace(self.join(other), low=max(lows, default=None))


ANY = Known()
_EXACT = {
    "add": Known.__add__, "sub": Known.__sub__, "mul": Known.__mul__, "min": Known.least, "max": Known.greatest,
}  # fmt: skip


def constant(value: int) -> Known:
    return Known(abs(value), value, value)


class Facts:
    """What is known of the integers of a program. An index or a cell of a loop is known by its bounds alone."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[Node, Known] = {}

    def of(self, node: Node) -> Known:
        """What is known of every element of a node."""
        for one in operands_first(node, self._found.__contains__):
            self._found[one] = self._one(one)
        return self._found[node]

    def _one(self, node: Node) -> Known:
        a, args = node.attrs, [self._found[x] for x in node.args]
        if not node.dtype.integer:
            return ANY
        if node.op == "const":
            return constant(a["value"])
        if node.op in ("program_id", "num_programs"):
            return Known(1, 0 if node.op == "program_id" else 1, (1 << 62) - 1)
        if node.op == "size":
            size = self.program.views[a["view"]].sizes[a["axis"]]
            return Known(1, 0, size.value if isinstance(size, Most) else (1 << 62) - 1)
        if node.op == "arange":
            return Known(1, 0, static_size(node.shape[0]) - 1)
        if node.op in ("broadcast", "reshape"):
            return args[0]
        if node.op == "cast":
            fits = args[0].low is not None and args[0].high is not None
            low, high = node.dtype.bounds
            inside = fits and low <= args[0].low and args[0].high <= high  # type: ignore[operator]
            return args[0] if inside else Known(1, low, high)
        if node.op == "where":
            return args[1].join(args[2])
        if node.op == "load":
            return Known(1, *node.dtype.bounds)
        if node.op != "binary":
            return ANY
        return self._binary(node, args[0], args[1])

    @staticmethod
    def _binary(node: Node, left: Known, right: Known) -> Known:
        kind = node.attrs["kind"]
        by = node.args[1].attrs.get("value", 0) if node.args[1].op == "const" else 0
        found = ANY
        if kind in _EXACT:
            found = _EXACT[kind](left, right)
        elif by > 0 and kind in ("floordiv", "shr"):
            found = left // (by if kind == "floordiv" else 1 << by)
        elif by > 0 and kind == "mod":
            found = left % by
        elif by > 0 and kind == "and":
            found = Known(1, 0, by)
        bits = 8 * node.dtype.itemsize
        return found if found.fits(bits) else ANY  # it may have wrapped round


def _both(a: Bound, b: Bound) -> Bound:
    return None if a is None or b is None else a + b


def _over(a: Bound, by: int) -> Bound:
    return None if a is None else a // by
