"""A kernel without one of its fragments, and the fragment as a kernel of its own, with a tensor between them.

Both are the kernel itself, traced with a stand-in for the fragment, so that there is no second source. What a stand-in
is called with says which of the two comes first: a fragment that returns a tile is a prologue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.tile.lang.kernel import Fragment, Kernel
from tilewright.tile.lang.tiles import Tile
from tilewright.tile.lang.trace import Recorder

BETWEEN = "between"


class StandIn(Fragment):
    """In a fragment's place: with `own` all but the fragment is left out of the kernel, else the fragment is. Its
    arguments are the fragment's, and the view `between`, which is indexed as the fragment says."""

    def __init__(self, piece: Fragment, own: bool, between: Any) -> None:
        super().__init__(piece.function, {**piece.bound, BETWEEN: between})
        self.own = own

    def inlined(self, handles: Mapping[str, Any]) -> Callable[..., Any]:
        between, inner = handles[BETWEEN], super().inlined(handles)

        def call(t: Any, v: Tile, at: Any, *rest: Any) -> Tile | None:
            recorder: Recorder = t._t
            first, effects = len(recorder.nodes), len(recorder.region.effects)
            result: Tile | None = inner(t, v, at, *rest)
            if not (self.own and result is not None):
                del recorder.region.effects[effects:]
            if result is not None:
                if self.own:
                    t.store(between[at], result.to(between.dtype))
                else:
                    result = t.load(between[at]).to(result.dtype)
            elif self.own:
                inner(t, t.load(between[at]).to(v.dtype), at, *rest)
            else:
                t.store(between[at], v.to(between.dtype))
            if self.own:
                recorder.only.append(range(first, len(recorder.nodes)))
            return result

        return call


def own_and_rest(kernel: Kernel, place: str, between: Any) -> tuple[Kernel, Kernel]:
    """The fragment's own kernel, and the kernel without it. Each takes what the kernel takes, on the same grid."""
    piece = kernel.pieces()[place]
    assert piece is not None
    own, rest = (kernel.bind(**{place: StandIn(piece, one, between)}) for one in (True, False))
    return own, rest
