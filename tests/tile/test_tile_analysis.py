"""What is known of integers is never more than what holds: every rule against every member of many small sets."""

from __future__ import annotations

import itertools
from typing import Any

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.analysis.divisibility import ANY, Facts, Known, constant
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.lower.kernel import lower
from tilewright.tile.render import cpu as render

SETS = [
    Known(d, low, low + width) for d in (0, 1, 2, 3, 4, 6, 8, 12) for low in (-13, -4, 0, 3) for width in (0, 6, 17)
]
MEMBERS = {s: [v for v in range(-13, 25) if s.holds(v)] for s in SETS}


def half_open(s: Known) -> list[Known]:
    return [s, Known(s.divisor, s.low, None), Known(s.divisor, None, s.high)]


def test_division_and_remainder_are_sound() -> None:
    for s, by in itertools.product(SETS, range(1, 14)):
        for known, v in itertools.product(half_open(s), MEMBERS[s]):
            assert (known // by).holds(v // by) and (known % by).holds(v % by), (known, by, v)


def test_sums_products_and_joins_are_sound() -> None:
    for a, b in itertools.product(SETS[::2], SETS[1::3]):
        for v, w in itertools.product(MEMBERS[a], MEMBERS[b]):
            for x, y in itertools.product(half_open(a), half_open(b)):
                assert (x + y).holds(v + w) and (x - y).holds(v - w) and (x * y).holds(v * w), (x, y, v, w)
                assert x.join(y).holds(v) and x.join(y).holds(w)
                assert x.least(y).holds(min(v, w)) and x.greatest(y).holds(max(v, w)), (x, y, v, w)


def test_the_claims_that_caught_others_out() -> None:
    sixteen = Known(16, 0)
    assert sixteen % 3 == Known(1, 0, 2) and (sixteen // 12).divisor == 1
    assert not Known(8).non_negative and not ANY.fits(64) and constant(-64).fits(8)


def test_facts_of_a_program_let_c_divide() -> None:
    def body(t: Any, x: Any, y: Any) -> None:
        col = t.arange(x.shape[1])
        t.store(y[0, col], (col // 3 + (col - 7) // 5).f32())

    view = ViewType(tile.float32, (None, Most(64)))
    program = tile.kernel(body, static={"x": (1,)}).trace({"x": view, "y": view})
    facts = Facts(program)
    found = {n.line.number: facts.of(n) for n in program.nodes if n.attrs.get("kind") == "floordiv"}
    assert set(found.values()) <= {Known(1, 0, 21), Known(1, -2, 11)}
    text, _ = render.source(lower(program, 16), ())
    assert text.count("floor_div<i64v>(v") == 2  # main loop and last chunk: only the one that may be negative
