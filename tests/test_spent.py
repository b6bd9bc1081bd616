"""What forward saves for the first backward to overwrite (`Gradient.spends`): who gets it, who does not, and that no
gradient which a caller holds ever changes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tilewright.core import registry
from tilewright.core.arguments import facts_of
from tilewright.core.errors import TilewrightError
from tilewright.core.kernel import Kernel
from tilewright.core.op import Gradient
from tilewright.core.plan import bind
from tilewright.core.spent import Held
from tilewright.verify.cases import Case, build, cases
from tilewright.verify.check import call_of, check, truth_of

ROWS, C = 6, 40
OP, BACKWARD = registry.op("bce_with_logits"), registry.op("bce_with_logits_backward")
FORM = BACKWARD.in_place
backends = pytest.mark.parametrize("backend", [None, pytest.param("triton", marks=pytest.mark.interpreted)])
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def leaf(seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(ROWS, C, generator=generator) * 4, torch.rand(ROWS, C, generator=generator)
    return x.to(device).requires_grad_(), y.to(device)


def wanted(x: Tensor, y: Tensor, reduction: str = "mean", dy: float = 1.0) -> Tensor:
    wide = x.detach().double().requires_grad_()
    loss = F.binary_cross_entropy_with_logits(wide, y.double(), reduction=reduction)
    return torch.autograd.grad(loss * dy, wide)[0].float()


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def held(loss: Tensor) -> list[Tensor]:
    """What the node of autograd's graph holds for its first backward; nothing once that has run."""
    node: Any = loss.grad_fn
    return [] if node.held is None else [t for tensors in node.held._tensors for t in tensors]


# Who gets it ----------------------------------------------------------------------------------------------------------


@reductions
@backends
def test_the_first_backward_writes_where_forward_saved(backend: str | None, reduction: str) -> None:
    for dy in (1.0, 65536.0, -0.37):
        x, y = leaf()
        loss = tw.bce_with_logits(x, y, reduction=reduction, backend=backend)
        (unit,) = held(loss)
        place = unit.data_ptr()
        close(unit, wanted(x, y, reduction))
        del unit
        loss.backward(torch.tensor(dy))
        assert held(loss) == []
        close(x.grad, wanted(x, y, reduction, dy))
        assert x.grad is not None and x.grad.data_ptr() == place, "autograd has copied the gradient"


