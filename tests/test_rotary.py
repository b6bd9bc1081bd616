"""The rotary family: values against torch as others write it, partial tables, positions, overwritten caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewright as tw
from tilewright.core import node, registry
from tilewright.verify.cases import make_inputs

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreted)]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Conformance has the checks of first use; each takes an interpreter longer than these tests do."""
    with tw.use(check="never"):
        yield


HEADS: dict[str, Any] = {"q_heads": 4, "kv_heads": 2}


def tables(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models of Hugging Face have it: whole tables [S, D], of two equal halves."""
    first, second = x.chunk(2, -1)
    c, s = (torch.cat([t, t], -1).unsqueeze(-2) for t in (cos, sin))
    return x * c + torch.cat([-second, first], -1) * s


def complex_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-J and the first Llama have it: a pair is a complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin).unsqueeze(-2)).flatten(-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("style", "other"), [("half", rotate_half), ("interleaved", complex_turn)])
def test_both_styles_are_what_models_compute(style: str, other: Any, backend: str) -> None:
    x = torch.randn(2, 5, 3, 16)
    cos, sin = tables(9, 8)
    found = tw.rope(x, cos, sin, style=style, backend=backend)
    torch.testing.assert_close(found, other(x, cos[:5], sin[:5]))
    ids = torch.randint(0, 9, (2, 5))
    found = tw.rope(x, cos, sin, ids, style=style, backend=backend)
    torch.testing.assert_close(found, other(x, cos[ids], sin[ids]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_part_of_a_head_is_turned_and_the_rest_copied(style: str, backend: str) -> None:
    x = torch.randn(2, 5, 3, 22)
    cos, sin = tables(5, 4)
    found = tw.rope(x, cos, sin, style=style, backend=backend)
    assert torch.equal(found[..., 8:], x[..., 8:])
    alone = tw.rope(x[..., :8], cos, sin, style=style, backend=backend)
    assert torch.equal(found[..., :8], alone) and not torch.equal(alone, x[..., :8])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_both_is_two_views(backend: str) -> None:
    """FlashRT's [S, D]: cosine and sine of each pair side by side."""
    cos, sin = tables(5, 8)
    both = torch.stack([cos, sin], -1).flatten(1)
    x = torch.randn(2, 5, 3, 16)
    found = tw.rope(x, both[:, 0::2], both[:, 1::2], style="interleaved", backend=backend)
    assert torch.equal(found, tw.rope(x, cos, sin, style="interleaved", backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_outside_the_tables_are_nan_and_get_no_gradient(backend: str) -> None:
    cos, sin = tables(4, 8)
    ids = torch.tensor([[0, -1, 3, 4, torch.iinfo(torch.int64).max]])
    bad = torch.tensor([False, True, False, True, True])
    x = torch.randn(1, 5, 2, 16, requires_grad=True)
    y = tw.rope(x, cos, sin, ids, style="half", backend=backend)
    assert torch.equal(y[0].isnan().all(-1).all(-1), bad) and torch.equal(y[0].isnan().any(-1).any(-1), bad)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert (dx[0][bad] == 0).all() and (dx[0][~bad] != 0).any(-1).all()
    q, k, v = tw.qkv_split_rope(
        torch.randn(1, 5, 128), cos, sin, None, None, ids, style="half", backend=backend, **HEADS
    )
    assert torch.equal(q[0].isnan().any(-1).any(-1), bad) and torch.equal(k[0].isnan().any(-1).any(-1), bad)
    assert not v.isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [16, 22])
@pytest.mark.parametrize("held", [math.nan, math.inf])
def test_what_a_token_without_a_position_holds_reaches_no_gradient(held: float, width: int, backend: str) -> None:
    """Tokens that pad a batch hold anything; their gradients are 0, and those of the norms as without them."""
    cos, sin = tables(4, 8)
    ids = torch.tensor([[0, -1, 3, 4, 1]])
    bad = torch.tensor([False, True, False, True, False])
    found = []
    for kept in (slice(None), ~bad):
        torch.manual_seed(0)
        qkv = torch.randn(1, 5, 8 * width)
        qkv[:, bad, 3:] = held
        qkv, norms = qkv[:, kept].requires_grad_(), [torch.ones(width, requires_grad=True) for _ in range(2)]
        q, k, _ = tw.qkv_split_rope(qkv, cos, sin, *norms, ids[:, kept], style="half", backend=backend, **HEADS)
        found.append(torch.autograd.grad([q, k], [qkv, *norms], [torch.ones_like(q), torch.ones_like(k)]))
    (dqkv, *weights), (clean, *expected) = found
    assert (dqkv[:, bad] == 0).all()
    torch.testing.assert_close([dqkv[:, ~bad], *weights], [clean, *expected])


def test_positions_that_the_host_knows_are_refused() -> None:
    """Without position_ids the rows are 0 and on, and the shapes tell whether the tables have them; a split alone needs
    none."""
    cos, sin = tables(4, 8)
    x, qkv = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 128)
    for call in (
        lambda: tw.rope(x, cos, sin, style="half"),
        lambda: tw.rope_backward(x, cos, sin, style="half"),
        lambda: tw.qkv_split_rope(qkv, cos, sin, style="half", **HEADS),
    ):
        with pytest.raises(tw.InvalidArgument, match=r"cos: 4 rows; .* has sequences of 5 tokens"):
            call()
    assert tw.rope(x[:, :4], cos, sin, style="half").isfinite().all()
    assert tw.qkv_split_rope(qkv, style="half", **HEADS)[0].isfinite().all()
    cache = torch.zeros(1, 4, 2, 16)
    with pytest.raises(tw.InvalidArgument, match="k_cache: 4 rows; qkv has sequences of 5 tokens"):
        tw.qkv_split_rope_append(qkv, cache, cache.clone(), torch.tensor([0]), style="half", **HEADS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_alone_and_with_norms(backend: str) -> None:
    qkv = torch.randn(2, 5, 8 * 16)
    q, k, v = qkv.unflatten(-1, (8, 16)).split([4, 2, 2], -2)
    found = tw.qkv_split_rope(qkv, style="half", backend=backend, **HEADS)
    assert all(torch.equal(f, e) and f.is_contiguous() for f, e in zip(found, (q, k, v), strict=True))
    cos, sin = tables(5, 8)
    w = torch.randn(16)
    found = tw.qkv_split_rope(qkv, cos, sin, w, None, style="half", norm_offset=1.0, backend=backend, **HEADS)
    norm = torch.nn.functional.rms_norm(q, (16,), w + 1.0, 1e-6)
    torch.testing.assert_close(found[0], rotate_half(norm, cos, sin))
    torch.testing.assert_close(found[1], rotate_half(k, cos, sin))


@pytest.mark.interpreted
@pytest.mark.parametrize("width", [64, 160])
def test_every_config_gives_the_same_gradients(width: int) -> None:
    """Whole heads and walked ones, one tile of many tokens and many of one: the sums over tokens too."""
    from tilewright.core.launch import Config
    from tilewright.core.plan import bind
    from tilewright.verify.check import call_of

    op = registry.op("qkv_split_rope_backward")
    inputs = make_inputs(op, (3, width), torch.float32)
    options = {**op.usual, "q_heads": 2, "kv_heads": 1}
    call = call_of(op, inputs, options, False)
    expected = op.reference(*inputs.values(), **options)
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.backend == "triton"]
    for config in (
        Config(elements=64, heads=1, num_warps=1, per_sm=1),
        Config(elements=512, heads=4, num_warps=4, per_sm=2),
    ):
        found = bind(kernel, config, call, poison=True)(*inputs.values())
        torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-5)


