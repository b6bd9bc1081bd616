"""The handles that a kernel's author holds: tiles, views, places in views, and cells.

A `Tile` is an immutable value of a static shape (a scalar where that is empty). Operators record; nothing is computed.
The functions of `t` are in `functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from tilewright.tile import dtypes
from tilewright.tile.dtypes import DType
from tilewright.tile.errors import TraceError
from tilewright.tile.ir import tile_ir as ir
from tilewright.tile.lang.trace import Recorder

ROUNDINGS = ("nearest_even", "toward_zero")
LOGICAL = frozenset(("and", "or", "xor", "eq", "ne"))
REAL = ir.COMPARISONS | {"add", "sub", "mul", "div", "min", "max"}


def _operator(kind: str) -> Callable[[Tile, Any], Tile]:
    """A Python operator, as a method of the tile on its left."""
    return lambda self, other: binary(kind, self, other)


def _reflected(kind: str) -> Callable[[Tile, Any], Tile]:
    """The same of the tile on its right."""
    return lambda self, other: binary(kind, other, self)


class Tile:
    """A tile of values, or one scalar."""

    __slots__ = ("_t", "node")
    __array_ufunc__ = None  # numpy's operators leave theirs to ours
    __hash__ = object.__hash__

    def __init__(self, recorder: Recorder, node: ir.Node) -> None:
        self._t, self.node = recorder, node

    @property
    def shape(self) -> ir.Shape:
        return self.node.shape

    @property
    def dtype(self) -> DType:
        return self.node.dtype

    def __repr__(self) -> str:
        return f"<tile {self.dtype}{ir.shape_text(self.shape)} from {self.node.line}>"

    # Arithmetic ---------------------------------------------------------------------------------------------------

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __floordiv__, __mod__ = _operator("floordiv"), _operator("mod")
    __and__, __or__, __xor__ = _operator("and"), _operator("or"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("shr")
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]

    def __neg__(self) -> Tile:
        return unary("neg", self)

    def __invert__(self) -> Tile:
        return unary("not", self)

    # Shape and type -----------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tile:
        """`x[:, None]` and the like: new axes of size 1, and nothing else."""
        parts = index if isinstance(index, tuple) else (index,)
        kept = [p for p in parts if p is not None]
        if any(p != slice(None) for p in kept) or len(kept) != len(self.shape):
            raise TraceError(
                f"a tile of shape {ir.shape_text(self.shape)} takes `:` for each axis, and None for new ones"
            )
        counter = iter(range(len(self.shape)))
        axes = tuple(-1 if p is None else next(counter) for p in parts)
        shape = tuple(1 if a < 0 else self.shape[a] for a in axes)
        return made("broadcast", self, shape=shape, dtype=self.dtype, axes=axes)

    def reshape(self, *shape: int) -> Tile:
        """The same elements in the same order under another shape."""
        if any(isinstance(a, ir.Dim) for a in self.shape):
            raise TraceError("reshape would regroup an axis of run-time size: load the tile in its final shape")
        if ir.elements(self.shape) != ir.elements(shape):
            raise TraceError(f"{ir.shape_text(self.shape)} does not reshape to {ir.shape_text(shape)}")
        return made("reshape", self, shape=tuple(shape), dtype=self.dtype)

    def to(self, dtype: DType, round: str = "", saturate: bool = False) -> Tile:
        """A cast. Floating types round to nearest even.

        Args:
            round: from float to an integer, "nearest_even" or "toward_zero"; needed there.
            saturate: clamp what lies beyond the dtype to its ends; NaN gives 0 in an integer, and stays in a float.
        """
        mine = self.dtype
        if mine == dtype:
            return self
        if mine.floating and dtype.integer:
            if round not in ROUNDINGS:
                raise TraceError(f"from {mine} to {dtype}: say round=, one of {', '.join(ROUNDINGS)}")
            if not saturate:
                raise TraceError(f"from {mine} to {dtype}: what does not fit has no value; say saturate=True")
        elif round not in ("", "nearest_even"):
            raise TraceError(f"from {mine} to {dtype} there is one rounding, to nearest even")
        if dtype == dtypes.float8_e4m3fn and not saturate:
            raise TraceError(f"{dtype} has no infinity; say saturate=True")
        if dtype.floating and not mine.computes and mine.floating and dtype != dtypes.float32:
            return self.to(dtypes.float32).to(dtype, saturate=saturate)
        if mine.kind != "b" and dtype == dtypes.boolean:
            raise TraceError("compare with 0 instead of casting to bool")
        return made("cast", self, shape=self.shape, dtype=dtype, round=round or "nearest_even", saturate=saturate)

    def f32(self) -> Tile:
        return self.to(dtypes.float32)

    def i32(self) -> Tile:
        return self.to(dtypes.int32)

    def i64(self) -> Tile:
        return self.to(dtypes.int64)

    def bits(self, dtype: DType) -> Tile:
        """The same bits as another dtype of the same size."""
        if dtype.itemsize != self.dtype.itemsize or not (dtype.computes and self.dtype.computes):
            raise TraceError(f"the bits of {self.dtype} are no {dtype}")
        return made("bitcast", self, shape=self.shape, dtype=dtype)

    # What Python would do behind the author's back ------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise TraceError(
            "a tile has no truth value while a kernel is traced (this is what `if`, `and`, `or`, `not` and chained "
            "comparisons ask for): use t.where for values, t.when for effects"
        )

    def __int__(self) -> NoReturn:
        raise TraceError("a run-time value is no Python number: list the size in `static` if it may be in the key")

    __index__ = __int__

    def __float__(self) -> NoReturn:
        raise TraceError("a run-time value is no Python number")

    def __iter__(self) -> NoReturn:
        raise TraceError("a tile cannot be iterated: work on it whole, or loop with t.range")

    def __len__(self) -> NoReturn:
        raise TraceError("a tile has no len(): ask for .shape")


class View:
    """A tensor argument: pointer, sizes, strides. `x[row, col]` is a place, for t.load and t.store."""

    def __init__(self, recorder: Recorder, name: str, type: ir.ViewType) -> None:
        self._t, self.name, self.type = recorder, name, type

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes: Python ints where the kernel is compiled for them, else scalars."""
        return tuple(
            s if isinstance(s, int) else Tile(self._t, self._t.add("size", view=self.name, axis=i))
            for i, s in enumerate(self.type.sizes)
        )

    def most(self, axis: int) -> int | None:
        """The most elements that an axis can have, where that is known."""
        return self.type.most(axis)

    def __getitem__(self, index: Any) -> Place:
        return Place(self, index if isinstance(index, tuple) else (index,))


