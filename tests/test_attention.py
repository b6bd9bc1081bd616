"""Edges of the attention contract: who sees what, rows that see nothing, caches, heads, views, dropout, gradients.

Expected values come from loops over queries and keys in float64, written without the library's own masks. Packed
sequences have tests of their own (`test_varlen_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from attention_calls import (
    CASES,
    STATE,
    by_loops,
    each_backend,
    kept_by_words,
    lengths,
    made,
    run,
    seen_by_loops,
)
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.launch import Config, Launch
from tilewright.verify.check import call_of, check, truth_of

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


# Who sees what --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 7), (4, 9), (9, 4), (1, 9)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@each_backend
def test_a_query_sees_what_the_contract_says(
    case: dict[str, Any], sizes: tuple[int, int], backend: str, device: str
) -> None:
    """All conditions hold together; a query that sees nothing gives 0 and -Inf, no average and no NaN."""
    options = lengths(case, *sizes)
    q, k, v = (t.to(device) for t in made(2, *sizes, heads=4, groups=2))
    o, lse = run(q, k, v, backend=backend, **options)
    seen = seen_by_loops(2, 4, *sizes, options)
    expected = by_loops(q.double().cpu(), k.double().cpu(), v.double().cpu(), seen)
    torch.testing.assert_close((o.cpu().double(), lse.cpu().double()), expected, **CLOSE)
    blind = ~seen.any(-1)
    assert (lse.cpu() == -math.inf).equal(blind)
    assert not o.cpu().transpose(1, 2)[blind].any()


@each_backend
def test_numbers_of_64_bits_do_not_wrap(backend: str, device: str) -> None:
    q, k, v = (t.to(device) for t in made(2, 5, 9))
    most = (1 << 63) - 1
    plain = run(q, k, v, backend=backend)
    for options in (
        {"window": (most, most), "align": "bottom_right"},
        {"causal": True, "align": "bottom_right", "window": (most, most)},
        {"prefix_rows": most, "prefix_kv_len": most},
    ):
        expected = run(q, k, v, causal=True, align="bottom_right", backend=backend) if "causal" in options else plain
        torch.testing.assert_close(run(q, k, v, backend=backend, **options), expected, **CLOSE)
    lengths = torch.tensor([(1 << 32) + 1, 7 - (1 << 32)])
    for options in ({"kv_len": lengths}, {"prefix_rows": 5, "prefix_kv_len": lengths}):
        o, lse = run(q, k, v, backend=backend, **options)
        torch.testing.assert_close((o[0], lse[0]), (plain[0][0], plain[1][0]), **CLOSE)
        assert not o[1].any() and lse[1].eq(-math.inf).all()


@each_backend
def test_cache_rows_that_were_never_written_are_not_read(backend: str, device: str) -> None:
    q, k, v = (t.to(device) for t in made(4, 5, 40))
    kv_len = torch.tensor([40, 17, 100, -3], dtype=torch.int32, device=device)  # clamped to 0..40
    for b, n in enumerate((40, 17, 40, 0)):
        k[b, n:], v[b, n:] = math.nan, math.inf
    o, lse = run(q, k, v, kv_len=kv_len, causal=True, align="bottom_right", backend=backend)
    for b, n in enumerate((40, 17, 40)):
        alone = run(
            q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal=True, align="bottom_right", backend=backend
        )
        torch.testing.assert_close((o[b : b + 1], lse[b : b + 1]), alone, **CLOSE)
    assert not o[3].any() and lse[3].eq(-math.inf).all()


@each_backend
def test_prefill_and_a_cached_continuation_equal_the_whole(backend: str, device: str) -> None:
    q, k, v = (t.to(device) for t in made(1, 12, 12))
    whole, _ = run(q, k, v, causal=True, backend=backend)
    cache = [torch.full((1, 20, *t.shape[2:]), math.nan, device=device) for t in (k, v)]
    found, at = [], 0
    for rows in (7, 1, 1, 3):
        for held, new in zip(cache, (k, v), strict=True):
            held[:, at : at + rows] = new[:, at : at + rows]
        at, step = at + rows, q[:, at : at + rows]
        kv_len = torch.tensor([at], dtype=torch.int32, device=device)
        found.append(run(step, *cache, kv_len=kv_len, causal=True, align="bottom_right", backend=backend)[0])
    torch.testing.assert_close(torch.cat(found, 1), whole, **CLOSE)


@each_backend
def test_a_mask_and_causal_hold_together(backend: str, device: str) -> None:
    q, k, v = (t.to(device) for t in made(2, 8, 8, heads=2))
    mask = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(3)).lt(0.6).to(device)
    mask[..., 0] = True
    o, _ = run(q, k, v, mask=mask.expand(2, 2, 8, 8), causal=True, backend=backend)
    both = mask & torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    wanted = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=both)
    torch.testing.assert_close(o, wanted.transpose(1, 2), **CLOSE)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_a_scale_that_float32_does_not_have_is_refused() -> None:
    """Kernels hold it in float32: as 0 or Inf it would make NaN of what is masked."""
    q, starts = torch.randn(1, 4, 2, 16), torch.tensor([0, 4])
    for scale in (1e-60, -1e-40, 1e300, math.inf):
        with pytest.raises(tw.InvalidArgument, match="scale: "):
            tw.attention(q, q, q, scale=scale)
        with pytest.raises(tw.InvalidArgument, match="scale: "):
            tw.attention(q[0], q[0], q[0], cu_seqlens_q=starts, cu_seqlens_k=starts, scale=scale)
    assert tw.attention(*[q.double()] * 3, scale=1e-60).isfinite().all()
    assert tw.attention(q, q, q, scale=1e-37).isfinite().all()


@each_backend
def test_a_scale_of_zero_is_zero_and_large_scores_stay_finite(backend: str, device: str) -> None:
    q, k, v = (t.to(device) for t in made(1, 3, 20))
    o, lse = run(q, k, v, scale=0.0, backend=backend)
    torch.testing.assert_close(o, v.mean(1, keepdim=True).expand_as(o), **CLOSE)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(20.0)))
    o, lse = run(q * 100, k * 100, v, scale=1.0, backend=backend)
    scores = torch.einsum("bihd,bjhd->bhij", q.double() * 100, k.double() * 100)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=0)
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [40.0, 1e3, 2e4, 6e4])
@each_backend
def test_the_largest_of_large_scores_share_a_row(size: float, dtype: torch.dtype, backend: str, device: str) -> None:
    """Two keys of equal scores up to 1.4e10, the first behind keys of score 0, the others far below."""
    q, k, v = (t.to(device) for t in made(1, 3, 300, dtype=dtype))
    k.fill_(-size)
    k[:, :150], k[:, 170], k[:, 299] = 0.0, size, size
    o, lse = run(q.fill_(size), k, v, backend=backend)
    score = 4.0 * q[0, 0, 0, 0].double() ** 2 + math.log(2.0)
    torch.testing.assert_close(lse.double(), score.expand(lse.shape), rtol=3e-7, atol=0)
    wanted = (v[0, 170, 0].double() + v[0, 299, 0].double()) / 2.0
    torch.testing.assert_close(o.double(), wanted.expand(o.shape), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dims", [(8, 8), (60, 60), (72, 72), (100, 100), (16, 40)], ids=str)
@each_backend
def test_heads_of_any_size(dims: tuple[int, int], backend: str, device: str) -> None:
    """Padding is never counted: the scale is that of the true width."""
    q, k, v = (t.to(device) for t in made(1, 6, 9, width=dims[0], v_width=dims[1]))
    found = run(q, k, v, backend=backend)
    wanted = by_loops(*(t.double().cpu() for t in (q, k, v)), seen_by_loops(1, 2, 6, 9, {}))
    torch.testing.assert_close(tuple(t.cpu().double() for t in found), wanted, **CLOSE)


def test_is_torchs_function() -> None:
    q, k, v = (t.transpose(1, 2) for t in made(2, 9, 9, heads=4, groups=2, dtype=torch.float64))
    for causal in (False, True):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        found = tw.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-12, atol=1e-12)


# Views ----------------------------------------------------------------------------------------------------------------


@each_backend
def test_views_are_read_where_they_lie(backend: str, device: str) -> None:
    """Parts of one projection, [B, H, S, D] seen as [B, S, H, D], one key head for all, one row for a whole batch."""
    fused = torch.randn(2, 9, 3, 2, 24, generator=torch.Generator().manual_seed(0)).to(device)
    views = [fused.unbind(2), [fused[:, :, i].transpose(1, 2).contiguous().transpose(1, 2) for i in range(3)],
             [fused[:, :, 0], *(fused[:, :, i, :1].expand(2, 9, 2, 24) for i in (1, 2))],
             [fused[:1, :, i].expand(2, 9, 2, 24) for i in range(3)]]  # fmt: skip
    for q, k, v in views:
        found = run(q, k, v, causal=True, backend=backend)
        dense = run(*(t.contiguous() for t in (q, k, v)), causal=True, backend=backend)
        exact = {"rtol": 0, "atol": 0} if backend == "triton" else CLOSE  # torch multiplies what lies in another order
        torch.testing.assert_close(found, dense, **exact)
        assert all(t.is_contiguous() for t in found)


def test_gradients_of_a_fused_projection() -> None:
    fused = torch.randn(2, 9, 3, 2, 24, dtype=torch.float64, requires_grad=True)
    apart = [t.detach().clone().requires_grad_() for t in fused.unbind(2)]
    tw.attention(*fused.unbind(2), causal=True).square().sum().backward()
    tw.attention(*apart, causal=True).square().sum().backward()
    torch.testing.assert_close(fused.grad, torch.stack([t.grad for t in apart], 2))


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 7), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_loops(case: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Of o and of lse. Rows that see nothing, and keys that nobody sees, have gradient 0."""
    options = lengths(case, *sizes)
    leaves = [t.requires_grad_() for t in made(2, *sizes, heads=4, groups=2, dtype=torch.float64)]
    seen = seen_by_loops(2, 4, *sizes, options)
    blind = ~seen.any(-1)
    found = tw.attention(*leaves, return_lse=True, **options)
    wanted = by_loops(*leaves, seen)
    upstream = [torch.randn_like(t) for t in found]
    found, wanted = (
        torch.autograd.grad((o, torch.where(blind, 0.0, lse)), leaves, upstream) for o, lse in (found, wanted)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert not found[0].transpose(1, 2)[blind].any()
    unseen = ~seen.reshape(2, 2, 2, *sizes).any(2).any(2)  # [B, Hkv, Sk]
    assert not found[1].transpose(1, 2)[unseen].any() and not found[2].transpose(1, 2)[unseen].any()


def test_gradients_past_the_keys_are_zero_whatever_lies_there() -> None:
    q, k, v = made(2, 5, 12, dtype=torch.float64)
    k[:, 7:], v[:, 7:] = math.nan, math.inf
    leaves = [t.requires_grad_() for t in (q, k, v)]
    kv_len = torch.tensor([7, 0], dtype=torch.int32)
    tw.attention(*leaves, kv_len=kv_len).square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in leaves)
    assert not k.grad[:, 7:].any() and not v.grad[:, 7:].any()
    assert not any(t.grad[1].any() for t in leaves) and all(t.grad[0].any() for t in leaves)


