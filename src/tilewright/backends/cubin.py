"""The one launcher: loads an `Artifact` with the CUDA driver and enqueues it, whichever language it came from.

ctypes on libcuda alone: no build step, no package. Nothing is loaded before the first runner is built, so importing
this file is harmless on a machine without a GPU. How a cubin is made lives in the backends' own files.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright.core.backend import Artifact, Buffers, Runner
from tilewright.core.call import Call, TensorFacts
from tilewright.core.errors import TilewrightError
from tilewright.core.launch import Launch, Scratch, scratches
from tilewright.core.reason import Reason

LIBRARY = "libcuda.so.1"
MAX_MODULES = 1024
"""Loaded modules a process keeps; beyond it, those that no runner holds any more are unloaded, oldest first."""

INVALID_CONTEXT, OUT_OF_MEMORY = 201, 2
STICKY = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}
"""Driver errors after which every later call in the process fails: illegal address, timeout, trap, assert, ECC."""


class LaunchError(TilewrightError, RuntimeError):
    """The driver refused to load or launch a kernel, or reported an earlier fault.

    `sticky`: the process's CUDA context is lost and nothing may be retried. `launched`: how many kernels of the same
    call were enqueued before; only 0 leaves the outputs untouched.
    """

    def __init__(self, doing: str, code: int, name: str = "", text: str = "", launched: int = 0) -> None:
        self.code, self.name, self.launched = code, name, launched
        self.sticky = code in STICKY
        self.out_of_memory = code == OUT_OF_MEMORY
        words = f"{doing}: {name or f'CUDA error {code}'}" + (f" ({text})" if text else "")
        if self.sticky:
            words += "; the CUDA context of this process is lost, and an earlier kernel may be the cause"
        super().__init__(words)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8, a union of 64 bytes."""

    _fields_ = [("id", c_uint32), ("padding", c_uint32), ("words", c_uint32 * 16)]


CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6
STREAM_WORD = LaunchConfig.stream.offset // 8
CONFIG_WORDS = ctypes.sizeof(LaunchConfig) // 8


# The driver -------------------------------------------------------------------------------------------------------


