"""A kernel's digest: of its source and its own helpers, found without importing anything."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright  # noqa: F401  declares the ops
from tilewright.core import registry
from tilewright.core.errors import TilewrightError
from tilewright.core.kernel import Kernel, _path, _sources

SHOW = """
import sys
sys.path.insert(0, {path!r})
from tilewright.core.kernel import Kernel
print(Kernel("l2_norm", "triton", "strangers.kernels.rows:forward").digest, "strangers" in sys.modules)
"""


def digest_of(path):
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(path=str(path))], capture_output=True, text=True, check=True
    )
    digest, imported = done.stdout.split()
    assert imported == "False"
    return digest


def test_a_strangers_helpers_belong_to_it_wherever_they_lie(tmp_path):
    package = tmp_path / "strangers"
    (package / "kernels").mkdir(parents=True)
    (package / "deep").mkdir()
    for folder in (package, package / "kernels", package / "deep"):
        (folder / "__init__.py").write_text("")
    (package / "kernels" / "rows.py").write_text("from strangers.deep.helper import f\nfrom torch import nn\n")
    (package / "deep" / "helper.py").write_text("f = 1\n")
    (package / "deep" / "other.py").write_text("g = 1\n")
    before = digest_of(tmp_path)
    (package / "deep" / "other.py").write_text("g = 2\n")
    assert digest_of(tmp_path) == before
    (package / "deep" / "helper.py").write_text("f = 2\n")
    assert digest_of(tmp_path) != before


def test_digests_import_no_kernel_language():
    code = (
        "import sys, tilewright; from tilewright.core import registry\n"
        "[k.digest for op in registry.ops() for k in registry.kernels_of(op.name)]\n"
        "print(sorted({'triton', 'tilelang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_definition_is_the_source_of_inductor_and_reference():
    for op in registry.ops():
        for kernel in registry.kernels_of(op.name)[:2]:
            names = {path.name for path in _sources(kernel.source.split(":")[0])}
            assert kernel.backend in ("reference", "inductor")
            assert Path(inspect.getfile(op.reference)).name in names


def test_a_backward_kernel_counts_the_file_it_shares_with_forward():
    backward = next(k for k in registry.kernels_of("rms_norm_backward") if k.backend == "triton")
    assert {"triton_tiles.py", "triton_backward.py"} <= {p.name for p in _sources(backward.source.split(":")[0])}
    assert _path("no_such_module_at_all") is None
    assert Kernel("rms_norm", "triton", "no_such_module_at_all:f").digest


def test_two_kernels_of_one_name_are_refused():
    known = next(k for k in registry.kernels_of("rms_norm") if k.backend == "triton")
    with pytest.raises(TilewrightError, match="declared twice"):
        registry.add_kernels([Kernel("rms_norm", "triton", "somewhere:else")])
    labelled = Kernel("rms_norm", "triton", "somewhere:else", label="other")
    with pytest.raises(TilewrightError, match="declared twice"):
        registry.add_kernels([labelled, Kernel("rms_norm", "triton", "third:place", label="other")])
    assert known in registry.kernels_of("rms_norm") and labelled not in registry.kernels_of("rms_norm")


def test_what_families_share_belongs_to_their_kernels():
    files = {path.name for path in _sources("tilewright.ops.loss.triton")}
    assert {"triton.py", "configs.py", "triton_rows.py"} <= files and "kernel.py" not in files


def test_programs_that_a_kernel_does_not_import_bring_what_they_import():
    kernel = next(k for k in registry.kernels_of("linear") if k.backend == "tilelang")
    files = ["/".join(path.parts[-2:]) for path in kernel.sources()]
    assert {"linear/tilelang_programs.py", "activation/tilelang_programs.py", "ops/tilelang_rows.py"} <= set(files)
    assert len(files) == len(set(files))
