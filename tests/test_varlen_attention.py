"""Edges of packed attention: documents apart from each other, empty ones, none at all, tokens behind the last one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from attention_calls import STATE, by_loops, each_backend, kept_by_words, made, run, seen_by_loops
from tilewright.core import registry
from tilewright.core.call import TensorFacts
from tilewright.core.device import target_device
from tilewright.core.launch import launches_of

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
DOCUMENTS: dict[str, tuple[list[int], list[int]]] = {
    "self": ([0, 3, 3, 12, 17], [0, 3, 3, 12, 17]),
    "of one token or none": ([0, 0, 1, 1, 2], [0, 0, 1, 1, 2]),
    "queries without keys, keys without queries": ([0, 4, 4, 6], [0, 0, 5, 9]),
    "fewer queries than keys": ([0, 1, 3, 4], [0, 9, 14, 30]),
    "more queries than keys": ([0, 9, 14, 30], [0, 1, 3, 4]),
    "tokens behind the last": ([0, 2, 5], [0, 6, 7]),
}
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "align": "bottom_right"},
    {"window": (2, 1), "align": "top_left"},
    {"prefix_rows": 1, "prefix_kv_len": 2},
)
EXTRA = 3
"""Tokens behind the last document, whose keys are NaN."""


def packed(starts: list[int], other: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, v = (t[0] for t in made(1, starts[-1] + EXTRA, other[-1] + EXTRA, heads=4, groups=2, dtype=dtype))
    k[other[-1] :], v[other[-1] :] = math.nan, math.nan
    return [q, k, v]


def document(tensors: list[Tensor], spans: tuple[slice, slice]) -> list[Tensor]:
    q, k, v = tensors
    return [q[spans[0]][None], k[spans[1]][None], v[spans[1]][None]]


def spans_of(starts: list[int], other: list[int]) -> list[tuple[slice, slice]]:
    return [(slice(*starts[n : n + 2]), slice(*other[n : n + 2])) for n in range(len(starts) - 1)]


def numbers(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("name", DOCUMENTS)
@each_backend
def test_each_document_is_attended_to_alone(name: str, rules: dict[str, Any], backend: str, device: str) -> None:
    starts, other = DOCUMENTS[name]
    tensors = [t.to(device) for t in packed(starts, other)]
    ends = {"cu_seqlens_q": numbers(starts), "cu_seqlens_k": numbers(other, torch.int64)}
    o, lse = (t.cpu().double() for t in run(*tensors, backend=backend, **ends, **rules))
    for spans in spans_of(starts, other):
        q, k, v = (t.cpu().double() for t in document(tensors, spans))
        wanted = by_loops(q, k, v, seen_by_loops(1, 4, q.shape[1], k.shape[1], rules)) if q.shape[1] else None
        if wanted is not None:
            torch.testing.assert_close((o[spans[0]], lse[:, spans[0]]), (wanted[0][0], wanted[1][0]), **CLOSE)
    assert not o[starts[-1] :].any() and lse[:, starts[-1] :].eq(-math.inf).all()


@each_backend
def test_no_documents_and_no_tokens(backend: str, device: str) -> None:
    none = numbers([0]).to(device)
    q, k, v = (t[0].to(device) for t in made(1, 3, 5, heads=4, groups=2))
    o, lse = run(q, k, v, cu_seqlens_q=none, cu_seqlens_k=none, backend=backend)
    assert not o.any() and lse.eq(-math.inf).all()
    empty = numbers([0, 0, 0]).to(device)
    o, lse = run(q[:0], k, v, cu_seqlens_q=empty, cu_seqlens_k=empty, backend=backend)
    assert o.shape == (0, 4, 16) and lse.shape == (4, 0)
    o, lse = run(q, k[:0], v[:0], cu_seqlens_q=numbers([0, 3, 3]).to(device), cu_seqlens_k=empty, backend=backend)
    assert not o.any() and lse.eq(-math.inf).all()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_gradients_are_those_of_each_document(name: str) -> None:
    """0 behind the last one, whatever lies there."""
    starts, other = DOCUMENTS[name]
    tensors = packed(starts, other, torch.float64)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    alone = [t.detach().clone().requires_grad_() for t in tensors]
    ends = {"cu_seqlens_q": numbers(starts), "cu_seqlens_k": numbers(other)}
    o = tw.attention(*leaves, causal=True, align="bottom_right", **ends)
    upstream = torch.randn_like(o)
    o.backward(upstream)
    for spans in spans_of(starts, other):
        found = tw.attention(*document(alone, spans), causal=True, align="bottom_right")
        found.backward(upstream[spans[0]][None])
    for mine, theirs, last in zip(leaves, alone, (starts[-1], other[-1], other[-1]), strict=True):
        expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, expected)
        assert not mine.grad[last:].any()


@each_backend
def test_dropout_goes_by_the_packed_token_and_the_place_in_the_document(backend: str, device: str) -> None:
    starts, heads, p = [0, 3, 3, 8], 2, 0.4
    q, k = torch.zeros(8, heads, 16, device=device), torch.zeros(8, 1, 16, device=device)
    v = torch.zeros(8, 1, 16, device=device)
    for span, _ in spans_of(starts, starts):
        n = span.stop - span.start
        v[span, 0, :n] = torch.eye(n, device=device)
    seed, offset = STATE
    ends = {"cu_seqlens_q": numbers(starts), "cu_seqlens_k": numbers(starts)}
    o, _ = run(q, k, v, dropout_p=p, seed=seed, offset=offset, backend=backend, **ends)
    keep = kept_by_words(heads * 8, 8, p, seed, offset).reshape(heads, 8, 8)
    for span, _ in spans_of(starts, starts):
        n = span.stop - span.start
        wanted = keep[:, span, :n].transpose(0, 1).float() / (n * (1 - p)) if n else torch.zeros(0, heads, 0)
        torch.testing.assert_close(o.cpu()[span, :, :n], wanted)


def test_one_tensor_of_starts_says_that_lengths_are_equal() -> None:
    """So `align` may be left out."""
    starts = numbers([0, 2, 7])
    q, k, v = (t[0] for t in made(1, 7, 7))
    o = tw.attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    expected = tw.varlen_attention(q, k, v, starts, starts, causal=True, align="bottom_right")[0]
    torch.testing.assert_close(o, expected)
    with pytest.raises(tw.InvalidArgument, match="align: None"):
        tw.attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts.clone())


def test_many_documents_and_heads_fit_the_grid() -> None:
    """Of 2048 documents and 32 heads all programs are in the first dimension, the one that holds 2^31."""
    op, dtype = registry.op("varlen_attention"), torch.bfloat16
    shapes = {"q": (1 << 20, 32, 128), "k": (1 << 20, 8, 128), "v": (1 << 20, 8, 128)}
    facts = {n: TensorFacts.dense(n, s, dtype) for n, s in shapes.items()}
    facts |= {n: TensorFacts.dense(n, (2049,), torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    call = op.call({n: facts.get(n) for n in op.tensors}, op.usual, target_device("sm_90"))
    for kernel in [k for k in registry.kernels_of(op.name) if k.backend == "triton"]:
        assert not kernel.capability.reasons(call)
        for launch in launches_of(kernel.load()(call, kernel.configs_for(call)[0])):
            assert launch.grid[1:] == (1, 1) and launch.grid[0] < 2**31


def test_under_torch_compile() -> None:
    starts = numbers([0, 3, 3, 9])

    def layer(*tensors: Tensor) -> Tensor:
        return tw.attention(*tensors, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts).sin()

    leaves = [t[0].requires_grad_() for t in made(1, 9, 9)]
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, layer))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([0, 12, 8, 16], r"cu_seqlens_q: \[0, 12, 8, 16\]; starts at 0, never decreases"),
        ([1, 4, 8, 16], "starts at 0"),
        ([0, 4, 8, 17], "ends at or before 16"),
    ],
)
def test_starts_that_cannot_be(starts: list[int], words: str) -> None:
    q, k, v = (t[0] for t in made(1, 16, 16))
    with pytest.raises(tw.InvalidArgument, match=words):
        tw.attention(q, k, v, cu_seqlens_q=numbers(starts), cu_seqlens_k=numbers([0, 4, 8, 16]))


def test_refusals() -> None:
    q, k, v = (t[0] for t in made(1, 6, 6))
    both = {"cu_seqlens_q": numbers([0, 2, 6]), "cu_seqlens_k": numbers([0, 2, 6])}
    with pytest.raises(tw.InvalidArgument, match="max_seqlen_q: 3; a sequence has 4"):
        tw.attention(q, k, v, max_seqlen_q=3, **both)
    with pytest.raises(tw.InvalidArgument, match="kv_len: given with cu_seqlens"):
        tw.attention(q, k, v, kv_len=numbers([6]), **both)
    with pytest.raises(tw.InvalidArgument, match="mask: given with cu_seqlens"):
        tw.attention(q, k, v, mask=torch.ones(1, 1, 6, 6) > 0, **both)
    with pytest.raises(tw.InvalidArgument, match=r"cu_seqlens_k: .*one N for queries and keys"):
        tw.attention(q, k, v, cu_seqlens_q=both["cu_seqlens_q"], cu_seqlens_k=numbers([0, 6]))
    with pytest.raises(tw.InvalidArgument, match="cu_seqlens_q: dtype fp32"):
        tw.attention(q, k, v, **{n: t.float() for n, t in both.items()})
    with pytest.raises(tw.InvalidArgument, match=r"q: shape .*needs \[T, H, D\]"):
        tw.attention(q[None], k, v, **both)
    with pytest.raises(tw.InvalidArgument, match=r"max_seqlen_k: .*64 bits"):
        tw.attention(q, k, v, max_seqlen_k=1 << 70, **both)


def test_errors_name_what_was_called() -> None:
    """The function and its arguments; or the op and its options."""
    q, k, v = (t[0] for t in made(1, 6, 6))
    starts, short = numbers([0, 2, 6]), numbers([0, 2, 9])
    for bad, words, own in (
        ({"window": (-2, 0)}, "window: -2", {"window_left": -2}),
        ({"prefix_rows": 1}, "prefix_kv_len: None", {"prefix_rows": 1}),
        ({"max_seqlen_q": 1}, "max_seqlen_q: 1; a sequence has 4", {"max_seqlen_q": 1}),
        ({"dropout_p": -1.0}, "dropout_p: -1.0", {"dropout_p": -1.0}),
    ):
        with pytest.raises(tw.InvalidArgument, match=f"^attention: {words}"):
            tw.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **bad)
        theirs = words.replace("window:", "window_left:").replace("prefix_kv_len", "prefix_kv")
        with pytest.raises(tw.InvalidArgument, match=f"^varlen_attention: {theirs}"):
            tw.varlen_attention(q, k, v, starts, starts, align="top_left", **own)
    with pytest.raises(tw.InvalidArgument, match=r"^attention: cu_seqlens_k: "):
        tw.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=short)
    with pytest.raises(tw.InvalidArgument, match=r"^varlen_attention: cu_seqlens_k: "):
        tw.varlen_attention(q, k, v, starts, short)
