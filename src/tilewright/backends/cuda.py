"""The CUDA backend: hand-written CUDA C++ compiled to cubins by NVRTC or nvcc, and prebuilt cubins.

NVRTC (a shared library that torch's CUDA wheels bring, or `pip install nvidia-cuda-nvrtc`) is preferred: three times
faster and no host compiler. Neither needs a GPU. The sources live beside the ops; NVRTC in
`tile/runtime/nvrtc.py`, loading and launching in `cubin.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.backends.cubin import CubinRunner
from tilewright.core import artifacts
from tilewright.core.backend import Artifact, Backend, Parameter, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.errors import TilewrightError
from tilewright.core.launch import Launch, Scratch, TensorMap
from tilewright.core.reason import Reason
from tilewright.tile.errors import CompilerError
from tilewright.tile.runtime import nvrtc

TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
STANDARD = "--std=c++17"
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class CompileError(TilewrightError, RuntimeError):
    """The compiler rejected a source; the message begins with its first error and ends with its log."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        first = next((line.strip() for line in log.splitlines() if "error" in line), "")
        super().__init__(f"{first}\n{what}\n{log.strip()}" if first else what)


@dataclass(frozen=True)
class Source:
    """A kernel in a CUDA C++ file: `symbol` is an `extern "C" __global__` function in it. A launch's constants become
    macros (True is 1; None is not defined). `flags` go to the compiler as they are."""

    path: Path
    symbol: str
    flags: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        """The file and, by name, all that it includes in quotes: what decides the code, and so every cache key."""
        found: dict[str, bytes] = {}
        waiting = [self.path]
        while waiting:
            path = waiting.pop()
            name = os.path.relpath(path, self.path.parent)
            if name not in found:
                found[name] = path.read_bytes()
                names = INCLUDE.findall(found[name].decode(errors="replace"))
                waiting += [p for p in (path.parent / n for n in names) if p.is_file()]
        return found

    def digest(self) -> str:
        whole = hashlib.sha256()
        for name, text in sorted(self.files().items()):
            whole.update(f"{name}\0{len(text)}\0".encode() + text)
        return whole.hexdigest()


@dataclass(frozen=True)
class Prebuilt:
    """A kernel in a cubin that somebody else compiled; the launch's constants mean nothing to it."""

    path: Path
    symbol: str

    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


class CudaBackend(Backend):
    name = "cuda"

    def missing(self, kind: str = "") -> Reason | None:
        if not nvrtc.missing():
            return None
        return Reason(
            "package",
            "neither NVRTC nor nvcc is here",
            "pip install 'tilewright[cuda]' (nvidia-cuda-nvrtc), or put the CUDA toolkit's nvcc on PATH",
        )

    def version(self, kind: str = "") -> str:
        return compiler()

    def targets(self) -> list[str]:
        return [] if self.missing() else list(TARGETS)

    def compile(self, launch: Launch, device: Device) -> Artifact:
        function = launch.function
        if not isinstance(function, (Source, Prebuilt)):
            raise TypeError(f"{function!r} is neither a Source nor a Prebuilt")
        if not device.sm:
            raise ValueError(f"CUDA kernels are compiled for NVIDIA GPUs, not for {device}")
        block, shared, cluster = _geometry(launch)

        def artifact(image: bytes) -> Artifact:
            return Artifact(image, function.symbol, _parameters(launch), block, shared, cluster)

        if isinstance(function, Prebuilt):
            return artifact(function.path.read_bytes())

        def build() -> Artifact:
            options = (*(f"-D{macro}" for macro in _macros(launch.constants)), *function.flags)
            source, folder = function.path.read_text(), function.path.parent
            return artifact(
                compile_source(source, arch_of(device), symbol=function.symbol, options=options, include=(folder,))
            )

        facts = (
            compiler(), arch_of(device), function.symbol, function.digest(), repr(function.flags),
            repr(_macros(launch.constants)), repr((block, shared, cluster)), repr(_parameters(launch)),
        )  # fmt: skip
        return _cached(hashlib.sha256("|".join(facts).encode()).hexdigest(), build)

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
        return CubinRunner([self.compile(launch, call.device) for launch in launches], launches, call)


