"""The sampling family: softmax of wide rows, what top-k and top-p keep, and how often each token is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core import registry
from tilewright.core.launch import Config, launches_of
from tilewright.core.plan import bind
from tilewright.ops.sampling import configs
from tilewright.verify.cases import make_inputs
from tilewright.verify.check import call_of

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreted)]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Conformance has the checks of first use; each takes an interpreter longer than these tests do."""
    with tw.use(check="never"):
        yield


def language(rows: int, columns: int, seed: int = 0, sharp: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(rows, columns, generator=generator), -1)


# softmax -------------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_rows_that_programs_share(name: str) -> None:
    """Every block but the first is minus infinity in one row, all of them in another; the last is cut short."""
    op = registry.op(name)
    inputs = make_inputs(op, (5, 1000), torch.float32)
    if name == "softmax":
        inputs["x"][1, 128:] = -math.inf
        inputs["x"][2] = -math.inf
        inputs["x"][3, 700] = math.nan
    options = {**op.usual, "scale": 0.5}
    call = call_of(op, inputs, options, False)
    (kernel,) = [k for k in registry.kernels_of(name) if k.backend == "triton"]
    (found,) = bind(kernel, Config(rows=1, block=128, split=1, num_warps=1), call, poison=True)(*inputs.values())
    torch.testing.assert_close(found, op.reference(*inputs.values(), **options), equal_nan=True, rtol=1e-5, atol=1e-8)
    if name == "softmax":
        assert found.isnan().any(-1).tolist() == [False, False, True, True, False]


def test_softmax_is_torch_and_scale_is_one_over_the_temperature() -> None:
    x = torch.randn(4, 3, 50)
    assert torch.equal(tw.softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(tw.softmax(x, dim=1, scale=1 / 0.7), torch.softmax(x / 0.7, 1))
    for wrong, words in ((math.inf, "a temperature of 0 is argmax"), (math.nan, "scale: NaN")):
        with pytest.raises(tw.InvalidArgument, match=words):
            tw.softmax(x, scale=wrong)
    for dim in (3, -4):
        with pytest.raises(tw.InvalidArgument, match=f"dim: {dim}; x has 3 dimensions"):
            tw.softmax(x, dim=dim)
    for odd, kind in ((1.0, "float"), (True, "bool"), (None, "NoneType"), ("1", "str")):
        with pytest.raises(tw.InvalidArgument, match=f"dim: {odd!r} is a {kind}; an integer is needed"):
            tw.softmax(x, dim=odd)  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidArgument, match=r"x: shape \[0, 5\]; dimension 0 must not be empty"):
        tw.softmax(torch.randn(0, 5), dim=0)
    assert tw.softmax(torch.randn(5, 0), dim=0).shape == (5, 0)
    for nothing in ([1.0], None):
        with pytest.raises(tw.InvalidArgument, match=r"x: .*[tT]ensor is needed"):
            tw.softmax(nothing)  # type: ignore[arg-type]


# What is kept --------------------------------------------------------------------------------------------------------


