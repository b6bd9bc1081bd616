"""What no query sees may hold anything, and so may a query that sees nothing: NaN and Inf there reach no result.

By the definition that holds for each pair: a query is untouched by a key that is hidden from it, and a key's gradient
by a query that does not see it. Kernels are asked for positions that are hidden from all, and for sequences, elements
of the batch and heads that have nothing to do with each other.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import planted_attention
import tilewright as tw
from attention_calls import CASES, STATE, each_backend, lengths, made, run, seen_by_loops
from tilewright.core import registry
from tilewright.core.call import TensorFacts
from tilewright.core.device import device_of, target_device
from tilewright.ops.attention import softmax
from tilewright.verify.numerics import same_bits
from tilewright.verify.suite import verify_kernel

EXACT = {"rtol": 1e-12, "atol": 1e-13}
NOTHING = (math.nan, math.inf, -math.inf)
SIZES = [(7, 7), (4, 9), (9, 4)]
DROPPED = {"dropout_p": 0.4, "seed": STATE[0], "offset": STATE[1]}


def gradients(
    tensors: list[Tensor], upstream: tuple[Tensor, Tensor], **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """((o, lse), (dq, dk, dv)) by the reference."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    found = run(*leaves, backend="reference", **options)
    return tuple(t.detach() for t in found), torch.autograd.grad(found, leaves, upstream)  # type: ignore[return-value]


