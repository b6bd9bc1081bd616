"""A kernel without one of its fragments, and the fragment as a kernel of its own, with a tensor in between.

Both are the kernel itself, traced with a stand-in for the fragment, so that there is no second source. A fragment that
returns a tile is a prologue, whose own kernel comes first; another one is an epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.tile.dtypes import DType
from tilewright.tile.lang.kernel import Fragment, Kernel
from tilewright.tile.lang.tiles import Tile
from tilewright.tile.lang.trace import Recorder


@dataclass(frozen=True)
class Passed:
    """What a fragment takes or gives: the axes of its place, and the narrowest type that loses nothing of it."""

    rank: int
    dtype: DType
    prologue: bool


class StandIn(Fragment):
    """In a fragment's place: "fused" is the fragment and notes what is `passed`; with "own" all else is left out, with
    "rest" the fragment is. These two have the fragment's arguments and the view `between`."""

    def __init__(self, piece: Fragment, form: str, between: Any = None) -> None:
        super().__init__(piece.function, {**piece.bound, "between": between} if form != "fused" else piece.bound)
        self.form = form
        self.passed: Passed | None = None

    def inlined(self, handles: Mapping[str, Any]) -> Callable[..., Any]:
        between, inner = handles.get("between"), super().inlined(handles)

        def call(t: Any, v: Tile, at: Any, *rest: Any) -> Tile | None:
            recorder: Recorder = t._t
            first, effects = len(recorder.nodes), len(recorder.region.effects)
            result: Tile | None = inner(t, v, at, *rest)
            if between is None:
                self.passed = _passed(v, at, result)
                return result
            if self.form == "rest" or result is None:
                del recorder.region.effects[effects:]
            if self.form == "rest":
                if result is not None:
                    return t.load(between[at]).to(result.dtype)  # type: ignore[no-any-return]
                t.store(between[at], v.to(between.dtype))
                return None
            if result is not None:
                t.store(between[at], result.to(between.dtype))
            else:
                inner(t, t.load(between[at]).to(v.dtype), at, *rest)
            recorder.only.append(range(first, len(recorder.nodes)))
            return result

        return call


def _passed(v: Tile, at: Any, result: Tile | None) -> Passed:
    node = (v if result is None else result).node
    source = node.args[0].dtype if node.op == "cast" else node.dtype
    lossless = source.itemsize < node.dtype.itemsize and source.floating == node.dtype.floating
    return Passed(len(at) if isinstance(at, tuple) else 1, source if lossless else node.dtype, result is not None)


def own_and_rest(kernel: Kernel, place: str, between: Any) -> tuple[Kernel, Kernel]:
    """The fragment's own kernel, and the kernel without it. Each takes what the kernel takes."""
    piece = kernel.pieces()[place]
    assert piece is not None
    own, rest = (kernel.bind(**{place: StandIn(piece, form, between)}) for form in ("own", "rest"))
    return own, rest
