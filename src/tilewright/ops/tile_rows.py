"""What kernels in the tile language share: blocks of rows, tensors as one long row, and sums over rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright import tile
from tilewright.core.call import TensorFacts
from tilewright.core.launch import Launch, Scratch

BLOCK = 4096
"""Columns of one program: enough work to enter it for, few enough to share among threads."""


PROGRAMS, ROWS = 64, 8
"""Programs that share the rows of a sum over them, and how many each has at least, so that its partial sums cost less
than the rows. The number of a sum's terms must not follow that of threads."""
SUMMED = 256
"""Columns of a program that sums partial rows."""


def place(t: Any, columns: Any) -> tuple[Any, Any]:
    """(row, columns) of this program: grid axis 0 counts rows, axis 1 blocks of BLOCK columns."""
    start = t.program_id(1) * BLOCK
    return t.program_id(0), start + t.arange(BLOCK, limit=columns - start)


def one_row(tensors: Mapping[str, TensorFacts | None]) -> dict[str, TensorFacts | None]:
    """The tensors as one long row where all of them are dense, else as they are. Their shapes must be equal."""
    if any(facts is not None and not facts.contiguous for facts in tensors.values()):
        return dict(tensors)
    return {
        name: None if facts is None else replace(facts, shape=(1, facts.numel), stride=(facts.numel, 1))
        for name, facts in tensors.items()
    }


def grid(facts: TensorFacts) -> tuple[int, int, int]:
    """Programs for a tensor of rows."""
    return facts.rows, -(-facts.columns // BLOCK), 1


def sharing(rows: int) -> int:
    """Programs that share so many rows: each takes every so many-th one."""
    return min(-(-rows // ROWS), PROGRAMS)


@tile.kernel
def sum_rows(t: Any, partials: Any, out: Any) -> None:
    """The sum of partial rows, for a block of columns, rounded once."""
    start = t.program_id(0) * SUMMED
    col = start + t.arange(SUMMED, limit=partials.shape[1] - start)
    total = t.var(t.load(partials[0, col]))
    for row in t.range(1, partials.shape[0]):
        total.set(total.get() + t.load(partials[row, col]))
    t.store(out[col], total.get().to(out.dtype))


def sum_launch(partials: Scratch, out: TensorFacts | None) -> Launch:
    """The launch of `sum_rows`."""
    blocks = (-(-partials.shape[1] // SUMMED), 1, 1)
    return Launch(sum_rows, blocks, {"partials": partials, "out": out}, {}, {"flat": ("out",)})
