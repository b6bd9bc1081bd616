"""Turn what a machine has proven and timed into the evidence that the package ships.

    python scripts/ship_evidence.py CACHE_DIRECTORY [...]

Reads the caches that `tilewright verify` and `tilewright tune` have filled there, adds them to what is shipped already,
keeps of both what belongs to the kernels as they are now (by digest), and rewrites src/tilewright/evidence/<arch>.json
and evidence/times/<arch>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import tilewright  # noqa: E402, F401  declares the ops
from tilewright.core import registry  # noqa: E402

HOME = ROOT / "src" / "tilewright" / "evidence"


def entries(cache: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, value) of every entry of one kind."""
    for path in sorted((cache / kind).glob("*.entry")):
        header, _, payload = path.read_bytes().partition(b"\n")
        yield json.loads(header)["key"], json.loads(payload)


def shipped(folder: Path) -> dict[str, dict[str, Any]]:
    """{arch: content} of the files there."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def main(caches: list[str]) -> int:
    current = {f"{k.name} {k.digest} " for op in registry.ops() for k in registry.kernels_of(op.name)}
    known = {
        arch: {group: found for group, found in groups.items() if any(group.startswith(mark) for mark in current)}
        for arch, groups in shipped(HOME).items()
    }
    times = {
        arch: {
            gpu: {
                key: kept
                for key, pairs in keys.items()
                if (kept := {pair: us for pair, us in pairs.items() if any(pair.startswith(mark) for mark in current)})
            }
            for gpu, keys in gpus.items()
        }
        for arch, gpus in shipped(HOME / "times").items()
    }
    for cache in map(Path, caches):
        for group, verdicts in entries(cache, "evidence"):
            arch = group.rpartition(" ")[2]
            if not any(group.startswith(mark) for mark in current) or not arch.startswith(("sm_", "gfx")):
                continue
            passed = {entry: v["cases"] for entry, v in verdicts.items() if v["passed"]}
            known.setdefault(arch, {}).setdefault(group, {}).update(passed)
        for key, places in entries(cache, "times"):
            for place, pairs in places.items():
                found = {
                    pair: [t["call_us"] and round(t["call_us"], 2), round(t["kernel_us"], 2)]
                    for pair, t in pairs.items()
                    if any(pair.startswith(mark) for mark in current)
                }
                arch = arch_of(place)
                if found and arch:
                    gpu = times.setdefault(arch, {}).setdefault(place.partition("|")[0], {})
                    gpu.setdefault(key, {}).update(found)
    for folder, what in ((HOME, known), (HOME / "times", times)):
        folder.mkdir(parents=True, exist_ok=True)
        for arch, content in what.items():
            path = folder / f"{arch}.json"
            path.write_text(json.dumps(content, indent=0, sort_keys=True, separators=(",", ":")) + "\n")
            print(path.relative_to(ROOT), f"{path.stat().st_size} bytes")
    return 0


def arch_of(place: str) -> str:
    """The architecture of a "GPU name|driver" that we ship times for; "" for others (CPUs)."""
    name = place.partition("|")[0]
    return next(
        (arch for part, arch in {"H100": "sm_90", "H200": "sm_90", "A100": "sm_80"}.items() if part in name), ""
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
