"""What kernels in the tile language share: blocks of rows, tensors as one long row, and sums over rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
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
MOST_PROGRAMS, MOST_ROWS = 1024, 512
"""Where each of these would have more rows, there are more programs: a sum of partial sums is the exacter one."""
SUMMED = 256
"""Columns of a program that sums partial rows."""
RUN = 16
"""Terms of a running sum that are added one after the other; see `Sums`."""


def place(t: Any, columns: Any) -> tuple[Any, Any]:
    """(row, columns) of this program: grid axis 0 counts rows, axis 1 blocks of BLOCK columns."""
    start = t.program_id(1) * BLOCK
    return t.program_id(0), start + t.arange(BLOCK, limit=columns - start)


def accuracy(*tensors: Any) -> str:
    """How exactly to compute what is rounded to these views or tensors, of which any may be None. Where all are half
    precision a few ulp of float32 do not show."""
    return "fast" if all(x is None or x.dtype.itemsize == 2 for x in tensors) else "exact"


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
    return min(-(-rows // ROWS), max(PROGRAMS, min(-(-rows // MOST_ROWS), MOST_PROGRAMS)))


def levels_for(terms: int) -> int:
    """Levels of `Sums` that keep each run of additions short: few, so that few kernels are compiled."""
    return 1 if terms <= 2 * RUN else 2 if terms <= 2 * RUN**2 else 4


class Sums:
    """Running sums over a loop, by name: of RUN terms, of RUN such sums, and so on for so many levels. One cell alone
    would be rounded in the same direction at each of many equal terms, and lose 66 ulp in 131072 rows."""

    def __init__(self, t: Any, shape: Any, wanted: Mapping[str, Any], levels: int = 2) -> None:
        """A sum of this shape for each name that is wanted: whose view is not None."""
        self.t, self.levels = t, levels
        self.cells = {
            name: [t.var(t.zeros(*shape)) for _ in range(levels)] for name, view in wanted.items() if view is not None
        }

    def __contains__(self, name: str) -> bool:
        return name in self.cells

    def over(self, first: Any, count: Any, step: Any = 1, level: int | None = None) -> Iterator[Any]:
        """A loop over first, first + step, .. below `count`, in which `add` may be said."""
        level = self.levels - 1 if level is None else level
        if level == 0 or not self.cells:
            yield from self.t.range(first, count, step)
            return
        stride = step * RUN**level
        for start in self.t.range(first, count, stride):
            with self.t.when(start > first):  # so a short loop pays for one cell
                for cells in self.cells.values():
                    part, total = cells[level - 1 : level + 1]
                    total.set(total.get() + part.get())
                    part.set(self.t.zeros(*part.node.shape))
            yield from self.over(start, self.t.minimum(start + stride, count), step, level - 1)

    def add(self, name: str, terms: Any) -> None:
        """Add terms to a sum; where it is not wanted, nothing."""
        if name in self.cells:
            cell = self.cells[name][0]
            cell.set(cell.get() + terms)

    def __getitem__(self, name: str) -> Any:
        first, *others = (cell.get() for cell in self.cells[name])
        return functools.reduce(operator.add, others, first)


@tile.kernel
def sum_rows(t: Any, partials: Any, out: Any) -> None:
    """The sum of partial rows, for a block of columns, rounded once."""
    start = t.program_id(0) * SUMMED
    col = start + t.arange(SUMMED, limit=partials.shape[1] - start)
    row = t.arange(MOST_PROGRAMS, limit=partials.shape[0])
    t.store(out[col], t.sum(t.load(partials[row[:, None], col[None, :]]), axis=0).to(out.dtype))


def sum_launch(partials: Scratch, out: TensorFacts | None) -> Launch:
    """The launch of `sum_rows`."""
    blocks = (-(-partials.shape[1] // SUMMED), 1, 1)
    return Launch(sum_rows, blocks, {"partials": partials, "out": out}, {}, {"flat": ("out",)})
