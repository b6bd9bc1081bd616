"""The Triton backend: `@triton.jit` functions compiled ahead of the call to cubins and run by the one launcher.

Kernels live in `ops/`; loading and launching cubins in `cubin.py`. Triton itself is imported only when something is
compiled or interpreted. Its own launch serves AMD, versions whose parameter order nobody here has checked, and the
interpreter (`TRITON_INTERPRET=1`), which runs kernels on CPU tensors.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from tilewright.backends.cubin import CubinRunner
from tilewright.core import artifacts
from tilewright.core.backend import Artifact, Backend, Buffers, Parameter, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.launch import Argument, Launch, Scratch, scratches
from tilewright.core.reason import Reason

KNOWN_ABI = ("3.5", "3.6", "3.7")
"""Versions whose kernels take the run-time arguments in order, then a global and a profiling scratch pointer."""

TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"]

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def interpreting() -> bool:
    """Triton reads the variable once, when it is imported, for the whole process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def installed() -> str:
    """The version of the package, "" when it is absent; imports nothing."""
    try:
        return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def launch_path() -> str:
    """How kernels are launched here and why, for `doctor`."""
    version = installed()
    if not version:
        return "none: triton is not installed"
    if interpreting():
        return "triton's interpreter (TRITON_INTERPRET=1): CPU tensors, slow, for tests"
    if torch.version.hip is not None:
        return f"triton's own launch (triton {version}): the GPU is AMD's"
    if not _known_abi(version):
        return f"triton's own launch: the parameters of triton {version} are unchecked (known: {', '.join(KNOWN_ABI)})"
    return f"direct launch through the CUDA driver (triton {version})"


def _known_abi(version: str) -> bool:
    return version.startswith(tuple(f"{known}." for known in KNOWN_ABI))


class TritonBackend(Backend):
    name = "triton"
    emulation: ClassVar[Mapping[str, str]] = {"TRITON_INTERPRET": "1"}

    def missing(self, kind: str = "") -> Reason | None:
        if installed():
            return None
        return Reason("package", "triton is not installed", "pip install 'tilewright[triton]'")

    def version(self, kind: str = "") -> str:
        return installed()

    def targets(self) -> list[str]:
        return list(TARGETS) if installed() and not interpreting() else []

    def emulates(self, device: Device) -> bool:
        return device.kind == "cpu" and interpreting() and bool(installed())

    def compile(self, launch: Launch, device: Device) -> Artifact:
        plan = _Compilation(launch, device)
        return _cached(plan.key, plan.build)

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
        if self.emulates(call.device) or call.device.kind != "cuda" or not _known_abi(installed()):
            return JitRunner(launches, call)
        artifacts = [self.compile(launch, call.device) for launch in launches]
        # The grid counts programs; the driver wants blocks, of which a program of `num_ctas` has several along x.
        blocks = [
            replace(launch, grid=(launch.grid[0] * artifact.cluster[0], *launch.grid[1:]))
            for launch, artifact in zip(launches, artifacts, strict=True)
        ]
        return CubinRunner(artifacts, blocks, call)


def _cached(key: str, build: Callable[[], Artifact]) -> Artifact:
    """The one place where artifacts of this backend come from."""
    return artifacts.cached(f"triton {key}", build)


class _Compilation:
    """What Triton's compiler is told about one launch, and the key under which its result may be kept."""

    def __init__(self, launch: Launch, device: Device) -> None:
        from triton.runtime.jit import JITFunction

        function = launch.function
        if not isinstance(function, JITFunction):
            why = "TRITON_INTERPRET=1 is set: unset it to compile" if interpreting() else "use @triton.jit alone"
            raise TypeError(f"{function!r} is a {type(function).__name__}, not a compilable Triton function: {why}")
        unknown = [n for n in (*launch.args, *launch.constants) if n not in function.arg_names]
        absent = [n for n in function.arg_names if n not in launch.args and n not in launch.constants]
        twice = [n for n in launch.args if n in launch.constants]
        if unknown or absent or twice:
            raise TypeError(f"{function.__name__}: no parameter {unknown}, no value for {absent}, two for {twice}")

        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[object]]] = {}
        self.parameters: list[Parameter] = []
        for i, parameter in enumerate(function.params):
            name, value = parameter.name, launch.args.get(parameter.name)
            if parameter.is_constexpr and name in launch.args:
                raise TypeError(f"{function.__name__}: {name} is tl.constexpr: pass it in `constants`")
            if value is None:
                # An absent argument is the constant None, as it is in Triton's own launch: code that tests a flag or
                # `is not None` compiles without it, and code that follows it does not compile at all.
                signature[name], constants[name] = "constexpr", launch.constants.get(name)
                continue
            try:
                signature[name], kind, multiple = _typed(value)
            except KeyError as dtype:
                raise TypeError(f"{function.__name__}: {name} has dtype {dtype}, which Triton lacks") from None
            self.parameters.append(Parameter(kind, name))
            if multiple and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(i,)] = [["tt.divisibility", 16]]
        self.source = _source_type(function)(function, signature, constants, attributes)
        self.target = _target(device)
        self.options = dict(launch.options)
        refused = [o for o in ("launch_pdl", "launch_cooperative_grid") if self.options.get(o)]
        if refused:
            raise ValueError(f"{function.__name__}: option {refused[0]} is not launched here")
        # `hash` covers the function's source, its helpers, the signature, the constants and the attributes.
        facts = (installed(), str(self.target), self.source.hash(), repr(signature), repr(sorted(self.options.items())))
        self.key = hashlib.sha256("|".join(facts).encode()).hexdigest()

    def build(self) -> Artifact:
        import triton

        compiled = triton.compile(self.source, target=self.target, options=self.options)
        facts, name = compiled.metadata, compiled.metadata.name
        if self.target.backend != "cuda":
            return Artifact(
                compiled.asm["hsaco"],
                name,
                tuple(self.parameters),
                (self.target.warp_size * facts.num_warps, 1, 1),
                facts.shared,
            )
        if facts.profile_scratch_size:
            raise ValueError(f"{name}: asks for memory to profile itself, not provided here")
        own = "*" if facts.global_scratch_size else ""
        parameters = (*self.parameters, Parameter("pointer", own), Parameter("pointer"))
        counted = _ptx_parameters(compiled.asm["ptx"], name)
        if counted != len(parameters) and _known_abi(installed()):
            raise ValueError(f"{name}: triton {installed()} gave it {counted} parameters, not {len(parameters)}")
        return Artifact(
            compiled.asm["cubin"],
            name,
            parameters,
            (32 * facts.num_warps, 1, 1),
            facts.shared,
            (facts.num_ctas, 1, 1),
            workspace=facts.global_scratch_size,
        )


