"""Which keys a query sees: the one definition of every mask rule of the family, dense and varlen.

The definitions call `visible`; kernels say the same in their own language, and are compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNS = ("top_left", "bottom_right")
FAR = 1 << 30
"""An unbounded side of a window, and a prefix that hides nothing. Sequences are shorter."""


class Rules(NamedTuple):
    """The options that hide keys. A window side of -1 is unbounded, `prefix_kv` -1 says that a tensor tells."""

    causal: bool
    align: str | None
    window_left: int
    window_right: int
    prefix_rows: int
    prefix_kv: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Rules:
        return cls(*(options[name] for name in cls._fields))

    @property
    def diagonal(self) -> bool:
        """Whether it matters which key stands opposite to a query."""
        return self.causal or self.window_left >= 0 or self.window_right >= 0

    @property
    def hides(self) -> bool:
        """Whether a query may be denied a key that another sees."""
        return self.diagonal or self.prefix_rows > 0


def visible(
    i: Tensor, j: Tensor, rows: Tensor | int, keys: Tensor | int, prefix: Tensor | int | None, rules: Rules
) -> Tensor:
    """Whether query `i` sees key `j`, both counted in their sequence of `rows` queries and `keys` keys. All broadcast.

    The position of query i among the keys is i (align "top_left", as in torch) or i + keys - rows ("bottom_right",
    as in FlashAttention: the last query stands at the last key). Every condition that is given holds.
    """
    seen = (j < keys) & (i >= 0)
    left, right = (min(side, FAR) for side in (rules.window_left, rules.window_right))
    place = i + (keys - rows) if rules.align == "bottom_right" else i
    if rules.causal:
        seen = seen & (j <= place)
    if left >= 0:
        seen = seen & (j >= place - left)
    if right >= 0:
        seen = seen & (j <= place + right)
    if rules.prefix_rows > 0:
        limit = rules.prefix_kv if prefix is None else prefix
        seen = seen & ((i >= rules.prefix_rows) | (j < limit))
    return seen


def lengths(kv_len: Tensor | None, keys: int) -> Tensor | int:
    """Key lengths [B, 1, 1, 1], clamped to what there is; or the one that all have."""
    return keys if kv_len is None else kv_len.long().clamp(0, keys)[:, None, None, None]


def dense(
    q: Tensor, k: Tensor, kv_len: Tensor | None, prefix_kv_len: Tensor | None, mask: Tensor | None, rules: Rules
) -> Tensor:
    """[B or 1, Hq or 1, Sq, Sk]."""
    rows, keys = q.shape[1], k.shape[1]
    i = torch.arange(rows, device=q.device)[None, None, :, None]
    j = torch.arange(keys, device=q.device)[None, None, None, :]
    prefix = None if prefix_kv_len is None or rules.prefix_kv >= 0 else prefix_kv_len.long()[:, None, None, None]
    seen = visible(i, j, rows, lengths(kv_len, keys), prefix, rules)
    return seen if mask is None else seen & mask


def used(seen: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Which queries see a key, and which keys of `groups` heads some query sees: [B or 1, S, H or 1, 1] each."""
    rows, keys = seen.any(3), seen.any(2)
    if keys.shape[1] > 1:
        keys = keys.unflatten(1, (groups, -1)).any(2)
    return rows.transpose(1, 2).unsqueeze(-1), keys.transpose(1, 2).unsqueeze(-1)


def owners(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each packed token: its sequence, its place in it, the sequence's length. Tokens behind the last sequence have
    one of their own, numbered after it."""
    starts = cu_seqlens.long()
    token = torch.arange(tokens, device=cu_seqlens.device)
    owner = torch.searchsorted(starts, token, right=True) - 1
    ends = torch.cat([starts[1:], torch.full_like(starts[:1], tokens)])
    return owner, token - starts[owner], (ends - starts)[owner]


def packed(
    tokens_q: int, tokens_k: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """([1, 1, Tq, Tk], and the place of each key in its sequence [Tk]): sequences do not see each other."""
    last = cu_seqlens_q.shape[0] - 1
    owner_q, i, rows = owners(cu_seqlens_q, tokens_q)
    owner_k, j, _ = owners(cu_seqlens_k, tokens_k)
    starts = cu_seqlens_k.long()
    lengths_k = torch.cat([starts.diff(), torch.zeros_like(starts[:1])])  # behind the last sequence there are no keys
    keys = lengths_k[owner_q][:, None]
    seen = visible(i[:, None], j[None, :], rows[:, None], keys, None, rules)
    seen = seen & (owner_q[:, None] == owner_k[None, :]) & (owner_q[:, None] < last)
    return seen[None, None], j
