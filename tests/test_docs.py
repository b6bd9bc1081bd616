"""The documentation builds without a warning, its tables are those of the raw results, its examples run, and its
commands are ones that there are.

A Python block is run unless `<!-- excerpt -->` stands above it; the blocks of a page share their names, as in a
session. CONTRIBUTING's are run by `test_walkthrough.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import tilewright  # noqa: F401  declares the ops
from tilewright import cli
from tilewright.core import registry
from tilewright.core.device import device_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _results_table() -> ModuleType:
    return _script("results_table")


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "api" / "index.html").is_file()
    assert (tmp_path / "ops" / "rms_norm" / "index.html").is_file()


def test_tables_are_in_step() -> None:
    table = _results_table()
    stale = [p.name for p, text in table.targets(table.read(table.RESULTS)).items() if p.read_text("utf-8") != text]
    assert not stale, f"run `make table`: {stale}"


def _measured(**changes: Any) -> dict[str, Any]:
    return {
        "op": "rms_norm", "pass": "forward", "workload": "w", "shape": [8192, 4096], "dtype": "bfloat16",
        "backend": "triton", "config": "rows=4", "cache": "cold", "bytes": 1, "kernel_us": 40.0, "iqr_us": 0.2,
        "call_us": 50.0, "sol": 1.0, "verified": True, "peer": "quack", "peer_us": 44.0, "ratio_ci": [1.08, 1.12],
    } | changes  # fmt: skip


def _write(folder: Path, name: str, results: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {"device": "GPU", "software": {"torch": "2"}, "copy_tb_s": 3.0, "matmul_tflops": 700.0, "results": results}
    (folder / name).write_text(json.dumps(data), encoding="utf-8")


def test_the_fastest_proven_kernel_is_shown(tmp_path: Path) -> None:
    table = _results_table()
    _write(tmp_path / "gpu", "a.json", [
        _measured(), _measured(backend="cuda", kernel_us=39.0, verified=False),
        _measured(backend="vendor", kernel_us=60.0),
    ])  # fmt: skip
    rows = table.read(tmp_path)
    short, long = table.table(rows, every_backend=False), table.table(rows, every_backend=True)
    assert "40.0 ± 0.2" in short and "vendor" not in short
    assert "vendor" in long
    assert "39.0" not in short + long, "a kernel without proof gets no time"


def test_a_later_file_replaces_an_earlier_one_and_other_records_are_left_out(tmp_path: Path) -> None:
    table = _results_table()
    _write(tmp_path / "gpu", "a.json", [_measured()])
    _write(tmp_path / "gpu", "b.json", [_measured(kernel_us=41.5)])
    (tmp_path / "gpu" / "c.json").write_text('{"registers": 40}', encoding="utf-8")
    assert [row.facts["kernel_us"] for row in table.read(tmp_path)] == [41.5]


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "gpu", "bad.json", [{"op": "rms_norm"}])
    with pytest.raises(SystemExit, match=r"bad\.json"):
        _results_table().read(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_parse(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


def _session(page: Path) -> str:
    """The page's Python, but for its excerpts."""
    found = re.findall(r"(<!-- excerpt -->\n)?```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(block for excerpt, block in found if not excerpt)


def _run(code: str, cache: Path) -> str:
    """As a reader would, without the interpreter that these tests are run with."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TILEWRIGHT_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False, cwd=cache, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SESSIONS = [page for page in PAGES if page.parent.name == "docs" and _session(page)]


@pytest.mark.parametrize("page", SESSIONS, ids=lambda p: p.name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    _run(_session(page), tmp_path)


def test_pages_for_users_have_examples_that_run() -> None:
    assert {"getting-started.md", "ops.md", "explain.md", "kernels.md"} <= {page.name for page in SESSIONS}


def test_every_op_has_its_place_on_the_page_of_ops() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    for op in registry.ops():
        assert f"`{op.name}" in text, op
        if op.gradient is not None:
            assert f"| `{op.name}({', '.join(op.tensors)})` |" in text, "with its tensors, in order"
            assert f"tw.{op.name}(" in text, "with an example"
        if op.into and op.in_place in registry.forms():
            assert f"| `{op.name}_` | {op.in_place.written()} |" in text


def test_every_op_has_a_page_of_its_own_made_from_what_is_known_of_it() -> None:
    pages = _script("op_pages").pages()
    for op in registry.ops():
        if registry.served_by(op.name):
            continue
        text = pages[f"ops/{op.name}.md"]
        assert all(f"| `{name}` |" in text for name in (*op.tensors, *op.options)), op
        for kernel in registry.kernels_of(op.name):
            assert f"| {kernel.name.removeprefix(op.name + '/')} |" in text, kernel
        commands = re.findall(r"^tilewright .*?(?=  #)", text, re.MULTILINE)
        assert (f"`tw.{op.name}_` takes the same arguments" in text) is bool(op.into)
        assert len(commands) == 4
        for words in map(shlex.split, commands):
            get_command(cli.app).commands[words[1]].make_context(words[1], words[2:])
    assert "µs" in pages["ops/rms_norm.md"] and "on sm_90" in pages["ops/rms_norm.md"]


def test_the_table_that_explain_is_read_from_is_its_own(tmp_path: Path) -> None:
    """Line by line, but for the name of the processor."""
    missing = [name for name in registry.backend_names() if registry.backend(name).missing() is not None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot run here, and the table would say so")
    text = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- output -->\n```\n(.*?)```", text, re.DOTALL)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None and code is not None
    here = device_of("cpu")
    printed = _run(code[1], tmp_path).replace(str(here), "AMD EPYC (x86_64)")
    assert printed.replace(f"device: {here.arch} ", "device: x86_64 ") == block[1]


COMMANDS = [
    pytest.param(words, page.name != "CONTRIBUTING.md", id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if (words := shlex.split(line.partition(" > ")[0].removeprefix(".venv/bin/"), comments=True))[:1] == ["tilewright"]
]


@pytest.mark.parametrize(("words", "ops_exist"), COMMANDS)
def test_commands_are_ones_that_there_are(words: list[str], ops_exist: bool) -> None:
    """Parsed as the command line would, options and all; not run."""
    context = get_command(cli.app).commands[words[1]].make_context(words[1], words[2:])
    named = [context.params.get("op"), *(context.params.get("ops") or ())]
    if ops_exist:
        assert set(filter(None, named)) <= {op.name for op in (*registry.ops(), *registry.forms())}


def test_readme_example_runs() -> None:
    """As a reader would run it, in a process of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## In your code\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    done = subprocess.run(
        [sys.executable, "-c", block[1]], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "rms_norm" in done.stdout
