"""The guide for authors of tile kernels: its outputs and pictures are those of a run, its first kernel is short, and
its kernel for the library is declared by one line and proven. That its blocks run is tested with the other pages."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.launch import launches_of
from tilewright.ops.tile_configs import tile_kernel
from tilewright.tile.runtime import nvrtc, target
from tilewright.tune.classes import call_of
from tilewright.verify.suite import verify_kernel

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tile-guide.md"
TEXT = PAGE.read_text("utf-8")
needs_compilers = pytest.mark.skipif(bool(target.missing() or nvrtc.missing()), reason="a compiler is not here")


def _block(mark: str) -> str:
    """The Python under a mark."""
    (found,) = re.findall(rf"<!-- {mark} -->\n(?:<!-- excerpt -->\n)?```python\n(.*?)```", TEXT, re.DOTALL)
    return str(found)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_output", ROOT / "scripts" / "page_output.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(text: str) -> str:
    """But for registers, which another release of the compiler counts differently."""
    return re.sub(r"\d+ a thread, \d+ bytes spilled, \d+ of stack", "", text)


@needs_compilers
def test_outputs_and_pictures_are_those_of_a_run() -> None:
    made = _script().made(PAGE)
    assert len(made) == 2
    for path, text in made.items():
        assert _plain(path.read_text("utf-8")) == _plain(text), f"run scripts/page_output.py {PAGE.name} --write"


def test_a_block_that_prints_has_a_place_for_it() -> None:
    script = _script()
    page = "```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```\nold\n```\n"
    assert script.outputs(page) == page.replace("old", "2")
    assert script.outputs(page.replace("print(1 + 1)", "1 + 1")) == page.replace("print(1 + 1)", "1 + 1").replace(
        "old", ""
    )
    with pytest.raises(SystemExit, match="no place for it"):
        script.outputs("```python\nprint(1)\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        script.outputs("<!-- file: a.py -->\n```python\n\n1 / 0\n```\n")
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == ("a.py", 1)


def test_the_first_kernel_is_short() -> None:
    code = [
        line
        for line in _block(r"file: norm\.py").splitlines()
        if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(code) < 15 and code[0].startswith("@tile.kernel")


@needs_compilers
def test_the_kernel_for_the_library_is_declared_by_one_line_and_proven(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_rows.py").write_text(_block(r"file: my_rows\.py"), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    line = _block("declaration")
    assert line.count("\n") == 1
    exec(line, {"registry": registry, "tile_kernel": tile_kernel})
    (mine,) = [k for k in registry.kernels_of("l2_norm") if k.label == "mine"]
    try:
        found = verify_kernel(registry.op("l2_norm"), mine, torch.bfloat16, torch.device("cpu"), size="tiny")
        assert found.passed > 10 and not found.failed, found
        assert "tile/mine" in str(tw.explain(tw.l2_norm, torch.ones(4, 64)))
        there = call_of(
            registry.op("l2_norm"), (64, 1024), torch.bfloat16, target_device("sm_90"), options={}, absent=[]
        )
        config = mine.configs_for(there)[0]
        (launch,) = launches_of(mine.load()(there, config))
        made = registry.backend("tile").compile(launch, there.device)
        assert "l2_norm" in made.symbol and made.block[0] == config["threads"]
    finally:
        registry.remove_kernel(mine)
        sys.modules.pop("my_rows", None)
