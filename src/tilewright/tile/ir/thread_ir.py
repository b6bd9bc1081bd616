"""L1, the thread IR: what one thread does of one instance, in scalars and short vectors.

On a CPU an instance has one thread. On a GPU it has `Function.threads`, which all run this text and differ by the
builtin `tid`. Names are assigned once, except declared variables. Memory is a view's, a scratch or shared array's, or a
register array's, whose index is a constant or counts an unrolled loop. Renderers print this form and no other; its
rules: `thread_verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tilewright.tile.dtypes import DType, int64
from tilewright.tile.errors import Line
from tilewright.tile.layout.linear import Layout


@dataclass(frozen=True)
class Type:
    """A scalar (one lane) or a vector. A vector of bool is a mask."""

    dtype: DType
    lanes: int = 1

    def __str__(self) -> str:
        return f"{self.dtype}" + (f"x{self.lanes}" if self.lanes > 1 else "")


Operand = str | int | float | bool
"""A name, or a constant of the type that the operation wants."""


@dataclass(frozen=True)
class Let:
    """`name` is the result of an operation; `operands` is their type where it is not the result's. A `mode` of "fast":
    the target's own approximation of a function."""

    name: str
    type: Type
    op: str
    args: tuple[Operand, ...]
    operands: Type | None = None
    mode: str = ""
    line: Line | None = None


@dataclass(frozen=True)
class Declare:
    """A variable, or a register array of `count` values, each with this value first."""

    name: str
    type: Type
    value: Operand
    count: int = 0


@dataclass(frozen=True)
class Assign:
    name: str
    type: Type
    value: Operand
    index: Operand | None = None


@dataclass(frozen=True)
class Load:
    """Elements of `memory` from `index` on, `stride` apart; with a vector `index`, wherever that says. Of a vector only
    the first `count` lanes, or those of `mask`, are touched: the others are `other` (with `count`: 0).

    `layout`: which thread of the instance touches which element, in one period of the memory (it repeats); None where
    any thread may touch any element. `align`: bytes that the address of a vector is a multiple of; 0 is its element's.
    """

    name: str
    type: Type
    memory: str
    index: Operand
    stride: Operand = 1
    count: Operand | None = None
    mask: Operand | None = None
    other: Operand = 0
    scattered: bool = False
    line: Line | None = None
    layout: Layout | None = None
    align: int = 0


@dataclass(frozen=True)
class Store:
    """The counterpart of `Load`. With a `source`, `value` is an index into that memory, which nobody writes, and what
    is there, as many elements, is copied while the thread goes on: it is here after a `Wait`. Lanes beyond `count`
    have no value then. `own`: no element that it writes is written by it in another thread, or iteration."""

    memory: str
    type: Type
    index: Operand
    value: Operand
    stride: Operand = 1
    count: Operand | None = None
    mask: Operand | None = None
    scattered: bool = False
    line: Line | None = None
    layout: Layout | None = None
    align: int = 0
    source: str = ""
    own: bool = False


@dataclass(frozen=True)
class Wait:
    """Until all that this thread copies is there."""


@dataclass(frozen=True)
class Print:
    """A line for each lane of `value`, as printf writes `format` with `place` and then the value. `place[along]` counts
    on from lane to lane; of a vector only the first `count` lanes are printed."""

    format: str
    type: Type
    value: Operand
    place: tuple[Operand, ...]
    along: int = -1
    count: Operand | None = None
    line: Line | None = None


@dataclass(frozen=True)
class Barrier:
    """No thread of the scope ("warp" or "block": the instance's) goes on before all are here, and what they wrote is
    seen. `why` names the accesses that it parts."""

    scope: str
    why: str = ""


@dataclass(frozen=True)
class For:
    """Counts `var` from `lo` while below `hi`. `unroll`: the bounds are constants and the loop is written out.
    `any_step`: the step may be anything; below 1 the loop does not run, and `var` never passes `hi`."""

    var: str
    lo: Operand
    hi: Operand
    step: Operand
    body: list[Statement]
    unroll: bool = False
    any_step: bool = False

    @property
    def decides(self) -> tuple[Operand, ...]:
        """What decides how often the body runs."""
        return self.lo, self.hi, self.step


@dataclass(frozen=True)
class If:
    condition: Operand
    body: list[Statement]

    @property
    def decides(self) -> tuple[Operand, ...]:
        return (self.condition,)


Statement = Let | Declare | Assign | Load | Store | Wait | Print | Barrier | For | If


@dataclass(frozen=True)
class Parameter:
    """A run-time argument. `kind`: "pointer", "stride" (of a storage axis, in elements), "extent" (size of a storage
    axis), "size" (of a view's axis), "scalar", or "builtin" (`of` "pid", "grid" or "thread")."""

    name: str
    kind: str
    of: str
    axis: int = 0
    dtype: DType = int64


@dataclass(frozen=True)
class Array:
    """Scratch memory of one thread, or of all threads of an instance."""

    name: str
    dtype: DType
    elements: int
    shared: bool = False


@dataclass
class Function:
    """A lowered kernel. `threads` an instance, `instances` a block (more than one only where an instance is a warp).
    `inplace`: pairs of views that may be the same memory."""

    name: str
    lanes: int
    threads: int = 1
    instances: int = 1
    parameters: list[Parameter] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    read_only: frozenset[str] = frozenset()
    inplace: frozenset[frozenset[str]] = frozenset()

    def statements(self) -> Iterator[Statement]:
        return _statements(self.body)


def _statements(body: list[Statement]) -> Iterator[Statement]:
    for s in body:
        yield s
        if isinstance(s, (For, If)):
            yield from _statements(s.body)
