"""Where the heads of a call lie in memory, as numbers for a kernel, and the limits of kernels that walk them so.

A head is found by the batch, the token in its sequence, and its place in the token; a tensor of ids by the first two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tilewright.core.call import Call, TensorFacts
from tilewright.core.capability import Limit
from tilewright.core.reason import Reason

MOST_TOKENS = 1 << 30
"""Tokens and heads are counted in 32 bits, offsets in 64."""


def merged(facts: TensorFacts, inner: int) -> tuple[int, int] | None:
    """(how many, stride) of the leading dimensions but the last `inner`, as one; None where strides do not allow it."""
    levels = replace(facts, shape=(*facts.shape[: len(facts.shape) - inner], 1),
                     stride=(*facts.stride[: len(facts.stride) - inner], 1)).row_levels  # fmt: skip
    count = math.prod(facts.shape[: len(facts.shape) - inner])
    if len(levels) > 1 and count:
        return None
    return count, levels[0][1] if count > 1 else 0


def head_places(facts: TensorFacts, heads: int = 0) -> tuple[int, int, int]:
    """Strides of batch, token and head. `heads`: of a tensor [..., S, heads * D], the heads that its rows hold."""
    inner = 2 if heads else 3
    lead = merged(facts, inner)
    assert lead is not None, "the capability refuses what does not merge"
    head = facts.columns // heads * facts.column_stride if heads else facts.stride[-2]
    return lead[1], facts.stride[-inner], head


def tokens_of(facts: TensorFacts, heads: bool = True) -> tuple[int, int]:
    """(tokens in all, tokens a sequence)."""
    shape = facts.shape[:-2] if heads else facts.shape[:-1]
    return math.prod(shape), shape[-1]


def sequences(*names: str, inner: int = 3) -> Limit:
    """The leading dimensions of each named tensor are evenly spaced, and its tokens are few enough to be counted.
    `inner`: of its last dimensions that have strides of their own."""

    def limit(call: Call) -> Iterable[Reason]:
        for name in names:
            facts = call.tensors.get(name)
            if facts is None:
                continue
            if merged(facts, inner) is None:
                problem = f"leading strides {list(facts.stride[: len(facts.shape) - inner])} do not merge into one"
                yield Reason(name, problem, f"{name}.contiguous() would do")
            if inner and math.prod(facts.shape[: len(facts.shape) - inner + 1]) > MOST_TOKENS:
                yield Reason(name, f"more tokens than {MOST_TOKENS}", "split the batch")

    return limit
