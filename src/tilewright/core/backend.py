"""What a backend is: is it here, why not, what can it compile for, and how its launches run.

The backends themselves live in `tilewright.backends`, one file each; the core knows them by name and loads them when
one of their kernels is about to be used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tilewright.core.call import Call
from tilewright.core.device import Device
from tilewright.core.launch import Config, Launch
from tilewright.core.reason import Reason

if TYPE_CHECKING:
    from tilewright.core.kernel import Kernel

Buffers = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter. `kind` is "pointer", "map" (a `TensorMap`), "i32", "i64" or "f32"; a parameter without a
    name is a null pointer that the compiler asks for, "*" the launch's workspace."""

    kind: str
    name: str = ""


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel with its launch facts, whichever language it came from."""

    image: bytes
    symbol: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, int, int]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    registers: int | None = None
    spills: int | None = None
    workspace: int = 0
    """Bytes that each block uses of the launch's workspace."""


class Runner(ABC):
    """Ready-to-run launches. Called with every tensor of the call in `call.tensors` order, then the scratch, it
    enqueues the kernels on the current stream of the tensors' device and returns."""

    @abstractmethod
    def __call__(self, buffers: Buffers) -> None: ...


class Backend(ABC):
    """A way to author and run kernels."""

    name: str
    launches = True
    """Whether its kernels return `Launch`es (outputs are allocated here) or are functions of tensors."""
    emulation: ClassVar[Mapping[str, str]] = {}
    """Environment variables of a process in which it emulates; see `emulates`."""

    @abstractmethod
    def missing(self, kind: str = "") -> Reason | None:
        """Why the backend cannot serve devices of a kind ("cpu", "cuda", "hip"; "": any at all) here, with what would
        help; None when it can. Must be cheap and import nothing."""

    @abstractmethod
    def version(self, kind: str = "") -> str:
        """The version of what compiles for devices of a kind, as it enters evidence and cache keys; "" when absent.
        Without a kind of all of it, for people."""

    def targets(self) -> list[str]:
        """Architectures it can compile for on this machine, GPU or not."""
        return []

    def emulates(self, device: Device) -> bool:
        """True where kernels written for a GPU run on `device` all the same (Triton's interpreter)."""
        return False

    def serial(self) -> bool:
        """Whether a check in this process must keep torch to one thread. In a forked child the threads of parallel
        regions stay with the parent, and would be waited for."""
        return False

    def bind(self, kernel: Kernel, call: Call) -> Callable[..., list[Any]]:
        """For backends of functions: the kernel as a function of the op's tensors, for calls with these facts. It
        returns outputs (None where skipped), then what is saved."""
        raise NotImplementedError(f"{self.name} binds no functions")

    def compile(self, launch: Launch, device: Device) -> Artifact:
        """Compile one launch for `device`, from the artifact cache where it was compiled before. Needs no GPU."""
        raise NotImplementedError(f"{self.name} compiles no launches")

    def explain(self, kernel: Kernel, config: Config, call: Call) -> str:
        """What its compiler makes of a kernel, in words, for whoever wonders why it is slow; "" where it says nothing.
        Needs no GPU."""
        return ""

    def prepare(self, launches: Sequence[Launch], call: Call) -> Runner:
        """Compile and load `launches` so that calls with the facts of `call` can run."""
        raise NotImplementedError(f"{self.name} prepares no launches")
