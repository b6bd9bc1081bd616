"""Pictures of layouts: each cell is where the layout says, for a layout of its own and for a compiled kernel's."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_tile_layout import random_layout

from tilewright import tile
from tilewright.tile import TileError, ViewType
from tilewright.tile.layout.linear import Layout, blocked
from tilewright.tile.schedule import Schedule

CELL = re.compile(r"\[([\d, ]*)\]: warp (\d+), lane (\d+), register (\d+)(?:, (\d+) copies)?")
SVG = "{http://www.w3.org/2000/svg}"


def cells(text: str) -> list[Any]:
    found = [t.text or "" for t in ElementTree.fromstring(text).iter(f"{SVG}title")]
    return [CELL.fullmatch(t) for t in found]


@pytest.mark.parametrize("seed", range(40))
def test_each_element_is_drawn_where_its_owner_is(seed: int) -> None:
    layout = random_layout(random.Random(seed))
    drawn = cells(layout.plot())
    assert [tuple(map(int, c[1].split(", "))) for c in drawn] == [(i, j) for i in range(4) for j in range(4)]
    for flat, cell in enumerate(drawn):
        warp, lane, reg = map(int, cell.group(2, 3, 4))
        assert layout.owners()[flat] == (reg, lane, warp)
        assert int(cell[5] or 0) == (1 << len(layout.columns)) // 16 - 1


def test_lanes_and_warps_have_colours_of_their_own() -> None:
    text = blocked({"i": 2, "j": 64}, 1, 32, 4).plot(title="a < b")
    fills = [r.get("fill") for r in ElementTree.fromstring(text).iter(f"{SVG}rect")][1:]
    assert len(set(fills)) == 128 and "a &lt; b" in text


def test_a_long_tile_is_drawn_in_part_and_says_so() -> None:
    text = blocked({"x": 8192}, 8, 32, 8).plot()
    assert len(cells(text)) == 2048 and "the first 2048 of 8192 elements" in text


def test_a_tile_of_one_element() -> None:
    assert len(cells(Layout((), (0,), (), ()).plot())) == 1


def test_the_picture_of_a_compiled_kernel(tmp_path: Path) -> None:
    def copy(t: Any, x: Any, y: Any) -> None:
        col = t.arange(1024)
        t.store(y[0, col], t.load(x[0, col]))

    view = ViewType(tile.float32, (None, None))
    kernel, types = tile.kernel(copy), {"x": view, "y": view}
    said = tile.explain(kernel, types, gpu="sm_90", schedule=Schedule(64, 1, 4))
    said.plot(tmp_path / "copy.svg")
    drawn = cells((tmp_path / "copy.svg").read_text("utf-8"))
    assert [c.group(2, 3, 4) for c in drawn] == [(str(i // 128), str(i // 4 % 32), str(i % 4)) for i in range(256)]
    with pytest.raises(TileError, match="one thread has a whole row"):
        tile.explain(kernel, types).plot()
