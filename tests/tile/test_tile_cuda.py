"""CUDA text of tile kernels compiles for GPUs that nobody here needs to have: no spills, and what the text promises."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_programs as generate
from test_tile_threads import _program
from tile_runs import F32

from tilewright import tile
from tilewright.tile import ViewType
from tilewright.tile.errors import CompilerError, LowerError, TileError
from tilewright.tile.lang.library import softmax
from tilewright.tile.runtime import cuda, nvrtc
from tilewright.tile.runtime.arguments import Memory, alignment
from tilewright.tile.schedule import Schedule, default

needs_compiler = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
SCHEDULES = ((32, 1, 4), (64, 1, 2), (128, 1, 1), (32, 4, 8), (256, 1, 4))
LATER = [pytest.param(a, marks=pytest.mark.slow) for a in ("sm_80", "sm_100", "sm_120")]


def _rows(function: Any, dtype: Any, width: int, *others: str) -> Any:
    view = ViewType(dtype, (None, width), align=16)
    return tile.kernel(function, static={"x": (1,)}).trace(dict.fromkeys(("x", *others), view))


def _softmax(t: Any, x: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    t.store(y[at], softmax(t, t.load(x[at]).f32()).to(y.dtype, saturate=y.dtype == tile.float8_e4m3fn))


def _swiglu(t: Any, x: Any, up: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    g = t.load(x[at]).f32()
    t.store(y[at], (g * t.sigmoid(g) * t.load(up[at]).f32()).to(y.dtype))


PROGRAMS = {
    "norm to int8": lambda: (_program(4096), Schedule(128, 1, 8)),
    "norm of a long row": lambda: (_program(16384), Schedule(1024, 1, 8)),
    "softmax": lambda: (_rows(_softmax, tile.bfloat16, 4096, "y"), Schedule(256, 1, 8)),
    "softmax of warps": lambda: (_rows(_softmax, F32, 1000, "y"), Schedule(32, 4, 4)),
    "swiglu": lambda: (_rows(_swiglu, tile.bfloat16, 8192, "up", "y"), Schedule(256, 1, 8)),
    "to float8": lambda: (_rows(_softmax, tile.float8_e4m3fn, 512, "y"), Schedule(32, 1, 16)),
}


SPILLS = {"norm of a long row": 8}
"""Bytes: for them ptxas stays within 32 registers, so that two blocks of 1024 threads fit a multiprocessor."""


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", *LATER])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compile_without_spills(name: str, arch: str) -> None:
    program, schedule = PROGRAMS[name]()
    made = cuda.compile(program, schedule, arch)
    assert made.cubin.image.startswith(b"\x7fELF") and made.source.symbol.encode() in made.cubin.image
    assert max(made.cubin.spills, made.cubin.stack) <= SPILLS.get(name, 0), made.cubin.log
    assert 0 < made.cubin.registers <= 65536 // schedule.threads // schedule.instances


@needs_compiler
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 60))])
def test_random_programs_compile(seed: int) -> None:
    made = cuda.compile(generate.sample(seed).program, Schedule(*SCHEDULES[seed % 5]), "sm_90")
    assert made.cubin.registers > 0


@pytest.mark.skipif(not nvrtc.nvcc(), reason="nvcc is not here")
@pytest.mark.parametrize("name", ["norm to int8", "to float8"])
def test_nvcc_serves_where_nvrtc_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_file", lambda: "")
    assert nvrtc.version().startswith("nvcc")
    made = cuda.compile(*PROGRAMS[name](), "sm_90")
    assert made.cubin.registers > 0 and made.cubin.spills == made.cubin.stack == 0


def test_the_text_says_what_was_proven() -> None:
    """Sixteen bytes an access where all divide by it, read-only loads of what nobody writes, no header."""
    _, source = cuda.text_of(_program(4096), Schedule(128, 1, 8))
    assert "#include" not in source.text
    assert "load<u16v, 16>(p_x" in source.text and "store<u16v, 16>(p_h" in source.text
    assert set(re.findall(r"ReadOnly<\w+> (p_\w+)", source.text)) == {"p_x", "p_r", "p_w"}
    odd = _rows(_swiglu, tile.bfloat16, 8191, "up", "y")
    assert "load<u16v, 16>" in cuda.text_of(odd, Schedule(128, 1, 8))[1].text
    unaligned = {n: ViewType(tile.bfloat16, (None, 4096)) for n in ("x", "up", "y")}
    text = cuda.text_of(tile.kernel(_swiglu, static={"x": (1,)}).trace(unaligned), Schedule(128, 1, 8))[1].text
    assert "load<u16v, 2>" in text and "load<u16v, 16>" not in text


def test_tiles_that_wait_in_shared_memory_move_16_bytes_at_once() -> None:
    waiting = cuda.text_of(_rows(_softmax, tile.bfloat16, 4096, "y"), Schedule(128, 1, 8, registers=0))[1].text
    assert re.search(r"store<f32v, 16>\(s\d+ \+", waiting) and re.search(r"load<f32v, 16>\(s\d+ \+", waiting)
    odd = cuda.text_of(_rows(_softmax, tile.bfloat16, 4095, "y"), Schedule(128, 1, 8, registers=0))[1].text
    assert re.search(r"store_some<f32v, 16>\(s\d+ \+", odd)


def test_a_view_that_another_may_overwrite_is_not_read_only() -> None:
    view = ViewType(F32, (None, 64), align=16)
    kernel = tile.kernel(_softmax, static={"x": (1,)})
    for found, read_only in ((kernel, True), (kernel.aliased(("x", "y")), False)):
        text = cuda.text_of(found.trace({"x": view, "y": view}), Schedule(32, 1, 4))[1].text
        assert ("> p_x = {p_x_}" in text) == read_only


def test_more_shared_memory_than_a_block_has_is_refused() -> None:
    with pytest.raises(LowerError, match=r"norm: a block needs \d+ bytes of shared memory"):
        cuda.text_of(_program(65536), Schedule(32, 1, 8))


@needs_compiler
def test_a_kernel_is_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    program, schedule = PROGRAMS["swiglu"]()
    monkeypatch.setattr(cuda, "_made", {})
    first = cuda.compile(program, schedule, "sm_90")
    monkeypatch.setattr(cuda, "_made", {})
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    assert cuda.compile(program, schedule, "sm_90").cubin == first.cubin


def test_a_grid_has_as_many_blocks_as_it_needs() -> None:
    made = _uncompiled(Schedule(32, 4, 4))
    assert [made.blocks(g) for g in ((1, 1, 1), (5, 1, 1), (3, 2, 2))] == [1, 2, 3]
    with pytest.raises(TileError, match="a GPU takes 2147483647"):
        made.blocks((1 << 20, 1 << 12, 1))


def _uncompiled(schedule: Schedule) -> cuda.Compiled:
    function, source = cuda.text_of(_rows(_softmax, F32, 64, "y"), schedule)
    return cuda.Compiled(function, source, nvrtc.Cubin(b"", 0, 0, 0, ""), "sm_90", {})


@needs_compiler
def test_a_refusal_shows_the_log() -> None:
    with pytest.raises(CompilerError, match="nonsense"):
        nvrtc.compile('extern "C" __global__ void f() { nonsense; }', "f", "sm_90")


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_file", lambda: "")
    monkeypatch.setattr(nvrtc, "nvcc", lambda: "")
    assert "pip install nvidia-cuda-nvrtc" in nvrtc.missing()
    with pytest.raises(CompilerError, match="nvidia-cuda-nvrtc"):
        nvrtc.compile("", "f", "sm_90")


def test_tensors_of_two_devices_are_refused() -> None:
    row = tile.kernel(_softmax, static={"x": (1,)})
    here = Memory(64, (2, 8), (8, 1), F32)
    with pytest.raises(TileError, match="x is on cpu, y is on cuda:1"):
        row[2](here, replace(here, address=4096, device="cuda:1"))


@pytest.mark.parametrize(
    "address, strides, wanted", [(64, (8, 1), 16), (4, (8, 1), 4), (64, (6, 1), 8), (64, (8, 2), 8)]
)
def test_alignment_is_what_divides_addresses_and_strides(address: int, strides: tuple[int, int], wanted: int) -> None:
    assert alignment(Memory(address, (2, 8), strides, F32)) == wanted


@needs_compiler
@pytest.mark.parametrize(("views", "vector"), [
    ((tile.bfloat16, tile.int8), 8), ((tile.bfloat16, F32), 8), ((F32, tile.float8_e4m3fn), 4), ((tile.int8,), 16),
    ((F32,), 4),
])  # fmt: skip
def test_the_usual_vector_is_16_bytes_of_what_is_not_bytes(views: tuple[Any, ...], vector: int) -> None:
    def body(t: Any, x: Any, y: Any = None) -> None:
        t.store(x[0, 0], t.load(x[0, 0]))

    types = {name: ViewType(dtype, (None, 4096)) for name, dtype in zip("xy", views, strict=False)}
    assert default(tile.kernel(body).trace({"y": None, **types})).vector == vector


def test_explain_lists_what_was_decided_for_a_gpu() -> None:
    view = ViewType(tile.bfloat16, (None, 4096), align=16)
    kernel = tile.kernel(_softmax, static={"x": (1,)})
    said = tile.explain(kernel, {"x": view, "y": view}, gpu="sm_90", schedule=Schedule(256, 1, 8))
    assert "threads       256 an instance, vectors of 8 elements" in said and "x.shape[1] = 4096" in said
    assert re.search(r"access +load x \(.*\): 16 bytes at once", said) and "barrier       block" in said
    assert re.search(r"shared +64 bytes a block, in 2 arrays\n", said), said
    assert re.search(r"registers +[1-9]\d* a thread, 0 bytes spilled, 0 of stack", said)
    with pytest.raises(LowerError, match="'h100' is no architecture; needs one such as sm_90"):
        tile.explain(kernel, {"x": view, "y": view}, gpu="h100")
