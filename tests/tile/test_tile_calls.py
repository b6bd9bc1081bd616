"""Calls by hand: arguments that no kernel can read, memory that meets, and grids, each refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilewright import tile
from tilewright.tile import TileError, TraceError
from tilewright.tile.runtime import target
from tilewright.tile.runtime.arguments import memory_of

needs_compiler = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")
ROW = np.arange(8, dtype=np.float32)


@tile.kernel(static={"x": (0,)})
def scale(t: Any, x: Any, y: Any, by: Any = 2.0) -> None:
    i = t.arange(x.shape[0])
    t.store(y[i], t.load(x[i]) * by)


@tile.kernel
def count(t: Any, y: Any, step: Any) -> None:
    total = t.var(0.0)
    for _ in t.range(0, 10, step):
        total.set(total.get() + 1.0)
    t.store(y[0], total.get())


def _expanded(n: int) -> torch.Tensor:
    return torch.zeros(1).expand(n)


def _freed() -> torch.Tensor:
    made = torch.zeros(8)
    made.untyped_storage().resize_(0)
    return made


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(8)


REFUSED = {
    "fake": (_fake, "FakeTensor .*has no memory"),
    "mkldnn": (lambda: torch.zeros(8).to_mkldnn(), "layout _mkldnn"),
    "negative bit": (lambda: torch.zeros(8, dtype=torch.complex64).conj().imag, r"is_neg\(\) is set"),
    "meta": (lambda: torch.zeros(8, device="meta"), "on meta"),
    "sparse": (lambda: torch.ones(8).to_sparse(), "layout sparse_coo"),
    "complex": (lambda: torch.zeros(8, dtype=torch.complex64), "no element type is called complex64"),
    "freed": (_freed, "has no memory"),
    "no axis": (lambda: torch.tensor(1.0), "of no axis"),
    "other byte order": (lambda: ROW.astype(ROW.dtype.newbyteorder()), "byte order"),
    "field": (lambda: np.zeros(8, [("a", "f4"), ("b", "u1")])["a"], "no multiple of the element's 4"),
    "masked": (lambda: np.ma.masked_greater(ROW, 3), "masked array"),
    "no axis in numpy": (lambda: np.array(1.0, np.float32), "of no axis"),
    "list with a dtype": (lambda: type("Odd", (), {"dtype": "float32"})(), "Odd is no array"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_that_is_not_what_it_says_is_refused_by_name(kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(TileError, match=f"scale: x: .*{why}"):
        scale[1](make(), ROW.copy())


def test_a_conjugate_is_refused() -> None:
    with pytest.raises(TileError, match=r"is_conj\(\) is set"):
        memory_of(torch.zeros(8, dtype=torch.complex64).conj())


def test_bits_of_another_size_are_refused() -> None:
    with pytest.raises(TileError, match="4 bytes: not bfloat16, which is 2"):
        memory_of(ROW, tile.bfloat16)


def test_a_read_only_output_is_refused_and_a_read_only_input_is_not() -> None:
    fixed = ROW.copy()
    fixed.flags.writeable = False
    with pytest.raises(TileError, match="scale: y is written, and the array is read-only"):
        scale[1](ROW, fixed)
    if not target.missing():
        y = np.zeros_like(ROW)
        scale[1](fixed, y)
        assert np.array_equal(y, 2 * ROW)


def overlapping() -> dict[str, tuple[Any, Any]]:
    base, table = np.arange(16, dtype=np.float32), torch.arange(16.0).view(4, 4)
    return {
        "same": (base[:8], base[:8]), "shifted": (base[:8], base[1:9]), "reversed": (base[:8], base[:8][::-1]),
        "a stride": (base[:8], base[::2]), "a byte": (base[:8], base.view(np.uint8)[2:34].view(np.float32)),
        "a column": (table[2], table[:, 1]), "an expanded output": (table[0], _expanded(4)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", overlapping())
def test_an_output_that_meets_an_input_is_refused(kind: str) -> None:
    x, y = overlapping()[kind]
    with pytest.raises(TileError, match="scale: y is written"):
        scale[1](x, y)


def test_two_outputs_that_meet_are_refused() -> None:
    @tile.kernel
    def two(t: Any, y: Any, z: Any) -> None:
        t.store(y[0], 1.0)
        t.store(z[0], 2.0)

    with pytest.raises(TileError, match="two: y is written and shares memory with z"):
        two[1](ROW[:4], ROW[3:])


@needs_compiler
def test_what_lies_between_each_other_or_is_declared_is_served() -> None:
    pairs = np.arange(16, dtype=np.float32).reshape(8, 2)
    scale[1](pairs[:, 0], pairs[:, 1])
    assert np.array_equal(pairs[:, 1], 2 * pairs[:, 0])
    halves = torch.arange(16.0)
    scale[1](halves[:8], halves[8:])
    assert torch.equal(halves[8:], 2 * halves[:8])
    here = ROW.copy()
    scale.aliased(("x", "y"))[1](here, here)
    assert np.array_equal(here, 2 * ROW)
    with pytest.raises(TileError, match="not element for element"):
        scale.aliased(("x", "y"))[1](here[:4], here[1:5])


GRIDS = (-1, (1, -1), (1, 1, 1, 1), (), True, 1.5, (1 << 40, 1 << 40), "4")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_grid_that_is_none_is_refused(grid: Any) -> None:
    with pytest.raises(TileError, match="scale: the grid is "):
        scale[grid](ROW, ROW.copy())


@needs_compiler
def test_grids_and_numbers_in_all_their_forms() -> None:
    y = np.zeros_like(ROW)
    for grid in (1, (1,), [1, 1], (np.int64(1), 1, 1)):
        y[:] = 0
        scale[grid](ROW, y, np.float32(3))
        assert np.array_equal(y, 3 * ROW)
    scale[0](ROW, y, 5.0)
    assert np.array_equal(y, 3 * ROW)
    lambdas = tile.kernel(lambda t, x, y, n0: t.store(y[0], t.load(x[0]) * np.float32(2) + n0.f32()))
    lambdas[1](ROW[3:], y, np.int8(4))
    assert y[0] == 10.0


@needs_compiler
def test_names_of_arguments_never_meet() -> None:
    """The size of `a` and a scalar called `n0`; the pointer of `n0` and the size of `p`."""

    def sizes(t: Any, a: Any, p: Any, n0: Any, s0: Any) -> None:
        t.store(a[1], a.shape[0].f32() * 100.0 + p.shape[0].f32() * 10.0 + n0.f32() + s0)

    a, p = np.zeros(4, np.float32)[::2], np.zeros(3, np.float32)
    tile.kernel(sizes)[1](a, p, 7, 0.5)
    assert a[1] == 237.5


@pytest.mark.parametrize("power", [70, 1400, 20000])
def test_a_number_that_does_not_fit_is_named(power: int) -> None:
    with pytest.raises(TileError, match=r"scale: by: .* does not fit int64"):
        scale[1](ROW, ROW.copy(), -(2**power))
    with pytest.raises(TraceError, match="does not fit int64"):
        tile.kernel(lambda t, x: t.store(x[t.program_id(0) + 2**power], 0.0))[1](ROW)
    if power > 128:
        with pytest.raises(TraceError, match="does not fit float32"):
            tile.kernel(lambda t, x: t.store(x[0], t.load(x[0]) * 2**power))[1](ROW)


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(TileError, match=r"scale: by: .* is neither a tensor nor a number"):
        scale[1](ROW, ROW.copy(), object())
    with pytest.raises(TraceError, match=r"\(list\) is neither a tile nor a number"):
        tile.kernel(lambda t, x: t.store(x[0], t.load(x[0]) * [1]))[1](ROW)


@pytest.mark.parametrize("step", [0, -1])
def test_the_step_of_a_loop_is_at_least_one(step: int) -> None:
    with pytest.raises(TileError, match=f"count: step is {step}, the step of a loop"):
        count[1](np.zeros(1, np.float32), step)
