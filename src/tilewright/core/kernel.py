"""A kernel: one function of one backend that implements one op, and its declaration as data.

The declaration can be read without importing the backend's language: the function is named, not held, and loaded when
the kernel is about to be used. Its version is the digest of the source it lives in and of the helpers it imports.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tilewright.core.call import Call
from tilewright.core.capability import Capability
from tilewright.core.launch import Config

Configs = Sequence[Config] | Callable[[Call], Sequence[Config]]


@dataclass(frozen=True)
class Kernel:
    """`source` is "module:function". `configs` lists ways to run it, best guess first, or works them out from a call.

    A kernel of a launching backend is called as `function(call, config)` and returns one `Launch` or several; one of a
    backend of functions (vendor) is called with the op's own arguments and returns outputs, then saved statistics
    when `saving=True` is passed.
    """

    op: str
    backend: str
    source: str
    capability: Capability = Capability()
    configs: Configs = (Config(),)
    files: tuple[str, ...] = ()
    """Other files that belong to its source, beside the module: `*.cu`, and modules that it does not import itself."""
    label: str = ""
    origin: str = "tilewright"
    preference: int | None = None
    """Order among kernels without a measurement: lower first. None: the backend's own place."""

    def load(self) -> Callable[..., Any]:
        """The function itself; imports its module."""
        module, name = self.source.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def configs_for(self, call: Call) -> tuple[Config, ...]:
        return tuple(self.configs(call) if callable(self.configs) else self.configs)

    @cached_property
    def digest(self) -> str:
        """Digest of the module's source, of `files`, and of what these import from their own package's families."""
        text = hashlib.sha256(self.source.encode())
        for path in self.sources():
            text.update(path.read_bytes())
        return text.hexdigest()[:16]

    def sources(self) -> tuple[Path, ...]:
        """The files that the digest is of."""
        module = self.source.split(":")[0]
        found, place = list(_sources(module)), _path(module)
        if place is not None:
            package = module.rpartition(".")[0]
            found += [place.parent / name for name in self.files]
            for name in self.files:
                if name.endswith(".py"):
                    found += [p for p in _sources(f"{package}.{name[:-3]}") if p not in found]
        return tuple(found)

    @property
    def name(self) -> str:
        return f"{self.op}/{self.backend}" + (f"/{self.label}" if self.label else "")

    @property
    def pin(self) -> str:
        """What `backend=` calls it: its backend, and the label if it has one. The backend alone calls all of its."""
        return self.name.partition("/")[2]

    def answers(self, wanted: str | None) -> bool:
        """Whether a pin or preference speaks of it."""
        return wanted in (self.backend, self.pin)

    def __str__(self) -> str:
        return self.name


@cache
def _path(module: str) -> Path | None:
    """The file of a module, found without importing anything: a kernel's language may not be loaded to know it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    if not rest:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)


@cache
def _sources(module: str) -> tuple[Path, ...]:
    """The module's file and, transitively, the files of its own that it imports."""
    seen: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if path is None or name in seen:
            continue
        seen[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for found in _imported(node, package):
                other = _path(found) if found.partition(".")[0] == module.partition(".")[0] else None
                if other is not None and other.name != "__init__.py" and _own(other, module, path):
                    waiting.append(found)
    return tuple(path for _, path in sorted(seen.items()))


def _own(other: Path, module: str, path: Path) -> bool:
    """Whether what a kernel imports is part of its source: of this library the helpers of its family, of others and of
    all, since core and backends do not change what a kernel computes; of another package all of it."""
    if module.partition(".")[0] != "tilewright":
        return True
    families = _path("tilewright.ops")
    return other.parent == path.parent or (families is not None and families.parent in other.parents)


def _imported(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []
