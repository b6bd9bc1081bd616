"""A picture of a layout: each element of the tile with the lane and the register that hold it, as SVG text."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from tilewright.tile.layout.linear import Layout

CELL, LEFT, TOP = (34, 24), 56, 46
WIDEST = 32
"""Cells a line; a longer last axis goes on in the next one."""
MOST = 2048
"""Elements that are drawn; the caption says that there are more."""


def svg(layout: Layout, title: str = "") -> str:
    """The picture. A cell says lane:register, its hue is the lane's, its depth the warp's; +n counts the copies of an
    element beside the owner, which is shown. Pointing at a cell names all of it."""
    columns = min(layout.extents[-1] if layout.axes else 1, WIDEST)
    count = min(layout.size, MOST)
    owners, copies = layout.owners(), (1 << len(layout.columns)) // layout.size - 1
    more, short = (f", {copies} copies", f"+{copies}") if copies else ("", "")
    width, height = LEFT + columns * CELL[0] + 8, TOP + -(-count // columns) * CELL[1] + 8
    shape = " x ".join(f"{name} {extent}" for name, extent in layout.axes)
    sizes = [1 << len(bits) for bits in (layout.reg, layout.lane, layout.warp)]
    facts = f"{shape}: {sizes[0]} registers, {sizes[1]} lanes, {sizes[2]} warps; a cell is lane:register"
    facts += "" if count == layout.size else f"; the first {count} of {layout.size} elements"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-size="13">{escape(title or "layout")}</text>',
        f'<text x="8" y="34">{escape(facts)}</text>',
    ]
    for flat in range(count):
        line, column = divmod(flat, columns)
        x, y = LEFT + column * CELL[0], TOP + line * CELL[1]
        if column == 0:
            out.append(f'<text x="8" y="{y + 16}">{_index(layout, flat)}</text>')
        reg, lane, warp = owners[flat]
        told = f"{_index(layout, flat)}: warp {warp}, lane {lane}, register {reg}{more}"
        out.append(
            f'<g><title>{told}</title><rect x="{x}" y="{y}" width="{CELL[0]}" height="{CELL[1]}" '
            f'fill="{_colour(lane / sizes[1], warp / sizes[2])}" stroke="#999"/>'
            f'<text x="{x + CELL[0] / 2:g}" y="{y + 16}" text-anchor="middle">{lane}:{reg}{short}</text></g>'
        )
    return "\n".join([*out, "</svg>", ""])


def _index(layout: Layout, flat: int) -> str:
    return f"[{', '.join(map(str, np.unravel_index(flat, layout.extents)))}]"


def _colour(lane: float, warp: float) -> str:
    """A hue for the lane; deeper from warp to warp."""
    light = 0.92 - 0.35 * warp
    rgb = (light + 0.08 * math.cos(2 * math.pi * (lane + shift / 3)) for shift in range(3))
    return "#" + "".join(f"{round(255 * min(1, v)):02x}" for v in rgb)