def _cached(key: str, build: Callable[[], Artifact]) -> Artifact:
    """The one place where artifacts of this backend come from."""
    return artifacts.cached(f"cuda {key}", build)


def arch_of(device: Device) -> str:
    """From Hopper on with the `a`: the instructions of that very architecture (wgmma, setmaxnreg) are worth having,
    and a cubin serves no other one anyway."""
    return f"sm_{device.sm}a" if device.sm >= 90 else f"sm_{device.sm}"


def _geometry(launch: Launch) -> tuple[tuple[int, int, int], int, tuple[int, int, int]]:
    def triple(value: int | Sequence[int]) -> tuple[int, int, int]:
        x, y, z = (*((value,) if isinstance(value, int) else value), 1, 1)[:3]
        return x, y, z

    options = dict(launch.options)
    block, cluster = triple(options.pop("block")), triple(options.pop("cluster", 1))
    shared = options.pop("shared", 0)
    if options:
        raise TypeError(f"{launch.function.symbol}: unknown options {sorted(options)}; known: block, cluster, shared")
    if any(blocks % size for blocks, size in zip(launch.grid, cluster, strict=True)):
        raise ValueError(f"{launch.function.symbol}: grid {launch.grid} is no multiple of the cluster {cluster}")
    return block, shared, cluster


def _parameters(launch: Launch) -> tuple[Parameter, ...]:
    def kind(value: Any) -> str:
        if value is None or isinstance(value, (TensorFacts, Scratch)):
            return "pointer"
        if isinstance(value, TensorMap):
            return "map"
        if isinstance(value, bool):
            return "i32"
        return "i64" if isinstance(value, int) else "f32"

    return tuple(Parameter(kind(value), name) for name, value in launch.args.items())


def _macros(constants: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in sorted(constants.items())
        if value is not None
    ]


# Compilers --------------------------------------------------------------------------------------------------------


def compiler() -> str:
    """The compiler in use with its version, as it enters cache keys; "" when there is none."""
    return nvrtc.version()


def compile_source(
    source: str, arch: str, *, symbol: str, options: Iterable[str] = (), include: Iterable[Path | str] = ()
) -> bytes:
    """The cubin of `source` for `arch` ("sm_90", "sm_90a"). Raises CompileError with the compiler's log."""
    flags = [f"-arch={arch}", STANDARD, *options]
    flags += [f"-I{folder}" for folder in (*include, *toolkit_include())]
    try:
        image, _ = nvrtc.compiled(source, symbol, flags)
    except CompilerError as error:
        raise CompileError(error.problem, error.log) from None
    if f".text.{symbol}\0".encode() not in image:
        raise CompileError(f'{symbol}: the source has no extern "C" __global__ function of this name', "")
    return image


@cache
def toolkit_include() -> tuple[str, ...]:
    """The folder with cuda_bf16.h, for sources that include it; empty when there is none."""
    for folder in (p / "include" for p in (*nvrtc.wheels(), *nvrtc.toolkits())):
        if (folder / "cuda_bf16.h").is_file():
            return (str(folder),)
    return ()


@cache
def cccl_include() -> tuple[str, ...]:
    """The folders with the CUDA C++ core libraries, for sources that include them; empty when there are none.

    Sources say `cuda/std/cassert` or, since CUDA 13, `cccl/cuda/std/cassert`: so both levels are folders to search.
    """
    for folder in (p / "include" for p in (*nvrtc.wheels(), *nvrtc.toolkits())):
        if (folder / "cccl" / "cuda" / "std" / "cassert").is_file():
            return str(folder / "cccl"), str(folder)
    return ()
