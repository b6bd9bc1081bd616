"""What a benchmark found: rows as data, the machine and software they hold for, and their JSON."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.core.device import Device

PACKAGES = ("tilewright", "triton", "tilelang", "liger-kernel", "quack-kernels", "fla-core")


@dataclass
class Row:
    """One kernel on one problem. Times are None where it has no passing evidence.

    `kernel_us` is the device's time; on a CPU, which has no clock of kernels, the host's time of the kernel's function
    alone. `sol`, in tables "of copy", is the fraction of the measured copy rate (of the matmul rate where operations
    take longer), None for a hot measurement. `ratio_ci` is the 95 % interval of the peer's time over ours.
    """

    op: str
    pass_name: str
    workload: str
    shape: list[int]
    dtype: str
    backend: str
    config: str
    cache: str
    bytes: int
    kernel_us: float | None = None
    iqr_us: float | None = None
    call_us: float | None = None
    sol: float | None = None
    verified: bool = False
    peer: str | None = None
    peer_us: float | None = None
    ratio_ci: list[float] | None = None
    kernel: str = ""
    """Its name, as `tilewright ops` has it: several may be of one backend."""

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "pass": self.pass_name,
            "workload": self.workload,
            "shape": self.shape,
            "dtype": self.dtype,
            "backend": self.backend,
            "kernel": self.kernel,
            "config": self.config,
            "cache": self.cache,
            "bytes": self.bytes,
            "kernel_us": _short(self.kernel_us),
            "iqr_us": _short(self.iqr_us),
            "call_us": _short(self.call_us),
            "sol": _short(self.sol),
            "verified": self.verified,
            "peer": self.peer,
            "peer_us": _short(self.peer_us),
            "ratio_ci": None if self.ratio_ci is None else [_short(v) for v in self.ratio_ci],
        }


@dataclass
class PeerRow:
    """One rival on one problem; not part of the JSON of results, which names the best of them in each row."""

    op: str
    pass_name: str
    shape: list[int]
    dtype: str
    cache: str
    peer: str
    kernel_us: float
    iqr_us: float
    call_us: float

    def as_json(self) -> dict[str, Any]:
        facts = {**vars(self), "pass": self.pass_name}
        facts.pop("pass_name")
        return {k: _short(v) if isinstance(v, float) else v for k, v in facts.items()}


@dataclass
class Report:
    device: dict[str, Any]
    software: dict[str, Any]
    copy_tb_s: float
    matmul_tflops: float
    results: list[Row] = field(default_factory=list)
    peers: list[PeerRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""

    @property
    def kernel_clock(self) -> bool:
        """Whether kernels were timed by the device itself."""
        return "multiprocessors" in self.device

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "software": self.software,
            "copy_tb_s": self.copy_tb_s,
            "matmul_tflops": self.matmul_tflops,
            "results": [row.as_json() for row in self.results],
        }


def machine(device: Device) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": device.name, "arch": device.arch}
    if device.is_gpu:
        facts |= {"multiprocessors": device.multiprocessors, "l2_bytes": device.l2_bytes, "driver": device.driver}
    else:
        facts |= {"threads": torch.get_num_threads()}
    return facts


def software() -> dict[str, Any]:
    """Versions, and whether torch may serve aten norms by kernels of its own (`torch.backends.python_native`)."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    native = python_native()
    if native:
        found["python_native"] = native
    return found


def python_native() -> str:
    """The kernel languages that torch itself may use for aten ops here; "" where it has no such thing or none is on."""
    backends = getattr(torch.backends, "python_native", None)
    if backends is None:
        return ""
    return ", ".join(name for name in backends.available_dsls if not backends.is_dsl_disabled(name))


def _short(value: float | None) -> float | None:
    """Four significant digits more than any measurement has."""
    return None if value is None else float(f"{value:.6g}")
