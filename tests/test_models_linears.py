"""Patched linear layers: a choice, true to the weight as it is now, and honest about what they are not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tilewright as tw
from tilewright.models import patch, unpatch
from tilewright.models.linears import Linear
from tilewright.models.norms import LayerNorm


@pytest.fixture(autouse=True)
def _plain_reference() -> Iterator[None]:
    """What is tested is the patching: kernels have tests of their own."""
    with tw.use("reference"):
        yield


def _patched(*modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*modules)
    patch(model, linears=True)
    return model


def _close(model: nn.Module, x: Tensor) -> None:
    """As torch computes it from the parameters that the model has now."""
    found = model(x)
    unpatch(model)
    torch.testing.assert_close(found, model(x))
    patch(model, linears=True)


def test_they_are_a_choice() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first = model[0]
    patch(model)
    assert model[0] is first and isinstance(model[1], LayerNorm)
    report = patch(model, linears=True)
    assert [p.name for p in report.replaced] == ["0"] and report.already == ["1"]
    assert isinstance(model[0], Linear) and isinstance(model[0], nn.Linear)
    assert str(report).startswith("1 x Linear -> linear")
    assert unpatch(model) == 2 and model[0] is first

    patch(model, norms=False, linears=True)
    assert isinstance(model[0], Linear) and type(model[1]) is nn.LayerNorm


def test_the_op_serves_it() -> None:
    """A module that was never replaced would agree too; only the op refuses integers in these words."""
    with pytest.raises(tw.InvalidArgument, match="linear"):
        _patched(nn.Linear(8, 8))(torch.zeros(2, 8, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_it_is_what_torch_computes(shape: tuple[int, ...], bias: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5, bias=bias)).to(device, dtype)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    wanted = model(x)
    wanted.sum().backward()
    grads = [t.grad for t in (x, *model.parameters())]
    x.grad = None
    model.zero_grad()
    assert len(patch(model, linears=True).replaced) == 1
    found = model(x)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    torch.testing.assert_close([t.grad for t in (x, *model.parameters())], grads)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "in place": lambda m: m[0].weight.data.mul_(2),
    "through numpy": lambda m: m[0].weight.detach().numpy().fill(0.5),
    "another tensor": lambda m: setattr(m[0].weight, "data", torch.ones(5, 8)),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(5, 8))),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "load": lambda m: m.load_state_dict({"0.weight": torch.ones(5, 8), "0.bias": torch.ones(5)}),
    "load by assignment": lambda m: m.load_state_dict(
        {"0.weight": torch.ones(5, 8), "0.bias": torch.ones(5)}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prefer", ["reference", "vendor"])
def test_it_follows_the_weight(change: str, prefer: str) -> None:
    """Nothing is kept beside the weight, which version counters would not always tell to be stale."""
    model, x = _patched(nn.Linear(8, 5)), torch.randn(3, 8)
    with torch.no_grad(), tw.use(prefer):
        before = model(x)
        CHANGES[change](model)
        assert not torch.equal(model(x), before)
        _close(model, x)


def test_it_follows_a_step_and_a_move() -> None:
    model, x = _patched(nn.Linear(8, 5), nn.LayerNorm(5)), torch.randn(3, 8)
    keys, before = list(model.state_dict()), model[0].weight.detach().clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().sum().backward()
    optimiser.step()
    assert list(model.state_dict()) == keys == ["0.weight", "0.bias", "1.weight", "1.bias"]
    unpatch(model)
    assert not torch.equal(model[0].weight, before)
    patch(model, linears=True)
    _close(model, x)
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_a_copy_has_weights_of_its_own() -> None:
    model, x = _patched(nn.Linear(8, 5)), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    before = twin(x)
    model[0].weight.data.zero_()
    assert torch.equal(twin(x), before)
    unpatch(twin)
    assert type(twin[0]) is nn.Linear and isinstance(model[0], Linear)


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    model[1].weight = model[0].weight
    patch(model, linears=True)
    assert model[1].weight is model[0].weight and len(list(model.parameters())) == 1


def test_autocast_has_the_say() -> None:
    model, x = _patched(nn.Linear(8, 5)), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
        unpatch(model)
        wanted = model(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


def test_under_compile() -> None:
    torch.compiler.reset()  # frames of nn.Sequential that other tests compiled count against its limit
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(4, 16)
    wanted = model(x)
    patch(model, linears=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16


class TwiceLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _adapted() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.lora = nn.Linear(8, 2)  # type: ignore[assignment]
    return layer


def _sharded() -> nn.Module:
    class Shard(nn.Parameter):
        pass

    layer = nn.Linear(8, 8, bias=False)
    layer._parameters["weight"] = Shard(torch.ones(8, 8))
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TwiceLinear(8, 8), "its forward is not that of Linear"),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "parametrizations: a module inside it"),
        (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 3), "weight_mask|weight_orig"),
        (_sharded, "a Shard; takes a plain Parameter"),
        (lambda: nn.LazyLinear(8), "a UninitializedParameter|its forward"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), "weight: dtype .*complex64; takes fp32, fp16, bf16"),
    ],
    ids=["subclass", "parametrized", "pruned", "sharded", "lazy", "complex"],
)
def test_what_is_not_known_is_kept_with_the_reason(make: Callable[[], nn.Module], why: str) -> None:
    module = make()
    report = patch(model := nn.Sequential(module), norms=False, linears=True)
    assert not report.replaced and model[0] is module
    (kept,) = report.kept
    assert re.search(why, str(kept.reason)), str(kept.reason)


def test_an_adapter_inside_is_kept_and_itself_replaced() -> None:
    report = patch(nn.Sequential(_adapted()), linears=True)
    assert [p.name for p in report.replaced] == ["0.lora"] and "lora" in str(report.kept[0].reason)


def test_attention_of_torch_does_not_call_its_projection() -> None:
    """A report that said so would be wrong: it multiplies by the weight itself."""
    report = patch(nn.Sequential(nn.MultiheadAttention(8, 2)), linears=True)
    assert not report.replaced
    assert "MultiheadAttention multiplies by its weight itself" in str(report.kept[0].reason)


def test_a_layer_alone_has_no_place_to_be_replaced_in() -> None:
    with pytest.raises(tw.InvalidArgument, match="is itself a Linear"):
        patch(nn.Linear(8, 8), linears=True)
    assert not patch(nn.Linear(8, 8)).replaced
