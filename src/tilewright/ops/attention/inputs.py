"""How inputs of the attention family are made, for checks, tuning and benchmarks: M is the batch, C the keys.

Lengths, masks and what forward saves depend on other tensors, and are derived. What no query sees is NaN, and so is a
query that sees nothing with its upstream gradients: reading them shows. What only some queries see is finite, as the
contract asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewright.core.probes import Extent, Probes
from tilewright.ops.attention import masks
from tilewright.ops.attention.masks import Rules

SIZES = {"Sq": 40, "Hq": 2, "Hkv": 1, "D": 64, "Dv": 64}
FEW_ROWS, FEW_KEYS, FEW_PAIRS = 512, 2048, 1 << 24
"""Of a check: more pairs of queries and keys would be float64 scores by the gigabyte."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "align": "bottom_right"},
    {"causal": True, "align": "top_left", "scale": 0.3},
    {"causal": True, "align": "bottom_right", "window_left": 24},
    {"align": "bottom_right", "window_left": 17, "window_right": 9},
    {"align": "top_left", "window_right": 30, "scale": -0.2},
    {"prefix_rows": 7, "causal": True, "align": "bottom_right"},
    {"prefix_rows": 1, "prefix_kv": 5, "scale": 0.0},
    {"dropout_p": 0.5, "causal": True, "align": "bottom_right"},
)
VARIED: tuple[dict[str, int], ...] = (
    {"Sq": 160, "Hkv": 2},
    {"Sq": 1, "Hq": 4, "D": 128, "Dv": 128},
    {"Sq": 7, "Hq": 3, "D": 72, "Dv": 72},
    {"Sq": 200, "D": 256, "Dv": 256},
    {"D": 8, "Dv": 8},
    {"Hkv": 2, "D": 96, "Dv": 96},
)
"""Heads of every size, in groups and not; as many queries as keys, fewer, and more."""