def test_one_key_head_gathers_the_gradients_of_its_group() -> None:
    q, k, v = (t.requires_grad_() for t in made(1, 5, 6, heads=4, groups=1, dtype=torch.float64))
    wide = [t.detach().expand(1, 6, 4, -1).clone().requires_grad_() for t in (k, v)]
    tw.attention(q, k, v).square().sum().backward()
    tw.attention(q, *wide).square().sum().backward()
    for narrow, each in zip((k, v), wide, strict=True):
        torch.testing.assert_close(narrow.grad, each.grad.sum(2, keepdim=True))


# Dropout --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@each_backend
def test_dropout_drops_the_words_of_the_contract(p: float, backend: str, device: str) -> None:
    """With scores of 0 and the unit matrix as values, o is the mask: row (b Hq + h) Sq + i, column j."""
    batch, heads, rows, keys = 2, 2, 5, 16
    q, k = torch.zeros(batch, rows, heads, 8, device=device), torch.zeros(batch, keys, 1, 8, device=device)
    v = torch.eye(keys, device=device)[None, :, None].expand(batch, keys, 1, keys)
    seed, offset = (t.to(device) for t in STATE)
    o, lse = run(q, k, v, dropout_p=p, seed=seed, offset=offset, backend=backend)
    keep = kept_by_words(batch * heads * rows, keys, p, *STATE).reshape(batch, heads, rows, keys)
    factor = 0.0 if p == 1.0 else 1.0 / (keys * (1.0 - p))
    torch.testing.assert_close(o.cpu(), keep.transpose(1, 2).float() * factor)
    torch.testing.assert_close(lse.cpu(), torch.full_like(lse.cpu(), math.log(keys)))  # of what is not yet dropped
    again, _ = run(q, k, v, dropout_p=p, seed=seed, offset=offset, backend=backend)
    assert torch.equal(o, again)


