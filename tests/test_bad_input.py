"""Wrong input: the documented error naming argument, value and remedy, and the op works as before afterwards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.op import Op
from tilewright.verify.cases import make_inputs

# What torch says of the odd tensors that are made here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(The PyTorch API of nested tensors|Sparse CSR tensor support) is in:UserWarning"
)
C = 24
OPS = registry.ops()
DIFFERENTIABLE = [op for op in OPS if op.gradient is not None]
X, W = torch.randn(4, C), torch.ones(C)


class Watching(TorchDispatchMode):
    """Takes calls through the node."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "weight on another device": (
        lambda: tw.rms_norm(X, W.to("meta")),
        tw.InvalidArgument,
        "weight: on meta, other tensors on cpu; move it",
    ),
    "x on another device": (
        lambda: tw.rms_norm(X.to("meta"), W),
        tw.InvalidArgument,
        "weight: on cpu, other tensors on meta",
    ),
    "residual dtype": (
        lambda: tw.add_rms_norm(X, X.half(), W),
        tw.InvalidArgument,
        r"residual: dtype fp16, .* x is fp32; residual.to",
    ),
    "weight dtype": (
        lambda: tw.rms_norm(X.half(), W.bfloat16()),
        tw.InvalidArgument,
        r"weight: dtype bf16; takes fp16 \(as x\) or fp32",
    ),
    "weight double": (lambda: tw.rms_norm(X, W.double()), tw.InvalidArgument, "weight: dtype fp64; takes fp32"),
    "bias dtype": (lambda: tw.layer_norm(X, W, W.half()), tw.InvalidArgument, "bias: dtype fp16"),
    "weight size": (lambda: tw.rms_norm(X, W[:-1]), tw.InvalidArgument, rf"weight: shape \[{C - 1}\]; needs \[{C}\]"),
    "weight rank": (lambda: tw.layer_norm(X, W[None], W), tw.InvalidArgument, rf"weight: shape \[1, {C}\]"),
    "weight of one": (lambda: tw.rms_norm(X, torch.ones(1)), tw.InvalidArgument, r"weight: shape \[1\]"),
    "residual shape": (
        lambda: tw.add_rms_norm(X, X[:1]),
        tw.InvalidArgument,
        rf"residual: shape \[1, {C}\], while x has \[4, {C}\]",
    ),
    "integers": (lambda: tw.l2_norm(X.int()), tw.InvalidArgument, "x: dtype int32; takes fp32, fp16, bf16"),
    "booleans": (lambda: tw.l2_norm(X > 0), tw.InvalidArgument, "x: dtype bool"),
    "complex": (lambda: tw.l2_norm(X.to(torch.complex64)), tw.InvalidArgument, "x: dtype complex64"),
    "fp8": (lambda: tw.rms_norm(X.to(torch.float8_e4m3fn)), tw.InvalidArgument, "x: dtype float8_e4m3fn"),
    "sparse": (lambda: tw.rms_norm(X.to_sparse()), tw.InvalidArgument, "x: layout torch.sparse_coo; a strided tensor"),
    "sparse csr": (lambda: tw.rms_norm(X.to_sparse_csr(), W), tw.InvalidArgument, "x: layout torch.sparse_csr"),
    "scalar": (lambda: tw.rms_norm(torch.tensor(1.0)), tw.InvalidArgument, "x: a scalar; needs at least one dimension"),
    "zero width": (
        lambda: tw.layer_norm(X[:, :0]),
        tw.InvalidArgument,
        r"x: shape \[4, 0\]; the last dimension must not",
    ),
    "negative eps": (lambda: tw.rms_norm(X, eps=-1e-6), tw.InvalidArgument, "eps: -1e-06; must be 0 or more"),
    "NaN eps": (lambda: tw.rms_norm(X, eps=math.nan), tw.InvalidArgument, "eps: NaN; a number is needed"),
    "minus infinite eps": (lambda: tw.rms_norm(X, eps=-math.inf), tw.InvalidArgument, "eps: -inf"),
    "eps string": (lambda: tw.rms_norm(X, eps="1e-6"), tw.InvalidArgument, "eps: '1e-6' is a str; a number"),
    "eps tensor": (lambda: tw.rms_norm(X, eps=torch.tensor(1e-6)), tw.InvalidArgument, "eps: .* is a Tensor; a number"),
    "eps list": (lambda: tw.rms_norm(X, eps=[1e-6]), tw.InvalidArgument, "eps: .* is a list; a number"),
    "eps None": (lambda: tw.rms_norm(X, eps=None), tw.InvalidArgument, "eps: None is a NoneType; a number"),
    "eps bool": (lambda: tw.rms_norm(X, eps=True), tw.InvalidArgument, "eps: True is a bool; a number"),
    "integer beyond 64 bits": (
        lambda: tw.embedding_bag_mean(W[:, None], torch.zeros(1, 1).long(), padding_idx=1 << 70),
        tw.InvalidArgument,
        "padding_idx: does not fit in 64 bits",
    ),
    "flag number": (
        lambda: tw.rms_norm(X, cast_before_weight=1),
        tw.InvalidArgument,
        "cast_before_weight: 1 is a int; True or False",
    ),
    "weight number": (lambda: tw.rms_norm(X, 2.0), tw.InvalidArgument, "weight: a float; a torch.Tensor is needed"),
    "x list": (lambda: tw.rms_norm([1.0, 2.0]), tw.InvalidArgument, "x: a list; a torch.Tensor is needed"),
    "x None": (lambda: tw.rms_norm(None), tw.InvalidArgument, "x: None; a tensor is needed"),
    "residual None": (lambda: tw.add_rms_norm(X, None), tw.InvalidArgument, "residual: None; a tensor is needed"),
    "x numpy": (lambda: tw.rms_norm(X.numpy()), tw.InvalidArgument, "x: a ndarray; a torch.Tensor is needed"),
    "no upstream gradient": (
        lambda: tw.rms_norm_backward(None, X, W, torch.ones(4)),
        tw.InvalidArgument,
        "dy: no upstream gradient.*pass dy, dh",
    ),
    "statistics shape": (
        lambda: tw.rms_norm_backward(X, X, W, torch.ones(4, 1)),
        tw.InvalidArgument,
        r"rstd: shape \[4, 1\]; needs \[4\]",
    ),
    "statistics dtype": (
        lambda: tw.rms_norm_backward(X.half(), X.half(), W, torch.ones(4).half()),
        tw.InvalidArgument,
        "rstd: .*fp16.*needs contiguous fp32",
    ),
    "statistics strides": (
        lambda: tw.rms_norm_backward(X, X, W, torch.ones(8)[::2]),
        tw.InvalidArgument,
        "rstd: .*strides.*contiguous",
    ),
    "needs too short": (
        lambda: tw.rms_norm_backward(X, X, W, torch.ones(4), needs=(True,)),
        tw.InvalidArgument,
        "needs: .*2 booleans",
    ),
    "needs of numbers": (
        lambda: tw.rms_norm_backward(X, X, W, torch.ones(4), needs=[1, 0]),
        tw.InvalidArgument,
        "needs: .*2 booleans",
    ),
    "needs a flag": (
        lambda: tw.rms_norm_backward(X, X, W, torch.ones(4), needs=True),
        tw.InvalidArgument,
        "needs: True",
    ),
    "backend unknown": (lambda: tw.rms_norm(X, backend="cudnn"), tw.UnknownName, "unknown backend 'cudnn'; known: "),
    "backend a list": (lambda: tw.rms_norm(X, backend=["vendor"]), tw.UnknownName, "unknown backend"),
    "backward of backward": (
        lambda: tw.rms_norm_backward(X, X.clone().requires_grad_(), W, torch.ones(4)),
        tw.NoGradient,
        "rms_norm_backward",
    ),
    "unknown option": (lambda: tw.rms_norm(X, epsilon=1e-6), TypeError, "epsilon"),
    "eps by position": (lambda: tw.rms_norm(X, W, 1e-6), TypeError, "positional"),
}


