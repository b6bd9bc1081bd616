"""A kernel without one of its fragments, and the fragment as a kernel of its own, with a tensor in between.

Both are the kernel itself, traced with a stand-in for the fragment, so that there is no second source. A fragment that
returns a tile is a prologue, whose own kernel comes first; another one is an epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.tile.analysis.parting import Called
from tilewright.tile.analysis.places import turned
from tilewright.tile.dtypes import DType, float8_e4m3fn
from tilewright.tile.errors import TileError
from tilewright.tile.ir.tile_ir import Node
from tilewright.tile.lang.functions import Functions
from tilewright.tile.lang.kernel import Fragment, Kernel
from tilewright.tile.lang.tiles import Place, Tile


class StandIn(Fragment):
    """In a fragment's place: "fused" is the fragment; "staged" as well, and what it loads and stores passes through
    shared memory; with "own" all else is left out, with "rest" the fragment. These two have the fragment's arguments
    and the view `between`. Once it was traced fused it knows the rank of that, the narrowest type that loses nothing
    (None: no call had a tile and its place), and whether it is a prologue."""

    def __init__(self, piece: Fragment, form: str, between: Any = None) -> None:
        if "between" in piece.parameters:
            raise TileError(f"{piece.function.__name__} has a parameter `between`, as the tensor in between is called")
        more = {"between": between} if form in ("own", "rest") else {}
        super().__init__(piece.function, {**piece.bound, **more})
        self.form, self.rank = form, 0
        self.dtype: DType | None = None
        self.prologue = False
        self.calls: list[Called] = []

    def inlined(self, handles: Mapping[str, Any]) -> Callable[..., Any]:
        inner, own = super().inlined(handles), self.form == "own"
        between: Any = handles.get("between")
        if self.form == "staged":
            return lambda t, *given: inner(_Staging(t._t), *given)

        def call(t: Any, *given: Any) -> Any:
            first, effects = len(t._t.nodes), t._t.region.effects
            before = len(effects)
            result = inner(t, *given)
            passed: Any = given[0] if given and result is None else result
            self.prologue = result is not None
            if self.form == "fused":
                at = _place(given)
                if at and isinstance(passed, Tile):
                    self.rank, self.dtype = len(at), _narrowest(passed.node)
                    place = tuple(i.node for i in at if isinstance(i, Tile))
                    self.calls.append(Called(t._t.region, passed.node, place))
                return result
            if not (own and self.prologue):
                del effects[before:]
            if own == self.prologue:
                t.store(between[given[1]], passed.to(between.dtype, saturate=between.dtype == float8_e4m3fn))
            else:
                passed = t.load(between[given[1]]).to(passed.dtype)
            if own and not self.prologue:
                inner(t, passed, *given[1:])
            if own:
                t._t.only.append(range(first, len(t._t.nodes)))
            return passed if self.prologue else None

        return call


class _Staging(Functions):
    """Loads and stores by whichever axis has the neighbours of memory; what is loaded waits in shared memory."""

    def load(self, place: Place, mask: Any = None, other: Any = 0) -> Tile:
        return self.stage(super().load(place, mask, other), "shared", self._order(place))

    def store(self, place: Place, value: Any, mask: Any = None, order: tuple[int, ...] | None = None) -> None:
        order = order or self._order(place)
        if order and isinstance(value, Tile) and value.shape == place.shape:
            value = self.stage(value, "shared")
        super().store(place, value, mask, order)

    def _order(self, place: Place) -> tuple[int, ...] | None:
        return turned(place.view.type, tuple(i.node for i in place.index), place.shape) or None


def _place(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The indices of the place that follows the value; () where something else does."""
    at: Any = () if any(isinstance(g, tuple) for g in given[2:]) else given[1:2]
    at = at[0] if at and isinstance(at[0], tuple) else at
    return at if all(i.dtype.integer if isinstance(i, Tile) else isinstance(i, int) for i in at) else ()


def _narrowest(node: Node) -> DType:
    source = node.args[0].dtype if node.op == "cast" else node.dtype
    return source if source.itemsize < node.dtype.itemsize and source.floating else node.dtype


def apart(kernel: Kernel, place: str, form: str, between: Any = ...) -> Kernel:
    """One of the two ("own" or "rest"), which takes what the kernel takes; or the whole, "fused" or "staged"."""
    piece = kernel.pieces()[place]
    return kernel if form == "fused" or piece is None else kernel.bind(**{place: StandIn(piece, form, between)})
