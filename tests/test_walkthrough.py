"""CONTRIBUTING's two walks, done as their reader would: its files, its commands, its snippet, word for word.

The kernel's walk is a stranger's, with a package beside Tilewright; the op's is a contributor's, in the source tree.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KERNEL = "l2_norm/triton/toy"
OPS = ("squared_relu", "squared_relu_backward")
APART = [
    f"--ignore=tests/{name}.py" for name in ("test_docs", "test_packaging", "test_walkthrough", "tile/test_tile_guide")
]
"""What is not of a source tree alone."""
PYTEST = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider")


class Walk:
    """What one walk of the document tells its reader to write and to run."""

    def __init__(self, name: str) -> None:
        self.text = TEXT[TEXT.index(f"<!-- {name} -->") : TEXT.index(f"<!-- /{name} -->")]
        self.files = dict(self._blocks(r"file: (\S+)"))
        self.imports = dict(self._blocks(r"import: (\S+)"))
        (block,) = re.findall(r"<!-- run -->\n```bash\n(.*?)```", self.text, re.DOTALL)
        lines = [shlex.split(line, comments=True) for line in block.splitlines()]
        self.commands = {words[1]: words[1:] for words in lines if words[0] == "tilewright"}

    def _blocks(self, mark: str) -> list[Any]:
        return re.findall(rf"<!-- {mark} -->\n```\w+\n(.*?)```", self.text, re.DOTALL)

    def write(self, folder: Path, **changes: str) -> None:
        for name, text in self.files.items():
            for old, new in changes.items():
                text = text.replace(old, new)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def snippet(self) -> str:
        (found,) = re.findall(r"<!-- python -->\n```python\n(.*?)```", self.text, re.DOTALL)
        assert isinstance(found, str)
        return found


KERNEL_WALK, OP_WALK = Walk("kernel-walk"), Walk("op-walk")


class Reader:
    """Someone at a shell, with a path and a cache of their own."""

    def __init__(self, walk: Walk, home: Path, device: str, *paths: Path) -> None:
        self.walk, self.device, self.home = walk, device, home
        path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        self.env |= {"TILEWRIGHT_CACHE_DIR": str(home / "cache"), "TRITON_INTERPRET": "1"}
        if device == "cuda":
            del self.env["TRITON_INTERPRET"]

    def __call__(self, command: str, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "tilewright", *self.walk.commands[command], *more, expect=expect)

    def python(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *words],
            env=self.env, cwd=self.home, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done


def a_stranger(home: Path, device: str, **changes: str) -> Reader:
    """Has the document's package installed, beside Tilewright and nowhere else."""
    project, site = home / "toy", home / "site"
    KERNEL_WALK.write(project, **changes)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--no-build-isolation", "--no-index", "--target", str(site), str(project)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return Reader(KERNEL_WALK, home, device, site, ROOT / "src")


def a_contributor(home: Path, device: str, **changes: str) -> Reader:
    """Has written the document's files into a source tree of their own."""
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    OP_WALK.write(home, **changes)
    for name, block in OP_WALK.imports.items():
        path, (_, line) = home / name, block.splitlines(keepends=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        behind = (n for n, other in enumerate(lines) if other.startswith("    from tilewright.ops.") and other > line)
        lines.insert(next(behind), line)
        path.write_text("".join(lines), encoding="utf-8")
        families = path.parent / "ops" / "__init__.py"
        family = re.search(r"tilewright\.ops\.(\w+)", line)[1]
        text = families.read_text(encoding="utf-8")
        families.write_text(text.replace("FAMILIES = (", f'FAMILIES = ("{family}", '), encoding="utf-8")
    return Reader(OP_WALK, home, device, home / "src")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, device: str) -> Reader:
    pytest.importorskip("hatchling", reason="needs the extra `dev`")
    return a_stranger(tmp_path_factory.mktemp("stranger"), device)


@pytest.fixture(scope="module")
def contributor(tmp_path_factory: pytest.TempPathFactory, device: str) -> Reader:
    return a_contributor(tmp_path_factory.mktemp("contributor"), device)


