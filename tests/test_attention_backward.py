"""Edges of attention's gradients in Triton: every mask by loops in float64, positions that nobody sees and that hold
NaN, gradients so large or so small that fp16 has no room for their terms, dropout. The definition's own gradients are
tested in `test_attention` and `test_varlen_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import CASES, STATE, by_loops, lengths, made, seen_by_loops
from tilewright.core import registry
from tilewright.core.launch import Config
from tilewright.core.plan import bind
from tilewright.ops.attention import inputs as attention_inputs
from tilewright.ops.attention import triton_backward_tiles
from tilewright.verify.cases import Case, build
from tilewright.verify.check import call_of, check, truth_of

SMALL = Config(k_m=16, k_n=16, k_warps=4, k_stages=1, q_m=16, q_n=16, q_warps=4, q_stages=1, tma=0)
Inputs = dict[str, Tensor | None]


def gradients(inputs: Inputs, options: Mapping[str, Any], device: str) -> list[Tensor]:
    """(dq, dk, dv) by the Triton kernel, in the smallest tiles that there are."""
    op = registry.op("varlen_attention_backward" if "cu_seqlens_q" in inputs else "attention_backward")
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.backend == "triton"]
    moved = {n: None if t is None else t.to(device) for n, t in inputs.items()}
    call = call_of(op, moved, {**op.usual, **options}, False)
    run = bind(kernel, SMALL, call, poison=True)
    return [t.cpu() for t in run(*(moved[n] for n in op.tensors))]


def split_options(case: Mapping[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """What users say, as the op is told: tensors and numbers."""
    options = dict(case)
    left, right = options.pop("window", (-1, -1))
    options |= {"window_left": left, "window_right": right}
    if isinstance(options.get("prefix_kv_len"), int):
        options["prefix_kv"] = options.pop("prefix_kv_len")
    tensors = {n: options.pop(n) for n in ("kv_len", "prefix_kv_len", "mask") if n in options}
    return tensors, options


def upstream(q: Tensor, k: Tensor, v: Tensor, given: Inputs, options: Mapping[str, Any], grad: Tensor) -> Inputs:
    """Everything that the gradient reads: o and lse as the definition finds them in float64."""
    op = registry.op("varlen_attention" if q.dim() == 3 else "attention")
    inputs = dict.fromkeys(op.tensors) | {"q": q, "k": k, "v": v, **given}
    if options.get("dropout_p"):
        inputs |= {"seed": STATE[0], "offset": STATE[1]}
    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    o, lse = op.define(wide, {**op.usual, **options}, False)[:2]
    backward = registry.op(f"{op.name}_backward")
    found = dict.fromkeys(backward.tensors) | {n: inputs[n] for n in backward.tensors if n in inputs}
    state = torch.cat(STATE) if options.get("dropout_p") else None
    return found | {"do": grad, "o": o.to(q.dtype), "lse": lse.float(), "state": state}


# Who sees what --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_loops(case: dict[str, Any], device: str) -> None:
    """Of o and of lse, with heads in groups, more queries than keys and fewer, and tiles that are not whole."""
    for rows, keys in ((3, 21), (21, 18)):
        told = lengths(case, rows, keys)
        given, options = split_options(told)
        q, k, v = made(2, rows, keys, heads=4, groups=2)
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        seen = seen_by_loops(2, 4, rows, keys, told)
        o, lse = by_loops(*leaves, seen)
        do, dlse = torch.randn_like(q), torch.randn(2, 4, rows)
        level = torch.where(~seen.any(-1), 0.0, lse)
        wanted = torch.autograd.grad((o, level), leaves, (do.double(), dlse.double()))
        inputs = upstream(q, k, v, given, options, do) | {"dlse": dlse}
        found = gradients(inputs, options, device)
        torch.testing.assert_close([t.double() for t in found], list(wanted), rtol=2e-5, atol=5e-6)


def test_dropout_drops_what_forward_dropped(device: str) -> None:
    options = {"dropout_p": 0.4, "causal": True, "align": "bottom_right", "window_left": 18, "window_right": -1}
    q, k, v = made(1, 20, 21, heads=2, groups=1)
    inputs = upstream(q, k, v, {}, options, torch.randn_like(q))
    op = registry.op("attention_backward")
    wanted = truth_of(op, inputs, {**op.usual, **options}, False).oracle
    found = gradients(inputs, options, device)
    torch.testing.assert_close([t.double() for t in found], [wanted[n] for n in op.out], rtol=2e-5, atol=5e-6)


# Positions that nobody sees -------------------------------------------------------------------------------------------

MASK = torch.rand(1, 1, 20, 37, generator=torch.Generator().manual_seed(1)) < 0.7
MASK[..., 3, :], MASK[..., 5], MASK[..., 17] = False, False, False
UNSEEN: dict[str, tuple[int, int, dict[str, Any], list[int], list[int]]] = {
    "queries before the first key": (37, 20, {"causal": True, "align": "bottom_right"}, list(range(17)), []),
    "keys behind the last query": (20, 37, {"causal": True, "align": "top_left"}, [], list(range(20, 37))),
    "queries that left the window": (37, 20, {"window": (2, 5), "align": "top_left"}, list(range(22, 37)), []),
    "keys that no window reaches": (5, 37, {"window": (3, 0), "align": "bottom_right"}, [], list(range(29))),
    "keys before the window, with dropout": (
        5, 37, {"window": (3, 0), "align": "bottom_right", "dropout_p": 0.3}, [], list(range(29))),
    "keys past a length": (20, 37, {"kv_len": torch.tensor([18], dtype=torch.int32)}, [], list(range(18, 37))),
    "a prefix that sees nothing": (20, 37, {"prefix_rows": 3, "prefix_kv_len": 0}, [0, 1, 2], []),
    "keys between a prefix and windows": (
        20, 37, {"prefix_rows": 17, "prefix_kv_len": 3, "window": (4, 0), "align": "bottom_right"}, list(range(17)),
        list(range(30))),
    "rows and columns of a mask": (20, 37, {"mask": MASK}, [3], [5, 17]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNSEEN)
def test_what_nobody_sees_reaches_no_gradient(name: str, dtype: torch.dtype, device: str) -> None:
    """Whatever it holds: the same bits as if it held 0, and gradient 0 itself."""
    rows, keys, case, blind, unseen = UNSEEN[name]
    given, options = split_options(case)
    q, k, v = made(1, rows, keys, dtype=dtype)
    do, dlse = torch.randn_like(q), torch.randn(1, 2, rows)
    for t, hidden in ((q, blind), (do, blind), (k, unseen), (v, unseen)):
        t[:, hidden] = 0.0
    dlse[..., blind] = 0.0
    clean = upstream(q, k, v, given, options, do) | {"dlse": dlse}
    assert clean["lse"] is not None and clean["lse"].eq(-math.inf).nonzero()[:, 2].unique().tolist() == blind
    wanted = gradients(clean, options, device)
    assert not any(wanted[n][:, at].any() for n, at in ((0, blind), (1, unseen), (2, unseen)))
    assert all(t.isfinite().all() and t.any() for t in wanted)
    for poison in (math.nan, 65504.0) if dtype == torch.float16 else (math.inf,):
        dirty = {n: None if t is None else t.clone() for n, t in clean.items()}
        for n, hidden in (("q", blind), ("do", blind), ("k", unseen), ("v", unseen)):
            dirty[n][:, hidden] = poison  # type: ignore[index]
        dirty["dlse"][..., blind] = poison  # type: ignore[index]
        found = gradients(dirty, options, device)
        if ("mask" in case or ("window" in case and "prefix_rows" in case)) and poison == 65504.0:
            # by which power of 2 fp16 is told score gradients depends on all of v that is not known to be hidden
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-4)
        else:
            assert all(map(torch.equal, found, wanted)), poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sequence_is_not_reached_by_those_beside_it(dtype: torch.dtype, device: str) -> None:
    """Nor by tokens behind the last one, which get gradient 0."""
    q_starts, k_starts = torch.tensor([0, 5, 5, 23, 29]), torch.tensor([0, 7, 9, 30, 30])
    q, k, v = (t[0] for t in made(1, 33, 34, heads=2, dtype=dtype))
    given: Inputs = {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}
    options = {"causal": True, "align": "bottom_right"}
    clean = upstream(q, k, v, given, options, torch.randn_like(q)) | {"dlse": torch.randn(2, 33)}
    mine_q, mine_k = slice(5, 23), slice(9, 30)
    wanted = gradients(clean, options, device)
    dirty = {n: None if t is None else t.clone() for n, t in clean.items()}
    for n, mine in (("q", mine_q), ("do", mine_q), ("o", mine_q), ("k", mine_k), ("v", mine_k)):
        kept = clean[n][mine].clone()  # type: ignore[index]
        dirty[n].fill_(math.nan)[mine] = kept  # type: ignore[union-attr]
    found = gradients(dirty, options, device)
    for new, old, mine, end in zip(found, wanted, (mine_q, mine_k, mine_k), (29, 30, 30), strict=True):
        assert torch.equal(new[mine], old[mine]) and old[mine].any()
        assert not new[end:].any() and not old[end:].any()


# Large scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_weight_is_above_1_whatever_lse_was_rounded_to(dtype: torch.dtype, device: str) -> None:
    """The lse of large scores may lie below the score of the only key, which has all the weight all the same. NaN is no
    number to be cut at 1."""
    q, k, v = made(1, 5, 1, heads=1, dtype=dtype)
    do = torch.randn_like(q)
    inputs = upstream(q, k, v, {}, {}, do)
    assert inputs["lse"] is not None
    inputs["lse"] -= 8.0
    whole = do.double().sum(1, keepdim=True)
    dq, dk, dv = gradients(inputs, {}, device)
    torch.testing.assert_close(dv.double(), whole, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-5)
    assert dq.isfinite().all() and dk.isfinite().all()
    q[0, 2, 0, 3] = math.nan
    dq, dk, dv = gradients(inputs | {"q": q}, {}, device)
    assert dq[0, 2].isnan().all() and dk.isnan().all() and dv.isnan().all()
    assert dq[0, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_weight_of_the_definition_is_above_1(dtype: torch.dtype, device: str) -> None:
    """Where an ulp of a score is hundreds, exp of what its lse was rounded by is Inf, and in float64 too."""
    q, k, v = (x.to(dtype) for x in made(1, 5, 1, heads=1, dtype=torch.float32))
    inputs = upstream(q, k, v, {}, {}, torch.randn_like(q))
    assert inputs["lse"] is not None
    inputs["lse"] -= 1000.0
    op = registry.op("attention_backward")
    _, _, dv = op.reference(*(inputs[n] for n in op.tensors))
    torch.testing.assert_close(dv, inputs["do"].sum(1, keepdim=True))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 17), (17, 2), (16, 16)], ids=str)
def test_small_calls_pass_with_large_scores(sizes: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """lse is about 1.6e7 there, and an ulp of it 1."""
    op = registry.op("attention_backward")
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.backend == "triton"]
    for seed in range(4):
        case = Case(
            "large scores", op.name, (1,), sizes[1], dtype, op.probes.options[0], op.probes.absent[0],
            {"lse": torch.float32}, {}, "offset", seed, {"Sq": sizes[0], "Hq": 2, "Hkv": 1, "D": 16, "Dv": 16},
        )  # fmt: skip
        inputs, options = build(case, op, device), {**op.usual, **case.options}
        assert inputs["lse"] is not None and inputs["lse"].abs().max() > 1e7
        outcome = check(kernel, SMALL, op, inputs, options, truth_of(op, inputs, options, False), saving=False)
        assert not outcome.problems, (seed, outcome.problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_value_of_inf_is_seen_where_its_weight_is_nothing(causal: bool, dtype: torch.dtype, device: str) -> None:
    """By a query that sees the key, though the weight is 0 in float32: 0 times Inf is NaN."""
    q, k, v = made(1, 20, 20, heads=1, dtype=dtype)
    do = torch.randn_like(q)
    q.fill_(10.0)
    k[:, 3], v[:, 3, :, 5] = -20.0, math.inf
    options = {"causal": causal, "align": "top_left"}
    inputs = upstream(q, k, v, {}, options, do)
    _, dk, dv = gradients(inputs, options, device)
    op = registry.op("attention_backward")
    known = truth_of(op, inputs, {**op.usual, **options}, False).baseline
    for found, n in ((dk, "dk"), (dv, "dv")):
        assert known[n] is not None and torch.equal(found.isfinite(), known[n].isfinite()), n  # type: ignore[union-attr]
    assert not dk[0, 3].isfinite().any()


# The room of fp16 -----------------------------------------------------------------------------------------------------


def _large(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """P (dP - delta) leaves fp16, while all gradients lie in it."""
    for t, factor in ((q, 0.1), (k, 0.1), (v, 4.0), (do, 6000.0)):
        t.mul_(factor)


def _small_for_queries(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """P (dP - delta) is of fp16's least numbers, dq is not."""
    for t, factor in ((q, 1e-3), (k, 500.0), (do, 2e-6)):
        t.mul_(factor)


