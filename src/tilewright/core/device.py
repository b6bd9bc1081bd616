"""What machine a call is on: kind, architecture, name, size. Read once a device and kept."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from tilewright.core.errors import UnknownName

KINDS = ("cpu", "cuda", "hip")


@dataclass(frozen=True)
class Device:
    """A device class. `arch` is `sm_90` or `gfx942` for GPUs and the machine name for CPUs."""

    kind: str
    arch: str
    name: str
    index: int = 0
    multiprocessors: int = 1
    l2_bytes: int = 0
    driver: str = ""

    @property
    def sm(self) -> int:
        """90 for sm_90; 0 where there is no such number."""
        return int(self.arch[3:]) if self.arch.startswith("sm_") else 0

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    def __str__(self) -> str:
        return self.name if self.name == self.arch else f"{self.name} ({self.arch})"


def kind_of(arch: str) -> str:
    """The kind of device that an architecture is of: "cuda" for sm_90, "hip" for gfx942, else "cpu"."""
    return "cuda" if arch.startswith("sm_") else "hip" if arch.startswith("gfx") else "cpu"


@lru_cache(maxsize=64)
def device_of(kind: str, index: int | None = None) -> Device:
    """The facts of `kind` ("cpu" or "cuda") number `index`."""
    if kind == "cpu":
        return Device("cpu", platform.machine(), _cpu_name())
    if kind != "cuda":
        return Device(kind, kind, kind)
    index = torch.cuda.current_device() if index is None else index
    facts = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = facts.gcnArchName.split(":")[0] if hip else f"sm_{facts.major}{facts.minor}"
    return Device(
        "hip" if hip else "cuda",
        arch,
        facts.name,
        index,
        facts.multi_processor_count,
        getattr(facts, "L2_cache_size", 0),
        _driver(),
    )


def target_device(arch: str) -> Device:
    """A device that nobody here owns, to compile for: `sm_90`, `gfx942`. Sizes are those of the usual part."""
    sizes = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
    return Device(kind_of(arch), arch, arch, 0, sizes.get(arch, 100), 50 << 20)


def torch_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:1` as a device that is here.

    Raises:
        UnknownName: for anything else; the message lists what there is.
    """
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count()
    here = index == "" if kind == "cpu" else kind == "cuda" and (index or "0").isdigit() and int(index or 0) < count
    if not here:
        raise UnknownName("device", name, ["cpu", *(f"cuda:{i}" for i in range(count))])
    return torch.device(name)


def default_device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as text:
            words = text.readline().split()
        return next((w for w in words if w[:1].isdigit() and "." in w), "")
    except OSError:
        return ""
