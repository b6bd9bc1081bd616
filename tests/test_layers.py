"""Imports run downward. Read from the source alone, so a lazy or type-only import upward is caught as well."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "tilewright"

# A package may import those of a lower number, and its own. Whoever adds a package gives it a place here.
# `tilewright/__init__.py` is the public face: only what stands above it may import it.
FACE = ""
LAYERS = {
    "core": 0,
    "backends": 1,
    "ops": 2,
    "verify": 3,
    "bench": 3,
    "tune": 3,
    "build": 3,
    "capture": 4,
    "models": 5,
    FACE: 6,
    "cli": 7,
    "__main__": 8,
    "worker": 8,
}
ENGINES = {"verify", "bench", "tune", "build"}
# The tile compiler is a library of its own; only those that use it to make kernels know it.
TILE_USERS = {"tile", "backends", "ops"}
# Third-party modules that may be imported anywhere without asking whether they are there.
HARD = {
    "core": {"torch", "filelock", "platformdirs"},
    "cli": {"torch", "typer", "rich", "filelock", "platformdirs", "click"},
}


@dataclass(frozen=True)
class Import:
    """One imported module, as `path:line` names it."""

    where: str
    package: str
    module: str
    top_level: bool


def _package(module: str) -> str:
    """`tilewright.ops.norm.triton` -> `ops`; `tilewright` -> FACE."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def _module_name(path: Path) -> str:
    parts = ("tilewright", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _exists(module: str) -> bool:
    path = SRC.joinpath(*module.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _imports(path: Path) -> Iterator[Import]:
    name = _module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top_level = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            # `from tilewright.core import op` names a module, `from tilewright.core.op import Op` a thing in one
            found = [f"{base}.{alias.name}" if _exists(f"{base}.{alias.name}") else base for alias in node.names]
        else:
            continue
        where = f"{path.relative_to(SRC.parent)}:{node.lineno}"
        for module in found:
            yield Import(where, _package(name), module, id(node) in top_level)


ALL = [found for path in sorted(SRC.rglob("*.py")) for found in _imports(path)]
OURS = [i for i in ALL if i.module.split(".")[0] == "tilewright"]


def test_every_package_has_a_layer() -> None:
    packages = {_package(_module_name(path)) for path in SRC.rglob("*.py")}
    assert packages <= LAYERS.keys() | {"tile"}, "give the new package its place in LAYERS"


def test_imports_run_downward() -> None:
    wrong = []
    for found in OURS:
        target = _package(found.module)
        if found.package == target or "tile" in (found.package, target):
            continue
        if LAYERS[target] > LAYERS[found.package]:
            wrong.append(f"{found.where}: {found.package or 'the package'} imports {found.module}")
    assert not wrong, "\n".join(wrong)


def test_packages_of_one_layer_do_not_depend_on_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for found in OURS:
        target = _package(found.module)
        if target != found.package and LAYERS.get(target) == LAYERS.get(found.package):
            edges.setdefault(found.package, set()).add(target)
    for start in edges:
        seen: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            here = waiting.pop()
            assert here != start, f"{start} depends on itself through {sorted(seen)}"
            if here not in seen:
                seen.add(here)
                waiting.extend(edges.get(here, ()))


def test_tile_is_independent() -> None:
    out = [i for i in OURS if i.package == "tile" and _package(i.module) != "tile"]
    into = [i for i in OURS if _package(i.module) == "tile" and i.package not in TILE_USERS]
    assert not out + into


def test_the_face_does_not_import_the_command_line() -> None:
    assert not [i for i in OURS if i.package == FACE and _package(i.module) in {"cli", "worker", "__main__"}]


def test_only_the_right_third_parties() -> None:
    wrong = []
    for found in ALL:
        root = found.module.split(".")[0]
        if root in sys.stdlib_module_names or root == "tilewright" or found.package not in HARD:
            continue
        if found.top_level and root not in HARD[found.package]:
            wrong.append(f"{found.where}: {root}")
    assert not wrong, "\n".join(wrong)


def _declared_ops() -> set[str]:
    """Functions under an `@op(...)` decorator."""
    names = set()
    for path in (SRC / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                calls = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
                if any(isinstance(c, ast.Name) and c.id == "op" for c in calls):
                    names.add(node.name)
    return names


@pytest.mark.parametrize("package", sorted(ENGINES | {"core", "backends"}))
def test_engines_know_no_op_by_name(package: str) -> None:
    """They read the registry, so that a new op needs no change in them."""
    ops = _declared_ops()
    ops |= {"_" + name.rpartition("_")[2] for name in ops}  # nor by how names end: what is a gradient is declared
    wrong = [
        f"{i.where}: {i.module}"
        for i in OURS
        if i.package == package and len(i.module.split(".")) > 2 and _package(i.module) == "ops"
    ]
    for path in (SRC / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            elif isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.Name):
                name = node.id
            # peers and torch may have functions of the same name: those are reached as attributes of theirs
            if name in ops and not (isinstance(node, ast.Attribute) and _root(node) in {"F", "torch", "aten"}):
                wrong.append(f"{path.relative_to(SRC.parent)}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
