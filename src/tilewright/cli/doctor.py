"""`tilewright doctor`: what is here, what is missing and how to get it, and how the caches are."""

from __future__ import annotations

import platform
from typing import Any

from rich.table import Table

from tilewright.cli.arguments import Json
from tilewright.cli.output import json_only, stdout


def command(json: Json = False) -> None:
    """Show backends, versions, devices, plug-ins and the health of the caches, with what would help."""
    with json_only(json) as emit:
        import tilewright  # noqa: F401  declares the ops

        found = examine()
        if json:
            emit(found)
            return
    _print(found)


def examine() -> dict[str, Any]:
    import torch

    import tilewright
    from tilewright.backends.triton import launch_path
    from tilewright.bench.results import python_native
    from tilewright.core import registry

    for op in registry.ops():
        registry.kernels_of(op.name)  # loads plug-ins, so that their failures are known
    return {
        "tilewright": tilewright.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "python_native": python_native() or "off or absent",
        "devices": _devices(),
        "backends": [_backend(name) for name in registry.backend_names()],
        "triton_launch": launch_path(),
        "plugins_failed": [{"name": f.name, "error": f.error} for f in registry.load_failures],
        "cache": _cache(),
        "times": _times(),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    from tilewright.core.device import device_of

    found = [device_of("cpu"), *(device_of("cuda", i) for i in range(torch.cuda.device_count()))]
    return [
        {"kind": d.kind, "index": d.index, "name": d.name, "arch": d.arch, "driver": d.driver, "l2_bytes": d.l2_bytes}
        for d in found
    ]


def _backend(name: str) -> dict[str, Any]:
    from tilewright.core import registry

    backend = registry.backend(name)
    missing = backend.missing()
    lacking = {kind: reason for kind in ("cpu", "cuda") if (reason := backend.missing(kind)) is not None}
    return {
        "name": name,
        "version": backend.version(),
        "available": missing is None,
        "problem": "" if missing is None else missing.problem,
        "remedy": "" if missing is None else missing.remedy,
        "lacking": {} if missing else {kind: str(reason) for kind, reason in lacking.items()},
        "targets": backend.targets(),
    }


def _cache() -> dict[str, Any]:
    from tilewright.core.cache import disk

    cache = disk()
    entries, size, bad = cache.health()
    return {
        "directory": str(cache.root),
        "exists": cache.root.is_dir(),
        "entries": entries,
        "bytes": size,
        "corrupt": bad,
        "problem": cache.problem or _unwritable(cache.root),
    }


def _unwritable(root: Any) -> str:
    """Why nothing can be kept there; "" when it can. Nothing is written to find out."""
    import os

    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    good = os.access(place, os.W_OK | os.X_OK)
    return "" if good else f"{place} is not writable: results last as long as the process"


def _times() -> dict[str, int]:
    """Tuned call classes on disk, and how many of them hold times of other machines, drivers or compilers only."""
    import json

    from tilewright.core.cache import disk
    from tilewright.core.device import default_device, device_of

    where = default_device()
    device = device_of(where.type, where.index)
    here = f"{device.name}|{device.driver}"
    classes = stale = 0
    for path in disk().root.glob("times/*.entry"):
        try:
            header, _, _ = path.read_bytes().partition(b"\n")
            known = disk().load_json("times", json.loads(header)["key"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # counted among the corrupt
        classes += 1
        stale += here not in known
    return {"classes": classes, "stale": stale}


def _print(found: dict[str, Any]) -> None:
    console = stdout()
    gpu = f"cuda {found['cuda']}" if found["cuda"] else f"hip {found['hip']}" if found["hip"] else "no GPU support"
    console.print(
        f"tilewright {found['tilewright']}   python {found['python']}   torch {found['torch']} ({gpu})   "
        f"torch's python_native: {found['python_native']}",
        highlight=False,
    )
    for d in found["devices"]:
        driver = f"   driver {d['driver']}" if d["driver"] else ""
        console.print(f"{d['kind']}:{d['index']}   {d['name']} ({d['arch']}){driver}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("backend", "version", "here", "compiles for"):
        table.add_column(name, no_wrap=name == "backend")
    for b in found["backends"]:
        remedy = f"; {b['remedy']}".replace("[", r"\[") if b["remedy"] else ""
        here = "[green]yes[/green]" if b["available"] else f"[yellow]{b['problem']}[/yellow]{remedy}"
        for kind, reason in b["lacking"].items():
            here += f"; [yellow]not for {kind}: {reason.replace('[', chr(92) + '[')}[/yellow]"
        table.add_row(b["name"], b["version"], here, " ".join(b["targets"]))
    console.print(table)
    console.print(f"triton launches by: {found['triton_launch']}", highlight=False)
    for failure in found["plugins_failed"]:
        console.print(f"plug-in {failure['name']} failed to load: {failure['error']}", style="red", markup=False)
    cache, times = found["cache"], found["times"]
    state = f"{cache['entries']} entries, {cache['bytes'] / 1e6:.1f} MB" if cache["exists"] else "empty"
    console.print(f"cache {cache['directory']}: {state}", highlight=False, markup=False)
    if cache["corrupt"]:
        text = f"{cache['corrupt']} entries do not check: they count as absent and are written anew"
        console.print(text, style="yellow")
    if cache["problem"]:
        console.print(cache["problem"], style="red", markup=False)
    text = f"tuned classes: {times['classes']}"
    if times["stale"]:
        text += f", {times['stale']} of them on another device or driver and not used here (`tilewright tune` helps)"
    console.print(text, highlight=False)
