"""The TileLang backend: TileLang writes CUDA C++, which is compiled and launched here as any other CUDA source.

Programs live in `ops/`; compilers in `cuda.py`; loading and launching in `cubin.py`. TileLang itself is imported only
when a launch is lowered, never where its artifact is already in the cache. Of TileLang's own run time (host code,
launcher, autotuner, caches) nothing is used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.backends import cuda
from tilewright.backends.cubin import CubinRunner
from tilewright.core import artifacts
from tilewright.core.backend import Artifact, Backend, Parameter, Runner
from tilewright.core.call import Call
from tilewright.core.device import Device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Launch
from tilewright.core.reason import Reason
from tilewright.tile.runtime import nvrtc

PINNED = "0.1.15"
"""The one version whose lowering and templates are known here: TileLang removes and restores API within weeks."""

PASSES = {
    # Programs mask their own accesses; TileLang's bounds checks would need the number of elements as an argument.
    "tl.disable_safe_memory_legalize": True,
    # Descriptors and producer warps need host code that the shared launcher does not have.
    "tl.disable_warp_specialized": True,
    # 32-byte accesses would need 32-byte alignment, and 16 is all that a call knows of its tensors.
    "tl.disable_vectorize_256": True,
}
KINDS = {"int32": "i32", "int64": "i64", "float32": "f32"}
WORDS = {"i32": "int", "i64": "int64_t", "f32": "float"}
_lowering = threading.Lock()


@dataclass(frozen=True)
class Program:
    """A function "module:function" that makes a TileLang `prim_func` from a launch's constants. Named, not held: its
    module imports TileLang. `flags` go to the CUDA compiler as they are."""

    source: str
    flags: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        module, name = self.source.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def digest(self) -> str:
        """Of the module and of what it imports from its own folder."""
        return Kernel("", "tilelang", self.source).digest


class TileLangBackend(Backend):
    name = "tilelang"

    def missing(self, kind: str = "") -> Reason | None:
        found = installed()
        if not found:
            return Reason("package", "tilelang is not installed", "pip install 'tilewright[tilelang]'")
        if found != PINNED:
            return Reason("package", f"tilelang is {found}; needs {PINNED}", f"pip install tilelang=={PINNED}")
        if cuda.CudaBackend().missing() is not None:
            return Reason(
                "package",
                "neither NVRTC nor nvcc is here to compile what tilelang writes",
                "pip install 'tilewright[cuda]' (nvidia-cuda-nvrtc), or put the CUDA toolkit's nvcc on PATH",
            )
        if not cuda.cccl_include() or not cuda.toolkit_include():
            return Reason(
                "package",
                "the CUDA toolkit's headers, which TileLang's include, are not here",
                "pip install 'tilewright[cuda]' (nvidia-cuda-cccl, nvidia-cuda-runtime), or the CUDA toolkit",
            )
        return None

    def version(self, kind: str = "") -> str:
        return f"tilelang {found} {cuda.compiler()}" if (found := installed()) else ""

    def targets(self) -> list[str]:
        return ["sm_80", "sm_90", "sm_100", "sm_120"] if self.missing() is None else []

    def compile(self, launch: Launch, device: Device) -> Artifact:
        if not device.sm:
            raise ValueError(f"TileLang programs are compiled for NVIDIA GPUs here, not for {device}")
        if not isinstance(launch.function, Program):
            return _build(launch, device)
        facts = (self.version(), cuda.arch_of(device), launch.function.source, launch.function.digest(),
                 repr(sorted(PASSES.items())), repr(sorted(launch.constants.items())),
                 *launch.function.flags)  # fmt: skip
        return _cached(hashlib.sha256("|".join(facts).encode()).hexdigest(), lambda: _build(launch, device))

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
        return CubinRunner([self.compile(launch, call.device) for launch in launches], launches, call)


@cache
def installed() -> str:
    """The version of the package, "" when it is absent; imports nothing."""
    try:
        return importlib.metadata.version("tilelang") if importlib.util.find_spec("tilelang") else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cached(key: str, build: Callable[[], Artifact]) -> Artifact:
    """The one place where artifacts of this backend come from."""
    return artifacts.cached(f"tilelang {key}", build)


def _build(launch: Launch, device: Device) -> Artifact:
    lowered = lower(launch, device)
    symbol = lowered.symbol
    options: tuple[str, ...] = ("-w",)  # TileLang's templates use names that CUDA 13 deprecates
    if isinstance(launch.function, Program):
        options += launch.function.flags
    if nvrtc.nvrtc_file():
        options += ("-default-device",)  # the templates' headers leave out the qualifiers of some functions
    image = cuda.compile_source(
        lowered.source, cuda.arch_of(device), symbol=symbol, options=options, include=template_folders()
    )
    return Artifact(image, symbol, lowered.parameters, lowered.block, lowered.shared)


@dataclass(frozen=True)
class Lowered:
    """What TileLang made of a program: CUDA C++ with one kernel, and how to launch it."""

    source: str
    symbol: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, int, int]
    shared: int


def lower(launch: Launch, device: Device) -> Lowered:
    """Generate the CUDA C++ of `launch`. Needs neither a GPU nor a compiler.

    The kernel takes the arguments that the program uses, and no others: pointers by name, then scalars by name. That
    order is read from the lowered function and checked against the generated text.
    """
    import tilelang
    from tilelang.transform import PassContext
    from tvm.target import Target

    make = launch.function.load() if isinstance(launch.function, Program) else launch.function
    target = Target({"kind": "cuda", "arch": cuda.arch_of(device)})
    with _lowering, target, PassContext(config=PASSES):
        made = tilelang.lower(make(**launch.constants), target=target)
    functions = list(made.device_mod.functions.values())
    if len(functions) != 1:
        raise ValueError(f"{made.device_mod}: a launch is one kernel, this program has {len(functions)}")
    (function,) = functions
    symbol = str(function.attrs["global_symbol"])
    if "CUtensorMap" in made.kernel_source or "cluster_dims" in function.attrs:
        raise ValueError(f"{symbol}: uses TMA descriptors or clusters, which need TileLang's own host code")
    parameters = tuple(
        Parameter("pointer" if str(p.dtype) == "handle" else KINDS[str(p.dtype)], str(p.name)) for p in function.params
    )
    unknown = [p.name for p in parameters if p.name not in launch.args]
    if unknown:
        raise TypeError(f"{symbol}: the launch has no argument {unknown}; it has {list(launch.args)}")
    _check_signature(made.kernel_source, symbol, parameters)
    extents = {str(k): v for k, v in function.attrs["thread_extent"].items()}
    x, y, z = (int(extents.get(f"threadIdx.{axis}", 1)) for axis in "xyz")
    shared = int(function.attrs["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in function.attrs else 0
    # The header does nothing under nvcc; NVRTC has no standard library of its own.
    source = "#include <tl_templates/cuda/nvrtc_std.h>\n" + made.kernel_source
    return Lowered(source, symbol, parameters, (x, y, z), shared)


def _check_signature(source: str, symbol: str, parameters: Sequence[Parameter]) -> None:
    found = re.search(rf"__launch_bounds__\([^)]*\) {re.escape(symbol)}\((.*?)\) {{", source)
    written = [] if found is None else [text.strip() for text in found.group(1).split(",") if text.strip()]
    expected = [rf".*\* __restrict__ {p.name}" if p.kind == "pointer" else f"{WORDS[p.kind]} {p.name}"
                for p in parameters]  # fmt: skip
    if len(written) != len(expected) or any(not re.fullmatch(e, w) for e, w in zip(expected, written, strict=True)):
        raise TypeError(f"{symbol}: the generated kernel takes {written}, expected {parameters}")


@cache
def template_folders() -> tuple[str, ...]:
    """TileLang's device headers and what they include, in its wheel, and the toolkit's C++ library."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        return ()
    root = Path(next(iter(spec.submodule_search_locations)))
    return (str(root / "src"), str(root / "3rdparty/cutlass/include"), *cuda.cccl_include())
