"""The kernels of attention for Hopper by value, under every mask that they take, over several tiles of queries.

The conformance suite's smallest cases are of one tile; what is walked, skipped and shared between warps is seen here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attention_calls import made
from tilewright.core import registry
from tilewright.core.launch import Config
from tilewright.verify.check import call_of, check, truth_of

pytestmark = pytest.mark.gpu

WIDE = [Config(m=m, n=128, parts=1, stages=2, registers=r) for m, r in ((192, 160), (128, 240))]
HOPPER = {
    64: WIDE,
    72: WIDE[1:],
    128: WIDE[1:],
    256: [Config(m=128, n=64, parts=parts, stages=2, registers=240) for parts in (1, 2)],
}
"""By the width of a head."""
SHORT = [Config(m=64), Config(m=128)]
FEW: dict[str, dict[str, Any]] = {
    "full": {},
    "top": {"causal": True, "align": "top_left"},
    "bottom": {"causal": True, "align": "bottom_right"},
    "negative": {"causal": True, "align": "bottom_right", "scale": -0.3},
}
MASKS = FEW | {
    "window": {"align": "bottom_right", "window_left": 70, "window_right": 9},
    "prefix": {"causal": True, "align": "top_left", "prefix_rows": 40, "prefix_kv": 150},
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


def right(label: str, name: str, config: Config, given: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    op = registry.op(name)
    (kernel,) = [k for k in registry.kernels_of(name) if k.label == label]
    inputs, chosen = dict.fromkeys(op.tensors) | given, {**op.usual, **options}
    assert not kernel.capability.reasons(call_of(op, inputs, chosen, False))
    truth = truth_of(op, inputs, chosen, False)
    outcome = check(kernel, config, op, inputs, chosen, truth, saving=False, emulated=False)
    assert not outcome.problems, (config, outcome.problems)


def inputs(queries: int, keys: int, width: int, lengths: bool) -> dict[str, torch.Tensor]:
    """Of a batch of two; with lengths, what lies behind them is NaN."""
    q, k, v = (t.cuda().bfloat16() for t in made(2, queries, keys, heads=4, groups=2, width=width))
    if not lengths:
        return {"q": q, "k": k, "v": v}
    there = [keys - keys // 3, 1]
    for n, length in enumerate(there):
        k[n, length:], v[n, length:] = math.nan, math.nan
    return {"q": q, "k": k, "v": v, "kv_len": torch.tensor(there, dtype=torch.int32, device="cuda")}


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", HOPPER)
def test_warps_that_specialise(width: int, mask: str, lengths: bool) -> None:
    for config in HOPPER[width]:
        for sizes in ((400, 650), (650, 400)):
            right("hopper", "attention", config, inputs(*sizes, width, lengths), MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", [64, 128])
def test_packed_sequences(width: int, mask: str) -> None:
    """One without queries, one without keys, and tokens behind the last."""
    q, k, v = (t[0].cuda().bfloat16() for t in made(1, 1500, 1200, heads=4, groups=2, width=width))
    starts = {
        "cu_seqlens_q": torch.tensor([0, 500, 500, 900, 1450], dtype=torch.int32, device="cuda"),
        "cu_seqlens_k": torch.tensor([0, 300, 520, 520, 1190], dtype=torch.int32, device="cuda"),
    }
    for config in HOPPER[width]:
        right("hopper", "varlen_attention", config, {"q": q, "k": k, "v": v, **starts}, MASKS[mask])


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize("width", [16, 64, 72, 80, 128])
def test_few_keys(width: int, mask: str, lengths: bool) -> None:
    for config in SHORT:
        for sizes in ((300, 256), (70, 130), (256, 64), (3, 100), (1, 1)):
            right("short", "attention", config, inputs(*sizes, width, lengths), FEW[mask])
