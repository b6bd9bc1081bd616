"""The one launcher: loads an `Artifact` with the CUDA driver and enqueues it, whichever language it came from.

ctypes on libcuda alone: no build step, no package. Nothing is loaded before the first runner is built, so importing
this file is harmless on a machine without a GPU. How a cubin is made lives in the backends' own files, how its
arguments are passed in `enqueue.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch

from tilewright.backends.enqueue import KINDS, MAP_WORDS, Maps, bind, enqueuer
from tilewright.core.backend import Artifact, Buffers, Runner
from tilewright.core.call import Call
from tilewright.core.errors import TilewrightError
from tilewright.core.launch import Launch, TensorMap, scratches
from tilewright.core.reason import Reason

T = TypeVar("T")

LIBRARY = "libcuda.so.1"
MAX_MODULES = 1024
"""Loaded modules a process keeps; beyond it, those that no runner holds any more are unloaded, oldest first."""

MAP_ALIGN, PROMOTE_256 = 64, 3  # of descriptors; the L2 fetches so many bytes at once
ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}
SWIZZLES = {32: 1, 64: 2, 128: 3}
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
        words = f"{doing}: {name or f'CUDA error {code}'}" + (f" ({text})" if text else "")
        if self.sticky:
            words += "; the CUDA context of this process is lost, and an earlier kernel may be the cause"
        super().__init__(words)


class LaunchOutOfMemory(LaunchError, torch.OutOfMemoryError):
    """The driver had no memory for a kernel: as where torch runs out, that says nothing of the kernel."""


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
            kind = LaunchOutOfMemory if code == OUT_OF_MEMORY else LaunchError
            raise kind(doing, code, (name.value or b"").decode(), (text.value or b"").decode(), launched)

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

    def inside(self, index: int, work: Callable[[], T]) -> T:
        """What `work` returns, done in the context of device `index`, whichever this thread is in."""
        self.check("cuCtxPushCurrent", self.library.cuCtxPushCurrent_v2(self.context(index)))
        try:
            return work()
        finally:
            self.library.cuCtxPopCurrent_v2(byref(c_void_p()))

    def tensor_map(self, wanted: TensorMap) -> ctypes.Array[Any]:
        """A descriptor of `wanted`, at the address 0 until it is placed."""
        facts, axes = wanted.facts, len(wanted.shape)
        if facts.dtype not in ELEMENTS or wanted.swizzle not in SWIZZLES:
            raise TypeError(f"{facts.name}: no descriptor of {facts.dtype} with a swizzle of {wanted.swizzle} bytes")
        if not hasattr(self.library, "cuTensorMapReplaceAddress"):
            raise LaunchError("making a descriptor", 801, "CUDA_ERROR_NOT_SUPPORTED", "needs a driver of CUDA 12")
        size = facts.dtype.itemsize
        steps = [16 if n == 1 else s * size for n, s in zip(wanted.shape, wanted.stride, strict=True)]
        room = (c_uint64 * (2 * MAP_WORDS))()
        made = (c_uint64 * MAP_WORDS).from_buffer(room, -ctypes.addressof(room) % MAP_ALIGN)
        code = self.library.cuTensorMapEncodeTiled(
            made, ELEMENTS[facts.dtype], axes, c_void_p(), (c_uint64 * axes)(*reversed(wanted.shape)),
            (c_uint64 * (axes - 1))(*reversed(steps[:-1])), (c_uint32 * axes)(*reversed(wanted.box)),
            (c_uint32 * axes)(*[1] * axes), 0, SWIZZLES[wanted.swizzle], PROMOTE_256, 0,
        )  # fmt: skip
        self.check(f"a descriptor of {facts.name} {wanted.shape} for boxes {wanted.box}", code)
        return made

    def maps(self, index: int) -> Maps:
        """Of device `index`, also in threads that have not used CUDA yet."""
        place: Any = getattr(self.library, "cuTensorMapReplaceAddress", None)  # without it none is made

        def recover(code: int, made: Any, address: Any) -> None:
            if code == INVALID_CONTEXT:
                self.enter(index)
                code = place(made, address)
            self.check("placing a descriptor", code)

        return Maps(lambda wanted: self.inside(index, lambda: self.tensor_map(wanted)), place, recover)


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
        cuda.inside(index, lambda: self._load(cuda, artifact))

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
        doing = f"unloading {self.symbol}"
        cuda.inside(self.index, lambda: cuda.check(doing, cuda.library.cuModuleUnload(self.module)))


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
        maps = driver().maps(self.index)
        run = enqueuer(self.steps, self._functions, self._launch, stream, self._recover, self.index, maps)
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
