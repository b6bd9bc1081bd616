"""A declaration that does not agree with itself is refused at import, by the name that is wrong."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.core import declaration, node, registry
from tilewright.core.arguments import normalise
from tilewright.core.errors import InvalidArgument, TilewrightError
from tilewright.core.gradient import Backward
from tilewright.core.op import Gradient, Op, Saved, like, rows_of, upcast
from tilewright.core.op import op as declare_op
from tilewright.core.probes import Probes

GOOD: dict[str, Any] = {
    "family": "test",
    "out": {"y": like("x")},
    "gradient": Gradient("double_backward", grads={"y": "dy"}, takes={"x": "x"}, gives={"x": "dx"}),
    "check": lambda call: None,
    "cost": lambda call: (0, 0),
    "error_scale": lambda t, o: {"y": t["y"].abs()},
    "probes": Probes(dims={"x": "M C"}, options=({}, {"factor": 2.0})),
}


def double(x: Tensor, *, factor: float = 2.0) -> Tensor:
    return (factor * upcast(x)).to(x.dtype)


def double_backward(dy: Tensor, x: Tensor, *, factor: float = 2.0) -> Tensor:
    return (factor * upcast(dy)).to(dy.dtype)


def bare(x, *, factor=2.0):  # type: ignore[no-untyped-def]
    return x * factor


def listed(x: Tensor, *, factor: list[float]) -> Tensor:
    return x * factor[0]


def either(x: Tensor, *, factor: int | str = 2) -> Tensor:
    return x * int(factor)


def maybe(x: Tensor, *, factor: int | None = None, other: float | None = 1.0) -> Tensor:
    return x * (factor or other or 1)


def declare(reference: Any = double, **changes: Any) -> Op[Any]:
    return Op("double", reference=reference, **{**GOOD, **changes})


def gradient(**changes: Any) -> dict[str, Any]:
    facts = {"grads": {"y": "dy"}, "takes": {"x": "x"}, "gives": {"x": "dx"}}
    return {"gradient": Gradient("double_backward", **{**facts, **changes})}


def test_a_good_one_is_taken() -> None:
    declare()
    for op in registry.ops():
        declaration.check(op)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference": bare}, "parameter x has no type hint"),
        ({"reference": listed}, "option factor is a list"),
        ({"reference": either}, "option factor is a int | str"),
        ({"probes": Probes(dims={})}, "probes.dims lacks x"),
        ({"probes": Probes(dims={"x": "M C", "z": "C"})}, "probes.dims: 'z' is none of x"),
        ({"probes": Probes(dims={"x": "M N"})}, '"N" in "M N" is none of M (first), C, 2C, 1'),
        ({"probes": Probes(dims={"x": "M C | N"})}, '"N" in "N" is none of M (first), C, 2C, 1'),
        ({"probes": Probes(dims={"x": "M C"}, options=({"scale": 1.0},))}, "'scale' is none of factor"),
        ({"probes": Probes(dims={"x": "M C"}, absent=(("x",),))}, "probes.absent: 'x'"),
        ({"probes": Probes(dims={"x": "M C"}, either=("w",))}, "probes.either: 'w' is none of x"),
        ({"probes": Probes(dims={"x": "M C"}, dtypes={"x": (torch.int32,)})}, "probes.dtypes: 'x' is none of"),
        ({"probes": Probes(dims={"x": "M C"}, tables=("w",))}, "probes.tables: 'w' is none of x"),
        ({"probes": Probes(dims={"x": "V C"}, sizes={"V": 9}, long=("L",))}, "probes.long: 'L' is none of V"),
        ({"saved": {"s": Saved(rows_of("x"), lambda z: torch.ones(1))}}, "saved s: 'z' is none of x, factor, y"),
        (gradient(grads={"z": "dy"}), "gradient.grads: 'z' is none of y"),
        (gradient(takes={"x": "z"}), "gradient.takes: 'z' is none of x, y"),
        (gradient(seldom=("z",)), "gradient.seldom: 'z' is none of y"),
        (gradient(gives={"z": "dx"}), "gradient.gives: 'z' is none of x"),
        (gradient(only={"x": "z"}), "gradient.only: 'z' is none of "),
        (gradient(finds={"n": Saved(like("x"), lambda z: z)}), "gradient.finds n: 'z' is none of x, y, factor"),
        ({"gradient_if": {"factor": GOOD["gradient"]}}, "gradient_if: 'factor' is none of "),
        (
            {"gradient": None, "gradient_if": {"factor": GOOD["gradient"]}},
            "gradients of other inputs than gradient does",
        ),
        ({"probes": Probes(dims={"x": "M*V C"})}, 'probes.dims: "M*V" in "M*V C" is none of M (first), C, 2C, 1'),
        ({"probes": Probes(dims={"x": "M C"}, by_option=("w",))}, "probes.by_option: 'w' is none of x"),
    ],
)
def test_a_wrong_name_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TilewrightError, match="does not agree with itself") as caught:
        declare(**changes)
    assert words in str(caught.value)


def test_an_option_may_be_none() -> None:
    op = declare(maybe, gradient=None)
    schema = node.schema(op, saving=False)
    assert "int? factor" in schema and "float? other" in schema
    assert normalise(op, (None, None), None) == {"factor": None, "other": None}
    assert normalise(op, (3, 2), None) == {"factor": 3, "other": 2.0}
    with pytest.raises(InvalidArgument, match=r"factor: 1\.5 is a float; an integer is needed"):
        normalise(op, (1.5, None), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (gradient(grads={"y": "dz"}), "double_backward needs dy"),
        (gradient(takes={}), "double_backward needs x"),
        (gradient(takes={"x": "x", "w": "x"}), "'w' is none of dy, x"),
        (gradient(gives={"x": "dz"}), "gradient.gives: 'dz' is none of dx"),
        (gradient(coo={"dx": "ids"}), "gradient.coo: 'ids' is none of dx"),
        (gradient(finds={"n": Saved(like("x"), lambda x: x)}), "'n' is none of dy, x"),
    ],
)
def test_the_gradients_side_is_checked_too(changes: dict[str, Any], words: str) -> None:
    dims = Probes(dims={"dy": "M C", "x": "M C"})
    backward = declare(double_backward, out={"dx": like("x")}, gradient=None, probes=dims)
    backward.name = "double_backward"
    declaration.check_gradient(declare(), backward)
    with pytest.raises(TilewrightError, match="op double does not agree with itself") as caught:
        declaration.check_gradient(declare(**changes), backward)
    assert words in str(caught.value)


@pytest.mark.parametrize("taken", ["key", "plan", "deterministic", "type", "TypeError"])
def test_names_that_the_entry_needs_for_itself_are_refused(taken: str) -> None:
    """It is generated text: an option of such a name would be overwritten where the call is looked up."""

    def toy(x: Tensor, *, eps: float = 1.0) -> Tensor:
        return x * eps

    toy.__name__ = "toy_with_a_taken_name"
    toy.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            inspect.Parameter(taken, inspect.Parameter.KEYWORD_ONLY, default=1.0),
        ]
    )
    toy.__annotations__ = {"x": "Tensor", taken: "float", "return": "Tensor"}
    probes = Probes(dims={"x": "M C"})
    with pytest.raises(TilewrightError, match=f"{taken} is a name of the entry's own"):
        declare_op(**{**GOOD, "probes": probes, "gradient": None})(toy)


@pytest.mark.parametrize("name", ["plans", "recent", "policy_here", "gain", "x", "_gradient"])
def test_an_op_may_be_called_as_what_its_text_reads(name: str) -> None:
    """As a name of the entry's own, one of its options or of its tensors. Its gradient is then found by guards too."""

    def forward(x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x * gain

    def backward(dy: Tensor, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return dy * gain

    forward.__name__, backward.__name__ = f"forward_of_{name}", name
    there = {**GOOD, "error_scale": lambda t, o: {}}
    facts: dict[str, Any] = {"grads": {"y": "dy"}, "takes": {"x": "x"}, "gives": {"x": "dx"}}
    try:
        dims = Probes(dims={"dy": "M C", "x": "M C"})
        declare_op(**{**there, "out": {"dx": like("x")}, "gradient": None, "probes": dims})(backward)
        op = declare_op(**{**there, "gradient": Gradient(name, **facts), "probes": Probes(dims={"x": "M C"})})(forward)
        x, dy = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
        served: list[str] = []
        for gain in (2.0, 3.0):
            y = op(x, gain=gain)
            for _ in range(3):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Backward, "__call__", _noted(Backward.__call__, served))
                    (found,) = torch.autograd.grad(y, x, dy, retain_graph=True)
                assert torch.equal(found, dy * gain)
            assert torch.equal(registry.op(name)(dy, x.detach(), gain=gain), dy * gain)
        assert len(served) <= 4, "once to make a shortcut, once more where the first use was checked"
    finally:
        for made in (name, f"forward_of_{name}"):
            registry._ops.pop(made, None)
            registry._kernels.pop(made, None)


def _noted(call: Any, served: list[str]) -> Any:
    return lambda self, *args: served.append(self.op.name) or call(self, *args)


def test_a_refused_declaration_can_be_mended_and_made_again() -> None:
    """In a notebook: torch, which takes a name once, has not heard of the refused one."""
    name = "mended_in_a_notebook"

    def make(takes: dict[str, str]) -> Op[Any]:
        def toy(x: Tensor, *, eps: float = 1.0) -> Tensor:
            return x * eps

        toy.__name__ = name
        facts = {"grads": {"y": "dy"}, "takes": takes, "gives": {"x": "dx"}}
        probes = Probes(dims={"x": "M C"})
        return declare_op(**{**GOOD, "probes": probes, "gradient": Gradient("l2_norm_backward", **facts)})(toy)

    try:
        with pytest.raises(TilewrightError, match="l2_norm_backward needs rstd"):
            make({"y": "y"})
        assert make({"y": "y", "rstd": "x"}) is registry.op(name)
        with pytest.raises(TilewrightError, match="is declared twice"):
            make({"y": "y", "rstd": "x"})
    finally:
        registry._ops.pop(name, None)
        registry._kernels.pop(name, None)