@cache
def missing() -> Reason | None:
    """Why no cubin can be launched here, or None."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return Reason("driver", f"{LIBRARY} cannot be loaded ({error})", "install the NVIDIA driver")
    return None


class Driver:
    """The few functions of libcuda that loading needs, with errors as exceptions, and one primary context a device."""

    def __init__(self) -> None:
        # CDLL, not PyDLL: PyDLL would save 0.03 us by keeping the GIL, but a launch blocks while the stream's queue is
        # full, and a host function in that queue may itself be waiting for the GIL.
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise LaunchError(f"loading {LIBRARY} ({error})", 100, "CUDA_ERROR_NO_DEVICE") from None
        self._contexts: dict[int, c_void_p] = {}
        self._lock = threading.Lock()
        self.check("cuInit", self.library.cuInit(0))
        self.check("cuDriverGetVersion", self.library.cuDriverGetVersion(byref(version := c_int())))
        self.overlaps = version.value >= 12030  # PDL: older drivers cannot capture it in a graph, and nothing needs it

    def check(self, doing: str, code: int, launched: int = 0) -> None:
        if code:
            name, text = c_char_p(), c_char_p()
            self.library.cuGetErrorName(code, byref(name))
            self.library.cuGetErrorString(code, byref(text))
            raise LaunchError(doing, code, (name.value or b"").decode(), (text.value or b"").decode(), launched)

    def context(self, index: int) -> c_void_p:
        """The primary context of device `index`, the one that torch uses too; retained for the life of the process."""
        with self._lock:
            if index not in self._contexts:
                device, context = c_int(), c_void_p()
                self.check(f"device {index}", self.library.cuDeviceGet(byref(device), index))
                self.check(f"device {index}", self.library.cuDevicePrimaryCtxRetain(byref(context), device))
                self._contexts[index] = context
            return self._contexts[index]

    def enter(self, index: int) -> None:
        """Make the primary context of device `index` current in this thread, for good."""
        self.check(f"entering device {index}", self.library.cuCtxSetCurrent(self.context(index)))


@cache
def driver() -> Driver:
    return Driver()


class LoadedKernel:
    """A kernel in the memory of one device. `runners` are those that may still launch it."""

    def __init__(self, artifact: Artifact, index: int) -> None:
        self.index, self.symbol = index, artifact.symbol
        self.runners: weakref.WeakSet[CubinRunner] = weakref.WeakSet()
        self.module, self.function = c_void_p(), c_void_p()
        cuda = driver()
        self._inside(lambda: self._load(cuda, artifact))

    def _load(self, cuda: Driver, artifact: Artifact) -> None:
        doing, library = f"loading kernel {self.symbol}", cuda.library
        cuda.check(doing, library.cuModuleLoadData(byref(self.module), c_char_p(artifact.image)))
        try:
            cuda.check(
                doing, library.cuModuleGetFunction(byref(self.function), self.module, c_char_p(self.symbol.encode()))
            )
            self._check_parameters(cuda, artifact)
            static, threads = c_int(), c_int()
            cuda.check(doing, library.cuFuncGetAttribute(byref(threads), 0, self.function))
            if math.prod(artifact.block) > threads.value:  # its registers do not fit: better said now than at a launch
                wanted = f"{doing} for blocks of {artifact.block} threads where {threads.value} fit"
                raise LaunchError(wanted, 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
            cuda.check(doing, library.cuFuncGetAttribute(byref(static), 1, self.function))
            if static.value + artifact.shared > 48 << 10:
                cuda.check(doing, library.cuFuncSetCacheConfig(self.function, 1))  # prefer shared memory over L1
                cuda.check(
                    f"{doing} with {artifact.shared} bytes of dynamic and {static.value} of static shared memory",
                    library.cuFuncSetAttribute(self.function, 8, artifact.shared),
                )
            if math.prod(artifact.cluster) > 8:  # not every part runs clusters above 8: they must be asked for
                cuda.check(doing, library.cuFuncSetAttribute(self.function, 14, 1))
        except LaunchError:
            library.cuModuleUnload(self.module)
            raise

    def _check_parameters(self, cuda: Driver, artifact: Artifact) -> None:
        """Compare the parameters with those in the cubin: a wrong launch would read past the frame."""
        if not hasattr(cuda.library, "cuFuncGetParamInfo"):  # drivers before CUDA 12.4
            return
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while not cuda.library.cuFuncGetParamInfo(self.function, c_size_t(len(sizes)), byref(offset), byref(size)):
            sizes.append(size.value)
        wanted = [ctypes.sizeof(KINDS[p.kind]) for p in artifact.parameters]
        if sizes != wanted:
            raise LaunchError(
                f"kernel {self.symbol} takes parameters of {sizes} bytes, its artifact says {wanted}",
                1,
                "CUDA_ERROR_INVALID_VALUE",
            )

    def unload(self) -> None:
        cuda = driver()
        self._inside(lambda: cuda.check(f"unloading {self.symbol}", cuda.library.cuModuleUnload(self.module)))

    def _inside(self, work: Callable[[], None]) -> None:
        cuda, old = driver(), c_void_p()
        cuda.check("cuCtxPushCurrent", cuda.library.cuCtxPushCurrent_v2(cuda.context(self.index)))
        try:
            work()
        finally:
            cuda.library.cuCtxPopCurrent_v2(byref(old))


_loaded: dict[tuple[Any, ...], LoadedKernel] = {}
_loading = threading.Lock()


def load(artifact: Artifact, index: int, owner: CubinRunner) -> LoadedKernel:
    """`artifact` on device `index`, loaded once a process for as long as `owner` or another runner may launch it.

    Keyed by the image and not by the kernel's name: same-named kernels never run each other's code.
    """
    digest = hashlib.sha256(artifact.image).digest()
    key = (digest, artifact.symbol, artifact.block, artifact.shared, artifact.cluster, artifact.parameters, index)
    with _loading:
        if key not in _loaded:
            # Here and not in a finalizer: unloading may wait for the device and would spoil a CUDA graph's capture,
            # and a cold class is never met inside one.
            for old in list(_loaded):
                if len(_loaded) < MAX_MODULES:
                    break
                if not _loaded[old].runners:
                    _loaded.pop(old).unload()
            _loaded[key] = LoadedKernel(artifact, index)
        _loaded[key].runners.add(owner)
        return _loaded[key]


# Launches as data -------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {"pointer": c_uint64, "i32": c_int32, "i64": c_int64, "f32": c_float}


@dataclass(frozen=True)
class Step:
    """One launch with everything worked out. A slot is the position of a buffer or a constant that is ready to pass."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    pdl: bool
    slots: tuple[int | ctypes._SimpleCData[Any], ...]


