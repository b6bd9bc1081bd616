"""Phases: which effects of a region share a loop, and where a tile waits that a later loop needs again.

A reduction ends a phase. Effects of one level and one shape become one loop nest; the level of an effect is the number
of reductions (and of memory conflicts) that it must come after. A tile that a later phase needs is recomputed where
that is cheap, else it waits in a scratch array. Statements are made elsewhere: this only decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilewright.tile import dtypes
from tilewright.tile.analysis.places import injective, is_scalar
from tilewright.tile.ir.tile_ir import Node, Program, Region, Shape
from tilewright.tile.ir.tile_verify import reachable

CHEAP = 3
"""Recompute a tile that costs at most this many operations: a load, a widening and one more."""
DEAR = frozenset(("exp", "exp2", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "rint", "div", "floordiv", "mod"))
"""Operations that cost more than that."""


@dataclass(eq=False)
class Phase:
    """One loop nest over `space`. `order`: how the author wants its axes dealt, () where they do not say. `keep`: tiles
    that it also writes to scratch."""

    segment: Segment
    level: int
    space: Shape
    order: tuple[int, ...] = ()
    items: list[Node] = field(default_factory=list)
    keep: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Segment:
    """Effects of a region up to the next loop or `when`, which is `control`. `number`: of all, in program order."""

    region: Region
    number: int = 0
    items: list[Node] = field(default_factory=list)
    control: Node | None = None
    levels: dict[Node, int] = field(default_factory=dict)
    scalars: dict[int, list[Node]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)

    def phase(self, level: int, space: Shape, order: tuple[int, ...] = ()) -> Phase:
        """The loop nest of this level, shape and order, made where there is none."""
        for phase in self.phases:
            if (phase.level, phase.space, phase.order) == (level, space, order):
                return phase
        made = Phase(self, level, space, order)
        self.phases.append(made)
        return made


def folds(node: Node) -> bool:
    """Whether a node is a reduction with something to reduce: it then ends a phase."""
    return node.op == "reduce" and node.args[0].shape[node.attrs["axis"]] != 1


class Plan:
    """The phases of a program: `segments` by region, in order, and `scratch`, the tiles that wait."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.segments: dict[Region, list[Segment]] = {}
        self.scratch: dict[Node, Phase] = {}
        self.home: dict[Node, Phase] = {}
        self.stores = [e for e in program.effects() if e.op in ("store", "set")]
        self.place: dict[Node, Segment] = {}
        self.numbers = itertools.count()
        self.folds = [n for n in reachable(program) if folds(n)]
        self._region(program.body)

    # Levels ---------------------------------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        segments = self.segments[region] = [Segment(region)]
        mine = sorted([*region.effects, *(n for n in self.folds if n.region is region)], key=lambda n: n.id)
        for item in mine:
            if item.op in ("loop", "when"):
                segments[-1].control = item
                segments.append(Segment(region))
            elif item.op not in ("index", "check"):
                segments[-1].items.append(item)
                self.place[item] = segments[-1]
        for segment in segments:
            self._levels(segment)
        for segment in segments:
            segment.number = next(self.numbers)
            self._uses(segment)
            if segment.control is not None:
                self._region(segment.control.attrs["body"])

    def _levels(self, segment: Segment) -> None:
        for item in segment.items:
            level = self._level_of(item, segment)
            if item.op in ("load", "store", "get", "set", "print"):
                for earlier in segment.items:
                    if earlier is item:
                        break
                    if self.conflict(earlier, item):
                        level = max(level, segment.levels[earlier] + (not self.pointwise(earlier, item)))
            segment.levels[item] = level
            if is_scalar(item.shape) and not folds(item):
                segment.scalars.setdefault(level, []).append(item)
            elif item.op == "reduce":
                segment.phase(level, item.args[0].shape).items.append(item)
            elif item.op in ("store", "set", "var", "print", "stage"):
                phase = segment.phase(level, item.shape, item.attrs.get("order", ()))
                phase.items.append(item)
                if item.op == "stage":
                    self.scratch[item] = self.home[item] = phase
                    phase.keep.append(item)

    def _level_of(self, node: Node, segment: Segment) -> int:
        """The least level at which all that a node needs is there."""
        level = 0
        for n in (node, *cone(node)):
            if n in segment.levels:
                level = max(level, segment.levels[n] + (folds(n) or n.op == "stage"))
            elif n.op == "reshape":  # what is regrouped waits in scratch first
                level = max(level, 1 + self._level_of(n.args[0], segment))
        return level + self._stored_beside(node, level, segment)

    def _stored_beside(self, node: Node, level: int, segment: Segment) -> bool:
        """Whether what a node reads is stored by another loop of this level, which may come later."""
        own = node.args[0].shape if node.op == "reduce" else node.shape, node.attrs.get("order", ())
        stored = [s for s in segment.items if s.op in ("store", "set", "var") and segment.levels.get(s) == level]
        others = [s for s in stored if not is_scalar(s.shape) and (s.shape, s.attrs.get("order", ())) != own]
        read = [n for n in cone(node) if n.op in ("load", "get")] if others else []
        return any(s.id < n.id and self.conflict(n, s) for n in read for s in others)

    # Conflicts ------------------------------------------------------------------------------------------------------

    def conflict(self, a: Node, b: Node) -> bool:
        """Whether two effects may touch the same memory and one writes, or both print. What is staged is read there."""
        if a.op == "stage":
            return any(self.conflict(n, b) for n in cone(a) if n.op in ("load", "get"))
        if a.op == b.op == "print":
            return True
        if {a.op, b.op} <= {"load", "store"}:
            return "store" in (a.op, b.op) and self.program.may_meet(a.attrs["view"], b.attrs["view"])
        kinds = {"get": "cell", "set": "cell", "var": "cell"}
        if kinds.get(a.op) and kinds.get(b.op):
            return (a.op, b.op) != ("get", "get") and _cell(a) == _cell(b)
        return False

    def pointwise(self, a: Node, b: Node) -> bool:
        """Whether each element of one meets only the same element of the other, so that one loop may hold both."""
        if is_scalar(a.shape) and is_scalar(b.shape):
            return True
        if a.shape != b.shape or a.op in ("print", "stage") or "order" in {**a.attrs, **b.attrs}:
            return False
        if a.op in ("get", "set", "var"):
            return True
        rank = self.program.views[a.attrs["view"]].rank
        return a.args[:rank] == b.args[:rank] and injective(a.args[:rank], a.shape)

    def recomputable(self, load: Node, phase: Phase) -> bool:
        """Whether a load may be repeated in a phase: nobody writes there between its place and that phase."""
        home = self.place[load]
        for store in self.stores:
            if not self.conflict(load, store) or (store.id < load.id and store.region is home.region):
                continue
            if phase.segment is not home:
                return False
            if self.place.get(store) is home and phase.level > home.levels[store] - (not self.pointwise(load, store)):
                return False
            if any(store in p.items and self.before(p, phase) for p in home.phases):
                return False
        return True

    def before(self, first: Phase, later: Phase) -> bool:
        """Whether what `first` left in scratch is there whenever `later` runs."""
        mine, other = first.segment, later.segment
        if mine is other:
            return (first.level, mine.phases.index(first)) < (later.level, mine.phases.index(later))
        return mine.number < other.number and other.region.within(mine.region)

    def waits(self, node: Node, phase: Phase) -> bool:
        """Whether a phase reads this tile from scratch."""
        return node in self.scratch and self.scratch[node] is not phase and self.before(self.scratch[node], phase)

    # Scratch --------------------------------------------------------------------------------------------------------

    def _uses(self, segment: Segment) -> None:
        # Phases may gain members while we look: what is regrouped is kept at a level of its own.
        for phase in sorted(segment.phases, key=lambda p: p.level):
            for item in phase.items:
                for arg in item.args:
                    self._use(arg, phase)

    def _use(self, root: Node, phase: Phase) -> None:
        waiting, seen = [root], set[Node]()
        while waiting:
            node = waiting.pop()
            if node in seen or is_scalar(node.shape) or folds(node) or node.op == "arange" or self.waits(node, phase):
                continue
            seen.add(node)
            if node.op == "reshape":
                if not folds(node.args[0]):  # a fold leaves an array as it is
                    self._keep(node.args[0], self._first(node.args[0], phase))
                continue
            first = self.home.get(node)
            if first is None or (first is not phase and not self.before(first, phase)):
                if node.op in ("load", "get") and not self.recomputable(node, phase):
                    self._keep(node, self.place[node].phase(self.place[node].levels[node], node.shape))
                    continue
                self.home[node] = phase
            elif first is not phase and not self._cheap(node, phase):
                narrow = node.op == "cast" and node.args[0].dtype.itemsize < node.dtype.itemsize
                kept = node.args[0] if narrow else node
                there = self._own(kept, first, phase)
                if there is not None:
                    self._keep(kept, there)
                    continue
            waiting.extend(node.args)

    def _own(self, node: Node, first: Phase, later: Phase) -> Phase | None:
        """The phase of a tile's own shape that leaves it for a later one: what `first` counts are other elements. None
        where there is none: it is computed again."""
        if first.space == node.shape:
            return first
        level, segment = self._level_of(node, first.segment), first.segment
        return segment.phase(level, node.shape) if segment is not later.segment or level < later.level else None

    def _first(self, node: Node, phase: Phase) -> Phase:
        """The phase that computes what is regrouped: one level before it is needed."""
        home = self.home.get(node)
        if home is not None and home.space == node.shape and self.before(home, phase):
            return home
        level = self._level_of(node, phase.segment)
        made = phase.segment.phase(level, node.shape)
        self._use(node, made)
        return made

    def _keep(self, node: Node, phase: Phase) -> None:
        if self.scratch.get(node) is not phase and (
            node not in self.scratch or not self.before(self.scratch[node], phase)
        ):
            self.scratch[node] = phase
            phase.keep.append(node)
            self.home[node] = phase
            for arg in node.args if node.op != "load" else ():
                self._use(arg, phase)

    def _cheap(self, node: Node, phase: Phase) -> bool:
        cost, seen = 0, set()
        waiting = [node]
        while waiting:
            top = waiting.pop()
            if top in seen or is_scalar(top.shape) or top.op == "arange":
                continue
            seen.add(top)
            if self.waits(top, phase) or folds(top) or top.op == "reshape":
                cost += 1
                continue
            if top.op == "broadcast":
                waiting.extend(top.args)
                continue
            if top.op in ("load", "get") and not self.recomputable(top, phase):
                return False
            cost += cost_of(top)
            if cost > CHEAP:
                return False
            waiting.extend(top.args if top.op not in ("load", "get") else ())
        return True


def cost_of(node: Node) -> int:
    """What one element costs, in simple operations; of what is dear, more than what is cheap."""
    eight_bits = node.op == "cast" and dtypes.float8_e4m3fn in (node.dtype, node.args[0].dtype)
    if node.op == "random" or eight_bits or node.attrs.get("kind") in DEAR:
        return CHEAP + 1
    return 2 if node.dtype.itemsize == 8 and node.op == "binary" else 1


def cone(root: Node) -> Iterator[Node]:
    """The nodes that an item depends on, up to loads, reductions and cells, which it includes."""
    seen: set[Node] = set()
    waiting = [*root.args, *root.limits]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node.op not in ("load", "get", "index", "stage") and not folds(node):
            waiting.extend(node.args)
            waiting.extend(node.limits)


def _cell(node: Node) -> int:
    return node.id if node.op == "var" else int(node.attrs["var"])


def phases_in_order(segment: Segment) -> Iterator[tuple[list[Node], list[Phase]]]:
    """(scalar effects, loop nests) of a segment, level by level."""
    for level in sorted({*segment.scalars, *(p.level for p in segment.phases)}):
        yield segment.scalars.get(level, []), [p for p in segment.phases if p.level == level]
