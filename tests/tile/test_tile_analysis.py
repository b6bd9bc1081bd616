"""What is known of integers is never more than what holds: every rule against every member of many small intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright import tile
from tilewright.tile import ViewType, numbers
from tilewright.tile.analysis.intervals import BY_POSITIVE, RULES, Facts, Range
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.lower.kernel import lower
from tilewright.tile.render import cpu as render

RANGES = [(low, low + width) for low in (-13, -4, 0, 3) for width in (0, 6, 17)]


def results(kind: str, a: Range, b: Range) -> Iterator[int]:
    """What the language makes of every pair of members."""
    for v, w in itertools.product(range(a[0], a[1] + 1), range(b[0], b[1] + 1)):
        yield int(numbers.BINARY[kind](np.asarray(v), np.asarray(w)))


def test_rules_are_sound_and_their_bounds_are_reached() -> None:
    for (kind, rule), a, b in itertools.product(RULES.items(), RANGES, RANGES):
        found = list(results(kind, a, b))
        assert rule(a, b) == (min(found), max(found)), (kind, a, b)


def test_rules_for_a_positive_constant_are_sound() -> None:
    for (kind, rule), a, by in itertools.product(BY_POSITIVE.items(), RANGES, range(1, 14)):
        low, high = rule(a, by)
        assert all(low <= v <= high for v in results(kind, a, (by, by))), (kind, a, by)


def facts_of(body: Any) -> dict[str, Range]:
    """The bounds of each operation of a kernel on an int64 `k` of any value and a row of at most 64."""
    view = ViewType(tile.float32, (None, Most(64)))
    program = tile.kernel(body, static={"y": (1,)}).trace({"y": view, "k": tile.int64})
    facts = Facts(program)
    return {n.attrs.get("kind", n.op): facts.of(n) for n in program.nodes if n.dtype == tile.int64}


def test_what_may_have_wrapped_round_is_anything() -> None:
    def body(t: Any, y: Any, k: Any) -> None:
        near = t.minimum(t.maximum(k, 0), 1 << 61)
        t.store(y[0, near * 4 + (k + 1)], 0.0)

    found, anything = facts_of(body), tile.int64.bounds
    assert found["argument"] == found["add"] == found["mul"] == anything
    assert found["min"] == (0, 1 << 61) and found["max"] == (0, anything[1])


def test_a_multiple_of_16_over_12_is_no_multiple() -> None:
    assert BY_POSITIVE["floordiv"]((16, 16), 12) == (1, 1) and BY_POSITIVE["mod"]((16, 16), 3) == (0, 2)


def test_facts_of_a_program_let_c_divide() -> None:
    def body(t: Any, y: Any, k: Any) -> None:
        col = t.arange(y.shape[1])
        t.store(y[0, col], (col // 3 + (col - 7) // 5).f32())

    view = ViewType(tile.float32, (None, Most(64)))
    program = tile.kernel(body, static={"y": (1,)}).trace({"y": view, "k": tile.int64})
    facts = Facts(program)
    found = {facts.of(n) for n in program.nodes if n.attrs.get("kind") == "floordiv"}
    assert found == {(0, 21), (-2, 11)}
    text, _ = render.source(lower(program, 16), ())
    assert text.count("floor_div<i64v>(v") == 2  # main loop and last chunk: only the one that may be negative
