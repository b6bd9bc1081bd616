"""Rules of the house that a machine can check: short files, a docstring each, nothing swallowed, no stray switches."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "tilewright"
FILES = sorted(SRC.rglob("*.py"))
LONGEST = 400
TILE_LINES = 8600
"""Of the tile compiler in all: it is to be read by one person."""
ENVIRONMENT = {"TILEWRIGHT_BACKEND", "TILEWRIGHT_CHECK", "TILEWRIGHT_CACHE_DIR"}


def _name(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{lines} lines; split it by what it is about"


def test_tile_compiler_keeps_its_size() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (SRC / "tile").rglob("*.py"))
    assert lines <= TILE_LINES, f"{lines} lines"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_module_says_what_lives_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        assert path.name == "__init__.py", "an empty module"
        return
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_is_swallowed(path: Path) -> None:
    """A bare or broad handler must do something with what it caught: re-raise it or name it."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type
        broad = caught is None or (isinstance(caught, ast.Name) and caught.id in {"Exception", "BaseException"})
        if not broad:
            continue
        inside = [n for statement in node.body for n in ast.walk(statement)]
        raised = any(isinstance(n, ast.Raise) for n in inside)
        named = node.name is not None and any(isinstance(n, ast.Name) and n.id == node.name for n in inside)
        assert raised or named, f"line {node.lineno}: a broad handler that forgets the exception"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_user_input_is_not_asserted_and_nothing_is_unpickled(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names), f"line {node.lineno}"


def test_environment_variables_are_few() -> None:
    found = {name for path in FILES for name in re.findall(r"TILEWRIGHT_[A-Z0-9_]+", path.read_text(encoding="utf-8"))}
    assert found <= ENVIRONMENT