def test_what_the_contract_refuses() -> None:
    cos, sin = tables(4, 8)
    x = torch.randn(2, 3, 2, 16)
    for call, words in (
        (lambda: tw.rope(x, cos, sin), "style"),
        (lambda: tw.rope(x, cos, sin, style="neox"), "style: 'neox'; takes 'half', 'interleaved'"),
        (lambda: tw.rope(x[0, 0], cos, sin, style="half"), r"x: shape \[2, 16\]; needs \[..., S, H, D\]"),
        (lambda: tw.rope(x[..., :14], cos, sin, style="half"), "cos: shape .*R at most 14"),
        (lambda: tw.rope(x, cos, sin[:3], style="half"), "sin: shape"),
        (lambda: tw.rope(x, cos, sin.half(), style="half"), "sin: dtype"),
        (
            lambda: tw.rope(x, cos, sin, torch.zeros(3, dtype=torch.int64), style="half"),
            r"position_ids: .*expand\(2, 3\)",
        ),
        (lambda: tw.rope(x, cos, sin, torch.zeros(2, 3), style="half"), "position_ids: dtype fp32; takes int64, int32"),
        (lambda: tw.qkv_split_rope(torch.randn(2, 3, 100), style="half", **HEADS), r"8 D\]: 8 heads"),
        (lambda: tw.qkv_split_rope(torch.randn(2, 3, 128), cos, style="half", **HEADS), "sin: None, while cos"),
    ):
        with pytest.raises((tw.InvalidArgument, TypeError), match=words):
            call()