def results_of(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["kernel"], r["dtype"]): r for r in json.loads(done.stdout)["results"]}


def test_the_document_has_what_the_walks_need() -> None:
    assert set(KERNEL_WALK.files) == {"pyproject.toml", "toy_kernels/__init__.py", "toy_kernels/rows.py"}
    assert {Path(name).name for name in OP_WALK.files} == {"squared_relu.py", "triton.py", "__init__.py"}
    assert set(OP_WALK.imports) == {"src/tilewright/__init__.py"}
    for walk in (KERNEL_WALK, OP_WALK):
        assert list(walk.commands) == ["ops", "verify", "bench", "explain"]


# A kernel, in a package of its own ----------------------------------------------------------------------------------


def test_it_is_listed_and_available(stranger: Reader) -> None:
    found = json.loads(stranger("ops", "--json").stdout)
    kernels = {kernel["kernel"]: kernel for op in found for kernel in op["kernels"]}
    assert kernels[KERNEL]["available"], kernels[KERNEL]["reasons"]
    assert kernels[KERNEL]["backend"] == "triton"
    assert kernels[KERNEL]["version"] != kernels["l2_norm/triton"]["version"], "its version is its own source's"


def test_it_is_verified(stranger: Reader) -> None:
    mine = {dtype: r for (kernel, dtype), r in results_of(stranger("verify", "--json")).items() if kernel == KERNEL}
    assert set(mine) == {"float32", "float16", "bfloat16"}
    for r in mine.values():
        assert r["failed"] == 0 and r["passed"] >= 20, r
        assert any("merge into 2 levels" in case["reason"] for case in r["not_run"]), "its own limit speaks"


def test_it_appears_in_bench(stranger: Reader) -> None:
    done = stranger("bench")
    if stranger.device == "cuda":
        assert "triton/toy" in done.stdout
    else:
        assert re.search(rf"{KERNEL}.*interpreted here; not timed", done.stderr)


def test_it_is_explained(stranger: Reader) -> None:
    line = next(text for text in stranger("explain").stdout.splitlines() if "triton/toy" in text)
    if stranger.device == "cpu":
        assert "runs by interpretation here" in line


def test_a_wrong_one_is_caught(tmp_path: Path, device: str) -> None:
    """The mistake that the document proposes: one line changed."""
    pytest.importorskip("hatchling", reason="needs the extra `dev`")
    right = "tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.sum(values * values) + eps))"
    broken = "tl.math.div_rn(1.0, tl.sum(values * values) + eps)"
    assert right in KERNEL_WALK.files["toy_kernels/rows.py"] and broken in KERNEL_WALK.text
    clumsy = a_stranger(tmp_path, device, **{right: broken})
    results = results_of(clumsy("verify", "--dtype", "float32", "--json", expect=1))
    assert results[KERNEL, "float32"]["failed"] > 0
    assert results["l2_norm/triton", "float32"]["failed"] == 0
    failure = results[KERNEL, "float32"]["failures"][0]
    assert failure["problem"]
    assert len(Path(failure["script"]).read_text(encoding="utf-8").splitlines()) <= 20


# An op, in the source tree ------------------------------------------------------------------------------------------


def test_the_op_is_listed_with_its_gradient_and_kernels(contributor: Reader) -> None:
    found = {op["op"]: op for op in json.loads(contributor("ops", "--json").stdout)}
    forward, backward = (found[name] for name in OPS)
    assert (forward["family"], forward["gradient"], backward["gradient"]) == ("feedforward", OPS[1], None)
    assert {k["backend"]: k["available"] for k in forward["kernels"]}["triton"]
    assert [k["backend"] for k in backward["kernels"]] == ["reference", "inductor"], "served before it has a kernel"