class Place:
    """Elements of a view: an index for each of its axes."""

    def __init__(self, view: View, index: tuple[Any, ...]) -> None:
        self.view = view
        if len(index) != view.type.rank:
            raise TraceError(f"{view.name} has {view.type.rank} axes; {len(index)} indices")
        self.index = tuple(self._one(view._t, i) for i in index)
        shape = ir.broadcast_shapes(*(i.shape for i in self.index))
        if shape is None:
            shapes = [ir.shape_text(i.shape) for i in self.index]
            raise TraceError(f"the indices of {view.name} do not broadcast: {shapes}")
        self.shape: ir.Shape = shape

    @staticmethod
    def _one(recorder: Recorder, index: Any) -> Tile:
        if isinstance(index, bool) or not isinstance(index, (int, Tile)):
            raise TraceError(f"an index is {index!r}; needs a tile or an int")
        tile = lift(recorder, index, dtypes.int64)
        if not tile.dtype.integer:
            raise TraceError(f"an index is {tile.dtype}; needs an integer")
        return tile.i64()


class Var:
    """A cell that outlives an iteration: `.get()` and `.set(value)`."""

    def __init__(self, recorder: Recorder, node: ir.Node) -> None:
        self._t, self.node = recorder, node

    def get(self) -> Tile:
        n = self.node
        return Tile(self._t, self._t.effect("get", shape=n.shape, dtype=n.dtype, var=n.id))

    def set(self, value: Any) -> None:
        n = self.node
        new = lift(self._t, value, n.dtype)
        if new.dtype != n.dtype or ir.broadcast_shapes(new.shape, n.shape) != n.shape:
            mine, theirs = f"{n.dtype}{ir.shape_text(n.shape)}", f"{new.dtype}{ir.shape_text(new.shape)}"
            raise TraceError(f"the variable holds {mine}, the value is {theirs}")
        self._t.effect("set", (new.node,), shape=n.shape, dtype=n.dtype, var=n.id)


# Recording ------------------------------------------------------------------------------------------------------------


