"""The script that compares random programs: it counts, goes on where it stopped, refuses another compiler's record, and
sees a fault."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilewright.tile.runtime import target

pytestmark = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")
SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "tile_random.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tile_random", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BATCH", 5)
    monkeypatch.setattr(module.os, "nice", lambda by: 0)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "set by the script, and set back here")
    return module


def go(script: ModuleType, monkeypatch: pytest.MonkeyPatch, record: Path, count: int) -> Any:
    words = f"tile_random.py --count {count} --first 7026 --json".split()
    monkeypatch.setattr(sys, "argv", [*words, str(record)])
    status = script.main()
    return status, json.loads(record.read_text("utf-8"))


def test_a_run_goes_on_with_its_record(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record, batch, seen = tmp_path / "record.json", script.batch, []

    def watched(first: int, optimised: bool) -> Any:
        seen.append(first)
        return batch(first, False)

    monkeypatch.setattr(script, "batch", watched)
    assert go(script, monkeypatch, record, 5)[1]["programs"] == 5
    status, found = go(script, monkeypatch, record, 15)
    assert seen == [7026, 7031, 7036] and found["programs"] == 15 and found["mismatches"] == [] and status == 0
    record.write_text(json.dumps({**found, "compiler": "another"}), "utf-8")
    with pytest.raises(SystemExit, match="of another run \\(compiler\\)"):
        go(script, monkeypatch, record, 20)


def test_a_fault_is_seen_and_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Barriers that are left out race; a wrong order of sums gives other bits."""
    monkeypatch.setattr(script.barriers, "insert", lambda function: function)
    monkeypatch.setattr(script, "lanes_of", lambda features: 2)  # no CPU's: compiled code adds in another order
    status, found = go(script, monkeypatch, tmp_path / "record.json", 10)
    assert status == 1
    told = {(m["run"].split()[-1], "Race" in m["differs"]) for m in found["mismatches"]}
    assert told == {("threads", True), ("compiled", False)}, found