def test_the_definitions_and_the_kernel_are_verified(contributor: Reader) -> None:
    results = results_of(contributor("verify", "--json"))
    kernels = (f"{OPS[0]}/reference", f"{OPS[0]}/triton", f"{OPS[1]}/reference")
    assert {kernel for kernel, _ in results} == set(kernels)
    assert len(results) == 3 * len(kernels), "in each dtype"
    for r in results.values():
        assert r["failed"] == 0 and r["passed"] >= 20, r


def test_a_kernel_that_loses_nan_is_caught(tmp_path: Path, device: str) -> None:
    """The mistake that the document proposes, which no ordinary input shows."""
    right, broken = "tl.where(value < 0.0, 0.0, value)", "tl.where(value > 0.0, value, 0.0)"
    assert right in OP_WALK.files["src/tilewright/ops/feedforward/triton.py"] and broken in OP_WALK.text
    clumsy = a_contributor(tmp_path, device, **{right: broken})
    results = results_of(clumsy("verify", "--dtype", "float32", "--json", expect=1))
    red = results[f"{OPS[0]}/triton", "float32"]
    assert 0 < red["failed"] < 5 and red["passed"] >= 20
    assert all(" nan" in failure["case"] for failure in red["failures"]), red["failures"]
    assert results[f"{OPS[0]}/reference", "float32"]["failed"] == 0


def test_a_definition_that_breaks_its_output_rule_is_caught(tmp_path: Path, device: str) -> None:
    clumsy = a_contributor(tmp_path, device, **{".square()).to(x.dtype)": ".square())"})
    results = results_of(clumsy("verify", "--dtype", "bfloat16", "--json", expect=1))
    red = results[f"{OPS[0]}/reference", "bfloat16"]
    assert red["passed"] == 0 and "the output rule says torch.bfloat16" in red["failures"][0]["problem"]


def test_both_passes_appear_in_bench(contributor: Reader) -> None:
    done = contributor("bench", "--json")
    rows = json.loads(done.stdout)["results"]
    assert {(r["op"], r["pass"]) for r in rows} >= {(OPS[0], "forward"), (OPS[0], "backward")}
    assert all(r["kernel_us"] > 0 and r["bytes"] > 0 for r in rows), rows
    if contributor.device == "cpu":
        assert f"{OPS[0]}/triton: interpreted here; not timed" in done.stderr


def test_the_op_is_explained(contributor: Reader) -> None:
    found = json.loads(contributor("explain", "--json").stdout)
    assert found["op"] == OPS[0] and "saving" in found["call_class"]
    assert {c["backend"] for c in found["candidates"]} == {"reference", "inductor", "triton"}
    if contributor.device == "cpu":
        assert found["chosen"] == f"{OPS[0]}/reference"


def test_the_snippet_runs_and_the_gradient_is_one(contributor: Reader, tmp_path: Path, device: str) -> None:
    assert "chosen:" in contributor.python("-c", OP_WALK.snippet()).stdout
    wrong = a_contributor(tmp_path, device, **{"2.0 * scale * torch.relu": "3.0 * scale * torch.relu"})
    assert "GradcheckError" in wrong.python("-c", OP_WALK.snippet(), expect=1).stderr


def test_the_files_keep_the_rules_of_the_house(contributor: Reader) -> None:
    pytest.importorskip("ruff", reason="needs the extra `dev`")
    home = contributor.home
    shutil.copy(ROOT / "pyproject.toml", home)
    shutil.copytree(ROOT / "tests", home / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    contributor.python("-m", "ruff", "check", "--no-cache", *OP_WALK.files, *OP_WALK.imports)
    contributor.python("-m", "ruff", "format", "--no-cache", "--check", *OP_WALK.files)
    contributor.python(*PYTEST, "tests/test_layers.py")
    every = contributor.python(*PYTEST, "-m", "not slow", "-k", OPS[0], *APART, "tests").stdout
    assert int(re.findall(r"(\d+) passed", every)[-1]) > 30, "torch.compile, export, opcheck, gradients, bad input"
    contributor.python(*PYTEST, "-k", "feedforward", "tests/test_house.py")
