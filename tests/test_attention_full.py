"""The hand-written kernel of attention by value: every config, over widths that fill panels and widths that do not,
heads that share keys and heads that do not, lengths, strided views, scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import made
from tilewright.core import registry
from tilewright.core.call import TensorFacts
from tilewright.core.device import target_device
from tilewright.ops.attention.cuda_configs import PANEL, ROOM, full_configs, pack_of, shared_of
from tilewright.verify.check import call_of, check, truth_of

OP = registry.op("attention")
(KERNEL,) = [k for k in registry.kernels_of("attention") if k.backend == "cuda"]
WIDTHS = [(64, 64), (72, 72), (80, 64), (64, 72), (96, 128), (40, 24), (120, 88), (128, 128), (192, 160), (256, 256)]
"""Of a head of queries and keys, and of values."""
SIZES = [(300, 256), (70, 130), (129, 64), (3, 100), (1, 1), (400, 650)]


@pytest.fixture
def hopper(device: str) -> None:
    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


def right(given: dict[str, Tensor], options: dict[str, Any] | None = None) -> None:
    inputs, chosen = dict.fromkeys(OP.tensors) | given, {**OP.usual, **(options or {})}
    call = call_of(OP, inputs, chosen, False)
    assert not KERNEL.capability.reasons(call)
    truth = truth_of(OP, inputs, chosen, False)
    configs = KERNEL.configs_for(call)
    assert configs
    for config in configs:
        outcome = check(KERNEL, config, OP, inputs, chosen, truth, saving=False, emulated=False)
        assert not outcome.problems, (config, outcome.problems)


def inputs(
    queries: int, keys: int, widths: tuple[int, int], heads: int = 4, groups: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:  # fmt: skip
    """Of a batch of two."""
    width, v_width = widths
    tensors = made(2, queries, keys, heads=heads, groups=groups, width=width, v_width=v_width)
    return dict(zip("qkv", (t.cuda().to(dtype) for t in tensors), strict=True))


def behind(given: dict[str, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """With lengths; what lies behind them is NaN."""
    for n, length in enumerate(lengths):
        given["k"][n, length:], given["v"][n, length:] = math.nan, math.nan
    return given | {"kv_len": torch.tensor(lengths, dtype=torch.int32, device="cuda")}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_width_and_size(hopper: None, widths: tuple[int, int], sizes: tuple[int, int]) -> None:
    right(inputs(*sizes, widths))
    keys = sizes[1]
    right(behind(inputs(*sizes, widths), [keys - keys // 3, 0]))
    right(behind(inputs(*sizes, widths), [1, keys]))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 1), (3, 1), (16, 16), (64, 1), (12, 4)], ids=str)
@pytest.mark.parametrize("widths", [(72, 72), (256, 256)], ids=str)
def test_heads_that_share_keys(hopper: None, widths: tuple[int, int], heads: tuple[int, int]) -> None:
    for sizes in ((130, 200), (33, 700)):
        right(inputs(*sizes, widths, *heads, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e4])
@pytest.mark.parametrize("widths", [(72, 72), (128, 128)], ids=str)
def test_scales(hopper: None, widths: tuple[int, int], scale: float) -> None:
    for sizes in ((130, 200), (100, 700)):
        right(inputs(*sizes, widths), {"scale": scale})


@pytest.mark.gpu
@pytest.mark.parametrize("width", [72, 128])
def test_views(hopper: None, width: int) -> None:
    """Of a fused projection, with NaN beside it, and of heads before rows."""
    fused = torch.full((2, 300, 12 * width + 8), math.nan, dtype=torch.bfloat16, device="cuda")
    fused[..., : 12 * width].normal_()
    q, k, v = fused[..., : 12 * width].unflatten(-1, (12, width)).split((8, 2, 2), 2)
    right({"q": q, "k": k, "v": v})
    q, k, v = (
        torch.randn(2, 4, n, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for n in (300, 200, 200)
    )
    right({"q": q, "k": k, "v": v})


def _call(
    rows: int, keys: int, heads: tuple[int, int], widths: tuple[int, int], k_stride: tuple[int, ...] | None = None,
    lengths: torch.dtype | None = None, **options: Any,
) -> Any:  # fmt: skip
    (width, v_width), (count, groups) = widths, heads
    shapes = {"q": (2, rows, count, width), "k": (2, keys, groups, width), "v": (2, keys, groups, v_width)}
    facts = {n: TensorFacts.dense(n, s, torch.bfloat16) for n, s in shapes.items()}
    if k_stride:
        facts["k"] = TensorFacts("k", shapes["k"], k_stride, torch.bfloat16)
    if lengths:
        facts["kv_len"] = TensorFacts.dense("kv_len", (2,), lengths)
    given = {n: facts.get(n) for n in OP.tensors}
    return OP.call(given, {**OP.usual, **options}, target_device("sm_90"), saving=False, deterministic=False)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_configs_fit(widths: tuple[int, int]) -> None:
    """Shared memory, slots for every tile where all come at once, whole queries in each half of a block."""
    for keys in (1, 64, 100, 256, 257, 5000):
        for heads in ((4, 4), (8, 1), (6, 2), (128, 1)):
            call = _call(500, keys, heads, widths)
            assert PANEL % pack_of(call) == 0
            found = full_configs(call)
            assert found and len(set(found)) == len(found)
            for config in found:
                assert shared_of(call, config) <= ROOM
                if config.at_once:
                    assert config.slots // 2 * config.n * config.parts >= keys


def test_a_part_without_keys_has_nothing_under_way() -> None:
    """Columns that threads bring are waited for with the keys; a part that has none would end before they are there."""
    for width in (72, 80):
        found = KERNEL.configs_for(_call(64, 200, (2, 2), (width, width)))
        assert found and all(config.parts == 1 for config in found if config.at_once)
    assert any(c.at_once and c.parts == 2 for c in KERNEL.configs_for(_call(64, 200, (2, 2), (64, 64))))


def test_what_it_leaves_to_others() -> None:
    def reasons(call: Any) -> set[str]:
        return {reason.argument for reason in KERNEL.capability.reasons(call)}

    sizes = (300, 256, (4, 2), (64, 64))
    assert not reasons(_call(*sizes))
    assert reasons(_call(*sizes, causal=True, align="top_left")) == {"causal"}
    assert reasons(_call(*sizes, window_left=3, align="top_left")) == {"window"}
    assert reasons(_call(*sizes, prefix_rows=3, prefix_kv=9)) == {"prefix_rows"}
    assert reasons(_call(300, 0, (4, 2), (64, 64))) == {"k"}
    assert reasons(_call(*sizes, k_stride=(0, 128, 64, 1))) == {"k"}
    assert reasons(_call(300, 256, (4, 2), (68, 64))) == {"q", "k"}
    assert not reasons(_call(*sizes, lengths=torch.int32))
    assert reasons(_call(*sizes, lengths=torch.int64)) == {"kv_len"}
