"""`t`, the first argument of every kernel and fragment: what can be done with tiles beside Python's operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.tile import dtypes
from tilewright.tile.dtypes import DType
from tilewright.tile.errors import TraceError
from tilewright.tile.ir import tile_ir as ir
from tilewright.tile.lang.tiles import Place, Tile, Var, View, axis_of, binary, lift, made, pair, unary, widened
from tilewright.tile.lang.trace import Recorder


class Functions:
    """Functions over tiles. `recorder` is the program that they build."""

    def __init__(self, recorder: Recorder) -> None:
        self._t = recorder

    # Index ----------------------------------------------------------------------------------------------------------

    def program_id(self, axis: int) -> Tile:
        """Which instance this is, along a grid axis 0 to 2."""
        return Tile(self._t, self._t.add("program_id", axis=_grid_axis(axis)))

    def num_programs(self, axis: int) -> Tile:
        return Tile(self._t, self._t.add("num_programs", axis=_grid_axis(axis)))

    def arange(self, n: Any, limit: Any = None) -> Tile:
        """0, 1, .. n - 1 as int64.

        Args:
            n: an int; or the size of a view, which the kernel is compiled for or for which it knows the most.
            limit: a scalar; elements from it on do not exist.
        """
        if isinstance(n, Tile):
            if n.node.op != "size":
                raise TraceError(
                    "arange takes an int or a view's size; for another count say arange(most, limit=count)"
                )
            view, axis = n.node.attrs["view"], n.node.attrs["axis"]
            most = View(self._t, view, self._t.views[view]).most(axis)
            if most is None:
                raise TraceError(
                    f"{view}.shape[{axis}] is only known at run time: list it in static={{{view!r}: ({axis},)}}, or "
                    f"say arange(most, limit={view}.shape[{axis}])"
                )
            if limit is None:
                return self._arange(ir.Dim(most, n.node))
            n = most
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise TraceError(f"arange({n!r}): needs a count of 1 or more")
        if limit is None:
            return self._arange(n)
        bound = self._scalar(limit, dtypes.int64, "the limit of an arange is an integer scalar")
        clamped = self.maximum(self.minimum(Tile(self._t, bound), n), 0)
        return self._arange(ir.Dim(n, clamped.node))

    def _arange(self, axis: ir.Axis) -> Tile:
        return Tile(self._t, self._t.add("arange", shape=(axis,)))

    # Memory ---------------------------------------------------------------------------------------------------------

    def load(self, place: Place, mask: Any = None, other: Any = 0) -> Tile:
        """The elements at a place, in the view's dtype. Where the mask is false memory is not touched and the value is
        `other`, a Python number."""
        view = self._view("load", place)
        if isinstance(other, Tile):
            raise TraceError("`other` is a Python number; use t.where for more")
        attrs = {"view": view.name, "masked": mask is not None, "other": other}
        node = self._t.effect("load", self._masked(place, mask), shape=place.shape, dtype=view.dtype, **attrs)
        return Tile(self._t, node)

    def store(self, place: Place, value: Any, mask: Any = None, order: tuple[int, ...] | None = None) -> None:
        """Write a tile of the view's dtype; it broadcasts over the place. `order`: as `stage` takes it."""
        view, shape = self._view("store", place), place.shape
        new = lift(self._t, value, view.dtype)
        if new.dtype != view.dtype:
            raise TraceError(f"{view.name} is {view.dtype}, the value {new.dtype}: round it with .to()")
        args = (*self._masked(place, mask), new.node)
        if ir.broadcast_shapes(new.shape, shape) != shape:
            raise TraceError(f"a value of shape {ir.shape_text(new.shape)} for a place of shape {ir.shape_text(shape)}")
        attrs = {"view": view.name, "masked": mask is not None, **_ordered(shape, order)}
        self._t.effect("store", args, shape=shape, dtype=view.dtype, **attrs)

    def stage(self, x: Tile, scope: str, order: tuple[int, ...] | None = None) -> Tile:
        """The same tile, which from here on waits where the author says, however cheap it were to compute again. What
        `load` reads of memory that the kernel does not write goes to shared memory by itself, asynchronously.

        Args:
            scope: "register", an error where it does not fit; or "shared". On a CPU both are an array of the thread.
            order: the axes, the one first along which neighbours are one thread's (vectors lie along it), then threads;
                what threads are left take the next axis. Without it that is the last axis, and the others are loops.
        """
        if scope not in ir.SCOPES:
            raise TraceError(f"a tile waits in {' or '.join(ir.SCOPES)}, not in {scope!r}")
        x = lift(self._t, x)
        attrs = {"scope": scope, **_ordered(x.shape, order)}
        if ir.elements(x.shape) == 1:
            return x
        return Tile(self._t, self._t.effect("stage", (x.node,), shape=x.shape, dtype=x.dtype, **attrs))

    def _view(self, function: str, place: Place) -> View:
        if not isinstance(place, Place):
            raise TraceError(f"t.{function} takes a place, as x[row, col]")
        return place.view

    def _masked(self, place: Place, mask: Any) -> tuple[ir.Node, ...]:
        """The operands of an access: indices, and the mask."""
        args = tuple(i.node for i in place.index)
        if mask is None:
            return args
        tile = lift(self._t, mask, dtypes.boolean)
        if tile.dtype != dtypes.boolean or ir.broadcast_shapes(tile.shape, place.shape) != place.shape:
            raise TraceError(f"the mask is {tile.dtype}{ir.shape_text(tile.shape)} for {ir.shape_text(place.shape)}")
        return (*args, tile.node)

    # Elements -------------------------------------------------------------------------------------------------------

    def where(self, condition: Any, a: Any, b: Any) -> Tile:
        test = lift(self._t, condition, dtypes.boolean)
        if not isinstance(a, Tile) and not isinstance(b, Tile):
            a = lift(self._t, float(a) if isinstance(b, float) else a)
        left, right = pair(a, b)
        shape = ir.broadcast_shapes(left.shape, right.shape, test.shape)
        if test.dtype != dtypes.boolean or shape is None:
            raise TraceError(f"where: a condition {test!r} for {left!r} and {right!r}")
        return made("where", test, left, right, shape=shape, dtype=left.dtype)

    def fma(self, a: Any, b: Any, c: Any) -> Tile:
        """a * b + c with one rounding, in float32."""
        left, right = pair(a, b)
        _, third = pair(left, c)
        shape = ir.broadcast_shapes(left.shape, right.shape, third.shape)
        if left.dtype != dtypes.float32 or shape is None:
            raise TraceError("fma takes float32 tiles of shapes that broadcast")
        return made("fma", left, right, third, shape=shape, dtype=dtypes.float32)

    def maximum(self, a: Any, b: Any, nan: str = "propagate") -> Tile:
        return binary("max", a, b, nan=_nan(nan))

    def minimum(self, a: Any, b: Any, nan: str = "propagate") -> Tile:
        return binary("min", a, b, nan=_nan(nan))

    def abs(self, x: Tile) -> Tile:
        return unary("abs", x)

    # Functions of float32. With accuracy="exact" every target gives the same bits. "fast" lets a GPU take its
    # approximate instruction, within the bound stated here in ulp of float32; NaN and infinity pass, and no denormal
    # number is taken for 0, but by `reciprocal`. On a CPU fast is exact.

    def sqrt(self, x: Tile, accuracy: str = "exact") -> Tile:
        """Rounded; fast: 2 ulp."""
        return unary("sqrt", x, accuracy)

    def rsqrt(self, x: Tile, accuracy: str = "exact") -> Tile:
        """1 / sqrt(x), each of the two rounded; fast: 3 ulp."""
        return unary("rsqrt", x, accuracy)

    def reciprocal(self, x: Tile, accuracy: str = "exact") -> Tile:
        """1 / x, rounded; fast: 1 ulp, but 0 where |x| > 2^126, and infinity where |x| < 2^-126."""
        return unary("reciprocal", x, accuracy)

    def exp(self, x: Tile, accuracy: str = "exact") -> Tile:
        """To about 1 ulp; fast: 2 + 1.3 |x| ulp."""
        return unary("exp", x, accuracy)

    def exp2(self, x: Tile, accuracy: str = "exact") -> Tile:
        """To about 1 ulp; fast: 2 ulp."""
        return unary("exp2", x, accuracy)

    def log(self, x: Tile, accuracy: str = "exact") -> Tile:
        """To about 1 ulp; fast: 5 ulp, or 2^-22 between 0.5 and 2, where the logarithm passes through 0."""
        return unary("log", x, accuracy)

    def sigmoid(self, x: Tile, accuracy: str = "exact") -> Tile:
        """1 / (1 + exp(-x)), each of the three rounded: from about -88.7 down it is 0. Fast: 25 + 1.3 |x| ulp, down to
        the smallest denormal number."""
        return unary("sigmoid", x, accuracy)

    def rint(self, x: Tile) -> Tile:
        """To the nearest integer, ties to even, as a float."""
        return unary("rint", x)

    def zeros(self, *shape: Any, dtype: DType = dtypes.float32) -> Tile:
        """A tile of zeros. An axis is an int, or one of another tile's `.shape`."""
        return self.full(shape, 0.0 if dtype.floating else 0, dtype)

    def full(self, shape: tuple[Any, ...], value: Any, dtype: DType = dtypes.float32) -> Tile:
        scalar = lift(self._t, value, dtype)
        return made("broadcast", scalar, shape=tuple(shape), dtype=scalar.dtype, axes=(-1,) * len(shape))

    def random(self, seed: Any, counter: Any, row: Any, word: Any) -> Tile:
        """One of the four words of Philox4x32-10 (Salmon et al., 2011) as uint32.

        Args:
            seed: int64, the key. counter: int64, the low half of the counter. row: int64, the high half.
            word: int64, which of the four words, 0 to 3.
        """
        tiles = [lift(self._t, v, dtypes.int64).i64() for v in (seed, counter, row, word)]
        shape = ir.broadcast_shapes(*(x.shape for x in tiles))
        if shape is None:
            raise TraceError("the arguments of t.random do not broadcast")
        return made("random", *tiles, shape=shape, dtype=dtypes.uint32)

    # Across elements ------------------------------------------------------------------------------------------------

    def reduce(self, x: Tile, combine: str, axis: int = -1, keep: bool = False) -> Tile:
        """Fold an axis. The order of a floating sum is fixed by kernel, schedule and target, and otherwise open.

        Args:
            combine: "sum", "prod", "max", "min" (NaN propagates), or "and", "or" on bool.
            keep: leave the axis, with size 1.
        """
        if combine not in ir.COMBINES:
            raise TraceError(f"combine is {combine!r}; takes {', '.join(sorted(ir.COMBINES))}")
        x = lift(self._t, x)
        if (x.dtype == dtypes.boolean) != (combine in ("and", "or")):
            raise TraceError(f"{combine} is not defined on {x.dtype}")
        if x.dtype != dtypes.boolean:
            widened(x.dtype)
        number, _ = axis_of(x, axis)
        rest = tuple(1 if i == number else a for i, a in enumerate(x.shape) if keep or i != number)
        return made("reduce", x, shape=rest, dtype=x.dtype, combine=combine, axis=number, keep=keep)

    def sum(self, x: Tile, axis: int = -1, keep: bool = False) -> Tile:
        return self.reduce(x, "sum", axis, keep)

    def max(self, x: Tile, axis: int = -1, keep: bool = False) -> Tile:
        return self.reduce(x, "max", axis, keep)

    def min(self, x: Tile, axis: int = -1, keep: bool = False) -> Tile:
        return self.reduce(x, "min", axis, keep)

    def mean(self, x: Tile, axis: int = -1, keep: bool = False) -> Tile:
        """The sum over the true size of the axis, never a padded one."""
        return self.sum(x, axis, keep) / self.extent(x, axis).f32()

    def extent(self, x: Tile, axis: int = -1) -> Tile:
        """The size of an axis, as an int64 scalar."""
        _, size = axis_of(x, axis)
        return Tile(self._t, size.limit) if isinstance(size, ir.Dim) else lift(self._t, size, dtypes.int64)

    # Control --------------------------------------------------------------------------------------------------------

    def var(self, value: Any) -> Var:
        """A cell with a first value."""
        first = lift(self._t, value)
        return Var(self._t, self._t.effect("var", (first.node,), shape=first.shape, dtype=first.dtype))

    def range(self, lo: Any, hi: Any = None, step: Any = 1) -> Iterator[Tile]:
        """A loop over int64 indices. The body is traced twice, so Python side effects happen twice. With a step below 1
        that only run time knows it does not run."""
        lo, hi = (0, lo) if hi is None else (lo, hi)
        problem = "the bounds of t.range are integer scalars"
        low, high, by = (self._scalar(v, dtypes.int64, problem) for v in (lo, hi, step))
        if isinstance(step, int) and step < 1:
            raise TraceError(f"t.range with step {step}: needs 1 or more")
        for index in self._t.loop(low, high, by):
            yield Tile(self._t, index)

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Effects that happen only where a scalar condition holds."""
        problem = "t.when takes a bool scalar; for tiles mask the store, or use t.where"
        test = self._scalar(condition, dtypes.boolean, problem)
        with self._t.inside("when") as region:
            yield
        self._t.effect("when", (test,), body=region)

    def check(self, condition: Any, text: str) -> None:
        """In a checked run, an error with this text unless a scalar condition holds. Compiled code does not test it."""
        test = self._scalar(condition, dtypes.boolean, "t.check takes a bool scalar")
        self._t.effect("check", (test,), text=text)

    def _scalar(self, value: Any, dtype: DType, problem: str) -> ir.Node:
        """A scalar, as int64 where it is an integer; a bool, where that is asked for."""
        tile = lift(self._t, value, dtype)
        if tile.shape or not (tile.dtype == dtype or (tile.dtype.integer and dtype.integer)):
            raise TraceError(problem)
        return tile.to(dtype).node

    def print(self, text: str, value: Any) -> None:
        """A line for each element of a tile, or one for a scalar, in the program's order: the instance, the text, the
        element's indices, the value. Instances print side by side; say `with t.when(row == 0)` for one of them. A GPU
        prints when it is waited for, and the order of elements is open there.

        Args:
            text: printable ASCII.
        """
        tile = lift(self._t, value)
        if not (text.isascii() and text.isprintable()):
            raise TraceError(f"t.print takes printable ASCII, not {text!r}")
        if not tile.dtype.computes and tile.dtype != dtypes.boolean:
            tile = tile.f32() if tile.dtype.floating else tile.i32()
        self._t.effect("print", (tile.node,), shape=tile.shape, dtype=tile.dtype, text=text)


def _ordered(shape: ir.Shape, order: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """The attribute of an order, where one is given."""
    if order is None:
        return {}
    rank, given = len(shape), order if isinstance(order, (tuple, list)) else ()
    axes = tuple(k % rank if type(k) is int and -rank <= k < rank else -1 for k in given)
    if sorted(axes) != [*range(rank)]:
        raise TraceError(f"order={order!r} for a tile of shape {ir.shape_text(shape)}: name each axis once")
    return {"order": axes}


def _grid_axis(axis: int) -> int:
    if axis not in (0, 1, 2):
        raise TraceError(f"a grid has axes 0, 1, 2; not {axis}")
    return axis


def _nan(nan: str) -> str:
    if nan not in ("propagate", "ignore"):
        raise TraceError(f'nan={nan!r}; takes "propagate" or "ignore"')
    return nan
