"""Edges of the residual contracts: random numbers against published ones, masks, broadcast gates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tilewright.core import registry
from tilewright.core.classes import layout_class
from tilewright.ops.residual.philox import philox, random_words, threshold
from tilewright.verify.cases import make_inputs
from tilewright.verify.check import call_of

BACKENDS = ["reference", "triton"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
ALL = 0xFFFFFFFF
PUBLISHED = [  # Random123's known answers for philox4x32, 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL,) * 4, (ALL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


def number(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def mask_of(rows: int, columns: int, p: float, seed: Tensor, offset: Tensor, backend: str) -> Tensor:
    x = torch.ones(rows, columns)
    y = tw.dropout_add(x, torch.zeros_like(x), p=p, seed=seed, offset=offset, backend=backend)
    assert set(y.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))}
    return y != 0


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_words_are_the_published_ones(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    found = philox(tuple(map(number, counter)), tuple(map(number, key)))  # type: ignore[arg-type]
    assert tuple(int(w) for w in found) == words


def test_an_element_has_the_word_of_its_row_and_column() -> None:
    """The seed's halves are the key; offset + column // 4 and the row, 64 bits each, the counter."""
    seed, start = number(0x0123456789ABCDEF), (1 << 40) + 7
    found = random_words(3, 11, seed, number(start))
    for row, column in ((0, 0), (1, 5), (2, 10)):
        low = start + column // 4
        counter = (number(low & ALL), number(low >> 32), number(row), number(0))
        words = philox(counter, (number(0x89ABCDEF), number(0x01234567)))
        assert found[row, column] == words[column % 4]


@each_backend
@pytest.mark.parametrize("offset", [0, (1 << 31) + 5, (1 << 32) - 1, -1, (1 << 63) - 1])
def test_offsets_are_64_bits_and_may_wrap(offset: int, backend: str) -> None:
    """The counter of the second group of columns is one more, whatever the carry."""
    seed = number(-(1 << 62) + 12345)
    found = mask_of(5, 64, 0.5, seed, number(offset), backend)
    following = offset + 1 if offset < (1 << 63) - 1 else -(1 << 63)
    assert torch.equal(mask_of(5, 60, 0.5, seed, number(following), backend), found[:, 4:])
    assert torch.equal(found, mask_of(5, 64, 0.5, seed, number(offset), "reference"))


