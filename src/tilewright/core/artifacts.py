"""Compiled artifacts by key: a bounded memory in front of the cache directory, one build among many processes.

How an artifact is built and what its key holds is each backend's own business; how entries survive crashes is in
`cache.py`. An artifact is stored as a line of JSON (its launch facts) followed by the raw image.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tilewright.core.backend import Artifact, Parameter
from tilewright.core.cache import disk
from tilewright.core.errors import NotWarm

KIND = "artifacts"
MEMORY_BYTES = 64 << 20
"""Images that a process remembers; beyond it, those used longest ago are read from the disk again."""
BUILD_SECONDS = 600.0
"""How long another process may take over a build before this one stops waiting and builds too."""
TRIM_EVERY = 64

_memory: OrderedDict[str, Artifact] = OrderedDict()
_held = 0
_builds = 0
_lock = threading.Lock()


def cached(key: str, build: Callable[[], Artifact]) -> Artifact:
    """The artifact of `key`: from memory, from the disk, or from `build`, which runs in one process at a time.

    Raises:
        NotWarm: the artifact is not in memory and a CUDA graph is being captured. Loading one then is refused too:
            the driver may synchronise for it.
    """
    artifact = _recall(key)
    if artifact is not None:
        return artifact
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise NotWarm("a kernel would have to be compiled while a CUDA graph is captured; run this call once before")
    cache = disk()
    artifact = _read(cache.load(KIND, key))
    if artifact is None:
        with cache.locked(KIND, key, BUILD_SECONDS):
            artifact = _read(cache.load(KIND, key))  # another process may have built it meanwhile
            if artifact is None:
                artifact = build()
                cache.store(KIND, key, dump(artifact))
                _trim_sometimes()
                _remember(key, artifact)
                return artifact
    cache.touch(KIND, key)
    _remember(key, artifact)
    return artifact


def dump(artifact: Artifact) -> bytes:
    facts = {
        "symbol": artifact.symbol,
        "parameters": [[p.kind, p.name] for p in artifact.parameters],
        "block": artifact.block,
        "shared": artifact.shared,
        "cluster": artifact.cluster,
        "registers": artifact.registers,
        "spills": artifact.spills,
        "workspace": artifact.workspace,
        "bytes": len(artifact.image),
    }
    return json.dumps(facts).encode() + b"\n" + artifact.image


def parse(payload: bytes) -> Artifact:
    """Raises ValueError, TypeError or KeyError for what `dump` of this version has not written."""
    header, _, image = payload.partition(b"\n")
    facts: dict[str, Any] = json.loads(header)
    if facts["bytes"] != len(image):
        raise ValueError(f"{len(image)} bytes of image, {facts['bytes']} expected")
    x, y, z = facts["block"]
    cx, cy, cz = facts["cluster"]
    return Artifact(
        image,
        facts["symbol"],
        tuple(Parameter(kind, name) for kind, name in facts["parameters"]),
        (x, y, z),
        facts["shared"],
        (cx, cy, cz),
        facts["registers"],
        facts["spills"],
        facts["workspace"],
    )


def forget() -> None:
    """Drop what this process remembers; files stay."""
    global _held
    with _lock:
        _memory.clear()
        _held = 0


def remembered() -> tuple[int, int]:
    """(artifacts, bytes of their images) in this process's memory."""
    with _lock:
        return len(_memory), _held


def _read(payload: bytes | None) -> Artifact | None:
    if payload is None:
        return None
    try:
        return parse(payload)
    except (ValueError, TypeError, KeyError):
        return None  # intact, but of another version of this library: built anew


def _recall(key: str) -> Artifact | None:
    with _lock:
        artifact = _memory.get(key)
        if artifact is not None:
            _memory.move_to_end(key)
        return artifact


def _remember(key: str, artifact: Artifact) -> None:
    global _held
    with _lock:
        old = _memory.pop(key, None)
        _held += len(artifact.image) - (len(old.image) if old else 0)
        _memory[key] = artifact
        while _held > MEMORY_BYTES and len(_memory) > 1:
            _, dropped = _memory.popitem(last=False)
            _held -= len(dropped.image)


def _trim_sometimes() -> None:
    global _builds
    with _lock:
        due, _builds = _builds % TRIM_EVERY == 0, _builds + 1
    if due:
        disk().trim(KIND)
