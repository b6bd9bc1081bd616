"""Edges of attention by SiLU, against loops in float64: the mask of HSTU, tiles that it cuts in every way, what nobody
sees, scores that float16 does not hold, and gradients.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.bench.peers import Peer, peers_of
from tilewright.bench.problems import Problem, problems
from tilewright.core import registry
from tilewright.core.launch import Config
from tilewright.core.plan import bind
from tilewright.ops.hstu import peers
from tilewright.ops.hstu.masks import Rules, spans, visible
from tilewright.ops.residual.philox import random_words, threshold
from tilewright.verify.check import call_of

each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])
CLOSE = {"rtol": 3e-5, "atol": 3e-6}
OFFSETS, TARGETS = [0, 37, 37, 38, 57], [18, 0, 1, 3]
"""Sequences of 37, 0, 1 and 19 tokens, and how many of these are targets."""
EXTRA = 5
"""Tokens behind the last sequence, which are NaN."""
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": False},
    {"contextual_len": 3},
    {"contextual_len": 30},
    {"contextual_len": 3, "causal": False},
    {"window": 6},
    {"window": 15, "full_tail": 4},
    {"window": 3, "contextual_len": 17},
    {"window": 5, "full_tail": 11, "contextual_len": 18},
    {"window": 19, "full_tail": 100, "contextual_len": 2},
    {"window": 7, "contextual_len": 4, "causal": False},
    {"window": 3, "full_tail": 9, "causal": False},
)
SCALES = {"max_seqlen": 64, "alpha": 0.3}


def sees(i: int, j: int, n: int, t: int | None, case: dict[str, Any]) -> bool:
    """The recipe of the contract, one pair at a time."""
    c, w, tail = (case.get(name, 0) for name in ("contextual_len", "window", "full_tail"))
    m = n - (t or 0) - (c - 1 if c > 0 else 0)

    def position(x: int) -> int:
        u = max(x - c + 1, 0) if c > 0 else x
        return u if t is None else min(u, m)

    d = position(i) - position(j)
    d = d if case.get("causal", True) else abs(d)
    seen = i == j or d > 0
    if w > 0:
        seen = seen and (d <= w or (tail > 0 and position(i) >= m - tail))
    return seen or (c > 0 and position(i) == 0 and position(j) < m)


def seen_by_loops(targets: list[int] | None, case: dict[str, Any]) -> Tensor:
    """[T, T]."""
    tokens = OFFSETS[-1] + EXTRA
    found = torch.zeros(tokens, tokens, dtype=torch.bool)
    for n, (first, last) in enumerate(itertools.pairwise(OFFSETS)):
        for i, j in itertools.product(range(last - first), range(last - first)):
            found[first + i, first + j] = sees(i, j, last - first, None if targets is None else targets[n], case)
    return found


def weighed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factor: Tensor | float, scale: float) -> Tensor:
    """[S, H, Dv], each query and head over the keys that it sees. Differentiable."""
    rows = []
    for i in range(q.shape[0]):
        which = seen[i].nonzero().squeeze(-1)
        x = torch.einsum("jhd,hd->jh", k[which], q[i]) * scale
        p = x / (1.0 + torch.exp(-x))
        rows.append(
            torch.einsum("jh,jhd->hd", p * (factor[i, which, None] if isinstance(factor, Tensor) else factor), v[which])
        )
    return torch.stack(rows)


def tokens(width: int = 16, v_width: int = 8, heads: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, do."""
    generator = torch.Generator().manual_seed(width)
    shapes = [(OFFSETS[-1] + EXTRA, heads, n) for n in (width, width, v_width, v_width)]
    found = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    for t in found:
        t[OFFSETS[-1] :] = math.nan
    return found


