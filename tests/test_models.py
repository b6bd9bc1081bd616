"""Patching other people's models: same numbers, same gradients, same parameters, a way back, and honest refusals."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright as tw
from tilewright.models import patch, unpatch
from tilewright.models.norms import LayerNorm, ModelRMSNorm, RMSNorm
from tilewright.models.replacing import Replacement

VOCABULARY = 101
SHARED = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = SHARED | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}
BERT = SHARED | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": VOCABULARY}
MODELS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "LlamaConfig": (SMALL, "LlamaRMSNorm", "llama", 5),
    "Qwen3Config": (SMALL, "Qwen3RMSNorm", "llama", 9),
    "GemmaConfig": (SMALL, "GemmaRMSNorm", "gemma", 5),
    "GptOssConfig": (SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssRMSNorm", "plain", 5),
    "BertConfig": (BERT, "LayerNorm", "", 5),
}
NOISE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the largest value: what may be added to the error of the unpatched model."""


@pytest.fixture(autouse=True)
def _plain_reference() -> Iterator[None]:
    """What is tested is the patching: kernels have tests of their own, and need not be compiled for these shapes."""
    with tw.use("reference"):
        yield


def _build(config: str, dtype: torch.dtype, device: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(getattr(transformers, config)(**MODELS[config][0]))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones and zeros, which hide mistakes
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(device, dtype).eval()


def _run(model: nn.Module, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and the gradients of every parameter."""
    ids = torch.arange(24, device=device).reshape(2, 12) % VOCABULARY
    model.zero_grad()
    hidden: Tensor = model(input_ids=ids).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.numel(), device=device).reshape(hidden.shape)
    (hidden.float() * weights).sum().backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), grads


def _gap(found: Tensor, wanted: Tensor) -> float:
    return (found.float() - wanted.float()).abs().max().item()


def _as_good(name: str, found: Tensor, plain: Tensor, truth: Tensor, noise: float, least: float) -> None:
    """No further from the float32 model than the unpatched one is, give or take: aten sums the bias gradient of a bf16
    layer norm in bf16 on a CPU, so the two need not be near each other. `least` is the size below which nothing counts:
    some gradients, a key's bias for one, are zero but for roundings."""
    limit = 1.5 * _gap(plain, truth) + noise * max(truth.abs().max().item(), least)
    assert _gap(found, truth) <= limit, f"{name}: {_gap(found, truth):.3g}; limit {limit:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "linears"), [*((config, False) for config in MODELS), ("LlamaConfig", True), ("BertConfig", True)]
)
def test_outputs_and_gradients_agree(config: str, linears: bool, dtype: torch.dtype, device: str) -> None:
    _, kind, convention, count = MODELS[config]
    model = _build(config, dtype, device)
    kinds = [kind] * count
    if linears:
        kinds += ["Linear"] * sum(type(m) is nn.Linear for m in model.modules())
    keys, parameters = list(model.state_dict()), list(model.parameters())
    truth, true_grads = _run(copy.deepcopy(model).float(), device)
    hidden, grads = _run(model, device)

    report = patch(model, linears=linears)
    assert sorted(p.kind for p in report.replaced) == sorted(kinds) and not report.kept, str(report)
    made = [m for m in model.modules() if isinstance(m, Replacement)]
    assert len(made) == len(kinds)
    assert {m._tilewright_convention.name for m in made if isinstance(m, ModelRMSNorm)} == ({convention} - {""})
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    patched_hidden, patched_grads = _run(model, device)
    assert patched_hidden.dtype == dtype
    _as_good("output", patched_hidden, hidden, truth, NOISE[dtype], 0.0)
    assert patched_grads.keys() == grads.keys()
    least = 0.01 * max(grad.abs().max().item() for grad in true_grads.values())
    for name, grad in grads.items():
        _as_good(name, patched_grads[name], grad, true_grads[name], NOISE[dtype], least)

    assert unpatch(model) == len(kinds)
    assert not any(isinstance(m, Replacement) for m in model.modules())
    assert torch.equal(_run(model, device)[0], hidden)


def test_the_op_serves_it() -> None:
    """A module that was never replaced would agree too; only the op refuses integers in these words."""
    model = nn.Sequential(nn.LayerNorm(8))
    patch(model)
    with pytest.raises(tw.InvalidArgument, match="layer_norm"):
        model(torch.zeros(2, 8, dtype=torch.int32))


def test_patching_twice_changes_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))
    patch(model)
    modules = list(model)
    report = patch(model)
    assert not report.replaced and report.already == ["0", "1"]
    assert list(model) == modules


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(24), lambda: nn.LayerNorm(24, elementwise_affine=False),
        lambda: nn.LayerNorm(24, bias=False, eps=1e-12), lambda: nn.RMSNorm(24, eps=1e-3),
        lambda: nn.RMSNorm(24, elementwise_affine=False), lambda: nn.RMSNorm(24),
    ],
    ids=["layer", "layer plain", "layer no bias", "rms", "rms plain", "rms eps None"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["unit", "tiny"])