def upstream_of(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """do and dlse."""
    generator = torch.Generator().manual_seed(11)
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    shapes = ((*q.shape[:-1], v.shape[-1]), rows)
    return tuple(torch.randn(s, generator=generator, dtype=q.dtype) for s in shapes)  # type: ignore[return-value]


def by_rows(seen: Tensor) -> Tensor:
    """[B, Hq, Sq] as tensors of queries lie: [B, Sq, Hq]."""
    return seen.transpose(1, 2)


def by_keys(seen: Tensor, groups: int) -> Tensor:
    """[B, Hq, Sk] as tensors of keys lie, where a head of the group does: [B, Sk, Hkv]."""
    batch, heads, keys = seen.shape
    return seen.reshape(batch, groups, heads // groups, keys).any(2).transpose(1, 2)


# The definition, pair by pair -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", [*CASES, {"causal": True, "align": "bottom_right", **DROPPED}], ids=str)
def test_a_key_reaches_the_queries_that_see_it_alone(case: dict[str, Any], sizes: tuple[int, int]) -> None:
    options = lengths(case, *sizes)
    q, k, v = made(2, *sizes, heads=4, groups=2, dtype=torch.float64)
    upstream = upstream_of(q, v)
    clean, grads = gradients([q, k, v], upstream, **options)
    seen = seen_by_loops(2, 4, *sizes, options)
    for key, nothing in ((0, NOTHING[0]), (sizes[1] // 2, NOTHING[1]), (sizes[1] - 1, NOTHING[2])):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, key], bad_v[:, key] = math.nan, nothing
        found, dirty = gradients([q, bad_k, bad_v], upstream, **options)
        hit = seen[..., key]  # [B, Hq, Sq]
        torch.testing.assert_close(found[0][by_rows(~hit)], clean[0][by_rows(~hit)], **EXACT)
        torch.testing.assert_close(found[1][~hit], clean[1][~hit], **EXACT)
        assert found[0][by_rows(hit)].isnan().all() and found[1][hit].isnan().all()
        torch.testing.assert_close(dirty[0][by_rows(~hit)], grads[0][by_rows(~hit)], **EXACT)
        far = ~by_keys((seen & hit[..., None]).any(2), 2)  # keys that no such query sees
        for mine, theirs in zip(dirty[1:], grads[1:], strict=True):
            torch.testing.assert_close(mine[far], theirs[far], **EXACT)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_value_that_is_not_finite_comes_out_as_what_it_is(case: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Inf as Inf where a query sees it, in its column, though NaN is hidden from that query in the same one."""
    options = lengths(case, *sizes)
    q, k, v = made(2, *sizes, heads=4, groups=2, dtype=torch.float64)
    clean = run(q, k, v, backend="reference", **options)[0]
    seen = seen_by_loops(2, 4, *sizes, options)
    inf, nan, column = 0, sizes[1] - 1, 3
    v[:, inf, :, column], v[:, nan, :, column] = -math.inf, math.nan
    o = run(q, k, v, backend="reference", **options)[0]
    expected = clean.clone()
    expected[..., column] = torch.where(by_rows(seen[..., inf]), -math.inf, expected[..., column])
    expected[..., column] = torch.where(by_rows(seen[..., nan]), math.nan, expected[..., column])
    torch.testing.assert_close(o, expected, equal_nan=True, **EXACT)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_query_reaches_the_keys_that_it_sees_alone(case: dict[str, Any], sizes: tuple[int, int]) -> None:
    options = lengths(case, *sizes)
    q, k, v = made(2, *sizes, heads=4, groups=2, dtype=torch.float64)
    upstream = upstream_of(q, v)
    _, grads = gradients([q, k, v], upstream, **options)
    seen = seen_by_loops(2, 4, *sizes, options)
    for row in (0, sizes[0] // 2, sizes[0] - 1):
        bad, (do, dlse) = q.clone(), (t.clone() for t in upstream)
        bad[:, row], do[:, row], dlse[..., row] = math.nan, math.inf, math.nan
        _, dirty = gradients([bad, k, v], (do, dlse), **options)
        others = torch.arange(sizes[0]) != row
        torch.testing.assert_close(dirty[0][:, others], grads[0][:, others], **EXACT)
        hit = by_keys(seen[:, :, row], 2)
        for mine, theirs in zip(dirty[1:], grads[1:], strict=True):
            torch.testing.assert_close(mine[~hit], theirs[~hit], **EXACT)
            assert mine[hit].isnan().all()
        blind = by_rows(~seen.any(-1))[:, row]
        assert not dirty[0][:, row][blind].any()


def test_a_weight_that_is_dropped_is_of_a_key_that_is_seen() -> None:
    q, k, v = made(1, 3, 8)
    v[:, 2] = math.nan
    for p in (0.5, 1.0):
        assert run(q, k, v, dropout_p=p, seed=STATE[0], backend="reference")[0].isnan().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition_has_the_same_bits_where_it_may_not_look(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a CUDA graph is captured it cannot wait to hear whether everything is finite."""
    options = lengths(case, 7, 9) | {"align": "bottom_right"}
    tensors = made(2, 7, 9, heads=4, groups=2)
    upstream = upstream_of(tensors[0], tensors[2])
    looked = gradients(tensors, upstream, **options)
    monkeypatch.setattr(softmax, "_finite", lambda x: False)
    for found, known in zip(gradients(tensors, upstream, **options), looked, strict=True):
        assert all(same_bits(a, b) for a, b in zip(found, known, strict=True))


# Positions hidden from all, whichever kernel --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [*SIZES, (5, 70), (70, 5)], ids=str)
@pytest.mark.parametrize("case", [*CASES, {"causal": True, "align": "top_left", **DROPPED}], ids=str)
@each_backend
def test_what_nobody_sees_may_hold_anything(
    case: dict[str, Any], sizes: tuple[int, int], backend: str, device: str
) -> None:
    options = lengths(case, *sizes)
    tensors = [t.to(device) for t in made(2, *sizes, heads=4, groups=2)]
    clean = run(*tensors, backend=backend, **options)
    seen = seen_by_loops(2, 4, *sizes, options).to(device)
    some, used = by_rows(seen.any(-1)), by_keys(seen.any(-2), 2)
    for nothing in NOTHING:
        q, k, v = (
            torch.where(there[..., None].contiguous(), t, nothing)
            for t, there in zip(tensors, (some, used, used), strict=True)
        )
        torch.testing.assert_close(run(q, k, v, backend=backend, **options), clean, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=str)
@each_backend
def test_sequences_of_a_pack_do_not_reach_each_other(options: dict[str, Any], backend: str, device: str) -> None:
    """One of them is NaN and Inf, and so are the tokens behind the last."""
    starts = torch.tensor([0, 3, 20, 20, 41], dtype=torch.int32, device=device)
    ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, **options}
    tensors = [t[0].to(device) for t in made(1, 44, 44, heads=4, groups=2)]
    clean = run(*tensors, backend=backend, **ends)
    for first, last in ((0, 3), (3, 20), (20, 41)):
        for which in range(3):
            bad = [t.clone() for t in tensors]
            bad[which][first:last] = math.nan if which < 2 else math.inf
            for t in bad:
                t[41:] = math.nan
            o, lse = run(*bad, backend=backend, **ends)
            others = torch.ones(44, dtype=torch.bool, device=device)
            others[first:last] = False
            torch.testing.assert_close((o[others], lse[:, others]), (clean[0][others], clean[1][:, others]), **EXACT)
            assert not o[first:last].isfinite().any()


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}], ids=str)
def test_gradients_of_sequences_of_a_pack_do_not_reach_each_other(options: dict[str, Any]) -> None:
    starts = torch.tensor([0, 3, 8, 8, 13], dtype=torch.int32)
    ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, **options}
    tensors = [t[0] for t in made(1, 16, 16, heads=4, groups=2, dtype=torch.float64)]
    upstream = upstream_of(tensors[0], tensors[2])
    _, grads = gradients(tensors, upstream, **ends)
    others = torch.ones(16, dtype=torch.bool)
    others[3:8] = False
    for which in range(5):
        bad = [t.clone() for t in (*tensors, *upstream)]
        for t in bad:
            (t.T if t is bad[4] else t)[13:] = math.nan
        (bad[4].T if which == 4 else bad[which])[3:8] = math.nan
        _, dirty = gradients(bad[:3], (bad[3], bad[4]), **ends)
        for mine, theirs in zip(dirty, grads, strict=True):
            torch.testing.assert_close(mine[others], theirs[others], **EXACT)
            assert not mine[13:].any()