def made(op: str, *tiles: Tile, shape: ir.Shape, dtype: DType, **attrs: Any) -> Tile:
    """What a pure operation makes of tiles."""
    t = tiles[0]._t
    return Tile(t, t.add(op, tuple(x.node for x in tiles), shape=shape, dtype=dtype, **attrs))


def lift(recorder: Recorder, value: Any, like: DType | None = None) -> Tile:
    """A tile of what may be a Python number; a number takes the dtype of what it meets."""
    if isinstance(value, Tile):
        if value._t is not recorder:
            raise TraceError("a tile of another kernel's trace is used")
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return Tile(recorder, recorder.const(value, dtypes.boolean))
    if isinstance(value, int):
        return Tile(recorder, recorder.const(value, like if like and like.computes else dtypes.int64))
    if isinstance(value, float):
        if like is not None and like.integer:
            raise TraceError(f"{value} meets a tile of {like}: cast it with .f32()")
        return Tile(recorder, recorder.const(value, dtypes.float32))
    raise TraceError(f"{value!r} ({type(value).__name__}) is neither a tile nor a number")


def widened(dtype: DType) -> DType:
    """The dtype, if arithmetic is defined on it."""
    if not dtype.computes:
        raise TraceError(f"{dtype} is storage: widen it first, {'.f32()' if dtype.floating else '.i32()'}")
    return dtype


def pair(a: Any, b: Any) -> tuple[Tile, Tile]:
    """Both operands as tiles of one dtype."""
    known = a if isinstance(a, Tile) else b
    if not isinstance(known, Tile):
        raise TraceError(f"neither {a!r} nor {b!r} is a tile")
    left, right = lift(known._t, a, known.dtype), lift(known._t, b, known.dtype)
    if left.dtype != right.dtype:
        for tile in (left, right):
            if tile.dtype != dtypes.boolean:
                widened(tile.dtype)
        raise TraceError(f"{left.dtype} meets {right.dtype}: cast one with .f32(), .i32(), .i64() or .to()")
    return left, right


def binary(kind: str, a: Any, b: Any, **attrs: Any) -> Tile:
    left, right = pair(a, b)
    dtype = left.dtype
    allowed = LOGICAL if dtype == dtypes.boolean else REAL if widened(dtype).floating else ir.BINARY
    if kind == "div" and dtype.integer:
        raise TraceError("integers divide with //, which rounds down; for a fraction cast with .f32()")
    if kind not in allowed:
        raise TraceError(f"{kind} is not defined on {dtype}")
    shape = ir.broadcast_shapes(left.shape, right.shape)
    by = right.node.attrs["value"] if right.node.op == "const" and dtype.integer else 0
    if kind in ("floordiv", "mod") and by > 0 and by & (by - 1) == 0:  # rounding down, a shift and a mask are the same
        kind, value = ("shr", by.bit_length() - 1) if kind == "floordiv" else ("and", by - 1)
        right = Tile(left._t, left._t.const(value, dtype))
    if shape is None:
        raise TraceError(f"shapes {ir.shape_text(left.shape)} and {ir.shape_text(right.shape)} do not broadcast")
    return made("binary", left, right, shape=shape, dtype=ir.result_dtype(kind, dtype), kind=kind, **attrs)


def unary(kind: str, x: Tile, accuracy: str = "exact") -> Tile:
    if not isinstance(x, Tile):
        raise TraceError(f"{kind} takes a tile, not {x!r}")
    dtype = x.dtype
    if accuracy not in ir.ACCURACIES:
        raise TraceError(f"accuracy={accuracy!r}; takes {', '.join(map(repr, ir.ACCURACIES))}")
    if (dtype == dtypes.boolean) != (kind == "not"):
        raise TraceError(f"{kind} is not defined on {dtype}")
    if dtype != dtypes.boolean and widened(dtype).integer and kind not in ("neg", "abs"):
        raise TraceError(f"{kind} is not defined on {dtype}: cast it with .f32()")
    said = {"accuracy": accuracy} if accuracy != "exact" else {}
    return made("unary", x, shape=x.shape, dtype=dtype, kind=kind, **said)


def axis_of(tile: Tile, axis: int) -> tuple[int, ir.Axis]:
    """A possibly negative axis as its number and size."""
    rank = len(tile.shape)
    if not -rank <= axis < rank:
        raise TraceError(f"axis {axis} of a tile of shape {ir.shape_text(tile.shape)}")
    return axis % rank, tile.shape[axis]