@pytest.mark.parametrize("way", ["direct", "node"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_nothing_is_lost(name: str, way: str) -> None:
    call, error, message = BAD[name]
    if way == "node" and error is tw.NoGradient:
        pytest.skip("tracers run backward with grad mode on: there only differentiating its results is refused")
    good = torch.nn.functional.rms_norm(X, (C,), W, 1e-6)
    for _ in range(2):  # the second time as the first: nothing half-made is kept
        with pytest.raises(error, match=message):
            if way == "direct":
                call()
            else:
                with Watching():
                    call()
        torch.testing.assert_close(tw.rms_norm(X, W), good)


def test_explain_takes_ops_and_their_names_and_nothing_else() -> None:
    x = torch.randn(2, 8)
    assert str(tw.explain("rms_norm", x)) == str(tw.explain(tw.rms_norm, x))
    with pytest.raises(tw.UnknownName, match="rms_norm"):
        tw.explain("rmsnorm", x)
    with pytest.raises(tw.InvalidArgument, match=r"is no op; one of .*rms_norm"):
        tw.explain(torch.nn.functional.rms_norm, x)  # type: ignore[arg-type]


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(tw.InvalidArgument, match="eps: larger than any float"):
        tw.rms_norm(torch.randn(2, 8), eps=10**400)


@pytest.mark.parametrize("name", ["weight", "bias", "pre_bias"])
def test_parameters_that_are_not_dense_are_never_read_as_dense(name: str) -> None:
    """A kernel on a GPU walks a parameter by its address: one of another stride is refused with the reason. One of the
    tile backend reads any."""
    x = torch.randn(3, 32768)
    for bent in (torch.randn(65536)[::2], torch.randn(1).expand(32768)):
        found = tw.explain(tw.add_layer_norm, x, x, **{name: bent})
        call = dataclasses.replace(found.call, device=target_device("sm_90"))
        launched = [c.kernel for c in found.candidates if registry.backend(c.backend).launches and c.backend != "tile"]
        assert {k.backend for k in launched} == {"cuda", "triton", "tilelang"}
        for kernel in launched:
            reasons = [r for r in kernel.capability.reasons(call) if r.argument == name]
            assert [r.problem for r in reasons] == [f"last dimension has stride {bent.stride(0)}; needs 1"]
        if registry.backend("tile").missing() is None:
            mine, wanted = (tw.add_layer_norm(x, x, **{name: bent}, backend=b)[0] for b in ("tile", "reference"))
            torch.testing.assert_close(mine, wanted)


def test_errors_are_the_built_in_ones_too() -> None:
    with pytest.raises(ValueError):
        tw.rms_norm(X, eps=-1.0)
    with pytest.raises(RuntimeError):
        tw.rms_norm(X, backend="cuda")
    with pytest.raises(tw.TilewrightError) as error:
        tw.rms_norm(X, W[:3])
    found = error.value
    assert isinstance(found, tw.InvalidArgument)
    assert (found.op, found.argument) == ("rms_norm", "weight") and found.problem and found.remedy


def test_refusals_do_not_depend_on_what_was_called_before() -> None:
    """True equals 1 and 1.0 in a dictionary."""
    for _ in range(2):
        tw.rms_norm(X, W, eps=1.0, cast_before_weight=True)
        tw.rms_norm(X, W, eps=1)
        with pytest.raises(tw.InvalidArgument, match="eps"):
            tw.rms_norm(X, W, eps=True)
        with pytest.raises(tw.InvalidArgument, match="cast_before_weight"):
            tw.rms_norm(X, W, eps=1.0, cast_before_weight=1)


@pytest.mark.parametrize("kind", ["sparse", "csr", "mkldnn", "nested", "jagged", "list"])
def test_odd_tensors_are_refused_where_a_plan_is_warm(kind: str) -> None:
    """What torch's guards cannot look at (they abort the process for a nested tensor) must not reach them."""
    odd: Any = {
        "sparse": X.to_sparse,
        "csr": X.to_sparse_csr,
        "mkldnn": X.to_mkldnn,
        "nested": lambda: torch.nested.nested_tensor([X, X], layout=torch.strided),
        "jagged": lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
        "list": lambda: [1.0],
    }[kind]()
    message = r"a list|layout torch|a nested tensor; pass .*\.values"
    for weight in ((), (W,)):
        for _ in range(3):
            tw.rms_norm(X, *weight)
        with pytest.raises(tw.InvalidArgument, match=f"x: ({message})"):
            tw.rms_norm(odd, *weight)
    with pytest.raises(tw.InvalidArgument, match=f"weight: ({message})"):
        tw.rms_norm(X, odd)
    tw.rms_norm(X, W)


@pytest.mark.parametrize("backend", [None, "reference", "triton"])
@pytest.mark.parametrize("lead", [(0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_empty_rows_give_the_right_result_and_gradients(
    op: Op[Any], lead: tuple[int, ...], backend: str | None
) -> None:
    assert op.gradient is not None
    for name in (op.name, op.gradient.op):
        if backend is not None and backend not in {k.backend for k in registry.kernels_of(name)}:
            pytest.skip(f"{name} has no {backend} kernel")
    inputs = make_inputs(op, (*lead, C), torch.float32)
    wanted = [n for n in inputs if n in op.gradient.gives]
    for name in wanted:
        inputs[name].requires_grad_()
    outputs = op(*inputs.values(), backend=backend, **op.usual)
    outputs = [outputs] if op.single else list(outputs)
    specs = op.out_specs(inputs, op.usual, False).values()
    assert all((o.shape, o.dtype) == spec and o.is_contiguous() for o, spec in zip(outputs, specs, strict=True))
    sum(o.sum() for o in outputs).backward()
    for name in wanted:
        tensor = inputs[name]
        assert tensor is not None and tensor.grad is not None, name
        assert tensor.grad.shape == tensor.shape and not tensor.grad.any(), name


@pytest.mark.parametrize("op", [op for op in OPS if op.gradient is None], ids=str)
def test_gradients_of_ops_without_one_are_refused_by_name(op: Op[Any]) -> None:
    inputs = list(make_inputs(op, (3, C), torch.float32).values())
    last = [t for t in inputs if t is not None and t.is_floating_point()][:2][-1]
    last.requires_grad_()
    with pytest.raises(tw.NoGradient, match=op.name):
        op(*inputs, **op.usual)
    with torch.no_grad():
        assert op(*inputs, **op.usual) is not None


def test_a_failing_call_in_the_middle_of_a_graph_leaves_gradients_right() -> None:
    x = X.clone().requires_grad_()
    y = tw.rms_norm(x, W)
    with pytest.raises(tw.InvalidArgument):
        tw.rms_norm(y, W[:3])
    y.sum().backward()
    (expected,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (C,), W, 1e-6).sum(), x)
    torch.testing.assert_close(x.grad, expected)
