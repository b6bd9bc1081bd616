"""Philox4x32-10 in plain torch, and the mask of dropout that every backend makes from it.

Counter-based random numbers (Salmon, Moraes, Dror and Shaw, 2011): a word depends on key and counter alone, so a mask
is the same in every backend, and independent of tiles and strides. Integer arithmetic only; nothing overflows int64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2^32."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _LOW


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words below 2^32, as int64, from a counter of four and a key of two."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_words(rows: int, columns: int, seed: Tensor, offset: Tensor) -> Tensor:
    """[rows, columns] words: that of (row, column) is word column % 4 of the counter whose low 64 bits are offset +
    column // 4 and whose high 64 bits are the row, under the key `seed`."""
    groups = -(-columns // 4)
    low = (offset + torch.arange(groups, device=seed.device)).unsqueeze(0)
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    counter = (low & _LOW, (low >> 32) & _LOW, row & _LOW, row >> 32)
    words = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    return torch.stack(torch.broadcast_tensors(*words), -1).reshape(rows, 4 * groups)[:, :columns]


def threshold(p: float) -> int:
    """An element is kept where its word's upper 24 bits reach this: (word >> 8) * 2^-24 >= p, with p as a float32."""
    single = float(torch.tensor(p, dtype=torch.float32))
    return math.ceil(single * 2.0**24)


def limit(p: float) -> int:
    """The same of the whole word: an element is kept where its word is above this. p is not 0."""
    return (threshold(p) << 8) - 1


def scale(p: float) -> float:
    """What is kept is multiplied by 1 / (1 - p); of p = 1 nothing is."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0
