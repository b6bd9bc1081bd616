"""Evidence: recorded numerics checks of a kernel and config on a device class, and quarantine, its opposite.

Evidence is shipped for what was measured and extended on the user's machine, in the cache directory. How a check is
made lives in `tilewright.verify`, which installs itself here as the prover.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tilewright.core import registry
from tilewright.core.cache import disk
from tilewright.core.call import Call
from tilewright.core.device import kind_of
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. `passed` None means that it could not be had (out of memory): neither evidence nor
    quarantine."""

    passed: bool | None
    cases: int = 0
    where: str = ""
    date: str = ""
    detail: str = ""
    shipped: bool = dataclasses.field(default=False, compare=False)


Prover = Callable[[Kernel, Config, Call], Verdict]

_memory: dict[tuple[str, str], Verdict] = {}
_broken: dict[tuple[str, str, str, str], str] = {}
_prover: list[Prover] = []
_isolated: list[Prover] = []
_lock = threading.Lock()
_trimmed: set[str] = set()
epoch = [0]
"""Bumped by whatever may change a selection: new evidence, quarantine, kernels, times. Part of every plan's key."""


def bump() -> None:
    """Make every plan be looked up anew."""
    with _lock:
        epoch[0] += 1


registry.on_change(bump)


def install_prover(prover: Prover) -> None:
    _prover[:] = [prover]


def install_isolated_prover(prover: Prover | None) -> None:
    """What checks kernels that are new to every architecture: in a process that may die. None in such a process."""
    _isolated[:] = [] if prover is None else [prover]


def today() -> str:
    return datetime.date.today().isoformat()


def _group(kernel: Kernel, arch: str) -> str:
    """This very source under the compiler that is here for such devices."""
    version = registry.backend(kernel.backend).version(kind_of(arch))
    return f"{kernel.name} {kernel.digest} {kernel.backend} {version} {arch}"


def _arch_of(group: str) -> str:
    return group.rpartition(" ")[2]


def _entry(config: Config, layout: str) -> str:
    return f"{config}|{layout}"


def find(kernel: Kernel, config: Config, layout: str, arch: str) -> Verdict | None:
    """What is known of this kernel, config and layout class here: in this process, on this machine, or shipped."""
    group, entry = _group(kernel, arch), _entry(config, layout)
    known = _memory.get((group, entry))
    if known is None:
        stored = disk().load_json("evidence", group).get(entry)
        if stored is not None:
            known = Verdict(**stored)
        else:
            shipped = _shipped().get(group, {}).get(entry)
            known = None if shipped is None else Verdict(True, shipped, arch, shipped=True)
        if known is not None:
            _memory[group, entry] = known
    return known


def against(kernel: Kernel, arch: str) -> str:
    """What was found wrong of this kernel here, whichever its config and calls, or ""."""
    group = _group(kernel, arch)
    known = {entry: Verdict(**facts) for entry, facts in disk().load_json("evidence", group).items()}
    known |= {entry: verdict for (of, entry), verdict in list(_memory.items()) if of == group}
    wrong = [(entry, verdict.detail) for entry, verdict in known.items() if verdict.passed is False]
    return ": ".join(filter(None, [wrong[0][0].partition("|")[0], wrong[0][1]])) if wrong else ""


def record(kernel: Kernel, config: Config, layout: str, arch: str, verdict: Verdict) -> None:
    """Keep a verdict: on disk, and in memory where the disk does not take it."""
    record_many(kernel, arch, {(config, layout): verdict})


def record_many(kernel: Kernel, arch: str, verdicts: Mapping[tuple[Config, str], Verdict]) -> None:
    """Keep verdicts of one kernel by (config, layout class), in one write."""
    group = _group(kernel, arch)
    found = {_entry(config, layout): verdict for (config, layout), verdict in verdicts.items()}
    _memory.update({(group, entry): verdict for entry, verdict in found.items()})
    kept = {entry: dataclasses.asdict(v) for entry, v in found.items() if v.passed is not None}
    if kept:
        for facts in kept.values():
            facts.pop("shipped")
        disk().update("evidence", group, lambda known: known.update(kept))
        _trim(kernel)
    bump()


def _trim(kernel: Kernel) -> None:
    """Once a process: evidence on disk of other sources of this kernel, or under another compiler, goes."""
    own = f"{kernel.name} {kernel.digest}"
    if own not in _trimmed:
        _trimmed.add(own)
        disk().drop("evidence", lambda group: speaks_of(kernel, group) and group != _group(kernel, _arch_of(group)))


def speaks_of(kernel: Kernel, key: str) -> bool:
    """Whether a key of evidence or times, which begin with a name and a digest, is of this kernel in any version."""
    return re.match(f"{re.escape(kernel.name)} [0-9a-f]{{16}} ", key) is not None


def prove(kernel: Kernel, config: Config, call: Call) -> Verdict:
    """Check the kernel on probes of the call's class. Compile and launch errors propagate.

    A kernel that launches GPU code and has passed nowhere yet is checked in a worker, which a hang or an illegal access
    may take down; functions of torch, and kernels with evidence, are checked here.
    """
    risky = call.device.is_gpu and registry.backend(kernel.backend).launches
    if _isolated and risky and not proven_anywhere(kernel, call.device.arch):
        return _isolated[0](kernel, config, call)
    if not _prover:
        return Verdict(None, detail="no prover is installed")
    return _prover[0](kernel, config, call)


def proven_anywhere(kernel: Kernel, here: str) -> bool:
    """Whether this very source has passed on some architecture of the kind of `here`, or for another class `here` on
    this machine: then it may be probed in process."""

    def alike(group: str) -> bool:
        return group.startswith(f"{kernel.name} {kernel.digest} ") and kind_of(_arch_of(group)) == kind_of(here)

    if any(map(alike, _shipped())):
        return True
    if any(alike(group) and verdict.passed for (group, _), verdict in list(_memory.items())):
        return True
    return any(facts.get("passed") for facts in disk().load_json("evidence", _group(kernel, here)).values())


def mark_broken(kernel: Kernel, config: Config, arch: str, why: str, layout: str = "") -> None:
    """Compile and launch errors: last as long as the process. With `layout`, for that layout class alone."""
    _broken[kernel.name + kernel.digest, str(config), arch, layout] = why
    bump()


def broken(kernel: Kernel, config: Config, arch: str, layout: str = "") -> str | None:
    """Why this kernel and config are not used here: at all, or for calls of the layout class."""
    key = (kernel.name + kernel.digest, str(config), arch)
    return _broken.get((*key, "")) or _broken.get((*key, layout))


def forget() -> None:
    """Drop what this process remembers; files stay."""
    _memory.clear()
    _broken.clear()
    _trimmed.clear()
    bump()


@cache
def _shipped() -> dict[str, dict[str, int]]:
    """{group: {entry: cases}} from the files in tilewright/evidence."""
    found: dict[str, dict[str, int]] = {}
    folder = resources.files("tilewright") / "evidence"
    if folder.is_dir():
        for file in folder.iterdir():
            if file.name.endswith(".json"):
                value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                for group, entries in value.items():
                    found.setdefault(group, {}).update(entries)
    return found
