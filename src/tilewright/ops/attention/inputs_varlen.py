"""How inputs of varlen attention are made: M is the number of query tokens, C that of key tokens.

Sequences are derived from both: of uneven lengths, some of them empty; in checks a few tokens are left behind the
last one. Without a mask inside of them, one that is NaN reaches no other: what is not finite stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewright.core.probes import Extent, Probes
from tilewright.ops.attention import inputs, masks
from tilewright.ops.attention.masks import Rules

SIZES = {"Hq": 2, "Hkv": 1, "D": 64, "Dv": 64, "N1": 6}
MOST_TOKENS = 2048
"""Of a check, whose definition looks at every pair of tokens."""
MOST_PAIRS = 1 << 28
"""Of tokens, for the definition to look at all at once."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "align": "top_left"},
    {"causal": True, "align": "bottom_right"},
    {"align": "bottom_right", "window_left": 17, "window_right": 9},
    {"prefix_rows": 3, "prefix_kv": 5, "causal": True, "align": "bottom_right", "scale": 0.3},
    {"dropout_p": 0.3},
)
VARIED: tuple[dict[str, int], ...] = ({"Hkv": 2}, {"Hq": 3, "D": 72, "Dv": 72}, {"D": 128, "Dv": 128})


def small(extent: Extent) -> Extent:
    rows = min(math.prod(extent.lead), MOST_TOKENS)
    return replace(extent, lead=(rows,), columns=min(extent.columns, MOST_TOKENS))


def starts(tokens: int, count: int, device: torch.device, turn: int) -> Tensor:
    """[count + 1] starts: lengths as 3, 0, 1, 4, 2 (from the `turn`-th on). Of as many tokens as checks have, one in 16
    is left behind."""
    share = torch.tensor([(3, 0, 1, 4, 2)[(i + turn) % 5] for i in range(count)], dtype=torch.int64)
    total = int(share.sum()) or 1
    used = tokens - (tokens // 16 if tokens <= MOST_TOKENS else 0)
    ends = (share.cumsum(0) * used).div(total, rounding_mode="floor")
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device)


def _starts(shape: tuple[int, ...], generator: torch.Generator, device: Any, sizes: Mapping[str, int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def derive(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    inputs.random_numbers(found, options)
    q, k = found["q"], found["k"]
    for name, main, turn in (("cu_seqlens_q", q, 0), ("cu_seqlens_k", k, 4 if len(q) != len(k) else 0)):
        kind = found[name].dtype
        found[name] = starts(main.shape[0], found[name].shape[0] - 1, main.device, turn).to(kind)
    rules = Rules.of(options)
    if rules.hides:
        inputs.finite(found)
    if len(q) * len(k) <= inputs.FEW_PAIRS:
        inputs.poison(found, masks.packed(len(q), len(k), found["cu_seqlens_q"], found["cu_seqlens_k"], rules)[0])


def derive_backward(found: dict[str, Any], options: Mapping[str, Any]) -> None:
    """o and lse as forward returns them."""
    from tilewright.ops.attention.varlen import varlen_attention

    derive(found, options)
    state = found["state"]
    seed, offset = (None, None) if state is None else (state[:1], state[1:])
    asked = {n: v for n, v in options.items() if n != "needs"}
    given = [found[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    if state is None and len(found["q"]) * len(found["k"]) > MOST_PAIRS:
        found["o"], found["lse"] = _one_by_one(given, asked)
    else:
        found["o"], found["lse"] = varlen_attention.reference(*given, seed, offset, **asked)
    if found["dlse"] is not None:
        found["dlse"] = found["dlse"].to(found["lse"].dtype)


_DIMS = {"q": "M Hq D", "k": "C Hkv D", "v": "C Hkv Dv", "cu_seqlens_q": "N1", "cu_seqlens_k": "N1"}
_VALUES = {"cu_seqlens_q": _starts, "cu_seqlens_k": _starts}
_DTYPES = dict.fromkeys(_VALUES, (torch.int64,))


def _one_by_one(given: list[Tensor], asked: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """o and lse of the sequences, each by itself: the definition keeps every pair of tokens that it is given."""
    from tilewright.ops.attention.varlen import varlen_attention

    q, k, v, cu_q, cu_k = given
    o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = torch.full((q.shape[1], len(q)), float("-inf"), device=q.device)
    edges = [list(itertools.pairwise(cu.tolist())) for cu in (cu_q, cu_k)]
    for (q0, q1), (k0, k1) in zip(*edges, strict=True):
        if q1 > q0:
            alone = [torch.tensor([0, n], device=q.device, dtype=cu_q.dtype) for n in (q1 - q0, k1 - k0)]
            found = varlen_attention.reference(q[q0:q1], k[k0:k1], v[k0:k1], *alone, **asked)
            o[q0:q1], lse[:, q0:q1] = found
    return o, lse


FORWARD = Probes(
    dims={**_DIMS, "seed": "1", "offset": "1"},
    options=OPTIONS,
    absent=((), ("offset",)),
    sizes=SIZES,
    values={**_VALUES, "seed": inputs.number, "offset": inputs.number},
    dtypes=_DTYPES,
    tables=("k", "v"),
    varied=VARIED,
    derive=derive,
    flat=True,
    small=small,
)

BACKWARD = Probes(
    dims={"lse": "Hq M", "dlse": "Hq M", "do": "M Hq Dv", "o": "M Hq Dv", "state": "2", **_DIMS},
    options=(*OPTIONS, *({"needs": needs} for needs in ((True, False, False), (False, True, True)))),
    absent=(("dlse",), (), ("do",)),
    sizes=SIZES,
    values={**_VALUES, "state": inputs.number, "lse": inputs.statistic},
    dtypes=_DTYPES,
    tables=("k", "v"),
    varied=VARIED,
    derive=derive_backward,
    flat=True,
    small=small,
)
