"""Which keys a token sees under the mask of HSTU: the one definition, and the same as an interval of keys a row.

The definition calls `visible`, which is the recipe of generative-recommenders; kernels walk what `spans` says. Both are
compared over every combination of options by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.attention.masks import owners


class Rules(NamedTuple):
    """The options that hide keys; 0 is none."""

    causal: bool
    contextual_len: int
    window: int
    full_tail: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Rules:
        return cls(*(options[name] for name in cls._fields))

    @property
    def shared(self) -> int:
        """How many tokens at the start share the position of the next one."""
        return max(self.contextual_len - 1, 0)


def visible(i: Tensor, j: Tensor, length: Tensor, targets: Tensor | None, rules: Rules) -> Tensor:
    """Whether token `i` sees token `j` of a sequence of `length` tokens, the last `targets` of which are targets. All
    broadcast.

    The contextual tokens share position 0 and the targets the position after the last one of the history, so that they
    do not see each other; everyone sees itself.
    """
    last = length - rules.shared - (0 if targets is None else targets)
    u, w = _position(i, last, targets, rules), _position(j, last, targets, rules)
    far = u - w
    if not rules.causal:
        far = far.abs()
    seen = (i == j) | (far > 0)
    if rules.window > 0:
        near = far <= rules.window
        if rules.full_tail > 0:
            near = near | (u >= last - rules.full_tail)
        seen = seen & near
    if rules.contextual_len > 0:
        seen = seen | ((u == 0) & (w < last))
    return seen


def _position(i: Tensor, last: Tensor, targets: Tensor | None, rules: Rules) -> Tensor:
    u = (i - rules.shared).clamp(min=0) if rules.contextual_len > 0 else i
    return u if targets is None else torch.minimum(u, last)


def spans(i: Tensor, length: Tensor, targets: Tensor | None, rules: Rules) -> tuple[Tensor, Tensor]:
    """[low, high) of the keys that token `i` sees beside itself, which it always sees."""
    behind = length - (0 if targets is None else targets)  # where the history ends
    last = behind - rules.shared
    u = torch.minimum((i - rules.shared).clamp(min=0), last)
    w, target = rules.window, (u == last) & (i >= behind)
    wide = torch.full_like(u, w <= 0, dtype=torch.bool)
    if w > 0 and rules.full_tail > 0:
        wide = u >= last - rules.full_tail
    low = torch.where(wide | (u <= w), 0, u - w + rules.shared)
    if rules.causal:
        high = torch.where(target, behind, torch.where(u > 0, i + 1, 0))
    else:
        high = torch.where(wide | (u + w >= last), length, u + w + 1 + rules.shared)
        high = torch.where(target, torch.minimum(high, behind), high)
    if rules.contextual_len > 0:
        high = torch.where(u == 0, torch.maximum(high, behind), high)
    return low, torch.where(last > 0, torch.minimum(high, length), 0)


def packed(tokens: int, offsets: Tensor, num_targets: Tensor | None, rules: Rules) -> tuple[Tensor, Tensor]:
    """([1, 1, T, T], and the place of each token in its sequence [T]). Tokens behind the last sequence see nothing."""
    count = offsets.shape[0] - 1
    owner, place, length = owners(offsets, tokens)
    targets = None
    if num_targets is not None:
        targets = torch.cat([num_targets.long(), num_targets.new_zeros(1, dtype=torch.int64)])[owner][:, None]
    seen = visible(place[:, None], place[None, :], length[:, None], targets, rules)
    seen = seen & (owner[:, None] == owner[None, :]) & (owner[:, None] < count)
    return seen[None, None], place