def test_backward_drops_what_forward_dropped_though_the_seed_has_moved_on() -> None:
    leaves = [t.requires_grad_() for t in made(2, 6, 9, dtype=torch.float64)]
    seed, offset = (t.clone() for t in STATE)
    keep = kept_by_words(2 * 2 * 6, 9, 0.4, *STATE).reshape(2, 2, 6, 9).double() / 0.6
    wanted = by_loops(*leaves, seen_by_loops(2, 2, 6, 9, {}), keep)[0]
    found = tw.attention(*leaves, dropout_p=0.4, seed=seed, offset=offset)
    seed += 1
    offset += 3
    upstream = torch.randn_like(found)
    torch.testing.assert_close(found, wanted)
    expected = torch.autograd.grad(wanted, leaves, upstream)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, upstream), expected, rtol=1e-6, atol=1e-8)


def test_a_seed_is_drawn_from_torchs_generator() -> None:
    q, k, v = made(1, 6, 40)
    torch.manual_seed(1)
    first, other = (tw.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(tw.attention(q, k, v, dropout_p=0.5), first) and not torch.equal(first, other)
    state = torch.random.get_rng_state()
    tw.attention(q, k, v)
    assert torch.equal(torch.random.get_rng_state(), state)


# Kernels --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right", "window_left": 20}], ids=str)
def test_parts_of_the_keys_are_merged_into_what_one_part_finds(options: dict[str, Any], device: str) -> None:
    """Some parts see nothing: those past kv_len, and those outside the window."""
    op = registry.op("attention")
    (kernel,) = [k for k in registry.kernels_of("attention") if k.backend == "triton" and not k.label]
    q, k, v = (t.to(device).bfloat16() for t in made(3, 2, 140, heads=4, groups=2, width=32))
    kv_len = torch.tensor([140, 70, 0], dtype=torch.int32, device=device)
    k[1, 70:], v[1, 70:] = math.nan, math.nan
    inputs = dict.fromkeys(op.tensors) | {"q": q, "k": k, "v": v, "kv_len": kv_len}
    chosen = {**op.usual, **options}
    call = call_of(op, inputs, chosen, False)
    emulated = registry.backend("triton").emulates(call.device)
    truth = truth_of(op, inputs, chosen, False)
    for parts in (1, 4):
        config = Config(m=16, n=32, parts=parts, tma=0, apart=0, num_warps=4, num_stages=2)
        outcome = check(kernel, config, op, inputs, chosen, truth, saving=False, emulated=emulated)
        assert not outcome.problems, (parts, outcome.problems)
        launches = kernel.load()(call, config)
        assert isinstance(launches, Launch) if parts == 1 else len(launches) == 2
    for arch, early in (("sm_90", True), ("sm_80", False), ("gfx942", False)):
        first, last = kernel.load()(replace(call, device=target_device(arch)), config)
        assert (first.pdl, first.constants["PDL"], last.pdl, last.constants["PDL"]) == (False, early, early, early)


# Compilers and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"causal": True}, {"return_lse": True}, {"dropout_p": 0.5, "seed": STATE[0]}],
                         ids=["causal", "lse", "dropout"])  # fmt: skip
