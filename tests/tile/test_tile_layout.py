"""Layouts against brute force: every place, every element, every copy."""

from __future__ import annotations

import itertools
import random

import pytest

from tilewright.tile import TileError
from tilewright.tile.layout.convert import scope
from tilewright.tile.layout.linear import Layout, Span, blocked

AXES = (("i", 4), ("j", 4))


def random_layout(chance: random.Random, axes: tuple[tuple[str, int], ...] = AXES) -> Layout:
    """Two bits of each place, which reach every element."""
    size = 1
    for _, extent in axes:
        size *= extent
    while True:
        columns = [chance.choice((0, *(1 << b for b in range(4)), chance.randrange(size))) for _ in range(6)]
        if 1 << Span(columns).rank == size:
            return Layout(tuple(columns[:2]), tuple(columns[2:4]), tuple(columns[4:]), axes)


def places(layout: Layout) -> list[tuple[int, int, int]]:
    return list(itertools.product(*(range(1 << len(c)) for c in (layout.reg, layout.lane, layout.warp))))


def brute(source: Layout, target: Layout) -> str:
    """Who has what each thread wants, found by looking where its elements are."""
    where: dict[int, set[tuple[int, int]]] = {}
    for reg, lane, warp in places(source):
        where.setdefault(source.at(reg, lane, warp), set()).add((lane, warp))
    wanted = [(lane, warp, where[target.at(reg, lane, warp)]) for reg, lane, warp in places(target)]
    if all((lane, warp) in found for lane, warp, found in wanted):
        return ""
    return "warp" if all(any(w == warp for _, w in found) for _, warp, found in wanted) else "block"


def test_who_is_waited_for_is_exact_copies_included() -> None:
    chance = random.Random(0)
    seen = set()
    for _ in range(4000):
        source, target = random_layout(chance), random_layout(chance)
        if chance.random() < 0.5:  # near ones, so that all three occur
            target = Layout(tuple(chance.sample(source.reg, 2)), source.lane, source.warp, AXES)
            if chance.random() < 0.5:
                skewed = tuple(c ^ chance.choice((0, *source.reg)) for c in source.lane)
                try:
                    target = Layout(target.reg, skewed, source.warp, AXES)
                except TileError:
                    continue
        found = scope(source, target)
        seen.add(found)
        assert found == brute(source, target), (source, target)
    assert seen == {"", "warp", "block"}


def test_a_rule_by_single_bits_would_be_wrong() -> None:
    source = Layout((8, 0), (2, 4), (1, 1), AXES)
    target = Layout((0, 2), (8, 4), (1, 0), AXES)
    assert scope(source, target) == brute(source, target) == "block"


def test_owners_are_one_an_element_and_the_least_of_its_copies() -> None:
    chance = random.Random(2)
    for _ in range(300):
        layout = random_layout(chance)
        owners = layout.owners()
        assert sorted(owners) == list(range(16))
        for flat, (reg, lane, warp) in owners.items():
            copies = [p[::-1] for p in places(layout) if layout.at(*p) == flat]
            assert (warp, lane, reg) == min(copies)


def test_the_usual_layout() -> None:
    row = blocked({"n": 4096}, vector=8, lanes=32, warps=8)
    assert row.reg == (1, 2, 4, 2048) and row.lane == (8, 16, 32, 64, 128) and row.warp == (256, 512, 1024)
    short = blocked({"n": 64}, vector=8, lanes=32, warps=8)
    assert [c for c in short.columns if c == 0] == [0] * 5 and scope(row, row) == ""


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Layout((1,), (), (), (("i", 3),)), "power of two"),
        (lambda: Layout((4,), (), (), (("i", 4),)), "outside"),
        (lambda: Layout((1, 1), (), (), (("i", 4),)), "no place"),
        (lambda: scope(blocked({"i": 4}, 1, 4, 1), blocked({"i": 8}, 1, 4, 1)), "does not become"),
    ],
)
def test_what_is_no_layout_is_refused(build: object, says: str) -> None:
    with pytest.raises(TileError, match=says):
        build()  # type: ignore[operator]
