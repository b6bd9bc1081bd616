"""The script that times the tile compiler on a CPU: memory costs no form more than another, whatever ran before, and a
low ratio is measured again."""

from __future__ import annotations

import importlib.util
import mmap
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "tile_cpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tile_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def busy(seconds: float) -> Callable[[], None]:
    def run() -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    return run


@pytest.mark.parametrize(("rival", "again"), [(0.008, False), (0.0005, True)])
def test_a_ratio_below_one_is_measured_again_for_longer(
    script: ModuleType, rival: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    compared = script.compared

    def watched(runs: Any, seconds: float) -> Any:
        asked.append(seconds)
        return compared(runs, seconds)

    monkeypatch.setattr(script, "compared", watched)
    runs = [busy(0.002), busy(0.002), *(busy(rival) for _ in range(3))]
    found = script.settled(runs, 0.05)
    assert ("first" in found) == again
    assert (found["given"] < 1) == again and found["tile_us"] >= 2000
    assert asked == [0.05, 0.05 * script.LONGER][: 1 + again]
    if again:
        assert set(found["first"]) == {"given", "fresh", "eager", "faults"}


def test_so_is_one_whose_memory_was_new(script: ModuleType) -> None:
    def new() -> None:
        with mmap.mmap(-1, 1 << 20) as memory:
            memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)

    found = script.settled([lambda: None, lambda: None, *[new] * 3], 0.01)
    assert found["first"]["given"] > 1 and found["first"]["faults"] >= script.FEW


def test_no_form_is_charged_for_what_another_left(script: ModuleType) -> None:
    ran: list[str] = []

    def form(name: str) -> Callable[[], None]:
        def run() -> None:
            busy(0.0002 if ran[-3:] == [name] * 3 else 0.004)()  # three places in rotation, each as others left it
            ran.append(name)

        return run

    times, _ = script.lower_quartiles([form("tile"), form("rival")], 0.02)
    assert max(times) < 2000


FAULTS = """
import runpy, sys, torch
script = runpy.run_path(sys.argv[1])
if sys.argv[2] == "kept":
    script["keep_freed_memory"]()
def call():
    torch.empty(1 << 26, dtype=torch.uint8).fill_(1)  # larger than any block that glibc keeps by itself
print(script["lower_quartiles"]([call, lambda: None], 0.01)[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_new_memory_is_kept_and_told_from_old() -> None:
    faults = [
        float(subprocess.run([sys.executable, "-c", FAULTS, SCRIPT, how], capture_output=True, check=True).stdout)
        for how in ("kept", "left")
    ]
    assert faults[0] < 10 < faults[1]