@pytest.mark.parametrize(("op", "which"), planted_attention.FAULTS, ids=str)
def test_the_suite_catches_a_kernel_that_multiplies_what_is_hidden(op: str, which: str, device: str) -> None:
    kernel, where = planted_attention.kernel(op, which), torch.device(device)
    result = verify_kernel(registry.op(op), kernel, torch.float32, where, size="tiny", stop_at_failure=True)
    assert "NaN or Inf where the reference is not" in result.failures[0]["problem"]


# What torch's kernels cannot take -------------------------------------------------------------------------------------


def reasons_of(
    op: str, label: str, sizes: tuple[int, int], heads: int = 2, groups: int = 2, half: torch.dtype = torch.bfloat16,
    **options: Any,
) -> str:  # fmt: skip
    """Why a kernel of aten's refuses a call in float32 on a CPU, or in half precision on a Hopper; "": it takes it."""
    declared, dtype = registry.op(op), torch.float32 if label == "cpu" else half
    rows, keys = sizes
    shapes = {"q": (1, rows, heads, 16), "k": (1, keys, groups, 16), "v": (1, keys, groups, 16)}
    if op == "attention_backward":
        shapes |= {"do": shapes["q"], "o": shapes["q"], "lse": (1, heads, rows)}
    facts = {n: TensorFacts.dense(n, s, torch.float32 if n == "lse" else dtype) for n, s in shapes.items()}
    device = device_of("cpu") if label == "cpu" else target_device("sm_90")
    call = declared.call({n: facts.get(n) for n in declared.tensors}, {**declared.usual, **options}, device)
    (kernel,) = [one for one in registry.kernels_of(op) if one.label == label]
    return "; ".join(map(str, kernel.capability.reasons(call)))


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
@pytest.mark.parametrize("label", ["cpu", "cudnn", "flash", "efficient"])
def test_atens_kernels_refuse_keys_that_no_query_sees(op: str, label: str) -> None:
    if label == "efficient" and op == "attention_backward":
        pytest.skip("aten's efficient attention has no gradient here")
    top, bottom = ({"causal": True, "align": align} for align in ("top_left", "bottom_right"))
    assert not reasons_of(op, label, (20, 24)) and not reasons_of(op, label, (24, 24), **top)
    if label == "flash":
        assert "no query sees 2 keys" in reasons_of(op, label, (20, 24), **bottom, window_left=2)
        assert not reasons_of(op, label, (20, 24), **bottom, window_left=4)
    else:
        assert "no query sees 4 keys" in reasons_of(op, label, (20, 24), **top)
        assert not reasons_of(op, label, (24, 20), **top)


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
@pytest.mark.parametrize("label", ["cudnn", "flash", "efficient"])
def test_atens_kernels_take_heads_in_groups_where_they_can(op: str, label: str) -> None:
    if label == "efficient" and op == "attention_backward":
        pytest.skip("aten's efficient attention has no gradient here")
    assert not reasons_of(op, label, (24, 24), heads=32, groups=1)
    told = reasons_of(op, label, (24, 24), heads=32, groups=8)
    assert told == ("k: 8 heads, while q has 32; takes as many, or one" if label == "efficient" else "")


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_atens_kernel_for_cpus_refuses_few_keys(op: str) -> None:
    """Of fewer than a vector has, it takes a query that is NaN for one that sees nothing."""
    for sizes in ((1, 3), (1, 1), (30, 15)):
        assert f"k: {sizes[1]} keys; takes 16 or more" in reasons_of(op, "cpu", sizes)


def test_cudnn_has_no_gradient_of_one_query_and_one_key() -> None:
    assert "cuDNN has no gradient of that" in reasons_of("attention_backward", "cudnn", (1, 1))
    for sizes in ((1, 2), (2, 1)):
        assert not reasons_of("attention_backward", "cudnn", sizes)
    assert not reasons_of("attention", "cudnn", (1, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_small_calls_find_no_kernel_wrong(causal: bool, device: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a gradient too. What a kernel cannot take is refused; nothing is tried, found wrong and put away."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    with caplog.at_level(logging.WARNING, "tilewright"):
        for sizes in ((1, 3), (3, 1), (1, 1), (2, 17), (17, 2), (16, 16)):
            for align in ("top_left", "bottom_right"):
                leaves = [t.to(device).requires_grad_() for t in made(1, *sizes, dtype=dtype)]
                tw.attention(*leaves, causal=causal, align=align).sum().backward()
    assert "quarantined" not in caplog.text


@pytest.mark.parametrize("label", ("cudnn", "flash"))
def test_gradients_of_aten_refuse_float16(label: str) -> None:
    """They keep scores' gradients in the dtype of q, where those of large inputs overflow."""
    assert "fp16" in reasons_of("attention_backward", label, (20, 24), half=torch.float16)
    assert not reasons_of("attention", label, (20, 24), half=torch.float16)
