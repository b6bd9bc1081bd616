"""What a kernel costs on a GPU, by estimate, and so whether to fuse: bytes over bandwidth or operations over their
rate, whichever takes longer, and a launch. Both are counted in the program; a machine's numbers are measured.

Accesses are taken to be wide ones. What narrow accesses cost was not measured, and the estimate knows nothing of it,
nor of registers that spill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.tile.errors import LowerError
from tilewright.tile.ir.tile_ir import Node, Program, Region, static_size
from tilewright.tile.ir.tile_verify import reachable
from tilewright.tile.lower.phases import cost_of


@dataclass(frozen=True)
class Machine:
    """What it does in a microsecond, and what a launch costs."""

    name: str
    bytes: float
    operations: float
    launch_us: float


H200 = Machine("NVIDIA H200", 4.0e6, 21e6, 1.4)
"""From benchmarks/results/nvidia-h200/tile.jsonl: copies of 134 MB and of little, and what arithmetic limits."""


@dataclass(frozen=True)
class Work:
    """Of one instance: `bytes` that are its own and simple `operations`; and bytes that all instances `share`."""

    bytes: int
    share: int
    operations: int

    def us(self, instances: int, machine: Machine) -> float:
        """The time of a launch of so many instances."""
        moved = (self.bytes * instances + self.share) / machine.bytes
        return machine.launch_us + max(moved, self.operations * instances / machine.operations)

    def limit(self, instances: int, machine: Machine) -> str:
        """What it waits for: "bytes" or "operations"."""
        moved = (self.bytes * instances + self.share) / machine.bytes
        return "operations" if self.operations * instances / machine.operations > moved else "bytes"


def work(program: Program) -> Work:
    """Each distinct element once: what is read again is in a cache. An axis with a limit counts as its most.

    Raises:
        LowerError: a loop whose length is only known at run time.
    """
    times, mine = _times(program), _of_instance(program)
    moved: dict[tuple[str, tuple[Node, ...]], int] = {}
    operations = shared = 0
    for node in reachable(program):
        size = math.prod(map(static_size, node.shape)) * times[node.region]
        if node.op in ("load", "store"):
            index = node.args[: program.views[node.attrs["view"]].rank]
            moved[node.attrs["view"], index] = size * node.dtype.itemsize
        if node.shape:
            operations += cost_of(node) * size
    for (_, index), size in moved.items():
        shared += 0 if any(a in mine for a in index) else size
    return Work(sum(moved.values()) - shared, shared, operations)


def _times(program: Program) -> dict[Region, int]:
    """How often a region runs in an instance; under a condition, as if it held."""
    found = {program.body: 1}
    for effect in program.effects():
        if effect.op in ("loop", "when"):
            trips = 1
            if effect.op == "loop":
                if any(a.op != "const" for a in effect.args):
                    raise LowerError("an estimate needs loops of a known length", effect.line)
                lo, hi, step = (int(a.attrs["value"]) for a in effect.args)
                trips = len(range(lo, hi, step))
            found[effect.attrs["body"]] = found[effect.region] * trips
    return found


def _of_instance(program: Program) -> set[Node]:
    """What differs from instance to instance."""
    found: set[Node] = set()
    for node in reachable(program):
        if node.op == "program_id" or any(a in found for a in node.args):
            found.add(node)
    return found


@dataclass(frozen=True)
class Decision:
    """`fuse`, or not; and both times."""

    fuse: bool
    fused_us: float
    apart_us: float


def decide(fused: tuple[Program, int], apart: Sequence[tuple[Program, int]], machine: Machine = H200) -> Decision:
    """One kernel, or several with memory in between. Each program comes with its count of instances."""
    one, many = (sum(work(p).us(n, machine) for p, n in some) for some in ([fused], apart))
    return Decision(one <= many, one, many)
