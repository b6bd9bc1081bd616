"""Direct calls: what makes a plan of its own and what does not, the forms of a call, the corners of shapes."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.backends import triton as tw_triton
from tilewright.core import dispatch, registry
from tilewright.core.kernel import Kernel
from tilewright.core.op import Op

C = 32
OPS = registry.ops()
binds: list[Any] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts plans as they are made: every one goes through `bind`."""
    bind = dispatch.bind

    def counting(kernel: Kernel, config: Any, call: Any) -> Any:
        binds.append(call)
        return bind(kernel, config, call)

    monkeypatch.setattr(dispatch, "bind", counting)
    with tw.use(check="never"):
        yield


def plans_made(*calls: Any) -> int:
    """How many plans these calls needed, each made twice."""
    binds.clear()
    for call in calls:
        call()
        call()
    return len(binds)


def views(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """The same [4, C] values in different memory."""
    x = torch.randn(4, C, generator=torch.Generator().manual_seed(seed)).to(dtype)
    flat = torch.full((4 * C + 32,), torch.nan, dtype=dtype)
    found = {"dense": x}
    for offset in (1, 2, 3):
        view = flat.clone()[offset : offset + 4 * C].view(4, C)
        found[f"offset {offset}"] = view.copy_(x)
    found["wide rows"] = torch.full((4, C + 3), torch.nan, dtype=dtype)[:, :C].copy_(x)
    found["columns"] = torch.full((4, 2 * C), torch.nan, dtype=dtype)[:, ::2].copy_(x)
    found["transposed"] = x.t().contiguous().t()
    return found


# The exact key -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "vendor", "triton"])
def test_alignment_and_strides_are_in_the_key(backend: str) -> None:
    """A warmed plan for an aligned tensor must not serve a misaligned view of the same shape."""
    expected = tw.rms_norm.reference(views()["dense"])
    made = views()
    if backend == "triton":
        del made["columns"], made["transposed"]  # rows must be dense
        with pytest.raises(tw.NoKernel, match=r"x: last dimension has stride 2; needs 1; x\.contiguous"):
            tw.rms_norm(views()["columns"], backend=backend)
    assert plans_made(*[lambda v=v: tw.rms_norm(v, backend=backend) for v in made.values()]) == len(made)
    for view in made.values():
        torch.testing.assert_close(tw.rms_norm(view, backend=backend), expected)


def test_what_makes_a_plan_of_its_own() -> None:
    x, w = torch.randn(4, C), torch.ones(C)
    grad = x.clone().requires_grad_()

    def quiet() -> None:
        with torch.no_grad():
            tw.rms_norm(grad, w, eps=0.125)

    def preferring() -> None:
        with tw.use(backend="reference"):
            tw.rms_norm(x, w, eps=0.125)

    def deterministic() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            tw.rms_norm(x, w, eps=0.125)
        finally:
            torch.use_deterministic_algorithms(False)

    different = [
        lambda: tw.rms_norm(x, w, eps=0.125),
        lambda: tw.rms_norm(x, None, eps=0.125),
        lambda: tw.rms_norm(x, w, eps=0.25),
        lambda: tw.rms_norm(x, w, eps=0.125, weight_offset=1.0),
        lambda: tw.rms_norm(x, w, eps=0.125, cast_before_weight=True),
        lambda: tw.rms_norm(x[:3], w, eps=0.125),
        lambda: tw.rms_norm(x[None], w, eps=0.125),
        lambda: tw.rms_norm(x.half(), w, eps=0.125),
        lambda: tw.rms_norm(x.half(), w.half(), eps=0.125),
        lambda: tw.rms_norm(grad, w, eps=0.125),
        lambda: tw.rms_norm(x, w, eps=0.125, backend="reference"),
        quiet,
        preferring,
        deterministic,
    ]
    made = plans_made(*different)
    # without grad mode a leaf is as good as any tensor, but grad mode is in the key all the same
    assert made == len(different)
    assert plans_made(*different) == 0


def test_numbers_that_are_equal_give_equal_results() -> None:
    x = torch.randn(4, C)
    expected = tw.rms_norm.reference(x, eps=1.0)
    for eps in (1, 1.0, torch.tensor(1.0).item()):
        torch.testing.assert_close(tw.rms_norm(x, eps=eps), expected)
    torch.testing.assert_close(tw.rms_norm(x, eps=0), tw.rms_norm.reference(x, eps=0.0))


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    x = torch.randn(1, C).expand(1, C).as_strided((1, C), (7, 1))
    torch.testing.assert_close(tw.rms_norm(x), tw.rms_norm.reference(x))
    one = torch.randn(5, 1)[:, :1].as_strided((5, 1), (1, 99))
    torch.testing.assert_close(tw.rms_norm(one, backend="triton"), tw.rms_norm.reference(one), rtol=1e-6, atol=1e-6)


def test_a_batch_size_never_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton would compile for a call, by its own key, is the same for every number of rows of a class."""
    made: set[str] = set()
    prepare = tw_triton.TritonBackend.prepare

    def counting(self: Any, launches: Any, call: Any) -> Any:
        for launch in launches:
            pointers = {
                n: (a.dtype, a.align) for n, a in launch.args.items() if hasattr(a, "dtype") and hasattr(a, "align")
            }
            made.add(str((launch.function, sorted(launch.constants.items()), sorted(launch.options.items()), pointers)))
        return prepare(self, launches, call)

    monkeypatch.setattr(tw_triton.TritonBackend, "prepare", counting)
    w = torch.ones(C)
    for rows in (2, 3, 5, 6, 7, 9, 13, 16, 17):  # one row, where nothing shares its wait, is a class of its own
        x = torch.randn(rows, C)
        torch.testing.assert_close(tw.rms_norm(x, w, backend="triton"), tw.rms_norm.reference(x, w))
    assert len(made) == 1


def test_selection_is_made_once_for_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[Any] = []
    select = dispatch.selection.select
    monkeypatch.setattr(dispatch.selection, "select", lambda *a, **k: (selected.append(a), select(*a, **k))[1])
    for rows in range(65, 129):
        tw.rms_norm(torch.randn(rows, C))
    assert len(selected) == 1


# Shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (C,), (0, C), (2, 0, C), (1, 1, 1, C), (2, 3, 1, 2, 5), (3, 1), (1, 131072)]
)
def test_every_shape_from_vectors_on(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for op in (tw.rms_norm, tw.layer_norm, tw.l2_norm):
        y = op(x)
        assert y.shape == x.shape and y.is_contiguous()
        torch.testing.assert_close(y, op.reference(x), rtol=1e-4, atol=1e-5)
    y, h = tw.add_rms_norm(x, x)
    torch.testing.assert_close(h, x + x)
    assert y.shape == x.shape


def test_a_width_beyond_what_kernels_take_is_served_all_the_same() -> None:
    x = torch.randn(1, 200_001)
    torch.testing.assert_close(tw.rms_norm(x), tw.rms_norm.reference(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(tw.NoKernel, match="x: last dimension 200001 is above 131072"):
        tw.rms_norm(x, backend="triton")


def test_rows_in_more_strides_than_a_kernel_takes() -> None:
    x = torch.randn(2, 3, 4, 5, C)[:, ::2, ::3, ::2]
    assert len(dispatch.facts_of(tw.rms_norm, [x, None], dict(tw.rms_norm.options), False, False).x.row_levels) == 4
    torch.testing.assert_close(tw.rms_norm(x), tw.rms_norm.reference(x))
    with pytest.raises(tw.NoKernel, match=r"x: leading strides .* merge into 4 levels; takes 2; x\.contig"):
        tw.rms_norm(x, backend="triton")


# Forms of a call ---------------------------------------------------------------------------------------------------


def test_keyword_and_positional_forms_are_one_plan() -> None:
    x, r, w, b = torch.randn(4, C), torch.randn(4, C), torch.ones(C), torch.zeros(C)
    forms = [
        lambda: tw.add_layer_norm(x, r, w, b),
        lambda: tw.add_layer_norm(x, r, weight=w, bias=b),
        lambda: tw.add_layer_norm(bias=b, weight=w, residual=r, x=x),
        lambda: tw.add_layer_norm(x, r, w, b, None),
        lambda: tw.add_layer_norm(x, r, w, b, pre_bias=None, eps=1e-5),
        lambda: tw.add_layer_norm(x, r, w, b, backend=None),
    ]
    assert plans_made(*forms) == 1
    for form in forms:
        torch.testing.assert_close(form(), forms[0]())
    torch.testing.assert_close(tw.layer_norm(x, None, b), tw.layer_norm.reference(x, None, b))
    assert not torch.equal(tw.layer_norm(x, w, b + 2), tw.layer_norm(x, b + 2, w))


@pytest.mark.parametrize("call", [
    lambda: tw.rms_norm(), lambda: tw.rms_norm(torch.ones(2), x=torch.ones(2)), lambda: tw.add_rms_norm(torch.ones(2)),
    lambda: tw.rms_norm(torch.ones(2), torch.ones(2), torch.ones(2)), lambda: tw.rms_norm(torch.ones(2), bias=None),
])  # fmt: skip
def test_wrong_forms_are_type_errors(call: Any) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize("op", OPS, ids=str)
def test_ops_pickle_copy_and_document_themselves(op: Op[Any]) -> None:
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.deepcopy(op) is op and copy.copy(op) is op
    public = getattr(tw, op.name)
    assert getattr(public, "op", public) is op and repr(op) == f"<op {op.name}>"
    signature = inspect.signature(op)
    assert [*signature.parameters] == [*op.tensors, *op.options, "backend"]
    for name, default in op.options.items():
        assert signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature.parameters[name].default == default
    doc = inspect.getdoc(op)
    assert doc and "Args:" in doc and "Returns:" in doc
    assert all(
        name in doc for name in (*op.tensors, *op.options) if name not in ("weight_offset", "cast_before_weight")
    )
    assert doc.splitlines()[0] in pydoc.plain(pydoc.render_doc(op))
    assert op.__name__ == op.name


@pytest.mark.parametrize("op", OPS, ids=str)
def test_results_are_new_memory_each_time(op: Op[Any]) -> None:
    """Two calls of one plan: the second must not write into what the first returned."""
    from tilewright.verify.cases import make_inputs

    first, second = make_inputs(op, (3, C), torch.float32, seed=1), make_inputs(op, (3, C), torch.float32, seed=2)
    outputs = op(*first.values(), **op.usual)
    kept = [r.clone() for r in ([outputs] if op.single else outputs)]
    op(*second.values(), **op.usual)
    for output, copy_ in zip([outputs] if op.single else outputs, kept, strict=True):
        assert torch.equal(output, copy_)


def test_explain_takes_every_form_of_the_call() -> None:
    x, w = torch.randn(4, C), torch.ones(C)
    for found in (
        tw.explain(tw.rms_norm, x, w),
        tw.explain(tw.rms_norm, weight=w, x=x, eps=1),
        tw.explain(tw.rms_norm, x),
    ):
        assert found.chosen is not None and found.call.x.shape == (4, C)
    with pytest.raises(tw.InvalidArgument):
        tw.explain(tw.rms_norm, x, w[:3])
    with pytest.raises(tw.UnknownName):
        tw.explain(tw.rms_norm, x, backend="nope")
    assert "gradient" in str(tw.explain(tw.rms_norm, x.requires_grad_()))