def by_sorting(row: list[float], k: int, p: float, order: str) -> set[int]:
    """The definition in words, in exact arithmetic: fractions of what the floats are."""
    from fractions import Fraction

    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    counted = ranked[:k] if order == "top_k_first" else ranked
    whole = sum(Fraction(row[i]) for i in counted)
    if p >= 1:
        return set(ranked[:k])
    found, mass = [], Fraction(0)
    for i in ranked:
        if found and mass >= Fraction(p) * whole:
            break
        found.append(i)
        mass += Fraction(row[i])
    return set(found[:k])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_kept_is_what_sorting_keeps(order: str, backend: str) -> None:
    probs = torch.cat([language(1, 150), language(1, 150).half().float(), torch.full((1, 150), 1 / 150)])
    exact = [[float(v) for v in row] for row in probs]
    for k, p in ((4, 0.5), (130, 0.75)) if backend == "triton" else ((7, 0.5), (150, 0.75), (20, 1.0), (130, 0.9375)):
        y = tw.top_k_top_p_renorm(probs, top_k=k, top_p=p, order=order, backend=backend)
        for row, found, source in zip(exact, y, probs, strict=True):
            wanted = sorted(by_sorting(row, k, p, order))
            assert found.nonzero().flatten().tolist() == wanted
            torch.testing.assert_close(found[wanted], source[wanted] / source[wanted].double().sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_break_by_the_lowest_index(backend: str) -> None:
    probs = torch.tensor([[0.4, 0.3, 0.3, 0.0], [0.0, 0.3, 0.4, 0.3], [0.25, 0.25, 0.25, 0.25]])
    keep = lambda **how: (tw.top_k_top_p_renorm(probs, backend=backend, **how) > 0).int().tolist()  # noqa: E731
    assert keep(top_k=2) == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]
    assert keep(top_k=torch.tensor([2, 2, 3], dtype=torch.int32)) == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 0]]
    assert keep(top_p=0.5) == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]
    assert keep(top_p=0.0) == keep(top_k=1) == [[1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert keep(top_p=1.0) == keep(top_k=9) == [[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_a_vocabulary_of_one(order: str, backend: str) -> None:
    probs = torch.tensor([[0.25], [0.0], [math.nan]])
    for how in ({"top_k": 1}, {"top_p": 0.5}, {"top_k": 7, "top_p": 1.0}):
        given: dict[str, Any] = {**how, "order": order, "backend": backend}
        assert tw.top_k_top_p_renorm(probs, **given).nan_to_num(-1.0).tolist() == [[1.0], [-1.0], [-1.0]]
        ids, valid = tw.top_k_top_p_sample(probs, seed=torch.tensor([2]), **given)
        assert ids.tolist() == [0, -1, -1] and valid.tolist() == [True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_minus_infinity(backend: str) -> None:
    """They are tokens that are never kept; a row of nothing else has no distribution, and is flagged."""
    logits = torch.randn(3, 50)
    logits[0, 5:], logits[1] = -math.inf, -math.inf
    probs = tw.softmax(logits, backend=backend)
    y = tw.top_k_top_p_renorm(probs, top_k=20, backend=backend)
    assert (y[0] > 0).tolist() == [True] * 5 + [False] * 45 and y[1].isnan().all() and (y[2] > 0).sum() == 20
    ids, valid = tw.top_k_top_p_sample(probs, top_p=0.99, seed=torch.tensor([4]), backend=backend)
    assert valid.tolist() == [True, False, True] and ids[0] < 5 and ids[1] == -1


@pytest.mark.interpreted
def test_more_keys_than_one_program_sorts_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = language(2, 300)
    options = {"top_k": 8, "top_p": 0.9, "order": "top_k_first", "few": True}
    op = tw.top_k_top_p_renorm.op
    inputs = {"probs": probs, "row_k": None, "row_p": None}
    call = call_of(op, inputs, options, False)
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.backend == "triton" and not k.label]
    config = Config(block=128, num_warps=1, choosing=1, digit=11)
    launches = []
    for most in (configs.MOST_CHOSEN, 16):
        monkeypatch.setattr(configs, "MOST_CHOSEN", most)
        launches.append(len(launches_of(kernel.load()(call, config))))
        (found,) = bind(kernel, config, call, poison=True)(*inputs.values())
        torch.testing.assert_close(found, op.reference(*inputs.values(), **options), rtol=1e-6, atol=0.0)
    assert launches[0] == 3 < launches[1]


def difficult(columns: int) -> Tensor:
    """Rows of tokens that are all alike, nearly alike, alike in groups, one alone, subnormal, near the largest float32
    (their sum is none), of every size there is, and no distribution."""
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(10, columns, generator=generator)
    rows = torch.softmax(3.0 * plain, -1)
    rows[1] = 1 / columns
    rows[2] = 1.0 + 1e-5 * plain[2].abs()
    rows[3] = torch.softmax((4.0 * plain[3]).round(), -1)
    rows[4], rows[4, columns // 2] = 0.0, 0.5
    rows[5] = 1e-45 * (1.0 + plain[5].abs() * 40).round()
    rows[6] = 3e38 * torch.rand(columns, generator=generator)
    rows[7] = torch.exp2(100 * plain[7].clamp(-1.2, 1.2))
    rows[8, columns - 1] = math.nan
    rows[9] = 0.0
    return rows


def judge(label: str, config: Config, probs: Tensor, how: dict[str, Any]) -> None:
    """Both ops by one kernel against their definitions: what is kept, and what is drawn of it, exactly."""
    inputs: dict[str, Any] = {"probs": probs, "row_k": None, "row_p": None}
    for name, dtype in (("row_k", torch.int32), ("row_p", torch.float32)):
        if name in how:
            inputs[name] = torch.tensor(how[name], dtype=dtype).repeat(2)
    options = {"top_k": None, "top_p": None, "order": "top_k_first", "few": False}
    options |= {name: value for name, value in how.items() if name in options}
    seeded = {"probs": probs, "seed": torch.tensor([5]), "offset": None, **inputs}
    for op, given in ((tw.top_k_top_p_renorm.op, inputs), (tw.top_k_top_p_sample.op, seeded)):
        (kernel,) = [k for k in registry.kernels_of(op.name) if (k.backend, k.label) == ("triton", label)]
        call = call_of(op, given, options, False)
        assert not kernel.capability.reasons(call, emulated=True)
        found = bind(kernel, config, call, poison=True)(*given.values())
        wanted = op.reference(*given.values(), **options)
        if op is tw.top_k_top_p_sample.op:
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        else:
            assert torch.equal(found[0] > 0, wanted > 0)
            torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-44, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize(("tail", "room"), [(1, 512), (1, 16), (0, 16)])
@pytest.mark.parametrize("how", [
    {"top_p": 0.9}, {"top_p": 1 - 2**-24}, {"row_p": (0.5, 1.0, 0.01, 2.0, -1.0)}, {"row_k": (1, 300, 17, 299, 150)},
], ids=str)  # fmt: skip
def test_bins_keep_what_the_definition_keeps(how: dict[str, Any], room: int, tail: int) -> None:
    """Room of 16 is too little where many are alike: then the row itself is searched."""
    judge("bins", Config(block=128, num_warps=1, tail=tail, pdl=0, width=7, room=room), difficult(300), how)


@pytest.mark.interpreted
@pytest.mark.parametrize("how", [
    {"top_k": 1}, {"top_k": 40}, {"top_k": 1000}, {"top_k": 12, "top_p": 0.9}, {"top_k": 40, "top_p": 1 - 2**-24},
    {"top_k": 300, "top_p": 0.5, "order": "joint"}, {"top_k": 5, "top_p": 0.6, "order": "joint"},
    {"top_k": 40, "row_k": (1, 300, 17, 0, 39), "row_p": (0.5, 1.0, 0.01, 2.0, math.nan)},
    {"top_k": 25, "row_p": (0.9, 0.0, 1.0, -1.0, 0.3), "order": "joint"},
], ids=str)  # fmt: skip
def test_groups_keep_what_the_definition_keeps(how: dict[str, Any]) -> None:
    judge("groups", Config(block=128, num_warps=1, group=8, choosing=1, pdl=0), difficult(300), how)


@pytest.mark.interpreted
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_groups_whose_likely_tokens_meet(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All likely tokens lie in few groups, 16 apart, or side by side, or are all that is not 0: more of them reach the
    bound than there is room for, which is then raised."""
    probs = language(7, 300) * 1e-3
    probs[1, ::16] += 0.01
    probs[2, ::16] = 0.25  # alike
    probs[3, :50] += 0.5
    probs[4], probs[4, ::16] = 0.0, 0.5
    probs[5] = torch.arange(300.0)
    probs[6] = 1.0
    monkeypatch.setattr("tilewright.ops.sampling.triton_groups.room_of", lambda call: 16)
    for how in ({"top_k": 12, "top_p": 0.9}, {"top_k": 7}):
        judge("groups", Config(block=128, num_warps=1, group=8, choosing=1, pdl=0), probs, {**how, "order": order})


@pytest.mark.interpreted
@pytest.mark.parametrize("how", [
    {"top_k": 40, "row_k": (1, 300, 17, 0, 39), "row_p": (0.5, 1.0, 0.01, 2.0, math.nan)},
    {"row_k": (1, 300, 17, 299, 150), "top_p": 0.9, "order": "joint"},
], ids=str)  # fmt: skip
def test_digits_keep_what_the_definition_keeps(how: dict[str, Any]) -> None:
    judge("", Config(block=128, num_warps=1, choosing=1, digit=10), difficult(100), how)


def test_groups_refuse_a_k_that_no_number_bounds() -> None:
    op, probs = tw.top_k_top_p_renorm.op, language(2, 3000)
    rows = {"row_k": torch.ones(2, dtype=torch.int32), "row_p": None}
    (kernel,) = [k for k in registry.kernels_of(op.name) if k.label == "groups"]
    for how, given, words in (
        ({}, rows, "row_k: on the device alone, where nobody knows how large it is; takes a number up to 1024"),
        ({"top_k": 1025}, rows, "top_k: 1025; takes up to 1024"),
        ({"top_p": 0.5}, {"row_k": None, "row_p": None}, "top_k: None; takes a number up to 1024"),
    ):
        call = call_of(op, {"probs": probs, **given}, {**op.usual, "top_k": None, "few": False, **how}, False)
        assert [str(reason) for reason in kernel.capability.reasons(call, emulated=True)] == [words]


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("how", [
    {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1000, "top_p": 0.8, "order": "joint"},
    {"top_k": 2000, "top_p": 0.8, "order": "joint"},
], ids=str)  # fmt: skip
def test_a_whole_vocabulary(how: dict[str, Any]) -> None:
    """151936 tokens, of rows that lie apart; ties at the threshold, and the likeliest last."""
    probs = torch.full((2, 152000), math.nan)[:, :151936]
    probs.copy_(language(2, 151936, sharp=4.0))
    probs[1] = probs[1].half().float()  # many are equal
    probs[1, -1] = probs[1].amax() * 2
    seed = torch.tensor([11])
    found = [tw.top_k_top_p_renorm(probs, backend=b, **how) for b in ("triton", "reference")]
    torch.testing.assert_close(*found, rtol=1e-6, atol=0.0)
    assert torch.equal(found[0] > 0, found[1] > 0)
    drawn = [tw.top_k_top_p_sample(probs, seed=seed, backend=b, **how)[0] for b in ("triton", "reference")]
    assert torch.equal(*drawn)


def test_orders_differ_where_they_should() -> None:
    """Of [.4, .3, .2, .1] k = 2 leaves .7: a share of .5 of that is .35, of the whole .5."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    first = tw.top_k_top_p_renorm(probs, top_k=2, top_p=0.5)
    joint = tw.top_k_top_p_renorm(probs, top_k=2, top_p=0.5, order="joint")
    assert (first > 0).sum() == 1 and (joint > 0).sum() == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_rows_that_are_no_distribution_are_flagged_and_harm_no_other(how: dict[str, Any], backend: str) -> None:
    probs = language(8, 40)
    good = probs[::2].clone()
    probs[1, 7], probs[3, 39], probs[5], probs[7, 0] = math.nan, -0.1, 0.0, math.inf
    y = tw.top_k_top_p_renorm(probs, backend=backend, **how)
    assert y[1::2].isnan().all() and not y[::2].isnan().any()
    assert torch.equal(y[::2], tw.top_k_top_p_renorm(good, backend=backend, **how))
    seed = torch.tensor([3])
    ids, valid = tw.top_k_top_p_sample(probs, seed=seed, backend=backend, **how)
    assert valid.tolist() == [True, False] * 4 and (ids[1::2] == -1).all()
    assert (y[::2].gather(1, ids[::2].long().unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_and_p_of_rows_that_mean_nothing(backend: str) -> None:
    probs = language(4, 30)
    k = torch.tensor([5, 0, 3, -2], dtype=torch.int32)
    p = torch.tensor([0.5, 0.5, math.nan, 0.5])
    ids, valid = tw.top_k_top_p_sample(probs, top_k=k, seed=torch.tensor([1]), backend=backend)
    assert valid.tolist() == [True, False, True, False] and ids[1] == ids[3] == -1
    y = tw.top_k_top_p_renorm(probs, top_p=p, backend=backend)
    assert y.isnan().any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", ["top_k_top_p_renorm", "top_k_top_p_sample"])
def test_refusals_name_what_the_user_wrote(name: str) -> None:
    probs, call = language(2, 30), getattr(tw, name)
    ones = torch.ones(2)
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"top_k": 0}, "top_k: 0; must be 1 or more"),
        ({"top_k": "few"}, "top_k: 'few' is a str; an integer"),
        ({"top_k": [1, 1]}, "top_k: .* is a list; an integer"),
        ({"top_k": 3.0}, "top_k: 3.0 is a float; an integer"),
        ({"top_p": math.nan}, "top_p: NaN"),
        ({"top_p": "most"}, "top_p: 'most' is a str"),
        ({"order": "both"}, "order: 'both'"),
        ({"top_k": torch.ones(3, dtype=torch.int32)}, r"top_k: shape \[3\]; needs \[2\]"),
        ({"top_p": torch.tensor(0.5)}, r"top_p: shape \[\]; needs \[2\]"),
        ({"top_k": ones}, "top_k: dtype fp32; takes int32"),
        ({"top_k": ones.long()}, "top_k: dtype int64; takes int32"),
        ({"top_k": ones.to(torch.int16)}, "top_k: dtype int16; takes int32"),
        ({"top_p": ones.half()}, "top_p: dtype fp16; takes fp32"),
        ({"top_p": ones.double()}, "top_p: dtype fp64; takes fp32"),
        ({"top_k": ones.int().to("meta")}, "top_k: on meta, other tensors on cpu"),
    )
    for how, words in given:
        with pytest.raises(tw.InvalidArgument, match=f"^{name}: {words}"):
            call(probs, **how)
    for nothing in ([0.5, 0.5], None):
        with pytest.raises(tw.InvalidArgument, match=f"^{name}: probs: .*[tT]ensor is needed"):
            call(nothing)


def test_what_the_contract_refuses() -> None:
    probs = language(2, 30)
    with pytest.raises(tw.InvalidArgument, match="offset: given without a seed"):
        tw.top_k_top_p_sample(probs, offset=torch.tensor([1]))
    with pytest.raises(tw.InvalidArgument, match="few: True"):
        tw.top_k_top_p_renorm.op(probs, top_k=500, few=True)
    with pytest.raises(tw.NoGradient, match="top_k_top_p_renorm"):
        tw.top_k_top_p_renorm(probs.requires_grad_())


# What is drawn -------------------------------------------------------------------------------------------------------


def drawn(probs: Tensor, count: int, backend: str, seed: int = 11, **how: Any) -> Tensor:
    """How often each token comes, of `count` rows that are all `probs`."""
    many = probs.expand(count, -1)
    ids, valid = tw.top_k_top_p_sample(many, seed=torch.tensor([seed]), backend=backend, **how)
    assert valid.all()
    return torch.bincount(ids.long(), minlength=probs.shape[-1]).double()


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}, {"top_k": 9, "top_p": 0.7, "order": "joint"}],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(how: dict[str, Any]) -> None:
    """Against exact probabilities: a chi-square below its mean plus five deviations, a total variation as small as so
    many draws make it, and nothing from outside what is kept."""
    probs, count = language(1, 24, sharp=1.0), 200_000
    exact = tw.top_k_top_p_renorm(probs, **how)[0].double()
    found = drawn(probs, count, "reference", **how)
    kept = exact > 0
    assert found[~kept].sum() == 0
    expected = exact[kept] * count
    chi_square = float(((found[kept] - expected).square() / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    distance = float((found / count - exact).abs().sum()) / 2
    assert distance < math.sqrt(float(kept.sum()) / count)


@pytest.mark.interpreted
def test_every_kernel_draws_the_same(device: str) -> None:
    probs = language(3, 200)
    for how in ({"top_k": 5, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 150, "top_p": 0.5}):
        draws = [
            tw.top_k_top_p_sample(probs, seed=torch.tensor([7]), offset=torch.tensor([2**40]), backend=backend, **how)
            for backend in ("reference", "triton")
        ]
        assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])


def test_seed_and_offset_decide() -> None:
    probs = language(64, 100, sharp=0.1)

    def call(seed: int, offset: int) -> Tensor:
        ids: Tensor = tw.top_k_top_p_sample(probs, seed=torch.tensor([seed]), offset=torch.tensor([offset]))[0]
        return ids

    assert torch.equal(call(1, 0), call(1, 0))
    assert not torch.equal(call(1, 0), call(2, 0)) and not torch.equal(call(1, 0), call(1, 1))
    assert not torch.equal(call(1, 2**33), call(1, 0))
    torch.manual_seed(5)
    first, second = tw.top_k_top_p_sample(probs)[0], tw.top_k_top_p_sample(probs)[0]
    torch.manual_seed(5)
    assert torch.equal(tw.top_k_top_p_sample(probs)[0], first) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_is_argmax(backend: str) -> None:
    """Whatever the seed, k = 1, p = 0 and a temperature near 0 take the likeliest, the first of several."""
    logits = torch.randn(3, 120)
    logits[:, 50] = logits[:, 100] = logits.amax(-1) + 1
    for scale, how in ((1.0, {"top_k": 1}), (1.0, {"top_p": 0.0}), (1000.0, {"top_p": 0.5})):
        ids, _ = tw.top_k_top_p_sample(tw.softmax(logits, scale=scale), seed=torch.tensor([9]), backend=backend, **how)
        assert (ids == 50).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mass_of_rows_that_do_not_add_up_to_one(backend: str) -> None:
    probs = language(3, 40)
    scaled = probs * torch.tensor([[1e-30], [1.0], [1e30]])
    found = tw.top_k_top_p_renorm(scaled, top_k=10, backend=backend)
    torch.testing.assert_close(found, tw.top_k_top_p_renorm(probs, top_k=10), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_and_p_of_rows_lie_anywhere(backend: str) -> None:
    """Some columns of a table of both, one for all, and, of two leading dimensions, what no single stride tells: that
    is refused with its reason, though the same class of dense rows was served before."""
    probs = language(6, 30).view(2, 3, 30)
    k = torch.tensor([2, 9, 5, 1, 7, 4], dtype=torch.int32)
    dense = k.view(2, 3)
    tables = torch.stack([k, 30 - k], -1)[:, 0].view(2, 3), torch.stack([k / 10, k / 20], -1)[:, 0].view(2, 3)

    def both(row_k: Tensor, row_p: Tensor) -> Tensor:
        how: dict[str, Any] = {"top_k": 20, "few": True, "backend": backend}
        found: Tensor = tw.top_k_top_p_renorm.op(probs, row_k, row_p, **how)
        ids, _ = tw.top_k_top_p_sample.op(probs, torch.tensor([3]), None, row_k, row_p, **how)
        assert (found.gather(-1, ids.long().unsqueeze(-1)) > 0).all()
        return found

    expected = both(dense, (dense / 10).contiguous())
    assert torch.equal(both(*tables), expected)
    one = torch.tensor(4, dtype=torch.int32), torch.tensor(0.5)
    assert torch.equal(both(*(t.expand(2, 3) for t in one)), both(*(t.repeat(2, 3) for t in one)))
    turned = dense.t().contiguous().t(), (dense / 10).contiguous()
    if backend == "reference":
        assert torch.equal(both(*turned), expected)
    else:
        with pytest.raises(
            tw.NoKernel, match=r"  triton\S*: top_k: leading strides \[1, 2\] do not merge.*; top_k.contiguous"
        ):
            tw.top_k_top_p_renorm(probs, top_k=turned[0], backend=backend)