@reductions
@backends
def test_a_second_backward_starts_from_the_inputs(backend: str | None, reduction: str) -> None:
    x, y = leaf()
    loss = tw.bce_with_logits(x, y, reduction=reduction, backend=backend)
    (first,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    kept = first.clone()
    for dy in (1.0, 5.0):
        (again,) = torch.autograd.grad(loss, x, torch.tensor(dy), retain_graph=True)
        close(again, wanted(x, y, reduction, dy))
        again.fill_(7)
        assert torch.equal(first, kept)
    first.fill_(7)
    loss.backward()
    close(x.grad, wanted(x, y, reduction))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_threads_may_race_for_it() -> None:
    x, y = leaf()
    loss = tw.bce_with_logits(x, y)
    torch.autograd.grad(tw.bce_with_logits(x, y), x)  # plans of both
    found: list[Tensor] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        found.extend(torch.autograd.grad(loss, x, torch.tensor(2.0), retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in found}) == 6
    for each in found:
        close(each, wanted(x, y, dy=2.0))


def test_only_one_gets_it() -> None:
    tensors = (torch.ones(2),)
    store = Held(tensors)
    assert store.take(1) is tensors
    assert store.take(1) == (None,)
    other = Held(tensors)
    other._capture = object()  # as of a graph whose capture has ended
    for copy in (other.take(1)[0], other.take(1)[0]):
        assert copy is not None and copy is not tensors[0] and torch.equal(copy, tensors[0])


@backends
def test_losses_that_share_what_they_are_of(backend: str | None) -> None:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return tw.bce_with_logits(x, y, backend=backend)

    x, y = leaf()
    loss = loss_of(x, y)
    (loss + loss).backward()
    close(x.grad, wanted(x, y, dy=2.0))
    other = leaf(1)[1]
    x.grad = None
    one, two = loss_of(x, y), loss_of(x, other)
    seen: list[Tensor] = []
    handle = x.register_hook(lambda g: seen.append(g.clone()))
    (one + 3 * two).backward(retain_graph=True)
    both = wanted(x, y) + wanted(x, other, dy=3.0)
    close(x.grad, both)
    (one + 3 * two).backward()  # adds to what is there
    handle.remove()
    close(x.grad, 2 * both)
    assert len(seen) == 2
    for each in seen:
        close(each, both)
    hidden, y = leaf()
    (one,) = torch.autograd.grad(loss_of(hidden * 2, y), hidden)  # not a leaf
    close(one, 2 * wanted(hidden * 2, y))


def test_upstream_gradients_of_other_forms() -> None:
    for reduction in ("mean", "sum"):
        x, y = leaf()
        tw.bce_with_logits(x, y, reduction=reduction).expand(3, 2).sum().backward()
        close(x.grad, wanted(x, y, reduction, 6.0))
        loss = tw.bce_with_logits(x, y, reduction=reduction)
        for dy in (torch.tensor([2.0]).expand(5)[3], torch.arange(4.0)[2]):
            close(torch.autograd.grad(loss, x, dy, retain_graph=True)[0], wanted(x, y, reduction, 2.0))
        half = tw.bce_with_logits(x, y, reduction=reduction, out_dtype=torch.float16)
        for _ in range(2):
            (found,) = torch.autograd.grad(half, x, torch.tensor(0.75).half(), retain_graph=True)
            close(found, wanted(x, y, reduction, 0.75))


@pytest.mark.parametrize("how", ["half", "float64", "none", "no grad", "detached"])
def test_what_is_saved_in_which_call(how: str) -> None:
    x, y = leaf()
    if how == "no grad":
        with torch.no_grad():
            assert tw.bce_with_logits(x, y).grad_fn is None
        return
    if how == "detached":
        assert tw.bce_with_logits(x.detach(), y).grad_fn is None
        return
    kind = {"half": torch.bfloat16, "float64": torch.float64}.get(how, torch.float32)
    x, y = x.detach().to(kind).requires_grad_(), y.to(kind)
    loss = tw.bce_with_logits(x, y, reduction="none" if how == "none" else "mean")
    node: Any = loss.grad_fn
    assert getattr(node, "held", None) is not None if how == "float64" else not hasattr(node, "held")
    torch.autograd.grad(loss.sum(), x)


def test_deterministic_algorithms_and_many_calls_give_the_same_bits() -> None:
    x, y = leaf()
    expected = torch.autograd.grad(tw.bce_with_logits(x, y), x)[0]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(tw.bce_with_logits(x, y), x)[0], expected)
    finally:
        torch.use_deterministic_algorithms(False)


# Who does not: where others see what is saved -------------------------------------------------------------------------


def test_hooks_of_saved_tensors_see_it_and_nothing_is_overwritten() -> None:
    x, y = leaf()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = tw.bce_with_logits(x, y)
    assert held(loss) == [] and len(packed) == 3
    unit = packed[-1].clone()
    for dy in (4.0, 3.0):
        (found,) = torch.autograd.grad(loss, x, torch.tensor(dy), retain_graph=True)
        close(found, wanted(x, y, dy=dy))
    assert torch.equal(packed[-1], unit)
    with torch.autograd.graph.save_on_cpu():
        loss = tw.bce_with_logits(x, y)
    loss.backward()
    close(x.grad, wanted(x, y))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, y = leaf()
    loss = checkpoint(lambda x: tw.bce_with_logits(x.sin(), y) * 3, x, use_reentrant=reentrant)
    loss.backward()
    leaves = x.detach().sin().requires_grad_()
    close(x.grad, wanted(leaves, y, dy=3.0) * x.detach().cos())


def test_a_changed_input_is_noticed_though_it_would_not_be_read() -> None:
    x, y = leaf()
    hidden = x * 1
    loss = tw.bce_with_logits(hidden, y)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_graphs_read_it(fresh: None) -> None:
    compiled = torch.compile(lambda x, y: tw.bce_with_logits(x, y), backend="aot_eager", fullgraph=True)
    x, y = leaf()
    loss = compiled(x, y)
    import torch._functorch.config as functorch

    with functorch.patch(donated_buffer=False):
        loss = compiled(*leaf(0))
    x, y = leaf()
    loss = compiled(x, y)
    loss.backward(torch.tensor(3.0))
    close(x.grad, wanted(x, y, dy=3.0))


