"""The documentation builds without a warning, its tables are those of the raw results, and its examples are Python."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _results_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "scripts" / "results_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "api" / "index.html").is_file()


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