def numbers(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def truth(targets: list[int] | None, case: dict[str, Any]) -> list[Tensor]:
    """o, dq, dk, dv in float64."""
    q, k, v, do = (torch.nan_to_num(t, nan=0.0) for t in tokens())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = weighed(*leaves, seen_by_loops(targets, case), 1.0 / SCALES["max_seqlen"], SCALES["alpha"])
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("causal", [True, False])
def test_intervals_are_the_mask(causal: bool) -> None:
    """Of every length, number of targets and option: what kernels walk is what the definition says, and both are the
    recipe taken pair by pair."""
    for c, w, tail, n in itertools.product((0, 1, 2, 5), (0, 1, 4), (0, 2), (1, 2, 4, 9)):
        i, length = torch.arange(n), torch.tensor(n)
        case = {"causal": causal, "contextual_len": c, "window": w, "full_tail": tail}
        rules = Rules(causal, c, w, tail)
        for t in (None, *range(n + 1)):
            targets = None if t is None else torch.tensor(t)
            seen = visible(i[:, None], i[None, :], length, targets, rules)
            low, high = (x[:, None] for x in spans(i, length, targets, rules))
            assert torch.equal(seen, ((i >= low) & (i < high)) | (i[:, None] == i)), (case, n, t)
            wanted = torch.tensor([[sees(a, b, n, t, case) for b in range(n)] for a in range(n)])
            assert torch.equal(seen, wanted), (case, n, t)


TILES = [(case, TARGETS) for case in CASES] + [(case, None) for case in CASES if len(case) < 2]


@pytest.mark.parametrize(("case", "targets"), TILES, ids=str)
def test_tiles_that_the_mask_cuts(case: dict[str, Any], targets: list[int] | None, device: str) -> None:
    """Forward and gradients of the definition, and by Triton in tiles so small that each sequence has several."""
    wanted = truth(targets, case)
    given = {"num_targets": None if targets is None else numbers(targets, device)}
    given["seq_offsets"] = numbers(OFFSETS, device)
    q, k, v, do = (t.float().to(device) for t in tokens())
    sizes = {"k_m": 16, "k_n": 16, "k_warps": 4, "k_stages": 1, "q_m": 16, "q_n": 16, "q_warps": 4, "q_stages": 1}
    configs = {"hstu_attention": [Config(m=16, n=16, tma=0, num_warps=4, num_stages=1)]}
    configs["hstu_attention_backward"] = [Config(**sizes, tma=0)]
    found = {}
    for name, config in configs.items():
        op = registry.op(name)
        options = {**op.usual, **SCALES, **{n: op.options[n] for n in Rules._fields}, **case}
        inputs = {n: {"q": q, "k": k, "v": v, "do": do, **given}.get(n) for n in op.tensors}
        made = op.reference(*inputs.values(), **options)
        found["definition", name] = list(made) if isinstance(made, tuple) else [made]
        (kernel,) = [x for x in registry.kernels_of(name) if x.backend == "triton"]
        run = bind(kernel, config[0], call_of(op, inputs, options, False), poison=True)
        found["triton", name] = list(run(*inputs.values()))
    for who in ("definition", "triton"):
        results = [*found[who, "hstu_attention"], *found[who, "hstu_attention_backward"]]
        for mine, theirs in zip(results, wanted, strict=True):
            torch.testing.assert_close(mine.cpu().double(), theirs, **CLOSE)
            assert not mine[OFFSETS[-1] :].any()


@each_backend
def test_a_scale_of_one_or_one_a_query_and_strided(backend: str, device: str) -> None:
    q, k, v, do = (t.float().to(device) for t in tokens())
    count = q.shape[0]
    each = torch.rand(2 * count, generator=torch.Generator().manual_seed(1)).to(device)[::2]

    def run(scale: Tensor | None) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with tw.use(check="never"):
            o = tw.hstu_attention(*leaves, numbers(OFFSETS, device), **SCALES, attn_scale=scale, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    plain = run(None)
    for scale in (torch.tensor(1 / 64, device=device), torch.full((1,), 1 / 64, device=device)):
        for a, b in zip(run(scale), plain, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    scaled = run(each)
    rows = slice(0, OFFSETS[-1])
    torch.testing.assert_close(scaled[0][rows], (plain[0] * 64 * each[:, None, None])[rows], **CLOSE)
    torch.testing.assert_close(scaled[1][rows], (plain[1] * 64 * each[:, None, None])[rows], **CLOSE)
    do *= 64 * each[:, None, None]  # dk and dv of scaled weights are those of scaled gradients
    for a, b in zip(scaled[2:], run(None)[2:], strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@each_backend
def test_dropout_goes_by_the_packed_token_and_the_place_in_the_sequence(backend: str, device: str) -> None:
    p, seed, offset = 0.4, torch.tensor([0x0123456789ABCDEF]), torch.tensor([(1 << 40) + 7])
    q, k, v, _ = (t.float() for t in tokens())
    count = q.shape[0]
    kept = ((random_words(count, 64, seed, offset) >> 8) >= threshold(p)).reshape(1, count, 64)
    seen, factor = seen_by_loops(None, {}), torch.zeros(1, count, count, dtype=torch.float64)
    for first, last in itertools.pairwise(OFFSETS):
        factor[:, first:last, first:last] = kept[:, first:last, : last - first] / (1 - p) / 64
    given = [torch.nan_to_num(t.double(), nan=0.0) for t in (q, k, v)]
    heads = [weighed(*(t[:, h : h + 1] for t in given), seen, factor[h], SCALES["alpha"]) for h in range(1)]
    with tw.use(check="never"):
        o = tw.hstu_attention(
            *(t.to(device) for t in (q, k, v)), numbers(OFFSETS, device), **SCALES, dropout_p=p, seed=seed.to(device),
            offset=offset.to(device), backend=backend,
        )  # fmt: skip
    torch.testing.assert_close(o.cpu().double(), torch.cat(heads, 1), **CLOSE)


def test_gradients_by_finite_differences() -> None:
    q, k, v, _ = (t[:60] for t in tokens(5, 3, 1))
    ends, targets = numbers([0, 37, 37, 55]), numbers([4, 0, 2])
    q, k, v = (t.detach().nan_to_num(nan=0.0).requires_grad_() for t in (q, k, v))
    options = {"num_targets": targets, "contextual_len": 2, "window": 9, "full_tail": 3, **SCALES}
    assert torch.autograd.gradcheck(lambda *t: tw.hstu_attention(*t, ends, **options), (q, k, v), fast_mode=True)
    a, b, c = (torch.randn(2, 7, 2, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))  # as long as wide
    mask = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: tw.silu_attention(*t, mask=mask, scale=0.4, post_scale=-2.0), (a, b, c))


@pytest.mark.parametrize("form", [(1, 1), (2, 3), (1, 3)])
@each_backend
def test_what_the_mask_excludes_reaches_nothing(form: tuple[int, int], backend: str, device: str) -> None:
    """A query that sees nothing and a key that nobody sees hold NaN and Inf; the mask of the others multiplies."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 33, 3, 16), (2, 70, 3, 16), (2, 70, 3, 8), (2, 33, 3, 8))
    q, k, v, do = (torch.randn(s, generator=generator) for s in shapes)
    mask = torch.randn(*form, 33, 70, generator=generator)
    mask[mask < -0.5] = 0.0
    mask[..., 20, :], mask[..., 5], mask[..., 69] = 0.0, 0.0, 0.0
    full = mask.expand(2, 3, 33, 70).double()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    each = [
        weighed(*(t[b, :, h : h + 1] for t in wide), full[b, h] != 0, full[b, h] * 0.7, 0.25)
        for b, h in itertools.product(range(2), range(3))
    ]
    o = torch.cat(each, 1).reshape(33, 2, 3, 8).transpose(0, 1)
    wanted = [o.detach(), *torch.autograd.grad(o, wide, do.double())]
    q[:, 20], do[:, 20], k[:, 5], v[:, 5], v[:, 69] = math.nan, math.inf, math.inf, math.nan, -math.inf
    leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
    with tw.use(check="never"):
        mine = tw.silu_attention(*leaves, mask=mask.to(device), scale=0.25, post_scale=0.7, backend=backend)
    found = [mine, *torch.autograd.grad(mine, leaves, do.to(device))]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, **CLOSE)


def test_float16_holds_neither_the_weights_nor_their_gradients(device: str) -> None:
    """Weights past 65504 beside small values, and gradients below 2^-24 beside large keys."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(4))
    q, k, v, do = q * 300, k * 300, v * 1e-3, do * 1e-4
    half = [t.half().to(device).requires_grad_() for t in (q, k, v)]
    wide = [t.detach().cpu().double().requires_grad_() for t in half]
    with tw.use(check="never"):
        o = tw.silu_attention(*half, scale=0.5, post_scale=1e-3, backend="triton")
    exact = tw.silu_attention(*wide, scale=0.5, post_scale=1e-3)
    grads = torch.autograd.grad(o, half, do.half().to(device))
    for mine, theirs in zip([o, *grads], [exact, *torch.autograd.grad(exact, wide, do.half().double())], strict=True):
        assert mine.isfinite().all()
        error = (mine.detach().cpu().double() - theirs.detach()).abs().max()
        assert error < 4e-3 * theirs.abs().max() + 1e-6, error


@each_backend
def test_minus_infinity_is_nan_and_no_tokens_are_none(backend: str, device: str) -> None:
    one = torch.ones(1, 1, 1, 16, device=device)
    with tw.use(check="never"):
        assert tw.silu_attention(one, one * -math.inf, one, backend=backend).isnan().all()
        q, k = (torch.randn(2, n, 2, 16, device=device) for n in (3, 0))
        none = tw.silu_attention(q, k, k)
        assert none.shape == (2, 3, 2, 16) and not none.any()
        q = torch.full((3, 2, 16), math.nan, device=device)
        o = tw.hstu_attention(q, q, q, numbers([0, 0, 0], device), **SCALES, backend=backend)
        assert not o.any()
        o = tw.hstu_attention(q[:0], q[:0], q[:0], numbers([0, 0], device), **SCALES)
        assert o.shape == (0, 2, 16)


@pytest.mark.parametrize("case", [{}, {"window": 7, "full_tail": 3, "contextual_len": 4}], ids=str)
def test_rivals_compute_the_same(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded in several groups, some of one sequence; sequences that are empty are in none."""
    monkeypatch.setattr(peers, "AT_A_TIME", 2 * 20 * 20 * 2)
    q, k, v, _ = (t.float() for t in tokens(heads=2))
    targets, factor = numbers([3, 0, 1, 5]), torch.rand(len(q))
    op = registry.op("hstu_attention")
    for each in (None, factor, factor[:1]):
        given = {"q": q, "k": k, "v": v, "seq_offsets": numbers(OFFSETS), "num_targets": targets, "attn_scale": each}
        options = {**op.usual, **SCALES, **case}
        (found,) = peers.PEERS["hstu_attention"]["torch"](given, options)()
        torch.testing.assert_close(found, op.reference(*given.values(), **options), **CLOSE)


def test_a_rival_is_checked_where_the_definition_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(
        ["silu_attention"], shapes=[(2, 9000, 5, 1, 8, 8)], dtypes=[torch.float32], passes=["backward"],
        device=torch.device("cpu"),
    )  # fmt: skip
    (peer,) = [p for p in peers_of(problem.owner) if p.name == "torch"]
    seen: list[tuple[int, ...]] = []
    define = Peer._defined

    def defined(self: Peer, problem: Problem, timed: Any) -> Any:
        seen.append(problem.shape)
        if len(seen) == 1:
            raise torch.OutOfMemoryError
        return define(self, problem, timed)

    monkeypatch.setattr(Peer, "_defined", defined)
    peer.check(problem, lambda: pytest.fail("the large one"), problem.inputs(0))
    assert math.prod(seen[1]) < math.prod(seen[0])
    wrong = replace(peer, maker=lambda t, o: lambda: 2.0 * peer.maker(t, o)()[0])
    seen.clear()
    with pytest.raises(NotImplementedError, match="something else"):
        wrong.check(problem, lambda: None, problem.inputs(0))


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("seq_offsets", {"seq_offsets": numbers([0, 12, 8, 16])}),
    ("seq_offsets", {"seq_offsets": numbers([0, 200])}),
    ("max_seqlen", {"max_seqlen": 36}),
    ("max_seqlen", {"max_seqlen": 0}),
    ("num_targets", {"num_targets": numbers([38, 0, 0, 0])}),
    ("num_targets", {"num_targets": numbers([1])}),
    ("attn_scale", {"attn_scale": torch.ones(7)}),
    ("attn_scale", {"attn_scale": torch.ones(1, dtype=torch.float16)}),
    ("window", {"window": -1}),
    ("dropout_p", {"dropout_p": 1.5}),
    ("offset", {"dropout_p": 0.5, "offset": torch.tensor([1])}),
)


@pytest.mark.parametrize(("name", "changed"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused(name: str, changed: dict[str, Any]) -> None:
    q, k, v, _ = (t.float() for t in tokens())
    options = {"seq_offsets": numbers(OFFSETS), **SCALES, **changed}
    with pytest.raises(tw.InvalidArgument, match=f"^{'hstu_attention'}.*{name}"):
        tw.hstu_attention(q, k, v, **options)


def test_a_mask_is_no_boolean_and_has_no_gradient() -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(tw.InvalidArgument, match="mask"):
        tw.silu_attention(q, q, q, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises((tw.NoGradient, tw.InvalidArgument), match="mask"):
        tw.silu_attention(q, q, q, mask=torch.ones(1, 1, 4, 4, requires_grad=True))


def test_a_context_beyond_32_bits_is_refused_after_one_that_is_not() -> None:
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 3, 6])
    for length in (2, 1 << 30):
        tw.hstu_attention(q, k, v, seq_offsets=starts, max_seqlen=8, alpha=0.5, contextual_len=length)
    with pytest.raises(tw.InvalidArgument, match="contextual_len: 4294967296; takes up to 1073741824"):
        tw.hstu_attention(q, k, v, seq_offsets=starts, max_seqlen=8, alpha=0.5, contextual_len=1 << 32)
    with pytest.raises(tw.InvalidArgument, match=r"v: shape \[6, 2, 0\]; heads must not be empty"):
        tw.hstu_attention(q, k, v[..., :0], seq_offsets=starts, max_seqlen=8, alpha=0.5)
