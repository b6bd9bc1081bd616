"""Packages of strangers: found by their entry points, whole or not at all, and without harm between threads."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PLUGIN = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch, tilewright as tw
    from tilewright.core import registry
    x = torch.randn(3, 61)
    print(tw.explain(tw.l2_norm, x))
    print([f.name + ': ' + f.error for f in registry.load_failures])
    try:
        tw.l2_norm(x, backend="cuda")
    except tw.NoKernel as error:
        print(error)
    with tw.use(check="never"):
        print(tw.l2_norm(x).shape)
"""


def test_plug_ins_load_and_a_failing_one_is_kept_and_shown(tmp_path: Path) -> None:
    """Three packages of strangers: one good, one that raises, one that names a backend that does not exist."""
    site = tmp_path / "site"
    for name, body in {
        "good": "from tilewright.core.kernel import Kernel\n"
        "KERNELS = [Kernel('l2_norm', 'vendor', 'test_selection:quick', label='stranger', preference=-5)]\n",
        "bad": "raise OSError('libfancy.so is not here')\n",
        "odd": "from tilewright.core.kernel import Kernel\n"
        "KERNELS = [Kernel('l2_norm', 'vendor', 'test_selection:quick', label='half'),"
        " Kernel('l2_norm', 'abacus', 'x:y')]\n",
    }.items():
        (site / f"plug_{name}.dist-info").mkdir(parents=True)
        (site / f"plug_{name}.py").write_text(body)
        (site / f"plug_{name}.dist-info" / "METADATA").write_text(f"Name: plug-{name}\nVersion: 1\n")
        entry = f"[tilewright.kernels]\n{name} = plug_{name}:KERNELS\n"
        (site / f"plug_{name}.dist-info" / "entry_points.txt").write_text(entry)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n" + textwrap.dedent(PLUGIN).format(
        tests=str(Path(__file__).parent)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table, rest = done.stdout.split("[", 1)[0], done.stdout
    assert "stranger" in rest and "half" not in rest, "a plug-in is added whole or not at all"
    assert rest.count("OSError: libfancy.so is not here") == 3, "note of the table, the list, the error"
    assert "unknown backend 'abacus'" in rest and "torch.Size([3, 61])" in rest
    assert table
    assert importlib.metadata.version("torch")


SLOW_PLUGIN = """
import time
from torch import Tensor
from tilewright.core.op import like, op
from tilewright.core.probes import Probes
time.sleep(0.5)
@op(family="test", out={"y": like("x")}, check=lambda call: None, cost=lambda call: (0, 0),
    error_scale=lambda t, o: {}, probes=Probes(dims={"x": "M C"}))
def strange(x: Tensor, *, eps: float = 1.0) -> Tensor:
    return x * eps
KERNELS = []
"""
TWO_THREADS = """
    import faulthandler, sys, threading, time
    faulthandler.dump_traceback_later(60, exit=True)
    import tilewright
    from tilewright.core import registry
    first = registry.ops if sys.argv[1] == "asked" else lambda: __import__("plug_slow")
    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.2)
    print(registry.op("strange"), registry.load_failures)
    thread.join()
"""


@pytest.mark.parametrize("other", ["asked", "imported"])
def test_threads_wait_for_plug_ins_and_never_for_each_other(other: str, tmp_path: Path) -> None:
    """One asks for an op while another is loading the plug-in that declares it, or is importing that by hand."""
    (tmp_path / "plug_slow.dist-info").mkdir()
    (tmp_path / "plug_slow.py").write_text(SLOW_PLUGIN)
    (tmp_path / "plug_slow.dist-info" / "METADATA").write_text("Name: plug-slow\nVersion: 1\n")
    (tmp_path / "plug_slow.dist-info" / "entry_points.txt").write_text("[tilewright.kernels]\ns = plug_slow:KERNELS\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(TWO_THREADS)
    done = subprocess.run([sys.executable, "-c", code, other], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "<op strange> []\n"
