"""The launch by which families in TileLang add up what groups of blocks left. The program is in `tilelang_rows`."""

from __future__ import annotations

from tilewright.backends.tilelang import Program
from tilewright.core.call import TensorFacts
from tilewright.core.launch import Argument, Launch, Scratch
from tilewright.ops.tilelang_places import NAMES

ADD_GROUPS = Program("tilewright.ops.tilelang_rows:add_groups")
LANES, DEPTH = 32, 16
"""Columns and groups that a block takes at once."""


def sum_groups(partials: Scratch, *outputs: TensorFacts) -> Launch:
    """Adds up what each group of blocks has left: [groups, C] to one output, or [2, groups, C] to two."""
    groups, columns = partials.shape[-2:]
    blocks = -(-columns // LANES)
    args: dict[str, Argument] = {"partials": partials, "first": outputs[0], "second": outputs[-1]}
    args |= {"groups": groups, "columns": columns, "blocks": blocks}
    dtypes = tuple(NAMES[facts.dtype] for facts in outputs)
    return Launch(ADD_GROUPS, (blocks, len(outputs), 1), args, {"dtypes": dtypes, "lanes": LANES, "depth": DEPTH})
