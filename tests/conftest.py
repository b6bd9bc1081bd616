"""What every test shares: the device, a cache of its own, and the process-wide switches that must come before imports.

Triton decides at its first import whether it interprets or compiles, for the whole process. So the switch is set here,
before any test module is imported; tests that compile start a process of their own without it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where kernels run by value")
    parser.addoption("--record", default="", help="folder for the full matrix's registers and spills, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported before the tests could choose its interpreter")
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)

    if not hasattr(config, "workerinput"):  # workers inherit the environment of the process that started them
        for name in ("TILEWRIGHT_BACKEND", "TILEWRIGHT_CHECK"):
            os.environ.pop(name, None)
        cache = tempfile.mkdtemp(prefix="tilewright-tests-")
        os.environ["TILEWRIGHT_CACHE_DIR"] = cache
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))

    import hypothesis
    import torch

    # Compilers make first examples slow; CI draws the same examples each time, a person's machine new ones.
    hypothesis.settings.register_profile("tilewright", deadline=None, derandomize=bool(os.environ.get("CI")))
    hypothesis.settings.load_profile("tilewright")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = config.getoption("--device")
    for item in items:
        if here == "cpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --device cuda"))
        if here == "cuda" and item.get_closest_marker("interpreted"):
            item.add_marker(
                pytest.mark.skip(reason="runs Triton kernels on CPU tensors, which --device cuda rules out")
            )


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """ "cpu" or "cuda", as `--device` says."""
    name: str = pytestconfig.getoption("--device")
    return name