def test_torch_norms(make: Callable[[], nn.Module], dtype: torch.dtype, scale: float, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make()).to(device, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = (torch.randn(4, 3, 24, device=device) * scale).to(dtype)
    wanted = model(x)
    assert len(patch(model).replaced) == 1
    torch.testing.assert_close(model(x), wanted)
    assert isinstance(model[0], LayerNorm | RMSNorm)
    assert isinstance(model[0], nn.LayerNorm | nn.RMSNorm), "code that looks for the class still finds it"


def test_what_happens_while_patched_stays() -> None:
    """Moves, loads, training mode and hooks belong to both."""
    model = nn.Sequential(nn.LayerNorm(8))
    original, seen = model[0], []
    original.register_forward_hook(lambda *_: seen.append("hook"))
    patch(model)
    model(torch.randn(2, 8))
    assert seen == ["hook"]
    model.to(torch.float64).eval()
    model.load_state_dict({"0.weight": torch.full((8,), 3.0), "0.bias": torch.ones(8)}, assign=True)
    unpatch(model)
    assert model[0] is original
    assert original.weight.tolist() == [3.0] * 8 and not original.training


def test_training_moves_the_shared_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.clone()
    patch(model)
    model(torch.randn(4, 8)).square().sum().backward()
    optimiser.step()
    unpatch(model)
    assert not torch.equal(model[1].weight, before)


def test_copies_and_files() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    patch(model)
    twin = copy.deepcopy(model)
    assert twin[0].weight is not model[0].weight
    unpatch(twin)
    assert type(twin[0]) is nn.LayerNorm and isinstance(model[0], LayerNorm)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded[0], LayerNorm)


def test_shared_modules_stay_shared() -> None:
    norm = nn.LayerNorm(8)
    model = nn.ModuleDict({"a": norm, "b": norm})
    patch(model)
    assert model["a"] is model["b"] and isinstance(model["a"], LayerNorm)
    unpatch(model)
    assert model["a"] is norm and model["b"] is norm


def test_under_compile() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    x = torch.randn(4, 16)
    wanted = model(x)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None


class _RMSNorm(nn.Module):
    """Right, and the base of the wrong ones below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class HalfRMSNorm(_RMSNorm):
    """Squares in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OtherEpsRMSNorm(_RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (y * self.weight.float()).to(x.dtype)


class GroupRMSNorm(_RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().reshape(*x.shape[:-1], -1, 16)
        y = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (y.reshape(x.shape) * self.weight.float()).to(x.dtype)


class GatedRMSNorm(_RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


class RaisingRMSNorm(_RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


class BufferedRMSNorm(_RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))


class ScaledLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _replaced_on_the_instance() -> nn.Module:
    module = nn.LayerNorm(8)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _parametrized() -> nn.Module:
    norm = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", _Doubled())
    return norm


def test_any_module_that_computes_it_is_taken() -> None:
    model = nn.Sequential(_RMSNorm())
    assert len(patch(model).replaced) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.LayerNorm((4, 8)), r"normalized_shape: \[4, 8\]; takes one dimension"),
        (lambda: nn.RMSNorm((4, 8)), "takes one dimension"),
        (lambda: nn.BatchNorm1d(8), "no op here computes it"),
        (lambda: nn.GroupNorm(2, 8), "no op here computes it"),
        (lambda: ScaledLayerNorm(8), "its forward is not that of LayerNorm"),
        (_replaced_on_the_instance, "replaced on the instance"),
        (_parametrized, "parametrizations: a module inside it"),
        (HalfRMSNorm, "computes another formula"),
        (OtherEpsRMSNorm, "computes another formula"),
        (GroupRMSNorm, "computes another formula"),
        (GatedRMSNorm, r"takes \(x, gate\)"),
        (RaisingRMSNorm, "raised on a probe: RuntimeError: not today"),
        (BufferedRMSNorm, "steps: state that no op here takes"),
    ],
)
def test_what_is_not_known_is_kept_with_the_reason(make: Callable[[], nn.Module], why: str) -> None:
    module = make()
    model = nn.Sequential(module)
    report = patch(model)
    assert not report.replaced and model[0] is module
    (kept,) = report.kept
    assert re.search(why, str(kept.reason)), str(kept.reason)
    assert type(module).__name__ in str(report)


def test_a_norm_alone_has_no_place_to_be_replaced_in() -> None:
    with pytest.raises(tw.InvalidArgument, match="is itself a LayerNorm"):
        patch(nn.LayerNorm(8))
    with pytest.raises(tw.InvalidArgument, match=r"torch\.nn\.Module"):
        patch("bert")  # type: ignore[arg-type]


def test_a_model_without_norms() -> None:
    assert str(patch(nn.Sequential(nn.Linear(2, 2)))) == "nothing found to replace"


def test_mixed_precision_weights() -> None:
    """float32 norms in a bf16 model, as quantised training keeps them; and a weight narrower than the input."""
    model = nn.Sequential(nn.RMSNorm(8))
    patch(model)
    assert model(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.to(torch.bfloat16)
    assert model(torch.randn(2, 8)).dtype == torch.float32