@each_backend
def test_the_mask_depends_on_neither_width_nor_strides(backend: str) -> None:
    seed, offset = number(99), number(3)
    wide = mask_of(9, 301, 0.3, seed, offset, backend)
    assert torch.equal(mask_of(9, 130, 0.3, seed, offset, backend), wide[:, :130])
    for x in (torch.ones(9, 400)[:, 50:351], torch.ones(3, 3, 301)):
        zero = torch.zeros(x.shape)
        y = tw.dropout_add(x, zero, p=0.3, seed=seed, offset=offset, backend=backend)
        assert torch.equal(y.reshape(9, 301) != 0, wide)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_stays_is_1_minus_p_and_calls_do_not_collide(p: float) -> None:
    """Within 5 standard deviations; masks of two seeds, offsets or rows agree as often as chance has it."""
    rows, columns = 256, 1024
    used = columns // 4
    first = mask_of(rows, columns, p, number(1), number(0), "reference")
    others = [
        mask_of(rows, columns, p, number(2), number(0), "reference"),
        mask_of(rows, columns, p, number(1), number(used), "reference"),
        mask_of(rows, columns, p, number(1), number((1 << 31) + used), "reference"),
        first.roll(1, 0),
    ]
    count = rows * columns
    for mask in (first, *others):
        assert abs(float(mask.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / count)
    agree = p * p + (1 - p) * (1 - p)
    for mask in others:
        # neighbouring pairs share elements where a mask is compared with itself, shifted: hence the root of 2
        assert abs(float((mask == first).double().mean()) - agree) < 5 * math.sqrt(2 * agree * (1 - agree) / count)


def test_the_probability_is_a_float32() -> None:
    """u >= p, of u with 24 bits: as integers, so that no backend and no float64 oracle can see it otherwise."""
    for p in (0.1, 0.25, 1e-9, 1 - 2.0**-24, 1.0):
        least, single = threshold(p), float(torch.tensor(p, dtype=torch.float32))
        assert least * 2.0**-24 >= single and (least - 1) * 2.0**-24 < single
    assert (threshold(0.0), threshold(1.0)) == (0, 1 << 24)


# dropout_add ----------------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_edges_of_p(p: float, backend: str) -> None:
    """What is dropped counts as 0, also an infinity or NaN; of p = 1 there is no 0 / 0."""
    x, residual = torch.randn(2, 6, 40).unbind()
    x = x.clone()
    x[0, :20], x[1, :20] = math.inf, math.nan
    x.requires_grad_()
    seed, offset = number(5), number(0)
    y = tw.dropout_add(x, residual, p=p, seed=seed, offset=offset, backend=backend)
    keep = mask_of(6, 40, p, seed, offset, "reference") if 0 < p < 1 else torch.full((6, 40), p == 0)
    larger = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(y, residual + torch.where(keep, x.detach() * larger, 0.0), equal_nan=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, torch.where(keep, larger, 0.0))


def test_without_training_nothing_is_drawn() -> None:
    x, residual = torch.randn(2, 6, 40).unbind()
    before = torch.get_rng_state()
    assert torch.equal(tw.dropout_add(x, residual, p=0.5, training=False), x + residual)
    assert torch.equal(tw.dropout_add(x, residual, p=0.0), x + residual)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_come_from_torchs_generator() -> None:
    x = torch.ones(8, 64)

    def draw() -> Tensor:
        return tw.dropout_add(x, torch.zeros_like(x), p=0.5)

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_makes_the_same_mask_again(reentrant: bool) -> None:
    x, residual = torch.ones(8, 64, requires_grad=True), torch.zeros(8, 64)
    y = checkpoint(lambda x: tw.dropout_add(x, residual, p=0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_compiled_without_a_break() -> None:
    x, residual = torch.ones(8, 64), torch.zeros(8, 64)
    compiled = torch.compile(lambda x: tw.dropout_add(x, residual, p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    found = [compiled(x), compiled(x)]
    torch.manual_seed(0)
    expected = [tw.dropout_add(x, residual, p=0.5) for _ in range(2)]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@each_backend
def test_the_caller_may_advance_seed_and_offset_before_backward(backend: str) -> None:
    x, residual = torch.ones(8, 64, requires_grad=True), torch.zeros(8, 64)
    seed, offset = number(7), number(0)
    y = tw.dropout_add(x, residual, p=0.5, seed=seed, offset=offset, backend=backend)
    seed.add_(1)
    offset.add_(16)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_a_seed_is_read_by_value_and_not_kept_in_a_plan() -> None:
    x, residual, seed = torch.ones(8, 64), torch.zeros(8, 64), number(7)
    found = []
    for _ in range(3):
        found.append(tw.dropout_add(x, residual, p=0.5, seed=seed))
        seed.add_(1)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert torch.equal(found[0], tw.dropout_add(x, residual, p=0.5, seed=number(7), offset=number(0)))


def test_refusals_of_dropout() -> None:
    x = torch.randn(3, 8)
    op: Any = tw.dropout_add.op  # type: ignore[attr-defined]
    for p in (-0.1, 1.5):
        with pytest.raises(tw.InvalidArgument, match=r"p: .*a probability lies in \[0, 1\]"):
            tw.dropout_add(x, x, p=p)
    with pytest.raises(tw.InvalidArgument, match="offset: given without a seed"):
        tw.dropout_add(x, x, p=0.5, offset=number(1))
    with pytest.raises(tw.InvalidArgument, match="seed: None; what is dropped needs one"):
        op(x, x, p=0.5)
    for seed in (number(1, 2), torch.tensor(1), torch.ones(1, dtype=torch.int32), torch.ones(1)):
        with pytest.raises(tw.InvalidArgument, match=r"seed: .*needs int64\[1\]"):
            tw.dropout_add(x, x, p=0.5, seed=seed)
    assert "dropout_add" in str(tw.explain(tw.dropout_add, x, x, number(1), p=0.5))


# gated_residual -------------------------------------------------------------------------------------------------------

GATES = {"a column": (40,), "a row": (2, 3, 1), "each": (2, 3, 40)}


@each_backend
@pytest.mark.parametrize("name", GATES)
def test_gates_and_their_gradients(name: str, backend: str) -> None:
    x, residual, dy = torch.randn(3, 2, 3, 40).unbind()
    leaves = [t.clone().requires_grad_() for t in (x, torch.randn(GATES[name]), residual)]
    y = tw.gated_residual(*leaves, backend=backend)
    expected = leaves[2] + leaves[0] * leaves[1]
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, dy))
    assert found[2].data_ptr() == dy.data_ptr(), "the residual's gradient is that of y, and no copy"


def test_a_gate_of_a_batch_is_expanded_and_not_copied() -> None:
    """[B, 1, C], as adaptive norms have it."""
    x, residual = torch.randn(2, 4, 5, 24).unbind()
    gate = torch.randn(4, 1, 24, requires_grad=True)
    for backend in BACKENDS:
        y = tw.gated_residual(x, gate.expand_as(x), residual, backend=backend)
        torch.testing.assert_close(y, residual + x * gate)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), gate)[0], x.sum(1, keepdim=True))


def test_a_gates_gradient_is_summed_in_float32() -> None:
    """4096 rows of 1 in bfloat16, which counts to 256 only."""
    x = torch.ones(4096, 8, dtype=torch.bfloat16)
    for backend in BACKENDS:
        _, dgate = tw.gated_residual_backward(x, x, torch.ones(8, dtype=torch.bfloat16), backend=backend)
        assert dgate is not None and dgate.dtype == torch.bfloat16 and (dgate == 4096).all()


def test_the_product_is_not_rounded_before_the_sum() -> None:
    x, residual = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = torch.rand(64, generator=torch.Generator().manual_seed(1))
    y = tw.gated_residual(x, gate, residual)
    assert torch.equal(y, (residual.float() + x.float() * gate).bfloat16())
    assert not torch.equal(y, residual + x * gate.bfloat16())


def test_refusals_of_gates() -> None:
    x = torch.randn(4, 3, 8)
    with pytest.raises(tw.InvalidArgument, match=r"gate: shape \[4, 1, 8\]; needs \[8\], \[4, 3, 1\] or the shape"):
        tw.gated_residual(x, x[:, :1], x)
    with pytest.raises(tw.InvalidArgument, match="gate: dtype fp16; takes the dtype of x, or fp32"):
        tw.gated_residual(x, x[0, 0].half(), x)
    with pytest.raises(tw.InvalidArgument, match="residual: shape"):
        tw.gated_residual(x, x[0, 0], x[:1])


def test_forms_of_a_gate_are_classes_of_their_own() -> None:
    op = registry.op("gated_residual")
    found = set()
    for forms in ({}, {"gate": "M 1"}, {"gate": "M C"}):
        made = make_inputs(op, (8, 64), torch.float32, forms=forms)
        found.add(layout_class(call_of(op, made, {}, False), {}))
    assert len(found) == 3
