"""How inputs of the family are made. Dense: M is the batch, C the keys. Jagged: M is the number of heads, C that of
tokens, and sequences are derived from both, of uneven lengths, some of them empty.

What nobody sees is NaN, so that reading it shows; what only some see is finite, as the contract asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewright.core.probes import Extent, Probes
from tilewright.ops.attention.inputs import finite, number, random_numbers, small
from tilewright.ops.attention.inputs_varlen import starts

MOST_PAIRS = 1 << 24
WITHIN = 1 << 14
MOST_LENGTH = 8192
"""The longest sequence of a probe: `max_seqlen`."""

DENSE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"scale": 0.125}, {"scale": 0.125, "post_scale": 0.01}, {"scale": 0.0}, {"scale": -0.3, "post_scale": -2.0},
)  # fmt: skip
DENSE_VARIED: tuple[dict[str, int], ...] = (
    {"Sq": 160}, {"Sq": 1, "H": 4, "D": 128, "Dv": 128}, {"Sq": 7, "H": 3, "D": 72, "Dv": 24},
    {"Sq": 64, "D": 64}, {"Sq": 200, "D": 256, "Dv": 256}, {"D": 8, "Dv": 8},
)  # fmt: skip
"""As many queries as columns of a head too: products the wrong way round then fit."""
_NEEDS = tuple({"needs": needs} for needs in ((True, False, False), (False, True, False), (False, False, True)))


def _within_float16(found: dict[str, Any], scale: float, factor: float) -> None:
    """Make v and do so small that no result comes near the largest float16: what is rounded on the way then decides
    whether it is Inf. Weights may be larger."""
    q, k = found["q"], found["k"]
    if q.dtype != torch.float16 or not q.numel() or not k.numel():
        return
    most = {n: float(torch.nan_to_num(found[n], nan=0.0, posinf=0.0, neginf=0.0).abs().max()) for n in ("q", "k")}
    pairs = abs(scale * factor) * q.shape[-1] * max(q.shape[-3], k.shape[-3])
    reach = pairs * most["q"] * most["k"]
    for name in ("v", "do"):
        if found.get(name) is not None:
            size = float(torch.nan_to_num(found[name], nan=0.0, posinf=0.0, neginf=0.0).abs().max())
            found[name] = found[name] * min(1.0, WITHIN / max(reach * size, 1.0))
            reach = max(reach, pairs * min(size, WITHIN / max(reach, 1e-30)) * max(most.values()))


def _derive_dense(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    mask = found["mask"]
    if mask is None:
        _within_float16(found, options["scale"], options["post_scale"])
        return
    finite(found)
    found["mask"] = torch.nan_to_num(mask, nan=0.5, posinf=0.5, neginf=-0.5)
    largest = float(found["mask"].abs().max()) if mask.numel() else 0.0
    _within_float16(found, options["scale"], options["post_scale"] * largest)
    mask = torch.where(found["mask"] < -0.8, 0.0, found["mask"])
    mask[..., -1:] = 0.0  # nobody sees the last key
    found["mask"] = mask
    for name in ("k", "v"):
        found[name] = found[name].clone()
        found[name][:, -1:] = math.nan


_DENSE = {"q": "M Sq H D", "k": "M C H D", "v": "M C H Dv", "mask": "M 1 Sq C | M H Sq C | 1 1 Sq C | 1 H Sq C"}
_DENSE_SIZES = {"Sq": 40, "H": 2, "D": 64, "Dv": 64}


def _small_dense(extent: Extent) -> Extent:
    found = small(replace(extent, sizes={**extent.sizes, "Hq": extent.sizes["H"]}))
    return replace(found, sizes={n: size for n, size in found.sizes.items() if n != "Hq"})


def _dense(dims: Mapping[str, str], options: tuple[dict[str, Any], ...]) -> Probes:
    return Probes(
        dims=dims, options=options, absent=(("mask",), ()), either=("mask",), sizes=_DENSE_SIZES, varied=DENSE_VARIED,
        derive=_derive_dense, flat=True, small=_small_dense,
    )  # fmt: skip


DENSE = _dense(_DENSE, DENSE_OPTIONS)
DENSE_BACKWARD = _dense({"do": "M Sq H Dv", **_DENSE}, (*DENSE_OPTIONS, *({"scale": 0.125} | n for n in _NEEDS)))

_BASE = {"max_seqlen": MOST_LENGTH, "alpha": 0.125}
JAGGED_OPTIONS: tuple[dict[str, Any], ...] = tuple(
    _BASE | more
    for more in (
        {},
        {"causal": False},
        {"contextual_len": 3},
        {"window": 17},
        {"window": 9, "full_tail": 21, "contextual_len": 5},
        {"window": 20, "contextual_len": 2, "causal": False, "alpha": -0.2},
        {"contextual_len": 200, "max_seqlen": 3 * MOST_LENGTH},
        {"dropout_p": 0.3, "alpha": 0.0},
        {"dropout_p": 0.5},
    )
)
JAGGED_VARIED: tuple[dict[str, int], ...] = (
    {"D": 128, "Dv": 128}, {"D": 72, "Dv": 24}, {"D": 256, "Dv": 256}, {"D": 8, "Dv": 8}, {"N1": 2, "N": 1},
)  # fmt: skip
_JAGGED_SIZES = {"D": 64, "Dv": 64, "N1": 6, "N": 5}


def _small_jagged(extent: Extent) -> Extent:
    heads = max(1, min(math.prod(extent.lead), 4))
    tokens = min(extent.columns, math.isqrt(MOST_PAIRS // heads))
    return replace(extent, lead=(heads,), columns=tokens)


def _zeros(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _factors(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    return torch.rand(shape, generator=generator, device=device) + 0.01


def _derive_jagged(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    random_numbers(found, options)
    tokens, kind = found["q"].shape[0], found["seq_offsets"].dtype
    ends = starts(tokens, found["seq_offsets"].shape[0] - 1, found["q"].device, 0)
    steps = ends.diff().clamp(max=MOST_LENGTH)
    ends = torch.cat([ends[:1], steps.cumsum(0)])
    found["seq_offsets"] = ends.to(kind)
    if found["num_targets"] is not None:  # a few, all, none
        few = torch.arange(steps.numel(), device=steps.device) * 3 + 2
        found["num_targets"] = torch.minimum(torch.where(few % 4 == 0, steps, few), steps).to(
            found["num_targets"].dtype
        )
    finite(found)
    _within_float16(found, options["alpha"], 1.0 if found["attn_scale"] is not None else 1.0 / options["max_seqlen"])
    behind = torch.arange(tokens, device=ends.device) >= ends[-1]
    for name in ("q", "k", "v", "do"):
        if found.get(name) is not None:
            found[name] = torch.where(behind[:, None, None], math.nan, found[name])


_JAGGED = {
    "q": "C M D", "k": "C M D", "v": "C M Dv", "seq_offsets": "N1", "num_targets": "N", "attn_scale": "C | 1",
}  # fmt: skip
_JAGGED_VALUES = {"seq_offsets": _zeros, "num_targets": _zeros, "attn_scale": _factors}


def _jagged(
    dims: Mapping[str, str], options: tuple[dict[str, Any], ...], numbers: tuple[str, ...],
    absent: tuple[tuple[str, ...], ...], tables: tuple[str, ...],
) -> Probes:  # fmt: skip
    return Probes(
        dims=dims, options=options, absent=absent, sizes=_JAGGED_SIZES, varied=JAGGED_VARIED,
        values={**_JAGGED_VALUES, **dict.fromkeys(numbers, number)},
        dtypes={"seq_offsets": (torch.int64,), "num_targets": (torch.int64,)},
        tables=tables, derive=_derive_jagged, flat=True, small=_small_jagged,
    )  # fmt: skip


JAGGED = _jagged(
    {**_JAGGED, "seed": "1", "offset": "1"}, JAGGED_OPTIONS, ("seed", "offset"),
    (("num_targets", "attn_scale"), (), ("attn_scale", "offset")), ("q", "k", "v"),
)  # fmt: skip
JAGGED_BACKWARD = _jagged(
    {"do": "C M Dv", **_JAGGED, "state": "2"}, (*JAGGED_OPTIONS, *(_BASE | n for n in _NEEDS)), ("state",),
    (("num_targets", "attn_scale"), (), ("attn_scale",)), ("do", "q", "k", "v"),
)  # fmt: skip
