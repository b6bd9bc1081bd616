"""Measured times of proven (kernel, config) pairs, kept as times and not as winners. Selection reads them; the tuner
and the benchmarks write them.

Key: kernel digest, config, call class, GPU, driver, compiler. Times from another GPU, driver or compiler are not used,
and `stale` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from tilewright.core import evidence, registry
from tilewright.core.cache import disk
from tilewright.core.device import KINDS, Device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config

Metric = Literal["call_us", "kernel_us"]

TIE_BAND = 0.01
ALLOWANCE = 0.02
"""At most this share of a time is put down to chance."""


@dataclass(frozen=True)
class Time:
    """Microseconds of one call as the host sees it, and of its kernels on the device, each with its relative standard
    error where that is known. Benchmarks of every config measure kernels alone: a call takes as long at the least."""

    call_us: float | None
    kernel_us: float
    call_error: float = 0.0
    kernel_error: float = 0.0
    date: str = ""
    shipped: bool = False
    busy: float = 0.0
    """The share of the CPUs that other processes took while a kernel of the CPU was measured, where that is much."""

    def us(self, metric: Metric) -> float:
        return self.kernel_us if metric == "kernel_us" or self.call_us is None else self.call_us

    def tied(self, metric: Metric, best_us: float) -> bool:
        """Whether it may be as fast as the best: not shown to be slower by more than the tie band."""
        return tied(self.us(metric), self.call_error if metric == "call_us" else self.kernel_error, best_us)


def tied(us: float, error: float, best_us: float, band: float = TIE_BAND) -> bool:
    """Two standard errors count as chance, so that equals stay equal however noisy the machine."""
    return us * (1 - min(2 * error, ALLOWANCE)) <= best_us * (1 + band)


def _pair(kernel: Kernel, config: Config, kind: str) -> str:
    return f"{_version_of(kernel, kind)}|{config}"


def _version_of(kernel: Kernel, kind: str) -> str:
    return f"{kernel.name} {kernel.digest} {registry.backend(kernel.backend).version(kind)}"


def _place(device: Device) -> str:
    return f"{device.name}|{device.driver}"


_memory: dict[tuple[str, str], dict[str, Any]] = {}


def _tuned(op: str, call_class: str) -> dict[str, Any]:
    """{GPU|driver: {pair: the fields of its Time}}, read once a process and class."""
    key = (op, call_class)
    if key not in _memory:
        _memory[key] = disk().load_json("times", f"{op} {call_class}")
    return _memory[key]


def find(kernel: Kernel, config: Config, op: str, call_class: str, device: Device) -> Time | None:
    """The time measured on this machine, else the shipped one of this GPU; of one like it, where that has none."""
    pair = _pair(kernel, config, device.kind)
    here = _tuned(op, call_class).get(_place(device), {}).get(pair)
    if here is not None:
        errors = here.get("call_error", 0.0), here.get("kernel_error", 0.0)
        return Time(here["call_us"], here["kernel_us"], *errors, here.get("date", ""), busy=here.get("busy", 0.0))
    there = _shipped_for(device, f"{op} {call_class}").get(pair)
    return None if there is None else Time(there[0], there[1], shipped=True)


def record(
    kernel: Kernel, config: Config, op: str, call_class: str, device: Device, call_us: float | None, kernel_us: float
) -> None:
    """Keep a measured time. The best of two runs' times is not taken: the newest stands."""
    record_many({(kernel, config): Time(call_us, kernel_us)}, op, call_class, device)


def record_many(measured: Mapping[tuple[Kernel, Config], Time], op: str, call_class: str, device: Device) -> None:
    """Keep the times of several pairs of one class in one write: all or none are seen."""
    facts = {
        _pair(*pair, device.kind): {
            "call_us": time.call_us,
            "kernel_us": time.kernel_us,
            "call_error": round(time.call_error, 5),
            "kernel_error": round(time.kernel_error, 5),
            "date": evidence.today(),
            **({"busy": round(time.busy, 2)} if time.busy else {}),
        }
        for pair, time in measured.items()
    }

    def change(known: dict[str, Any]) -> None:
        _trim(known, op, device)
        known.setdefault(_place(device), {}).update(facts)

    known = _tuned(op, call_class)  # where the disk takes nothing, this process still knows
    for place, pairs in disk().update("times", f"{op} {call_class}", change).items():
        known.setdefault(place, {}).update(pairs)
    evidence.bump()


def _trim(known: dict[str, Any], op: str, device: Device) -> None:
    """Drop what nothing here can use any more: this GPU's times under other drivers, and everywhere those of other
    sources of a kernel or of other compilers. Kernels that are not here now (of plug-ins) keep theirs."""
    here = [(kernel, tuple(f"{_version_of(kernel, kind)}|" for kind in KINDS)) for kernel in registry.kernels_of(op)]
    for place in list(known):
        if place.startswith(f"{device.name}|") and place != _place(device):
            del known[place]
            continue
        for pair in list(known[place]):
            if any(evidence.speaks_of(kernel, pair) and not pair.startswith(own) for kernel, own in here):
                del known[place][pair]
        if not known[place]:
            del known[place]


def stale(op: str, call_class: str, device: Device) -> str:
    """Says that times exist for this class but from elsewhere; "" otherwise."""
    known = _tuned(op, call_class)
    if not known or _place(device) in known:
        return ""
    return f"times measured under {', '.join(known)} are not used here"


def forget() -> None:
    """Drop what this process remembers; files stay."""
    _memory.clear()
    evidence.bump()


def _shipped_for(device: Device, op_class: str) -> dict[str, list[Any]]:
    """All times of a class are of one GPU: those of two would say which is faster, and of no kernel."""
    places = _shipped().get(device.arch, {})
    names = sorted(places, key=lambda name: name != device.name)
    return next((places[name][op_class] for name in names if op_class in places[name]), {})


@cache
def _shipped() -> dict[str, dict[str, dict[str, dict[str, list[Any]]]]]:
    """{arch: {GPU: {"op class": {pair: [call_us or null, kernel_us]}}}} from the files in tilewright/evidence/times."""
    found: dict[str, dict[str, dict[str, dict[str, list[Any]]]]] = {}
    folder = resources.files("tilewright") / "evidence" / "times"
    if folder.is_dir():
        for file in folder.iterdir():
            if file.name.endswith(".json"):
                found[file.name.removesuffix(".json")] = json.loads(file.read_text(encoding="utf-8"))
    return found