def bind(artifact: Artifact, launch: Launch, positions: Mapping[str, int]) -> Step:
    """Match the parameters of `artifact` with the arguments of `launch`; `positions` are those of the buffers."""
    slots: list[int | ctypes._SimpleCData[Any]] = []
    args = {**launch.args, "": None, "*": launch.workspace}
    for parameter in artifact.parameters:
        value = args[parameter.name]
        given = isinstance(value, (TensorFacts, Scratch))
        if (given or value is None) != (parameter.kind == "pointer"):
            raise TypeError(f"{artifact.symbol}: {parameter.name} is a {parameter.kind}, got {value!r}")
        elif isinstance(value, (TensorFacts, Scratch)):
            slots.append(positions[value.name])
        elif value is None:
            slots.append(c_uint64(0))
        else:
            slots.append(_constant(artifact.symbol, parameter.name, parameter.kind, value))
    if artifact.workspace * math.prod(launch.grid) > (launch.workspace.nbytes if launch.workspace else 0):
        raise ValueError(f"{artifact.symbol}: a block uses {artifact.workspace} bytes of {launch.workspace}")
    for axis, size, limit in zip("xyz", launch.grid, (2**31 - 1, 65535, 65535), strict=True):
        if not 0 <= size <= limit:
            raise ValueError(f"{artifact.symbol}: grid {axis} = {size} is outside 0 to {limit}")
    shape = (artifact.block, artifact.shared, artifact.cluster)
    return Step(artifact.symbol, launch.grid, *shape, launch.pdl, tuple(slots))


def _constant(symbol: str, name: str, kind: str, value: int | float | bool) -> ctypes._SimpleCData[Any]:
    if kind[0] == "i":
        bits = int(kind[1:]) - 1
        if not isinstance(value, int) or not -(2**bits) <= value < 2**bits:
            raise TypeError(f"{symbol}: {name} = {value!r} is no {kind}")
    return KINDS[kind](value)  # type: ignore[no-any-return]


