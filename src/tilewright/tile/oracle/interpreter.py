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
from tilewright.tile.dtypes import Array
from tilewright.tile.errors import RunError
from tilewright.tile.ir.tile_ir import Dim, Node, Program, Region, operands_first
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

    def region(self, region: Region) -> None:
        self.frames[region] = {}
        for effect in region.effects:
            self.effect(effect)

    def effect(self, e: Node) -> None:
        if e.op == "load":
            self.frames[e.region][e] = self.load(e)
        elif e.op == "store":
            self.store(e)
        elif e.op in ("var", "set"):
            key = e.id if e.op == "var" else e.attrs["var"]
            value = self.value(e.args[0])
            self.cells[key] = value if e.op == "var" else np.broadcast_to(value, self.cells[key].shape)
        elif e.op == "stage":
            self.frames[e.region][e] = self.value(e.args[0])
        elif e.op == "get":
            self.frames[e.region][e] = self.cells[e.attrs["var"]]
        elif e.op == "loop":
            lo, hi, step = (int(self.value(a)) for a in e.args)
            body = e.attrs["body"]
            for k in range(lo, hi, step) if step > 0 else ():
                self.frames[body] = {e.attrs["index"]: np.asarray(k, np.int64)}
                for inner in body.effects:
                    if inner.op != "index":
                        self.effect(inner)
        elif e.op == "when":
            if bool(self.value(e.args[0])):
                self.region(e.attrs["body"])
        elif e.op == "print":
            value = np.broadcast_to(self.value(e.args[0]), self.extents(e))
            line = numbers.printed(e.attrs["text"], value.ndim, e.dtype)
            for index, element in np.ndenumerate(value):
                print(line % (*self.place, *index, element.item()))
        elif e.op == "check" and not bool(self.value(e.args[0])):
            raise RunError(f"check failed: {e.attrs['text']}", e.line)

    # Memory ---------------------------------------------------------------------------------------------------------

    def _where(self, e: Node) -> tuple[tuple[Array, ...], Array, tuple[int, ...]]:
        """The storage index of each element of an access, and the mask."""
        view, raw = self.program.views[e.attrs["view"]], self.arguments[e.attrs["view"]]
        shape = self.extents(e)
        indices = [np.broadcast_to(self.value(a), shape) for a in e.args[: view.rank]]
        mask = np.ones(shape, bool)
        if e.attrs["masked"]:
            mask = np.broadcast_to(self.value(e.args[view.rank]), shape)
        levels = raw.shape[: view.levels]
        for axis, (index, size) in enumerate(zip(indices, sizes_of(raw, view.levels), strict=True)):
            wrong = mask & ((index < 0) | (index >= size))
            if wrong.any():
                bad = int(np.asarray(index)[wrong].flat[0])
                raise RunError(f"{e.op} of {e.attrs['view']}: index {bad} on axis {axis} of size {size}", e.line)
        safe = [np.where(mask, index, 0) for index in indices]
        rows = np.unravel_index(safe[0], levels) if raw.size else (safe[0],)
        return (*rows, *safe[1:]), mask, shape

    def load(self, e: Node) -> Array:
        name, dtype = e.attrs["view"], e.dtype
        raw = self.arguments[name]
        index, mask, shape = self._where(e)
        if not mask.any():
            return np.broadcast_to(self._other(e), shape).astype(self.real if dtype.floating else dtype.storage)
        if name in self.written and not self.written[name][index][mask].all():
            raise RunError(f"load of {name}: nobody has written there", e.line)
        found = np.where(mask, dtype.decode(raw[index]), self._other(e))
        return found.astype(self.real) if dtype.floating else found

    def _other(self, e: Node) -> Array:
        value = np.asarray(e.attrs["other"], e.dtype.values)
        return e.dtype.rounded(value) if e.dtype.floating else value

    def store(self, e: Node) -> None:
        name = e.attrs["view"]
        index, mask, shape = self._where(e)
        value = np.broadcast_to(e.dtype.encode(self.value(e.args[-1])), shape)
        chosen = tuple(np.asarray(i)[mask] for i in index)
        self.arguments[name][chosen] = value[mask]
        if name in self.written:
            self.written[name][chosen] = True

    # Values ---------------------------------------------------------------------------------------------------------

    def extents(self, node: Node) -> tuple[int, ...]:
        return tuple(self._extent(a, node) if isinstance(a, Dim) else a for a in node.shape)

    def _extent(self, axis: Dim, node: Node) -> int:
        size = int(self.value(axis.limit))
        if size > axis.most:
            raise RunError(f"an axis of {size} elements, compiled for at most {axis.most}", node.line)
        return max(size, 0)

    def value(self, node: Node) -> Array:
        """The value of a node, computed where it is not known yet."""
        for one in operands_first(node, lambda n: n in self.frames[n.region]):
            self.frames[one.region][one] = self.compute(one, [self.frames[a.region][a] for a in one.args])
        return self.frames[node.region][node]

    def compute(self, node: Node, args: list[Array]) -> Array:
        a, op = node.attrs, node.op
        if op == "binary":
            function = numbers.BINARY[a["kind"]]
            return np.asarray(function(*args, a["nan"]) if "nan" in a else function(*args))
        if op == "unary":
            return self._unary(a["kind"], args[0])
        if op == "const":
            return np.asarray(a["value"], self.real if node.dtype.floating else node.dtype.storage)
        if op in ("program_id", "num_programs"):
            return np.asarray((self.place if op == "program_id" else self.grid)[a["axis"]], np.int64)
        if op == "argument":
            value = np.asarray(self.arguments[a["name"]], node.dtype.values)
            return value.astype(self.real) if node.dtype.floating else value
        if op == "size":
            sizes = sizes_of(self.arguments[a["view"]], self.program.views[a["view"]].levels)
            return np.asarray(sizes[a["axis"]], np.int64)
        if op == "arange":
            return np.arange(self.extents(node)[0], dtype=np.int64)
        if op == "fma":
            return numbers.fma(*args) if self.real is np.float32 else np.asarray(args[0] * args[1] + args[2])
        if op == "where":
            return np.where(args[0], args[1], args[2])
        if op == "cast":
            if self.real is np.float64 and node.dtype == dtypes.float32:
                return args[0].astype(np.float64)
            made = np.asarray(numbers.cast(args[0], node.args[0].dtype, node.dtype, a["round"], a["saturate"]))
            return made.astype(self.real) if node.dtype.floating else made
        if op == "bitcast":
            if self.real is np.float64 and dtypes.float32 in (node.dtype, node.args[0].dtype):
                raise RunError("an exact run has no bits of float32", node.line)
            return np.ascontiguousarray(args[0]).view(node.dtype.storage).reshape(args[0].shape)
        if op == "broadcast":
            return self._broadcast(node, args[0])
        if op == "reshape":
            return args[0].reshape(self.extents(node))
        if op == "reduce":
            return self._reduce(node, args[0])
        assert op == "random", op
        return numbers.philox(*args)

    def _unary(self, kind: str, x: Array) -> Array:
        if x.dtype == np.float64 and kind in EXACT:
            return np.asarray(EXACT[kind](x))
        return np.asarray(numbers.UNARY[kind](x))

    def _broadcast(self, node: Node, x: Array) -> Array:
        axes = node.attrs["axes"]
        order = [k for k in axes if k >= 0]
        shape = tuple(1 if k < 0 else x.shape[k] for k in axes)
        return np.broadcast_to(x.transpose(order).reshape(shape), self.extents(node))

    def _reduce(self, node: Node, x: Array) -> Array:
        combine, dtype, axis = node.attrs["combine"], node.args[0].dtype, node.attrs["axis"]
        x = np.broadcast_to(x, self.extents(node.args[0]))
        moved = np.moveaxis(x, axis, 0)
        last = all(a == 1 for a in node.args[0].shape[axis + 1 :])
        order = self.order if last else Order(block=self.order.block)
        kind = self.real if dtype.floating else np.dtype(dtype.storage)
        block, start = order.block if combine == "sum" and dtype.floating else 0, numbers.identity(combine, dtype)
        found = fold(moved, combine, start, order.lanes, order.unroll, block, order.threads).astype(kind)
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
