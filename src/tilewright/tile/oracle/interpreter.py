"""The meaning of L0: a program run in numpy, instance by instance, each effect in turn.

It is slow and plain on purpose. It refuses what compiled code would do silently: an access beyond a tensor, and a read
of output memory that nobody wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from tilewright.tile import dtypes, numbers
from tilewright.tile.dtypes import Array, DType
from tilewright.tile.errors import RunError
from tilewright.tile.ir.tile_ir import Dim, Node, Program, Region, operands_first, static_size
from tilewright.tile.oracle.memory import poison, sizes_of

EXACT: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "rint": np.rint, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
"""In float64. What is missing here is a handful of exact operations in any precision."""


@dataclass(frozen=True)
class Order:
    """In what order a target folds an axis: element i into accumulator i % (lanes * unroll), then the accumulators by
    halves, then the lanes by halves. (1, 1) is one after the other.

    With a `block`, an accumulator of a floating sum adds so many elements, then so many sums of such blocks, and so on;
    what fills no round of accumulators comes last.

    With `threads`, each has neighbours of its own, `lanes` at a time, and what each has is folded last, by pairs.
    """

    lanes: int = 1
    unroll: int = 1
    block: int = 0
    threads: int = 1


def run(
    program: Program,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    *,
    outputs: tuple[str, ...] = (),
    order: Order = Order(),
    exact: bool = False,
) -> None:
    """Run every instance.

    Args:
        arguments: by name; a view as a numpy array of the dtype's storage, whose leading axes are the `levels` of the
            view's first one; scalars as numbers. Views are written in place.
        outputs: views whose memory nobody has written yet. They are poisoned.
        order: of reductions.
        exact: compute float32 in float64; casts to narrower types and what is stored are still rounded. What then
            differs from a plain run is what the algorithm makes of float32, apart from its own rounding points.

    Raises:
        RunError: an access outside a tensor, a read of what was not written, a failed `check`.
    """
    machine = _Machine(program, arguments, grid, outputs, order, np.float64 if exact else np.float32)
    with np.errstate(all="ignore"):
        for place in itertools.product(*(range(n) for n in machine.grid)):
            machine.instance(place)


class _Machine:
    def __init__(
        self, program: Program, arguments: Mapping[str, Any], grid: tuple[int, ...], outputs: tuple[str, ...],
        order: Order, real: Any,
    ) -> None:  # fmt: skip
        self.program, self.arguments, self.order, self.real = program, arguments, order, real
        self.grid = (*grid, 1, 1, 1)[:3]
        self.place: tuple[int, ...] = ()
        self.frames: dict[Region, dict[Node, Array]] = {}
        self.cells: dict[int, Array] = {}
        self.written: dict[str, Array] = {}
        for name in outputs:
            arguments[name][...] = poison(arguments[name].dtype)
            self.written[name] = np.zeros(arguments[name].shape, bool)

    def instance(self, place: tuple[int, ...]) -> None:
        self.place, self.frames, self.cells = place, {}, {}
        self.region(self.program.body)

    def region(self, region: Region, index: dict[Node, Array] | None = None) -> None:
        self.frames[region] = index or {}
        for effect in region.effects:
            self.effect(effect)

    def effect(self, e: Node) -> None:
        if e.op == "load":
            self.frames[e.region][e] = self.typed(self.load(e), e.dtype)
        elif e.op == "store":
            self.store(e)
        elif e.op in ("var", "set"):
            self.cells[e.attrs.get("var", e.id)] = np.broadcast_to(self.value(e.args[0]), self.extents(e))
        elif e.op == "stage":
            self.frames[e.region][e] = self.value(e.args[0])
        elif e.op == "get":
            self.frames[e.region][e] = self.cells[e.attrs["var"]]
        elif e.op == "loop":
            lo, hi, step = (int(self.value(a)) for a in e.args)
            for k in range(lo, hi, step) if step > 0 else ():
                self.region(e.attrs["body"], {e.attrs["index"]: np.asarray(k, np.int64)})
        elif e.op == "when":
            if self.value(e.args[0]):
                self.region(e.attrs["body"])
        elif e.op == "print":
            value = np.broadcast_to(self.value(e.args[0]), self.extents(e))
            line = numbers.printed(e.attrs["text"], value.ndim, e.dtype)
            for index, element in np.ndenumerate(value):
                print(line % (*self.place, *index, element.item()))
        elif e.op == "check" and not self.value(e.args[0]):
            raise RunError(f"check failed: {e.attrs['text']}", e.line)

    # Memory ---------------------------------------------------------------------------------------------------------

    def _where(self, e: Node) -> tuple[tuple[Array, ...], Array]:
        """The storage index of each element of an access, and the mask."""
        view, raw = self.program.views[e.attrs["view"]], self.arguments[e.attrs["view"]]
        shape = self.extents(e)
        indices = [np.broadcast_to(self.value(a), shape) for a in e.args[: view.rank]]
        mask = np.broadcast_to(self.value(e.args[view.rank]) if e.attrs["masked"] else True, shape)
        for axis, (index, size) in enumerate(zip(indices, sizes_of(raw, view.levels), strict=True)):
            wrong = mask & ((index < 0) | (index >= size))
            if wrong.any():
                bad = int(np.asarray(index)[wrong].flat[0])
                raise RunError(f"{e.op} of {e.attrs['view']}: index {bad} on axis {axis} of size {size}", e.line)
        safe = [np.where(mask, index, 0) for index in indices]
        rows = np.unravel_index(safe[0], raw.shape[: view.levels]) if raw.size else (safe[0],)
        return (*rows, *safe[1:]), mask

    def load(self, e: Node) -> Array:
        name, other = e.attrs["view"], e.dtype.rounded(e.attrs["other"])
        index, mask = self._where(e)
        if not mask.any():
            return np.broadcast_to(other, mask.shape)
        if name in self.written and not self.written[name][index][mask].all():
            raise RunError(f"load of {name}: nobody has written there", e.line)
        return np.where(mask, e.dtype.decode(self.arguments[name][index]), other)

    def store(self, e: Node) -> None:
        name = e.attrs["view"]
        index, mask = self._where(e)
        chosen = tuple(np.asarray(i)[mask] for i in index)
        self.arguments[name][chosen] = np.broadcast_to(e.dtype.encode(self.value(e.args[-1])), mask.shape)[mask]
        if name in self.written:
            self.written[name][chosen] = True

    # Values ---------------------------------------------------------------------------------------------------------

    def extents(self, node: Node) -> tuple[int, ...]:
        sizes = [int(self.value(a.limit)) if isinstance(a, Dim) else a for a in node.shape]
        for size, axis in zip(sizes, node.shape, strict=True):
            if size > static_size(axis):
                raise RunError(f"an axis of {size} elements, compiled for at most {static_size(axis)}", node.line)
        return tuple(max(n, 0) for n in sizes)

    def typed(self, value: Any, dtype: DType) -> Array:
        """As the machine holds values of a dtype: floating ones in the precision of the run."""
        return np.asarray(value).astype(self.real if dtype.floating else dtype.storage, copy=False)

    def value(self, node: Node) -> Array:
        """The value of a node, computed where it is not known yet."""
        for one in operands_first(node, lambda n: n in self.frames[n.region]):
            made = self.compute(one, [self.frames[a.region][a] for a in one.args])
            self.frames[one.region][one] = self.typed(made, one.dtype)
        return self.frames[node.region][node]

    def compute(self, node: Node, args: list[Array]) -> Any:
        a, op = node.attrs, node.op
        if op == "binary":
            nan = (a["nan"],) if "nan" in a else ()
            return numbers.BINARY[a["kind"]](*args, *nan)
        if op == "unary":
            exact = args[0].dtype == np.float64 and a["kind"] in EXACT
            return (EXACT if exact else numbers.UNARY)[a["kind"]](args[0])
        if op == "const":
            return a["value"]
        if op in ("program_id", "num_programs"):
            return (self.place if op == "program_id" else self.grid)[a["axis"]]
        if op == "argument":
            return np.asarray(self.arguments[a["name"]], node.dtype.values)
        if op == "size":
            return sizes_of(self.arguments[a["view"]], self.program.views[a["view"]].levels)[a["axis"]]
        if op == "arange":
            return np.arange(self.extents(node)[0])
        if op == "fma":
            return numbers.fma(*args) if self.real is np.float32 else args[0] * args[1] + args[2]
        if op == "where":
            return np.where(*args)
        if op == "cast":
            if self.real is np.float64 and node.dtype == dtypes.float32:
                return args[0]
            return numbers.cast(args[0], node.args[0].dtype, node.dtype, a["round"], a["saturate"])
        if op == "bitcast":
            if self.real is np.float64 and dtypes.float32 in (node.dtype, node.args[0].dtype):
                raise RunError("an exact run has no bits of float32", node.line)
            return np.ascontiguousarray(args[0]).view(node.dtype.storage).reshape(args[0].shape)
        if op == "broadcast":
            x, own = args[0], [k for k in a["axes"] if k >= 0]
            shape = [1 if k < 0 else x.shape[k] for k in a["axes"]]
            return np.broadcast_to(x.transpose(own).reshape(shape), self.extents(node))
        if op == "reshape":
            return args[0].reshape(self.extents(node))
        if op == "reduce":
            return self._reduce(node, args[0])
        assert op == "random", op
        return numbers.philox(*args)

    def _reduce(self, node: Node, x: Array) -> Array:
        combine, dtype, axis = node.attrs["combine"], node.args[0].dtype, node.attrs["axis"]
        moved = np.moveaxis(np.broadcast_to(x, self.extents(node.args[0])), axis, 0)
        last = all(a == 1 for a in node.args[0].shape[axis + 1 :])
        order = self.order if last else Order(block=self.order.block)
        block, start = order.block if combine == "sum" and dtype.floating else 0, numbers.identity(combine, dtype)
        found = fold(moved, combine, start, order.lanes, order.unroll, block, order.threads)
        return np.expand_dims(found, axis) if node.attrs["keep"] else found


def fold(x: Array, combine: str, identity: Any, lanes: int, unroll: int, block: int = 0, threads: int = 1) -> Array:
    """Fold axis 0 as a target with `lanes`, `unroll` and `block` does. See `Order`."""
    function = numbers.COMBINE[combine]
    width = lanes * unroll * threads
    rest = -x.shape[0] % width
    padding = np.full((rest, *x.shape[1:]), identity, x.dtype)
    parts = np.concatenate([x, padding]).reshape(-1, unroll, threads * lanes, *x.shape[1:])
    start = np.full(parts.shape[1:], identity, x.dtype)
    full, last = (parts[:-1], parts[-1:]) if rest else (parts, parts[:0])
    while block and len(full) > block:
        full = np.stack([reduce(function, full[i : i + block], start) for i in range(0, len(full), block)])
    total = numbers.by_halves(combine, reduce(function, [*full, *last], start))
    total = np.moveaxis(total.reshape(threads, lanes, *x.shape[1:]), 1, 0)
    total = numbers.by_halves(combine, total)
    while len(total) > 1:
        total = function(total[::2], total[1::2])
    return np.asarray(total[0])