def test_the_function_under_torch_compile(options: dict[str, Any]) -> None:
    def layer(*tensors: Tensor) -> Tensor:
        found = tw.attention(*tensors, **options)
        return found[0].sin() + found[1].mean() if isinstance(found, tuple) else found.sin()

    leaves = [t.requires_grad_() for t in made(2, 8, 8)]
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, layer))
    torch.testing.assert_close(found, wanted)


Q, K, V = made(2, 4, 6, heads=4, groups=2)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (lambda: tw.attention(Q[:, :, :3], K, V), "k: 2 heads, while q has 3"),
    "widths": (lambda: tw.attention(Q, K[..., :8], V), "k: shape .*needs 16 there: the last dimension of q"),
    "batch": (lambda: tw.attention(Q, K[:1], V[:1]), "k: shape .*the batch of q"),
    "keys and values": (lambda: tw.attention(Q, K, V[:, :5]), r"v: shape .*while k has \[2, 6, 2, 16\]"),
    "dtypes": (lambda: tw.attention(Q, K.half(), V), "k: dtype fp16"),
    "no align": (lambda: tw.attention(Q, K, V, causal=True), 'align: None.*"top_left".*"bottom_right"'),
    "no align, window": (lambda: tw.attention(Q, K, V, window=(2, 0)), "align: None"),
    "no align, lengths": (
        lambda: tw.attention(K, K, V, causal=True, kv_len=torch.full((2,), 6, dtype=torch.int32)), "align: None"),
    "align": (lambda: tw.attention(Q, K, V, causal=True, align="left"), "align: 'left'; takes 'top_left'"),
    "causal by name": (lambda: tw.attention(K, K, V, causal="bottom_right"), "causal: 'bottom_right' is a str"),
    "window": (lambda: tw.attention(K, K, V, window=3), "window: 3"),
    "window side": (lambda: tw.attention(K, K, V, window=(-2, 0)), "^attention: window: -2"),
    "window beyond 64 bits": (lambda: tw.attention(K, K, V, window=(1, 1 << 70)), "^attention: window: .*64 bits"),
    "prefix": (lambda: tw.attention(Q, K, V, prefix_rows=1), "^attention: prefix_kv_len: None, with prefix_rows=1"),
    "prefix for none": (lambda: tw.attention(Q, K, V, prefix_kv_len=2), "prefix_kv_len: given, with prefix_rows=0"),
    "lengths for none": (
        lambda: tw.attention(Q, K, V, prefix_kv_len=torch.full((2,), 3, dtype=torch.int32)),
        "prefix_kv_len: given, with prefix_rows=0"),
    "prefix of a fraction": (
        lambda: tw.attention(Q, K, V, prefix_rows=1, prefix_kv_len=2.0), r"prefix_kv_len: 2\.0; an int of 0 or more"),
    "prefix below 0": (lambda: tw.attention(Q, K, V, prefix_rows=1, prefix_kv_len=-1), "prefix_kv_len: -1"),
    "prefix beyond 64 bits": (
        lambda: tw.attention(Q, K, V, prefix_rows=1, prefix_kv_len=1 << 70), "^attention: prefix_kv_len: .*64 bits"),
    "rows beyond 64 bits": (
        lambda: tw.attention(Q, K, V, prefix_rows=1 << 70, prefix_kv_len=1), "prefix_rows: .*64 bits"),
    "prefix twice": (
        lambda: tw.attention.op(Q, K, V, None, torch.ones(2).int(), prefix_rows=1, prefix_kv=1),
        "prefix_kv_len: given, and prefix_kv=1 too"),
    "bound of dense rows": (lambda: tw.attention(Q, K, V, max_seqlen_q=4), "max_seqlen_q: given without cu_seqlens"),
    "bound of dense keys": (lambda: tw.attention(Q, K, V, max_seqlen_k=6), "max_seqlen_k: given without cu_seqlens"),
    "no tensor": (lambda: tw.attention([1.0], K, V, dropout_p=0.5), "q: a list; a torch.Tensor is needed"),
    "kv_len": (lambda: tw.attention(Q, K, V, kv_len=torch.tensor([6])), r"kv_len: shape \[1\]"),
    "kv_len dtype": (lambda: tw.attention(Q, K, V, kv_len=torch.ones(2)), "kv_len: dtype fp32"),
    "mask": (lambda: tw.attention(Q, K, V, mask=torch.ones(2, 4, 4, 6)), "mask: dtype fp32; takes bool"),
    "mask shape": (lambda: tw.attention(Q, K, V, mask=torch.ones(4, 6) > 0), r"mask: shape \[4, 6\].*expand"),
    "dropout": (lambda: tw.attention(Q, K, V, dropout_p=1.5, seed=STATE[0]), "dropout_p: 1.5"),
    "seed": (lambda: tw.attention(Q, K, V, dropout_p=0.5, seed=torch.tensor(3)), "seed: .*int64"),
    "offset": (lambda: tw.attention(Q, K, V, dropout_p=0.5, offset=STATE[1]), "offset: given without a seed"),
    "offset of nothing": (lambda: tw.attention(Q, K, V, offset=STATE[1]), "offset: given without a seed"),
    "offset of the op": (
        lambda: tw.attention.op(Q, K, V, dropout_p=0.5, offset=STATE[1]), "offset: given without a seed"),
    "one of two": (
        lambda: tw.attention(Q[0], K[0], V[0], cu_seqlens_q=torch.tensor([0, 4])), "cu_seqlens_k: None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(tw.InvalidArgument, match=words):
        call()


@pytest.mark.parametrize("backend", [None, "triton"])
def test_lengths_that_lie_apart(backend: str | None, device: str) -> None:
    """A column of a table, and one number for all."""
    q, k, v = (torch.randn(3, n, 2, 16, device=device) for n in (5, 40, 40))
    table = torch.tensor([[7, 0], [40, 0], [1, 0]], dtype=torch.int32, device=device)
    for given in (table[:, 0], torch.tensor([9], dtype=torch.int32, device=device).expand(3)):
        found = tw.attention(q, k, v, kv_len=given, backend=backend)
        assert isinstance(found, Tensor)
        for i, n in enumerate(given.tolist()):
            alone = tw.attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], backend="reference")
            torch.testing.assert_close(found[i : i + 1], alone, rtol=1e-4, atol=1e-5)
    assert "kv_len" in str(tw.explain(tw.attention.op, q, k, v, table[:, 0]))