def small(extent: Extent) -> Extent:
    """Fewer queries and keys, as far from a whole number of tiles as before, and then fewer sequences."""
    rows, keys = extent.sizes["Sq"], extent.columns
    if rows == keys:
        rows = keys = _less(keys, FEW_ROWS)
    else:
        rows, keys = _less(rows, FEW_ROWS), _less(keys, FEW_KEYS)
    each = rows * keys * extent.sizes["Hq"]
    batch = max(1, min(math.prod(extent.lead), FEW_PAIRS // max(each, 1)))
    return replace(extent, lead=(batch,), columns=keys, sizes={**extent.sizes, "Sq": rows})


def _less(n: int, most: int) -> int:
    return n if n <= most else most + n % 128


def number(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    """Any int64 will do for a seed; of offsets too, which are 64 bits."""
    return torch.randint(-(2**62), 2**62, shape, generator=generator, device=device)


def _length(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    """A large number, of which the remainder by the keys that there are is taken."""
    return torch.randint(0, 2**30, shape, generator=generator, device=device, dtype=torch.int32)


def _mask(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    """Most is visible; to the first query nothing is."""
    made = torch.rand(shape, generator=generator, device=device) < 0.8
    made[..., :1, :] = False
    return made


def statistic(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    return torch.zeros(shape, device=device)


def finite(found: dict[str, Any]) -> None:
    """Replace what is not finite: what is hidden from some queries alone must be."""
    for name in ("q", "k", "v", "do", "dlse"):
        if found.get(name) is not None:
            found[name] = torch.nan_to_num(found[name], nan=0.5, posinf=0.5, neginf=-0.5)


def poison(found: dict[str, Any], seen: Tensor) -> None:
    """NaN in place of keys and values that no query sees, and of q, do and dlse where a query sees nothing. `seen` is a
    mask of `masks.py`. A gradient that is one number everywhere is left as it is."""
    rows, keys = masks.used(seen, found["k"].shape[-2])
    lse_rows = rows.squeeze(-1).transpose(1, 2)
    for name, there in {"q": rows, "k": keys, "v": keys, "do": rows, "dlse": lse_rows}.items():
        given = found.get(name)
        if given is not None and any(given.stride()):
            found[name] = torch.where(there if given.dim() == there.dim() else there[0], given, math.nan)


def random_numbers(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """None where nothing is dropped, as in calls of users."""
    if options["dropout_p"] == 0.0:
        found.update({n: None for n in ("seed", "offset", "state") if n in found})


def derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    keys = found["k"].shape[1]
    random_numbers(found, options)
    if found.get("kv_len") is not None:  # the first has all keys, the last none
        lengths = found["kv_len"] % (keys + 1)
        lengths[:1] = keys
        lengths[2:][-1:] = 0
        found["kv_len"] = lengths
    if options["prefix_rows"] == 0 or options["prefix_kv"] >= 0:
        found["prefix_kv_len"] = None
    else:
        found["prefix_kv_len"] = found["prefix_kv_len"] % (keys + 2)
    rules, mask = Rules.of(options), found.get("mask")
    if rules.hides or mask is not None:
        finite(found)
    elif found["kv_len"] is None:
        return
    batch, rows = found["q"].shape[:2]
    if batch * rows * keys <= FEW_PAIRS:  # in a benchmark there may be more, and nothing to find
        poison(found, masks.dense(found["q"], found["k"], found["kv_len"], found["prefix_kv_len"], mask, rules))


def _forward(found: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """By the definition, which holds every score at once: of many pairs (none of which it drops), head by head."""
    from tilewright.ops.attention.dense import attention

    state, names = found["state"], ("q", "k", "v", "kv_len", "prefix_kv_len", "mask")
    q, k, v, kv_len, prefix_kv_len, mask = (found[n] for n in names)
    if q.shape[0] * q.shape[1] * k.shape[1] <= FEW_PAIRS or state is not None or mask is not None:
        seed, offset = (None, None) if state is None else (state[:1], state[1:])
        o, lse = attention.reference(q, k, v, kv_len, prefix_kv_len, mask, seed, offset, **options)
        return o, lse
    group = q.shape[2] // k.shape[2]
    rows = []
    for n in range(q.shape[0]):
        lengths = [None if t is None else t[n : n + 1] for t in (kv_len, prefix_kv_len)]
        heads = zip(q[n : n + 1].split(group, 2), k[n : n + 1].split(1, 2), v[n : n + 1].split(1, 2), strict=True)
        rows.append([attention.reference(*head, *lengths, **options) for head in heads])
    o = torch.cat([torch.cat([o for o, _ in row], 2) for row in rows])
    return o, torch.cat([torch.cat([lse for _, lse in row], 1) for row in rows])


def derive_backward(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """o and lse as forward returns them."""
    derive(found, options)
    found["o"], found["lse"] = _forward(found, {n: v for n, v in options.items() if n != "needs"})
    if found["dlse"] is not None:
        found["dlse"] = found["dlse"].to(found["lse"].dtype)


_DIMS = {
    "q": "M Sq Hq D",
    "k": "M C Hkv D",
    "v": "M C Hkv Dv",
    "kv_len": "M",
    "prefix_kv_len": "M",
    "mask": "M 1 Sq C | M Hq Sq C | 1 1 Sq C | 1 Hq Sq C",
}
_VALUES = {"kv_len": _length, "prefix_kv_len": _length, "mask": _mask}
_NEEDS = tuple({"needs": needs} for needs in ((True, False, False), (False, True, False), (False, False, True)))

FORWARD = Probes(
    dims={**_DIMS, "seed": "1", "offset": "1"},
    options=OPTIONS,
    absent=(("mask", "kv_len"), ("mask",), ("kv_len",)),
    sizes=SIZES,
    varied=VARIED,
    values={**_VALUES, "seed": number, "offset": number},
    derive=derive,
    flat=True,
    small=small,
)

BACKWARD = Probes(
    dims={"do": "M Sq Hq Dv", "dlse": "M Hq Sq", "o": "M Sq Hq Dv", "lse": "M Hq Sq", "state": "2", **_DIMS},
    options=(*OPTIONS, *_NEEDS),
    absent=(("dlse", "mask", "kv_len"), ("do", "kv_len"), ("mask",)),
    sizes=SIZES,
    varied=VARIED,
    values={**_VALUES, "state": number, "lse": statistic},
    derive=derive_backward,
    flat=True,
    small=small,
)
