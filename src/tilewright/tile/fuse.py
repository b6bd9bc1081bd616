"""Whether what is bound to a kernel is computed in it, or by a kernel of its own with a tensor in between: by estimate.

Fusing saves a launch and the tensor's way through memory. It loses where many instances would compute the same again,
or read it by narrow accesses. Where they are narrow because memory lies the other way round than the tile, what is read
or stored may pass through shared memory, by wide accesses along the axis that has neighbours there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.tile.analysis.parting import problem
from tilewright.tile.cost import H200, Gpu, Grid, estimate
from tilewright.tile.dtypes import DType
from tilewright.tile.errors import LowerError, TileError
from tilewright.tile.ir.tile_ir import ViewType
from tilewright.tile.ir.tile_verify import reachable
from tilewright.tile.lang.apart import StandIn, apart
from tilewright.tile.lang.kernel import Argument, Kernel
from tilewright.tile.runtime.launch import grid_of
from tilewright.tile.schedule import default

WIDE = 8  # bytes that an access of vectors moves at least


@dataclass(frozen=True)
class Decision:
    """`choice` for the fragment in a `place` of a kernel: "fuse_vector"; "fuse_scalar", which is fused though accesses
    to rows move less than 8 bytes at once for it; "stage", fused through shared memory; or "materialise". Times in
    microseconds, of launches with the usual schedules; infinity where a fused kernel does not fit a block, or has
    nothing to stage. `between`: the element type of the tensor in between; `forms`: what to run, in turn, and where."""

    kernel: Kernel
    place: str
    choice: str
    fused_us: float
    staged_us: float
    apart_us: float
    between: DType
    forms: tuple[tuple[str, Grid], ...]

    def launches(self, between: Any = ...) -> list[tuple[Kernel, Grid]]:
        """What to run, in turn: kernels on their grids, each with the kernel's own arguments.

        Args:
            between: where the choice is to materialise, a tensor of that type that the fragment's place indexes.

        Raises:
            TileError: it is not there, or of another type.
        """
        found = str(getattr(between, "dtype", self.between)).rpartition(".")[2]
        missing = between is ... or between is None
        if self.choice == "materialise" and (missing or found not in (self.between.name, self.between.storage)):
            given = "nothing" if missing else found
            raise TileError(f"{self.kernel.name}: between the two lies a tensor of {self.between}, not {given}")
        return [(apart(self.kernel, self.place, form, between), grid) for form, grid in self.forms]


def decide(
    kernel: Kernel, place: str, arguments: Mapping[str, Argument], grid: int | tuple[int, ...], *,
    between: DType | None = None, gpu: Gpu = H200,
) -> Decision:  # fmt: skip
    """Whether to fuse the fragment that is bound in a place of a kernel.

    Args:
        place: the parameter of the kernel that the fragment is bound to.
        arguments: types by name, as `Kernel.trace` takes them.
        grid: the kernel's instances, along up to three axes.
        between: what the tensor in between would be rounded to; without it, the narrowest type that loses nothing.

    Raises:
        TileError: no fragment is bound there, the kernel does not call it, or what it passes cannot wait in a tensor:
            of several values a place, or with memory in between that both kernels touch.
        LowerError: the two kernels cannot be expressed, or a loop's length is only known at run time.
    """
    piece, whole = kernel.pieces().get(place), grid_of(kernel.name, grid)
    if piece is None:
        raise TileError(f"{kernel.name}: no fragment is bound to {place!r}")
    known = StandIn(piece, "fused")
    programs = {"fused": kernel.bind(**{place: known}).trace(arguments)}
    if known.dtype is None:
        raise TileError(f"{kernel.name}: what is bound to {place!r} is not called with a tile and its place")
    dtype = between or known.dtype
    programs["staged"] = apart(kernel, place, "staged").trace(arguments)
    types = {**arguments, f"{place}_between": ViewType(dtype, (None,) * known.rank, align=16)}
    programs |= {form: apart(kernel, place, form).trace(types) for form in ("own", "rest")}
    first, second = ("own", "rest") if known.prologue else ("rest", "own")
    if why := problem(programs["fused"], known.calls, programs[first], programs[second]):
        raise TileError(f"{kernel.name}: what is bound to {place!r} has no form of its own: {why}")
    asked = {n.attrs["axis"] for n in reachable(programs["own"]) if n.op in ("program_id", "num_programs")}
    own = grid_of(kernel.name, tuple(n if axis in asked else 1 for axis, n in enumerate(whole)))
    grids = {"fused": whole, "staged": whole, "own": own, "rest": whole}
    one, other = (estimate(programs[f], default(programs[f]), grids[f], gpu) for f in ("own", "rest"))
    times, narrowed = {"fused": math.inf, "staged": math.inf, "apart": one.us + other.us}, False
    for form in ("fused", "staged") if any(e.op == "stage" for e in programs["staged"].effects()) else ("fused",):
        with contextlib.suppress(LowerError):  # what the two can express, the one need not
            both = estimate(programs[form], default(programs[form]), whole, gpu)
            times[form], narrowed = both.us, both.narrowest < WIDE <= other.narrowest if form == "fused" else narrowed
    fused, staged, many = times.values()
    best = min(times, key=lambda form: times[form])
    fuse = "fuse_scalar" if narrowed else "fuse_vector"
    choice = {"fused": fuse, "staged": "stage", "apart": "materialise"}[best]
    forms = [first, second] if best == "apart" else [best]
    return Decision(kernel, place, choice, fused, staged, many, dtype, tuple((f, grids[f]) for f in forms))