# The cache -----------------------------------------------------------------------------------------------------------


def cached(pos: list[int], tokens: int = 3, rows: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    cos, sin = tables(16, 8, torch.float32)
    return {
        "qkv": torch.randn(len(pos), tokens, 8 * 16, dtype=dtype),
        "k_cache": torch.randn(len(pos), rows, 2, 16, dtype=dtype),
        "v_cache": torch.randn(len(pos), rows, 2, 16, dtype=dtype),
        "pos": torch.tensor(pos, dtype=torch.int32),
        "cos": cos,
        "sin": sin,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strided", [False, True])
def test_append_is_split_and_a_loop_over_rows(strided: bool, backend: str) -> None:
    given = cached([0, 5, 6, -2])  # the third leaves the cache, the last begins before it
    kept = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    ids = given["pos"].long().unsqueeze(1) + torch.arange(3)
    q, k, v = tw.qkv_split_rope(given["qkv"], given["cos"], given["sin"], None, None, ids, style="half", **HEADS)
    for b, start in enumerate(given["pos"].tolist()):
        for s in range(3):
            if 0 <= start + s < 8:
                kept["k_cache"][b, start + s], kept["v_cache"][b, start + s] = k[b, s], v[b, s]
            else:
                q[b, s] = torch.nan
    wide = {n: torch.full((4, 8, 2, 40), 7.0) for n in kept}
    if strided:
        for n in kept:
            wide[n][..., :16] = given[n]
            given[n] = wide[n][..., :16]
    plain = tw.qkv_split_rope_append(*given.values(), style="half", backend=backend, **HEADS)
    found = tw.qkv_split_rope_append_(*given.values(), style="half", backend=backend, **HEADS)
    assert found[1] is given["k_cache"] and found[2] is given["v_cache"]
    for got, same, want in zip(found, plain, (q, kept["k_cache"], kept["v_cache"]), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(got.nan_to_num(), same.nan_to_num())
    if strided:
        assert all((w[..., 16:] == 7.0).all() for w in wide.values()), "memory between the rows was written"


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_token_by_token_is_a_prefill(backend: str) -> None:
    given = cached([0, 0], tokens=4)
    ways = {**given, **{n: given[n].clone() for n in ("k_cache", "v_cache")}}
    whole, _, _ = tw.qkv_split_rope_append_(*given.values(), style="half", backend=backend, **HEADS)
    parts = []
    for s in range(4):
        ways["qkv"], ways["pos"] = given["qkv"][:, s : s + 1], torch.full((2,), s, dtype=torch.int32)
        parts.append(tw.qkv_split_rope_append_(*ways.values(), style="half", backend=backend, **HEADS)[0])
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(ways["k_cache"], given["k_cache"]) and torch.equal(ways["v_cache"], given["v_cache"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_tables_may_be_others_than_of_the_cache(backend: str) -> None:
    given = cached([2, 3])
    apart = torch.tensor([9, 15], dtype=torch.int32)  # the last two tokens of the second have no row
    q, k, _ = tw.qkv_split_rope_append(*given.values(), None, None, apart, style="half", backend=backend, **HEADS)
    assert torch.equal(q.isnan().any(-1).any(-1), torch.tensor([[False] * 3, [False, True, True]]))
    assert k[1, 4:6].isnan().all() and not k[1, :4].isnan().any() and not k[0].isnan().any()


@pytest.mark.parametrize("kind", [None, pytest.param("triton", marks=pytest.mark.interpreted)])
def test_the_caches_count_a_change_and_nothing_else_does(kind: str | None) -> None:
    given = cached([0, 1])
    before = {n: t._version for n, t in given.items()}
    for call in (
        tw.qkv_split_rope_append_,
        lambda *t, **o: node.call(tw.qkv_split_rope_append_, t_all(t), o_all(o), kind),
    ):
        call(*given.values(), style="half", **HEADS)
        for n, t in given.items():
            assert (t._version > before[n]) is n.endswith("cache"), n
        before = {n: t._version for n, t in given.items()}


def t_all(tensors: tuple[Any, ...]) -> list[Any]:
    return [*tensors, *[None] * (len(tw.qkv_split_rope_append.tensors) - len(tensors))]


def o_all(options: dict[str, Any]) -> dict[str, Any]:
    return {**tw.qkv_split_rope_append.usual, **options}


def test_caches_that_cannot_be_overwritten_are_refused() -> None:
    given = cached([0, 1])
    call = lambda **other: tw.qkv_split_rope_append_(*{**given, **other}.values(), style="half", **HEADS)  # noqa: E731
    with pytest.raises(tw.InvalidArgument, match=r"k_cache: strides .* in one place"):
        call(k_cache=given["k_cache"][:1].expand(2, 8, 2, 16))
    with pytest.raises(tw.InvalidArgument, match="k_cache: shares memory with v_cache"):
        call(v_cache=given["k_cache"])
    both = torch.randn(2, 2, 8, 2, 16)
    call(k_cache=both[:, 0], v_cache=both[:, 1])
    with pytest.raises(tw.InvalidArgument, match="v_cache: shape"):
        call(v_cache=given["v_cache"][:, :7])
    with pytest.raises(tw.InvalidArgument, match=r"k_cache: shape .*; needs \[2, Smax, 2, 16\]"):
        call(k_cache=given["k_cache"][..., :8])
    with pytest.raises(tw.NoGradient, match="qkv_split_rope_append_ has no gradient"):
        call(qkv=given["qkv"].clone().requires_grad_())


def test_graphs_see_caches_that_are_overwritten() -> None:
    given = cached([0, 1])
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(t) for t in given.values()]
        found = tw.qkv_split_rope_append_(*faked, style="half", **HEADS)
    assert found[1] is faked[1] and found[2] is faked[2] and found[0].shape == (2, 3, 4, 16)
    overload = torch.ops.tilewright.qkv_split_rope_append_.default
    assert [a.alias_info is not None for a in overload._schema.arguments[:4]] == [False, True, True, False]
    torch.library.opcheck(overload, tuple(t_all(tuple(given.values()))), node.plain(o_all({"style": "half", **HEADS})))
    step = lambda *t: tw.qkv_split_rope_append_(*t, style="half", **HEADS)[0] + t[1].sum()  # noqa: E731
    other = {n: t.clone() for n, t in given.items()}
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(*given.values())
    torch.testing.assert_close(found, step(*other.values()))
    assert torch.equal(given["k_cache"], other["k_cache"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(), (2,), (0,)])
def test_no_tokens_leave_caches_as_they_are(lead: tuple[int, ...], backend: str) -> None:
    cos, sin = tables(4, 8)
    norm, pos = torch.ones(16), torch.zeros(lead, dtype=torch.int32)
    k, v = (torch.randn(*lead, 5, 4, 16)[..., :2, :] for _ in range(2))
    before = k.clone(), v.clone()
    how: dict[str, Any] = {"style": "half", "backend": backend, **HEADS}
    for given in ((pos, cos, sin, norm, norm), (pos,)):
        q, *found = tw.qkv_split_rope_append(torch.randn(*lead, 0, 128), k, v, *given, **how)
        assert q.shape == (*lead, 0, 4, 16) and all(map(torch.equal, found, before))
        assert all(f.is_contiguous() for f in found)
        q, *found = tw.qkv_split_rope_append_(torch.randn(*lead, 0, 128), k, v, *given, **how)
        assert q.shape == (*lead, 0, 4, 16) and found[0] is k and found[1] is v
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_no_tokens_have_gradients(shape: tuple[int, int], backend: str) -> None:
    """Of norms they are 0."""
    cos, sin = tables(4, 8)
    ids = torch.zeros(shape, dtype=torch.int64)
    for given in (ids, None):
        x, qkv, norm = torch.randn(*shape, 3, 16), torch.randn(*shape, 128), torch.ones(16)
        for t in (x, qkv, norm):
            t.requires_grad_()
        y = tw.rope(x, cos, sin, given, style="interleaved", backend=backend)
        q, k, v = tw.qkv_split_rope(qkv, cos, sin, norm, None, given, style="half", backend=backend, **HEADS)
        assert y.shape == x.shape and q.shape == (*shape, 4, 16) and k.shape == v.shape == (*shape, 2, 16)
        dx, dqkv, dnorm = torch.autograd.grad([y.sum(), q.sum(), v.sum()], [x, qkv, norm])
        assert dx.shape == x.shape and dqkv.shape == qkv.shape and torch.equal(dnorm, torch.zeros(16))
    without = tw.rope(torch.randn(*shape, 0, 16), cos, sin, style="half", backend=backend)
    assert without.shape == (*shape, 0, 16)