def test_the_nodes_own_gradient_reads_it() -> None:
    x, y = leaf()
    loss = torch.ops.tilewright.bce_with_logits(x, y, None, None, reduction="sum", out_dtype=None)
    first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    close(first, wanted(x, y, "sum", 3.0))


class Names(TorchDispatchMode):
    """Lists the nodes of the library that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if "tilewright" in str(func) else []
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_nodes() -> None:
    x, y = leaf()
    with Names() as both:
        tw.bce_with_logits(x, y).backward()
    assert both.seen == ["tilewright.bce_with_logits_saving.default", "tilewright.bce_with_logits_backward.default"]
    x, y = leaf()
    loss = tw.bce_with_logits(x, y)
    with Names() as late:
        (first,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    assert late.seen == ["tilewright.bce_with_logits_backward_.default", "tilewright.bce_with_logits_backward.default"]
    assert torch.equal(first, kept)
    close(first, wanted(x, y, dy=3.0))
    close(second, first)


def test_a_second_derivative_is_refused_in_the_ops_name() -> None:
    x, y = leaf()
    with pytest.raises(tw.NoGradient, match=r"^bce_with_logits_backward has no gradient: double backward"):
        torch.autograd.grad(tw.bce_with_logits(x, y), x, create_graph=True)


# The op and its form --------------------------------------------------------------------------------------------------


def given(dy: float = 3.0, **more: Any) -> dict[str, Any]:
    x, y = leaf()
    unit = wanted(x, y)
    return {"dy": torch.as_tensor(dy), "logits": x.detach(), "targets": y, "weight": None, "pos_weight": None,
            "unit": unit, **more}  # fmt: skip


@backends
def test_the_op_multiplies_what_it_is_given_and_reads_nothing_else(backend: str | None) -> None:
    inputs = given()
    nothing = torch.full((ROWS, 2 * C), torch.nan)[:, ::2]  # in strides that no kernel of the formula takes
    inputs |= {"logits": nothing, "targets": nothing}
    assert torch.equal(tw.bce_with_logits_backward(**inputs, backend=backend), 3.0 * inputs["unit"])


@backends
def test_the_form_writes_there_and_leaves_alone_what_is_right(backend: str | None) -> None:
    for dy in (3.0, 1.0, torch.nan):
        inputs = given(dy)
        inputs["unit"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        expected = tw.bce_with_logits_backward(**inputs, backend=backend)
        found = FORM(**inputs, backend=backend)
        assert found is inputs["unit"]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_form_is_for_autograd_and_not_listed() -> None:
    assert FORM.name == "bce_with_logits_backward_" and FORM not in registry.forms()
    assert registry.find(FORM.name) is FORM and not hasattr(tw, FORM.name)
    inputs = given(unit=None)
    with pytest.raises(tw.InvalidArgument, match="bce_with_logits_backward_: unit: None, and it is overwritten"):
        FORM(**inputs)
    node = torch.ops.tilewright.bce_with_logits_backward_.default
    assert "Tensor(a5!)? unit" in str(node._schema) or "Tensor(a!)? unit" in str(node._schema)
    torch.library.opcheck(node, tuple(given().values()), {"reduction": "mean", "out_dtype": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "none", "dy": torch.ones(ROWS, C)}, "unit: given with fp32 logits and reduction 'none'"),
        ({"unit": torch.ones(ROWS, C + 1)}, r"unit: unit fp32\[6, 41\]; needs the shape and dtype of logits fp32"),
        ({"unit": torch.ones(ROWS, C).double()}, "unit: unit fp64"),
        ({"unit": torch.ones(ROWS, 2 * C)[:, :C]}, "unit: .*needs a contiguous one, as forward saves it"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.InvalidArgument, match=message):
        tw.bce_with_logits_backward(**given(**changes))
    half = {n: t.bfloat16() for n, t in given().items() if t is not None}
    with pytest.raises(tw.InvalidArgument, match="unit: given with bf16 logits and reduction 'mean'"):
        tw.bce_with_logits_backward(**half)


def _kernels(op: Any) -> list[Kernel]:
    return [k for k in registry.kernels_of(op.name) if k.backend in ("triton", "tilelang") and not k.label]


def _with_unit() -> Iterator[Case]:
    """The cases of the backward op, each once, with what forward saves; the suite itself has few such."""
    seen = set()
    for case in cases(BACKWARD, torch.float32, size="tiny"):
        absent = tuple(n for n in case.absent if n != "unit")
        for reduction in ("mean", "sum"):
            made = dataclasses.replace(case, options={**case.options, "reduction": reduction}, absent=absent)
            dense = all(kind.startswith("offset") for kind in case.layouts.values())  # as forward saves it
            if dense and 0 not in case.lead and str(made) not in seen:
                seen.add(str(made))
                yield made


@pytest.mark.parametrize("kernel", _kernels(BACKWARD), ids=str)
def test_kernels_conform_where_they_are_given_it(kernel: Kernel, device: str) -> None:
    """By value, twice, poisoned, and in place with the same bits."""
    emulated = device == "cpu"
    if emulated and kernel.backend == "tilelang":
        pytest.skip("TileLang runs on a GPU")
    ran = in_place = 0
    for case in _with_unit():
        inputs = build(case, BACKWARD, device)
        assert inputs["unit"] is not None
        options = {**BACKWARD.usual, **case.options}
        call = call_of(BACKWARD, inputs, options, False)
        truth = truth_of(BACKWARD, inputs, options, False)
        for config in kernel.configs_for(call)[: 1 if emulated else None]:
            outcome = check(kernel, config, BACKWARD, inputs, options, truth, saving=False, emulated=emulated,
                            in_place=True)  # fmt: skip
            assert not outcome.problems, (str(case), config, outcome.problems)
            ran, in_place = ran + 1, in_place + outcome.in_place
    assert ran > 20 and in_place > 15


@pytest.mark.parametrize("kernel", _kernels(BACKWARD), ids=str)
def test_nothing_moves_where_the_upstream_gradient_is_1(kernel: Kernel, device: str) -> None:
    """Bits that no product would leave: a kernel that writes them makes another NaN of them, on a GPU at the least."""
    if device == "cpu" and kernel.backend == "tilelang":
        pytest.skip("TileLang runs on a GPU")
    tensors = [None if t is None else t.to(device) for t in given(1.0).values()]
    unit = tensors[5]
    assert unit is not None
    odd = torch.tensor(
        [0x7FC12345, -0x3EDCBB, 0x7F812345], dtype=torch.int32, device=device
    )  # quiet, quiet, signalling
    unit.view(torch.int32)[1, :3] = odd
    before = unit.view(torch.int32).clone()
    call = facts_of(FORM, tensors, dict(BACKWARD.options), False, False)
    found = bind(kernel, kernel.configs_for(call)[0], call)(*tensors)
    assert found == [unit] and torch.equal(unit.view(torch.int32), before)


# Backends and declarations --------------------------------------------------------------------------------------------


def test_atens_forward_is_refused_with_a_reason_where_it_would_have_to_save() -> None:
    x, y = leaf()
    with pytest.raises(tw.NoKernel, match="does not form the gradient beside the loss"):
        tw.bce_with_logits(x, y, backend="vendor")
    assert "does not form the gradient beside the loss" in str(tw.explain(tw.bce_with_logits, x, y))
    with torch.no_grad():
        assert "does not form" not in str(tw.explain(tw.bce_with_logits, x, y))


@pytest.mark.interpreted
def test_a_pin_is_refused_at_forward_where_the_gradient_cannot_be_written_in_place() -> None:
    mine = next(k for k in registry.kernels_of(BACKWARD.name) if k.backend == "triton")
    elsewhere = dataclasses.replace(mine.capability, in_place=False)
    other = dataclasses.replace(mine, capability=elsewhere, label="elsewhere")
    registry.remove_kernel(mine)
    registry.add_kernels([other])
    x, y = leaf()
    try:
        with pytest.raises(tw.NoKernel, match="in place: does not declare that it can write dlogits over unit"):
            tw.bce_with_logits(x, y, backend="triton", reduction="sum")
    finally:
        registry.remove_kernel(other)
        registry.add_kernels([mine])
    tw.bce_with_logits(x, y, backend="triton", reduction="sum").backward()
    close(x.grad, wanted(x, y, "sum"))


def test_cost_is_of_what_moves() -> None:
    x, y = leaf()
    n = x.nbytes
    saving = call_of(OP, {"logits": x, "targets": y, "weight": None, "pos_weight": None}, OP.usual, True)
    assert OP.cost(saving)[0] == 3 * n + 4
    for unit, moved in ((wanted(x, y), 2 * n + 4), (None, 3 * n + 4)):
        options = {**BACKWARD.usual, "reduction": "mean"}
        assert BACKWARD.cost(call_of(BACKWARD, given(unit=unit), options, False))[0] == moved


@pytest.mark.parametrize(
    ("spends", "words"),
    [
        ({"dlogits": "unity"}, "gradient.spends: 'unity' is none of unit"),
        ({"dlogits": "logits"}, "gradient.spends: 'logits' is none of unit"),
        ({"dx": "unit"}, "gradient.spends: 'dx' is none of dlogits"),
    ],
)
def test_a_declaration_that_does_not_agree_is_refused(spends: dict[str, str], words: str) -> None:
    from tilewright.core import declaration

    assert OP.gradient is not None
    wrong = dataclasses.replace(OP.gradient, spends=spends)
    assert isinstance(wrong, Gradient)
    changed: Any = type("Changed", (), {**OP.__dict__, "gradient": wrong, "gradients": (wrong,)})()
    judge: Callable[[], None]
    for judge in (lambda: declaration.check(changed), lambda: declaration.check_gradient(changed, BACKWARD)):
        try:
            judge()
        except TilewrightError as error:
            assert words in str(error)
            return
    pytest.fail("nothing was refused")


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_backward_takes_no_memory() -> None:
    x, y = (torch.randn(1 << 20, device="cuda") for _ in range(2))
    x.requires_grad_()
    for _ in range(2):
        tw.bce_with_logits(x, y, backend="triton").backward()
        x.grad = None
    loss = tw.bce_with_logits(x, y, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held_before = torch.cuda.memory_allocated()
    loss.backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held_before < x.nbytes // 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("dy", [1.0, 3.0])
def test_a_captured_step_is_right_on_every_replay(backend: str, dy: float) -> None:
    """Forward writes what it saves anew each time, backward scales it; new values come through the same memory."""
    x, y = leaf(device="cuda")
    upstream = torch.tensor(dy, device="cuda")

    def step() -> Tensor:
        return torch.autograd.grad(tw.bce_with_logits(x, y, backend=backend), x, upstream)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = tw.bce_with_logits(x, y, backend=backend)
        place = held(loss)[0].data_ptr()
        (found,) = torch.autograd.grad(loss, x, upstream)
    assert found.data_ptr() == place, "in one capture it is overwritten"
    for seed in (0, 1, 1, 2):
        new, _ = leaf(seed, "cuda")
        with torch.no_grad():
            x.copy_(new)
        graph.replay()
        close(found, wanted(x, y, dy=dy))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", ["forward", "backward", "each"])
def test_graphs_that_hold_one_pass_have_copies(captured: str) -> None:
    """A graph may be replayed without the other: what is saved then stays as it is. Nothing new has to be warm."""
    x, y = leaf(device="cuda")
    upstream = torch.tensor(3.0, device="cuda")
    torch.autograd.grad(tw.bce_with_logits(x, y, backend="triton"), x, upstream)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    if captured in ("forward", "each"):
        with torch.cuda.graph(first):
            loss = tw.bce_with_logits(x, y, backend="triton")
        first.replay()
    else:
        loss = tw.bce_with_logits(x, y, backend="triton")
    (unit,) = held(loss)
    if captured in ("backward", "each"):
        with torch.cuda.graph(second, pool=first.pool() if captured == "each" else None):
            (found,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        for _ in range(3):
            second.replay()
            close(found, wanted(x, y, dy=3.0))
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        close(found, wanted(x, y, dy=3.0))
    close(unit, wanted(x, y))
    assert found.data_ptr() != unit.data_ptr()
