"""`t.print`: the same lines in the same order from the interpreter, the emulator, and compiled code."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tile_runs import compiled_run, order

from tilewright import tile
from tilewright.tile import TraceError, ViewType
from tilewright.tile.ir.tile_ir import Most, Program
from tilewright.tile.lower.kernel import lower
from tilewright.tile.oracle import emulator
from tilewright.tile.oracle.interpreter import run
from tilewright.tile.runtime import cpu, cuda, nvrtc, target
from tilewright.tile.schedule import Schedule
from tilewright.tile.sync import barriers
from tilewright.tile.sync.shared import arrange

SRC = Path(tile.__file__).parent.parent
WIDTH = 37


def told(t: Any, x: Any, y: Any) -> None:
    """Tiles, scalars, every kind of value, before and after what they depend on, in a loop and under a condition."""
    row, col = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[row, col])
    t.print('100% of "x"\\', v)
    t.print("its mean", t.mean(v))
    t.print("above", v > 0.0)
    for k in t.range(2):
        t.print("k", k)
        t.print("x again", t.load(x[row, col]) * k.f32())
    t.store(y[row, col], v + 1.0)
    t.print("y", t.load(y[row, x.shape[1] - 1 - col]))
    with t.when(row == 1):
        t.print("half", (v * 0.1).to(tile.bfloat16))
        t.print("nothing", t.log(t.min(v) - 9.0) * 0.0)
    t.print("table", t.arange(2)[:, None] * 4 + t.arange(3)[None, :])


def program() -> Program:
    view = ViewType(tile.float32, (None, Most(256)))
    return tile.kernel(told, static={"x": (1,)}).trace({"x": view, "y": view})


def arguments() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)
    x[0, :4] = np.nan, -np.inf, -0.0, 1e-40
    return {"x": x, "y": np.zeros_like(x)}


def meaning(capfd: Any) -> str:
    run(program(), arguments(), (2,), order=order())
    return str(capfd.readouterr().out)


def test_the_interpreter_says_where_and_what_in_order(capfd: Any) -> None:
    lines = meaning(capfd).splitlines()
    assert lines[:4] == [
        f'(0, 0, 0) 100% of "x"\\ [{i}] {v}' for i, v in enumerate(("nan", "-inf", "-0", "9.9999461e-41"))
    ]
    assert lines[WIDTH : WIDTH + 2] == ["(0, 0, 0) its mean nan", "(0, 0, 0) above [0] 0"]
    assert lines[-1] == "(1, 0, 0) table [1, 2] 6"
    assert sum("half" in line for line in lines) == WIDTH and lines.index("(0, 0, 0) k 1") > lines.index(
        "(0, 0, 0) k 0"
    )


@pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")
def test_compiled_code_prints_what_the_interpreter_prints(capfd: Any) -> None:
    wanted, types = meaning(capfd), {"x": tile.float32, "y": tile.float32}
    compiled_run(cpu.compile(program()), arguments(), types, (2, 1, 1))
    assert capfd.readouterr().out == wanted


@pytest.mark.parametrize("schedule", (None, Schedule(32, 1, 4), Schedule(64, 1, 1)), ids=str)
def test_threads_print_what_the_interpreter_prints(schedule: Schedule | None, capfd: Any) -> None:
    """But for the mean, whose order of addition is another."""
    wanted = meaning(capfd)
    made = barriers.insert(lower(program(), schedule.vector if schedule else 8, schedule))
    emulator.run(made, arguments(), (2,), arena=arrange(made).offsets)
    mine = capfd.readouterr().out
    assert [w for w in wanted.splitlines() if "mean" not in w] == [m for m in mine.splitlines() if "mean" not in m]
    assert mine.count("mean") == 2


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "a CUDA compiler is here")
def test_a_gpu_prints_by_printf() -> None:
    made = cuda.compile(program(), Schedule(64, 1, 4), "sm_90")
    assert "vprintf" in made.cubin.image.decode("latin1")


def test_what_no_format_can_hold_is_refused() -> None:
    def wrong(t: Any, x: Any) -> None:
        t.print("two\nlines", t.load(x[0, 0]))

    with pytest.raises(TraceError, match=r"test_tile_print.py:\d+: t.print takes printable ASCII"):
        tile.kernel(wrong).trace({"x": ViewType(tile.float32, (None, None))})


def test_no_kernel_of_the_library_prints() -> None:
    files = [*(SRC / "ops").rglob("*.py"), *(SRC / "tile" / "lang").rglob("library.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "print"
            assert not found or not isinstance(node.func.value, ast.Name) or node.func.value.id != "t", path
    assert len(files) > 20