def enqueuer(
    steps: Sequence[Step],
    functions: Sequence[c_void_p],
    launch: Any,
    raw_stream: Callable[[int], int],
    recover: Callable[[int, int, Any, Any], None],
    index: int,
) -> Callable[[Buffers], None]:
    """A function that launches `steps` on the current stream of device `index`, the buffers' addresses filled in.

    It is the whole cost of a call, so it is generated with every loop unrolled (a loop over pointers and launches costs
    0.1 us an element). Every argument of the ctypes call is a ready ctypes object and `argtypes` stays unset: no
    conversion runs, and cuLaunchKernelEx with its 4 arguments costs 0.25 us in ctypes where cuLaunchKernel with 11
    costs 0.45 to 1.1.

    A frame holds one call's parameters: address words shared by all steps, and a config and a parameter array for each.
    Threads never share one: `list.pop` and `list.append` are atomic, and an empty list makes a new frame. The driver
    copies the parameters before a launch returns.
    """
    used = sorted({slot for step in steps for slot in step.slots if isinstance(slot, int)})
    word = {position: i for i, position in enumerate(used)}
    attributes = [_attributes(step) for step in steps]
    free: list[tuple[Any, ...]] = []

    def new() -> tuple[Any, ...]:  # frames point into `attributes` and the constants of `steps`: this keeps both
        words = (c_uint64 * max(len(used), 1))()
        base = ctypes.addressof(words)
        frame: list[Any] = [words]
        for step, own in zip(steps, attributes, strict=True):
            config = LaunchConfig(step.grid, step.block, step.shared)
            if own is not None:
                config.attributes, config.count = ctypes.addressof(own), len(own)
            frame.append((c_uint64 * CONFIG_WORDS).from_buffer(config))
            frame.append(
                (c_void_p * max(len(step.slots), 1))(
                    *(base + 8 * word[s] if isinstance(s, int) else ctypes.addressof(s) for s in step.slots)
                )
            )
        return tuple(frame)

    numbers = range(len(steps))
    names = "".join(f", config{i}, params{i}" for i in numbers)
    lines = [
        "def enqueue(buffers):",
        "    try:",
        "        frame = pop()",
        "    except IndexError:",
        "        frame = new()",
        f"    words{names}, = frame",
        "    " + "".join(f"config{i}[{STREAM_WORD}] = " for i in numbers) + f"raw_stream({index})",
    ]
    if used:
        lines.append("    pack(words, 0, " + ", ".join(f"buffers[{p}].data_ptr()" for p in used) + ")")
    for i in numbers:
        lines.append(f"    if code := launch(config{i}, function{i}, params{i}, None):")
        lines.append(f"        recover({i}, code, config{i}, params{i})")
    lines.append("    push(frame)")
    space: dict[str, Any] = {
        "pop": free.pop,
        "push": free.append,
        "new": new,
        "raw_stream": raw_stream,
        "pack": struct.Struct(f"={len(used)}Q").pack_into,
        "launch": launch,
        "recover": recover,
        **{f"function{i}": functions[i] for i in numbers},
    }
    # Locals of an enclosing function are read faster than globals.
    source = f"def make({', '.join(space)}):\n    " + "\n    ".join(lines) + "\n    return enqueue\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<tilewright launch>", "exec"), scope)
    return scope["make"](**space)  # type: ignore[no-any-return]


def _attributes(step: Step) -> ctypes.Array[Attribute] | None:
    found = [Attribute(CLUSTER_DIMENSION, 0, step.cluster)] if step.cluster != (1, 1, 1) else []
    found += [Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))] if step.pdl else []
    return (Attribute * len(found))(*found) if found else None


class CubinRunner(Runner):
    """Launches artifacts. `run` is the same as calling it, one Python call cheaper: plans hold that.

    Whoever captured a launch in a CUDA graph must hold the runner for as long as the graph: the graph runs its code.
    """

    def __init__(self, artifacts: Sequence[Artifact], launches: Sequence[Launch], call: Call) -> None:
        self.index = call.device.index
        names = [*call.tensors, *(s.name for s in scratches(launches))]
        positions = {name: i for i, name in enumerate(names)}
        if len(positions) != len(names):
            raise ValueError(f"{call.op}: a scratch has the name of a tensor: {names}")
        pairs = [pair for pair in zip(artifacts, launches, strict=True) if 0 not in pair[1].grid]  # nothing to run
        on = driver().overlaps
        self.steps = [bind(a, replace(launch, pdl=launch.pdl and on), positions) for a, launch in pairs]
        self.kernels = [load(artifact, self.index, self) for artifact, _ in pairs]
        self._launch = driver().library.cuLaunchKernelEx
        self._functions = [kernel.function for kernel in self.kernels]
        stream = torch._C._cuda_getCurrentRawStream
        run = enqueuer(self.steps, self._functions, self._launch, stream, self._recover, self.index)
        # With one GPU in the process there is no other device to be in, and asking costs as much as two pointers.
        self.run = run if torch.cuda.device_count() == 1 else _entering(run, self.index)

    def __call__(self, buffers: Buffers) -> None:
        self.run(buffers)

    def _recover(self, step: int, code: int, config: Any, params: Any) -> None:
        """A thread that has not used CUDA yet has no current context: nothing was launched, so enter it and go on."""
        if code == INVALID_CONTEXT:
            driver().enter(self.index)
            code = self._launch(config, self._functions[step], params, None)
        driver().check(f"launching {self.steps[step].symbol}", code, launched=step)


def _entering(run: Callable[[Buffers], None], index: int) -> Callable[[Buffers], None]:
    current = torch._C._cuda_getDevice

    def enter_and_run(buffers: Buffers) -> None:
        if current() == index:
            run(buffers)
        else:
            with torch.cuda.device(index):
                run(buffers)

    return enter_and_run
