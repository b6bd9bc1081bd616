"""Where each shared array of a function lies, once its barriers stand: first fit by falling size.

Two arrays may have the same bytes where a barrier that is there anyway parts every access to one from every access to
the other. A loop counts as one place: what it uses it may use again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.tile.errors import LowerError
from tilewright.tile.ir.thread_ir import Array, Barrier, For, Function, If, Load, Statement, Store, Wait
from tilewright.tile.ir.thread_uniform import WARP

ALIGNMENT = 16
"""Bytes: as wide as the widest access."""
SHARED_BYTES = 232448
"""The most shared memory that any block may have (compute capability 9.0)."""
LESS_BYTES = {75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 120: 101376, 121: 101376}
"""What a block may have where that is less, by compute capability."""
PLAIN = 49152
"""Bytes a block may have without opting in when the kernel is loaded."""


@dataclass(frozen=True)
class Arena:
    """`offsets`: bytes from the start of an instance's shared memory, by array; `size`: bytes of an instance. All are
    multiples of ALIGNMENT."""

    offsets: dict[str, int]
    size: int


def most_bytes(arch: str) -> int:
    """What a block may have on an architecture ("sm_90"; "": any)."""
    return LESS_BYTES.get(int("".join(filter(str.isdigit, arch)) or 90), SHARED_BYTES)


def arrange(function: Function, limit: int = SHARED_BYTES) -> Arena:
    """A place for each shared array.

    Args:
        limit: bytes that a block may have.

    Raises:
        LowerError: they do not fit; it names them.
    """
    shared = sorted((a for a in function.arrays if a.shared), key=lambda a: (-_size(a), a.name))
    sizes, offsets = {a.name: _size(a) for a in shared}, dict[str, int]()
    meets = _meeting(function)
    for name, own in sizes.items():
        at = 0
        for low, other in sorted((low, other) for other, low in offsets.items()):
            if frozenset((name, other)) in meets and low < at + own and at < low + sizes[other]:
                at = low + sizes[other]
        offsets[name] = at
    size = max((at + sizes[name] for name, at in offsets.items()), default=0)
    if size * function.instances > limit:
        each = f" of {function.instances} instances" if function.instances > 1 else ""
        told = ", ".join(f"{name} {own}" for name, own in sizes.items())
        raise LowerError(f"{function.name}: a block{each} needs {size * function.instances} bytes of shared memory; "
                         f"there are {limit} ({told})")  # fmt: skip
    return Arena(offsets, size)


def most_needed(function: Function) -> int:
    """Bytes that a block needs where no array has the bytes of another; known before barriers are placed."""
    return function.instances * sum(_size(a) for a in function.arrays if a.shared)


def _size(array: Array) -> int:
    return -(-array.elements * array.dtype.itemsize // ALIGNMENT) * ALIGNMENT


_Use = tuple[int, tuple[int, ...]]
"""A place in the function, of which a loop has one, and the conditions around it."""


def _meeting(function: Function) -> set[frozenset[str]]:
    """The pairs of arrays that need bytes of their own."""
    uses: dict[str, list[_Use]] = {a.name: [] for a in function.arrays if a.shared}
    barriers: list[_Use] = []
    places = itertools.count()
    found: set[frozenset[str]] = set()
    flying: set[str] = set()  # what a copy is on its way to: no barrier parts it from anything
    enough = ("block", "warp") if function.threads <= WARP else ("block",)

    def walk(body: Iterable[Statement], path: tuple[int, ...], loop: int | None) -> None:
        for s in body:
            at = next(places) if loop is None else loop
            if isinstance(s, If):
                walk(s.body, (*path, at) if loop is None else path, loop)
            elif isinstance(s, For):
                walk(s.body, path, at)
            elif isinstance(s, (Load, Store)) and s.memory in uses:
                uses[s.memory].append((at, path))
                found.update(frozenset((s.memory, name)) for name in flying - {s.memory})
                flying.update({s.memory} if isinstance(s, Store) and s.source else ())
            elif isinstance(s, Wait):
                for name in flying:
                    uses[name].append((at, path))
                flying.clear()
            elif isinstance(s, Barrier) and s.scope in enough and loop is None:
                barriers.append((at, path))

    walk(function.body, (), None)
    for a, b in itertools.combinations(uses, 2):
        one, other = sorted((uses[a], uses[b]), key=lambda u: min((at for at, _ in u), default=0))
        if not all(_parted(x, y, barriers) for x in one for y in other):
            found.add(frozenset((a, b)))
    return found


def _parted(first: _Use, second: _Use, barriers: list[_Use]) -> bool:
    """Whether whoever comes from one use to the other meets a barrier."""
    (begin, one), (end, other) = first, second
    return any(begin < at < end and path in (one[: len(path)], other[: len(path)]) for at, path in barriers)
