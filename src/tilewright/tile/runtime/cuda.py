"""Compiling, loading and launching kernels on an NVIDIA GPU: the driver through ctypes, no package.

Compiled kernels are kept on disk under everything that matters. A module is loaded once a context, at its first launch;
launching never waits for the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
import sys
from ctypes import byref, c_char_p, c_double, c_float, c_int, c_int64, c_uint, c_void_p
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.tile.errors import CompilerError, LowerError, TileError
from tilewright.tile.ir.text import program_text
from tilewright.tile.ir.thread_ir import Function, Parameter
from tilewright.tile.ir.tile_ir import Program
from tilewright.tile.lower.kernel import lower
from tilewright.tile.render import cuda as render
from tilewright.tile.runtime import nvrtc
from tilewright.tile.runtime.arguments import is_real
from tilewright.tile.runtime.nvrtc import Cubin
from tilewright.tile.runtime.store import DIGEST, Store, compiler_digest
from tilewright.tile.schedule import Schedule
from tilewright.tile.schedule import default as usual
from tilewright.tile.sync.barriers import insert
from tilewright.tile.sync.shared import PLAIN, Arena, arrange, most_bytes, most_needed

LIBRARY = "libcuda.so.1"
MOST_BLOCKS = 2**31 - 1
MAJOR, MINOR, MAX_DYNAMIC_SHARED = 75, 76, 8
_made: dict[str, Compiled] = {}


@dataclass(eq=False)
class Compiled:
    """A kernel for one architecture. `loaded`: its entry in each context."""

    function: Function
    source: render.Source
    cubin: Cubin
    arch: str
    loaded: dict[int, c_void_p]

    def blocks(self, grid: tuple[int, int, int]) -> int:
        """How many blocks run a grid of instances.

        Raises:
            TileError: more than a launch can have.
        """
        count = math.prod(grid)
        if count > MOST_BLOCKS:
            raise TileError(f"{self.function.name}: a grid of {count} instances; a GPU takes {MOST_BLOCKS}")
        return -(-count // self.function.instances)

    def __call__(self, packed: bytes, grid: tuple[int, int, int], stream: int | None = None) -> None:
        """Enqueue on a stream, or on torch's current one, in the current context.

        Args:
            packed: what `arguments.pack` makes of `parameters`.

        Raises:
            TileError: the driver refused; nothing was launched.
        """
        driver = Driver.get()
        driver.enter()
        fields = [_field(p, packed, 8 * i) for i, p in enumerate(self.parameters)] + [c_int64(n) for n in grid]
        held = (c_void_p * len(fields))(*map(ctypes.addressof, fields))
        at = current_stream() if stream is None else stream
        shape = (self.blocks(grid), 1, 1, self.function.threads, self.function.instances, 1, self.source.shared)
        driver.call("cuLaunchKernel", self.entry(driver), *map(c_uint, shape), c_void_p(at), held, None)

    @property
    def parameters(self) -> list[Parameter]:
        return render.arguments(self.function)

    def entry(self, driver: Driver) -> c_void_p:
        """The kernel in the current context."""
        context = driver.context()
        found = self.loaded.get(context)
        if found is None:
            module, found = c_void_p(), c_void_p()
            driver.call("cuModuleLoadData", byref(module), c_char_p(self.cubin.image))
            driver.call("cuModuleGetFunction", byref(found), module, c_char_p(self.source.symbol.encode()))
            if self.source.shared > PLAIN:
                driver.call("cuFuncSetAttribute", found, c_int(MAX_DYNAMIC_SHARED), c_int(self.source.shared))
            self.loaded[context] = found
        return found


def _field(p: Parameter, packed: bytes, at: int) -> Any:
    """One argument, out of what `pack` made."""
    if is_real(p):
        return c_float(c_double.from_buffer_copy(packed, at).value)
    return c_int64.from_buffer_copy(packed, at)


class Driver:
    """libcuda, initialised."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise TileError(f"no NVIDIA driver is here ({error})") from None
        self.call("cuInit", c_uint(0))

    @staticmethod
    @cache
    def get() -> Driver:
        return Driver()

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.library, name)(*args)
        if code:
            text = c_char_p()
            self.library.cuGetErrorName(c_int(code), byref(text))
            raise TileError(f"{name}: {(text.value or b'').decode() or code}")

    def context(self) -> int:
        found = c_void_p()
        self.call("cuCtxGetCurrent", byref(found))
        return found.value or 0

    def enter(self) -> None:
        """Make the first GPU's own context current where the thread has none."""
        if not self.context():
            found = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(found), c_int(0))
            self.call("cuCtxSetCurrent", found)

    def arch(self, device: int = 0) -> str:
        """The architecture of a GPU, as compilers name it."""
        major, minor = c_int(), c_int()
        for value, attribute in ((major, MAJOR), (minor, MINOR)):
            self.call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(device))
        return f"sm_{major.value}{minor.value}"


def current_stream() -> int:
    """torch's current stream, where it is loaded; else the default one."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_stream().cuda_stream) if torch is not None else 0


def lowered(program: Program, schedule: Schedule, arch: str = "") -> tuple[Function, Arena]:
    """What each thread does, and where its shared memory lies.

    Raises:
        LowerError: the schedule, or the architecture, cannot express the program.
    """
    function = insert(lower(program, schedule.vector, schedule))
    return function, arrange(function, most_bytes(arch))


def check(program: Program, schedule: Schedule, arch: str) -> Function:
    """What each thread does, but for barriers. Raises where `lowered` would, and takes a fraction of its time where
    there is room enough."""
    function = lower(program, schedule.vector, schedule)
    if most_needed(function) > most_bytes(arch):
        lowered(program, schedule, arch)
    return function


def text_of(program: Program, schedule: Schedule | None = None, arch: str = "") -> tuple[Function, render.Source]:
    """The program as CUDA C++, for the default schedule where none is given. Raises as `lowered` does."""
    function, arena = lowered(program, schedule or usual(program), arch)
    return function, render.source(function, arena.offsets, arena.size)


def compile(program: Program, schedule: Schedule | None = None, arch: str = "") -> Compiled:
    """The program for a GPU, this machine's first where no architecture is named; from memory or disk where it was
    compiled before. Needs no GPU for a named one.

    Raises:
        CompilerError: there is no compiler, or it refused.
        LowerError: the schedule, or this target, cannot express the program.
    """
    target, chosen = arch or Driver.get().arch(), schedule or usual(program)
    if not re.fullmatch(r"sm_\d+[af]?", target):
        raise LowerError(f"{target!r} is no architecture; needs one such as sm_90")
    parts = (program.name, program_text(program), repr(chosen), target, nvrtc.version(), compiler_digest())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if key in _made:
        return _made[key]
    function, source = text_of(program, chosen, target)
    return _made.setdefault(key, Compiled(function, source, _kept(key, source, target), target, {}))


def _kept(key: str, source: render.Source, arch: str) -> Cubin:
    """From the store: a line of facts, then the image."""

    def build(place: Path) -> None:
        made = asdict(nvrtc.compile(source.text, source.symbol, arch))
        image = made.pop("image")
        place.write_bytes(json.dumps(made).encode() + b"\n" + image)

    with Store().file(key, build) as path:
        try:
            facts, _, image = path.read_bytes()[:-DIGEST].partition(b"\n")
            return Cubin(image=image, **json.loads(facts))
        except (OSError, ValueError, TypeError) as error:
            raise CompilerError(f"what was compiled cannot be read again ({error})") from None
