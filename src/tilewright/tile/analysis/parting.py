"""Whether a kernel may be taken apart at a fragment: whether what a call of it passes can wait in a tensor.

That has one element a place, which one kernel writes and another, later, reads. So a place must have one value, and
exist; and neither kernel may touch memory earlier or later than the kernel that does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.tile.ir.tile_ir import Node, Program, Region, broadcast_shapes, operands_first


@dataclass(frozen=True)
class Called:
    """A call of a fragment: where, what it passes on, and its place's indices that are no Python ints."""

    region: Region
    value: Node
    place: tuple[Node, ...]


def problem(program: Program, calls: Iterable[Called], first: Program, second: Program) -> str:
    """What forbids it, or "". `first` and `second`: the kernels that would run in turn."""
    effects = list(program.effects())
    bodies = {program.body, *(e.attrs["body"] for e in effects if "body" in e.attrs)}
    written, values, table = program.written(), set(), dict[Any, int]()
    masks = [e.args[-1 - (e.op == "store")] for e in effects if e.attrs.get("masked")]
    for call in (c for c in calls if c.region in bodies):  # a loop's first trace is no part of the program
        if call.value.shape != broadcast_shapes((), *(n.shape for n in call.place)):
            return "its value is not of its place's shape"
        if needed(masks) & {n for n in call.place if n.op != "const"}:
            return "a mask depends on its place, which may not be there"
        known = {n: -1 - i for i, n in enumerate(call.place)}
        there = needed(call.place)
        for node in operands_first(call.value, known.__contains__):
            if not _varying(node, effects) <= there:
                return "its value changes where its place does not"
            read = {node.attrs["view"]} if node.op == "load" else ()
            changes = node.op in ("index", "get") or any(program.may_meet(n, m) for n in read for m in written)
            operands = tuple(known[n] for n in (*node.args, *node.limits))
            key = node.id if changes else None, node.op, tuple(node.attrs.items()), node.shape, node.dtype, operands
            known[node] = table.setdefault(key, len(table))
        values.add(known[call.value])
    if len(values) > 1:
        return "it is called with several values at one place"
    clash = {m for m in first.written() for n in _touched(second, "load", "store") if program.may_meet(m, n)}
    clash |= _touched(first, "load") & second.written()
    clash &= program.views.keys()
    return f"{min(clash)} would be written by one of the two and touched by the other" if clash else ""


def needed(nodes: Sequence[Node]) -> set[Node]:
    """All that nodes are made of, and they themselves."""
    found: set[Node] = set()
    for root in nodes:
        for node in operands_first(root, found.__contains__):
            found.add(node)
    return found


def _varying(node: Node, effects: Sequence[Node]) -> set[Node]:
    """Of what a value is made, what differs from instance to instance, and the indices of loops that change it."""
    if node.op in ("program_id", "index"):
        return {node}
    if node.op != "get":
        return set()
    sets = [e.region for e in effects if e.op == "set" and e.attrs["var"] == node.attrs["var"]]
    loops = [(e.attrs["body"], e.attrs["index"]) for e in effects if e.op == "loop"]
    return {i for body, i in loops if node.region.within(body) and any(region.within(body) for region in sets)}


def _touched(program: Program, *how: str) -> set[str]:
    return {e.attrs["view"] for e in program.effects() if e.op in how}
