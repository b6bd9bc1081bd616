"""Compiling, loading and calling CPU kernels.

Compilation runs in a child process with a timeout and is kept on disk under everything that matters. A call packs its
arguments into 8-byte fields and enters the shared object once; ctypes releases the interpreter lock meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.tile.errors import CompilerError
from tilewright.tile.ir.text import program_text
from tilewright.tile.ir.thread_ir import Function
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lower.kernel import lower
from tilewright.tile.render import cpu as render
from tilewright.tile.runtime.forked import is_child
from tilewright.tile.runtime.store import Store, compiler_digest
from tilewright.tile.runtime.target import Cpu, need_compiler, run_compiler, this_cpu

FLAGS = (
    "-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-strict-aliasing", "-fwrapv", "-fno-exceptions", "-fno-rtti", "-fvisibility=default", "-Wno-psabi",
)  # fmt: skip
"""Never -ffast-math: it would drop the rounding that the language fixes."""
SECONDS = 120
_loaded: dict[str, list[Compiled]] = {}


class Compiled:
    """A loaded kernel. `entry(args, grid0, grid1, grid2, threads)` runs it."""

    def __init__(self, function: Function, library: ctypes.CDLL, symbol: str) -> None:
        self.symbol = symbol
        self.entry: Any = library[symbol]
        self.entry.restype = None
        self.entry.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_int]
        self.parameters = [p for p in function.parameters if p.kind != "builtin"]

    def __call__(self, packed: bytes, grid: tuple[int, int, int], threads: int) -> None:
        """Run. In a forked child serially: a parallel region there would wait for threads that do not exist."""
        self.entry(packed, *grid, 1 if is_child() else threads)


def compile(program: Program, cpu: Cpu | None = None) -> Compiled:
    """The program, compiled and loaded; from memory or disk where it was compiled before.

    Raises:
        CompilerError: there is no compiler, or it refused.
        LowerError: the program has what a CPU kernel cannot express.
    """
    return compile_all([program], cpu)[0]


def compile_all(programs: Sequence[Program], cpu: Cpu | None = None, flags: Sequence[str] = FLAGS) -> list[Compiled]:
    """Several programs in one run of the compiler. See `compile`."""
    target, tool = cpu or this_cpu(), need_compiler()
    told = [f"{p.name}\0{program_text(p)}" for p in programs]
    parts = (*told, str(target), tool.path, tool.version, " ".join(flags), compiler_digest())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if key in _loaded:
        return _loaded[key]
    functions = [lower(p, render.lanes_of(target.features)) for p in programs]
    text, symbols = render.sources(functions, target.features)
    with Store().file(key, lambda place: _build(text, place, target, flags)) as path:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CompilerError(f"what {tool.path} made cannot be loaded ({error})") from None
    return _loaded.setdefault(key, [Compiled(f, library, s) for f, s in zip(functions, symbols, strict=True)])


def _build(text: str, place: Path, cpu: Cpu, flags: Sequence[str]) -> None:
    run_compiler(need_compiler().path, [*flags, *cpu.flags()], text, "kernel.cc", place, SECONDS)