def _small_for_keys(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    for t, factor in ((q, 500.0), (k, 1e-3), (do, 2e-6)):
        t.mul_(factor)


def _small_weights(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """One key has nearly all the weight; what the others get is small, their dv is not."""
    q.fill_(1.0)
    k.mul_(0.01)[:, 0] += 14.0 / math.sqrt(q.shape[-1])
    do.mul_(1000.0)


def _both(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    """One query's gradient is large, that of another, which sees other keys too, is small."""
    do[:, :1] *= 3000.0
    do[:, 1:] *= 1e-3


ROOM: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], None], str, int]] = {
    "large": (_large, "dq dk dv", 3),
    "small, of queries": (_small_for_queries, "dq", 32),
    "small, of keys": (_small_for_keys, "dk", 32),
    "small weights": (_small_weights, "dv", 32),
    "both": (_both, "dq dv", 32),
}
"""How inputs are bent, which gradients are then to be told, and how many keys there are."""


@pytest.mark.parametrize("name", ROOM)
def test_fp16_has_room_for_what_gradients_are_summed_from(name: str, device: str) -> None:
    """Each row of a gradient is as right as fp16 can tell it, though its terms as they stand would be Inf or 0."""
    bend, judged, keys = ROOM[name]
    q, k, v = made(1, 7, keys, heads=1, width=128, dtype=torch.float16)
    do = made(1, 7, 8, heads=1, width=128, dtype=torch.float16)[0]
    bend(q, k, v, do)
    inputs = upstream(q, k, v, {}, {}, do)
    op = registry.op("attention_backward")
    wanted = truth_of(op, inputs, op.usual, False).oracle
    for n, found in zip(op.out, gradients(inputs, {}, device), strict=True):
        truth = wanted[n]
        assert truth is not None and truth.half().isfinite().all() and found.isfinite().all(), n
        if n in judged:
            error = (found.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
            assert error.max() < 4e-3, (n, error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_unit_of_weights_is_not_rounded_away_by_large_scores(dtype: torch.dtype, device: str) -> None:
    """All scores are 2^26, whose product with log2(e) is exact: the weight of the only key is 1."""
    q, k, v = made(1, 5, 1, heads=1, width=16, dtype=dtype)
    do = torch.randn_like(q)
    q.fill_(2048.0), k.fill_(2048.0)
    inputs = upstream(q, k, v, {}, {"scale": 1.0}, do)
    _, _, dv = gradients(inputs, {"scale": 1.0}, device)
    torch.testing.assert_close(dv.double(), do.double().sum(1, keepdim=True), rtol=1e-2, atol=1e-5)


def _problems_of_falling_weights(device: str) -> list[str]:
    """What a check finds where weights fall from 1 to 2^-54, one key after the other, and do and v are large."""
    op = registry.op("attention_backward")
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.backend == "triton"]
    q, k, v = made(1, 7, 48, heads=1, width=64, dtype=torch.float16)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).half() * 300.0
    q.fill_(1.0)
    k.copy_(-0.1 * torch.arange(48.0)[:, None, None])
    inputs = {n: None if t is None else t.to(device) for n, t in upstream(q, k, v * 300.0, {}, {}, do).items()}
    truth = truth_of(op, inputs, op.usual, False)
    return check(kernel, SMALL, op, inputs, op.usual, truth, saving=False).problems


