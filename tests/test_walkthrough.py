"""CONTRIBUTING's "Add a kernel in ten minutes", done as a stranger would: its files, its commands, word for word."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WALK = TEXT[TEXT.index("<!-- kernel-walk -->") : TEXT.index("<!-- /kernel-walk -->")]
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", WALK, re.DOTALL))
KERNEL = "l2_norm/triton/toy"


def _commands() -> dict[str, list[str]]:
    """The words of each command of the document, by subcommand."""
    block = re.search(r"<!-- run -->\n```bash\n(.*?)```", WALK, re.DOTALL)
    assert block is not None
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    return {words[1]: words[1:] for words in lines if words[0] == "tilewright"}


COMMANDS = _commands()


class Stranger:
    """Someone with the package installed, beside Tilewright and nowhere else."""

    def __init__(self, home: Path, device: str, **changes: str) -> None:
        self.device = device
        project, site = home / "toy", home / "site"
        for name, text in FILES.items():
            for old, new in changes.items():
                text = text.replace(old, new)
            path = project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--no-build-isolation", "--no-index", "--target", str(site), str(project)],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        paths = [str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "COLUMNS": "200"}
        self.env |= {"TILEWRIGHT_CACHE_DIR": str(home / "cache"), "TRITON_INTERPRET": "1"}
        if device == "cuda":
            del self.env["TRITON_INTERPRET"]

    def __call__(self, command: str, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tilewright", *COMMANDS[command], *more],
            env=self.env, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, device: str) -> Stranger:
    pytest.importorskip("hatchling", reason="needs the extra `dev`")
    return Stranger(tmp_path_factory.mktemp("stranger"), device)


def test_the_document_has_what_the_walk_needs() -> None:
    assert set(FILES) == {"pyproject.toml", "toy_kernels/__init__.py", "toy_kernels/rows.py"}
    assert list(COMMANDS) == ["ops", "verify", "bench", "explain"]


def test_it_is_listed_and_available(stranger: Stranger) -> None:
    found = json.loads(stranger("ops", "--json").stdout)
    kernels = {kernel["kernel"]: kernel for op in found for kernel in op["kernels"]}
    assert kernels[KERNEL]["available"], kernels[KERNEL]["reasons"]
    assert kernels[KERNEL]["backend"] == "triton"
    assert kernels[KERNEL]["version"] != kernels["l2_norm/triton"]["version"], "its version is its own source's"


def test_it_is_verified(stranger: Stranger) -> None:
    results = json.loads(stranger("verify", "--json").stdout)["results"]
    mine = [r for r in results if r["kernel"] == KERNEL]
    assert {r["dtype"] for r in mine} == {"float32", "float16", "bfloat16"}
    for r in mine:
        assert r["failed"] == 0 and r["passed"] >= 20, r
        assert any("merge into 2 levels" in case["reason"] for case in r["not_run"]), "its own limit speaks"


def test_it_appears_in_bench(stranger: Stranger) -> None:
    done = stranger("bench")
    if stranger.device == "cuda":
        assert "triton/toy" in done.stdout
    else:
        assert re.search(rf"{KERNEL}.*interpreted here; not timed", done.stderr)


def test_it_is_explained(stranger: Stranger) -> None:
    line = next(text for text in stranger("explain").stdout.splitlines() if "triton/toy" in text)
    if stranger.device == "cpu":
        assert "runs by interpretation here" in line


def test_a_wrong_one_is_caught(tmp_path: Path, device: str) -> None:
    """The mistake that the document proposes: one line changed."""
    pytest.importorskip("hatchling", reason="needs the extra `dev`")
    right = "tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.sum(values * values) + eps))"
    broken = "tl.math.div_rn(1.0, tl.sum(values * values) + eps)"
    assert right in FILES["toy_kernels/rows.py"] and broken in WALK
    clumsy = Stranger(tmp_path, device, **{right: broken})
    done = clumsy("verify", "--dtype", "float32", "--json", expect=1)
    results = {r["kernel"]: r for r in json.loads(done.stdout)["results"]}
    assert results[KERNEL]["failed"] > 0
    assert results["l2_norm/triton"]["failed"] == 0
    failure = results[KERNEL]["failures"][0]
    assert failure["problem"]
    assert len(Path(failure["script"]).read_text(encoding="utf-8").splitlines()) <= 20