def _source_type(function: Any) -> Any:
    """How the compiler is given it: Gluon, in which layouts and warps are written out, is a language of its own."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _typed(value: Argument) -> tuple[str, str, bool]:
    """The Triton type, the parameter kind, and whether the value is a multiple of 16."""
    if isinstance(value, TensorFacts):
        return POINTERS[value.dtype], "pointer", value.align == 16
    if isinstance(value, Scratch):
        return POINTERS[value.dtype], "pointer", True
    if isinstance(value, bool):
        return "i32", "i32", False
    if isinstance(value, int):
        return "i64", "i64", value % 16 == 0
    return "fp32", "f32", False


def _target(device: Device) -> Any:
    from triton.backends.compiler import GPUTarget

    if device.kind == "hip":
        return GPUTarget("hip", device.arch, 64 if device.arch.startswith("gfx9") else 32)
    if not device.sm:
        raise ValueError(f"Triton compiles for NVIDIA and AMD GPUs, not for {device}")
    return GPUTarget("cuda", device.sm, 32)


def _ptx_parameters(ptx: str, symbol: str) -> int:
    entry = re.search(rf"\.entry\s+{re.escape(symbol)}\s*\((.*?)\)\s*\n", ptx, re.DOTALL)
    return len(re.findall(r"\.param\s", entry.group(1))) if entry else -1


class JitRunner(Runner):
    """Runs launches through `function[grid](...)`: Triton's interpreter on CPU tensors, or Triton's own launcher."""

    def __init__(self, launches: Sequence[Launch], call: Call) -> None:
        names = [*call.tensors, *(s.name for s in scratches(launches))]
        self.launches = [launch for launch in launches if 0 not in launch.grid]
        self.positions = {name: i for i, name in enumerate(names)}
        self.index = call.device.index if call.device.is_gpu else None
        if interpreting():
            _round_to_nearest()
            _multiply_values()
        elif any(launch.workspace for launch in launches):
            import triton

            triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=f"cuda:{self.index}"))

    def __call__(self, buffers: Buffers) -> None:
        if self.index is None:
            self._run(buffers)
        else:
            with torch.cuda.device(self.index):
                self._run(buffers)

    def _run(self, buffers: Buffers) -> None:
        for launch in self.launches:
            values = {
                name: buffers[self.positions[value.name]] if isinstance(value, (TensorFacts, Scratch)) else value
                for name, value in launch.args.items()
            }
            launch.function[launch.grid](**values, **launch.constants, **launch.options)


@cache
def _round_to_nearest() -> None:
    """Triton's interpreter truncates float32 to bfloat16, where hardware rounds to nearest even. Mended here, since
    what a kernel computes from its own rounded values cannot be judged otherwise."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return original(values, source, target, rounding)
        rounded = torch.from_numpy(values.astype("float32")).bfloat16()
        return rounded.view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = convert


@cache
def _multiply_values() -> None:
    """Triton's interpreter multiplies matrices of bfloat16 as the integers that it keeps them in. Mended here."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            interpreter.TensorHandle((h.data.astype("uint32") << 16).view("float32"), tl.float32)
            if h.dtype.scalar == tl.bfloat16
            else h
            for h in (a, b)
        ]
        return original(self, *wide, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def resources(artifact: Artifact) -> tuple[int, int, int]:
    """(registers a thread, bytes of stack and local memory a thread, static shared bytes) of a cubin.

    Needs no GPU: the tool comes in Triton's wheel or with the CUDA toolkit. Spilled registers are in the second number.
    """
    tool = _cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump is neither in the triton package nor on PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(artifact.image)
        file.flush()
        run = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True, timeout=60
        )
    usage = re.search(rf"Function {re.escape(artifact.symbol)}:\s*(REG:.*)", run.stdout)
    if usage is None:
        raise ValueError(f"no function {artifact.symbol} in the cubin: {run.stdout.strip()}")
    facts = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage.group(1))}
    return facts["REG"], facts["STACK"] + facts["LOCAL"], facts["SHARED"]


@cache
def _cuobjdump() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        if tool.is_file():
            return str(tool)
    return shutil.which("cuobjdump")