def test_fp16_may_lose_score_gradients_below_2_to_the_minus_39(device: str) -> None:
    """Of what they could be if a weight were 1: in a gradient it shows beside terms that fp16 has no room for."""
    assert not _problems_of_falling_weights(device)


@pytest.mark.interpreted
def test_more_than_that_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    room = triton_backward_tiles.ROOM.value - 8
    monkeypatch.setattr(triton_backward_tiles, "ROOM", type(triton_backward_tiles.ROOM)(room))
    assert any("largest error" in problem for problem in _problems_of_falling_weights("cpu"))


def test_long_inputs_of_benchmarks_are_made_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all heads at once, two sequences of 16384 would be scores by a hundred gigabytes."""
    op = registry.op("attention_backward")
    options = {**op.usual, "causal": True, "align": "bottom_right"}
    q, k, v = made(2, 40, 50, heads=4, groups=2)
    found = dict.fromkeys(op.tensors) | {"q": q, "k": k, "v": v, "kv_len": torch.tensor([50, 20], dtype=torch.int32)}
    whole, apart = dict(found), dict(found)
    attention_inputs.derive_backward(whole, options)
    monkeypatch.setattr(attention_inputs, "FEW_PAIRS", 0)
    attention_inputs.derive_backward(apart, options)
    assert torch.equal(whole["o"], apart["o"])
    assert torch.equal(whole["lse"], apart["lse"])
