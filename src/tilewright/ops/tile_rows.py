"""What kernels in the tile language share that work element by element: blocks of rows, and tensors as one long row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright.core.call import TensorFacts

BLOCK = 4096
"""Columns of one program: enough work to enter it for, few enough to share among threads."""


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
